"""What is this file? By its content, never by the ending of its name."""

import json
from pathlib import Path

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.files import FORMAT
from cebm.demonstrations.readers.arrays import members_of

_HEAD = 1 << 12  # bytes that are looked at
_TEXT = 1 << 20  # bytes of a header that tells whether a directory is ours

# What begins like this is another kind of file, and this is how to go on.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"\x93NUMPY", "a single .npy array: put obs, action and episode_ends into one .npz, or name their directory"),
    (b"ARROW1", "an Arrow (Feather) file: write it as Parquet"),
    (b"FEA1", "an old Feather file: write it as Parquet"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"BZh", "compressed with bzip2: unpack it first"),
    (b"\xfd7zXZ", "compressed with xz: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with Zstandard: unpack it first"),
    (b"7z\xbc\xaf", "a 7-Zip archive: unpack it first"),
    (b"Rar!", "a RAR archive: unpack it first"),
    (b"SQLite format 3", "an SQLite database, as ROS 2 records bags: export its topics as CSV or Parquet"),
    (b"\x89MCAP", "an MCAP recording: export its topics as CSV or Parquet"),
    (b"#ROSBAG", "a ROS bag: export its topics as CSV or Parquet"),
    (b"MATLAB 5.0", "a MATLAB file: save it with -v7.3 (which is HDF5), or as CSV"),
    (b"RIFF", "an audio or video file"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"\x89PNG", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"%PDF", "a PDF document"),
    (b"{", "JSON text: write its numbers as CSV, Parquet or .npz"),
    (b"[", "JSON text: write its numbers as CSV, Parquet or .npz"),
)


def recognise(path: Path) -> str:
    """The name of the reader: cebm, npz, npy, csv, parquet, hdf5, minari, zarr or lerobot. A DemonstrationError says
    what the file looks like where none of them reads it."""
    return _directory(path) if path.is_dir() else _file(path)


def _directory(path: Path) -> str:
    if _is_ours(path / "header.json"):
        return "cebm"
    if any((path / name).exists() for name in (".zgroup", ".zarray", "zarr.json", ".zmetadata")):
        return "zarr"
    if (path / "meta" / "info.json").exists():
        return "lerobot"
    if any((path / name).exists() for name in ("data/main_data.hdf5", "main_data.hdf5", "data/metadata.json")):
        return "minari"
    files = sorted(file.name for file in path.iterdir())
    if any(name.endswith(".npy") for name in files):
        return "npy"
    if (path / "header.json").exists():
        return "cebm"  # its reader says what is wrong with the header
    inside = ", ".join(map(repr, files[:5])) + (" …" if len(files) > 5 else "") if files else "nothing"
    if any(name.endswith((".tfrecord", ".array_record")) or "tfrecord" in name for name in files):
        raise _unread(path, "a TensorFlow (RLDS) dataset: convert it to LeRobot or Parquet first")
    raise _unread(path, f"a directory that is no dataset of a known layout (it holds {inside}); name one of its files?")


def _is_ours(header: Path) -> bool:
    """Whether the header says that the directory is cebm's; a damaged one counts where it names the format."""
    try:
        with header.open("rb") as file:
            content = file.read(_TEXT)
    except OSError:
        return False
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return FORMAT.encode() in content
    return isinstance(found, dict) and found.get("format") == FORMAT


def _file(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        raise DemonstrationError(f"{path}: the file is empty")
    if head.startswith(b"PK"):
        return _zip(path)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"\x89HDF\r\n\x1a\n") or _hdf5_behind_a_block(path):
        return "hdf5"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise _unread(path, "a pickle, which is never opened: it could run any program. Save the arrays as .npz")
    for magic, what in _OTHERS:
        if head.startswith(magic):
            raise _unread(path, what)
    if head[4:8] == b"ftyp":
        raise _unread(path, "an MP4 video")
    if head[257:262] == b"ustar":
        raise _unread(path, "a tar archive: unpack it first")
    return _text(path, head)


def _zip(path: Path) -> str:
    names = members_of(path)
    if any(name.endswith(("data.pkl", "/version")) for name in names):
        raise _unread(path, "a PyTorch file, which holds a pickle and is never opened. Save the arrays as .npz")
    if any(name.rpartition("/")[2] in (".zgroup", ".zarray", "zarr.json") for name in names):
        raise _unread(path, "a zipped Zarr store: unpack it first")
    if any(name.startswith("xl/") for name in names):
        raise _unread(path, "an Excel workbook: save it as CSV")
    arrays = [name for name in names if name.endswith(".npy")]
    if names and not arrays:
        raise _unread(path, f"a zip archive without arrays (it holds {names[0]!r}): unpack it first")
    return "cebm" if not names or {"header.npy", "header"} & set(names) else "npz"


def _hdf5_behind_a_block(path: Path) -> bool:
    """A user block may stand before HDF5: 512 bytes, or that doubled."""
    with path.open("rb") as file:
        for place in (512, 1024, 2048):
            file.seek(place)
            if file.read(8) == b"\x89HDF\r\n\x1a\n":
                return True
    return False


def _text(path: Path, head: bytes) -> str:
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4 or b"\x00" in head:
            if head.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise _unread(path, "text in UTF-16: save it in UTF-8") from error
            raise _unread(path, f"no format that is known (it begins with the bytes {head[:8].hex(' ')})") from error
        text = head[: error.start].decode("utf-8-sig")
    if "\x00" in text:
        raise _unread(path, f"no format that is known (it begins with the bytes {head[:8].hex(' ')})")
    if not text.strip():
        raise _unread(path, "empty text")
    if text.startswith("version https://git-lfs"):
        raise _unread(path, "a pointer of Git LFS, not the file itself: run git lfs pull")
    if text.lstrip().lower().startswith(("<!doctype", "<html", "<?xml")):
        raise _unread(path, "a web page, perhaps instead of a download that needs a login")
    return "csv"


def _unread(path: Path, what: str) -> DemonstrationError:
    return DemonstrationError(f"{path}: this looks like {what}")
