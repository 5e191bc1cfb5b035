"""Broken and hostile files: refused by name, quickly, without opening anything outside of the dataset."""

import json
import os
import pickle
import shutil
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cebm.demonstrations import DemonstrationError, open_demonstrations
from cebm.demonstrations.readers import recognise
from cebm.demonstrations.readers.assembling import Wanted
from cebm.demonstrations.readers.lerobot import filled
from tests.readers_files import FORMATS, values


class Bomb:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def made(name: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "set.npz"
    return path, FORMATS[name](path, *values())


# -------------------------------------------------------------------------------------------- another kind of file


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "the file is empty"),
        (b"\x80\x04\x95abc", "looks like a pickle, which is never opened"),
        (b"\x93NUMPY\x01\x00", r"looks like a single \.npy array: put obs"),
        (b"ARROW1\x00\x00", "looks like an Arrow"),
        (b"\x1f\x8b\x08", "compressed with gzip: unpack it first"),
        (b"\x28\xb5\x2f\xfd\x00", "compressed with Zstandard"),
        (b"SQLite format 3\x00", "an SQLite database, as ROS 2 records bags"),
        (b"\x89MCAP0\r\n", "an MCAP recording"),
        (b"#ROSBAG V2.0\n", "a ROS bag"),
        (b"MATLAB 5.0 MAT-file", "a MATLAB file"),
        (b"\x00\x00\x00\x20ftypisom", "an MP4 video"),
        (b"\x89PNG\r\n\x1a\n", "an image"),
        (b'{"obs": [1]}', "JSON text"),
        (b"<!DOCTYPE html><html>", "a web page, perhaps instead of a download that needs a login"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        (b"\xff\xfex\x00,\x00", "text in UTF-16"),
        (b"\x01\x02\x03\x04\xff\xfe\xfd\xfc\xf0\x00", "no format that is known .it begins with the bytes 01 02 03 04"),
        (b"\x00" * 257 + b"ustar", "a tar archive"),
        (b"  \n", "empty text"),
    ],
)
def test_a_file_of_another_kind_is_never_called_damaged(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(DemonstrationError, match=message) as raised:
        open_demonstrations(tmp_path / "data.npz")
    assert "damaged" not in str(raised.value) and "data.npz" in str(raised.value)


@pytest.mark.parametrize(
    "members, message",
    [
        ({"archive/data.pkl": b"x", "archive/version": b"3"}, "a PyTorch file, which holds a pickle"),
        ({"data/.zgroup": b"{}"}, "a zipped Zarr store: unpack it first"),
        ({"xl/workbook.xml": b""}, "an Excel workbook"),
        ({"notes.txt": b"x"}, r"a zip archive without arrays \(it holds 'notes\.txt'\)"),
    ],
)
def test_other_archives_are_named(members: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(DemonstrationError, match=message):
        open_demonstrations(tmp_path / "data.npz")


def test_other_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(DemonstrationError, match=r"no dataset of a known layout \(it holds nothing\)"):
        open_demonstrations(tmp_path)
    (tmp_path / "train.tfrecord-00000").write_bytes(b"x")
    with pytest.raises(DemonstrationError, match=r"a TensorFlow \(RLDS\) dataset"):
        open_demonstrations(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json").write_text("{}")
    with pytest.raises(DemonstrationError, match="a Minari dataset whose data are not in HDF5"):
        open_demonstrations(tmp_path)


# -------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_and_flipped_files_are_refused_or_read_the_same(name: str, tmp_path: Path) -> None:
    """Every file of the set is cut, emptied, and gets wrong bytes: a DemonstrationError that names the set, or a set.
    Only formats with checksums must then give the right values; the others have no way to know."""
    path, words = made(name, tmp_path)
    checked = name == "npz"
    right = open_demonstrations(path, **words)
    random = np.random.default_rng()
    for file in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        content = file.read_bytes()
        places = random.integers(0, max(1, len(content)), 4)
        broken = [content[: len(content) // 2], content[:-1], b"", b"\x00" * len(content)]
        broken += [content[:p] + bytes([content[p] ^ 0xFF]) + content[p + 1 :] for p in places if content]
        for damaged in broken:
            file.write_bytes(damaged)
            try:
                with warnings.catch_warnings(action="ignore"):
                    found = open_demonstrations(path, **words)
            except DemonstrationError as error:
                assert str(path) in str(error), error
                continue
            if checked:
                np.testing.assert_array_equal(found.obs, right.obs)
        file.write_bytes(content)
    np.testing.assert_array_equal(open_demonstrations(path, **words).obs, right.obs)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    path, words = made(name, tmp_path)
    if path.is_file():
        return
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        content = file.read_bytes()
        file.unlink()
        try:
            with warnings.catch_warnings(action="ignore"):
                open_demonstrations(path, **words)
        except DemonstrationError as error:
            assert str(path) in str(error)
        file.write_bytes(content)


def test_a_chunk_that_is_missing_is_a_warning(tmp_path: Path) -> None:
    """Zarr stores no chunk of zeros, so one that was lost looks the same."""
    path, words = made("zarr2", tmp_path)
    next(file for file in (path / "data/state").rglob("*") if not file.name.startswith(".z")).unlink()
    with pytest.warns(UserWarning, match="state: 1 of 3 chunks are not stored and are read as 0.0"):
        open_demonstrations(path, **words)


# -------------------------------------------------------------------------------------------- pickles


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    bomb = np.array([Bomb(tmp_path / "exploded")] * 8, dtype=object)
    obs, actions = values()
    np.savez(tmp_path / "set.npz", obs=bomb, action=actions, done=np.ones(8, bool))
    with pytest.raises(DemonstrationError, match="it is a pickle, and allow_pickle is always off"):
        open_demonstrations(tmp_path / "set.npz")
    FORMATS["npy"](tmp_path / "npy", obs, actions)
    np.save(tmp_path / "npy" / "obs.npy", bomb, allow_pickle=True)
    with pytest.raises(DemonstrationError, match="it is a pickle"):
        open_demonstrations(tmp_path / "npy")
    (tmp_path / "data.parquet").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(DemonstrationError, match="looks like a pickle"):
        open_demonstrations(tmp_path / "data.parquet")
    assert not (tmp_path / "exploded").exists()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DemonstrationError, match="neither a file nor a directory"):
        open_demonstrations(tmp_path / "pipe")


def test_zarr_codecs_that_unpickle_are_refused(tmp_path: Path) -> None:
    path, words = made("zarr2", tmp_path)
    file = path / "data/state/.zarray"
    about = json.loads(file.read_text())
    file.write_text(json.dumps({**about, "filters": [{"id": "pickle"}]}))
    with pytest.raises(DemonstrationError, match="'state' is stored with the codec 'pickle', which is not read here"):
        open_demonstrations(path, **words)
    file.write_text(json.dumps({**about, "dtype": "|O", "filters": [{"id": "pickle", "protocol": 4}]}))
    with pytest.raises(DemonstrationError, match="'state'"):
        open_demonstrations(path, **words)
    with pytest.raises(DemonstrationError, match="there is no 'image' for obs"):  # the others are still listed
        open_demonstrations(path, obs="image")


# -------------------------------------------------------------------------------------------- out of the folder


@pytest.mark.parametrize(
    "template",
    [
        "../../secret.parquet",
        "/etc/passwd",
        "data/../../secret.parquet",
        "{episode_index.__class__}",
        "{episode_index!r}",
        "{episode_index:0999999999d}",
        "{unknown}",
        "{0}",
        None,
        7,
    ],
)
def test_templates_stay_inside_the_dataset(template: Any, tmp_path: Path) -> None:
    with pytest.raises(DemonstrationError, match=r"set: meta/info\.json: "):
        filled(tmp_path, template, {"episode_index": 3, "chunk_index": 0, "file_index": 0}, Wanted("set"))
    if template != "{unknown}":
        path, _ = made("lerobot3", tmp_path)
        file = path / "meta/info.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"data_path": template}))
        with pytest.raises(DemonstrationError, match=r"meta/info\.json"):
            open_demonstrations(path)


@pytest.mark.parametrize("name", ["npy", "minari", "zarr2", "zarr3", "lerobot2", "lerobot3"])
def test_links_out_of_the_folder_are_not_followed(name: str, tmp_path: Path) -> None:
    """Each file in turn is a link to a good copy of itself, outside."""
    path, words = made(name, tmp_path)
    outside = tmp_path / "outside"
    shutil.copytree(path, outside)
    for file in sorted(each for each in path.rglob("*") if each.is_file() and each.name != "metadata.json"):
        content = file.read_bytes()
        file.unlink()
        file.symlink_to(outside / file.relative_to(path))
        with pytest.raises(DemonstrationError, match="leads out of the folder of the dataset"):
            open_demonstrations(path, **words)
        file.unlink()
        file.write_bytes(content)


def test_hdf5_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
    path, words = made("hdf5", tmp_path)
    shutil.copy(path, tmp_path / "other.hdf5")
    for change, message in (
        (
            lambda group: group.__setitem__("pos", h5py.ExternalLink("other.hdf5", "data/demo_1/obs/pos")),
            "another file",
        ),
        (lambda group: group.__setitem__("pos", h5py.SoftLink("/data/demo_2/obs/pos")), "is a soft link"),
        (lambda group: group.create_virtual_dataset("pos", _virtual(h5py)), "keeps its values in other files"),
        (
            lambda group: group.create_dataset("pos", (4, 2), "f4", external=[(str(tmp_path / "raw.bin"), 0, 32)]),
            "keeps its values in other files",
        ),
    ):
        with h5py.File(path, "r+") as file:
            group = file["data/demo_1/obs"]
            del group["pos"]
            change(group)
        with pytest.raises(DemonstrationError, match=message):
            open_demonstrations(path, **words)


def _virtual(h5py: Any) -> Any:
    layout = h5py.VirtualLayout((4, 2), "f4")
    layout[:] = h5py.VirtualSource("other.hdf5", "data/demo_1/obs/pos", (4, 2))
    return layout


# -------------------------------------------------------------------------------------------- sizes that lie


def bomb_npz(path: Path) -> None:
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    header += b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1), }".ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("obs.npy", header)
        archive.writestr("action.npy", header)
        archive.writestr("done.npy", header)


def bomb_npy(path: Path) -> None:
    path.mkdir()
    for name in ("obs", "action", "done"):
        bomb_npz(path / "x")
        with zipfile.ZipFile(path / "x") as archive:
            (path / f"{name}.npy").write_bytes(archive.read("obs.npy"))
        (path / "x").unlink()


def bomb_hdf5(path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
    with h5py.File(path, "w") as file:
        for name in ("obs", "action", "done"):
            file.create_dataset(name, (10**12, 1), "f4", chunks=(1000, 1))


def bomb_zarr(version: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        zarr = pytest.importorskip("zarr", reason="Zarr needs zarr")
        root = zarr.open_group(str(path), mode="w", zarr_format=version)
        for name in ("obs", "action", "done"):
            root.create_array(name, shape=(10**12, 1), dtype="f4", chunks=(10**11, 1))

    return write


def bomb_parquet(path: Path) -> None:
    """A column of one value, which takes no space, thirty million times."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    zeros = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int8)), pa.array([0.0]))
    table = pa.table({"obs": zeros, "action": zeros, "done": zeros})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(30):
            writer.write_table(table)


def bomb_lists(path: Path) -> None:
    """A list of ten million zeros in each of ten rows."""
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    zeros = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10_000_000, np.int8)), pa.array([0.0]))
    rows = pa.ListArray.from_arrays(pa.array([0, 10_000_000], pa.int32()), zeros.dictionary_decode())
    table = pa.table({"obs": rows, "action": [0.0], "done": [1]})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(10):
            writer.write_table(table)


BOMBS = {
    "parquet3": bomb_lists,
    "npz": bomb_npz,
    "npy": bomb_npy,
    "hdf5": bomb_hdf5,
    "zarr2": bomb_zarr(2),
    "zarr3": bomb_zarr(3),
    "parquet": bomb_parquet,
}


@pytest.mark.parametrize("name", BOMBS)
def test_sizes_are_checked_before_memory_is_allocated(name: str, tmp_path: Path) -> None:
    BOMBS[name](tmp_path / "set")
    assert recognise(tmp_path / "set") == name.rstrip("23")
    tracemalloc.start()
    with pytest.raises(DemonstrationError, match=r"shorter than its shape says|the file holds .* for it"):
        open_demonstrations(tmp_path / "set")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20


# -------------------------------------------------------------------------------------------- one format at a time


def test_minari_and_robomimic_layouts_that_do_not_fit(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="HDF5 needs h5py")
    path, words = made("hdf5", tmp_path)
    good = path.read_bytes()

    def short(group: Any) -> None:
        del group["actions"]
        group["actions"] = np.zeros((2, 2), np.float32)

    def wide(group: Any) -> None:
        del group["obs/pos"]
        group["obs/pos"] = np.zeros((4, 3), np.float32)

    for change, message in (
        (lambda group: group.__delitem__("actions"), "data/demo_1: there is no 'actions'; it holds 'dones', 'obs'"),
        (lambda group: group["obs"].__delitem__("pos"), "there is no 'pos'"),
        (short, "data/demo_1: lengths do not fit each other .'actions' 2, 'pos' 4, 'tip' 4"),
        (wide, r"'pos' has shape \(.*\), the first episode"),
        (lambda group: group.parent.__setitem__("demo_3", 5), "data/demo_3 is an array, expected a group"),
    ):
        with h5py.File(path, "r+") as file:
            change(file["data/demo_1"])
        with pytest.raises(DemonstrationError, match=message):
            open_demonstrations(path, **words)
        path.write_bytes(good)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"codebase_version": "v9"}, "a LeRobot dataset of version 'v9'; v2.0, v2.1 and v3.0 are read"),
        ({"features": 3}, "lists no features"),
        ({"features": {}}, "there is no 'observation.state' for obs"),
        ({"data_path": "data/gone.parquet"}, r"data/gone\.parquet is missing, which episode 0 is in"),
    ],
)
def test_lerobot_metadata_that_make_no_sense(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, _ = made("lerobot3", tmp_path)
    file = path / "meta/info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DemonstrationError, match=message):
        open_demonstrations(path)


def test_lerobot_rows_must_be_those_that_meta_says(tmp_path: Path) -> None:
    path, _ = made("lerobot2", tmp_path)
    file = path / "meta/episodes.jsonl"
    file.write_text(file.read_text().replace('"length": 4', '"length": 5'))
    with pytest.raises(DemonstrationError, match=r"episode_000000\.parquet does not hold the episodes that meta says"):
        open_demonstrations(path)
    file.write_text('{"episode_index": -1, "length": 4}')
    with pytest.raises(DemonstrationError, match="episode -1 has length 4"):
        open_demonstrations(path)


@pytest.mark.parametrize(
    "column, message",
    [
        ([[1.0, 2.0], [1.0]], "'obs' has 1 numbers at row 1, and 2 before"),
        ([1.0, None], "'obs' is null at row 1, so the value is missing"),
        ([[1.0, None], [1.0, 2.0]], "'obs' holds null from row 0 on"),
        ([b"a", b"b"], "'obs' holds binary, expected numbers"),
        ([{"x": 1}, {"x": 2}], "'obs' holds struct"),
        (["a", "b"], "'obs' holds text, expected numbers"),
    ],
)
def test_parquet_columns_that_are_no_numbers(column: list[Any], message: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    parquet.write_table(pa.table({"obs": column, "action": [1, 2]}), tmp_path / "set")
    with pytest.raises(DemonstrationError, match=message):
        open_demonstrations(tmp_path / "set", episodes="one")
