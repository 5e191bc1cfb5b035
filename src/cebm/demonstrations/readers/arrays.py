"""Arrays under any names: an `.npz`, a directory of `.npy` files, a dictionary."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.files import map_npy, read, read_members
from cebm.demonstrations.readers.assembling import Wanted, assembled, inside, natural


def read_npz(path: Path, wanted: Wanted) -> Demonstrations:
    """An `.npz` of another program; only the arrays that are asked for are read."""
    return assembled(wanted, _Members(path), metadata={"format": "npz"})


class _Members(Mapping[str, Any]):
    """The arrays of an `.npz`, each read when its values or its shape are asked for."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, dict[str, np.ndarray]()
        self._names = read_members(path)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._read:
            (self._read[name],) = read(self._path, (name,))[1]
        return self._read[name]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def read_folder(path: Path, wanted: Wanted) -> Demonstrations:
    """A directory of `.npy` files; each is memory-mapped and called by its name without the ending."""
    found = sorted((file for file in path.iterdir() if file.suffix == ".npy"), key=lambda file: natural(file.name))
    held = {file.stem: map_npy(inside(path, file, wanted)) for file in found}
    return assembled(wanted, held, metadata={"format": "npy"})


def read_mapping(values: Mapping[Any, Any], wanted: Wanted) -> Demonstrations:
    """A dictionary of arrays."""
    held = {}
    for name, value in values.items():
        try:
            held[str(name)] = np.asarray(value)
        except ValueError as error:
            raise DemonstrationError(f"{wanted.source}: {name!r} is ragged: {error}") from error
    return assembled(wanted, held, metadata={"format": "arrays"})


def members_of(path: Path) -> list[str]:
    """Names in a zip file; empty where its table of contents cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return []
