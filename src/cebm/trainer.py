"""The state of a training and its one step, in memory; `runs` adds the run directory."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.arithmetic import reducing
from cebm.composition import built, modules_in
from cebm.demonstrations import Demonstrations, Windows
from cebm.distributed import ALONE, Group
from cebm.energies import EnergyModel
from cebm.information import SaturatedBoundWarning, energy_score, info_nce_bound
from cebm.losses import info_nce
from cebm.objectives import Terms
from cebm.policy import EnergyPolicy
from cebm.recipes import Trial
from cebm.settings import StorageError
from cebm.spaces import Box, Specification, check_finite, looking_later
from cebm.storage import take
from cebm.threads import choose
from cebm.units import extended, located, measure, perturbed
from cebm.ways import Compiled, Way, Ways, fastest

Limits = tuple[Any, Any]
Result = TypeVar("Result")


class Learner(nn.Module):
    """What a trial trains: the energy, and whatever in its objective has weights or buffers of its own."""

    def __init__(self, trial: Trial, spec: Specification, generator: torch.Generator) -> None:
        super().__init__()
        self.trial = trial
        self.energy = _expected(EnergyModel, trial.energy.build(spec, generator), trial.energy, "build")
        self.objective = built(trial.objective, spec, generator)
        self.pieces = nn.ModuleDict(modules_in(self.objective))
        self.ways = Ways(trial.precision, trial.compiled)

    def loss(
        self, obs: Float[Tensor, "batch obs"], actions: Float[Tensor, "batch act"], generator: torch.Generator
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The loss to minimise, and what to log of this step."""
        smoothing = self.trial.inputs.smoothing
        if smoothing:
            noise = torch.randn(actions.shape, generator=generator, dtype=actions.dtype, device=actions.device)
            actions = actions + smoothing * noise
        terms = _expected(Terms, self.objective.terms(self.energy, obs, actions, generator), self.objective, "terms")
        loss = terms.loss
        for piece in self.trial.penalties:
            loss = loss + piece.penalty(self.energy, obs, terms)
        log = _numbers(loss, actions, terms)
        # What follows has parameters of its own: Adam trains the parts as if apart.
        for name, own in (self.energy.own_losses(obs, actions) | terms.own).items():
            log[name] = own.detach()
            loss = loss + own
        return loss, log


def _expected(kind: Any, found: Result, piece: Any, method: str) -> Result:
    """What a method of a user's piece gave; a ValueError that names the piece where it is something else."""
    if not isinstance(found, kind):
        raise ValueError(
            f"{type(piece).__name__}.{method} must give {kind.__module__}.{kind.__name__}, got {type(found).__name__}"
        )
    return found


MOST_SEEN = 2_000_000
"""Numbers of the training observations that a policy keeps, at most."""


def _numbers(loss: Tensor, actions: Tensor, terms: Terms) -> dict[str, Tensor]:
    """What to log of a step."""
    log = {"loss": loss.detach(), **{name: value.detach() for name, value in terms.log.items()}}
    positive, negative, drawn = terms.positive, terms.negative, terms.drawn
    with torch.no_grad():
        if positive is not None:
            log["positive_energy"] = positive.mean()
        if positive is not None and negative is not None:
            log["info_nce"] = info_nce(positive, negative)
            log["negative_energy"] = negative.mean()
            log["energy_gap"] = negative.mean() - positive.mean()
        if drawn is not None:
            log["negative_distance"] = (drawn.actions - actions.unsqueeze(1)).norm(dim=-1).mean()
    if drawn is None or drawn.info is None:
        return log
    return log | {
        "chain_energy_first": drawn.info.energy[0],
        "chain_energy_last": drawn.info.energy[-1],
        "gradient_norm_first": drawn.info.gradient_norm[0],
        "gradient_norm_last": drawn.info.gradient_norm[-1],
        "clipped": drawn.info.clipped.mean(),
        "acceptance": drawn.info.acceptance.mean(),
    }


class Trainer:
    """The state of a run and its one step, without any files. `cebm.fit` and `train` both use it."""

    def __init__(
        self,
        trial: Trial,
        training: Demonstrations,
        validation: Demonstrations,
        seed: int = 0,
        device: torch.device | str = "cpu",
        limits: Limits | None = None,
        steps: int | None = None,
        group: Group = ALONE,
    ) -> None:
        """`limits` are the lowest and the highest action; `steps` is the length of the run, which a cosine schedule
        needs to know. In a `group` each process has a share of every batch and random numbers of its own."""
        self.steps, self.group = steps, group
        self._share = group.share(trial.optimiser.batch_size)
        self.trial, self.seed, self.device, self.limits = trial, seed, torch.device(device), limits
        inputs = trial.inputs
        self._jitter = located(inputs.jitter, training)
        training = extended(training, located(inputs.symmetries, training))
        self.training = training.windows(inputs.history, inputs.horizon)
        self.validation = validation.windows(inputs.history, inputs.horizon)
        self._rows = _rows(self.training, inputs.padding)
        measured = measure(inputs, self.training, self._rows)
        self.units, self.notes = measured.units.to(self.device), measured.notes
        self._range = (measured.low, measured.high)
        self._bounds()  # limits that cannot be meant are refused now, and not after the training
        forms = self.units.conversion
        self.spec = inputs.specification(forms.obs.inside_parts, forms.action.features)
        if hasattr(trial.energy, "sized"):
            self.trial = trial = replace(trial, energy=trial.energy.sized(len(self._rows)))
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.learner = Learner(trial, self.spec, self.generator).to(self.device)
        if group.size > 1:  # the weights are the same in all processes, what follows is not
            self.generator.manual_seed(group.seed(seed))
        remember = getattr(self.learner.energy, "remember", None)
        if callable(remember):
            remember(*self._normalised(self.training, self._rows))
        self.average = copy.deepcopy(self.learner.energy) if trial.optimiser.average else None
        self._compiled = Compiled(self.learner)
        self.learner.ways.open_to(self.device)  # a precision that this device does not have is refused now
        self._trains = any(True for _ in self.learner.parameters())  # what has no weights has no gradients
        self.optimiser = trial.optimiser.make(self.learner.parameters())
        self.step_count = 0
        self._order: tuple[int, np.ndarray, Tensor] | None = None
        # Small sets live on the device, normalised unless they are varied; large ones stay on disk and are gathered
        # batch by batch.
        small = len(self.training) * (self.training.obs_dim + self.training.act_dim) < 100_000_000
        self._varied = bool(self._jitter) or inputs.padding == "mask"
        gather = self._raw if self._varied else self._normalised
        self._resident = self._all(gather) if small else None
        self._learning_rate()  # a schedule that cannot be followed says so now

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self._rows) // self.trial.optimiser.batch_size)

    @property
    def obs_box(self) -> Box:
        """Scales the features of an input."""
        return self.units.obs_box

    @property
    def act_box(self) -> Box:
        """Scales the features of an output."""
        return self.units.act_box

    def step(self) -> dict[str, Tensor]:
        """One optimiser step on the next batch; what to log of it, as tensors. Weights stay as they are when the
        loss or its gradient is not finite: that is a FloatingPointError, or a ValueError that names the energy. Where
        a trial allows several ways to compute a step, the first call measures them."""
        return self._step(self._settled())

    def _step(self, way: Way) -> dict[str, Tensor]:
        self.learner.train()
        for settings in self.optimiser.param_groups:
            settings["lr"] = self._learning_rate()
        self.optimiser.zero_grad(set_to_none=True)
        with self.group.together():
            log = self._backward(way)
        if self.group.size > 1:
            self.group.average_gradients(self.learner.parameters())
            log["parameter_gradient_norm"] = self._gradient_norm()
        try:
            self.optimiser.step()
        except RuntimeError as error:  # a learning rate beyond float32
            raise FloatingPointError(f"the optimiser's step failed: {error}") from error
        self.step_count += 1
        self._follow()
        return log

    def _backward(self, way: Way) -> dict[str, Tensor]:
        """Gradients of the loss on this process's share of the batch, checked with one look; what to log of them."""
        with looking_later() as checks, self._global_randomness():
            obs, actions = self._batch(self.step_count)
            with reducing(way.half):
                loss, log = (self._compiled if way.compiled else self.learner).loss(obs, actions, self.generator)
            if self._trains:
                loss.backward()
        norm = log["parameter_gradient_norm"] = self._gradient_norm()
        # The whole loss, with that of a proposal or a marginal beside the energy's own, which is what is logged.
        for name, value in (("loss", loss.detach()), ("parameter_gradient_norm", norm)):
            checks.add(~torch.isfinite(value), partial(_refuse, name, value))
        checks.look()
        return log

    def _gradient_norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.learner.energy.parameters() if p.grad is not None])

    def align(self) -> None:
        """Gives the first process's weights and buffers to all of the group, where they have just been made."""
        for module in (self.learner, self.average):
            if module is not None:
                self.group.same_weights(module)

    def rehearse(self) -> None:
        """Takes the next step and goes back to where it was: what cannot be trained fails now."""
        with self.rehearsing():
            self.step()
            self.state()

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Steps inside the block are taken back at its end; the way in which they are computed is kept."""
        self._settled()
        state, step = self.state(), self.step_count
        try:
            yield
        finally:
            self._load(state, step)

    def choose_threads(self) -> str:
        """Leaves torch with as many threads as are fastest for this training now, and says so."""
        most = torch.get_num_threads()
        try:
            with self.rehearsing():
                return choose(self.step, most).words()
        except (FloatingPointError, ValueError) as error:  # it diverges at once, and training will say so itself
            torch.set_num_threads(most)
            return f"{most} threads, as the first steps fail: {error}"

    def _settled(self) -> Way:
        """The way to compute a step: where there are several, the fastest of those that this device can go, measured
        in turns. All of a group take the first process's choice."""
        ways = self.learner.ways
        taken = ways.taken()
        if taken is not None:
            return taken
        tried = ways.open_to(self.device)
        state, step = self.state(), self.step_count
        seconds = dict.fromkeys(tried, math.inf)
        for turn in range(4):
            for index in tried:
                if ways.all[index].compiled and self._compiled.broken:
                    continue
                began = perf_counter()
                float(self._step(ways.all[index])["loss"])  # waits for the result
                if turn:  # the first time is for what is only done once
                    seconds[index] = min(seconds[index], perf_counter() - began)
        self._load(state, step)
        ways.take(self.group.of_first(fastest(seconds)))
        return self._settled()

    def check_weights(self) -> None:
        """FloatingPointError where a weight is NaN or infinite, so that training cannot go on from here."""
        for name, value in self.learner.state_dict().items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise FloatingPointError(f"the weights {name} are NaN or infinite")

    @torch.no_grad()
    def _follow(self) -> None:
        """Moves the average of the weights."""
        if self.average is None:
            return
        # The first steps forget faster, so that the average does not remember the initial weights.
        keep = min(self.trial.optimiser.average, (1 + self.step_count) / (10 + self.step_count))
        for average, weight in zip(self.average.parameters(), self.learner.energy.parameters(), strict=True):
            average.lerp_(weight, 1 - keep)
        for mine, other in zip(self.average.modules(), self.learner.energy.modules(), strict=True):
            follow = getattr(mine, "follow_weights", None)
            if callable(follow):  # buffers that belong to the averaged weights, not to the raw ones
                follow()
                continue
            for buffer, new in zip(mine.buffers(recurse=False), other.buffers(recurse=False), strict=True):
                buffer.copy_(new)

    def _learning_rate(self) -> float:
        """That of the next step."""
        return self.trial.optimiser.rate(self.step_count, self.steps, self.steps_per_epoch)

    def policy(self, averaged: bool = True) -> EnergyPolicy:
        """The policy as of now, a copy, so that training can go on; of the averaged weights where there are such,
        unless `averaged=False`."""
        energy = copy.deepcopy(self.learner.energy if self.average is None or not averaged else self.average)
        energy = energy.eval().requires_grad_(False)
        rows = np.random.default_rng(self.seed).permutation(len(self._rows))[:1024]
        obs, actions = self._normalised(self.training, self._rows[np.sort(rows)])
        with torch.no_grad():
            data_energies = energy(obs, actions.unsqueeze(1))[:, 0].sort().values
        seen = obs[:: -(-obs.numel() // MOST_SEEN)]
        low, high = self._bounds()
        return EnergyPolicy(
            energy,
            self.obs_box,
            self.act_box,
            self.trial.acting,
            self.spec,
            self.trial.energy,
            data_energies=data_energies,
            conversion=self.units.conversion,
            seen=seen,
            low=low,
            high=high,
        )

    def _bounds(self) -> tuple[Tensor | None, Tensor | None]:
        """The lowest and the highest chunk: the limits, or what the units say."""
        if self.limits is None:
            low, high = (None if end is None else end.to(self.act_box.centre) for end in self._range)
            return (low, high) if low is not None and high is not None else (None, None)
        columns, ends = self.units.conversion.action.size, []
        for name, limit in zip(("low", "high"), self.limits, strict=True):
            given = torch.as_tensor(np.asarray(limit, np.float64)).to(self.act_box.centre)
            if given.shape not in ((), (1,), (columns,)):
                raise ValueError(f"limits: {name} has shape {tuple(given.shape)}, an action has {columns} columns")
            ends.append(given.expand(columns))
        if not bool((ends[0] <= ends[1]).all()):
            raise ValueError(f"limits: low must not be above high, got {ends[0].tolist()} and {ends[1].tolist()}")
        horizon = self.trial.inputs.horizon
        return ends[0].repeat(horizon), ends[1].repeat(horizon)

    def validate(
        self, policy: EnergyPolicy, candidates: int | None = None, pairs: int = 256, draws: int = 0
    ) -> dict[str, float]:
        """Action errors on training and validation pairs, and on the latter the bound on mutual information and, with
        `draws` per pair (two or more), the energy score of what the policy draws, in normalised units.

        The bound takes the other examples' actions as negatives whatever the trial trains with: only independent
        samples of the marginal make it a bound. It says nothing where it is below 0, which is then logged as 0.
        """
        result = {}
        for name, windows in (("train", self.training), ("validation", self.validation)):
            rows = windows.spread(pairs, self.seed)
            obs, actions = windows[rows]
            chosen = policy.act(obs, candidates=candidates)
            # In float64: the squares of large units overflow float32.
            pair = (torch.from_numpy(np.asarray(each, np.float64)) for each in (chosen, actions))
            result[f"{name}_action_error"] = float(np.linalg.norm(self.units.difference(*pair).numpy(), axis=1).mean())
        inputs, targets = self._normalised(self.validation, rows)
        if draws:
            generator = torch.Generator(self.device).manual_seed(self.seed)  # the same numbers for every checkpoint
            drawn = policy.act(np.repeat(obs, draws, 0), candidates=candidates, generator=generator)
            seen = np.repeat(np.asarray(obs), draws, 0)
            pair = (torch.from_numpy(each).to(self.device) for each in (np.asarray(drawn, seen.dtype), seen))
            taken = self.units.targets(*pair).to(targets).unflatten(0, (-1, draws))
            result["validation_energy_score"] = float(energy_score(taken, targets).mean())
        count = len(rows)
        if count > 1:
            with torch.no_grad():
                context = policy.energy.encode(inputs)
                energies = policy.energy.energies(context, targets.unsqueeze(0).expand(count, -1, -1))
            others = energies[~torch.eye(count, dtype=torch.bool, device=self.device)].view(count, count - 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SaturatedBoundWarning)  # the ceiling is logged beside it
                bound = info_nce_bound(energies.diagonal(), others)
            result |= {"mi_bound": max(0.0, float(bound.nats)), "mi_ceiling": float(bound.ceiling)}
        return result

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the next step depends on."""
        tensors = {f"learner.{name}": value for name, value in self.learner.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for index, entry in self.optimiser.state_dict()["state"].items():
            kept = {name: value for name, value in entry.items() if value is not None}
            tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in kept.items()}
        return {name: value.clone() for name, value in tensors.items()} | {"generator": self.generator.get_state()}

    def group_state(self) -> dict[str, Tensor]:
        """The state of the whole group, for the first process to save: its own, and the generators and buffers of the
        others under `rank-1.` and so on. Every process must call this."""
        own = self.state()
        if self.group.size == 1:
            return own
        shared = {f"learner.{name}" for name, _ in self.learner.named_parameters()}
        private = {
            name: value.cpu()
            for name, value in own.items()
            if name == "generator" or (name.startswith("learner.") and name not in shared)
        }
        for rank, tensors in enumerate(self.group.gathered(private)):
            own |= {f"rank-{rank}.{name}": value for name, value in tensors.items() if rank}
        return own

    def load_state(self, tensors: dict[str, Tensor], step: int) -> None:
        """The inverse of `group_state`, and in one process of `state`. A StorageError where the tensors do not fit
        leaves everything as it was."""
        if self.group.rank:
            prefix = f"rank-{self.group.rank}."
            private = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if not private:
                raise StorageError(f"checkpoint: the state of process {self.group.rank} is missing")
            tensors = tensors | private
        self._load(tensors, step)

    def _load(self, tensors: dict[str, Tensor], step: int) -> None:

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        modules: list[tuple[str, nn.Module]] = [("learner.", self.learner)]
        modules += [("average.", self.average)] if self.average is not None else []
        for prefix, module in modules:
            _check_fit(part(prefix), module.state_dict(), prefix)
        generator, own = take(tensors, "generator", "checkpoint"), self.generator.get_state()
        if (generator.shape, generator.dtype) != (own.shape, own.dtype):
            raise StorageError("checkpoint: the generator's state is that of another kind of generator")
        entries = _optimiser_entries(part("optimiser."), list(self.learner.parameters()))
        self.generator.set_state(generator)
        for prefix, module in modules:
            module.load_state_dict(part(prefix))
        self.optimiser.load_state_dict({"state": entries, "param_groups": self.optimiser.state_dict()["param_groups"]})
        self.step_count = step

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This process's share of the batch of a step: epochs are permutations, each a function of (seed, epoch) alone,
        so the data order needs no state. A set smaller than a batch is drawn from with replacement."""
        size, epoch = self.trial.optimiser.batch_size, step // self.steps_per_epoch
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch])
            count = len(self._rows)
            rows = self._rows[order.integers(count, size=size) if count < size else order.permutation(count)]
            self._order = (epoch, rows, torch.from_numpy(rows).to(self.device))
        place = (step % self.steps_per_epoch) * size
        now = slice(place + self._share.start, place + self._share.stop)
        rows = self._order[1][now]
        if self._resident is not None:
            chosen = self._order[2][now]
            obs, actions = self._resident[0][chosen], self._resident[1][chosen]
        else:
            obs, actions = (self._raw if self._varied else self._normalised)(self.training, rows)
        return self._vary(obs, actions, rows) if self._varied else (obs, actions)

    def _vary(self, obs: Tensor, actions: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Raw pairs with jitter and masked padding, normalised."""
        inputs = self.trial.inputs
        if inputs.padding == "mask":
            beyond = torch.from_numpy(self.training.padding(rows)).to(self.device)
            steps = actions.unflatten(1, (inputs.horizon, -1))
            others = torch.randint(
                steps.shape[0] * steps.shape[1], beyond.shape, generator=self.generator, device=self.device
            )
            actions = torch.where(beyond.unsqueeze(-1), steps.flatten(0, 1)[others], steps).flatten(1)
        obs = perturbed(obs, inputs.history, self._jitter, self.generator)
        check_finite(obs, "the perturbed obs")
        return self.units.inputs(obs).float(), self.units.targets(actions, obs).float()

    def _raw(self, windows: Windows, rows: Any) -> tuple[Tensor, Tensor]:
        """Pairs on the device."""
        obs, actions = (torch.from_numpy(np.ascontiguousarray(part)).to(self.device) for part in windows[rows])
        return obs, actions

    def _normalised(self, windows: Windows, rows: Any) -> tuple[Tensor, Tensor]:
        """In float32, after the centre is taken off in the data's own precision."""
        obs, actions = self._raw(windows, rows)
        check_finite(obs, "values")
        check_finite(actions, "values")
        return self.units.inputs(obs).float(), self.units.targets(actions, obs).float()

    def _all(self, gather: Callable[[Windows, Any], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Every pair, filled in block by block: no second copy of all of them, in a wider type, is ever made."""
        whole: tuple[Tensor, Tensor] | None = None
        for begin in range(0, len(self.training), 1 << 14):
            rows = slice(begin, begin + (1 << 14))
            parts = gather(self.training, rows)
            if whole is None:
                whole = tuple(part.new_empty(len(self.training), *part.shape[1:]) for part in parts)  # type: ignore[assignment]
            for all_of_it, part in zip(whole, parts, strict=True):  # type: ignore[arg-type]
                all_of_it[rows] = part
        if whole is None:
            raise ValueError("there are no windows to train on")
        return whole

    @contextmanager
    def _global_randomness(self) -> Iterator[None]:
        """Dropout, and whatever else knows only torch's global generator, gets numbers that (seed, step) decides; the
        global generator is put back afterwards."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            place = (self.seed, self.step_count) + ((self.group.rank,) if self.group.size > 1 else ())
            torch.random.default_generator.manual_seed(hash(place) % 2**63)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(hash(place) % 2**63)
            yield


def _rows(windows: Windows, padding: str | int) -> np.ndarray:
    """The training pairs: all, or those whose chunk reaches at most so far beyond the end of its episode."""
    if padding in ("keep", "mask"):
        return np.arange(len(windows))
    most = 0 if padding == "drop" else int(padding)
    rows = windows.within(most)
    if not len(rows):
        raise ValueError(f"{padding=} leaves no training data: no episode has {windows.horizon - most} steps")
    return rows


def _refuse(name: str, value: Tensor) -> None:
    raise FloatingPointError(f"{name} is {float(value)}")


def _optimiser_entries(tensors: dict[str, Tensor], parameters: list[nn.Parameter]) -> dict[int, dict[str, Tensor]]:
    """The optimiser's state by the number of the parameter: from `3.exp_avg` to [3]["exp_avg"]."""
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        fits = index.isdecimal() and int(index) < len(parameters)
        if not fits or (value.ndim and value.shape != parameters[int(index)].shape):
            raise StorageError(f"checkpoint: the optimiser's state {name} does not fit the weights")
        entries.setdefault(int(index), {})[key] = value
    return entries


def _check_fit(given: dict[str, Tensor], wanted: dict[str, Tensor], prefix: str) -> None:
    for name in sorted(given.keys() | wanted.keys()):
        have = tuple(given[name].shape) if name in given else "missing"
        need = tuple(wanted[name].shape) if name in wanted else "not there"
        if have != need:
            raise StorageError(f"checkpoint: {prefix}{name} is {have}, this run's is {need}")
