"""Demonstrations: round trips, windows, splits, and what a reader of broken data is told."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cebm.demonstrations import VERSION, DemonstrationError, Demonstrations
from waiting import PATIENCE

PUSHT = Path(__file__).parents[2] / "shared" / "data" / "pusht" / "pusht.npz"
FORMS = ["set.npz", "set"]
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def demonstrations(draw: st.DrawFn) -> Demonstrations:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)
    obs, actions = (
        draw(hnp.arrays(np.float32, (sum(lengths), draw(st.integers(1, 3))), elements=numbers)) for _ in range(2)
    )
    text = st.text(max_size=5)
    leaf = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    metadata = draw(st.dictionaries(text, leaf | text | st.lists(leaf, max_size=2), max_size=3))
    return Demonstrations.from_arrays(obs, actions, np.cumsum(lengths), metadata=metadata)


def example(lengths: tuple[int, ...] = (4, 1, 3), obs_dim: int = 2, act_dim: int = 1) -> Demonstrations:
    """Every value says where it belongs: hundreds for the episode, ones for the step, tenths for the column."""
    rows = np.array([100.0 * e + t for e, length in enumerate(lengths) for t in range(length)])
    obs, actions = (rows[:, None] + np.arange(dim) / 10 for dim in (obs_dim, act_dim))
    return Demonstrations.from_arrays(obs, -actions, np.cumsum(lengths), metadata={"seed": 3})


def assert_same(a: Demonstrations, b: Demonstrations) -> None:
    assert a.metadata == b.metadata
    for name in ("obs", "actions", "episode_ends"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.tobytes() == right.tobytes(), name


# In memory


def test_from_arrays_takes_any_numbers_and_counts() -> None:
    data = Demonstrations.from_arrays([[1, 2], [3, 4], [5, 6]], np.ones((3, 1), np.int16), [2, 3])
    assert (data.episodes, data.steps, data.obs_dim, data.act_dim) == (2, 3, 2, 1)
    assert data.obs.dtype == data.actions.dtype == np.float32 and data.episode_ends.dtype == np.int64
    np.testing.assert_array_equal(data.episode_starts, [0, 2])
    np.testing.assert_array_equal(data.episode(1)[0], [[5, 6]])
    np.testing.assert_array_equal(data.episode(0)[1], [[1], [1]])
    np.testing.assert_array_equal(data.episode(-1)[0], [[5, 6]])
    with pytest.raises(IndexError):
        data.episode(2)
    obs = np.zeros((3, 2), np.float32)
    assert Demonstrations.from_arrays(obs, obs, [3]).obs is obs, "float32 is not copied"


def test_from_episodes_is_the_inverse_of_episode() -> None:
    data = example()
    again = Demonstrations.from_episodes([data.episode(e) for e in range(data.episodes)], metadata=data.metadata)
    assert_same(data, again)


def test_reading_data_needs_neither_torch_nor_gymnasium() -> None:
    code = "import sys, cebm.demonstrations; assert not {'gymnasium', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_summary_says_what_is_there() -> None:
    text = example((4, 1, 3)).summary()
    for part in ("3 episodes", "8 steps", "1 to 4 per episode", "median 3", "2 columns in [0, 202.1]", "seed"):
        assert part in text, text


@given(demonstrations(), st.floats(0.01, 0.99), st.integers(0, 2**32))
@quick
def test_split_is_a_partition_by_episode(data: Demonstrations, fraction: float, seed: int) -> None:
    if data.episodes == 1:
        with pytest.raises(ValueError, match="one episode"):
            data.split(fraction, seed)
        return
    parts = data.split(fraction, seed)
    assert parts[0].episodes + parts[1].episodes == data.episodes and min(p.episodes for p in parts) >= 1
    assert abs(parts[1].episodes - fraction * data.episodes) <= 1

    def contents(demos: Demonstrations) -> list[tuple[bytes, bytes]]:
        pairs = (demos.episode(e) for e in range(demos.episodes))
        return [(obs.tobytes(), actions.tobytes()) for obs, actions in pairs]

    assert sorted(contents(parts[0]) + contents(parts[1])) == sorted(contents(data))
    for part, again in zip(parts, data.split(fraction, seed), strict=True):
        assert_same(part, again)


def test_split_depends_on_the_seed_and_checks_its_arguments() -> None:
    data = example((1,) * 40)
    chosen = {tuple(data.split(0.5, seed)[1].obs[:, 0]) for seed in range(10)}
    assert len(chosen) == 10
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="validation_fraction"):
            data.split(fraction, 0)
    with pytest.raises(ValueError, match="no episodes"):
        data.select([])


# Windows


def test_rows_are_spread_over_episodes() -> None:
    ends = np.array([1, 4, 9, 12, 30])
    data = Demonstrations.from_arrays(np.zeros((30, 2)), np.zeros((30, 1)), ends)
    windows = data.windows(1, 1)
    seen = np.zeros(30, bool)
    for seed in range(400):
        rows = windows.spread(5, seed)
        assert np.searchsorted(ends, rows, side="right").tolist() == [0, 1, 2, 3, 4]  # one of each
        fewer = np.searchsorted(ends, windows.spread(3, seed), side="right")
        assert len(set(fewer.tolist())) == 3 and (np.diff(fewer) > 0).all()
        seen[rows] = True
    assert seen.all()  # a step is missed 400 times with probability (17/18)⁴⁰⁰ < 2e-10
    # Fewer episodes than rows: all steps count, none twice.
    assert np.unique(windows.spread(6, 0)).size == 6 and windows.spread(99, 0).tolist() == list(range(30))
    assert windows.spread(5, 1).tolist() == windows.spread(5, 1).tolist()


def test_windows_by_hand() -> None:
    windows = example((4, 1, 3)).windows(history=2, horizon=3)
    obs, actions = windows[:]
    assert (len(windows), windows.obs_dim, windows.act_dim) == (8, 4, 3)
    np.testing.assert_allclose(obs[0], [0, 0.1, 0, 0.1])  # the start, repeated
    np.testing.assert_allclose(obs[3], [2, 2.1, 3, 3.1])  # oldest first
    np.testing.assert_allclose(obs[5], [200, 200.1, 200, 200.1])  # not the step before, which is episode 1
    np.testing.assert_allclose(
        actions[:6], -np.array([[0, 1, 2], [1, 2, 3], [2, 3, 3], [3, 3, 3], [100] * 3, [200, 201, 202]])
    )


@given(demonstrations(), st.integers(1, 8), st.integers(1, 8))
@quick
def test_windows_never_cross_episodes(data: Demonstrations, history: int, horizon: int) -> None:
    """Against a loop over episodes that pads lists."""
    obs, actions = data.windows(history, horizon)[:]
    row = 0
    for episode in range(data.episodes):
        seen, done = data.episode(episode)
        before = np.concatenate([seen[:1]] * (history - 1) + [seen])
        after = np.concatenate([done] + [done[-1:]] * (horizon - 1))
        for t in range(len(seen)):
            assert obs[row].tobytes() == before[t : t + history].tobytes()
            assert actions[row].tobytes() == after[t : t + horizon].tobytes()
            row += 1
    assert row == len(obs) == len(actions) == data.steps


def test_windows_are_gathered_by_batches_of_indices() -> None:
    data = example((4, 1, 3))
    windows = data.windows(history=3, horizon=2)
    obs, actions = windows[:]
    mask = np.arange(8) % 3 == 0
    for indices in ([5, 0, 5], np.array([7, 2], np.int32), slice(1, None, 2), 3, -1, mask, np.array([-8, 7])):
        rows = np.atleast_1d(np.arange(8)[indices])
        batch = windows[indices]
        np.testing.assert_array_equal(batch[0], obs[rows])
        np.testing.assert_array_equal(batch[1], actions[rows])
    assert [part.shape for part in windows[[]]] == [(0, 6), (0, 2)]
    plain = data.windows()[:]
    np.testing.assert_array_equal(plain[0], data.obs)
    np.testing.assert_array_equal(plain[1], data.actions)
    for indices in (8, -9, [0.5], [[0, 1]], np.ones(3, np.bool_)):
        with pytest.raises(IndexError):
            windows[indices]
    for kwargs, name in (({"history": 0}, "history"), ({"horizon": -1}, "horizon")):
        with pytest.raises(ValueError, match=f"{name} is"):
            data.windows(**kwargs)


# On disk


@pytest.mark.parametrize("form", FORMS)
@given(data=demonstrations())
@quick
def test_save_and_load_give_the_same(form: str, data: Demonstrations, tmp_path: Path) -> None:
    """Over an existing set, which the examples before left."""
    data.save(tmp_path / form)
    assert_same(Demonstrations.load(tmp_path / form), data)
    assert len(list(tmp_path.iterdir())) == 1, "temporary files stay behind"
    if form == "set":
        assert len(list((tmp_path / form).iterdir())) == 4, "arrays of the set before stay behind"


@pytest.mark.parametrize("form", FORMS)
def test_the_same_set_is_the_same_bytes(form: str, tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        target = tmp_path / name / form
        example().save(target)
        files = [target] if target.is_file() else sorted(target.iterdir())
        contents.append([(file.name, file.read_bytes()) for file in files])
    assert contents[0] == contents[1]


def test_directory_is_memory_mapped_and_windows_read_from_it(tmp_path: Path) -> None:
    example().save(tmp_path / "set")
    data = Demonstrations.load(tmp_path / "set")
    assert isinstance(data.obs, np.memmap) and isinstance(data.actions, np.memmap)
    batch = data.windows(history=2, horizon=2)[[6, 1]]
    np.testing.assert_array_equal(batch[0], example().windows(history=2, horizon=2)[[6, 1]][0])
    assert type(batch[0]) is np.ndarray
    # A set may be replaced while it is open.
    example((2, 2)).save(tmp_path / "set")
    np.testing.assert_array_equal(data.obs, example().obs)
    data.save(tmp_path / "set")
    assert_same(Demonstrations.load(tmp_path / "set"), example())


def test_npz_holds_plain_arrays_for_other_programs(tmp_path: Path) -> None:
    example().save(tmp_path / "deep" / "set.npz")
    with np.load(tmp_path / "deep" / "set.npz", allow_pickle=False) as file:
        assert sorted(file.files) == ["action", "episode_ends", "header", "obs"]
        header = json.loads(str(file["header"]))
        np.testing.assert_array_equal(file["action"], example().actions)
    assert len(header.pop("header_sha256")) == 64
    assert header == {"format": "cebm.demonstrations", "version": VERSION, "metadata": {"seed": 3}}


def test_arrays_of_another_program_load_by_their_keys(tmp_path: Path) -> None:
    data = example()
    path = tmp_path / "foreign.npz"
    np.savez_compressed(
        path, state=data.obs.astype(np.float64), u=data.actions, ends=data.episode_ends.astype(np.int32)
    )
    loaded = Demonstrations.load(path, obs_key="state", action_key="u", ends_key="ends")
    np.testing.assert_array_equal(loaded.obs, data.obs)
    np.testing.assert_array_equal(loaded.episode_ends, data.episode_ends)
    assert loaded.metadata == {}
    with pytest.raises(DemonstrationError, match=r"foreign\.npz: there is no 'obs'; it holds 'state', 'u', 'ends'"):
        Demonstrations.load(path)


@pytest.mark.skipif(not PUSHT.exists(), reason="the Push-T demonstrations are not beside the repository")
def test_push_t_loads() -> None:
    data = Demonstrations.load(PUSHT)
    assert (data.episodes, data.steps, data.obs_dim, data.act_dim) == (206, 25_650, 5, 2)
    assert data.episode_ends[0] == 161
    obs, actions = data.windows(history=2, horizon=8)[[0, 160, 161]]
    np.testing.assert_array_equal(obs[0, :5], obs[0, 5:])
    np.testing.assert_array_equal(obs[2, :5], data.obs[161])
    np.testing.assert_array_equal(actions[1].reshape(8, 2), np.tile(data.actions[160], (8, 1)))
    assert Demonstrations.load(PUSHT, obs_key="keypoint").obs_dim == 18


def test_a_save_that_fails_leaves_the_old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in FORMS:
        example().save(tmp_path / form)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for form in FORMS:
        with pytest.raises(OSError, match="No space"):
            example((5, 5)).save(tmp_path / form)
        assert_same(Demonstrations.load(tmp_path / form), example())
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        example().save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["set.txt", "set.NPZ", "set.npy", "v1.2"])
def test_other_suffixes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}: the name ends in '\.\w+'; give one that ends in '\.npz'"):
        example().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["set.txt", "v1.2", "set.npz"])
def test_existing_directories_keep_their_form(name: str, tmp_path: Path) -> None:
    """Whatever they are called, empty or with a set in them."""
    (tmp_path / name).mkdir()
    for data in (example(), example((2, 2))):
        data.save(tmp_path / name)
        assert_same(Demonstrations.load(tmp_path / name), data)
    (tmp_path / name / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        example().save(tmp_path / name)


@pytest.mark.parametrize("form", FORMS)
def test_metadata_that_cannot_be_read_again_is_not_saved(form: str, tmp_path: Path) -> None:
    data = example()
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for metadata in ({"long": "x" * 4_000_000}, {"deep": deep}, {"when": object()}):
        with pytest.raises(ValueError, match="metadata"):
            Demonstrations(data.obs, data.actions, data.episode_ends, metadata).save(tmp_path / form)
    assert not list(tmp_path.iterdir())
    metadata = {"long": "x" * 3_000_000}
    Demonstrations(data.obs, data.actions, data.episode_ends, metadata).save(tmp_path / form)
    assert Demonstrations.load(tmp_path / form).metadata == metadata


# Precision and fingerprint


def test_float32_is_kept_and_small_types_become_float32() -> None:
    for dtype in ("bool", "int8", "uint16", "float16", ">f4", "float64", "int64", "longdouble"):
        obs = np.arange(8).reshape(4, 2).astype(dtype)
        data = Demonstrations.from_arrays(obs, obs, [4])
        assert data.obs.dtype == data.actions.dtype == np.float32 and data.obs.dtype.isnative
        np.testing.assert_array_equal(data.obs, obs.astype(np.float64))


@pytest.mark.parametrize(
    ("column", "kept"),
    [
        (5e6 + np.array([-1.0, -0.3, 0.2, 1.0]), True),  # rounds to whole and half numbers
        (5e6 + np.array([-1e4, 0.3, 0.2, 1e4]), False),  # loses at most 0.25 of 2e4
        (np.array([16_777_216, 16_777_217, 16_777_218, 16_777_219]), True),  # integers that float32 cannot tell apart
        (np.array([0, 2**40 + 1, 2**41 + 3, 2**42 + 1]), False),
        (np.full(4, 5e6 + 0.3), False),  # no range
        (1.0 + np.array([0.0, 1.0, 2.0, 0.0]) * 2e-16, False),  # rounding noise of float64
        (1e300 * np.array([1.0, 2.0, -1.0, 0.5]), True),
        (np.full(4, 1e39), True),  # infinite in float32, although it has no range
        (1e-60 * np.array([1.0, 2.0, 3.0, 4.0]), True),  # zero in float32
        (np.array([1e-60, 1.0, 0.5, -1.0]), False),
        (np.linspace(-1, 1, 4), False),
    ],
)
@pytest.mark.parametrize("chunk", [2, 1 << 20])
def test_float64_is_kept_where_float32_is_too_coarse(
    column: np.ndarray, kept: bool, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided for each array from all of its columns, in blocks of any size."""
    monkeypatch.setattr("cebm.demonstrations.large.CHUNK", chunk)
    actions = np.stack([np.linspace(0, 1, 4), column], axis=1)
    data = Demonstrations.from_arrays(np.linspace(0, 1, 8).reshape(4, 2), actions.copy(), [1, 4])
    assert data.obs.dtype == np.float32 and data.actions.dtype == (np.float64 if kept else np.float32)
    np.testing.assert_array_equal(data.actions, actions if kept else actions.astype(np.float32))
    assert data.windows(history=2, horizon=2)[:][1].dtype == data.actions.dtype
    assert data.windows(history=2, horizon=2)[:][0].dtype == np.float32
    parts = [data.episode(e) for e in range(2)]
    assert Demonstrations.from_episodes([(obs, wide.astype(np.float64)) for obs, wide in parts]).steps == 4
    for form in FORMS:
        for part in (data, data.select([0])):  # a single step has no range, and keeps the precision of the whole
            part.save(tmp_path / form)
            assert part.actions.dtype == data.actions.dtype
            assert_same(Demonstrations.load(tmp_path / form), part)


def test_memory_mapped_arrays_are_not_copied(tmp_path: Path) -> None:
    random = np.random.default_rng()
    steps, mega = 1 << 20, 1 << 20
    for offset, dtype in ((0.0, np.float32), (5e8, np.float64)):
        obs = (offset + random.random((steps, 16))).astype(dtype)
        Demonstrations.from_arrays(obs, obs[:, :1], [steps]).save(tmp_path / "set")
        tracemalloc.start()
        try:
            data = Demonstrations.load(tmp_path / "set")
            data.fingerprint()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert isinstance(data.obs, np.memmap) and data.obs.dtype == dtype
        assert peak < 40 * mega < obs.nbytes  # a few blocks of 8 MB
        assert Demonstrations.from_arrays(data.obs, data.actions, [steps]).obs is data.obs


def test_ranges_beyond_float64_are_named() -> None:
    actions = np.array([[0.0, -1.5e308], [1.0, 1.5e308]])
    with pytest.raises(DemonstrationError, match=r"action column 1 goes from -1.5e\+308 to 1.5e\+308, a range beyond"):
        Demonstrations.from_arrays(actions[:, :1], actions, [2])


def test_fingerprint_is_of_the_contents_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = example()
    print_of = data.fingerprint()
    assert len(print_of) == 16 and int(print_of, 16) >= 0
    same = [
        Demonstrations(data.obs, data.actions, data.episode_ends, {"other": 1}),
        Demonstrations(np.asfortranarray(data.obs), data.actions[::1], data.episode_ends),
        Demonstrations(np.repeat(data.obs, 2, 0)[::2], data.actions, data.episode_ends),
    ]
    for form in FORMS:
        data.save(tmp_path / form)
        same.append(Demonstrations.load(tmp_path / form))
    changed = data.obs.copy()
    changed[7, 1] = np.nextafter(changed[7, 1], np.float32(0))
    others = [
        Demonstrations(changed, data.actions, data.episode_ends),
        Demonstrations(data.obs, -data.actions, data.episode_ends),
        Demonstrations(data.obs, data.actions, np.array([4, 6, 8])),
        Demonstrations(data.obs, data.actions, np.array([8])),
        Demonstrations(data.obs.astype(np.float64), data.actions, data.episode_ends),
        Demonstrations(data.obs.reshape(4, 4), data.actions.reshape(4, 2), data.episode_ends),
        Demonstrations(data.actions, data.obs, data.episode_ends),
        data.select([1, 0, 2]),
    ]
    for chunk in (3, 1 << 20):
        monkeypatch.setattr("cebm.demonstrations.large.CHUNK", chunk)
        assert {one.fingerprint() for one in same} == {print_of}
        assert len({print_of, *(one.fingerprint() for one in others)}) == 1 + len(others)


def test_fingerprint_stays_the_same_between_versions() -> None:
    """Runs store it: a change here makes every old run believe that its data changed."""
    assert example().fingerprint() == "ff08fab2e8bb081a"


# Broken data


def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Arguments of `from_arrays`, changed: 3 episodes of 4, 1 and 3 steps, 2 and 1 columns."""
    data = example()
    arrays: dict[str, Any] = {"obs": data.obs.copy(), "actions": data.actions.copy(), "episode_ends": [4, 5, 8]}
    change(arrays)
    return arrays


def put(key: str, index: tuple[int, int], value: float) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays[key].__setitem__(index, value)


def swap(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("obs", (4, 1), np.nan), "here: episode 1: obs column 1 is nan at step 4"),
        (put("actions", (7, 0), -np.inf), "here: episode 2: action column 0 is -inf at step 7"),
        (swap("obs", np.full((8, 2), np.inf)), "here: episode 0: obs column 0 is inf"),
        (
            swap("obs", [[1.0, 2.0]] * 5 + [[1.0]] + [[1.0, 2.0]] * 2),
            "here: episode 2: obs is ragged, row 5 has shape (1,)",
        ),
        (swap("actions", [[1.0, [2.0, 3.0]]] * 8), "here: action is ragged"),
        (swap("obs", np.zeros(8)), "here: obs has shape (8,), expected [steps, columns]"),
        (swap("obs", np.zeros((8, 0))), "here: obs has shape (8, 0)"),
        (swap("obs", np.full((8, 2), "x")), "here: obs holds <U1, expected numbers"),
        (swap("actions", np.full((8, 1), None)), "here: action holds object"),
        (swap("actions", np.zeros((7, 1))), "here: obs has 8 steps, action has 7"),
        (swap("episode_ends", [4, 5, 9]), "the last episode, 2, ends at step 9, but there are 8 steps"),
        (swap("episode_ends", [4, 5]), "ends at step 5, but there are 8 steps"),
        (swap("episode_ends", [4, 4, 8]), "here: episode 1: episode_ends must increase, but 4 follows 4"),
        (swap("episode_ends", [0, 8]), "here: episode 0: episode_ends must increase, but 0 follows 0"),
        (swap("episode_ends", [5, 3, 8]), "here: episode 1: episode_ends must increase, but 3 follows 5"),
        # The difference of the first two overflows, and would be positive.
        (
            swap("episode_ends", [2**63 - 1, -2, 8]),
            "here: episode 1: episode_ends must increase, but -2 follows 9223372036854775807",
        ),
        (
            swap("episode_ends", np.array([4, 2**63 + 8], np.uint64)),
            "here: episode 1: episode_ends is 92233720368547758",
        ),
        (swap("episode_ends", np.array([2**64 - 1], np.uint64)), "here: episode 0: episode_ends is 184467440737095516"),
        (swap("episode_ends", [-(2**63), 2**63 - 1, 8]), "here: episode 0: episode_ends must increase, but -9223"),
        (
            swap("episode_ends", np.ma.array([4, 5, 8], mask=[False, True, False])),
            "here: episode 1: episode_ends is masked",
        ),
        (swap("episode_ends", []), "here: episode_ends has shape (0,)"),
        (swap("episode_ends", [[4], [5, 8]]), "here: episode_ends is ragged"),
        (swap("episode_ends", np.array(8)), "here: episode_ends has shape ()"),
        (swap("episode_ends", [4.5, 8.0]), "here: episode_ends holds float64, expected integers"),
        (swap("metadata", {"when": object()}), "here: metadata does not fit JSON"),
        (swap("metadata", {"best": float("nan")}), "here: metadata does not fit JSON"),
    ],
)
def test_broken_arrays_are_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(DemonstrationError) as caught:
        Demonstrations.from_arrays(**broken(change), source="here")
    assert message in str(caught.value)


def test_masked_values_are_missing_and_refused() -> None:
    """`np.asarray` would silently read the value under the mask."""
    data, ends = example(), [4, 5, 8]
    for value in (np.nan, 7.0):
        obs = np.ma.array(data.obs.copy())
        obs[4, 1] = value
        obs.mask = np.zeros(obs.shape, bool)
        obs.mask[4, 1] = True
        parts = [(obs[a:b], data.actions[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        for build in (
            lambda obs=obs: Demonstrations.from_arrays(obs, data.actions, ends),
            lambda obs=obs: Demonstrations.from_arrays(list(obs), data.actions, ends),
            lambda parts=parts: Demonstrations.from_episodes(parts),
            lambda parts=parts: Demonstrations.from_episodes([(list(x), y) for x, y in parts]),
        ):
            with pytest.raises(DemonstrationError, match="episode 1: obs column 1 is masked at step 4"):
                build()


def test_arrays_of_other_classes_become_plain_arrays() -> None:
    class Own(np.ndarray):
        pass

    data = example()
    for convert in (np.ma.array, lambda array: array.view(Own), lambda array: [np.ma.array(row) for row in array]):
        read = Demonstrations.from_arrays(convert(data.obs), convert(data.actions), np.ma.array(data.episode_ends))
        assert type(read.obs) is type(read.actions) is type(read.episode_ends) is np.ndarray
        assert_same(bare(read), bare(data))
    masked = [(np.ma.array(obs), actions) for obs, actions in map(data.episode, range(data.episodes))]
    assert_same(Demonstrations.from_episodes(masked), bare(data))


def test_nan_is_found_in_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at in pieces; here the pieces are of 3 rows."""
    monkeypatch.setattr("cebm.demonstrations.large.CHUNK", 7)
    for row in range(8):
        arrays = broken(put("obs", (row, 0), np.nan))
        with pytest.raises(DemonstrationError, match=f"obs column 0 is nan at step {row}$"):
            Demonstrations.from_arrays(**arrays)


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        ((np.zeros((3, 2)), np.zeros((3, 3))), "episode 1: action has 3 columns, the dataset has 1"),
        ((np.zeros((3, 5)), np.zeros((3, 1))), "episode 1: obs has 5 columns, the dataset has 2"),
        ((np.zeros((3, 2)), np.zeros((4, 1))), "episode 1: obs has 3 steps, action has 4"),
        ((np.zeros(2), np.zeros((1, 1))), "episode 1: obs has shape (2,)"),
        ((np.zeros((2, 2)), [[0.0], [0.0, 1.0]]), "episode 1: action is ragged"),
        ((np.zeros((0, 2)), np.zeros((0, 1))), "episode 1: episode_ends must increase, but 4 follows 4"),
    ],
)
def test_broken_episodes_are_named(episode: tuple[Any, Any], message: str) -> None:
    with pytest.raises(DemonstrationError) as caught:
        Demonstrations.from_episodes([example().episode(0), episode])
    assert message in str(caught.value)
    with pytest.raises(DemonstrationError, match="no episodes"):
        Demonstrations.from_episodes([])


@pytest.mark.parametrize("form", FORMS)
def test_nan_in_a_file_names_the_file(form: str, tmp_path: Path) -> None:
    data = example()
    data.actions[5, 0] = np.nan
    data.save(tmp_path / form)
    with pytest.raises(DemonstrationError) as caught:
        Demonstrations.load(tmp_path / form)
    assert str(caught.value) == f"{tmp_path / form}: episode 2: action column 0 is nan at step 5"


@given(cut=st.floats(0, 1, exclude_max=True))
@quick
def test_truncated_npz(cut: float, tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    example().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(DemonstrationError, match=r"set\.npz: not a readable \.npz"):
        Demonstrations.load(path)


@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(quick, max_examples=150)
def test_damaged_npz_is_refused_or_reads_the_same(place: float, flip: int, tmp_path: Path) -> None:
    """Zip has fields that nobody reads, such as dates; everywhere else a changed byte must be noticed."""
    path = tmp_path / "set.npz"
    example().save(path)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= flip
    path.write_bytes(data)
    try:
        loaded = Demonstrations.load(path)
    except DemonstrationError as error:
        assert "set.npz" in str(error)
    else:
        assert_same(loaded, example())


def test_no_flipped_byte_of_an_npz_goes_unnoticed(tmp_path: Path) -> None:
    """Every third byte, with a random flip: an error, or the same set with its metadata."""
    path = tmp_path / "set.npz"
    example((2, 1)).save(path)
    whole = path.read_bytes()
    random = np.random.default_rng()
    flips = {place: int(random.integers(1, 256)) for place in range(int(random.integers(3)), len(whole), 3)}
    flips[whole.rindex(b"header.npy")] = ord("h") ^ ord("H")  # hides the header from the table of contents
    for place, flip in flips.items():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        try:
            loaded = Demonstrations.load(path)
        except DemonstrationError as error:
            assert "set.npz" in str(error)
        else:
            assert_same(loaded, example((2, 1)))


def test_a_changed_shape_is_noticed(tmp_path: Path) -> None:
    """Fewer columns need fewer bytes, so numpy alone would stop before the end and its checksum."""
    path = tmp_path / "set.npz"
    example((30_000,)).save(path)
    content = path.read_bytes()
    assert content.count(b"(30000, 2)") == 1
    path.write_bytes(content.replace(b"(30000, 2)", b"(30000, 1)"))
    with pytest.raises(DemonstrationError, match="'obs' is longer than its shape says"):
        Demonstrations.load(path)


def bare(data: Demonstrations) -> Demonstrations:
    return Demonstrations(data.obs, data.actions, data.episode_ends)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object], seal: bool = True) -> None:
    """Changes the JSON header of a set in either form, and by default its checksum too."""

    def changed(text: str) -> str:
        header = json.loads(text)
        header.pop("header_sha256")
        change(header)
        if seal:
            header["header_sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
        return json.dumps(header)

    if path.is_dir():
        (path / "header.json").write_text(changed((path / "header.json").read_text()))
        return
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "header": np.array(changed(str(arrays["header"])))})


@pytest.mark.parametrize("form", FORMS)
def test_sets_of_version_1_have_no_checksum_and_load(form: str, tmp_path: Path) -> None:
    path = tmp_path / form
    example().save(path)
    rewrite_header(path, lambda header: header.update(version=1), seal=False)
    assert_same(Demonstrations.load(path), example())
    example().save(path)
    # A checksum that is there counts in any version.
    rewrite_header(path, lambda header: header.update(version=1, header_sha256="0" * 64), seal=False)
    with pytest.raises(DemonstrationError, match="its checksum differs"):
        Demonstrations.load(path)
    example().save(path)
    rewrite_header(path, lambda header: None, seal=False)
    with pytest.raises(DemonstrationError, match="its checksum differs"):
        Demonstrations.load(path)


def test_no_flipped_byte_of_a_directory_goes_unnoticed(tmp_path: Path) -> None:
    """Each byte of each file once, with a random flip: an error, or the same set with its metadata."""
    target = tmp_path / "set"
    example((2, 1)).save(target)
    random = np.random.default_rng()
    for path in sorted(target.iterdir()):
        whole = path.read_bytes()
        for place, flip in enumerate(random.integers(1, 256, len(whole)).tolist()):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            try:
                loaded = Demonstrations.load(target)
            except DemonstrationError as error:
                assert str(target) in str(error)
            else:
                assert_same(loaded, example((2, 1)))
        path.write_bytes(whole)
    # A digit of the metadata: still JSON, and other data.
    text = (target / "header.json").read_text()
    (target / "header.json").write_text(text.replace('"seed": 3', '"seed": 4'))
    with pytest.raises(DemonstrationError, match=r"header\.json: the header is damaged or altered"):
        Demonstrations.load(target)


@pytest.mark.parametrize("form", FORMS)
def test_white_space_and_order_of_the_header_do_not_count(form: str, tmp_path: Path) -> None:
    example().save(tmp_path / form)
    rewrite_header(tmp_path / form, lambda header: header.update(metadata=header.pop("metadata")))
    assert_same(Demonstrations.load(tmp_path / form), example())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.update(version=VERSION + 1), f"written in format {VERSION + 1}, this cebm reads up to"),
        (lambda header: header.update(version="1"), "the header's version is '1'"),
        (lambda header: header.pop("version"), "the header's version is None"),
        (
            lambda header: header.update(format="other"),
            "the header does not say that the format is cebm.demonstrations",
        ),
        (lambda header: header.update(metadata=[1]), "the header's metadata is not a JSON object"),
    ],
)
def test_headers_that_are_refused(
    form: str, change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / form
    example().save(path)
    rewrite_header(path, change)
    with pytest.raises(DemonstrationError) as caught:
        Demonstrations.load(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("arrays"), "lists no arrays"),
        (lambda header: header["arrays"].pop("action"), "there is no 'action'"),
        (lambda header: header["arrays"]["obs"].pop("crc32"), "the entry of 'obs' lacks 'file' or 'crc32'"),
        (lambda header: header["arrays"]["obs"].update(file="../obs.npy"), "'../obs.npy' is not a file of this"),
        (lambda header: header["arrays"]["obs"].update(file="obs.npy"), "obs.npy: the file is missing"),
    ],
)
def test_directory_headers_that_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    example().save(tmp_path / "set")
    rewrite_header(tmp_path / "set", change)
    with pytest.raises(DemonstrationError) as caught:
        Demonstrations.load(tmp_path / "set")
    assert str(tmp_path / "set") in str(caught.value) and message in str(caught.value)


def test_damaged_directories(tmp_path: Path) -> None:
    example().save(tmp_path / "set")
    files = sorted((tmp_path / "set").iterdir())
    assert len(files) == 4
    for file in files:
        content = file.read_bytes()
        for damage in (content[:-1], content[: len(content) // 2], b"\xff" + content[1:], b""):
            file.write_bytes(damage)
            with pytest.raises(DemonstrationError, match="set"):
                Demonstrations.load(tmp_path / "set")
        file.write_bytes(content)
    assert_same(Demonstrations.load(tmp_path / "set"), example())
    (tmp_path / "set" / "header.json").unlink()
    with pytest.raises(DemonstrationError, match=r"no header\.json"):
        Demonstrations.load(tmp_path / "set")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    with pytest.raises(FileNotFoundError, match=r"set\.npz"):
        Demonstrations.load(path)
    for content in (b"", b"hello", b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(DemonstrationError, match="not a readable"):
            Demonstrations.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        for key in ("obs", "action", "episode_ends"):
            archive.writestr(f"{key}.npy", b"not an array")
    with pytest.raises(DemonstrationError, match="cannot read 'obs'"):
        Demonstrations.load(path)


def npy(text: str, data: bytes = b"", version: int = 1) -> bytes:
    """A `.npy` file with any header."""
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode("latin1") + data


def shaped(shape: str, dtype: str = "<f4") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy("{'descr': '<f4', (\n"), "cannot"),  # TokenError
        (npy('{\'descr\': """'), "cannot"),
        (npy("-" * 9_900 + "1"), "cannot"),  # MemoryError
        (npy("1+" * 4_900 + "1"), "cannot"),  # RecursionError
        (npy("(" * 5_000), "cannot"),
        (npy("\0"), "cannot"),
        (npy(shaped("(8, 2)"))[:9], "does not begin like a .npy file"),
        (npy(shaped("(8, 2)"))[:40], "cannot"),
        (npy(shaped("(8, 2)")), "shorter than its shape says"),
        (npy(shaped("(8, 2)"), bytes(65)), "longer than its shape says"),
        (npy(shaped("(-8, -2)"), bytes(64)), "shape (-8, -2)"),
        (npy(shaped(f"({2**62}, 4)"), bytes(64)), "shorter than its shape says"),  # 2**66 bytes, 0 in int64
        (npy(shaped(f"({10**12},)", "|V0")), "of |V0"),
        (npy(shaped("(8, 2)", "nonsense"), bytes(64)), "cannot"),
        (npy(shaped("(8, 2)", "|O"), bytes(64)), "pickle"),
        (npy(shaped("(8, 2)"), bytes(64), version=3), ".npy format 3.0"),
        (npy(shaped("(8, 2)"), bytes(64), version=9), ".npy format 9.0"),
        (npy(" " * 100_000, version=2), ".npy header has 100,000 bytes"),
        (npy("{" + "'a': 1, " * 2_000 + "}"), "header has 16,002 bytes"),
    ],
    ids=range(19),
)
@pytest.mark.parametrize("key", ["obs", "episode_ends"])
def test_damaged_arrays_name_the_file(key: str, content: bytes, message: str, tmp_path: Path) -> None:
    """With right checksums, so that numpy's parser sees them."""
    example().save(tmp_path / "set")
    array = next((tmp_path / "set").glob(f"{key}-*.npy"))
    array.write_bytes(content)
    rewrite_header(tmp_path / "set", lambda h: h["arrays"][key].update(crc32=f"{zlib.crc32(content):08x}"))
    example().save(tmp_path / "set.npz")
    replace_member(tmp_path / "set.npz", key, content)
    for form, named in (("set", str(array)), ("set.npz", repr(key))):
        with pytest.raises(DemonstrationError) as caught:
            Demonstrations.load(tmp_path / form)
        text = str(caught.value)
        assert text.startswith(str(tmp_path / form)) and named in text and message in text, text


def replace_member(path: Path, key: str, content: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, f"{key}.npy": content}.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("form", FORMS)
def test_deeply_nested_headers_are_refused(form: str, tmp_path: Path) -> None:
    path = tmp_path / form
    example().save(path)
    text = "[" * 100_000
    if path.is_dir():
        (path / "header.json").write_text(text)
    else:
        with np.load(path) as file:
            arrays = dict(file)
        np.savez(path, **{**arrays, "header": np.array(text)})
    with pytest.raises(DemonstrationError, match="the header is not readable JSON"):
        Demonstrations.load(path)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DemonstrationError, match="metadata does not fit JSON"):
        Demonstrations.from_arrays([[1.0]], [[1.0]], [1], metadata={"deep": deep})


def test_odd_files_in_a_directory_are_named(tmp_path: Path) -> None:
    target = tmp_path / "set"
    for name, message in (("..", r"set/\.\.: cannot read"), ("a\0b", "cannot read"), ("", "not a file of this")):
        example().save(target)
        rewrite_header(target, lambda h, name=name: h["arrays"]["obs"].update(file=name))
        with pytest.raises(DemonstrationError, match=message):
            Demonstrations.load(target)
    (target / "header.json").unlink()
    (target / "header.json").mkdir()
    with pytest.raises(DemonstrationError, match=r"header\.json: cannot be read"):
        Demonstrations.load(target)


def peak_of_refusal(path: Path, message: str) -> int:
    """Bytes allocated at once while `path` is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(DemonstrationError, match=message):
            Demonstrations.load(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def write_zeros(archive: zipfile.ZipFile, key: str, start: bytes, size: int) -> None:
    """A member of `start` and `size` zero bytes, written in pieces."""
    with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
        member.write(start)
        for begin in range(0, size, 1 << 20):
            member.write(bytes(min(1 << 20, size - begin)))


def test_a_zip_bomb_is_refused_before_it_expands(tmp_path: Path) -> None:
    path, mega = tmp_path / "bomb.npz", 1 << 20
    for key, start, size, message in (
        ("obs", npy(shaped(f"({75 * mega}, 1)")), 300 * mega, r"'obs' would expand from [\d,]+ to 314,57\d,\d+ bytes"),
        ("header", npy(shaped("()", f"<U{5 * mega}")), 20 * mega, r"the header has 20,971,\d+ bytes"),
        # Small enough to expand, but the shape or the length of numpy's header asks for more.
        ("obs", npy(shaped(f"({10**12}, 1)")), 100 * mega, "shorter than its shape says"),
        ("obs", b"\x93NUMPY\x02\x00" + struct.pack("<I", 99 * mega), 100 * mega, "header has 103,809,024 bytes"),
    ):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            write_zeros(archive, key, start, size)
            for other in {"obs", "action", "episode_ends"} - {key}:
                archive.writestr(f"{other}.npy", npy(shaped("(1, 1)"), bytes(4)))
        assert path.stat().st_size < 2 * mega
        assert peak_of_refusal(path, message) < 4 * mega
    # Python does not limit how much this method expands per read.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        for key in ("obs", "action", "episode_ends"):
            archive.writestr(f"{key}.npy", npy(shaped("(1, 1)"), bytes(4)))
    with pytest.raises(DemonstrationError, match="'obs': its zip compression method is 12"):
        Demonstrations.load(path)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "header.json").write_bytes(b" " * (17 * mega))
    with pytest.raises(DemonstrationError, match=r"header\.json: the header has more than 16,777,216 bytes"):
        Demonstrations.load(tmp_path / "set")


def test_constants_compress_well_and_load(tmp_path: Path) -> None:
    """They shrink about 1000-fold, more than any real recording, and are still no bomb."""
    path = tmp_path / "still.npz"
    steps = 1 << 20
    np.savez_compressed(path, obs=np.zeros((steps, 2)), action=np.ones((steps, 1)), episode_ends=[steps])
    assert path.stat().st_size * 500 < 24 * steps
    assert Demonstrations.load(path).steps == steps


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    """An object array is a pickle, which could run anything: the marker must stay absent."""
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return marker.touch, ()

    data = example()
    objects = np.empty((8, 2), object)
    objects[:] = Evil()
    path = tmp_path / "set.npz"
    np.savez(path, obs=objects, action=data.actions, episode_ends=data.episode_ends)
    with pytest.raises(DemonstrationError, match=r"set\.npz: cannot read 'obs'.*allow_pickle"):
        Demonstrations.load(path)
    example().save(tmp_path / "set")
    array = next((tmp_path / "set").glob("obs-*.npy"))
    np.save(array, objects)
    rewrite_header(tmp_path / "set", lambda h: h["arrays"]["obs"].update(crc32=f"{zlib.crc32(array.read_bytes()):08x}"))
    with pytest.raises(DemonstrationError, match=r"obs-.*\.npy: cannot read the array: it is a pickle"):
        Demonstrations.load(tmp_path / "set")
    assert not marker.exists()


def test_an_interrupted_first_save_can_be_repeated(tmp_path: Path) -> None:
    """What a killed process leaves in a new directory: arrays, no header."""
    example().save(tmp_path / "set")
    shutil.copy(next((tmp_path / "set").glob("obs-*.npy")), tmp_path / "set" / ".obs.tmp")
    (tmp_path / "set" / "header.json").unlink()
    example((2, 3)).save(tmp_path / "set")
    assert_same(Demonstrations.load(tmp_path / "set"), example((2, 3)))
