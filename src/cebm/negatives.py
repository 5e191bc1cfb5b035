"""Where the negative actions ỹ come from. Every source has one method, `sample`; actions are normalised.

A source without state is a frozen dataclass, which is also its settings. A source with state is a module, so that its
weights and buffers are saved with the rest, and has a frozen dataclass of settings that builds it: `Replay` builds a
`ReplayBuffer`, `MarginalActions` a `MarginalActionSampler`. Any source can also start the chains of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log, pi
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.composition import built, walk
from cebm.energies.base import Actions, Energies, EnergyModel, Obs, evaluating
from cebm.energies.feedforward import MarginalEnergy
from cebm.losses import maximum_entropy_loss, mcmc_loss, positive_l2
from cebm.samplers import Collect, Langevin, Sampler, StepInfo, run, with_steps
from cebm.spaces import Specification, check_finite, margin_limit

if TYPE_CHECKING:
    from cebm.recipes import Trial

Positives = Float[Tensor, "batch act"]


@dataclass(frozen=True)
class Negatives:
    """Negative actions for a batch, constants to autograd unless their source keeps the graph of its chains, and the
    density they were drawn from where it is known."""

    actions: Actions
    """The negative actions ỹ."""
    obs: Obs
    """Their observations: the batch's own, or one per sample where pairs (x̃, ỹ) are drawn (replay of a joint)."""
    log_q: Energies | None = None
    """log q(ỹ), None where it is not tractable."""
    log_q_positive: Float[Tensor, " batch"] | None = None
    """log q of the demonstrated action."""
    info: StepInfo | None = None
    """Energies, gradients and acceptance along the chain, where one was run."""


@runtime_checkable
class Source(Protocol):
    """The contract of a source of negatives: one method. A source may have three more attributes.

    `distribution` says what the negatives are drawn from: 'proposal' (that of the energy) or 'marginal' (p(y)). A
    `Tilted` energy asks for it. With `log_prob` the source is a `Density`. A source with weights of its own gives
    their losses as `own_losses(actions, negatives)`, by the name to log them under.
    """

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        """`n` negatives for each of the batch's pairs (obs, actions)."""
        ...


@runtime_checkable
class Density(Protocol):
    """A source whose density is known."""

    def log_prob(self, positives: Positives, actions: Actions) -> Energies:
        """log q(actions), for the q that belongs to each positive."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Uniform in the box [-1, 1] with its margin: log q = −act·log(2.2)."""

    margin: float = 0.05
    """Room beyond [-1, 1] on both ends, as a fraction of the range."""

    def __post_init__(self) -> None:
        margin_limit(self.margin)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        _check(obs, actions, n)
        shape = (actions.shape[0], n, actions.shape[1])
        return _with_density(self, _uniform(shape, self.margin, actions, generator), obs, actions)

    def log_prob(self, positives: Positives, actions: Actions) -> Energies:
        limit = margin_limit(self.margin)
        inside = (actions.abs() <= limit).all(-1)
        density = actions.new_tensor(-actions.shape[-1] * log(2 * limit))
        return torch.where(inside, density, actions.new_tensor(-torch.inf))


@dataclass(frozen=True)
class GaussianMixture:
    """q(y) = 1/K Σ_k N(y; y⁺, σ_k² I) around the demonstrated action (Gustafsson et al. 2020)."""

    deviations: tuple[float, ...] = (0.1, 0.4, 0.8)
    """Standard deviations σ_k in normalised units."""

    def __post_init__(self) -> None:
        if not self.deviations or not all(0 < d < inf for d in self.deviations):
            raise ValueError(f"deviations must be positive numbers, got {self.deviations}")

    @torch.no_grad()
    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        _check(obs, actions, n)
        batch, act = actions.shape
        component = torch.randint(len(self.deviations), (batch, n), generator=generator, device=actions.device)
        deviations = actions.new_tensor(self.deviations)[component]
        noise = torch.randn((batch, n, act), generator=generator, dtype=actions.dtype, device=actions.device)
        return _with_density(self, actions.unsqueeze(1) + deviations.unsqueeze(-1) * noise, obs, actions)

    def log_prob(self, positives: Positives, actions: Actions) -> Energies:
        variances = actions.new_tensor(self.deviations).square()
        squares = (actions - positives.unsqueeze(1)).square().sum(-1, keepdim=True)
        act = actions.shape[-1]
        parts = -0.5 * squares / variances - 0.5 * act * (2 * pi * variances).log()
        return parts.logsumexp(-1) - log(len(self.deviations))


@dataclass(frozen=True)
class InBatch:
    """The actions of `n` other examples of the batch, each used once per row: exact samples of the marginal p(y)."""

    distribution: ClassVar[str] = "marginal"

    @torch.no_grad()
    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        _check(obs, actions, n)
        batch = actions.shape[0]
        if n > batch - 1:
            raise ValueError(f"n must be at most {batch - 1}, the number of other examples in the batch, got {n}")
        keys = torch.rand((batch, batch - 1), generator=generator, device=actions.device)
        offset = keys.topk(n, 1).indices + 1
        index = (torch.arange(batch, device=actions.device).unsqueeze(1) + offset) % batch
        return Negatives(actions[index], obs)


@dataclass(frozen=True)
class Proposed:
    """Draws of the energy's own proposal q(y|x), for energies that have one."""

    distribution: ClassVar[str] = "proposal"

    @torch.no_grad()
    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        _check(obs, actions, n)
        return Negatives(energy.propose(energy.encode(obs), n, generator), obs)


@dataclass(frozen=True)
class ShortChains:
    """Many independent short chains of the learned p(y|x), the last state of each (IBC's way)."""

    sampler: Sampler = Langevin("ibc", noise=0.1)
    """Sampler of the chains. A derivative-free one works on the n candidates of an observation together."""
    start: Any = Uniform()
    """Source of the first states: uniform, the data (InBatch), a proposal (GaussianMixture, …)."""
    keep_graph: bool = False
    """Whether negatives keep the graph of every step, so that a loss can be differentiated through the chain."""

    def __post_init__(self) -> None:
        _check_sampler(self)
        if self.keep_graph and not getattr(self.sampler, "differentiable", False):
            raise ValueError(f"keep_graph needs a sampler with differentiable moves, not {type(self.sampler).__name__}")

    def check_composition(self, trial: "Trial") -> None:
        _check_start(self)

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
    """One chain per observation. After `burn_in` steps, every `thin`-th state is a negative. These are neither
    independent nor samples of the marginal, which is how the paper explains that this works worse."""

    sampler: Sampler = Langevin("correct")
    """Sampler of the chain, a dataclass; its `steps` are set from burn_in, thin and n."""
    burn_in: int = 50
    """Number of first steps whose states are thrown away."""
    thin: int = 5
    """Steps between two kept states."""
    start: Any = Uniform()
    """Source of the first state."""

    def __post_init__(self) -> None:
        _check_sampler(self)
        Collect(self.burn_in, self.thin)

    def check_composition(self, trial: "Trial") -> None:
        _check_start(self)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        _check(obs, actions, n)
        start = self.start.sample(energy, obs, actions, 1, generator).actions
        sampler = with_steps(self.sampler, self.burn_in + self.thin * (n - 1) + 1)
        with torch.no_grad(), evaluating(energy):
            chain = run(sampler, energy, energy.encode(obs), start, generator, Collect(self.burn_in, self.thin))
        return Negatives(chain.actions, obs, info=chain.info)


class ReplayBuffer(nn.Module):
    """Short chains that start where earlier ones ended, in place of long ones (Du & Mordatch 2019).

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
        _check(obs, actions, n)
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
        fresh = _uniform((rows, self.stored.shape[1]), self.margin, like, generator)
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
    """Settings of a `ReplayBuffer`."""

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
        _check_sampler(self)
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


class MarginalActionSampler(nn.Module):
    """MAS: negatives from a marginal energy E_γ(y) that is trained beside the conditional one.

    `sample` runs chains of p_γ(y); `loss` trains E_γ on the very samples that served as negatives, with the MCMC
    loss or, 'maxent', with the maximum-entropy loss, plus `positive_l2` times the mean squared positive energy.
    """

    def __init__(
        self,
        act_dim: int,
        sampler: Sampler | None = None,
        objective: Literal["mcmc", "maxent"] = "mcmc",
        positive_l2: float = 0.0,
        width: int = 64,
        start: Source | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if objective not in ("mcmc", "maxent"):
            raise ValueError(f"objective must be 'mcmc' or 'maxent', got {objective!r}")
        if not positive_l2 >= 0:
            raise ValueError(f"positive_l2 must be at least 0, got {positive_l2}")
        self.sampler = sampler if sampler is not None else Langevin("correct")
        self.objective, self.positive_l2 = objective, positive_l2
        self.start = start if start is not None else Uniform()
        self.marginal = MarginalEnergy(act_dim, width, generator=generator)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        chains = ShortChains(self.sampler, self.start).sample(self.marginal, obs, actions, n, generator)
        return replace(chains, obs=obs)

    def loss(self, actions: Positives, negatives: Actions) -> Float[Tensor, ""]:
        """The marginal's own loss. All negatives are samples of the one p_γ(y), so they count as one set."""
        _check_positives(actions)
        if negatives.ndim != 3 or not negatives.numel() or negatives.shape[2] != actions.shape[1]:
            shape = tuple(negatives.shape)
            raise ValueError(f"negatives must be a non-empty [batch, samples, {actions.shape[1]}] tensor, got {shape}")
        check_finite(negatives, "negatives")
        everything = torch.cat([actions, negatives.flatten(0, 1)]).unsqueeze(0)
        energies = self.marginal(everything[..., 0], everything)[0]
        positive, negative = energies.split([actions.shape[0], energies.shape[0] - actions.shape[0]])
        objective = maximum_entropy_loss if self.objective == "maxent" else mcmc_loss
        loss = objective(positive.mean().unsqueeze(0), negative.unsqueeze(0))
        return loss + self.positive_l2 * positive_l2(positive) if self.positive_l2 else loss

    def own_losses(self, actions: Positives, negatives: Actions) -> dict[str, Tensor]:
        """The loss of the marginal energy, which shares no weight with the conditional one."""
        return {"marginal_loss": self.loss(actions, negatives)}


@dataclass(frozen=True)
class MarginalActions:
    """Settings of a `MarginalActionSampler`, the paper's MAS."""

    sampler: Sampler = Langevin("correct")
    """Sampler of the marginal energy's chains."""
    objective: Literal["mcmc", "maxent"] = "mcmc"
    """The loss of the marginal energy."""
    positive_l2: float = 0.0
    """Weight of the mean squared energy of the data in that loss."""
    width: int = 64
    """Hidden units of the marginal energy."""
    start: Any = Uniform()
    """Source of the chains' first states."""

    distribution: ClassVar[str] = "marginal"
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_sampler(self)
        if self.objective not in ("mcmc", "maxent"):
            raise ValueError(f"objective must be 'mcmc' or 'maxent', got {self.objective!r}")
        if not self.positive_l2 >= 0:
            raise ValueError(f"positive_l2 must be at least 0, got {self.positive_l2}")

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> MarginalActionSampler:
        """The sampler, its energy's weights drawn from `generator`."""
        start = built(self.start, spec, generator)
        return MarginalActionSampler(
            spec.act_dim, self.sampler, self.objective, self.positive_l2, self.width, start, generator
        )

    def check_composition(self, trial: "Trial") -> None:
        _check_start(self)


@dataclass(frozen=True)
class Mixture:
    """Fixed shares of several sources. Where all densities are known, q is their mixture Σ_j (n_j/n) q_j
    with the actual counts n_j."""

    sources: Sequence[Any]
    """The sources, or settings of sources."""
    fractions: tuple[float, ...]
    """The share of each; they add up to 1. Counts are rounded so that they add up to n."""

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.fractions) or not self.sources:
            raise ValueError(f"fractions must name one share per source, got {self.fractions}")
        if any(not f >= 0 for f in self.fractions) or abs(sum(self.fractions) - 1) > 1e-6:
            raise ValueError(f"fractions must be shares that add up to 1, got {self.fractions}")

    def counts(self, n: int) -> list[int]:
        """Number of negatives of each source, n together: rounded down, then one more for the largest remainders."""
        exact = [f * n / sum(self.fractions) for f in self.fractions]
        counts = [int(e + 1e-9) for e in exact]
        by_remainder = sorted(range(len(exact)), key=lambda j: counts[j] - exact[j])
        for j in by_remainder[: n - sum(counts)]:
            counts[j] += 1
        return counts

    @property
    def known_density(self) -> bool:
        """Whether each source has a method `log_prob`. A mixture in a mixture has none: list its sources instead."""
        return all(isinstance(source, Density) for source in self.sources)

    def own_losses(self, actions: Positives, negatives: Actions) -> dict[str, Tensor]:
        """The losses of each source on the negatives that came from it. Where two sources give the same name, that of
        the later one gets its position in `sources`."""
        losses: dict[str, Tensor] = {}
        parts = negatives.split(self.counts(negatives.shape[1]), 1)
        for index, (source, part) in enumerate(zip(self.sources, parts, strict=True)):
            if part.shape[1]:
                for name, loss in own_losses(source, actions, part).items():
                    losses[f"{name}_{index}" if name in losses else name] = loss
        return losses

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        _check(obs, actions, n)
        used = [(source, count) for source, count in zip(self.sources, self.counts(n), strict=True) if count]
        parts = [source.sample(energy, obs, actions, count, generator) for source, count in used]
        if any(part.obs.ndim != obs.ndim for part in parts):
            raise ValueError("sources that draw pairs (x, y), as the replay of a joint energy does, do not mix")
        info = next((part.info for part in parts if part.info is not None), None)
        mixed = Negatives(torch.cat([part.actions for part in parts], 1), obs, info=info)
        if not all(isinstance(source, Density) for source, _ in used):
            return mixed

        def log_prob(values: Actions) -> Energies:
            terms = [
                source.log_prob(actions, values) + log(count / n)
                for source, count in used
                if isinstance(source, Density)
            ]
            return torch.stack(terms).logsumexp(0)

        with torch.no_grad():
            return replace(mixed, log_q=log_prob(mixed.actions), log_q_positive=log_prob(actions.unsqueeze(1))[:, 0])


def has_density(source: Any) -> bool:
    """Whether a source knows the log density of its negatives."""
    return bool(getattr(source, "known_density", isinstance(source, Density)))


def own_losses(source: Any, actions: Positives, negatives: Actions) -> dict[str, Tensor]:
    """The losses of a source's own weights; an empty dict for a source without weights."""
    function = getattr(source, "own_losses", None)
    return {} if function is None else function(actions, negatives)


def _check_sampler(source: Any) -> None:
    sampler = source.sampler
    if isinstance(sampler, type) or not isinstance(sampler, Sampler):
        given = f"the class {sampler.__name__}" if isinstance(sampler, type) else repr(sampler)
        raise ValueError(f"{type(source).__name__}: sampler must be an object with steps, init and step, got {given}")


def _check_replay(capacity: int, reinitialise: float, margin: float) -> None:
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    if not 0 <= reinitialise <= 1:
        raise ValueError(f"reinitialise must be in [0, 1], got {reinitialise}")
    margin_limit(margin)


def _check_start(source: Any) -> None:
    """Chains do not train what they start from, so a source that learns cannot be a start."""
    for _, piece in walk(source.start):
        if getattr(piece, "learns", False):
            name, start = type(source).__name__, type(piece).__name__
            raise ValueError(f"{name} does not train its start: {start}, which learns, must be the source itself")


def _with_density(source: Density, samples: Actions, obs: Obs, positives: Positives) -> Negatives:
    log_q_positive = source.log_prob(positives, positives.unsqueeze(1))[:, 0]
    return Negatives(samples, obs, source.log_prob(positives, samples), log_q_positive)


def _uniform(shape: tuple[int, ...], margin: float, like: Tensor, generator: torch.Generator) -> Tensor:
    unit = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
    return (2 * unit - 1) * margin_limit(margin)


def _check(obs: Tensor, actions: Tensor, n: int) -> None:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    _check_positives(actions)
    if obs.shape[0] != actions.shape[0]:
        raise ValueError(f"obs must have {actions.shape[0]} rows like actions, got {tuple(obs.shape)}")
    check_finite(obs, "obs")


def _check_positives(actions: Tensor) -> None:
    if actions.ndim != 2 or not actions.shape[0]:
        raise ValueError(f"actions must be a non-empty [batch, act] tensor, got {tuple(actions.shape)}")
    check_finite(actions, "actions")
