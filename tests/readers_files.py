"""Writes one small set in every format that is read, for the tests of the readers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LENGTHS = (4, 1, 3)
ENDS = np.cumsum(LENGTHS)


def values(seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Observations [8, 3] and actions [8, 2] in float32."""
    random = np.random.default_rng(seed)
    return random.normal(size=(8, 3)).astype(np.float32), random.normal(size=(8, 2)).astype(np.float32)


def flags() -> np.ndarray:
    done = np.zeros(8, bool)
    done[ENDS - 1] = True
    return done


def ids() -> np.ndarray:
    return np.repeat([7, 3, 9], LENGTHS)


def episodes(obs: np.ndarray, actions: np.ndarray, extra: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per episode; with `extra` an observation after the last action."""
    found = []
    for begin, end in zip(ENDS - LENGTHS, ENDS, strict=True):
        seen = obs[begin:end]
        found.append((np.concatenate([seen, seen[-1:] + 1]) if extra else seen, actions[begin:end]))
    return found


def write_npz(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    np.savez(path, position=obs[:, :2], grip=obs[:, 2], u=actions, stop=ENDS, label=np.array(["a"] * 8))
    return {"obs": ["position", "grip"], "action": "u", "episodes": "stop"}


def write_npy(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    path.mkdir()
    for name, array in (("obs", obs), ("action", actions), ("done", flags())):
        np.save(path / f"{name}.npy", array)
    return {}


def table(obs: np.ndarray, actions: np.ndarray) -> dict[str, np.ndarray]:
    columns = {f"pos_{axis}": obs[:, index] for index, axis in enumerate("xyz")}
    return columns | {"u": actions[:, 0], "v": actions[:, 1], "episode": ids()}


WORDS = {"obs": "pos_*", "action": ["u", "v"]}


def write_csv(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    columns = table(obs, actions)
    rows = [
        ",".join(columns),
        *(",".join(map(repr, row)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)),
    ]
    path.write_text("\n".join(rows) + "\n")
    return WORDS


def write_parquet(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    parquet.write_table(pa.table(table(obs, actions)), path)
    return WORDS


def write_robomimic(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
    with h5py.File(path, "w") as file:
        # Out of order, and demo_10 after demo_2 only in their natural order.
        for name, (seen, done) in zip(("demo_1", "demo_2", "demo_10"), episodes(obs, actions), strict=True):
            group = file.create_group(f"data/{name}")
            group["obs/pos"], group["obs/tip"] = seen[:, :2], seen[:, 2:]
            group["obs/image"] = np.zeros((len(seen), 4, 4, 3), np.uint8)
            group["actions"], group["dones"] = done, np.arange(len(done)) == len(done) - 1
        file["mask/train"] = np.array([b"demo_10", b"demo_1"])
    return {"obs": ["pos", "tip"]}


def write_minari(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    h5py = pytest.importorskip("h5py", reason="Minari needs h5py")
    (path / "data").mkdir(parents=True)
    (path / "data" / "metadata.json").write_text("{}")
    with h5py.File(path / "data" / "main_data.hdf5", "w") as file:
        for index, (seen, done) in enumerate(episodes(obs, actions, extra=True)):
            group = file.create_group(f"episode_{index}")
            group["observations"], group["actions"] = seen, done
    return {}


def write_zarr(version: int) -> Callable[[Path, np.ndarray, np.ndarray], dict[str, Any]]:
    def write(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
        zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
        root = zarr.open_group(str(path), mode="w", zarr_format=version)
        for name, array in (("data/state", obs), ("data/action", actions), ("meta/episode_ends", ENDS)):
            made = root.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(3, *array.shape[1:]))
            made[:] = array
        return {}

    return write


def write_lerobot(version: str) -> Callable[[Path, np.ndarray, np.ndarray], dict[str, Any]]:
    def write(path: Path, obs: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
        pa = pytest.importorskip("pyarrow", reason="LeRobot needs pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet", reason="LeRobot needs pyarrow")
        newer = version == "v3.0"
        data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        film = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        if not newer:
            data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
            film = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        features = {
            "observation.state": {"dtype": "float32", "shape": [3], "names": {"motors": ["a", "b", "c"]}},
            "action": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
            "observation.images.top": {"dtype": "video", "shape": [16, 32, 3], "names": ["height", "width", "channel"]},
        }
        info = {"codebase_version": version, "fps": 10, "chunks_size": 2, "data_path": data, "video_path": film}
        (path / "meta").mkdir(parents=True)
        (path / "meta" / "info.json").write_text(json.dumps({**info, "features": features}))
        frames = []
        for index, (seen, done) in enumerate(episodes(obs, actions)):
            state = pa.FixedSizeListArray.from_arrays(pa.array(seen.ravel()), 3)
            rows = {"observation.state": state, "action": pa.array(done.tolist(), pa.list_(pa.float32()))}
            frames.append(pa.table({**rows, "episode_index": np.full(len(seen), index)}))
        if not newer:
            (path / "meta" / "episodes.jsonl").write_text(
                "\n".join(json.dumps({"episode_index": i, "tasks": [], "length": n}) for i, n in enumerate(LENGTHS))
            )
            for index, frame in enumerate(frames):
                file = path / f"data/chunk-{index // 2:03d}/episode_{index:06d}.parquet"
                file.parent.mkdir(parents=True, exist_ok=True)
                parquet.write_table(frame, file)
            return {}
        for chunk, held in (("file-000", frames[:2]), ("file-001", frames[2:])):
            file = path / f"data/chunk-000/{chunk}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.concat_tables(held), file)
        about = {
            "episode_index": [0, 1, 2],
            "length": list(LENGTHS),
            "data/chunk_index": [0, 0, 0],
            "data/file_index": [0, 0, 1],
            "dataset_from_index": (ENDS - LENGTHS).tolist(),
            "dataset_to_index": ENDS.tolist(),
            "videos/observation.images.top/chunk_index": [0, 0, 0],
            "videos/observation.images.top/file_index": [0, 0, 0],
            "videos/observation.images.top/from_timestamp": ((ENDS - LENGTHS) / 10).tolist(),
        }
        file = path / "meta/episodes/chunk-000/file-000.parquet"
        file.parent.mkdir(parents=True)
        parquet.write_table(pa.table(about), file)
        return {}

    return write


FORMATS: dict[str, Callable[[Path, np.ndarray, np.ndarray], dict[str, Any]]] = {
    "npz": write_npz,
    "npy": write_npy,
    "csv": write_csv,
    "parquet": write_parquet,
    "hdf5": write_robomimic,
    "minari": write_minari,
    "zarr2": write_zarr(2),
    "zarr3": write_zarr(3),
    "lerobot2": write_lerobot("v2.1"),
    "lerobot3": write_lerobot("v3.0"),
}
