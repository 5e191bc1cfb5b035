"""The contract of an energy E(x, y) of an action y under an observation x: low is likely, p(y|x) ∝ exp(-E(x, y)).

`encode(obs)` does the observation's work once; `energies` and `energies_and_gradients` then take many actions
per observation, which is what a chain needs. Two methods are enough for an energy of one's own, `encode` and
`energies`; the others have defaults that say "no": no proposal, no levels, no action in closed form.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.arithmetic import reduced, rounding
from cebm.spaces import Specification, traced

if TYPE_CHECKING:
    from cebm.energies.sums import WeightedSum

Obs = Float[Tensor, "batch *obs"]
Context = Any
"""What `encode` gives: a tensor, or a tuple, list or dict of tensors, each with the batch as its first axis."""
Actions = Float[Tensor, "batch samples act"]
Energies = Float[Tensor, "batch samples"]
Level = float | Float[Tensor, "batch samples"]
"""A noise level: one for all actions, or one for each."""
PenaltyFunction = Callable[[Tensor, Tensor], Tensor]


class EnergyModel(nn.Module, ABC):
    """The contract. Energies compose: `energy + other`, `0.5 * energy`, `energy + penalty_function`."""

    obs_dim: int
    """Columns of an observation; 0 for an energy that ignores it."""
    act_dim: int
    """Columns of an action."""
    context_dim: int | None = None
    """Columns of the context where it is one matrix, which `check` then looks at."""
    closed_form: bool = False
    """Whether gradients come without autograd: the search then runs in inference mode, which is an eighth faster."""
    levels: tuple[float, ...] = ()
    """Noise levels that `at` knows, the largest first; none for an energy without levels."""
    deviation: float = 0.5
    """Deviation d of the actions, in units of which a sampler or an objective counts levels."""
    proposes_itself: bool = False
    """Whether `propose` draws from the density exp(−E) itself: then `excess` is 0."""
    smoothable: bool = False
    """Whether `at(s)` is, for every s, the exact energy −log(p ∗ N(0, s²)) of the blurred density."""

    @abstractmethod
    def encode(self, obs: Obs) -> Context:
        """The part of E(x, y) that depends on the observation alone, computed once per chain."""

    @abstractmethod
    def energies(self, context: Context, actions: Actions) -> Energies:
        """E(x, y) for every sampled action of every observation."""

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        """E(x, y) and ∇_y E(x, y), without dropout. Differentiable again while autograd is enabled. By autograd here;
        a closed form is several times as fast."""
        context = outside_inference(context)
        with evaluating(self):
            return autograd_gradients(lambda y: self.energies(context, y), actions)

    def gradients(self, context: Context, actions: Actions) -> Actions:
        """∇_y E(x, y) alone, for a sampler that does not look at the energies. A closed form may leave them out."""
        return self.energies_and_gradients(context, actions)[1]

    def at(self, level: Level) -> "EnergyModel":
        """The energy at a noise level, for the same context: itself, for an energy without levels."""
        return self

    @property
    def proposes(self) -> bool:
        """Whether `propose` gives draws, not None."""
        return type(self).propose is not EnergyModel.propose

    def propose(self, context: Context, n: int, generator: torch.Generator, shared: bool = False) -> Actions:
        """`n` draws per observation of a density q(y|x) that is near p(y|x): where a search begins, and where
        negatives may come from. `shared`: the same random numbers for every observation."""
        raise TypeError(f"{type(self).__name__} has no proposal to draw from")

    def excess(self, context: Context, actions: Actions) -> Energies:
        """E(x, y) + log q(y|x): minus the log of the weight that makes draws of `propose` draws of p(y|x). Without a
        proposal q is uniform, and this is E itself up to a constant. An energy with a proposal must say its own."""
        if self.proposes:
            raise TypeError(
                f"{type(self).__name__} has `propose` but no `excess`, the energy plus log q of its proposal"
            )
        return self.energies(context, actions)

    def added(self, context: Context, actions: Actions) -> Energies | None:
        """Of a sum the terms without levels, such as penalties: draws that fall through the levels of the others know
        at most the slopes of these. None where there are none."""
        return None

    @property
    def explicit(self) -> bool:
        """Whether `best` gives the action without a search."""
        return type(self).best is not EnergyModel.best

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        """The action of lowest energy, where it is known in closed form."""
        raise TypeError(f"{type(self).__name__} does not know its lowest energy: search for it")

    @property
    def alone(self) -> "EnergyModel | None":
        """A part that can act without the rest, which shows what the rest adds: of a tilted density the density. None
        where there is none."""
        return None

    @property
    def contrasted(self) -> "EnergyModel":
        """The part that a contrastive objective trains: the energy itself, or, of a tilted one, the tilt."""
        return self

    def own_losses(self, obs: Obs, actions: Float[Tensor, "batch act"]) -> dict[str, Tensor]:
        """Losses that parts of this energy need beside the objective, by the name to log them under."""
        return {}

    def pairs(self) -> "EnergyModel":
        """The same energy over pairs z = (x, y), to sample observations and actions together (a joint model)."""
        raise TypeError(f"{type(self).__name__} has no joint form over pairs (x, y)")

    def forward(self, obs: Obs, actions: Actions) -> Energies:
        return self.energies(self.encode(obs), actions)

    def check(self, context: Context, actions: Tensor) -> None:
        """ValueError naming the argument whose shape does not fit this energy."""
        columns = self.context_dim
        fits = columns is None or (isinstance(context, Tensor) and context.ndim == 2 and context.shape[1] == columns)
        if not fits:
            raise ValueError(f"context must be [batch, {columns}], got {described(context)}")
        first = context if isinstance(context, Tensor) else next(leaves(context), None)
        if first is None or not first.ndim:
            raise ValueError("context must hold tensors whose first axis is the batch")
        self.check_actions(first.shape[0], actions)

    def check_actions(self, batch: int, actions: Tensor) -> None:
        """ValueError where the actions are not some for each of `batch` observations."""
        shape = actions.shape
        if len(shape) != 3 or shape[2] != self.act_dim or shape[0] != batch:
            raise ValueError(f"actions must be [{batch}, samples, {self.act_dim}], got {tuple(shape)}")
        if shape[0] == 0 or shape[1] == 0:
            raise ValueError(f"actions must not be empty, got {tuple(shape)}")

    def check_obs(self, obs: Tensor) -> None:
        """ValueError where a flat observation does not fit this energy."""
        if obs.ndim != 2 or obs.shape[1] != self.obs_dim:
            raise ValueError(f"obs must be [batch, {self.obs_dim}], got {tuple(obs.shape)}")

    def __add__(self, other: "EnergyModel | PenaltyFunction") -> "WeightedSum":
        from cebm.energies.sums import WeightedSum

        if not isinstance(other, EnergyModel):
            other = Penalty(other, self.obs_dim, self.act_dim)
        return WeightedSum([self, other], [1.0, 1.0])

    def __mul__(self, weight: float | int) -> "WeightedSum":
        from cebm.energies.sums import WeightedSum

        return WeightedSum([self], [float(weight)])

    __rmul__ = __mul__


@runtime_checkable
class EnergySettings(Protocol):
    """Settings of an energy: a frozen dataclass that builds it. `explicit = True` says that it is −log p(y|x) in closed
    form and knows its best action; `joint = True` that it has a form over pairs (x, y).

    An energy that stores demonstrations has a method `remember(obs, actions)`, which gets all training pairs,
    normalised, once before the first step. Settings whose energy depends on their number have a method `sized(pairs)`,
    which gives the settings for so many; those are saved with the policy."""

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy for such observations and actions, its weights drawn from `generator`."""
        ...


class ModuleEnergy(EnergyModel):
    """E(x, y) = module(encoder(x), y) for any module that maps rows (features, action) to an energy, with gradients by
    autograd.

    `encoder` turns observations (of any shape, images too) into `feature_dim` features, once per chain;
    without one, the observation itself is the feature vector.
    """

    def __init__(
        self,
        module: nn.Module,
        obs_dim: int,
        act_dim: int,
        encoder: nn.Module | None = None,
        feature_dim: int | None = None,
    ) -> None:
        super().__init__()
        if encoder is not None and feature_dim is None:
            raise ValueError("feature_dim must be given with an encoder")
        self.module, self.encoder = module, encoder
        self.obs_dim, self.act_dim = obs_dim, act_dim
        self.context_dim = obs_dim if feature_dim is None else feature_dim

    def encode(self, obs: Obs) -> Context:
        if self.encoder is None:
            self.check_obs(obs)
            return obs
        with self._cast(obs):
            features = self.encoder(obs)
        return features.to(obs.dtype) if features.dtype == torch.bfloat16 else features

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        rows = context.unsqueeze(1).expand(-1, actions.shape[1], -1)
        with self._cast(actions):
            energies = self.module(rows.flatten(0, 1), actions.flatten(0, 1))
        if energies.numel() != actions.shape[0] * actions.shape[1]:
            rows_given = actions.shape[0] * actions.shape[1]
            raise ValueError(f"module must return one energy per row ({rows_given}), got {tuple(energies.shape)}")
        return energies.reshape(actions.shape[:2]).to(actions.dtype)

    def _cast(self, values: Tensor) -> Any:
        """Which of its products may be rounded only the module knows, so in bfloat16 it gets torch's own rules."""
        if not reduced():
            return nullcontext()
        return rounding(values.device)


class Penalty(EnergyModel):
    """E(x, y) = function(x, y), of obs [batch, obs] and actions [batch, samples, act]: an obstacle, a limit."""

    def __init__(self, function: PenaltyFunction, obs_dim: int, act_dim: int) -> None:
        super().__init__()
        self.function = function
        self.obs_dim, self.act_dim, self.context_dim = obs_dim, act_dim, obs_dim

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        return obs

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        energies = self.function(context, actions)
        if energies.shape != actions.shape[:2]:
            raise ValueError(f"penalty must return {tuple(actions.shape[:2])} energies, got {tuple(energies.shape)}")
        return energies


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode (no dropout) inside the block; every submodule gets its own mode back."""
    training = _training(module)
    try:
        for submodule in training:
            submodule.training = False
        yield
    finally:
        for submodule in training:
            submodule.training = True


def _training(module: nn.Module) -> list[nn.Module]:
    """The submodules in training mode. `module.modules()` also makes names, which takes as long as a small layer."""
    found, left = [], [module]
    while left:
        each = left.pop()
        if each.training:
            found.append(each)
        left.extend(child for child in each._modules.values() if child is not None)
    return found


@contextmanager
def initialised_by(generator: torch.Generator | None) -> Iterator[None]:
    """Inside the block `generator` decides what modules draw that know only torch's global generator, as torch's own
    layers do when they are made; the global generator is put back afterwards. Without one nothing changes."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng([]):
        torch.random.default_generator.manual_seed(seed)
        yield


def autograd_gradients(function: Callable[[Tensor], Tensor], actions: Actions) -> tuple[Energies, Actions]:
    """E and ∇E of any differentiable `function` of the actions, in inference mode too."""
    if traced():  # a tracer knows no inference mode
        with torch.enable_grad():
            leaf = actions.detach().requires_grad_()
            energies = function(leaf)
            if not energies.requires_grad:
                return energies, torch.zeros_like(actions)
            return energies.detach(), torch.autograd.grad(energies.sum(), leaf, materialize_grads=True)[0].detach()
    keep = torch.is_grad_enabled()
    actions = outside_inference(actions)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = actions if keep and actions.requires_grad else actions.detach().requires_grad_()
        energies = function(leaf)
        if not energies.requires_grad:  # a constant
            return energies, torch.zeros_like(actions)
        result: tuple[Any, ...] = torch.autograd.grad(energies.sum(), leaf, create_graph=keep, materialize_grads=True)
    return (energies if keep else energies.detach()), result[0]


def outside_inference(values: Any) -> Any:
    """The tensors of a context, copied where they were made in inference mode: those cannot enter a graph."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.is_inference() else tensor

    with torch.inference_mode(False):
        return mapped(copied, values)


def leaves(context: Context) -> Iterator[Tensor]:
    """The tensors of a context."""
    if isinstance(context, Tensor):
        yield context
    elif isinstance(context, tuple | list):
        for part in context:
            yield from leaves(part)
    elif isinstance(context, Mapping):
        for part in context.values():
            yield from leaves(part)
    else:
        raise TypeError(f"a context is made of tensors, tuples, lists and dicts, not {type(context).__name__}")


def described(context: Context) -> str:
    """The shape of a tensor, the length of a tuple, or else the type: for error messages."""
    if isinstance(context, Tensor):
        return str(tuple(context.shape))
    return f"{len(context)} contexts" if isinstance(context, tuple) else f"a {type(context).__name__}"


def mapped(function: Callable[[Tensor], Tensor], context: Context) -> Context:
    """The context with `function` applied to each of its tensors."""
    if isinstance(context, Tensor):
        return function(context)
    if isinstance(context, Mapping):
        return {name: mapped(function, part) for name, part in context.items()}
    if isinstance(context, tuple | list):
        parts = [mapped(function, part) for part in context]
        return type(context)(*parts) if hasattr(context, "_fields") else type(context)(parts)
    raise TypeError(f"a context is made of tensors, tuples, lists and dicts, not {type(context).__name__}")
