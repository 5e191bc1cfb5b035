"""Negatives from chains of the learned p(y|x): many short ones, one long one, a replay buffer of earlier ends."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.energies.base import EnergyModel, Obs, evaluating
from cebm.negatives.base import Negatives, Positives, check_pairs, check_sampler, check_start, uniform_in_box
from cebm.negatives.plain import Uniform
from cebm.samplers import Collect, Langevin, Sampler, run, with_steps
from cebm.spaces import Specification, margin_limit

if TYPE_CHECKING:
    from cebm.recipes import Trial


@dataclass(frozen=True)
class ShortChains:
    """Many independent short chains of the learned p(y|x) ∝ e^{−E(x, y)}, the last state of each (IBC's way)."""

    sampler: Sampler = Langevin("ibc", noise=0.1)
    """Sampler of the chains. A derivative-free one works on the n candidates of an observation together."""
    start: Any = Uniform()
    """Source of the first states: uniform, the data (InBatch), a proposal (GaussianMixture, …)."""
    keep_graph: bool = False
    """Whether negatives keep the graph of every step, so that a loss can be differentiated through the chain."""

    def __post_init__(self) -> None:
        check_sampler(self)
        if self.keep_graph and not getattr(self.sampler, "differentiable", False):
            raise ValueError(f"keep_graph needs a sampler with differentiable moves, not {type(self.sampler).__name__}")

    def check_composition(self, trial: "Trial") -> None:
        check_start(self)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        start = self.start.sample(energy, obs, actions, n, generator).actions
        with torch.set_grad_enabled(self.keep_graph), evaluating(energy):
            chain = run(self.sampler, energy, energy.encode(obs), start, generator, keep_graph=self.keep_graph)
        return Negatives(chain.actions, obs, info=chain.info)


@dataclass(frozen=True)
class LongChain:
    """One chain of p(y|x) ∝ e^{−E(x, y)} per observation. After `burn_in` steps, every `thin`-th state is a negative.
    These are neither independent nor samples of the marginal, which is how the paper explains that this works worse."""

    sampler: Sampler = Langevin("correct")
    """Sampler of the chain, a dataclass; its `steps` are set from burn_in, thin and n."""
    burn_in: int = 50
    """Number of first steps whose states are thrown away."""
    thin: int = 5
    """Steps between two kept states."""
    start: Any = Uniform()
    """Source of the first state."""

    def __post_init__(self) -> None:
        check_sampler(self)
        Collect(self.burn_in, self.thin)

    def check_composition(self, trial: "Trial") -> None:
        check_start(self)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        start = self.start.sample(energy, obs, actions, 1, generator).actions
        sampler = with_steps(self.sampler, self.burn_in + self.thin * (n - 1) + 1)
        with torch.no_grad(), evaluating(energy):
            chain = run(sampler, energy, energy.encode(obs), start, generator, Collect(self.burn_in, self.thin))
        return Negatives(chain.actions, obs, info=chain.info)


class ReplayBuffer(nn.Module):
    """Short chains of p ∝ e^{−E} that start where earlier ones ended, in place of long ones (Du & Mordatch 2019).

    `joint`: the buffer holds pairs (x, y) and the chains move both, on the energy's `pairs`. Otherwise it holds
    actions alone; the paper notes that different conditional distributions cannot rightly share one buffer.
    """

    stored: Float[Tensor, "capacity dim"]
    count: Tensor

    def __init__(
        self,
        dim: int,
        sampler: Sampler | None = None,
        capacity: int = 10_000,
        reinitialise: float = 0.05,
        margin: float = 0.05,
        device: torch.device | str | None = None,
        joint: bool = False,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        _check_replay(capacity, reinitialise, margin)
        self.sampler = sampler if sampler is not None else Langevin("correct")
        self.reinitialise, self.margin, self.joint = reinitialise, margin, joint
        self.register_buffer("stored", torch.zeros(capacity, dim, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))
        self._known: tuple[int, int, int] | None = None

    @property
    def filled(self) -> int:
        """Number of stored states. Read from `count` only when something else has changed it: a read waits for the
        accelerator."""
        if self._known is None or self._known[:2] != (id(self.count), self.count._version):
            self._know(int(self.count))
        return self._known[2] if self._known is not None else 0

    def _know(self, filled: int) -> None:
        self._known = (id(self.count), self.count._version, filled)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        target = energy.pairs() if self.joint else energy
        if target.act_dim != self.stored.shape[1]:
            raise ValueError(f"dim of the replay buffer is {self.stored.shape[1]}, the chain has {target.act_dim}")
        batch = actions.shape[0]
        start = self.draw(batch * n, actions, generator).view(batch, n, -1)
        with torch.no_grad(), evaluating(target):
            chain = run(self.sampler, target, target.encode(obs), start, generator)
        self.put(chain.actions.flatten(0, 1), generator)
        if self.joint:
            x, y = chain.actions.split([energy.obs_dim, energy.act_dim], -1)
            return Negatives(y, x, info=chain.info)
        return Negatives(chain.actions, obs, info=chain.info)

    def draw(self, rows: int, like: Tensor, generator: torch.Generator) -> Float[Tensor, "rows dim"]:
        """Stored states, but uniform draws in a share `reinitialise` of the rows (all, while the buffer is empty)."""
        fresh = uniform_in_box((rows, self.stored.shape[1]), self.margin, like, generator)
        if self.filled == 0:
            return fresh
        index = torch.randint(self.filled, (rows,), generator=generator, device=like.device)
        anew = torch.rand((rows, 1), generator=generator, device=like.device) < self.reinitialise
        return torch.where(anew, fresh, self.stored[index].to(like.dtype))

    @torch.no_grad()
    def put(self, states: Float[Tensor, "rows dim"], generator: torch.Generator) -> None:
        """Fills free places in order; once full, overwrites random ones."""
        capacity, count = self.stored.shape[0], self.filled
        free = min(capacity - count, states.shape[0])
        self.stored[count : count + free] = states[:free].to(self.stored.dtype)
        self.count += free
        self._know(count + free)
        rest = states[free:][-capacity:]
        if rest.shape[0]:
            places = torch.randperm(capacity, generator=generator, device=states.device)[: rest.shape[0]]
            self.stored[places] = rest.to(self.stored.dtype)


@dataclass(frozen=True)
class Replay:
    """Settings of a `ReplayBuffer`: short chains of p ∝ e^{−E} that start where earlier ones ended."""

    sampler: Sampler = Langevin("correct")
    """Sampler that moves the chains."""
    capacity: int = 10_000
    """Number of states that the buffer holds."""
    reinitialise: float = 0.05
    """Share of the chains that start at a uniform draw instead of a stored state."""
    margin: float = 0.05
    """Room beyond [-1, 1] for the uniform draws, on both ends, as a fraction of the range."""
    joint: bool = False
    """Whether to model p(x, y) and sample pairs (x, y)."""

    def __post_init__(self) -> None:
        check_sampler(self)
        _check_replay(self.capacity, self.reinitialise, self.margin)

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> ReplayBuffer:
        """The buffer, empty at first."""
        dim = spec.act_dim + (spec.obs_dim if self.joint else 0)
        device = None if generator is None else generator.device
        return ReplayBuffer(dim, self.sampler, self.capacity, self.reinitialise, self.margin, device, self.joint)

    def check_composition(self, trial: "Trial") -> None:
        if self.joint and not getattr(trial.energy, "joint", False):
            raise ValueError(
                f"Replay (joint=True) needs an energy with a joint form over pairs (x, y) (`joint = True` in its "
                f"settings), which {type(trial.energy).__name__} has not"
            )


def _check_replay(capacity: int, reinitialise: float, margin: float) -> None:
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if not 0 <= reinitialise <= 1:
        raise ValueError(f"reinitialise must be in [0, 1], got {reinitialise}")
    margin_limit(margin)
