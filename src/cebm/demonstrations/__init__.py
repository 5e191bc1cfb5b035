"""Demonstrations: episodes of observations and actions, in memory and on disk.

On disk they are one `.npz` (`obs`, `action`, `episode_ends` and a JSON `header`) or, for sets that should
stay there, a directory with `header.json` and `.npy` files that are memory-mapped. Neither holds a pickle.
"""

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations, Windows
from cebm.demonstrations.files import FORMAT, VERSION

__all__ = ["FORMAT", "VERSION", "DemonstrationError", "Demonstrations", "Windows"]
