"""Split conformal prediction over episodes: when should a policy ask rather than act?

Two signals of every step, since p(y|x) says nothing about x: the distance of the observation to its k nearest
training observations, and the energy of the action. Some of the held-out episodes bring both to one scale. The score
of a step is the larger of the two, that of an episode belongs to its worst step, and the threshold is the ⌈(n + 1)(1
− α)⌉-th smallest score of the other n held-out episodes. So an episode that is exchangeable with the held-out ones
raises a false alarm, anywhere, with a probability of at most α, and of at least α − 1/(n + 1) where scores have no
ties (Vovk et al. 2005; Lei et al. 2018). Steps of an episode are not exchangeable, so nothing is claimed about a
single step.
"""

from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.decisions import Decision
from cebm.demonstrations import Demonstrations

if TYPE_CHECKING:
    from cebm.policy import EnergyPolicy

SCALING = 0.2
"""Share of the held-out episodes that gives the two signals their scales."""
APART = 0.25
"""Two candidates are of different modes where they differ by more than this per column, normalised."""
ROWS = 1024
"""Steps that are calibrated at once."""


@dataclass(frozen=True)
class Recent:
    """The threshold for several chunks together: a fault that stays shows in their mean, though in none alone."""

    alpha: float
    """Largest share of episodes, like those held out, in which it is crossed anywhere."""
    window: int
    """How many of the last chunks count."""
    every: int
    """Steps between two chunks."""
    limit: float
    """Their mean energy may be so large."""


@dataclass(frozen=True)
class Calibration:
    """Scales of the two signals and the threshold of their maximum. Saved with the policy."""

    alpha: float
    """Largest share of false alarms among episodes like those held out."""
    episodes: int
    """Held-out episodes behind the threshold."""
    threshold: float
    """A step asks whose score is above it."""
    distances: tuple[float, float]
    """Median, and 90 % quantile above it, of an episode's largest distance to the training observations."""
    energies: tuple[float, float]
    """The same of an episode's largest energy."""
    neighbours: int = 5
    """How many of the nearest training observations count."""
    tie: float | None = None
    """Modes are tied, and the policy asks, where a candidate of another mode has an energy less than this above that
    of the choice; None: a fork is no reason to ask."""
    recent: Recent | None = None
    """What a guarded policy's last chunks may be together; None: each chunk is judged alone."""

    def unfamiliar(self, distance: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Distances on the common scale: half of the held-out episodes have a step above 0, one in ten above 1."""
        return _scaled(distance, self.distances)

    def unlikely(self, energy: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Energies on the common scale."""
        return _scaled(energy, self.energies)

    def reasons(self, distance: Float[Tensor, " batch"], energy: Float[Tensor, " batch"]) -> tuple[str, ...]:
        """Why to ask, for each observation; empty where there is no reason."""
        found = []
        pairs = zip(self.unfamiliar(distance).tolist(), self.unlikely(energy).tolist(), strict=True)
        for unfamiliar, unlikely in pairs:
            said = []
            if not unfamiliar <= self.threshold:
                said.append(f"the observation is unfamiliar ({unfamiliar:.2f} > {self.threshold:.2f})")
            if not unlikely <= self.threshold:
                said.append(f"the action is unlikely ({unlikely:.2f} > {self.threshold:.2f})")
            found.append(" and ".join(said))
        return tuple(found)


def _scaled(values: Tensor, scale: tuple[float, float]) -> Tensor:
    """NaN, which says nothing, counts as infinite."""
    middle, spread = scale
    return ((values - middle) / spread).nan_to_num(inf, inf)


def distances(
    seen: Float[Tensor, "some obs"], inputs: Float[Tensor, "batch obs"], neighbours: int
) -> Float[Tensor, " batch"]:
    """Mean distance to the nearest `neighbours` of the training observations, in deviations of each column, per
    √columns; a column that never changed counts in hundredths of the normalised range."""
    spread = seen.std(0, unbiased=False).clamp_min(0.01)
    scaled = torch.cdist((inputs - seen.mean(0)) / spread, (seen - seen.mean(0)) / spread)
    return scaled.topk(min(neighbours, len(seen)), 1, largest=False).values.mean(1) / seen.shape[1] ** 0.5


def threshold(scores: Float[np.ndarray, " episodes"], alpha: float) -> float:
    """The ⌈(n + 1)(1 − α)⌉-th smallest; a ValueError where there are too few episodes for this α."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    count, rank = len(scores), ceil((len(scores) + 1) * (1 - alpha) - 1e-9)
    if rank > count:
        least = ceil(1 / alpha - 1e-9) - 1
        raise ValueError(f"alpha={alpha} needs at least {least} held-out episodes for the threshold, got {count}")
    return float(np.sort(scores)[rank - 1])


def calibration(
    worst: Float[np.ndarray, "episodes two"], alpha: float, seed: int, neighbours: int, tie: float | None
) -> Calibration:
    """From the largest distance and the largest energy of each held-out episode."""
    order = np.random.default_rng(seed).permutation(len(worst))
    scaling = max(5, round(SCALING * len(worst)))
    if len(worst) < scaling + 2:
        raise ValueError(f"there must be at least {scaling + 2} held-out episodes, got {len(worst)}")
    if not np.isfinite(worst[order[:scaling]]).all():
        raise ValueError("the distances or energies of the held-out episodes are NaN or infinite")
    middle = np.median(worst[order[:scaling]], 0)
    spread = np.maximum(np.quantile(worst[order[:scaling]], 0.9, 0) - middle, 1e-6 + 1e-6 * np.abs(middle))
    rest = ((worst[order[scaling:]] - middle) / spread).max(1)
    level = threshold(np.where(np.isnan(rest), inf, rest), alpha)
    if not isfinite(level):
        raise ValueError("too many held-out episodes have an infinite energy to set a threshold")
    scales = tuple((float(one), float(other)) for one, other in zip(middle, spread, strict=True))
    return Calibration(alpha, len(rest), level, scales[0], scales[1], neighbours, tie)


def calibrate(
    policy: "EnergyPolicy",
    held_out: Demonstrations,
    alpha: float = 0.05,
    *,
    neighbours: int = 5,
    tie: float | None = None,
    seed: int = 0,
    given: bool = False,
) -> Calibration:
    """Thresholds for a policy from episodes that it was not trained on. `given`: judge the actions of the episodes, as
    a guard does, and not those that the policy chooses."""
    if neighbours < 1:
        raise ValueError(f"neighbours must be at least 1, got {neighbours}")
    if tie is not None and not 0 < tie < inf:
        raise ValueError(f"tie must be positive and finite, got {tie}")
    windows = held_out.windows(policy.history, policy.horizon)
    values = []
    for begin in range(0, len(windows), ROWS):
        obs, actions = windows[begin : begin + ROWS]
        if given:
            distance, energy = signals(policy, obs, actions, neighbours)
        else:
            _, distance, energy, _ = considered(policy, obs, neighbours)
        values.append(torch.stack([distance, energy], 1).double().cpu().numpy())
    steps = np.concatenate(values)
    worst = np.stack([part.max(0) for part in np.split(steps, held_out.episode_ends[:-1])])
    return calibration(worst, alpha, seed, neighbours, tie)


def recent(policy: "EnergyPolicy", held_out: Demonstrations, alpha: float, *, every: int, window: int) -> Recent:
    """The threshold for the mean energy of `window` of the demonstrators' chunks in a row, one in `every` steps; fewer
    say nothing, as the first chunk of an episode is the hardest to foresee."""
    for name, value in (("every", every), ("window", window)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    windows, scores = held_out.windows(policy.history, policy.horizon), []
    for start, end in zip(held_out.episode_starts, held_out.episode_ends, strict=True):
        obs, actions = windows[np.arange(start, end, every)]
        energies = signals(policy, obs, actions, 1)[1].double()
        means = energies.unfold(0, min(window, len(energies)), 1).mean(1)
        scores.append(float(means.nan_to_num(inf, inf).amax()))
    return Recent(alpha, window, every, threshold(np.array(scores), alpha))


def familiar(policy: "EnergyPolicy") -> Float[Tensor, "some obs"]:
    """The training observations that a policy keeps; a ValueError where it has none."""
    if policy.seen is None:
        raise ValueError("the policy keeps no training observations: train it again with this version of cebm")
    return policy.seen


def signals(
    policy: "EnergyPolicy", obs: Any, actions: Any, neighbours: int
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Distance of raw observations and energy of raw actions that somebody gives."""
    rows = policy.observed(obs)
    done = policy.raw_actions(actions, len(rows))
    with torch.no_grad():
        problem = policy.problem(rows)
        inside = policy.units.targets(done, rows).to(problem.low.dtype)
        inputs = policy.units.inputs(rows).to(problem.low.dtype)
        return distances(familiar(policy), inputs, neighbours), problem.energies(inside.unsqueeze(1))[:, 0]


def considered(
    policy: "EnergyPolicy", obs: Any, neighbours: int, tie: float | None = None, **effort: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The policy's own actions, raw; distances, energies, and in which rows two modes are tied."""
    rows = policy.observed(obs)
    with torch.no_grad():
        problem = policy.problem(rows, **effort, everything=tie is not None)
        found = policy.acting.search(problem)
        index = found.chosen.view(-1, 1, 1).expand(-1, 1, found.actions.shape[2])
        taken = found.actions.gather(1, index)
        energy = problem.energies(taken)[:, 0]
        tied = torch.zeros_like(energy, dtype=torch.bool)
        if tie is not None:
            apart = (found.actions - taken).square().mean(-1).sqrt() > APART
            near = found.energies < found.energies.gather(1, found.chosen.unsqueeze(1)) + tie
            tied = (apart & near).any(1)
        inputs = policy.units.inputs(rows).to(problem.low.dtype)
        return policy.actions(taken, rows)[:, 0], distances(familiar(policy), inputs, neighbours), energy, tied


def doubts(policy: "EnergyPolicy", rows: Tensor, energies: Float[Tensor, " batch"]) -> tuple[str, ...]:
    """Why not to act upon raw observations by actions of these energies; empty where there is no reason."""
    settings = _thresholds(policy)
    inputs = policy.units.inputs(rows).to(energies.dtype)
    return settings.reasons(distances(familiar(policy), inputs, settings.neighbours), energies)


def _thresholds(policy: "EnergyPolicy") -> Calibration:
    if policy.calibration is None:
        raise ValueError("the policy has no thresholds: policy = policy.calibrate(held_out_demonstrations) first")
    return policy.calibration


def decide(policy: "EnergyPolicy", obs: Any, **effort: Any) -> Decision:
    """An action for each observation, or the reason to ask, by the policy's thresholds."""
    settings = _thresholds(policy)
    actions, distance, energy, tied = considered(policy, obs, settings.neighbours, settings.tie, **effort)
    reasons = settings.reasons(distance, energy)
    pairs = zip(reasons, tied.tolist(), strict=True)
    return Decision.of(actions, tuple(reason or ("two modes are tied" if even else "") for reason, even in pairs))
