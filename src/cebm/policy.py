"""A policy: observation in, action out. It carries its units, so nobody normalises by hand.

Policies keep no state between calls and may be called from several threads; `Runner` adds history and chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm import __version__
from cebm.energy import Actions, Energies, EnergyModel
from cebm.explicit import ExplicitEnergy, MixtureDensityEnergy, RegressionEnergy, TiltedEnergy
from cebm.networks import Init, MLPEnergy, ResidualEnergy
from cebm.samplers import MALA, Constant, DerivativeFree, Exponential, Langevin, Polynomial, run
from cebm.spaces import Box, check_finite
from cebm.storage import StorageError, from_json, load_bundle, save_bundle, take, to_json

FORMAT, VERSION = "cebm.policy", 2
Array = TypeVar("Array", np.ndarray, Tensor)
ActingSampler = Langevin | MALA | DerivativeFree
Choice = Literal["minimum", "draw"]


@dataclass(frozen=True)
class Network:
    """The architecture of an energy; travels with the weights."""

    kind: Literal["mlp", "residual", "regression", "mixture-density", "tilted"] = "mlp"
    """The paper's MLP, the reference code's residual network, an explicit baseline, or a mixture density tilted by the
    MLP."""
    width: int = 256
    """Hidden units per layer."""
    hidden_layers: int = 2
    """Hidden layers; for 'residual', blocks."""
    dropout: float = 0.0
    """Share of hidden units dropped while training (implicit networks)."""
    init: Init = "normal"
    """'normal': weights and biases from N(0, 0.05²) (the paper). 'torch': torch's default."""
    spectral_norm: bool = False
    """Divide each weight matrix by its largest singular value (implicit networks)."""
    components: int = 8
    """Components of the mixture density."""
    proposal: Literal["conditional", "marginal"] = "conditional"
    """Whether the mixture that is tilted is q(y|x), or p̂(y), which does not look at the observation."""
    smoothing: float = 0.0
    """Standard deviation s of the noise that demonstrated actions get in training, normalised units: the energy is
    that of p(y|x) smoothed by N(0, s²), whose curvature is at most 1/s². No component of a mixture is narrower."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < inf:
            raise ValueError(f"smoothing must be at least 0 and finite, got {self.smoothing}")

    @property
    def explicit(self) -> bool:
        """Whether the action is computed and not searched for."""
        return self.kind in ("regression", "mixture-density")

    def build(self, obs_dim: int, act_dim: int, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        if self.kind == "regression":
            return RegressionEnergy(obs_dim, act_dim, self.width, self.hidden_layers, self.init, generator)
        sizes = (obs_dim, act_dim, self.width, self.hidden_layers)
        if self.kind == "mixture-density":
            return MixtureDensityEnergy(*sizes, self.components, self.smoothing, self.init, generator)
        if self.kind not in ("mlp", "residual", "tilted"):
            raise ValueError(f"kind: there is no {self.kind!r} network")
        network = ResidualEnergy if self.kind == "residual" else MLPEnergy
        energy = network(*sizes, self.dropout, self.init, self.spectral_norm, generator)
        if self.kind == "tilted":
            seen = obs_dim if self.proposal == "conditional" else 0
            mixture = MixtureDensityEnergy(seen, *sizes[1:], self.components, self.smoothing, "torch", generator)
            return TiltedEnergy(mixture, energy)
        return energy


@dataclass(frozen=True)
class Proposal:
    """What a policy considered. One row per observation; actions are in the user's units."""

    action: Float[Tensor, "batch act"]
    """The chosen action."""
    score: Float[Tensor, " batch"]
    """Rank of its energy among the training data's: the share of demonstrations with a lower energy. Near 1: no
    demonstration looked this unlikely. NaN where the policy was built without data."""
    candidates: Actions
    """All candidates, the most likely first."""
    energies: Energies
    """Their energies."""


@dataclass(frozen=True, eq=False)
class Policy(ABC):
    """The contract, and what implicit and explicit policies share."""

    energy: EnergyModel
    """E(x, y) in normalised units."""
    obs_box: Box
    """Normalises observations."""
    act_box: Box
    """Normalises actions."""
    network: Network | None = None
    """The energy's architecture, needed to save the policy."""
    low: Float[Tensor, " act"] | None = None
    """Lower limits of the action space; None: the demonstrations' range with its margin."""
    high: Float[Tensor, " act"] | None = None
    """Upper limits."""
    data_energies: Float[Tensor, " pairs"] | None = None
    """Sorted energies of training pairs, for the score."""
    history: int = 1
    """Observations that one input holds, oldest first."""
    horizon: int = 1
    """Actions that one output holds, the current one first."""

    def __post_init__(self) -> None:
        for name, box, dim in (
            ("obs_box", self.obs_box, self.energy.obs_dim),
            ("act_box", self.act_box, self.energy.act_dim),
        ):
            if box.dim != dim:
                raise ValueError(f"{name} has {box.dim} dimensions, the energy expects {dim}")
        for name, count, dim in (
            ("history", self.history, self.obs_box.dim),
            ("horizon", self.horizon, self.act_box.dim),
        ):
            if count < 1 or dim % count:
                raise ValueError(f"{name} must be at least 1 and divide {dim} dimensions, got {count}")
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and bound.shape != self.act_box.centre.shape:
                raise ValueError(f"{name} has shape {tuple(bound.shape)}, actions have {self.act_box.dim} dimensions")
        low, high = self.limits
        if bool((low > high).any()):
            raise ValueError(f"low must not be above high, got {low.tolist()} and {high.tolist()}")
        self.energy.eval()
        self.energy.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.act_box.centre.device

    @cached_property
    def limits(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest action the policy gives."""
        room = self.act_box.limit * self.act_box.scale
        low = self.act_box.centre - room if self.low is None else self.low
        high = self.act_box.centre + room if self.high is None else self.high
        return low, high

    @abstractmethod
    def propose(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """As `act`, with the alternatives and their energies."""

    def act(
        self,
        obs: Array,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Array | None = None,
        generator: torch.Generator | None = None,
    ) -> Array:
        """The action for one observation [obs] or a batch [batch, obs]; numpy in, numpy out, likewise torch.

        `candidates` and `steps` set the effort, or `budget_ms` does: as many candidates as fit the time.
        `previous` (the last action) starts the search there, which keeps it in its mode. Without a `generator`
        the same call gives the same action.
        """
        proposal = self.propose(
            obs, candidates=candidates, steps=steps, budget_ms=budget_ms, previous=previous, generator=generator
        )
        action = proposal.action[0] if obs.ndim == 1 else proposal.action
        if isinstance(obs, np.ndarray):
            return action.cpu().numpy()
        return action.to(obs.device)

    def save(self, directory: str | Path) -> None:
        """Writes a directory with units, architecture and weights; `cebm.load` reads it."""
        if self.network is None:
            raise ValueError("a policy around your own energy has no architecture to save; save its weights yourself")
        tensors = {f"energy.{name}": tensor for name, tensor in self.energy.state_dict().items()}
        for name, box in (("obs_box", self.obs_box), ("act_box", self.act_box)):
            tensors |= {f"{name}.centre": box.centre, f"{name}.scale": box.scale}
        for name in ("low", "high", "data_energies"):
            value = getattr(self, name)
            if value is not None:
                tensors[name] = value
        header = {
            "cebm": __version__,
            "kind": type(self).__name__,
            "network": to_json(self.network),
            "obs_margin": self.obs_box.margin,
            "act_margin": self.act_box.margin,
            "history": self.history,
            "horizon": self.horizon,
            **self._settings(),
        }
        save_bundle(Path(directory), FORMAT, VERSION, header, tensors)

    def _settings(self) -> dict[str, Any]:
        """What a subclass adds to the header."""
        return {}

    def _rows(self, values: Any, name: str, dim: int) -> Float[Tensor, "batch dim"]:
        """[dim] or [batch, dim] of any float kind, to [batch, dim] on the policy's device."""
        # Arrays are copied: they may be read-only, which torch does not know, or have strides it does not take.
        rows = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values, np.float64, order="C"))
        rows = rows.to(self.device, self.act_box.centre.dtype)
        rows = rows.unsqueeze(0) if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != dim or not len(rows):
            raise ValueError(f"{name} must be [{dim}] or [batch, {dim}], got {tuple(np.shape(values))}")
        check_finite(rows, name)
        return rows

    def _check_effort(self, candidates: int | None, budget_ms: float | None) -> None:
        if candidates is not None and budget_ms is not None:
            raise ValueError("give candidates or budget_ms, not both")
        if candidates is not None and candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {candidates}")

    def _generator(self, generator: torch.Generator | None) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0) if generator is None else generator

    @cached_property
    def _normalised_limits(self) -> tuple[Tensor, Tensor]:
        # Not with `normalise`, which refuses the infinite limits of an unbounded space.
        low, high = ((limit - self.act_box.centre) / self.act_box.scale for limit in self.limits)
        return low, high

    def _clip(self, normalised: Actions) -> Actions:
        """Into the action space, before energies are compared: an action beyond it is not available."""
        return normalised.clamp(*self._normalised_limits)

    def _proposal(self, normalised: Actions, energies: Energies, chosen: Tensor, chosen_energy: Tensor) -> Proposal:
        low, high = self.limits
        order = energies.argsort(1)
        candidates = self.act_box.denormalise(normalised).clamp(low, high)
        score = torch.full_like(chosen_energy, torch.nan)
        if self.data_energies is not None:
            rank = torch.searchsorted(self.data_energies, chosen_energy.contiguous())
            score = rank.to(chosen_energy.dtype) / len(self.data_energies)
        return Proposal(
            self.act_box.denormalise(chosen).clamp(low, high),
            score,
            candidates.gather(1, order.unsqueeze(-1).expand_as(candidates)),
            energies.gather(1, order),
        )


@dataclass(frozen=True, eq=False)
class ImplicitPolicy(Policy):
    """Acting is a search: candidates (from the energy's own proposal where it has one, else from the box) are moved by
    the sampler, and one is chosen: ŷ = argmin_y E(x, y), or ŷ ~ p(y|x)."""

    sampler: ActingSampler = Langevin("ibc", noise=0.01)
    """Moves the candidates."""
    candidates: int = 512
    """How many."""
    choice: Choice = "minimum"
    """'minimum': the lowest energy. 'draw': candidate i with probability ∝ exp(−Eᵢ)/qᵢ, by its energy and its density
    before it moved; so the modes are taken as often as demonstrated, and then moved by the sampler."""
    keep: int = 0
    """Candidates that go on after a first look at their energies, the others are not moved. 0: all."""
    _milliseconds: dict[tuple[int, int, int | None], float] = field(default_factory=dict, init=False, repr=False)
    """Measured times by candidates, batch and steps; the one thing that a call may leave behind."""

    def propose(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        self._check_effort(candidates, budget_ms)
        sampler = self.sampler if steps is None else replace(self.sampler, steps=steps)
        rows = self._rows(obs, "obs", self.energy.obs_dim)
        if budget_ms is not None:
            candidates = self.candidates_within(budget_ms, len(rows), steps)
        count = self.candidates if candidates is None else candidates
        # Without a generator all rows get the same numbers: an action then hardly depends on its batch.
        shared = generator is None
        generator = self._generator(generator)
        with torch.inference_mode() if self._closed_form else torch.no_grad():
            context = self.energy.encode(self.obs_box.normalise(rows))
            if previous is None:
                start = self.begin(context, count, shared, generator)
            else:
                start, sampler = self._warm(self._from_box(len(rows), count, shared, generator), previous, sampler)
                start = self._look(context, start, self._energies, shared, generator)
            actions = self._clip(run(sampler, self.energy, context, start, generator).actions)
            energies = self._energies(context, actions)
            energy, index = energies.min(1)
            if float(energy.max()) == torch.inf:
                row = int((energy == torch.inf).nonzero()[0])
                raise ValueError(f"the energy is NaN or infinite at every candidate for observation {row}")
            if self.choice == "draw":  # the drawn one comes first, unless it ran away
                index = torch.where(energies[:, 0] < torch.inf, 0, index)
        each = torch.arange(len(rows), device=actions.device)
        return self._proposal(actions, energies, actions[each, index], energies[each, index])

    @cached_property
    def _closed_form(self) -> bool:
        """Whether the search runs in inference mode, an eighth faster: not with an energy from elsewhere, which may
        call autograd, that inference mode does not allow."""
        energies = (part for part in self.energy.modules() if isinstance(part, EnergyModel))
        return all(type(part) in (MLPEnergy, ResidualEnergy, MixtureDensityEnergy, TiltedEnergy) for part in energies)

    def begin(self, context: Tensor, count: int, shared: bool, generator: torch.Generator) -> Actions:
        """Where the search starts: `count` candidates, or the `keep` that a first look leaves of them; a drawn one
        comes first. `shared`: the same random numbers for all rows."""
        if not isinstance(self.energy, TiltedEnergy):
            start = self._from_box(len(context), count, shared, generator)
            return self._look(context, start, self._energies, shared, generator)
        numbers = self.energy.proposal.numbers(1 if shared else len(context), count, context, generator)
        uniform, normal = (part.expand(len(context), *part.shape[1:]) for part in numbers)
        start = self.energy.proposal.place(self.energy.of_proposal(context), uniform, normal)
        return self._look(context, start, self.energy.tilts, shared, generator)

    def _look(
        self,
        context: Tensor,
        start: Actions,
        minus_log_ratio: Callable[[Tensor, Actions], Energies],
        shared: bool,
        generator: torch.Generator,
    ) -> Float[Tensor, "batch kept act"]:
        """Those that go on, the drawn one first: with probability ∝ p/q, which is exp(−f) for candidates of the
        proposal, and exp(−E) for uniform ones."""
        if self.choice == "draw":
            # The largest of log-probability plus Gumbel noise is a draw; the next ones are further draws.
            shape = (1 if shared else start.shape[0], start.shape[1])
            uniform = torch.rand(shape, generator=generator, dtype=start.dtype, device=start.device)
            looks = -minus_log_ratio(context, start) - (-uniform.clamp_min(1e-30).log()).log()
        elif 0 < self.keep < start.shape[1]:  # clipped: an action beyond the limits is not available
            looks = -self._energies(context, self._clip(start))
        else:
            return start
        best = looks.topk(min(self.keep or start.shape[1], start.shape[1]), dim=1).indices
        return start.gather(1, best.unsqueeze(-1).expand(-1, -1, start.shape[2]))

    def _from_box(self, rows: int, count: int, shared: bool, generator: torch.Generator) -> Actions:
        return self.act_box.sample(1 if shared else rows, count, generator=generator).expand(rows, -1, -1)

    def _energies(self, context: Tensor, actions: Actions) -> Energies:
        """A candidate without an energy comes last; the minimum would take it for the best."""
        energies = self.energy.energies(context, actions)
        gone = 0 * actions.sum(-1)  # 0, and not a number where an action is none or infinite
        return (energies + gone).nan_to_num(torch.inf, torch.inf, -torch.inf)

    def candidates_within(self, budget_ms: float, batch: int = 1, steps: int | None = None) -> int:
        """How many candidates fit into the time. Sizes are timed here and now when first needed, five calls each, and
        then remembered: ask once, with the batch and steps to come, before the first call that is in a hurry."""
        if not budget_ms > 0:
            raise ValueError(f"budget_ms must be positive, got {budget_ms}")
        budget = 0.8 * budget_ms  # the rest is for what varies from call to call
        fits, took = 1, self._measure(1, batch, steps)
        while took <= budget and fits < 16_384:
            more, longer = 4 * fits, self._measure(4 * fits, batch, steps)
            if longer > budget:
                return int(fits + (budget - took) / (longer - took) * (more - fits))
            fits, took = more, longer
        return fits

    def _measure(self, candidates: int, batch: int, steps: int | None) -> float:
        """Median milliseconds of a call."""
        key = (candidates, batch, steps)
        if key not in self._milliseconds:
            obs = self.obs_box.centre.expand(batch, -1)
            times = []
            for _ in range(6):
                began = perf_counter()
                self.propose(obs, candidates=candidates, steps=steps)
                times.append((perf_counter() - began) * 1e3)
            self._milliseconds[key] = sorted(times[1:])[2]  # the first call pays for warming up
        return self._milliseconds[key]

    def _settings(self) -> dict[str, Any]:
        return {
            "sampler": to_json(self.sampler),
            "candidates": self.candidates,
            "choice": self.choice,
            "keep": self.keep,
        }

    def _warm(self, start: Actions, previous: Any, sampler: ActingSampler) -> tuple[Actions, ActingSampler]:
        """Starts within a few percent of the last action and keeps the steps as small: 0.02 of 2, whatever they are."""
        rows = self._rows(previous, "previous", self.energy.act_dim)
        if len(rows) != len(start):
            raise ValueError(f"previous has {len(rows)} rows, obs has {len(start)}")
        near = self.act_box.clip(self.act_box.normalise(rows).unsqueeze(1) + 0.05 * start)
        if isinstance(sampler, Langevin):
            return near, replace(sampler, step_clip=0.01)
        if isinstance(sampler, DerivativeFree):
            return near, replace(sampler, deviation=min(sampler.deviation, 0.02))
        return near, replace(sampler, step_size=min(sampler.step_size, 0.02**2 / 2), adapt=0)


@dataclass(frozen=True, eq=False)
class ExplicitPolicy(Policy):
    """Acting is one pass through the network. The first of the candidates (one, unless more are asked for) is its
    answer, the others are draws from its density. It needs no search, so steps, budgets and the last action are
    accepted and have no effect."""

    def propose(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        if not isinstance(self.energy, ExplicitEnergy):
            raise TypeError(f"an ExplicitPolicy needs an ExplicitEnergy, not {type(self.energy).__name__}")
        self._check_effort(candidates, budget_ms)
        rows = self._rows(obs, "obs", self.energy.obs_dim)
        with torch.no_grad():
            context = self.energy.encode(self.obs_box.normalise(rows))
            best = self.energy.best(context)
            count = 1 if candidates is None else candidates
            others = self.energy.draw(context, count, self._generator(generator))
            actions = self._clip(torch.cat([best.unsqueeze(1), others[:, 1:]], 1))
            energies = self.energy.energies(context, actions)
            return self._proposal(actions, energies, actions[:, 0], energies[:, 0])


def load(directory: str | Path, device: torch.device | str = "cpu") -> ImplicitPolicy | ExplicitPolicy:
    """Reads a policy that `save` wrote; a StorageError says what is wrong with a damaged, altered or newer one."""
    where = Path(directory)
    header, tensors = load_bundle(where, FORMAT, VERSION)
    try:
        return _rebuild(header, tensors, str(where), device)
    except StorageError:
        raise
    except (TypeError, ValueError) as error:
        raise StorageError(f"{where}: {error}") from error


def _rebuild(
    header: dict[str, Any], tensors: dict[str, Tensor], where: str, device: torch.device | str
) -> ImplicitPolicy | ExplicitPolicy:
    boxes = {}
    for name in ("obs", "act"):
        centre, scale = (take(tensors, f"{name}_box.{part}", where) for part in ("centre", "scale"))
        boxes[name] = Box(centre, scale, take(header, f"{name}_margin", where)).to(device)
    network = from_json(take(header, "network", where), [Network], where)
    # A generator of its own: loading leaves torch's global one alone.
    energy = network.build(boxes["obs"].dim, boxes["act"].dim, torch.Generator()).to(boxes["act"].centre.dtype)
    weights = {name.removeprefix("energy."): value for name, value in tensors.items() if name.startswith("energy.")}
    try:
        energy.load_state_dict(weights)
    except RuntimeError as error:
        raise StorageError(f"{where}: the weights do not fit the architecture: {error}") from error
    optional: dict[str, Any] = {
        name: tensors[name].to(device) for name in ("low", "high", "data_energies") if name in tensors
    }
    shared: dict[str, Any] = {
        "energy": energy.to(device),
        "obs_box": boxes["obs"],
        "act_box": boxes["act"],
        "network": network,
        "history": take(header, "history", where),
        "horizon": take(header, "horizon", where),
        **optional,
    }
    kind = take(header, "kind", where)
    if kind not in ("ImplicitPolicy", "ExplicitPolicy"):
        raise StorageError(f"{where}: unknown kind of policy {kind!r}")
    if network.explicit != (kind == "ExplicitPolicy"):
        raise StorageError(f"{where}: a {network.kind!r} network does not make an {kind}")
    if kind == "ExplicitPolicy":
        return ExplicitPolicy(**shared)
    samplers = [Langevin, MALA, DerivativeFree, Constant, Polynomial, Exponential]
    sampler = from_json(take(header, "sampler", where), samplers, where)
    search = {name: take(header, name, where) for name in ("candidates", "choice", "keep")}
    return ImplicitPolicy(**shared, sampler=sampler, **search)


class Runner:
    """Steps a policy through a batch of episodes: remembers the last observations, plays out action chunks and,
    with `warm_start`, hands the last action (of a chunk: what was not played) back to the search. Not shared
    between threads; `reset` forgets."""

    def __init__(
        self,
        policy: Policy,
        *,
        execute: int | None = None,
        warm_start: bool = False,
        generator: torch.Generator | None = None,
        **effort: Any,
    ) -> None:
        self.policy, self.warm_start, self.generator, self.effort = policy, warm_start, generator, effort
        self.execute = policy.horizon if execute is None else execute
        if not 1 <= self.execute <= policy.horizon:
            raise ValueError(f"execute must be between 1 and the policy's horizon {policy.horizon}, got {execute}")
        self.reset()

    def reset(self) -> None:
        """Forget: a new batch of episodes begins."""
        self._seen: list[np.ndarray] = []
        self._chunk: list[np.ndarray] = []
        self._last: np.ndarray | None = None

    def act(self, obs: Float[np.ndarray, "batch obs"]) -> Float[np.ndarray, "batch act"]:
        """The next action of every episode."""
        if self._seen and len(obs) != len(self._seen[0]):
            raise ValueError(f"obs has {len(obs)} rows, the episodes under way are {len(self._seen[0])}; reset first")
        # Copies: environments may write the next observation into the same array.
        keep, obs = self.policy.history, np.array(obs)
        self._seen = ([obs] * keep if not self._seen else [*self._seen, obs])[-keep:]
        if not self._chunk:
            window = np.concatenate(self._seen, 1)
            previous = self._last if self.warm_start else None
            chunk = self.policy.act(window, previous=previous, generator=self.generator, **self.effort)
            actions = np.split(chunk, self.policy.horizon, axis=1)
            self._chunk = [action.copy() for action in actions[: self.execute]]
            # What is left of the plan, held at its end, is where the next search starts.
            self._last = np.concatenate([*actions[self.execute :], *[actions[-1]] * self.execute], axis=1)
        return self._chunk.pop(0)
