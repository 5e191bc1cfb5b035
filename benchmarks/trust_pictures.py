"""The picture of docs/trust.md: a log-density with its error, an abstention in a roll-out, a constraint.

python -m benchmarks.trust_pictures --policies runs/trust-pictures
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cebm
from benchmarks.trust import kept
from cebm import BatchedParticle, KeepOutCircle, ParticleTask, Runner
from cebm.evaluation import TEST_SEED

OUT = Path(__file__).parents[1] / "docs" / "trust.png"
TASK = ParticleTask(dim=2)
DISC = KeepOutCircle((0.5, 0.5), 0.15)
STRANGE = (10, 20)
"""Steps at which the second goal is seen far outside of the square."""


class Noted:
    """Plays as another actor does, and keeps what it saw and played; `spoil` changes what the actor sees."""

    def __init__(self, actor: Any, spoil: bool = False) -> None:
        self.actor, self.spoil = actor, spoil
        self.seen, self.played = list[np.ndarray](), list[np.ndarray]()

    def reset(self) -> None:
        """A new batch of episodes begins."""
        self.actor.reset()

    def act(self, obs: np.ndarray) -> np.ndarray:
        given = np.array(obs)
        if self.spoil and STRANGE[0] <= len(self.seen) < STRANGE[1]:
            given[:, 6:8] += 1.5
        self.seen.append(np.array(obs))
        self.played.append(np.asarray(self.actor.act(given)))
        return self.played[-1]


def stay(obs: np.ndarray) -> np.ndarray:
    """The set-point where the policy asks: where the particle is."""
    return obs[:, :2].clip(0, 1)


def covered() -> int:
    """A seed of an episode whose first goal lies just inside the disc, and the second well outside of it."""
    for seed in range(10_000):
        goals = BatchedParticle(TASK).reset(seed, 1)[0, 4:8].reshape(2, 2)
        first, second = np.linalg.norm(goals - DISC.centre, axis=1) - DISC.radius
        if -0.035 < first < -0.02 and second > 0.2:
            return seed
    raise ValueError("no episode has its first goal just inside the disc")


def density(axis: Any, policy: cebm.EnergyPolicy) -> None:
    """log p along a line through the two goals, with two standard errors of log Z."""
    obs = TASK.demonstrations(1, 3).obs[10]
    first, second = obs[4:6], obs[6:8]
    share = np.linspace(-0.3, 1.3, 161)
    actions = (first + share[:, None] * (second - first)).astype(np.float32)
    found = policy.log_prob(np.repeat(obs[None], len(share), 0), actions)
    value, error = found.value.numpy(), found.standard_error.numpy()
    axis.fill_between(share, value - 2 * error, value + 2 * error, alpha=0.4)
    axis.plot(share, value, lw=1)
    axis.set(
        title=f"log p(action | observation) ± 2 errors\n(the error is {error.mean():.4f} nats)",
        xlabel="from the first goal (0) to the second (1)",
        ylabel="nats",
    )


def path(axis: Any, noted: Noted, name: str, colour: str) -> None:
    """The particle's way and the set-points."""
    places, played = np.stack(noted.seen)[:, 0, :2], np.stack(noted.played)[:, 0]
    axis.plot(*places.T, color=colour, lw=1.5, label=name)
    axis.scatter(*played.T, color=colour, s=12, marker="x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", type=Path, required=True)
    chosen = parser.parse_args()
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    torch.set_num_threads(1)
    shown, held = TASK.demonstrations(500, 0), TASK.demonstrations(200, 1)
    policy = kept(chosen.policies, "steady", lambda: cebm.fit(shown, steps=1500, limits=TASK.limits))
    calibrated = policy.calibrate(held, 0.05)
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    density(left, policy)

    runner = Runner(calibrated, fallback=stay)
    asking = Noted(runner, spoil=True)
    TASK.roll_out(asking, 1, TEST_SEED)
    path(middle, asking, "way", "C0")
    places, asked = np.stack(asking.seen)[:, 0, :2], np.stack(runner.asked[-1])[:, 0]
    middle.scatter(*places[asked].T, color="C3", zorder=3, s=25, label="it asks, and stays")
    goals = asking.seen[0][0, 4:8].reshape(2, 2)
    middle.scatter(*goals.T, marker="*", color="k", s=60, label="goals")
    middle.set(
        title=f"steps {STRANGE[0]} to {STRANGE[1] - 1}: the second goal is\nseen where none ever was", xlim=(0, 1)
    )
    middle.set(ylim=(0, 1), aspect="equal")
    middle.legend(fontsize=7)

    seed = covered()
    for name, actor, colour in (
        ("without", policy, "C1"),
        ("with the constraint", policy.with_constraint(DISC), "C0"),
    ):
        noted = Noted(Runner(actor))
        TASK.roll_out(noted, 1, seed)
        path(right, noted, name, colour)
    right.add_patch(Circle((0.5, 0.5), DISC.radius, color="0.8", zorder=0))
    right.set(
        title="set-points (×) stay out of a disc that no\ndemonstration knew; a goal lies in it",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    right.set(aspect="equal")
    right.legend(fontsize=7)
    figure.savefig(OUT, dpi=80)


if __name__ == "__main__":
    main()
