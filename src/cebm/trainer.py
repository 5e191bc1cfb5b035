"""The state of a training and its one step, in memory; `training` adds the run directory."""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cebm.demonstrations import Demonstrations, Windows
from cebm.information import SaturatedBoundWarning, info_nce_bound
from cebm.networks import Linear
from cebm.policy import ExplicitPolicy, ImplicitPolicy
from cebm.spaces import Box
from cebm.storage import take
from cebm.trials import Learner, Trial, find_trial


class Trainer:
    """The state of a run and its one step, without any files. `cebm.fit` and `train` both use it."""

    def __init__(
        self,
        trial: Trial,
        training: Demonstrations,
        validation: Demonstrations,
        seed: int = 0,
        device: torch.device | str = "cpu",
        limits: tuple[float, float] | None = None,
        steps: int | None = None,
    ) -> None:
        """`steps` is the length of the run, which a cosine schedule needs to know."""
        if trial.schedule == "cosine" and steps is None:
            raise ValueError("steps must be given for a trial whose learning rate follows a cosine")
        self.steps = steps
        self.trial, self.seed, self.device, self.limits = trial, seed, torch.device(device), limits
        self.training = training.windows(trial.history, trial.horizon)
        self.validation = validation.windows(trial.history, trial.horizon)
        self.obs_box = _tiled(Box.fit(training.obs, trial.obs_scaling), trial.history).to(self.device)
        self.act_box = _tiled(Box.fit(training.actions), trial.horizon).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.learner = Learner(trial, self.training.obs_dim, self.training.act_dim, self.generator).to(self.device)
        self.average = copy.deepcopy(self.learner.conditional) if trial.ema else None
        self.optimiser = torch.optim.Adam(self.learner.parameters(), trial.learning_rate)
        self.step_count = 0
        self._order: tuple[int, Tensor] | None = None
        # Small sets live on the device, normalised; large ones stay on disk and are gathered batch by batch.
        small = len(self.training) * (self.training.obs_dim + self.training.act_dim) < 100_000_000
        self._resident = self._normalised(self.training, slice(None)) if small else None

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.training) // self.trial.batch_size)

    def step(self) -> dict[str, Tensor]:
        """One optimiser step on the next batch; what to log of it, as tensors. Weights stay as they are when the
        loss or its gradient is not finite: that is a FloatingPointError, or a ValueError that names the energy."""
        self.learner.train()
        obs, actions = self._batch(self.step_count)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        self.optimiser.zero_grad(set_to_none=True)
        with self._dropout_randomness():
            loss, log = self.learner.loss(obs, actions, self.generator)
        loss.backward()
        gradients = [p.grad for p in self.learner.conditional.parameters() if p.grad is not None]
        norm = log["parameter_gradient_norm"] = nn.utils.get_total_norm(gradients)
        # The whole loss, with that of a proposal or a marginal beside the energy's own, which is what is logged.
        for name, value in (("loss", loss.detach()), ("parameter_gradient_norm", norm)):
            if not math.isfinite(float(value)):
                raise FloatingPointError(f"{name} is {float(value)}")
        self.optimiser.step()
        self.step_count += 1
        if self.average is not None:
            # The first steps forget faster, so that the average does not remember the initial weights.
            keep = min(self.trial.ema, (1 + self.step_count) / (10 + self.step_count))
            with torch.no_grad():
                pairs = zip(self.average.parameters(), self.learner.conditional.parameters(), strict=True)
                for average, weight in pairs:
                    average.lerp_(weight, 1 - keep)
            for layer in self.average.modules():
                if isinstance(layer, Linear):
                    layer.power_iterate()  # averaged weights have spectral norms of their own
        return log

    def _learning_rate(self) -> float:
        """That of the next step."""
        peak, step = self.trial.learning_rate, self.step_count
        if self.trial.schedule == "cosine":
            assert self.steps is not None
            return peak * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return peak * self.trial.decay ** (step // (self.steps_per_epoch * self.trial.decay_epochs))

    def policy(self) -> ImplicitPolicy | ExplicitPolicy:
        """The policy as of now: a copy, so that training can go on."""
        energy = copy.deepcopy(self.learner.conditional if self.average is None else self.average).eval()
        rows = np.random.default_rng(self.seed).permutation(len(self.training))[:1024]
        obs, actions = self._normalised(self.training, np.sort(rows))
        with torch.no_grad():
            data_energies = energy(obs, actions.unsqueeze(1))[:, 0].sort().values
        shared: dict[str, Any] = {
            "energy": energy,
            "obs_box": self.obs_box,
            "act_box": self.act_box,
            "network": self.trial.network,
            "data_energies": data_energies,
            "history": self.trial.history,
            "horizon": self.trial.horizon,
        }
        if self.limits is not None:
            shared |= {"low": torch.full_like(self.act_box.centre, self.limits[0])}
            shared |= {"high": torch.full_like(self.act_box.centre, self.limits[1])}
        if self.trial.network.explicit:
            return ExplicitPolicy(**shared)
        trial = self.trial
        return ImplicitPolicy(
            **shared, sampler=trial.acting, candidates=trial.candidates, choice=trial.choice, keep=trial.keep
        )

    def validate(self, policy: ImplicitPolicy | ExplicitPolicy, candidates: int, pairs: int = 256) -> dict[str, float]:
        """Action errors on training and validation pairs, and the bound on mutual information on the latter.

        The bound takes the other examples' actions as negatives whatever the trial trains with: only independent
        samples of the marginal make it a bound.
        """
        result = {}
        for name, windows in (("train", self.training), ("validation", self.validation)):
            rows = windows.spread(pairs, self.seed)
            obs, actions = windows[rows]
            chosen = policy.act(obs, candidates=candidates)
            result[f"{name}_action_error"] = float(np.linalg.norm(chosen - actions, axis=1).mean())
        inputs, targets = self._normalised(self.validation, rows)
        count = len(rows)
        if count > 1:
            with torch.no_grad():
                context = policy.energy.encode(inputs)
                energies = policy.energy.energies(context, targets.unsqueeze(0).expand(count, -1, -1))
            others = energies[~torch.eye(count, dtype=torch.bool, device=self.device)].view(count, count - 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SaturatedBoundWarning)  # the ceiling is logged beside it
                bound = info_nce_bound(energies.diagonal(), others)
            result |= {"mi_bound": float(bound.nats), "mi_ceiling": float(bound.ceiling)}
        return result

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the next step depends on."""
        tensors = {f"learner.{name}": value for name, value in self.learner.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for index, entry in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(value) for name, value in entry.items()}
        return {name: value.clone() for name, value in tensors.items()} | {"generator": self.generator.get_state()}

    def load_state(self, tensors: dict[str, Tensor], step: int) -> None:
        """The inverse of `state`."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.learner.load_state_dict(part("learner."))
        if self.average is not None:
            self.average.load_state_dict(part("average."))
        entries: dict[int, dict[str, Tensor]] = {}
        for name, value in part("optimiser.").items():
            index, key = name.split(".", 1)
            entries.setdefault(int(index), {})[key] = value
        self.optimiser.load_state_dict({"state": entries, "param_groups": self.optimiser.state_dict()["param_groups"]})
        self.generator.set_state(take(tensors, "generator", "checkpoint"))
        self.step_count = step

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step: epochs are permutations, each a function of (seed, epoch) alone, so the data order
        needs no state. A set smaller than a batch is drawn from with replacement."""
        size, epoch = self.trial.batch_size, step // self.steps_per_epoch
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch])
            if len(self.training) < size:
                rows = order.integers(len(self.training), size=size)
            else:
                rows = order.permutation(len(self.training))
            self._order = (epoch, torch.from_numpy(rows).to(self.device))
        place = (step % self.steps_per_epoch) * size
        rows_now = self._order[1][place : place + size]
        if self._resident is not None:
            return self._resident[0][rows_now], self._resident[1][rows_now]
        return self._normalised(self.training, rows_now.cpu().numpy())

    def _normalised(self, windows: Windows, rows: Any) -> tuple[Tensor, Tensor]:
        obs, actions = (torch.from_numpy(np.ascontiguousarray(part)).to(self.device) for part in windows[rows])
        return self.obs_box.normalise(obs), self.act_box.normalise(actions)

    @contextmanager
    def _dropout_randomness(self) -> Iterator[None]:
        """Dropout knows only torch's global generator: for one step it is seeded by (seed, step), then put back."""
        if not self.trial.network.dropout:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(hash((self.seed, self.step_count)) % 2**63)
            yield


def _tiled(box: Box, times: int) -> Box:
    """The same units for each of several observations or actions in a row."""
    return Box(box.centre.repeat(times), box.scale.repeat(times), box.margin)


def fit(
    obs: Any,
    actions: Any,
    episode_ends: Any = None,
    *,
    trial: Trial | str = "steady",
    steps: int = 2000,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ImplicitPolicy | ExplicitPolicy:
    """A policy from arrays [steps, obs] and [steps, act], in memory: no files, no environment.

    `episode_ends` (cumulative, exclusive) tells where episodes end; without it every row stands for itself.
    """
    recipe = find_trial(trial) if isinstance(trial, str) else trial
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if episode_ends is None:
        if recipe.history > 1 or recipe.horizon > 1:
            raise ValueError("episode_ends must be given for a trial with history or horizon")
        episode_ends = np.arange(1, len(obs) + 1)
    demonstrations = Demonstrations.from_arrays(obs, actions, episode_ends)
    trainer = Trainer(recipe, demonstrations, demonstrations, seed, device, steps=steps)
    for _ in range(steps):
        trainer.step()
    return trainer.policy()
