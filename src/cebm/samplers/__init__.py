"""Samplers of p(y|x) ∝ exp(-E(x, y)) in normalised units. A sampler is a frozen object of hyper-parameters with
`init` and `step`; `run` is the only loop. Randomness comes from the generator that is passed in, and nowhere else.

`contract` has step sizes, the contract and the loop; `langevin`, `hamiltonian`, `tempering` and `search` the samplers.
"""

from cebm.samplers.contract import (
    Chain,
    ChainState,
    Collect,
    Constant,
    Exponential,
    Polynomial,
    Sampler,
    Schedule,
    StepInfo,
    StepSymbol,
    convert_step_size,
    moved,
    run,
    with_steps,
)
from cebm.samplers.hamiltonian import HMC, HMCState
from cebm.samplers.langevin import MALA, Langevin, LangevinState, MALAState
from cebm.samplers.search import Candidates, DerivativeFree
from cebm.samplers.tempering import Tempering, TemperingState

__all__ = [
    "HMC",
    "MALA",
    "Candidates",
    "Chain",
    "ChainState",
    "Collect",
    "Constant",
    "DerivativeFree",
    "Exponential",
    "HMCState",
    "Langevin",
    "LangevinState",
    "MALAState",
    "Polynomial",
    "Sampler",
    "Schedule",
    "StepInfo",
    "StepSymbol",
    "Tempering",
    "TemperingState",
    "convert_step_size",
    "moved",
    "run",
    "with_steps",
]

# Files and digests of settings name these classes `cebm.samplers:Langevin`: that is their address, wherever they lie.
for _piece in (Constant, Polynomial, Exponential, Collect, Langevin, MALA, HMC, DerivativeFree, Tempering):
    _piece.__module__ = __name__
