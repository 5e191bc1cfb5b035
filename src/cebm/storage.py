"""What goes to disk: settings as JSON, tensors as safetensors, never a pickle.

A bundle is a directory with `header.json` and one tensor file that the header names with its checksum; the header
has one of its own. The header is moved into place last and in one piece, so a reader finds the old bundle or the
new one, never a mixture.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor


class StorageError(ValueError):
    """A file is missing, damaged, altered or of a newer format; the message names it."""


def to_json(value: Any) -> Any:
    """Dataclasses become objects that name their type; tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} cannot be saved as JSON; use a dataclass of plain values")


def from_json(data: Any, classes: Iterable[type], where: str = "settings") -> Any:
    """The inverse of `to_json` for the dataclasses in `classes`. A missing or unknown field is an error, and so is
    a value that the class refuses; the message begins with `where` (the file)."""
    known = {cls.__name__: cls for cls in classes}

    def read(item: Any) -> Any:
        if isinstance(item, list):
            return tuple(read(part) for part in item)
        if not isinstance(item, dict):
            return item
        if "type" not in item:
            return {key: read(part) for key, part in item.items()}
        if item["type"] not in known:
            raise StorageError(f"{where}: unknown type {item['type']!r}; this version knows {', '.join(sorted(known))}")
        cls = known[item["type"]]
        names = {f.name for f in dataclasses.fields(cls)}
        given = item.keys() - {"type"}
        if given != names:
            raise StorageError(
                f"{where}: {item['type']}: missing {sorted(names - given)}, unknown {sorted(given - names)}"
            )
        values = {name: read(item[name]) for name in names}
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise StorageError(f"{where}: {item['type']}: {error}") from error

    return read(data)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside `path`, then moves into place; a failure leaves what was there and no debris."""
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


def save_bundle(directory: Path, kind: str, version: int, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a bundle of this kind and format version."""
    from safetensors.torch import save

    # Clones: safetensors refuses two names for one memory, such as one Box for observations and actions.
    content = save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"tensors-{digest[:12]}.safetensors"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / name, content)
    stored = {"format": kind, "version": version, "tensors": name, "sha256": digest, **header}
    stored["header_sha256"] = _header_digest(stored)
    write_atomically(directory / "header.json", (json.dumps(stored, indent=1) + "\n").encode())
    for other in directory.glob("tensors-*.safetensors"):
        if other.name != name:
            other.unlink()


def load_bundle(directory: Path, kind: str, version: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors (on the CPU) of a bundle; a StorageError says what is wrong with it."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = directory / "header.json"
    try:
        header = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise StorageError(f"{path}: damaged, not JSON ({error})") from error
    if not isinstance(header, dict) or header.get("format") != kind:
        raise StorageError(f"{path}: not a {kind}")
    missing = {"version", "tensors", "sha256", "header_sha256"} - header.keys()
    if missing:
        raise StorageError(f"{path}: {', '.join(sorted(missing))} missing")
    if not isinstance(header["version"], int) or not isinstance(header["tensors"], str):
        raise StorageError(f"{path}: damaged, its version or the name of its tensors makes no sense")
    if header["version"] > version:
        raise StorageError(
            f"{path}: written by a newer cebm (format {header['version']}, this one reads up to {version})"
        )
    if header["header_sha256"] != _header_digest(header):
        raise StorageError(f"{path}: damaged or altered, its checksum differs from its content")
    tensor_path = directory / Path(header["tensors"]).name
    try:
        content = tensor_path.read_bytes()
    except OSError as error:
        raise StorageError(f"{tensor_path}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != header["sha256"]:
        raise StorageError(f"{tensor_path}: damaged or altered, its checksum differs from the header's")
    try:
        return header, load(content)
    except SafetensorError as error:
        raise StorageError(f"{tensor_path}: not a safetensors file ({error})") from error


def _header_digest(header: dict[str, Any]) -> str:
    """Of its meaning: the order of keys and the white space do not count."""
    sealed = {key: value for key, value in header.items() if key != "header_sha256"}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def take(source: dict[str, Any], key: str, where: str) -> Any:
    """`source[key]`; a missing key is an error that names the place."""
    if key not in source:
        raise StorageError(f"{where}: {key!r} is missing")
    return source[key]
