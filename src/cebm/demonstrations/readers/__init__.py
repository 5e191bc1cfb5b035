"""Readers of foreign formats: one function for all of them."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.readers.arrays import read_folder, read_mapping, read_npz
from cebm.demonstrations.readers.assembling import Wanted
from cebm.demonstrations.readers.hierarchies import read_hdf5, read_minari, read_zarr
from cebm.demonstrations.readers.lerobot import read_lerobot, video_frames
from cebm.demonstrations.readers.ours import read_ours
from cebm.demonstrations.readers.recognising import recognise
from cebm.demonstrations.readers.tables import read_csv, read_frame, read_parquet

__all__ = ["open_demonstrations", "recognise", "video_frames"]

Words = str | Sequence[str] | None

READERS: Mapping[str, Callable[[Path, Wanted], Demonstrations]] = {
    "cebm": read_ours,
    "npz": read_npz,
    "npy": read_folder,
    "csv": read_csv,
    "parquet": read_parquet,
    "hdf5": read_hdf5,
    "minari": read_minari,
    "zarr": read_zarr,
    "lerobot": read_lerobot,
}


def open_demonstrations(
    path: Any,
    *,
    obs: Words = None,
    action: Words = None,
    episodes: Words = None,
    listen: Callable[[float], None] = lambda share: None,
) -> Demonstrations:
    """Demonstrations from a file or folder of any known format, a DataFrame, or a dictionary of arrays.

    `obs` and `action` name arrays or columns: a name, a pattern such as `joint_*`, `NAME=PATTERN` for a part with a
    name of its own, or several of these. `episodes` names what tells where episodes end: cumulative ends, lengths, an
    id per step, or flags of the last step (`ends:KEY`, `lengths:KEY`, `ids:KEY`, `done:KEY` where the values could
    mean several), or `one` or `each` for one episode, or one per step. What is not given is looked for under its usual
    names. The format is recognised by content; nothing is unpickled. `listen` gets the share that is read.
    """
    words = {"obs": _words(obs, "obs"), "action": _words(action, "action"), "episodes": _words(episodes, "episodes")}
    if isinstance(path, Mapping):
        return read_mapping(path, Wanted("arrays", **words, listen=listen))
    if hasattr(path, "columns") and hasattr(path, "__getitem__"):
        return read_frame(path, Wanted("table", **words, listen=listen))
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path must be a path, a table or a dictionary of arrays, got {type(path).__name__}")
    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(f"{where}: there is no such file or directory")
    if not where.is_file() and not where.is_dir():
        raise DemonstrationError(f"{where}: neither a file nor a directory")
    return READERS[recognise(where)](where, Wanted(str(where), **words, listen=listen))


def _words(given: Words, name: str) -> tuple[str, ...]:
    words = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(word, str) and word for word in words):
        raise DemonstrationError(f"{name} takes names, got {given!r}")
    return words
