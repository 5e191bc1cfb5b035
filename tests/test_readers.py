"""Every foreign format: the same small set comes back, whatever the file is called; and what is refused, by name."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cebm
from cebm.cli import main
from cebm.demonstrations import DemonstrationError, Demonstrations, open_demonstrations
from cebm.demonstrations.readers import recognise, video_frames
from cebm.runs import load_metrics
from cebm.spaces import Part
from tests.readers_files import (
    ENDS,
    FORMATS,
    LENGTHS,
    WORDS,
    flags,
    ids,
    table,
    values,
    write_csv,
    write_lerobot,
)

SHARED = Path(__file__).parents[2] / "shared" / "data"
PUSHT = SHARED / "pusht"
LEROBOT = SHARED / "lerobot_v3"


def read(path: Any, **words: Any) -> Demonstrations:
    return open_demonstrations(path, **words)


# -------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_set(name: str, tmp_path: Path) -> None:
    """Under a name that says nothing, so that content decides."""
    obs, actions = values()
    words = FORMATS[name](tmp_path / "set.npz", obs, actions)
    data = read(tmp_path / "set.npz", **words)
    np.testing.assert_array_equal(data.obs, obs)
    np.testing.assert_array_equal(data.actions, actions)
    np.testing.assert_array_equal(data.episode_ends, ENDS)
    assert data.obs.dtype == data.actions.dtype == np.float32
    assert recognise(tmp_path / "set.npz") == name.rstrip("23")
    assert data.metadata["read"]["format"].startswith({"hdf5": "robomimic"}.get(name, name.rstrip("23")))


@pytest.mark.parametrize("name", FORMATS)
def test_a_set_that_grows_too_large_for_memory_is_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of a few bytes, and blocks of a few rows."""
    monkeypatch.setattr("cebm.demonstrations.large.LARGE", 20)
    for place in ("large", "readers.assembling"):
        monkeypatch.setattr(f"cebm.demonstrations.{place}.CHUNK", 7)
    obs, actions = values()
    data = read(tmp_path / "set.npz", **FORMATS[name](tmp_path / "set.npz", obs, actions))
    np.testing.assert_array_equal(data.obs, obs)
    np.testing.assert_array_equal(data.actions, actions)
    split = data.split(0.4, 0)
    assert sorted(part.steps for part in split) == sorted([8 - split[1].steps, split[1].steps])
    data.save(tmp_path / "ours")
    np.testing.assert_array_equal(read(tmp_path / "ours").obs, obs)


def test_our_own_files_are_read_as_they_were(tmp_path: Path) -> None:
    obs, actions = values()
    parts = (Part("joints", (2,), ("a", "b")), Part("tip", (1,)))
    data = Demonstrations.from_arrays(obs, actions, ENDS, metadata={"task": None}, parts=parts)
    for name in ("set", "set.npz"):
        data.save(tmp_path / name)
        found = read(tmp_path / name)
        assert found.fingerprint() == data.fingerprint() and found.metadata == data.metadata
        assert found.parts == parts and recognise(tmp_path / name) == "cebm"
        some = read(tmp_path / name, obs=["tip", "b"])
        np.testing.assert_array_equal(some.obs, obs[:, [2, 1]])
        np.testing.assert_array_equal(some.actions, actions)
        with pytest.raises(DemonstrationError, match=r"there is no 'c' for obs; it holds 'joints' \(8, 2\)"):
            read(tmp_path / name, obs="c")


def test_tables_and_dictionaries_in_memory() -> None:
    obs, actions = values()
    columns = table(obs, actions)
    pandas = pytest.importorskip("pandas", reason="a DataFrame needs pandas")
    for source in (columns, pandas.DataFrame(columns)):
        data = read(source, **WORDS)
        np.testing.assert_array_equal(data.obs, obs)
        np.testing.assert_array_equal(data.episode_ends, ENDS)
        assert data.parts == (Part("obs", (3,), ("pos_x", "pos_y", "pos_z")),)
        assert data.action_parts == (Part("action", (2,), ("u", "v")),)
    frame = pandas.DataFrame(columns | {"episode": ["b"] * 4 + ["a"] + ["c"] * 3})
    np.testing.assert_array_equal(read(frame, **WORDS).episode_ends, ENDS)
    with pytest.raises(ValueError, match="path must be a path, a table or a dictionary of arrays, got int"):
        read(3)


# -------------------------------------------------------------------------------------------- names and parts


def test_keys_become_parts_with_their_names(tmp_path: Path) -> None:
    obs, actions = values()
    held = {"pos": obs, "image": np.arange(48, dtype=np.uint8).reshape(8, 3, 2), "u": actions, "t": obs[:, 0]}
    np.savez(tmp_path / "set.npz", **held, ends=ENDS)
    data = read(tmp_path / "set.npz", obs=["image", "pos", "t"], action="u")
    assert data.parts == (Part("image", (3, 2)), Part("pos", (3,)), Part("t", ()))
    np.testing.assert_array_equal(data.obs, np.concatenate([held["image"].reshape(8, 6), obs, obs[:, :1]], 1))
    data = read(tmp_path / "set.npz", obs=["where=pos", "t"], action="u")
    assert data.parts == (Part("where", (3,)), Part("t", ()))
    data = read(table(obs, actions), obs=["place=pos_[xy]", "height=pos_z"], action="u")
    assert data.parts == (Part("place", (2,), ("pos_x", "pos_y")), Part("height", (1,), ("pos_z",)))
    for words, message in (
        ({"obs": "pose"}, "there is no 'pose' for obs; it holds 'pos', 'image', 'u', 't', 'ends'"),
        ({"obs": ["pos", "po*"]}, "'pos' is named twice for obs"),
        ({"obs": "pos", "action": "velocity"}, "there is no 'velocity' for action"),
        ({"obs": "pos", "action": None}, "none of the usual names of action is there"),
        ({"obs": "pos", "action": "u", "episodes": "end"}, "there is no 'end' that tells where episodes end"),
        ({"obs": "pos", "action": "u", "episodes": ["ends", "t"]}, "episodes takes one name, or several of flags"),
        ({"obs": "", "action": "u"}, "obs takes names, got ''"),
    ):
        with pytest.raises(DemonstrationError, match=message):
            read(tmp_path / "set.npz", **words)


def test_columns_travel_to_a_policy(tmp_path: Path) -> None:
    """From a CSV through a run to a saved policy that takes a dictionary, and resume reads the same columns."""
    random = np.random.default_rng()
    rows = {"x": random.normal(size=40), "y": random.normal(size=40), "u": random.normal(size=40)}
    lines = [
        ",".join(rows),
        *(",".join(map(repr, row)) for row in zip(*(c.tolist() for c in rows.values()), strict=True)),
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    words = ["--data-obs", "y", "x", "--data-action", "u", "--data-episodes", "each"]
    main(["train", "mse", "--data", str(tmp_path / "log.csv"), *words, "--steps", "2", "--out", str(tmp_path / "run")])
    policy = cebm.load(tmp_path / "run")
    assert policy.specification.parts == (Part("obs", (2,), ("y", "x")),)
    np.testing.assert_array_equal(policy.act({"x": 0.5, "y": 1.0}), policy.act([1.0, 0.5]))
    main(["train", "--resume", str(tmp_path / "run"), "--steps", "3"])
    assert load_metrics(tmp_path / "run")[-1]["step"] == 3
    with pytest.raises(ValueError, match="data_obs names columns of data, but there is no data"):
        cebm.Job("mse", cebm.TRIALS["mse"], cebm.ParticleTask(), data_obs=("x",))


# -------------------------------------------------------------------------------------------- where episodes end


@pytest.mark.parametrize(
    "name, value",
    [
        ("ends", ENDS),
        ("lengths", np.array(LENGTHS)),
        ("episode_index", ids()),
        ("done", flags()),
        ("dones", flags().astype(np.float32)),
        ("terminals", flags().astype(np.int8)[:, None]),
        ("episode", np.array(["b"] * 4 + ["a"] + ["c"] * 3)),
    ],
)
def test_episodes_are_told_in_many_ways(name: str, value: np.ndarray) -> None:
    obs, actions = values()
    np.testing.assert_array_equal(read({"obs": obs, "action": actions, name: value}).episode_ends, ENDS)
    own = {"obs": obs, "action": actions, "mine": value}
    kind = {"episode_index": "ids", "episode": "ids", "done": "done", "dones": "done", "terminals": "done"}.get(
        name, name
    )
    np.testing.assert_array_equal(read(own, episodes=f"{kind}:mine").episode_ends, ENDS)


def test_two_flags_one_episode_and_an_episode_that_was_cut_short() -> None:
    obs, actions = values()
    first, second = flags(), flags()
    first[ENDS[1:] - 1] = False
    second[ENDS[0] - 1] = second[-1] = False
    arrays = {"obs": obs, "action": actions, "terminated": first, "truncated": second}
    np.testing.assert_array_equal(read(arrays).episode_ends, ENDS)  # nothing flags the last step
    assert read(arrays, episodes="one").episodes == 1 and read(arrays, episodes="each").episodes == 8


@pytest.mark.parametrize(
    "episodes, value, message",
    [
        ("mine", np.repeat([0, 1], 4), r"'mine' is 0 or 1: say whether it flags last steps \(done:mine\) or counts"),
        ("mine", np.array([3, 1]), "'mine' has 2 values for 8 steps: these are no ends"),
        ("mine", np.array([3, 9]), "these are no ends .the last is 9., no lengths .the sum is 12."),
        ("ids:mine", np.array([0, 0, 1, 1, 0, 0, 2, 2]), "episode 0 comes back at step 4, after another one"),
        ("ids:mine", np.array([0, 0, np.nan, 1, 1, 1, 2, 2]), "'mine' is nan at step 2"),
        ("done:mine", np.array([0, 0, 2, 0, 0, 0, 0, 1]), r"'mine' must be 0 or 1, but is .*2.* at step 2"),
        ("done:mine", np.zeros(8), "'mine' flags no step"),
        ("done:mine", np.array(["x"] * 8), "'mine' must be 0 or 1"),
        ("ends:mine", np.array([4, 4, 8]), "'mine': episode 1 ends at 4; ends must rise up to 8 steps"),
        ("ends:mine", np.array([4.5, 8]), "float64 that are no integers"),
        ("lengths:mine", np.array([4, 3]), "lengths must be positive and sum to 8 steps, got 7"),
        ("mine", np.zeros((8, 2)), r"'mine' has shape \(8, 2\), expected one number per step or per episode"),
        (None, np.zeros(8), "nothing says where episodes end: name it"),
    ],
)
def test_ends_that_make_no_sense_are_named(episodes: str | None, value: np.ndarray, message: str) -> None:
    obs, actions = values()
    with pytest.raises(DemonstrationError, match=message):
        read({"obs": obs, "action": actions, "mine": value}, episodes=episodes)


def test_an_observation_more_than_actions_is_left_out() -> None:
    """Ends that count observations, and ends that count actions."""
    obs, actions = values()
    longer = np.insert(obs, ENDS, 9.0, axis=0)
    assert len(longer) == 11
    for ends in (ENDS, ENDS + np.arange(1, 4)):
        data = read({"obs": longer, "action": actions, "ends": ends})
        np.testing.assert_array_equal(data.obs, obs)
        np.testing.assert_array_equal(data.episode_ends, ENDS)
    with pytest.raises(DemonstrationError, match="obs has 10 steps, action has 8 in 3 episodes"):
        read({"obs": longer[:10], "action": actions, "ends": ENDS})
    with pytest.raises(DemonstrationError, match="episode 1 has one observation and no action"):
        read({"obs": np.zeros((4, 1)), "action": np.zeros((2, 1)), "ends": np.array([3, 4])})


@pytest.mark.parametrize(
    "value, message",
    [
        (np.array(["a"] * 8), "'obs' holds text, expected numbers"),
        (np.array([None] * 8), "'obs' holds objects, expected numbers"),
        (np.zeros(8, complex), "'obs' holds complex numbers"),
        (np.array(["2020-01-01"] * 8, "M8[D]"), "'obs' holds dates"),
        (np.zeros((8, 0)), r"'obs' has shape \(8, 0\), expected a row per step"),
        (np.float64(3), r"'obs' has shape \(\), expected a row per step"),
        (np.full((8, 1), np.nan), "episode 0: obs column 0 is nan at step 0"),
        ([[1], [1, 2]], "'obs' is ragged"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, message: str) -> None:
    with pytest.raises(DemonstrationError, match=message):
        read({"obs": value, "action": np.zeros((8, 1)), "ends": ENDS})


def test_float64_and_integers_keep_their_precision() -> None:
    ends = np.array([3])
    fine = np.array([[1e6], [1e6 + 0.01], [1e6 + 0.02]])
    assert read({"obs": fine, "action": fine, "ends": ends}).obs.dtype == np.float64
    whole = np.array([[1], [2], [2**20]], np.int64)
    data = read({"obs": whole, "action": whole.astype(np.uint8), "ends": ends})
    assert data.obs.dtype == np.float32 and data.obs[2, 0] == 2**20


# -------------------------------------------------------------------------------------------- one format at a time


def test_csv_in_its_dialects(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b'\xef\xbb\xbf"x";u;done\r\n1.5;2;False\r\n"2.5";3;True\r\n\r\n')
    data = read(path, obs="x", action="u")
    assert data.obs[:, 0].tolist() == [1.5, 2.5] and data.episode_ends.tolist() == [2]
    path.write_text("x\tu\tepisode\n1\t2\ta\n1\t3\tb\n")
    assert read(path, obs="x", action="u").episode_ends.tolist() == [1, 2]
    path.write_text("x,u,open\n1,2,True\n1,3,false\n")
    assert read(path, obs=["x", "open"], action="u", episodes="one").obs.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    "content, message",
    [
        ("1,2\n3,4\n", r"the first line must name the columns, but holds numbers \(1, 2, …\)"),
        ("x,u,u\n1,2,3\n", "two columns are called 'u'"),
        ("x,u\n1,2\n1,\n", "row 2: column 'u' is empty, so the value is missing"),
        ("x,u\n1,2\n1,left\n", "row 2: column 'u' is 'left', expected a number"),
        ("x,u\n1,two\n", "row 1: column 'u' is 'two', expected a number"),
        ("x,u\n1,2\n1\n", "row 2 has 1 cells, the first line names 2 columns"),
        ("x,u\n", "the table has no rows"),
        ("x,u\n1,nan\n", "action column 0 is nan at step 0"),
        ("x,u\n1,1e999\n", "action column 0 is inf at step 0"),
    ],
)
def test_broken_csv_names_the_row_and_the_column(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(content)
    with pytest.raises(DemonstrationError, match=message):
        read(tmp_path / "log.csv", obs="x", action="u", episodes="one")


def test_robomimic_filters_and_default_keys(tmp_path: Path) -> None:
    obs, actions = values()
    FORMATS["hdf5"](tmp_path / "demo.hdf5", obs, actions)
    everything = read(tmp_path / "demo.hdf5")
    assert [part.name for part in everything.parts] == ["pos", "tip"], "images only by name"
    for word in ("mask/train", "train"):
        some = read(tmp_path / "demo.hdf5", episodes=word)
        np.testing.assert_array_equal(some.obs, obs[[0, 1, 2, 3, 5, 6, 7]])
    assert read(tmp_path / "demo.hdf5", obs="image").parts == (Part("image", (4, 4, 3)),)
    with pytest.raises(DemonstrationError, match="there is no filter 'valid' of episodes; it holds 'mask/train'"):
        read(tmp_path / "demo.hdf5", episodes="valid")


def test_a_set_that_minari_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari", reason="writing a Minari dataset needs minari")
    pytest.importorskip("h5py", reason="Minari needs h5py")
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    random, buffers = np.random.default_rng(), []
    box = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    for index, length in enumerate(LENGTHS):
        flags = np.arange(length) == length - 1
        seen = random.uniform(-9, 9, (length + 1, 3)).astype(np.float32)
        numbers = {"rewards": np.zeros(length), "terminations": flags, "truncations": np.zeros(length, bool)}
        acted = random.integers(0, 2, length)
        buffers.append(minari.data_collector.EpisodeBuffer(index, None, None, seen, acted, **numbers, infos={}))
    minari.create_dataset_from_buffers(
        "test/small-v0", buffers, observation_space=box, action_space=gymnasium.spaces.Discrete(2), data_format="hdf5"
    )
    data = read(next(tmp_path.rglob("main_data.hdf5")).parent.parent)
    np.testing.assert_array_equal(data.obs, np.concatenate([buffer.observations[:-1] for buffer in buffers]))
    np.testing.assert_array_equal(data.actions[:, 0], np.concatenate([buffer.actions for buffer in buffers]))
    np.testing.assert_array_equal(data.episode_ends, ENDS)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_lerobot_names_its_columns_and_does_without_videos(version: str, tmp_path: Path) -> None:
    write_lerobot(version)(tmp_path / "set", *values())
    data = read(tmp_path / "set")
    assert data.parts == (Part("observation.state", (3,), ("a", "b", "c")),)
    assert data.metadata["read"]["unread_videos"] == ["observation.images.top"]
    with pytest.raises(DemonstrationError, match=r"the video videos/.*mp4 is not there, so .* the other keys can"):
        read(tmp_path / "set", obs="observation.images.top")
    file = tmp_path / "set/meta/info.json"
    file.write_text(file.read_text().replace('"video"', '"image"'))
    with pytest.raises(DemonstrationError, match="is kept as pictures inside Parquet, which are not decoded"):
        read(tmp_path / "set", obs="observation.images.top")
    shares: list[float] = []
    read(tmp_path / "set", listen=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 2


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_lerobot_videos_are_decoded_on_request(version: str, tmp_path: Path) -> None:
    """Each frame has a brightness of its own, which survives the codec well enough to tell frames apart."""
    av = pytest.importorskip("av", reason="videos need av")
    obs, actions = values()
    write_lerobot(version)(tmp_path / "set", obs, actions)
    levels = np.arange(8) * 30
    place = "videos/chunk-{1:03d}/observation.images.top/episode_{0:06d}.mp4"
    films = {
        place.format(e, e // 2): levels[end - n : end] for e, (end, n) in enumerate(zip(ENDS, LENGTHS, strict=True))
    }
    if version == "v3.0":
        films = {"videos/observation.images.top/chunk-000/file-000.mp4": levels}
    for name, shown in films.items():
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(tmp_path / "set" / name), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
            for level in shown:
                frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), level, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    data = read(tmp_path / "set", obs=["observation.images.top", "observation.state"])
    assert data.parts[0] == Part("observation.images.top", (16, 32, 3)) and data.obs_dim == 16 * 32 * 3 + 3
    np.testing.assert_allclose(data.obs[:, :1536].mean(1), levels, atol=6)
    np.testing.assert_array_equal(data.obs[:, 1536:], obs)
    frames = list(video_frames(tmp_path / "set", "observation.images.top", 2))
    assert len(frames) == 3 and frames[0].shape == (16, 32, 3) and abs(frames[0].mean() - levels[5]) < 6


# -------------------------------------------------------------------------------------------- the real files


@pytest.mark.skipif(not PUSHT.exists(), reason="the Push-T demonstrations are not beside the repository")
def test_push_t_from_zarr_and_from_npz() -> None:
    pytest.importorskip("zarr", reason="Zarr needs zarr")
    found = read(PUSHT / "pusht_cchi_v7_replay.zarr")
    other = read(PUSHT / "pusht.npz")
    assert (found.episodes, found.steps) == (206, 25_650)
    np.testing.assert_array_equal(found.episode_ends, other.episode_ends)
    np.testing.assert_array_equal(found.obs, other.obs)
    np.testing.assert_array_equal(found.actions, other.actions)
    both = read(PUSHT / "pusht_cchi_v7_replay.zarr", obs=["state", "keypoint"])
    assert both.parts == (Part("state", (5,)), Part("keypoint", (9, 2)))
    np.testing.assert_array_equal(both.obs[:, 5:], read(PUSHT / "pusht.npz", obs="keypoint").obs)


@pytest.mark.skipif(not LEROBOT.exists(), reason="the LeRobot set is not beside the repository")
def test_a_real_lerobot_set_without_its_videos() -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot needs pyarrow")
    data = read(LEROBOT)
    assert (data.episodes, data.steps) == (4, 1492) and data.parts[0].columns[0] == "shoulder_pan.pos"
    rows = parquet.read_table(LEROBOT / "data/chunk-000/file-000.parquet")
    np.testing.assert_array_equal(data.actions, np.array(rows["action"].to_pylist(), np.float32))
    assert data.metadata["read"]["unread_videos"] == ["observation.images.front", "observation.images.top"]


# -------------------------------------------------------------------------------------------- what is missing


@pytest.mark.parametrize(
    "name, module, extra",
    [
        ("parquet", "pyarrow.parquet", "parquet"),
        ("hdf5", "h5py", "hdf5"),
        ("minari", "h5py", "minari"),
        ("zarr2", "zarr", "zarr"),
        ("lerobot3", "pyarrow.parquet", "parquet"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    name: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMATS[name](tmp_path / "set", *values())
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module.partition('.')[0]}: pip install 'cebm\[{extra}\]'"):
        read(tmp_path / "set")


def test_the_command_line_inspects_and_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    obs, actions = values()
    write_csv(tmp_path / "log.csv", obs, actions)
    words = ["--data-obs", "pos_*", "--data-action", "u", "v"]
    main(["data", "inspect", str(tmp_path / "log.csv"), *words])
    assert "3 episodes, 8 steps" in capsys.readouterr().out
    main(["data", "inspect", str(tmp_path / "log.csv"), *words, "--json"])
    assert json.loads(capsys.readouterr().out)["columns"][0]["name"] == "pos_x"
    main(["data", "convert", str(tmp_path / "log.csv"), str(tmp_path / "set"), *words])
    np.testing.assert_array_equal(Demonstrations.load(tmp_path / "set").obs, obs)
    shutil.copytree(tmp_path / "set", tmp_path / "again")
    for wrong, message in (
        (["convert", "log.csv"], "convert needs a second path"),
        (["inspect", "log.csv", "out"], "inspect writes nothing"),
        (["convert", "set", "set"], "does not write over what it reads"),
        (["inspect", "gone"], "there is no such file"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["data", wrong[0], *(str(tmp_path / name) for name in wrong[1:]), *words])
        assert ended.value.code == 2 and message in capsys.readouterr().err
