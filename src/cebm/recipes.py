"""Trials: compositions of an energy, an objective, penalties, an optimiser, a way to act and units.

`Trial` is one frozen dataclass of frozen dataclasses; the command line and the checkpoint both read it. `TRIALS` holds
the paper's four trials, its failed attempts, the baselines and ours.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from cebm.acting import Acting, Direct, Search
from cebm.annealing import AnnealedSearch
from cebm.arithmetic import Precision, check_precision
from cebm.composition import vary, walk
from cebm.denoising import DenoisingScore
from cebm.energies import MLP, MixtureDensity, Nearest, NoiseConditional, Regression, Tilted, TwoStep
from cebm.energies.base import EnergySettings
from cebm.negatives import (
    GaussianMixture,
    InBatch,
    LongChain,
    MarginalActions,
    Proposed,
    Replay,
    ShortChains,
    Uniform,
)
from cebm.objectives import (
    MCMC,
    ImportanceNLL,
    InfoNCE,
    Likelihood,
    LossPenalty,
    MaximumEntropy,
    TwoSquares,
)
from cebm.optimisers import Adam, Cosine, Optimiser, Trapezoid
from cebm.samplers import Constant, DerivativeFree, Langevin, Polynomial
from cebm.spaces import Part, Specification
from cebm.units import Kind, Perturbation, Relative, Symmetry, as_pieces

__all__ = ["TRIALS", "Inputs", "Trial", "find_trial", "vary"]


@dataclass(frozen=True)
class Inputs:
    """What the energy gets to see of the data, and in which units."""

    obs_scaling: Literal["min-max", "standardise", "robust"] = "min-max"
    """'min-max': observations fill [-1, 1] (the paper). 'standardise': zero mean, unit variance (reference code).
    'robust': asinh around the median first, then as 'standardise': for heavy tails."""
    history: int = 1
    """Observations the policy sees: this many, the current one last."""
    horizon: int = 1
    """Actions it gives at once: the current one first."""
    smoothing: float = 0.0
    """Standard deviation s of the noise that demonstrated actions get in training, normalised units: the energy is
    that of p(y|x) smoothed by N(0, s²), whose curvature is at most 1/s²."""
    action_scaling: Literal["min-max", "robust"] = "min-max"
    """'min-max': actions fill [-1, 1]. 'robust': asinh around the median first, for heavy tails."""
    obs_kinds: tuple[Kind | str, ...] | Kind | str = ()
    """Columns of an observation that are no plain numbers: "Angle(4)", "Quaternion('3:7')", "Category(0)"."""
    action_kinds: tuple[Kind | str, ...] | Kind | str = ()
    """Columns of an action that are no plain numbers."""
    constants: Literal["exact", "learn"] = "exact"
    """Action columns that never change: 'exact' gives them back exactly and learns the others, 'learn' takes them for
    any other column, as runs of earlier versions do."""
    relative: tuple[Relative | str, ...] | Relative | str = ()
    """Actions that are told from columns of the newest observation: "Relative((0, 1), (0, 1), 64)"."""
    jitter: tuple[Perturbation | str, ...] | Perturbation | str = ()
    """Moves the state of each training example, while its actions stay where they are in raw units:
    "Gaussian((0, 1), 5)", "PlanarPose('2:20', 3, 0.03)"."""
    symmetries: tuple[Symmetry | str, ...] | Symmetry | str = ()
    """Maps that turn an episode into an equivalent one; each doubles the training data."""
    padding: Literal["keep", "drop", "mask"] | int = "keep"
    """Training chunks that reach beyond the end of an episode: 'keep' repeats its last action, 'drop' leaves them out,
    a number leaves out those that reach further than so many steps (Diffusion Policy: the actions executed, less one),
    'mask' fills the rest with actions of random other steps, so that it teaches nothing."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("obs_scaling", ("min-max", "standardise", "robust")),
            ("action_scaling", ("min-max", "robust")),
            ("constants", ("exact", "learn")),
            *([] if type(self.padding) is int else [("padding", ("keep", "drop", "mask"))]),
        ):
            if getattr(self, name) not in choices:
                listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"{name} must be {listed}, got {getattr(self, name)!r}")
        for name, method in (
            ("obs_kinds", "inside"),
            ("action_kinds", "inside"),
            ("relative", "located"),
            ("jitter", "perturb"),
            ("symmetries", "transform"),
        ):
            object.__setattr__(self, name, as_pieces(getattr(self, name), name, method))
        for name in ("history", "horizon"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if type(self.padding) is int and self.padding < 0:
            raise ValueError(f"padding must be at least 0 steps, got {self.padding}")
        if not 0 <= self.smoothing < inf:
            raise ValueError(f"smoothing must be at least 0 and finite, got {self.smoothing}")

    def specification(self, obs: int | tuple[Part, ...], action: int) -> Specification:
        """What an energy is built for, on data of so many columns, or of these parts of an observation."""
        parts = (Part("obs", (obs,)),) if isinstance(obs, int) else obs
        return Specification(parts, action, self.history, self.horizon, self.smoothing)


@dataclass(frozen=True)
class Trial:
    """Everything that decides what is learned, apart from the data, the seed and the number of steps.

    Each field is a frozen dataclass with one method that says what it is for; yours are as good as ours:
    `energy.build(spec, generator)`, `objective.terms(…)`, `penalty.penalty(…)`, `acting.search(…)`.
    """

    energy: EnergySettings = MLP()
    """Settings that build the energy."""
    objective: Any = InfoNCE()
    """What is minimised, with its source of negatives."""
    penalties: tuple[LossPenalty, ...] = ()
    """Terms to add to the objective, in this order."""
    optimiser: Optimiser = Adam()
    """How weights follow the loss."""
    acting: Acting = Search()
    """How the trained policy finds its action."""
    inputs: Inputs = Inputs()
    """Units, history, horizon and smoothing."""
    precision: Precision = "float32"
    """'bf16': training multiplies in bfloat16 in the hidden layers of networks; all else stays in float32. 'measured':
    where that is faster, as measured before the first step; a resumed run keeps to it."""
    compiled: bool = False
    """Compile the training step by torch.compile and keep to that where it is faster, as measured before the first
    step. Where it cannot be compiled, training goes on without."""

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if not isinstance(self.penalties, tuple):
            raise ValueError(f"penalties must be a tuple, got {self.penalties!r}")
        if not isinstance(self.inputs, Inputs):
            raise ValueError(f"inputs must be an Inputs, got {self.inputs!r}")
        for name, value, methods in (
            ("energy", self.energy, ("build",)),
            ("objective", self.objective, ("terms", "build")),
            ("optimiser", self.optimiser, ("make",)),
            ("acting", self.acting, ("search",)),
            *((f"penalties.{i}", each, ("penalty",)) for i, each in enumerate(self.penalties)),
        ):
            if isinstance(value, type) or not any(hasattr(value, method) for method in methods):
                shown = value.__name__ if isinstance(value, type) else repr(value)
                wanted = " or ".join(f"`{method}`" for method in methods)
                raise ValueError(f"{name} must be an object with a method {wanted}, got {shown}")
        for _, piece in walk(self):
            if piece is not self and hasattr(piece, "check_composition"):
                piece.check_composition(self)


_CORRECT = Langevin("correct")
_SMOOTHING = 0.05
_IBC = Trial()
_CORRECTED = Tilted(base_sees="nothing")


def _mas(**settings: Any) -> InfoNCE:
    return InfoNCE(MarginalActions(**settings))


TRIALS: dict[str, Trial] = {
    # Ours, the default: docs/stability.md says why each of these is what it is.
    "steady": Trial(
        energy=Tilted(MLP(init="torch"), MixtureDensity()),
        objective=InfoNCE(Proposed(), 4),
        optimiser=Adam(3e-3, Cosine(), average=0.995),
        # y − s²∇E is the mean of the clean actions that a smoothed one may come from (Tweedie): one step, of the one
        # size that fits, whatever the task.
        acting=Search(Langevin("ibc", 1, Constant(2 * _SMOOTHING**2), noise=0.0), 16, "draw", 4),
        inputs=Inputs("standardise", smoothing=_SMOOTHING),
    ),
    # Ours, an energy at every noise level that chooses among its own draws: docs/annealed.md.
    "annealed": Trial(
        energy=NoiseConditional(),
        objective=DenoisingScore(),
        optimiser=Adam(1e-3, Trapezoid(), batch_size=64, average=0.999, weight_decay=1e-4),
        acting=AnnealedSearch(),
        inputs=Inputs("standardise"),
    ),
    # The paper's four.
    "ibc": _IBC,
    "ibc-mas": replace(_IBC, objective=_mas(sampler=Langevin("ibc", noise=0.1))),
    "correct-mas": replace(_IBC, objective=_mas(sampler=_CORRECT)),
    "correct-mas-maxent": replace(_IBC, objective=_mas(sampler=_CORRECT, objective="maxent", positive_l2=1.0)),
    # The same with one thing changed.
    "correct": replace(_IBC, objective=InfoNCE(ShortChains(_CORRECT))),
    "uniform": replace(_IBC, objective=InfoNCE(Uniform())),
    "in-batch": replace(_IBC, objective=InfoNCE(InBatch())),
    # The same with the marginal correction: InfoNCE with negatives from p(y) learns log p(y|x)/p(y), so act by
    # E(x, y) − log p̂(y).
    "in-batch-corrected": replace(_IBC, objective=InfoNCE(InBatch()), energy=_CORRECTED),
    "ibc-mas-corrected": replace(_IBC, objective=_mas(sampler=Langevin("ibc", noise=0.1)), energy=_CORRECTED),
    # IBC's derivative-free variant; 64 uniform negatives cost as much as 8 chains of 10 steps.
    "dfo": replace(_IBC, objective=InfoNCE(Uniform(), 64), acting=Search(DerivativeFree())),
    # The explicit baselines.
    "mse": replace(_IBC, energy=Regression(), objective=Likelihood(), acting=Direct()),
    "mdn": replace(_IBC, energy=MixtureDensity(), objective=Likelihood(), acting=Direct()),
    # Two cheap baselines beyond the paper: the chunk of the nearest demonstration (no training, so one step is enough),
    # and a regression with one refinement.
    "nearest": replace(_IBC, energy=Nearest(), objective=Likelihood(), acting=Direct(), inputs=Inputs("standardise")),
    "two-step": Trial(
        TwoStep(), TwoSquares(), (), Adam(1e-3, Cosine(), average=0.995), Direct(), Inputs("standardise")
    ),
    # The paper's failed attempts.
    "mcmc-loss": replace(_IBC, objective=MCMC()),
    "conditional-maxent": replace(_IBC, objective=MaximumEntropy(ShortChains(_CORRECT))),
    "long-chain": replace(_IBC, objective=InfoNCE(LongChain(Langevin("correct", schedule=Constant(0.01))))),
    "joint-replay": replace(
        _IBC,
        objective=MCMC(Replay(Langevin("correct", schedule=Polynomial(0.1, 1e-3)), joint=True)),
    ),
    "gmm-nll": replace(_IBC, objective=ImportanceNLL(GaussianMixture(), 64)),
}


def find_trial(name: str) -> Trial:
    """The trial of that name; a ValueError lists the names there are."""
    if name not in TRIALS:
        raise ValueError(f"there is no trial {name!r}; there are {', '.join(TRIALS)}")
    return TRIALS[name]
