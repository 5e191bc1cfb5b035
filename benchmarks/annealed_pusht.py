"""Push-T for benchmarks/annealed.py: keypoints, two observations, chunks of 16 actions relative to the agent, of which
8 are executed, and a jitter of the state. The environment is that of gym-pusht, the metric its reward."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cebm.demonstrations import Demonstrations
from cebm.policy import EnergyPolicy
from cebm.recipes import Trial
from cebm.spaces import Box
from cebm.trainer import Trainer

HISTORY, HORIZON, EXECUTE, UNIT, LENGTH = 2, 16, 8, 64.0, 300
POINTS = np.array(
    [
        *([9.26979, 90.04097], [-60.98347, -1.18673], [60.91276, -1.39336], [-0.27050, 25.54363]),
        *([-14.06493, 122.81585], [39.00274, 32.85740], [-39.96641, 32.72966], [-16.82434, 62.86318]),
        [23.54146, -1.70029],
    ]
)
"""The nine keypoints in the frame of the block."""
JITTER = (5.0, 5.0, 3.0, 3.0, 0.03)
"""Deviations of agent x, y, block x, y (px) and angle (rad), the same for both frames."""


def seen(states: np.ndarray) -> np.ndarray:
    """Agent and keypoints, [..., 20], of states [..., 5]."""
    cosine, sine = np.cos(states[..., 4:5]), np.sin(states[..., 4:5])
    x = cosine * POINTS[:, 0] - sine * POINTS[:, 1] + states[..., 2:3]
    y = sine * POINTS[:, 0] + cosine * POINTS[:, 1] + states[..., 3:4]
    return np.concatenate([states[..., :2], x, y], -1).astype(np.float32)


class JitteredTrainer(Trainer):
    """The library's trainer with batches of its own: jittered states, actions relative to the agent."""

    def __init__(self, trial: Trial, path: Path, seed: int, jitter: bool = True) -> None:
        data = np.load(path)
        states, actions, ends = data["obs"].astype(np.float64), data["action"].astype(np.float64), data["episode_ends"]
        steps = np.arange(len(states))
        episode = np.searchsorted(ends, steps, side="right")
        first, last = np.concatenate([[0], ends])[episode], ends[episode] - 1
        self.frames = states[np.maximum(steps[:, None] + np.arange(1 - HISTORY, 1), first[:, None])]
        self.targets = actions[np.minimum(steps[:, None] + np.arange(HORIZON), last[:, None])]
        self.random, self.jitter = np.random.default_rng(seed), jitter
        obs, relative = self.pairs(self.frames, self.targets)
        whole = Demonstrations.from_arrays(obs, relative, ends)
        super().__init__(trial, whole, whole, seed, limits=(-512.0, 512.0), steps=10**9)
        self.act_box = Box(torch.zeros(2 * HORIZON), torch.full((2 * HORIZON,), UNIT))

    @staticmethod
    def pairs(frames: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Observations [n, 40] and chunks relative to the agent's last place [n, 32], in pixels."""
        obs = seen(frames).reshape(len(frames), -1)
        relative = (targets - frames[:, -1:, :2]).reshape(len(frames), -1)
        return obs, relative.astype(np.float32)

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.random.integers(len(self.frames), size=self.trial.optimiser.batch_size)
        frames = self.frames[rows]
        if self.jitter:
            frames = frames + self.random.normal(size=(len(rows), 1, 5)) * np.array(JITTER)
        obs, actions = (torch.from_numpy(part) for part in self.pairs(frames, self.targets[rows]))
        return self.obs_box.normalise(obs).float(), (actions / UNIT).float()


def roll_out(policy: EnergyPolicy, episodes: int, seed: int, execute: int = EXECUTE) -> dict[str, list[Any]]:
    """Reward and success of each episode; episode i starts from seed + i."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    from gym_pusht.envs.pusht import PushTEnv

    generator = torch.Generator().manual_seed(seed)
    envs = [PushTEnv() for _ in range(episodes)]
    for number, env in enumerate(envs):
        env.reset(seed=seed + number)
    past = np.repeat(np.stack([_state(env) for env in envs])[:, None], HISTORY, 1)
    best, going = np.zeros(episodes), np.arange(episodes)
    for begin in range(0, LENGTH, execute):
        obs = seen(past[going]).reshape(len(going), -1)
        chunks = policy.act(obs, generator=generator).reshape(len(going), HORIZON, 2)
        chunks = np.clip(chunks + past[going, -1:, :2], 0, 512)
        done = np.zeros(episodes, bool)
        for k in range(min(execute, LENGTH - begin)):
            for row, i in enumerate(going.tolist()):
                if done[i]:
                    continue
                _, reward, done[i], _, _ = envs[i].step(chunks[row, k])
                best[i] = max(best[i], reward)
                past[i] = np.concatenate([past[i, 1:], _state(envs[i])[None]])
        going = going[~done[going]]
        if not len(going):
            break
    return {"reward": best.tolist(), "success": (best >= 1).tolist()}


def _state(env: Any) -> np.ndarray:
    return np.array([*env.agent.position, *env.block.position, env.block.angle % (2 * np.pi)])
