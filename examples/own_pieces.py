"""Pieces of your own, each in under 30 lines: a sampler, a source of negatives, an objective, an energy, an energy with
noise levels with its loss and its way to act, and a task. They train, resume, save and report like the library's.

    cebm demos examples/own_pieces.py:reach --episodes 200 --out reach.npz
    cebm train examples/own_pieces.py:mine --data reach.npz --task examples/own_pieces.py:reach --out runs/mine
    cebm eval runs/mine --with examples/own_pieces.py
    cebm report runs/mine --with examples/own_pieces.py --out mine.html
"""

import copy
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cebm import Adam, Demonstrations, EnergyModel, Found, GymnasiumTask, Negatives, Search, StepInfo, Terms, Trial
from cebm.energies import initialised_by
from cebm.objectives import contrast
from cebm.spaces import margin_limit

# ---- a sampler: two settings more than Langevin, and a state of its own


class Moving(NamedTuple):
    actions: Tensor
    velocity: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class Underdamped:
    """Underdamped Langevin by the BAOAB splitting (Leimkuhler & Matthews 2013); walls reflect. It samples exp(−E) up to
    an error of O(size²)."""

    steps: int = 40
    size: float = 0.05
    friction: float = 8.0
    margin: float | None = 0.05

    def init(self, energy, context, start, generator):
        velocity = torch.randn(start.shape, generator=generator, dtype=start.dtype, device=start.device)
        return Moving(start, velocity, energy.energies_and_gradients(context, start)[1])

    def step(self, energy, context, state, k, generator):
        h, keep = self.size, math.exp(-self.friction * self.size)
        noise = torch.randn(state.actions.shape, generator=generator, dtype=state.actions.dtype)
        y, v = self._drift(state.actions, state.velocity - h / 2 * state.gradients)
        y, v = self._drift(y, keep * v + math.sqrt(1 - keep**2) * noise.to(y.device))
        energies, gradients = energy.energies_and_gradients(context, y)
        return Moving(y, v - h / 2 * gradients, gradients), StepInfo.of(energies, gradients)

    def _drift(self, y, v):
        y = y + self.size / 2 * v
        if self.margin is None:
            return y, v
        limit = margin_limit(self.margin)
        outside = y.abs() > limit
        return torch.where(outside, (2 * limit * y.sign() - y).clamp(-limit, limit), y), torch.where(outside, -v, v)


# ---- a source of negatives


@dataclass(frozen=True)
class Blurred:
    """Other examples' actions, blurred by N(0, deviation²): a kernel estimate of the marginal p(y)."""

    deviation: float = 0.2

    def sample(self, energy, obs, actions, n, generator):
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        index = torch.randint(len(actions), (len(actions), n), generator=generator, device=actions.device)
        noise = torch.randn((len(actions), n, actions.shape[1]), generator=generator, dtype=actions.dtype)
        return Negatives(actions.detach()[index] + self.deviation * noise.to(actions.device), obs)


# ---- an objective


@dataclass(frozen=True)
class Hinge:
    """mean max(0, margin + E⁺ − E⁻): every negative lies `margin` above the demonstrated action."""

    source: Any = Blurred()
    count: int = 16
    margin: float = 1.0

    def terms(self, energy, obs, actions, generator):
        found = contrast(energy, self.source, self.count, obs, actions, generator)
        gap = self.margin + found.positive.unsqueeze(1) - found.negative
        return replace(found, loss=gap.clamp(min=0).mean() + 0.01 * found.positive.square().mean())


# ---- an energy around a small transformer


class TransformerEnergy(EnergyModel):
    """Each number of the observation is a token, and so is the action; the action's token gives the energy."""

    def __init__(self, obs_dim: int, act_dim: int, width: int, heads: int) -> None:
        super().__init__()
        self.obs_dim, self.act_dim = obs_dim, act_dim
        self.places = nn.Parameter(torch.randn(obs_dim, 2, width) / 2)
        self.action = nn.Linear(act_dim, width)
        self.layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 1)

    def encode(self, obs):
        return obs.unsqueeze(-1) * self.places[:, 0] + self.places[:, 1]

    def energies(self, context, actions):
        self.check(context, actions)
        tokens = context.repeat_interleave(actions.shape[1], 0)
        action = self.action(actions).flatten(0, 1).unsqueeze(1)
        with sdpa_kernel(SDPBackend.MATH):  # the one whose gradient can be differentiated again
            top = self.layer(torch.cat([action, tokens], 1))[:, 0]
        return self.out(top).view(actions.shape[:2])


@dataclass(frozen=True)
class Transformer:
    width: int = 16
    heads: int = 2

    def build(self, spec, generator=None):
        with initialised_by(generator):
            return TransformerEnergy(spec.obs_dim, spec.act_dim, self.width, self.heads)


# ---- an energy with noise levels E(x, y, s), its own loss and its own way to act


class LevelEnergy(EnergyModel):
    """E_s(x, y) = ‖y‖²/(2(s² + ¼)) − φ(x, y/√(s² + ¼), log s)/(2s), for actions of deviation about ½."""

    levels = (2.0, 1.0, 0.5, 0.25, 0.12, 0.06)

    def __init__(self, obs_dim: int, act_dim: int, width: int) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.level = obs_dim, act_dim, 0.12
        sizes = (obs_dim + act_dim + 1, width, width)
        layers = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.SiLU())]
        self.network = nn.Sequential(*layers, nn.Linear(width, 1))

    def encode(self, obs):
        return obs

    def at(self, level):
        other = copy.copy(self)  # shares the weights
        other.level = level
        return other

    def energies(self, context, actions):
        level = torch.as_tensor(self.level, dtype=actions.dtype, device=actions.device).expand(*actions.shape[:2], 1)
        scale = (level**2 + 0.25).sqrt()
        obs = context.unsqueeze(1).expand(-1, actions.shape[1], -1)
        phi = self.network(torch.cat([obs, actions / scale, level.log()], -1))
        return (actions.square().sum(-1, keepdim=True) / (2 * scale**2) - phi / (2 * level)).squeeze(-1)


@dataclass(frozen=True)
class Levels:
    width: int = 64

    def build(self, spec, generator=None):
        with initialised_by(generator):
            return LevelEnergy(spec.obs_dim, spec.act_dim, self.width)


@dataclass(frozen=True)
class Denoising:
    """mean ‖s∇E_s(x, y + sε) − ε‖² over log-uniform levels s: denoising score matching (Vincent 2011)."""

    largest: float = 2.0
    smallest: float = 0.05

    def terms(self, energy, obs, actions, generator):
        made = {"generator": generator, "dtype": actions.dtype, "device": actions.device}
        share, noise = (
            torch.rand((len(actions), 1, 1), **made),
            torch.randn((len(actions), 1, actions.shape[1]), **made),
        )
        level = self.largest * (self.smallest / self.largest) ** share
        noisy = actions.unsqueeze(1) + level * noise
        _, slopes = energy.at(level).energies_and_gradients(energy.encode(obs), noisy)
        return Terms((level * slopes - noise).square().mean())


@dataclass(frozen=True)
class Annealed:
    """Candidates fall through the energy's levels, one gradient each (probability flow); the lowest energy acts."""

    candidates: int = 16

    def search(self, problem):
        levels = (*problem.energy.levels, 0.0)
        actions = problem.uniform(problem.candidates or self.candidates) * levels[0]
        for level, following in pairwise(levels):
            slopes = problem.energy.at(level).energies_and_gradients(problem.context, actions)[1]
            actions = actions + (following - level) * level * slopes
        actions = problem.clip(actions)
        energies = problem.energies(actions)
        return Found(actions, energies, energies.argmin(1))


# ---- a task: a Gymnasium environment with its own metric and an expert of two minds


class ReachEnv(gymnasium.Env):
    """A point in the plane goes to a goal, around a wall on either side."""

    observation_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = np.array([self.np_random.uniform(-0.2, 0.2), -1.0]), 0
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place, self.time = np.clip(self.place + 0.2 * np.asarray(action, np.float64), -2, 2), self.time + 1
        hit = bool(abs(self.place[0]) < 0.3 and abs(self.place[1]) < 0.2)
        info = {"height": float(self.place[1]), "hit": hit}
        return self.place.astype(np.float32), float(self.place[1]), hit, self.time >= 20, info


@dataclass(frozen=True)
class Reach(GymnasiumTask):
    """Get up past the wall; the metric is the height reached without touching it."""

    metric: str = "clean_height"

    def make(self):
        return ReachEnv()

    def measure(self, rewards, infos):
        return {"clean_height": -1.0 if infos[-1]["hit"] else infos[-1]["height"]}

    def demonstrations(self, episodes, seed):
        random, env, played = np.random.default_rng(seed), self.make(), []
        for _ in range(episodes):
            obs, side, seen, done = env.reset(seed=int(random.integers(2**31)))[0], random.choice([-1, 1]), [], []
            for _ in range(20):
                aside = 0.8 * side - obs[0] if obs[1] < 0.4 else -0.5 * obs[0]
                action = np.clip([2 * aside, 0.5 if abs(obs[0]) > 0.5 or obs[1] > 0.3 else 0.0], -1, 1)
                seen, done = [*seen, obs], [*done, action + 0.05 * random.standard_normal(2)]
                obs = env.step(np.clip(done[-1], -1, 1))[0]
            played.append((np.array(seen), np.clip(np.array(done), -1, 1)))
        return Demonstrations.from_episodes(played)


# ---- compositions, to name on the command line

reach = Reach()
mine = Trial(
    Transformer(), Hinge(), optimiser=Adam(3e-3, batch_size=128, average=0.95), acting=Search(Underdamped(), 32)
)
levels = Trial(Levels(), Denoising(), optimiser=Adam(3e-3, batch_size=128, average=0.95), acting=Annealed())
