"""A policy: observation in, action out. It carries its units, so nobody normalises by hand.

A `Policy` is anything with `act` and `reset`; ours is an `EnergyPolicy`, which keeps no state between calls and may be
called from several threads. `Runner` adds a history of observations and action chunks to it.
"""

import copy
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm import __version__
from cebm.acting import Acting, Found, Problem, Search
from cebm.energies.base import Actions, Energies, EnergyModel, EnergySettings
from cebm.legacy import upgraded_policy
from cebm.settings import StorageError, from_json, to_json
from cebm.spaces import Box, Specification, check_finite, usable_device
from cebm.storage import load_bundle, load_header, save_bundle, take, tensor_shapes

FORMAT, VERSION = "cebm.policy", 3
Array = TypeVar("Array", bound=Any)


@runtime_checkable
class Policy(Protocol):
    """All that evaluation, runners and servers ask for."""

    def act(self, obs: Any) -> Any:
        """The action for one observation [obs] or a batch [batch, obs]."""
        ...

    def reset(self) -> None:
        """Forget the episodes so far: new ones begin."""
        ...


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


@dataclass(frozen=True, eq=False, repr=False)
class EnergyPolicy:
    """Acts by an energy. The energy that is passed in stays as it is: unless it is frozen and in evaluation mode
    already, the policy works on a frozen copy."""

    energy: EnergyModel
    """E(x, y) in normalised units."""
    obs_box: Box
    """Normalises observations."""
    act_box: Box
    """Normalises actions."""
    acting: Acting = Search()
    """How an action is found: `Search` or `Direct`."""
    spec: Specification | None = None
    """Observation's parts, history and horizon; None: one observation in, one action out."""
    settings: Any = None
    """The settings that built the energy, needed to save the policy."""
    low: Float[Tensor, " act"] | None = None
    """Lower limits of the action space; None: the demonstrations' range with its margin."""
    high: Float[Tensor, " act"] | None = None
    """Upper limits."""
    data_energies: Float[Tensor, " pairs"] | None = None
    """Sorted energies of training pairs, for the score."""
    _milliseconds: dict[tuple[int, int, int | None], float] = field(default_factory=dict, init=False)
    """Measured times by candidates, batch and steps; the one thing that a call may leave behind."""

    def __post_init__(self) -> None:
        if not isinstance(self.acting, Acting):
            raise ValueError(f"acting must have a method `search`, which {type(self.acting).__name__} has not")
        if self.spec is None:
            object.__setattr__(self, "spec", Specification.flat(self.obs_box.dim, self.act_box.dim))
        spec = self.specification
        for name, box, dim, of_spec in (
            ("obs_box", self.obs_box, self.energy.obs_dim, spec.obs_dim),
            ("act_box", self.act_box, self.energy.act_dim, spec.act_dim),
        ):
            if box.dim != dim:
                raise ValueError(f"{name} has {box.dim} dimensions, the energy expects {dim}")
            if box.dim != of_spec:
                raise ValueError(f"{name} has {box.dim} dimensions, the specification has {of_spec}")
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and bound.shape != self.act_box.centre.shape:
                raise ValueError(f"{name} has shape {tuple(bound.shape)}, actions have {self.act_box.dim} dimensions")
        low, high = self.limits
        if bool((low > high).any()):
            raise ValueError(f"low must not be above high, got {low.tolist()} and {high.tolist()}")
        object.__setattr__(self, "energy", _frozen(self.energy))

    def __repr__(self) -> str:
        spec = self.specification
        return (
            f"EnergyPolicy({type(self.energy).__name__}, {type(self.acting).__name__}, "
            f"{spec.history}×{spec.frame} observation → {spec.horizon}×{spec.action} action columns, {self.device})"
        )

    @property
    def specification(self) -> Specification:
        """What the energy was built for."""
        if self.spec is None:
            raise ValueError("the policy has no specification yet")
        return self.spec

    @property
    def history(self) -> int:
        """Observations that one input holds, oldest first."""
        return self.specification.history

    @property
    def horizon(self) -> int:
        """Actions that one output holds, the current one first."""
        return self.specification.horizon

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

    def reset(self) -> None:
        """Nothing to forget: an energy policy keeps no state."""

    def act(
        self,
        obs: Array,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
    ) -> Array:
        """The action for one observation [obs] or a batch [batch, obs]: an array, a tensor, a list or a row of a table.
        A tensor in gives a tensor out, anything else a numpy array.

        `candidates` and `steps` set the effort, or `budget_ms` does: as many candidates as fit the time.
        `previous` (the last action) starts the search there, which keeps it in its mode. Without a `generator`
        the same call gives the same action.
        """
        found, _ = self._found(obs, candidates, steps, budget_ms, previous, generator, everything=False)
        action = self._units(_taken(found))
        if np.ndim(obs) == 1:
            action = action[0]
        return action.to(obs.device) if isinstance(obs, Tensor) else action.cpu().numpy()  # type: ignore[return-value]

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
        """As `act`, with all the alternatives and their energies."""
        found, energies = self._found(obs, candidates, steps, budget_ms, previous, generator, everything=True)
        order = found.energies.argsort(1)
        actions = self._units(found.actions)
        score = torch.full_like(energies, torch.nan)
        if self.data_energies is not None:
            rank = torch.searchsorted(self.data_energies, energies.contiguous())
            score = rank.to(energies.dtype) / len(self.data_energies)
        return Proposal(
            self._units(_taken(found)),
            score,
            actions.gather(1, order.unsqueeze(-1).expand_as(actions)),
            found.energies.gather(1, order),
        )

    def problem(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
        everything: bool = False,
    ) -> Problem:
        """What `acting.search` gets for these observations, encoded."""
        inputs = self._inputs(obs, "obs", self.obs_box)
        before = None if previous is None else self._inputs(previous, "previous", self.act_box)
        if before is not None and len(before) != len(inputs):
            raise ValueError(f"previous has {len(before)} rows, obs has {len(inputs)}")
        return Problem(
            self.energy,
            self.energy.encode(inputs),
            len(inputs),
            self.act_box,
            *self._normalised_limits,
            torch.Generator(self.device).manual_seed(0) if generator is None else generator,
            generator is None,
            candidates,
            steps,
            before,
            everything,
        )

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

    def save(self, directory: str | Path) -> None:
        """Writes a directory with units, settings and weights; `cebm.load` reads it."""
        if self.settings is None:
            raise ValueError("a policy around your own energy has no settings to save; save its weights yourself")
        tensors = {f"energy.{name}": tensor for name, tensor in self.energy.state_dict().items()}
        for name, box in (("obs_box", self.obs_box), ("act_box", self.act_box)):
            tensors |= {f"{name}.centre": box.centre, f"{name}.scale": box.scale}
        for name in ("low", "high", "data_energies"):
            value = getattr(self, name)
            if value is not None:
                tensors[name] = value
        header = {
            "cebm": __version__,
            "energy": to_json(self.settings),
            "acting": to_json(self.acting),
            "spec": to_json(self.specification),
            "obs_margin": self.obs_box.margin,
            "act_margin": self.act_box.margin,
        }
        save_bundle(Path(directory), FORMAT, VERSION, header, tensors)

    def _found(
        self,
        obs: Any,
        candidates: int | None,
        steps: int | None,
        budget_ms: float | None,
        previous: Any,
        generator: torch.Generator | None,
        everything: bool,
    ) -> tuple[Found, Tensor]:
        """What acting found for the observations, and the energy of each row's choice."""
        if candidates is not None and budget_ms is not None:
            raise ValueError("give candidates or budget_ms, not both")
        if candidates is not None and candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {candidates}")
        if budget_ms is not None:
            batch = 1 if np.ndim(obs) == 1 else len(obs)
            candidates = self.candidates_within(budget_ms, batch, steps)
        with torch.inference_mode() if self.energy.closed_form else torch.no_grad():
            wishes: dict[str, Any] = {"candidates": candidates, "steps": steps, "previous": previous}
            problem = self.problem(obs, **wishes, generator=generator, everything=everything)
            found = self.acting.search(problem)
            chosen = found.energies.gather(1, found.chosen.unsqueeze(1))[:, 0]
            if not float(chosen.max()) < torch.inf:
                row = int((~(chosen < torch.inf)).nonzero()[0])
                raise ValueError(f"the energy is NaN or infinite at every candidate for observation {row}")
        return found, chosen

    def _inputs(self, values: Any, name: str, box: Box) -> Float[Tensor, "batch dim"]:
        """[dim] or [batch, dim] of any kind of number, to normalised [batch, dim] on the policy's device."""
        if isinstance(values, Tensor):
            rows = values
        else:
            try:
                # A copy: arrays may be read-only, which torch does not know, or have strides it does not take.
                rows = torch.from_numpy(np.array(values, np.float64, order="C"))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} must be numbers, got {type(values).__name__}: {error}") from error
        rows = rows.to(self.device, box.centre.dtype)
        rows = rows.unsqueeze(0) if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != box.dim or not len(rows):
            raise ValueError(f"{name} must be [{box.dim}] or [batch, {box.dim}], got {tuple(np.shape(values))}")
        # In the dtype of the units: far from zero, float32 would round before the centre is taken off.
        inputs = box.scaled(rows).to(self._dtype)
        check_finite(inputs, name)
        return inputs

    @cached_property
    def _dtype(self) -> torch.dtype:
        """The energy's; that of the units where it has no weights."""
        return next((p.dtype for p in self.energy.parameters() if p.is_floating_point()), self.act_box.centre.dtype)

    @cached_property
    def _normalised_limits(self) -> tuple[Tensor, Tensor]:
        # Not with `normalise`, which refuses the infinite limits of an unbounded space.
        low, high = (self.act_box.scaled(limit).to(self._dtype) for limit in self.limits)
        return low, high

    def _units(self, normalised: Tensor) -> Tensor:
        """Normalised actions in the user's units, within the limits."""
        return self.act_box.denormalise(normalised.to(self.act_box.centre.dtype)).clamp(*self.limits)

    def _measure(self, candidates: int, batch: int, steps: int | None) -> float:
        """Median milliseconds of a call."""
        key = (candidates, batch, steps)
        if key not in self._milliseconds:
            obs = self.obs_box.centre.expand(batch, -1)
            times = []
            for _ in range(6):
                began = perf_counter()
                self.act(obs, candidates=candidates, steps=steps)
                times.append((perf_counter() - began) * 1e3)
            self._milliseconds[key] = sorted(times[1:])[2]  # the first call pays for warming up
        return self._milliseconds[key]


def _taken(found: Found) -> Float[Tensor, "batch act"]:
    """The chosen candidates."""
    return found.actions[torch.arange(len(found.chosen), device=found.chosen.device), found.chosen]


def _frozen(energy: EnergyModel) -> EnergyModel:
    """The energy where nothing of it trains, otherwise a frozen copy in evaluation mode."""
    training = any(module.training for module in energy.modules())
    if not training and not any(parameter.requires_grad for parameter in energy.parameters()):
        return energy
    return copy.deepcopy(energy).eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------- loading


def load(directory: str | Path, device: torch.device | str = "cpu") -> EnergyPolicy:
    """Reads a policy that `save` wrote; a StorageError says what is wrong with a damaged, altered or newer one. A
    policy made of your own pieces needs their module imported first."""
    where, place = Path(directory), usable_device(device)
    shapes = tensor_shapes(where, load_header(where, FORMAT, VERSION))
    header, tensors = load_bundle(where, FORMAT, VERSION)
    try:
        if header["version"] < 3:
            header, tensors, shapes = upgraded_policy(header, tensors, str(where))
        return _rebuild(header, tensors, shapes, str(where), place)
    except StorageError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise StorageError(f"{where}: {error}") from error


def _rebuild(
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    where: str,
    device: torch.device,
) -> EnergyPolicy:
    spec = from_json(take(header, "spec", where), Specification, where)
    settings = from_json(take(header, "energy", where), EnergySettings, where)
    acting = from_json(take(header, "acting", where), Acting, where)
    boxes = []
    for name, dim in (("obs", spec.obs_dim), ("act", spec.act_dim)):
        centre, scale = (take(tensors, f"{name}_box.{part}", where) for part in ("centre", "scale"))
        boxes.append(Box(centre, scale, take(header, f"{name}_margin", where)).to(device))
        if boxes[-1].dim != dim:
            raise StorageError(f"{where}: {name}_box has {boxes[-1].dim} dimensions, the specification {dim}")
    weights = {name.removeprefix("energy."): value for name, value in tensors.items() if name.startswith("energy.")}
    stored = {name.removeprefix("energy."): shape for name, shape in shapes.items() if name.startswith("energy.")}
    _check_sizes(settings, spec, stored, where)
    # A generator of its own: loading leaves torch's global one alone.
    energy = settings.build(spec, torch.Generator())
    floating = next((value.dtype for value in weights.values() if value.is_floating_point()), torch.float32)
    energy = energy.to(floating)
    try:
        energy.load_state_dict(weights)
    except RuntimeError as error:
        raise StorageError(f"{where}: the weights do not fit the settings: {error}") from error
    optional = {name: tensors[name].to(device) for name in ("low", "high", "data_energies") if name in tensors}
    return EnergyPolicy(energy.to(device).eval().requires_grad_(False), *boxes, acting, spec, settings, **optional)


def _check_sizes(settings: Any, spec: Specification, stored: dict[str, tuple[int, ...]], where: str) -> None:
    """Builds the energy without memory and compares it with the weights in the file, so that a header that lies about
    its sizes is refused before anything large is made."""
    try:
        with torch.device("meta"), _at_most(len(stored), where):
            built = {name: tuple(value.shape) for name, value in settings.build(spec, None).state_dict().items()}
    except StorageError:
        raise
    except Exception:  # a user's energy that cannot be built without memory: its own file, its own risk
        return
    for name in sorted(built.keys() | stored.keys()):
        if built.get(name) != stored.get(name):
            raise StorageError(
                f"{where}: the weights do not fit the settings: {name} is {stored.get(name, 'missing')} in the file, "
                f"{built.get(name, 'not there')} by the settings"
            )


@contextmanager
def _at_most(parameters: int, where: str) -> Iterator[None]:
    """Stops a build of more parameters than this, in this thread."""
    thread, count = threading.get_ident(), 0

    def counted(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > parameters:
                raise StorageError(
                    f"{where}: the settings build more weights than the {parameters} tensors in the file"
                )

    handle = nn.modules.module.register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------------------------------------- the runner


class Runner:
    """Steps a policy through a batch of episodes: remembers the last observations, plays out action chunks and,
    with `warm_start`, hands the last action (of a chunk: what was not played) back to the search. Not shared
    between threads; `reset` forgets. It is a policy itself, and takes any policy."""

    def __init__(
        self,
        policy: Policy,
        *,
        execute: int | None = None,
        warm_start: bool = False,
        generator: torch.Generator | None = None,
        **effort: Any,
    ) -> None:
        self.policy, self.warm_start = policy, warm_start
        self._history, self._horizon = getattr(policy, "history", 1), getattr(policy, "horizon", 1)
        self.execute = self._horizon if execute is None else execute
        if not 1 <= self.execute <= self._horizon:
            raise ValueError(f"execute must be between 1 and the policy's horizon {self._horizon}, got {execute}")
        known = inspect.signature(policy.act).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in known.values())
        unknown = [name for name in effort if name not in known and not anything]
        if warm_start and "previous" not in known and not anything:
            unknown.append("previous")
        if unknown:
            raise ValueError(f"{type(policy).__name__}.act does not take {', '.join(unknown)}")
        self.effort = effort
        if generator is not None and ("generator" in known or anything):
            self.effort = {**effort, "generator": generator}
        self._forget()

    def reset(self) -> None:
        """Forget: a new batch of episodes begins."""
        self.policy.reset()
        self._forget()

    def _forget(self) -> None:
        self._seen: list[np.ndarray] = []
        self._chunk: list[np.ndarray] = []
        self._last: np.ndarray | None = None

    def act(self, obs: Any) -> np.ndarray:
        """The next action of every episode [batch, act], or of one, for one observation [obs]. An observation that is
        refused leaves the runner as it was."""
        seen = np.array(obs)  # a copy: environments may write the next observation into the same array
        single = seen.ndim == 1
        seen = seen[None] if single else seen
        if seen.ndim != 2:
            raise ValueError(f"obs must be [obs] or [batch, obs], got {np.shape(obs)}")
        if self._seen and seen.shape != self._seen[0].shape:
            raise ValueError(
                f"obs has shape {seen.shape}, the episodes under way have {self._seen[0].shape}; reset first"
            )
        if seen.dtype.kind == "f" and not np.isfinite(seen).all():
            row, column = np.argwhere(~np.isfinite(seen))[0]
            raise ValueError(f"obs has NaN or infinite values: row {row}, dimension {column}")
        past = ([seen] * self._history if not self._seen else [*self._seen, seen])[-self._history :]
        if not self._chunk:
            before = {"previous": self._last} if self.warm_start and self._last is not None else {}
            chunk = np.asarray(self.policy.act(np.concatenate(past, 1), **before, **self.effort))
            actions = np.split(chunk, self._horizon, axis=1)
            self._chunk = [action.copy() for action in actions[: self.execute]]
            # What is left of the plan, held at its end, is where the next search starts.
            self._last = np.concatenate([*actions[self.execute :], *[actions[-1]] * self.execute], axis=1)
        self._seen = past
        action = self._chunk.pop(0)
        return action[0] if single else action
