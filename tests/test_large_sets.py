"""Sets on disk stay there: views instead of copies, windows gathered per batch, and memory that stays bounded."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import cebm
from cebm.demonstrations import Demonstrations
from cebm.demonstrations.large import Growing, Rows, chosen, extremes, fitted_rows, save_npy
from cebm.spaces import Part
from waiting import PATIENCE

LENGTHS = (4, 1, 3, 5)


def on_disk_and_in_memory(tmp_path: Path) -> tuple[Demonstrations, Demonstrations]:
    random, ends = np.random.default_rng(), np.cumsum(LENGTHS)
    obs, actions = random.normal(size=(13, 3)).astype(np.float32), random.normal(size=(13, 2)).astype(np.float32)
    data = Demonstrations.from_arrays(obs, actions, ends, parts=(Part("a", (1,)), Part("b", (2,))))
    data.save(tmp_path / "set")
    return Demonstrations.load(tmp_path / "set"), data


def test_views_of_a_set_on_disk_are_what_copies_are(tmp_path: Path) -> None:
    disk, memory = on_disk_and_in_memory(tmp_path)
    for episodes in ([3, 0], [1], [2, 2, 1], [-1]):
        view, copy = disk.select(episodes), memory.select(episodes)
        assert isinstance(view.obs, Rows) and isinstance(copy.obs, np.ndarray)
        again = view.select(range(view.episodes)[::-1]), copy.select(range(copy.episodes)[::-1])
        for one, other in ((view, copy), again):
            np.testing.assert_array_equal(np.asarray(one.obs), other.obs)
            np.testing.assert_array_equal(one.actions[:], other.actions)
            np.testing.assert_array_equal(one.episode_ends, other.episode_ends)
            assert one.fingerprint() == other.fingerprint() and one.summary() == other.summary()
            assert one.parts == other.parts
            for pairs in zip(one.windows(3, 2)[:], other.windows(3, 2)[:], strict=True):
                np.testing.assert_array_equal(*pairs)
        view.save(tmp_path / "part")
        np.testing.assert_array_equal(Demonstrations.load(tmp_path / "part").obs, copy.obs)


def test_rows_index_as_arrays_do(tmp_path: Path) -> None:
    disk, memory = on_disk_and_in_memory(tmp_path)
    rows, plain = disk.select([3, 1, 0]).obs, memory.select([3, 1, 0]).obs
    assert (rows.shape, rows.dtype, rows.ndim, rows.size, len(rows)) == ((10, 3), np.float32, 2, 30, 10)
    for index in (0, -1, slice(2, 9, 3), slice(None), [3, -2], np.array([[0, 9], [5, 5]]), plain[:, 0] > 0):
        np.testing.assert_array_equal(rows[index], plain[index])
    np.testing.assert_array_equal(rows[:, 1:], plain[:, 1:])
    np.testing.assert_array_equal(rows[[1, 2], 0], plain[[1, 2], 0])
    for index in (10, -11, [0, 10]):
        with pytest.raises(IndexError, match="is out of range for 10 rows"):
            rows[index]
    np.testing.assert_array_equal(extremes(rows)[0], plain.min(0))
    np.testing.assert_array_equal(extremes(rows)[1], plain.max(0))


def test_rows_are_saved_as_numpy_saves_them(tmp_path: Path) -> None:
    disk, memory = on_disk_and_in_memory(tmp_path)
    with (tmp_path / "a.npy").open("wb") as one, (tmp_path / "b.npy").open("wb") as other:
        save_npy(one, disk.select([3, 1]).obs)
        np.save(other, memory.select([3, 1]).obs)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_an_array_grows_in_memory_and_then_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [np.full((n, 2), n, np.float64) for n in (3, 0, 5, 1)]
    whole = np.concatenate(blocks).astype(np.float32)
    for limit, kind in ((1 << 20, np.ndarray), (30, np.memmap)):
        monkeypatch.setattr("cebm.demonstrations.large.LARGE", limit)
        growing = Growing(np.float32)
        for block in blocks:
            growing.append(block)
        assert type(growing.array()) is kind and growing.rows == 9
        np.testing.assert_array_equal(growing.array(), whole)
    with pytest.raises(ValueError, match=r"a row has shape \(3,\), those before have \(2,\)"):
        growing.append(np.zeros((1, 3)))
    with pytest.raises(ValueError, match="there are no rows"):
        Growing(np.float32).array()


def test_a_split_of_a_set_on_disk_reads_nothing(tmp_path: Path) -> None:
    steps = 400_000
    for name, columns in (("obs", 20), ("action", 4)):
        array = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (steps, columns))
        del array
    np.save(tmp_path / "episode_ends.npy", np.arange(100, steps + 1, 100))
    data = cebm.open_demonstrations(tmp_path)
    tracemalloc.start()
    training, _ = data.split(0.1, 0)
    training.windows(2, 8)[np.arange(256)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20, f"a copy has {32 << 20} bytes, the peak is {peak}"


def test_units_are_fitted_to_the_extremes_of_a_large_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cebm.demonstrations.large.CHUNK", 10)
    disk, memory = on_disk_and_in_memory(tmp_path)
    fitted = fitted_rows(disk.obs)
    assert fitted is not disk.obs
    np.testing.assert_array_equal(fitted.min(0), memory.obs.min(0))
    np.testing.assert_array_equal(fitted.max(0), memory.obs.max(0))
    assert fitted_rows(memory.obs) is memory.obs
    assert chosen(disk.obs, np.array([0]), np.array([2])).shape == (2, 3)


def test_training_from_disk_is_training_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; also where batches are gathered from the disk because the set does not fit."""
    import torch

    disk, memory = on_disk_and_in_memory(tmp_path)
    trial = cebm.vary(cebm.TRIALS["mse"], history=2, horizon=3)
    trainers = [cebm.Trainer(trial, data, data, steps=3) for data in (disk.select([3, 0, 1]), memory.select([3, 0, 1]))]
    trainers[0]._resident = None
    for _ in range(3):
        losses = [trainer.step()["loss"] for trainer in trainers]
        assert torch.equal(*losses)


MEASURE = """
import sys, threading, time
peak = {"RssAnon": 0, "VmRSS": 0}
def look():
    for line in open("/proc/self/status"):
        name = line.partition(":")[0]
        if name in peak:
            peak[name] = max(peak[name], int(line.split()[1]) >> 10)
def watch():
    while True:
        look()
        time.sleep(0.005)
import torch
torch.set_num_threads(1)
import cebm
from cebm.runs import material_of, trainer_of
look()
before = peak["RssAnon"]
threading.Thread(target=watch, daemon=True).start()
trial = cebm.vary(cebm.TRIALS["mse"], history=2, horizon=8)
job = cebm.Job("mse", trial, data=sys.argv[1], steps=10)
trainer = trainer_of(job, material_of(job))
for _ in range(10):
    trainer.step()
trainer.validate(trainer.policy())
print(trainer._resident is not None, peak["RssAnon"] - before, peak["VmRSS"])
"""


def measured(path: Path) -> tuple[bool, int, int]:
    """Whether the set was kept in memory, how many MB of memory of its own the process took for it, and its peak."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    resident, grown, peak = done.stdout.split()
    return resident == "True", int(grown), int(peak)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux counts it")
def test_a_million_rows_train_within_a_gigabyte(tmp_path: Path) -> None:
    random, steps = np.random.default_rng(), 1_000_000
    obs, actions = (random.normal(size=(steps, width)).astype(np.float32) for width in (20, 7))
    np.savez(tmp_path / "set.npz", obs=obs, action=actions, episode_ends=np.arange(200, steps + 1, 200))
    resident, _, peak = measured(tmp_path / "set.npz")
    assert resident and peak < 1000, f"{peak} MB"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux counts it")
def test_a_set_that_is_larger_than_its_memory_trains(tmp_path: Path) -> None:
    """1.2 GB of numbers; what the process takes of its own is a tenth of that. The file has holes, so it is quick."""
    steps = 3_000_000
    for name, columns in (("obs", 90), ("action", 10)):
        array = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, (steps, columns))
        array[:: steps // 50] = np.random.default_rng().normal(size=columns)
        del array
    np.save(tmp_path / "episode_ends.npy", np.arange(500, steps + 1, 500))
    resident, grown, _ = measured(tmp_path)
    assert not resident and grown < 250, f"{grown} MB"
