"""Where the negative actions ỹ come from. Every source has one method, `sample`; actions are normalised.

A source without state is a frozen dataclass, which is also its settings. A source with state is a module, so that its
weights and buffers are saved with the rest, and has a frozen dataclass of settings that builds it: `Replay` builds a
`ReplayBuffer`, `MarginalActions` a `MarginalActionSampler`. Any source can also start the chains of another.
"""

from cebm.negatives.base import Density, Negatives, Positives, Source, has_density, own_losses
from cebm.negatives.chains import LongChain, Replay, ReplayBuffer, ShortChains
from cebm.negatives.marginal import MarginalActions, MarginalActionSampler
from cebm.negatives.mixture import Mixture
from cebm.negatives.plain import GaussianMixture, InBatch, Proposed, Uniform

__all__ = [
    "Density",
    "GaussianMixture",
    "InBatch",
    "LongChain",
    "MarginalActionSampler",
    "MarginalActions",
    "Mixture",
    "Negatives",
    "Positives",
    "Proposed",
    "Replay",
    "ReplayBuffer",
    "ShortChains",
    "Source",
    "Uniform",
    "has_density",
    "own_losses",
]
