"""What goes to disk: JSON and safetensors, never a pickle.

A bundle is a directory with `header.json` and one tensor file that the header names with its checksum; the header
has one of its own. The header is moved into place last and in one piece, so a reader finds the old bundle or the
new one, never a mixture. A document is one JSON file with a checksum inside. Rows are lines of JSON that are appended.
"""

import hashlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from cebm.settings import StorageError, check_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HEADER_BYTES = 16 * 2**20
"""The longest header that is read."""
DEEPEST = 100
"""Levels of nesting that a JSON file may have: more than settings have, less than Python's stack takes."""


class LockedError(RuntimeError):
    """Another process works in this directory; the message names both."""


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside `path`, then moves into place; a failure leaves what was there and no debris. What a killed
    process left behind when it wrote to this path is removed."""
    _remove_left_over(path.parent, path.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_left_over(directory: Path, name: str) -> None:
    """Removes the temporary files `.NAME.PID.tmp` of processes that are gone."""
    pattern = re.compile(rf"\.{re.escape(name)}\.(\d+)\.tmp")
    with suppress(OSError):  # the write itself will say what is wrong with the directory
        for other in os.listdir(directory):
            found = pattern.fullmatch(other)
            if found and not _is_alive(int(found[1])):
                (directory / other).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; True where one cannot tell."""
    if os.name == "nt":  # os.kill would end it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid > 0


def _parse(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object; a StorageError for anything else, however deep."""
    try:
        data = json.loads(content)
    except RecursionError as error:
        raise StorageError(f"{where}: damaged, nested too deeply") from error
    except ValueError as error:
        raise StorageError(f"{where}: damaged, not JSON ({error})") from error
    if not isinstance(data, dict):
        raise StorageError(f"{where}: damaged, not a JSON object")
    check_json(data, where, DEEPEST)
    return data


def _as_read(data: dict[str, Any], where: str) -> dict[str, Any]:
    """What a reader will find: a checksum of anything else would not fit, as where a key is a number."""
    return _parse(json.dumps(data).encode(), where)


def _digest(data: dict[str, Any], key: str) -> str:
    """SHA-256 of the meaning of all but `key`: the order of keys and the white space do not count."""
    sealed = {name: value for name, value in data.items() if name != key}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def _pretty(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


# -------------------------------------------------------------------------------------------- bundles

_RESERVED = ("format", "version", "tensors", "sha256", "header_sha256")


def save_bundle(directory: Path, kind: str, version: int, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a bundle of this kind and format version. Processes that save to the same directory take turns."""
    from safetensors.torch import save

    for key in _RESERVED:
        if key in header:
            raise ValueError(f"header: the key {key!r} belongs to the bundle")
    # Clones: safetensors refuses two names for one memory, such as one Box for observations and actions.
    content = save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"tensors-{digest[:12]}.safetensors"
    described = {"format": kind, "version": version, "tensors": name, "sha256": digest, **header}
    stored = _as_read(described, str(directory / "header.json"))
    stored["header_sha256"] = _digest(stored, "header_sha256")
    directory.mkdir(parents=True, exist_ok=True)
    with _one_writer(directory):
        write_atomically(directory / name, content)
        write_atomically(directory / "header.json", _pretty(stored))
        _remove_all_but(directory, name)


def _remove_all_but(directory: Path, name: str) -> None:
    """Removes the tensor files of a bundle that its header does not name. One that cannot be removed now is removed by
    the next save."""
    for other in directory.glob("tensors-*.safetensors"):
        if other.name != name:
            with suppress(OSError):
                other.unlink()
    for other in (*directory.glob(".tensors-*.safetensors.*.tmp"), *directory.glob(".header.json.*.tmp")):
        _remove_left_over(directory, other.name[1:].rsplit(".", 2)[0])


def tidy_bundle(directory: Path, kind: str, version: int) -> None:
    """Removes what a killed process left in a bundle: files that the header does not name, or, where there is no
    header, the whole directory. A damaged bundle stays as it is."""
    if not directory.is_dir():
        return
    with _one_writer(directory):
        if not (directory / "header.json").exists():
            shutil.rmtree(directory, ignore_errors=True)
            return
        with suppress(StorageError):
            _remove_all_but(directory, load_header(directory, kind, version)["tensors"])


def remove_bundle(directory: Path) -> None:
    """Removes a bundle, its header last: a process that is killed meanwhile leaves a bundle that is still found, and
    removed, by who lists the headers."""
    for path in directory.glob("*"):
        if path.name != "header.json":
            path.unlink()
    shutil.rmtree(directory)


def load_header(directory: Path, kind: str, version: int) -> dict[str, Any]:
    """The header of a bundle, its checksum verified; the tensors are not looked at."""
    path = directory / "header.json"
    try:
        with open(path, "rb") as file:
            content = file.read(HEADER_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    if len(content) > HEADER_BYTES:
        raise StorageError(f"{path}: damaged, longer than {HEADER_BYTES // 2**20} MB")
    header = _parse(content, str(path))
    if header.get("format") != kind:
        raise StorageError(f"{path}: not a {kind}")
    missing = {*_RESERVED} - header.keys()
    if missing:
        raise StorageError(f"{path}: {', '.join(sorted(missing))} missing")
    if type(header["version"]) is not int or not isinstance(header["tensors"], str):
        raise StorageError(f"{path}: damaged, its version or the name of its tensors makes no sense")
    if header["version"] > version:
        raise StorageError(
            f"{path}: written by a newer cebm (format {header['version']}, this one reads up to {version})"
        )
    if header["header_sha256"] != _digest(header, "header_sha256"):
        raise StorageError(f"{path}: damaged or altered, its checksum differs from its content")
    return header


def load_bundle(directory: Path, kind: str, version: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors (on the CPU) of a bundle; a StorageError says what is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    header, path, content = _whole_bundle(directory, kind, version)
    if hashlib.sha256(content).hexdigest() != header["sha256"]:
        raise StorageError(f"{path}: damaged or altered, its checksum differs from the header's")
    try:
        return header, load(content)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(f"{path}: not a safetensors file ({error})") from error


def _whole_bundle(directory: Path, kind: str, version: int) -> tuple[dict[str, Any], Path, bytes]:
    """Header and content of the tensor file that it names. A process that saves the bundle meanwhile removes the old
    tensor file: then the header has changed, and the new bundle is read. The file is missing for good when it is
    missing five times in a row for the same header."""
    seen, times = None, 0
    while True:
        header = load_header(directory, kind, version)
        path = _tensor_path(directory, header)
        try:
            return header, path, path.read_bytes()
        except FileNotFoundError as error:
            times = times + 1 if header["header_sha256"] == seen else 1
            seen = header["header_sha256"]
            if times == 5:
                raise StorageError(f"{path}: {error.strerror or error}") from error
            time.sleep(0.001 * times)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from error


def _tensor_path(directory: Path, header: dict[str, Any]) -> Path:
    """Inside the bundle, whatever the header says."""
    if not re.fullmatch(r"tensors-[0-9a-f]+\.safetensors", header["tensors"]):
        raise StorageError(f"{directory / 'header.json'}: damaged, {header['tensors'][:80]!r} names no tensor file")
    return directory / header["tensors"]


def tensor_shapes(directory: Path, header: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a bundle, without loading them: a loader compares them with what the header
    asks for before it builds anything. Only `load_bundle` verifies the file's checksum."""
    from safetensors import SafetensorError, safe_open

    path = _tensor_path(directory, header)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(f"{path}: not a safetensors file ({error})") from error


# -------------------------------------------------------------------------------------------- documents


def write_document(path: Path, data: dict[str, Any]) -> None:
    """Writes a JSON object with a checksum of its meaning under the key `sha256`."""
    if "sha256" in data:
        raise ValueError(f"{path}: the key 'sha256' belongs to the document's checksum")
    stored = _as_read(data, str(path))
    write_atomically(path, _pretty({**stored, "sha256": _digest(stored, "sha256")}))


def read_document(path: Path, what: str, old: bool = False) -> dict[str, Any]:
    """What `write_document` was given, its checksum verified; `what` says what the file should be. With `old`, a
    document without a checksum, as earlier versions wrote it, is read too."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: not a {what} ({error.strerror or error})") from error
    data = _parse(content, str(path))
    if "sha256" not in data:
        if old:
            return data
        raise StorageError(f"{path}: damaged or not a {what}, its checksum is missing")
    if data["sha256"] != _digest(data, "sha256"):
        raise StorageError(f"{path}: damaged or altered, its checksum differs from its content")
    return {key: value for key, value in data.items() if key != "sha256"}


# -------------------------------------------------------------------------------------------- rows


def row_line(row: dict[str, Any]) -> str:
    """A row of metrics as a line of JSON with its line end, and with a checksum under the key `crc`."""
    plain = _as_read({key: value for key, value in row.items() if key != "crc"}, "row")
    _check_row(plain, "row")
    return json.dumps({**plain, "crc": _crc(plain)}) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of metrics, without their checksums; none where there is no file. A last line that a kill cut
    short is left out; any other damage is a StorageError with the number of the line."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    rows = [_read_row(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    with suppress(StorageError):
        rows.append(_read_row(rest, str(path)))
    return rows


def _read_row(line: bytes, where: str) -> dict[str, Any]:
    row = _parse(line, where)
    crc = row.pop("crc", None)
    _check_row(row, where)
    if crc is not None and crc != _crc(row):
        raise StorageError(f"{where}: damaged or altered, its checksum differs from its content")
    return row


def _check_row(row: dict[str, Any], where: str) -> None:
    step = row.get("step")
    if type(step) is not int or step < 0:
        raise StorageError(f"{where}: step must be an integer of at least 0, got {step!r}")
    if not isinstance(row.get("kind"), str):
        raise StorageError(f"{where}: kind must be a string, got {row.get('kind')!r}")


def _crc(row: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(row, sort_keys=True).encode()):08x}"


# -------------------------------------------------------------------------------------------- locks

_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _close_inherited() -> None:
    """A forked child shares its parent's locks and would keep them after the parent's death: it closes its copies."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


@contextmanager
def locked(directory: str | Path, what: str = "run") -> Iterator[None]:
    """One process at a time in a directory; the others get a LockedError. The system releases the lock when the
    process ends, however it ends. The file `.lock` says who holds it, and is removed at the end."""
    path = Path(directory) / ".lock"
    owner = os.getpid()
    try:
        descriptor = _lock_file(path) if fcntl is not None else _pid_file(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked ({error.strerror or error})") from error
    _held.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{owner}\nThe process with this number works in this {what}.\n".encode())
        yield
    finally:
        if os.getpid() == owner:  # not in a forked child
            if fcntl is not None:
                path.unlink(missing_ok=True)  # while it is locked: nobody else can hold it
            _held.discard(descriptor)
            os.close(descriptor)
            if fcntl is None:
                path.unlink(missing_ok=True)


def _lock_file(path: Path) -> int:
    """The descriptor of the locked file. The file that was opened may have been removed by its last holder before it
    could be locked: then there is a new one."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BlockingIOError as error:
            holder = _holder(os.pread(descriptor, 100, 0))
            os.close(descriptor)
            raise LockedError(f"{path.parent} is in use by {holder}") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _pid_file(path: Path) -> int:
    """Without file locks: the file exists while its process lives."""
    content = b""
    for _ in range(3):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            with suppress(FileNotFoundError):  # released in this moment
                content = path.read_bytes()[:100]
                pid = content.split(b"\n")[0]
                if not pid.isdigit() or _is_alive(int(pid)):
                    break
                path.unlink()
    raise LockedError(f"{path.parent} is in use by {_holder(content)}; if it is not, delete {path}")


def _holder(content: bytes) -> str:
    pid = content.split(b"\n")[0]
    return f"process {int(pid)}" if pid.isdigit() else "another process"


@contextmanager
def _one_writer(directory: Path) -> Iterator[None]:
    """Waits until no other process saves to a directory. Locks the directory itself, so no file is left in it; where
    the file system has no locks, nobody waits."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    _held.add(descriptor)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


# -------------------------------------------------------------------------------------------- keys


def take(source: dict[str, Any], key: str, where: str) -> Any:
    """`source[key]`; a missing key is an error that names the place."""
    if key not in source:
        raise StorageError(f"{where}: {key!r} is missing")
    return source[key]
