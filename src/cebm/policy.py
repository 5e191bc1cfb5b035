"""A policy: observation in, action out. It carries its units, so nobody normalises by hand.

A `Policy` is anything with `act` and `reset`; ours is an `EnergyPolicy`, which keeps no state between calls and may be
called from several threads. `Runner` (in `cebm.runner`) adds a history of observations and action chunks to it.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm import __version__, likelihood
from cebm.acting import Acting, Found, Problem, Search
from cebm.decisions import Decision
from cebm.densities import LogProb, Mode
from cebm.energies.base import Actions, Energies, EnergyModel
from cebm.named import flat_observation
from cebm.parts import Part
from cebm.settings import to_json
from cebm.spaces import Box, Specification, check_finite, traced
from cebm.storage import save_bundle
from cebm.units import Conversion, Units

if TYPE_CHECKING:
    from cebm.constraints import ConstrainedPolicy, Constraint, Scene
    from cebm.demonstrations import Demonstrations
    from cebm.trust import Calibration

FORMAT, VERSION = "cebm.policy", 4
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
    """Acts by an energy. It works on a frozen copy in evaluation mode: the energy that is passed in stays as it is, and
    what happens to it later does not change the policy."""

    energy: EnergyModel
    """E(x, y) in normalised units."""
    obs_box: Box
    """Normalises observations; their features, where there is a `conversion`."""
    act_box: Box
    """Normalises actions; their features, where there is a `conversion`."""
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
    conversion: Conversion | None = None
    """Kinds of columns and relative actions; None: every column is plain, the boxes are all."""
    seen: Float[Tensor, "some inside"] | None = None
    """Training observations, normalised: what is unfamiliar is far from them."""
    calibration: "Calibration | None" = None
    """Thresholds beyond which `decide` asks; `calibrate` finds them."""
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
        columns = self.units.act_dim
        for name, bound in (("low", self.low), ("high", self.high)):
            if bound is not None and bound.shape != (columns,):
                raise ValueError(f"{name} has shape {tuple(bound.shape)}, actions have {columns} dimensions")
            if bound is not None and bool(bound.isnan().any()):
                raise ValueError(f"{name} must not be NaN, got {bound.tolist()}")
        if self.data_energies is not None and (self.data_energies.ndim != 1 or not len(self.data_energies)):
            raise ValueError(f"data_energies must be a vector, got shape {tuple(self.data_energies.shape)}")
        if self.seen is not None and (self.seen.ndim != 2 or self.seen.shape[1] != spec.obs_dim or not len(self.seen)):
            raise ValueError(f"seen must be [some, {spec.obs_dim}], got shape {tuple(self.seen.shape)}")
        low, high = self.limits
        if bool((low > high).any()):
            raise ValueError(f"low must not be above high, got {low.tolist()} and {high.tolist()}")
        object.__setattr__(self, "energy", _frozen(self.energy))

    def __repr__(self) -> str:
        frame, action = self.columns
        return (
            f"EnergyPolicy({type(self.energy).__name__}, {type(self.acting).__name__}, "
            f"{self.history}×{frame} observation → {self.horizon}×{action} action columns, {self.device})"
        )

    @cached_property
    def units(self) -> Units:
        """From raw observations and actions to the energy's inputs and outputs, and back."""
        spec = self.specification
        if self.conversion is None:
            return Units.plain(self.obs_box, self.act_box, spec.history, spec.horizon)
        return Units(self.obs_box, self.act_box, spec.history, spec.horizon, self.conversion)

    @property
    def columns(self) -> tuple[int, int]:
        """Raw columns of one observation and of one action."""
        conversion = self.units.conversion
        return conversion.obs.size, conversion.action.size

    @cached_property
    def specification(self) -> Specification:
        """What the energy was built for."""
        if self.spec is None:
            raise ValueError("the policy has no specification yet")
        return self.spec

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The named parts of a raw observation."""
        return self.units.conversion.obs.parts or self.specification.parts

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
        if not self.units.conversion.plain:
            endless = self.act_box.centre.new_full((self.units.act_dim,), torch.inf)
            return -endless if self.low is None else self.low, endless if self.high is None else self.high
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
        """The action for one observation [obs] or a batch [batch, obs]: an array, a tensor, a list, a row of a table,
        or a dictionary of named parts. A tensor in gives a tensor out, anything else a numpy array.

        `candidates` and `steps` set the effort, or `budget_ms` does: as many candidates as fit the time.
        `previous` (the last action) starts the search there, which keeps it in its mode. Without a `generator`
        the same call gives the same action.
        """
        obs = flat_observation(obs, self.parts, self.history)
        rows = self._rows(obs, "obs", self.units.obs_dim)
        exporting = traced()
        with self._without_gradients(exporting):
            found, energies = self._found(rows, candidates, steps, budget_ms, previous, generator, everything=False)
            if not exporting:
                _refuse_infinite(energies)
            action = self.actions(_taken(found), rows)[:, 0]
            if exporting:  # no exception comes out of an exported policy: NaN says the same
                action = torch.where(energies < torch.inf, action, torch.nan)
        if obs.ndim == 1 if isinstance(obs, Tensor) else np.ndim(obs) == 1:
            action = action[0]
        if not isinstance(obs, Tensor):
            return action.cpu().numpy()  # type: ignore[return-value]
        # What was made in inference mode could not enter the caller's graph; a copy can.
        return (action.clone() if action.is_inference() else action).to(obs.device)  # type: ignore[return-value]

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
        rows = self.observed(obs)
        with self._without_gradients(traced()):
            found, chosen = self._found(rows, candidates, steps, budget_ms, previous, generator, everything=True)
            _refuse_infinite(chosen)
        energies = chosen[:, 0]
        # The chosen one comes first among those of its energy.
        others = torch.arange(found.energies.shape[1], device=self.device) != found.chosen.unsqueeze(1)
        order = others.int().argsort(dim=1, stable=True)
        order = order.gather(1, found.energies.gather(1, order).argsort(dim=1, stable=True))
        actions = self.actions(found.actions, rows)
        score = torch.full_like(energies, torch.nan)
        if self.data_energies is not None:
            rank = torch.searchsorted(self.data_energies, energies.contiguous())
            score = rank.to(energies.dtype) / len(self.data_energies)
        return Proposal(
            self.actions(_taken(found), rows)[:, 0],
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
        return self._problem(self.observed(obs), candidates, steps, previous, generator, everything)

    def _problem(
        self,
        rows: Float[Tensor, "batch dim"],
        candidates: int | None,
        steps: int | None,
        previous: Any,
        generator: torch.Generator | None,
        everything: bool,
    ) -> Problem:
        """The same of raw rows on the policy's device."""
        inputs = self._checked(self.units.inputs(rows), rows, "obs")
        before = None
        if previous is not None:
            last = self._rows(previous, "previous", self.units.act_dim)
            if last.shape[0] != rows.shape[0]:
                raise ValueError(f"previous has {len(last)} rows, obs has {len(rows)}")
            before = self._checked(self.units.targets(last, rows), last, "previous")
        return Problem(
            self.energy,
            self.energy.encode(inputs),
            inputs.shape[0],
            self.act_box,
            *self._normalised_limits(rows),
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

    def log_prob(
        self,
        obs: Any,
        action: Any,
        *,
        draws: int = 1024,
        anneal: bool = True,
        generator: torch.Generator | None = None,
    ) -> LogProb:
        """log p(action | obs) per row, in the units of the actions, with its standard error and the Pareto k̂ of the
        estimate of log Z (see `cebm.densities`); warns, naming the observation, where it is not to be trusted.
        Without a proposal, the density is that in the box of the actions with its margin, and −∞ outside. A policy that
        was trained with smoothing (`specification.smoothing`) has the density of the actions with this noise."""
        return likelihood.log_prob(self, obs, action, draws, anneal, generator)

    def modes(self, obs: Any, *, draws: int = 512, generator: torch.Generator | None = None) -> list[list[Mode]]:
        """The modes of p(y|obs) for each row, the heaviest first, with the probability of their basins and its error:
        actions in the user's units. Warns, naming the observation, where the masses are not to be trusted."""
        return likelihood.modes(self, obs, draws, generator)

    def save(self, directory: str | Path) -> None:
        """Writes a directory with units, settings and weights; `cebm.load` reads it."""
        if self.settings is None:
            raise ValueError("a policy around your own energy has no settings to save; save its weights yourself")
        tensors = {f"energy.{name}": tensor for name, tensor in self.energy.state_dict().items()}
        for name, box in (("obs_box", self.obs_box), ("act_box", self.act_box)):
            tensors |= {f"{name}.centre": box.centre, f"{name}.scale": box.scale}
        for name in ("low", "high", "data_energies", "seen"):
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
            "units": None if self.units.conversion.plain else to_json(self.conversion),
            "calibration": to_json(self.calibration),
        }
        save_bundle(Path(directory), FORMAT, VERSION, header, tensors)

    def export(
        self,
        path: str | Path,
        format: Literal["onnx", "torch", "aoti"] = "onnx",
        candidates: int | None = None,
        steps: int | None = None,
    ) -> None:
        """Writes one file that acts as `act` does with this effort, without cebm: `cebm.load_exported` gives it back as
        a policy. Its observations are [batch, history · frame] and its random numbers are inputs (docs/deploy.md)."""
        from cebm.export import export

        export(self, path, format, candidates, steps)

    def without_energy(self) -> "EnergyPolicy":
        """This policy with its energy ignored, to see what the energy adds: the part of it that can act alone, such as
        the mixture of `steady`; else one draw, where the energy chooses among several. ValueError where neither is."""
        alone = self.energy.alone
        if alone is not None:
            return replace(self, energy=alone, settings=None, data_energies=None, calibration=None)
        one_draw = getattr(self.acting, "one_draw", None)
        acting = None if one_draw is None else one_draw()
        if acting is None:
            raise ValueError(
                f"a {type(self.energy).__name__} that acts by {type(self.acting).__name__} does nothing without its "
                "energy: no part of it acts alone, and it does not choose among draws"
            )
        return replace(self, acting=acting)

    def with_constraint(
        self, constraint: "Constraint | Callable[[Scene], Tensor]", weight: float | None = None
    ) -> "ConstrainedPolicy":
        """This policy under a constraint: a hard one, which is never violated, or with a `weight` an energy that is
        added to its own. `cebm.constraints` has ready ones; a function of a `Scene` is one too (docs/trust.md)."""
        from cebm.constraints import ConstrainedPolicy

        return ConstrainedPolicy(self).with_constraint(constraint, weight)

    def calibrate(
        self, held_out: "Demonstrations", alpha: float = 0.05, *, tie: float | None = None, seed: int = 0
    ) -> "EnergyPolicy":
        """This policy with thresholds, by split conformal prediction over episodes it was not trained on: `decide` asks
        in at most a share `alpha` of such episodes. `tie`: two modes whose energies differ by less are a reason to ask
        too. docs/trust.md says what is guaranteed and what not."""
        from cebm.trust import calibrate

        return replace(self, calibration=calibrate(self, held_out, alpha, tie=tie, seed=seed))

    def decide(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """As `act`, but it may ask: where the observation is unfamiliar, the action unlikely, or two modes are tied."""
        from cebm.trust import decide

        return decide(self, obs, candidates=candidates, steps=steps, previous=previous, generator=generator)

    def doubts(self, obs: Any, energies: Float[Tensor, " batch"]) -> tuple[str, ...]:
        """Why not to act upon these observations by actions of these energies; empty where there is no reason."""
        from cebm.trust import doubts

        return doubts(self, self.observed(obs), energies)

    def check(self, obs: Any) -> None:
        """ValueError where `act` would refuse these observations."""
        rows = self.observed(obs)
        self._checked(self.units.inputs(rows), rows, "obs")

    def actions(
        self, normalised: Float[Tensor, "batch samples inside"], obs: Any
    ) -> Float[Tensor, "batch samples act"]:
        """Normalised actions for these observations in the user's units, within the limits."""
        rows = self.observed(obs) if self.units.conversion.relative else None
        if normalised.dtype != self.act_box.centre.dtype:
            normalised = normalised.to(self.act_box.centre.dtype)
        return self.units.actions(normalised, rows).clamp(*self.limits)

    def _found(
        self,
        rows: Float[Tensor, "batch dim"],
        candidates: int | None,
        steps: int | None,
        budget_ms: float | None,
        previous: Any,
        generator: torch.Generator | None,
        everything: bool,
        thorough: bool = False,
    ) -> tuple[Found, Float[Tensor, "batch 1"]]:
        """What acting found for the observations, and the energy of each row's choice."""
        if candidates is not None and budget_ms is not None:
            raise ValueError("give candidates or budget_ms, not both")
        if candidates is not None and candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {candidates}")
        if budget_ms is not None:
            candidates = self.candidates_within(budget_ms, rows.shape[0], steps)
        problem = self._problem(rows, candidates, steps, previous, generator, everything)
        found = self.acting.search(replace(problem, thorough=True) if thorough else problem)
        return found, found.energies.gather(1, found.chosen.unsqueeze(1))

    def _without_gradients(self, exporting: bool) -> AbstractContextManager[Any]:
        """Inference mode where the energy takes no autograd and nothing is traced."""
        return torch.inference_mode() if self.energy.closed_form and not exporting else torch.no_grad()

    def observed(self, obs: Any) -> Float[Tensor, "batch dim"]:
        """Raw observations as rows on the policy's device, given as rows or by the names of their parts."""
        return self._rows(flat_observation(obs, self.parts, self.history), "obs", self.units.obs_dim)

    def raw_actions(self, actions: Any, count: int) -> Float[Tensor, "batch act"]:
        """Raw actions, given as rows, on the policy's device; a ValueError where there are not `count`."""
        rows = self._rows(actions, "actions", self.units.act_dim)
        if len(rows) != count:
            raise ValueError(f"actions has {len(rows)} rows, obs has {count}")
        return rows

    def _rows(self, values: Any, name: str, columns: int) -> Float[Tensor, "batch dim"]:
        """[dim] or [batch, dim] of any kind of number, to raw [batch, dim] on the policy's device, in the dtype of the
        units: far from zero, float32 would round before the centre is taken off."""
        if isinstance(values, Tensor):
            rows = values
        else:
            try:
                # A copy: arrays may be read-only, which torch does not know, or have strides it does not take.
                rows = torch.from_numpy(np.array(values, np.float64, order="C"))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} must be numbers, got {type(values).__name__}: {error}") from error
        rows = rows.to((self.obs_box if name == "obs" else self.act_box).centre)  # its device and dtype
        rows = rows.unsqueeze(0) if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != columns or not rows.shape[0]:
            raise ValueError(f"{name} must be [{columns}] or [batch, {columns}], got {tuple(np.shape(values))}")
        return rows

    def _checked(self, inside: Tensor, raw: Tensor, name: str) -> Float[Tensor, "batch inside"]:
        """In the energy's dtype, and finite."""
        if not self.units.conversion.plain:
            check_finite(raw, name)
        if inside.dtype != self._dtype:
            inside = inside.to(self._dtype)
        check_finite(inside, name)
        return inside

    @cached_property
    def _dtype(self) -> torch.dtype:
        """The energy's; that of the units where it has no weights."""
        return next((p.dtype for p in self.energy.parameters() if p.is_floating_point()), self.act_box.centre.dtype)

    def _normalised_limits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The limits inside, for these raw observations."""
        if not self.units.conversion.relative:
            return self._same_limits
        low, high = self.units.bounds(*self.limits, rows)
        return low.to(self._dtype), high.to(self._dtype)

    @cached_property
    def _same_limits(self) -> tuple[Tensor, Tensor]:
        """The limits inside, where they depend on no observation."""
        low, high = self.units.bounds(*self.limits, self.units.middle.unsqueeze(0))
        return low.to(self._dtype), high.to(self._dtype)

    def _measure(self, candidates: int, batch: int, steps: int | None) -> float:
        """Median milliseconds of a call that does all the work an observation may need."""
        key = (candidates, batch, steps)
        if key not in self._milliseconds:
            obs = self.units.middle.expand(batch, -1)
            times = []
            for _ in range(6):
                began = perf_counter()
                with self._without_gradients(exporting=False):
                    found, _ = self._found(obs, candidates, steps, None, None, None, everything=False, thorough=True)
                    self.actions(_taken(found), obs)
                times.append((perf_counter() - began) * 1e3)
            self._milliseconds[key] = sorted(times[1:])[2]  # the first call pays for warming up
        return self._milliseconds[key]


def _refuse_infinite(chosen: Float[Tensor, "batch 1"]) -> None:
    """ValueError that names the observation whose best candidate has no finite energy."""
    if not chosen.max().item() < torch.inf:
        row = int((~(chosen[:, 0] < torch.inf)).nonzero()[0])
        raise ValueError(f"the energy is NaN or infinite at every candidate for observation {row}")


def _taken(found: Found) -> Float[Tensor, "batch 1 act"]:
    """The candidate that was chosen for each observation."""
    return found.actions.gather(1, found.chosen.view(-1, 1, 1).expand(-1, 1, found.actions.shape[2]))


def _frozen(energy: EnergyModel) -> EnergyModel:
    """A copy that does not train, its weights laid out for acting."""
    try:
        copied = copy.deepcopy(energy)
    except Exception as error:
        name = type(energy).__name__
        raise ValueError(f"energy: a {name} cannot be copied, which a policy needs: {error}") from error
    for module in copied.modules():
        lay_out = getattr(module, "lay_out", None)
        if callable(lay_out):
            lay_out()
    return copied.eval().requires_grad_(False)
