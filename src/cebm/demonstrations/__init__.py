"""Demonstrations: episodes of observations and actions, in memory and on disk.

On disk a set is one `.npz` file (`obs`, `action`, `episode_ends` and a JSON `header`) or a directory with a
`header.json` and three `.npy` files. The files of a directory are memory-mapped, for sets that do not fit into memory.
Neither form holds a pickle, and both have checksums. Files of other programs are read by `open_demonstrations`.
"""

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations, Windows
from cebm.demonstrations.files import FORMAT, VERSION
from cebm.demonstrations.readers import open_demonstrations

__all__ = ["FORMAT", "VERSION", "DemonstrationError", "Demonstrations", "Windows", "open_demonstrations"]
