"""The search: candidates on their way through a sampler's steps, and whether they are where the density is.

IBC scales the noise of a Langevin step by λ in place of √λ, so that its chains end on minima of the energy; with the
correct scale they fill the density. `formulations` gives both with the same step sizes, so that only the noise differs.
"""

from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.acting import Acting, Problem, Search
from cebm.certificate import DoubleWell, Gaussian, certify
from cebm.policy import EnergyPolicy
from cebm.samplers import MALA, Constant, Langevin
from cebm.studio.landscape import Landscape, at_level, energies_of

FRAMES = 40
"""States of a search that are kept, at most."""
EFFORT = 4_000_000
"""Candidates times steps of a search, at most."""
BINS = 48
"""Of a histogram."""


@dataclass(frozen=True, eq=False)
class Moves:
    """A search for one observation. Actions are normalised."""

    steps: list[int]
    """The steps after which the states are; 0: before the first."""
    states: Float[np.ndarray, "frames candidates inside"]
    """The candidates."""
    energies: Float[np.ndarray, "frames candidates"]
    """Their energies, infinite where there is none; at the noise level that the state has, where it has one."""
    gradients: Float[np.ndarray, " frames"]
    """Mean Euclidean norm of their gradients."""
    changed: Float[np.ndarray, " frames"]
    """Share of the candidates that moved since the state before: of a sampler that accepts or refuses, about its
    acceptance, where every step is kept. NaN in the first."""
    chosen: int
    """Index of the candidate that acts, among the last ones."""
    action: Float[np.ndarray, " act"]
    """The action in the user's units."""
    levels: list[float] | None = None
    """The noise level of each state; None where the search knows none."""

    @property
    def spread(self) -> Float[np.ndarray, " frames"]:
        """Standard deviation of the candidates, averaged over the coordinates."""
        return self.states.std(1).mean(-1)


@torch.no_grad()
def search(
    policy: EnergyPolicy, obs: Any, acting: Acting | None = None, seed: int | None = None, frames: int = FRAMES
) -> Moves:
    """How `acting` (by default the policy's own) searches for one observation. Without a seed it is the search that
    `policy.act(obs)` does. A way to act that does not show its steps gives its end alone."""
    acting = policy.acting if acting is None else acting
    if frames < 1:
        raise ValueError(f"frames must be at least 1, got {frames}")
    _check_effort(acting)
    problem = _problem(policy, obs, seed)
    if problem.rows != 1:
        raise ValueError(f"a search is of one observation, got {problem.rows}")
    found = acting.search(problem)
    end, index = found.actions[0], int(found.chosen[0])
    passed = _passed(acting, problem, _problem(policy, obs, seed), end)
    rows = np.unique(np.linspace(0, len(passed) - 1, min(frames, len(passed))).round().astype(int)).tolist()
    states = torch.stack([passed[row][1] for row in rows])
    levels = _levels(acting, problem, len(passed))
    there = [at_level(problem, None if levels is None else levels[row]) for row in rows]
    inside = states.double().cpu().numpy()
    moved = [nan, *((a != b).any(-1).mean() for a, b in zip(inside[1:], inside[:-1], strict=True))]
    return Moves(
        [passed[row][0] for row in rows],
        inside,
        np.stack([energies_of(at, state) for at, state in zip(there, states, strict=True)]),
        np.array([_slope(at, state) for at, state in zip(there, states, strict=True)]),
        np.array(moved),
        index,
        policy.actions(end[None, index : index + 1], obs)[0, 0].double().cpu().numpy(),
        None if levels is None else [levels[row] for row in rows],
    )


def formulations(noise: float = 0.1, size: float = 0.004, steps: int = 150, candidates: int = 256) -> dict[str, Search]:
    """Two Langevin chains with the same drift, λ/2 ∇E = τ∇E, and a third with an accept step. Only their noise differs:
    λσ in IBC's formulation, √λ in the correct one."""
    same: dict[str, Any] = {"steps": steps}
    return {
        "ibc": Search(Langevin("ibc", noise=noise, schedule=Constant(size), **same), candidates),
        "correct": Search(Langevin("correct", schedule=Constant(size / 2), **same), candidates),
        "mala": Search(MALA(step_size=size / 2, adapt=steps // 2, **same), candidates),
    }


@dataclass(frozen=True, eq=False)
class Standing:
    """Where the candidates ended, beside where draws of exp(−E)/Z would be."""

    edges: Float[np.ndarray, " edges"]
    """Of the bins, normalised; the same for every axis."""
    shares: list[Float[np.ndarray, " bins"]]
    """Of each axis: the candidates' density in each bin."""
    exact: list[Float[np.ndarray, " bins"]]
    """Of each axis: the density's own; empty where the action has coordinates that the landscape does not show."""
    excess: float
    """Mean energy of the candidates above the landscape's lowest."""
    exact_excess: float
    """The same of draws of the density; NaN where it is not known."""
    words: str
    """What follows from them."""


def standing(moves: Moves, ground: Landscape, frame: int = -1) -> Standing:
    """Compares the candidates of one frame with the density on the landscape's points. Both count the energy as it is,
    without a noise level."""
    if ground.level is not None:
        raise ValueError(f"the candidates' energies have no noise level, the landscape has {ground.level:g}")
    limit = -float(ground.places[0]) + (ground.places[1] - ground.places[0]) / 2
    edges = np.linspace(-limit, limit, BINS + 1)
    states, energies = moves.states[frame], moves.energies[frame]
    shares = []
    for values in ground.shown(states).T:
        counts = np.histogram(values[np.isfinite(values)].clip(-limit, limit), edges)[0]
        shares.append(counts / max(1, counts.sum()) / (edges[1] - edges[0]))
    known = energies[np.isfinite(energies)]
    lowest = min(float(ground.energies.min(initial=inf)), float(known.min(initial=inf)))
    excess = float(known.mean()) - lowest if len(known) else inf
    if not ground.whole:
        text = "The action has more coordinates than the picture, so the density of the shown ones is not known."
        return Standing(edges, shares, [], excess, nan, text)
    density = ground.density
    exact = []
    for axis in range(density.ndim):
        along = density if density.ndim == 1 else density.mean(0 if axis == 0 else 1) * 2 * limit
        exact.append(_binned(along, ground.places, edges))
    finite = np.isfinite(ground.energies)
    expected = float((density[finite] * (ground.energies[finite] - lowest)).sum() * ground.cell)
    return Standing(edges, shares, exact, excess, expected, _judged(excess, expected))


def certificate_words(acting: Acting, seed: int = 0) -> str:
    """What the certificate says of the sampler as it is set, on two densities that are known exactly."""
    sampler = getattr(acting, "sampler", None)
    if sampler is None:
        return f"{type(acting).__name__} has no sampler to certify."
    _check_effort(acting)
    generator = torch.Generator().manual_seed(seed)
    rows = certify(sampler, (Gaussian(), DoubleWell()), ("chains",), generator)
    return "; ".join(
        f"{row.target}: {row.verdict} (error of the mean {row.mean_error:.2f}, of the standard deviation "
        f"{row.std_error:.2f}, in standard deviations of the density)"
        for row in rows
    )


def _problem(policy: EnergyPolicy, obs: Any, seed: int | None) -> Problem:
    generator = None if seed is None else torch.Generator(policy.device).manual_seed(seed)
    return policy.problem(obs, generator=generator)


def _passed(
    acting: Acting, problem: Problem, again: Problem, end: Float[Tensor, "candidates inside"]
) -> list[tuple[int, Float[Tensor, "candidates inside"]]]:
    """The states that the search went through, in the limits at its end; the end alone where they are not known, or are
    those of another search. `again` has the same random numbers as `problem`, unused."""
    states = getattr(acting, "states", None)
    passed = [] if states is None else [(step, actions[0]) for step, actions in states(again)]
    true = passed and passed[-1][1].shape == end.shape and torch.equal(problem.clip(passed[-1][1][None])[0], end)
    return [*passed[:-1], (passed[-1][0], end)] if true else [(0, end)]


def _levels(acting: Acting, problem: Problem, states: int) -> list[float] | None:
    """The noise level of each of so many states, where the search tells and the energy has levels."""
    levels_of = getattr(acting, "levels_of", None)
    if levels_of is None or not problem.energy.levels:
        return None
    levels: list[float] = levels_of(problem)
    return levels[-states:]


def _slope(problem: Problem, state: Float[Tensor, "candidates inside"]) -> float:
    gradients = problem.energy.energies_and_gradients(problem.context, state[None])[1]
    return float(gradients.norm(dim=-1).mean())


def _binned(
    along: Float[np.ndarray, " points"], places: Float[np.ndarray, " points"], edges: Float[np.ndarray, " edges"]
) -> Float[np.ndarray, " bins"]:
    """A density on equal cells as the mean over each bin, by its distribution function."""
    half = (places[1] - places[0]) / 2
    ends = np.concatenate([[places[0] - half], places + half])
    total = np.concatenate([[0.0], np.cumsum(along * 2 * half)])
    return np.diff(np.interp(edges, ends, total)) / np.diff(edges)


def _judged(excess: float, expected: float) -> str:
    """In words; factors of two, because the candidates are few and the density is known on a grid."""
    numbers = f"Their energies lie {excess:.3g} above the lowest on average; those of draws would lie {expected:.3g}."
    if excess < 0.5 * expected:
        return f"The candidates collapsed onto minima. {numbers}"
    if excess > 2 * expected:
        return f"The candidates are too far from the minima for draws of the density. {numbers}"
    return f"The candidates lie as high as draws of the density. {numbers}"


def _check_effort(acting: Acting) -> None:
    """A ValueError for a search that would take minutes."""
    candidates = getattr(acting, "candidates", 1)
    steps = getattr(getattr(acting, "sampler", None), "steps", 1)
    if candidates * steps > EFFORT:
        raise ValueError(f"{candidates} candidates and {steps} steps are too many: their product is above {EFFORT:,}")
