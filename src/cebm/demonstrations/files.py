"""Demonstrations on disk: one `.npz`, or a directory of `.npy` files with a `header.json`."""

import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from cebm.demonstrations.checks import DemonstrationError, Matrix
from cebm.demonstrations.large import save_npy
from cebm.parts import Part, parts_to_json

FORMAT = "cebm.demonstrations"
VERSION = 2  # 2 adds the checksum of the header, and arrays in float64
_CHUNK = 1 << 22  # bytes per read when a checksum is computed
_LARGEST_HEADER = 16 << 20  # bytes of our JSON header
_LONGEST_TEXT = 4_000_000  # characters of our JSON header; numpy stores 4 bytes for each in an .npz
_LARGEST_NPY_HEADER = 10_000  # bytes of the header that numpy puts before an array; numpy has the same limit
# Constants shrink about 1000-fold in a zip, the most that deflate can do; recordings rarely shrink 20-fold. An array of
# more than _LARGE bytes that expands more than _LARGEST_RATIO-fold is taken for a zip bomb.
_LARGE = 256 << 20
_LARGEST_RATIO = 200
_OURS = re.compile(
    r"header\.json|(obs|action|episode_ends)-[0-9a-f]{8}\.npy|\..*\.tmp"
)  # files that `write` makes in a directory


def check_target(target: Path) -> None:
    """Refuses a place where demonstrations cannot be saved."""
    if target.is_dir():
        for other in target.iterdir():
            if not _OURS.fullmatch(other.name):
                raise ValueError(f"{target}: the directory holds other files, such as {other.name!r}")
    elif target.suffix not in ("", ".npz"):
        raise ValueError(
            f"{target}: the name ends in {target.suffix!r}; give one that ends in '.npz' for a file, "
            "or one without a suffix for a directory"
        )


def write(
    target: Path,
    arrays: Mapping[str, Matrix],
    metadata: Mapping[str, Any],
    parts: Mapping[str, tuple[Part, ...]] = MappingProxyType({}),
) -> None:
    """Writes the arrays as `Demonstrations.save` describes, and in the header the parts that have names."""
    header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "metadata": metadata}
    header |= {key: parts_to_json(named) for key, named in parts.items() if not _unnamed(key, named)}
    check_target(target)
    if target.suffix == ".npz" and not target.is_dir():
        text = _sealed(header, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, lambda file: np.savez(file, header=text, **arrays))  # type: ignore[arg-type]
        return
    _sealed(header, target)  # refuses metadata that cannot be saved before anything is written
    target.mkdir(parents=True, exist_ok=True)
    header["arrays"] = {key: _write_array(target, key, array) for key, array in arrays.items()}
    content = _sealed(header, target).encode()
    _replace(target / "header.json", lambda file: file.write(content))
    kept = {entry["file"] for entry in header["arrays"].values()}
    for array in target.glob("*-*.npy"):
        if array.name not in kept:
            array.unlink()


def _unnamed(key: str, parts: tuple[Part, ...]) -> bool:
    """Whether these are the parts of a set whose columns nobody named."""
    default = "obs" if key == "parts" else "action"
    return len(parts) == 1 and parts[0] == Part(default, (parts[0].size,))


def read(source: Path, keys: Sequence[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns the header (empty for a file of another program) and the arrays under `keys`."""
    return _read_directory(source, keys) if source.is_dir() else _read_npz(source, keys)


def _sealed(header: Mapping[str, Any], target: Path) -> str:
    """Returns the header as JSON text, with its own checksum in it."""
    try:
        sealed = {**header, "header_sha256": _header_digest(header)}
        text = json.dumps(sealed, indent=2, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{target}: metadata does not fit JSON: {error}") from error
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"{target}: metadata takes {len(text):,} characters of JSON, at most {_LONGEST_TEXT:,} fit")
    return text


def _header_digest(header: Mapping[str, Any]) -> str:
    """Checksum of the header's meaning: the order of the keys and white space do not change it."""
    content = {key: value for key, value in header.items() if key != "header_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _replace(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a temporary file beside `target`, then moves it there."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class _Checksum:
    """A file-like object that keeps only the CRC-32 of the bytes written to it."""

    def __init__(self) -> None:
        self.crc32 = 0

    def write(self, block: bytes | memoryview) -> int:
        self.crc32 = zlib.crc32(block, self.crc32)
        return len(block)

    def __str__(self) -> str:
        return f"{self.crc32:08x}"


def _write_array(directory: Path, key: str, array: Matrix) -> dict[str, str]:
    """Writes a `.npy` file and returns its entry in the header.

    The checksum is part of the file's name, so a new array never replaces one that a reader has open.
    """
    checksum = _Checksum()
    save_npy(checksum, array)
    name = f"{key}-{checksum}.npy"
    _replace(directory / name, lambda file: save_npy(file, array))
    return {"file": name, "crc32": str(checksum)}


def _check_header(text: str, path: Path) -> dict[str, Any]:
    """Parses the header in `text`, which came from `path`; refuses damage, other formats and newer versions."""
    try:
        header = json.loads(text)
        digest = _header_digest(header) if isinstance(header, dict) else ""
    except (ValueError, RecursionError) as error:
        raise DemonstrationError(f"{path}: the header is not readable JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DemonstrationError(f"{path}: the header does not say that the format is {FORMAT}")
    version = header.get("version")
    if type(version) is not int or version < 1:
        raise DemonstrationError(f"{path}: the header's version is {version!r}")
    if version > VERSION:
        raise DemonstrationError(f"{path}: written in format {version}, this cebm reads up to {VERSION}")
    if (version >= 2 or "header_sha256" in header) and header.get("header_sha256") != digest:
        raise DemonstrationError(f"{path}: the header is damaged or altered, its checksum differs from its content")
    return header


def _read_npz(source: Path, keys: Sequence[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    with source.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read_archive(archive, source, keys)
        except DemonstrationError:
            raise
        except Exception as error:  # damaged bytes can fail anywhere in zipfile, zlib or numpy
            raise _unreadable(source, error) from error


def _read_archive(
    archive: zipfile.ZipFile, source: Path, keys: Sequence[str]
) -> tuple[dict[str, Any], list[np.ndarray]]:
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    _check_keys(keys, list(members), source)
    header = {}
    if "header" in members:
        size = members["header"].file_size
        if size > _LARGEST_HEADER:
            raise DemonstrationError(f"{source}: the header has {size:,} bytes, at most {_LARGEST_HEADER:,} are read")
        header = _check_header(str(_read_member(archive, members["header"], "header", source)), source)
    else:
        # Either another program wrote this file, or the name of our header is damaged in the table of contents.
        # Opening a member compares its name there with the one beside its data.
        for info in members.values():
            archive.open(info).close()
    return header, [_read_member(archive, members[key], key, source) for key in keys]


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, key: str, source: Path) -> np.ndarray:
    """Reads one array. Its size is checked before memory is allocated for it."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # Python limits how much deflate expands per read, but not the other methods.
        raise DemonstrationError(
            f"{source}: cannot read {key!r}: its zip compression method is {info.compress_type}, "
            "expected stored or deflated, as numpy writes"
        )
    if info.file_size > _LARGE and info.file_size > _LARGEST_RATIO * info.compress_size:
        raise DemonstrationError(
            f"{source}: {key!r} would expand from {info.compress_size:,} to {info.file_size:,} bytes; "
            f"arrays above {_LARGE:,} bytes may expand {_LARGEST_RATIO}-fold. "
            "If the data are right, store them uncompressed (np.savez)"
        )
    try:
        with archive.open(info) as member:
            _check_size(member.read, info.file_size, repr(key), source)
        with archive.open(info) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
            member.read(1)  # zipfile compares its checksum when it reaches the end
    except DemonstrationError:
        raise
    except Exception as error:  # numpy's parser raises many types on damaged bytes
        raise DemonstrationError(f"{source}: cannot read {key!r} ({type(error).__name__}: {error})") from error
    return array


def _check_size(read: Callable[[int], bytes], size: int, what: str, source: Path) -> None:
    """Compares the `size` of a `.npy` file with the size that its own header declares.

    That is the header's length + the product of the shape × the bytes per value. Reads the header only.
    """
    start = read(12)
    version = tuple(start[6:8])
    if start[:6] != np.lib.format.MAGIC_PREFIX or len(start) < 12:
        raise DemonstrationError(f"{source}: cannot read {what}: it does not begin like a .npy file")
    if version not in ((1, 0), (2, 0)):  # version 3 has named fields in Unicode, which plain numbers never need
        raise DemonstrationError(f"{source}: cannot read {what}: .npy format {start[6]}.{start[7]}, expected 1 or 2")
    (length,) = struct.unpack_from("<H" if version == (1, 0) else "<I", start, 8)
    if length > _LARGEST_NPY_HEADER:
        raise DemonstrationError(f"{source}: cannot read {what}: its .npy header has {length:,} bytes")
    text = io.BytesIO(start[8:] + read(length))
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(text)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(text)
    if dtype.hasobject:
        raise DemonstrationError(f"{source}: cannot read {what}: it is a pickle, and allow_pickle is always off")
    if any(extent < 0 for extent in shape) or dtype.itemsize == 0:
        raise DemonstrationError(f"{source}: cannot read {what}: it declares shape {shape} of {dtype}")
    expected = 8 + text.tell() + math.prod(shape) * dtype.itemsize
    if expected != size:
        raise DemonstrationError(
            f"{source}: {what} is {'longer' if size > expected else 'shorter'} than its shape says: "
            f"{shape} of {dtype} takes {expected:,} bytes with the header, there are {size:,}"
        )


def _read_directory(source: Path, keys: Sequence[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    path = source / "header.json"
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_HEADER + 1)
        text = content.decode()
    except FileNotFoundError as error:
        raise DemonstrationError(f"{source}: the directory has no header.json") from error
    except OSError as error:
        raise DemonstrationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DemonstrationError(f"{path}: not UTF-8 text: {error}") from error
    if len(content) > _LARGEST_HEADER:
        raise DemonstrationError(f"{path}: the header has more than {_LARGEST_HEADER:,} bytes")
    header = _check_header(text, path)
    entries = header.get("arrays")
    if not isinstance(entries, dict):
        raise DemonstrationError(f"{path}: the header lists no arrays")
    _check_keys(keys, list(entries), source)
    return header, [_map_array(source, key, entries[key]) for key in keys]


def _check_keys(keys: Sequence[str], held: Sequence[str], source: Path) -> None:
    for key in keys:
        if key not in held:
            raise DemonstrationError(f"{source}: there is no {key!r}; it holds {', '.join(map(repr, held))}")


def _map_array(directory: Path, key: str, entry: Any) -> np.ndarray:
    """Compares the checksum of a `.npy` file with the header's, then maps the file into memory."""
    if not isinstance(entry, dict) or not {"file", "crc32"} <= entry.keys():
        raise DemonstrationError(f"{directory / 'header.json'}: the entry of {key!r} lacks 'file' or 'crc32'")
    name = str(entry["file"])
    path = directory / name
    if name != path.name:
        raise DemonstrationError(f"{directory / 'header.json'}: {name!r} is not a file of this directory")
    return map_npy(path, entry["crc32"])


def map_npy(path: Path, crc32: str | None = None) -> np.ndarray:
    """Maps a `.npy` file into memory, after comparing its checksum, where one is given, and its size."""
    checksum = _Checksum()
    try:
        with path.open("rb") as file:
            if crc32 is not None:
                shutil.copyfileobj(file, checksum, _CHUNK)
                if str(checksum) != crc32:
                    raise DemonstrationError(
                        f"{path}: truncated or damaged, its checksum differs from the one in the header"
                    )
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            _check_size(file.read, size, "the array", path)
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except DemonstrationError:
        raise
    except FileNotFoundError as error:
        raise DemonstrationError(f"{path}: the file is missing") from error
    except Exception as error:  # numpy's parser raises many types on damaged bytes
        raise DemonstrationError(f"{path}: cannot read the array ({type(error).__name__}: {error})") from error


def read_members(source: Path) -> list[str]:
    """Names of the arrays of an `.npz`."""
    with source.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return [info.filename.removesuffix(".npy") for info in archive.infolist()]
        except Exception as error:  # damaged bytes can fail anywhere in zipfile
            raise _unreadable(source, error) from error


def _unreadable(source: Path, error: Exception) -> DemonstrationError:
    return DemonstrationError(f"{source}: not a readable .npz, truncated or damaged ({type(error).__name__}: {error})")
