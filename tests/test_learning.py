"""`cebm.fit`: what it takes, what it holds out, and which policy it returns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cebm import learning
from cebm.demonstrations import Demonstrations
from cebm.learning import fit
from cebm.recipes import TRIALS, vary
from cebm.selection import DRAWS
from cebm.tasks import Actor, ParticleTask, RollOut, Task, collect_particle
from cebm.trainer import Trainer
from test_trainer import small

STEADY = small(TRIALS["steady"])


def data(episodes: int = 12) -> Demonstrations:
    rng = np.random.default_rng(0)
    obs = rng.uniform(-1, 1, (10 * episodes, 2))
    return Demonstrations.from_arrays(obs, np.sin(obs), np.arange(1, episodes + 1) * 10)


@dataclass(frozen=True)
class Ordered(Task):
    """Gives the policies that play it, one after the other, the scores 1, 3 and 2."""

    metric = "grade"
    grades = (1.0, 3.0, 2.0)

    @property
    def limits(self) -> Any:
        return -0.5 * np.ones(2), 0.25 * np.ones(2)

    def roll_out(self, actor: Actor, episodes: int, seed: int, max_steps: int | None = None) -> RollOut:
        PLAYED.append((getattr(actor, "policy", None), episodes, seed))
        grade = self.grades[len(PLAYED) - 1]
        return RollOut([{"episode": i, "grade": grade} for i in range(episodes)], np.zeros((episodes, 2), np.float32))


PLAYED: list[Any] = []


def test_demonstrations_and_their_arrays_give_the_same_policy() -> None:
    whole = data()
    one = fit(whole, trial=STEADY, steps=5, horizon=2)
    other = fit(whole.obs, whole.actions, whole.episode_ends, trial=STEADY, steps=5, horizon=2)
    np.testing.assert_array_equal(one.act(whole.obs), other.act(whole.obs))


def test_the_best_policy_by_the_task_is_returned() -> None:
    PLAYED.clear()
    policy = fit(data(), trial=STEADY, steps=7, task=Ordered(), evaluations=3, evaluation_episodes=4)
    assert [(episodes, seed) for _, episodes, seed in PLAYED] == [(4, 1_000_001)] * 3
    assert policy is PLAYED[1][0], "the second of three was the best"
    low, high = policy.limits
    assert low.tolist() == [-0.5, -0.5] and high.tolist() == [0.25, 0.25]
    PLAYED.clear()
    given = fit(data(), trial=STEADY, steps=1, task=Ordered(), evaluations=1, limits=(-1.0, 1.0))
    assert given.limits[0].tolist() == [-1, -1]


def test_roll_outs_along_the_way_play_as_many_actions_of_a_chunk_as_the_caller_will() -> None:
    played: list[int] = []

    class Watched(Ordered):
        def roll_out(self, actor: Actor, *arguments: Any) -> RollOut:
            played.append(actor.execute)  # type: ignore[attr-defined]
            PLAYED.clear()
            return super().roll_out(actor, *arguments)

    for execute, expected in ((None, 4), (3, 3)):
        fit(data(), trial=STEADY, steps=1, horizon=4, task=Watched(), evaluations=1, execute=execute)
        assert played.pop() == expected and not played
    for task, execute in ((Watched(), 5), (Watched(), 0), (None, 2)):
        with pytest.raises(ValueError, match=f"between 1 and the horizon 4; got {execute}"):
            fit(data(), trial=STEADY, steps=1, horizon=4, task=task, execute=execute)


def test_without_a_task_the_held_out_episodes_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the energy score: that of the second evaluation is made the best."""
    seen: list[tuple[Any, int, int]] = []
    scores = iter([0.5, 0.1, 0.3])
    original = Trainer.validate

    def validate(self: Trainer, policy: Any, candidates: Any, draws: int) -> dict[str, float]:
        seen.append((policy, draws, self.validation.demonstrations.episodes))
        return original(self, policy, candidates, draws=draws) | {"validation_energy_score": next(scores)}

    monkeypatch.setattr(Trainer, "validate", validate)
    policy = fit(data(), trial=STEADY, steps=6, validation=0.25, evaluations=3)
    assert policy is seen[1][0] and [each[1:] for each in seen] == [(DRAWS, 3)] * 3


def test_nothing_of_what_is_held_out_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Trainer] = []

    class Watched(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(learning, "Trainer", Watched)
    fit(data(), trial=STEADY, steps=1, validation=0.25, evaluations=1)
    trained, held = (set(part.demonstrations.obs[:, 0].tolist()) for part in (made[0].training, made[0].validation))
    assert len(trained) == 90 and len(held) == 30 and not trained & held
    own = data(3)
    fit(data(), trial=STEADY, steps=1, validation=own, evaluations=1)
    assert made[1].validation.demonstrations is own and made[1].training.demonstrations.episodes == 12


def test_a_bar_shows_the_progress(capsys: pytest.CaptureFixture[str]) -> None:
    task = ParticleTask(steps=5)
    fit(
        collect_particle(task, 5, 0),
        trial=STEADY,
        steps=4,
        task=task,
        evaluations=2,
        evaluation_episodes=2,
        progress=True,
    )
    shown = capsys.readouterr().err
    assert "success" in shown and shown.count("step") == 2
    fit(data(), trial=STEADY, steps=2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((data(), np.zeros((120, 2))), {}, "belong to arrays"),
        ((data().obs,), {}, "actions must be given"),
        ((data(),), {"validation": 1.5}, "share between 0 and 1"),
        ((data(),), {"validation": collect_particle(ParticleTask(steps=3), 2, 0)}, "8 and 2 columns"),
        ((data(),), {"evaluations": 0}, "evaluations must be"),
        ((data(),), {"steps": 0}, "steps must be"),
        ((data(),), {"task": ParticleTask()}, "8 observation and 2 action"),
        ((data().obs, data().actions), {"trial": vary(STEADY, history=2)}, "episode_ends must be given"),
    ],
)
def test_what_does_not_fit_is_named(arguments: tuple, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(*arguments, **({"trial": STEADY, "steps": 1} | settings))


@pytest.mark.slow
def test_the_smoothing_of_a_density_is_its_users_and_is_told() -> None:
    """Of pairs y = x with noise of 0.01, the density of `steady` with its smoothing of 0.05 has at most the likelihood
    of N(0, 0.01² + 0.05²): log(0.051/0.01) − 0.48 = 1.15 nats below the truth's. Without smoothing it is better."""
    rng = np.random.default_rng()
    obs = rng.uniform(-1, 1, (800, 1)).astype(np.float32)
    noise = 0.01 * rng.standard_normal((800, 1)).astype(np.float32)
    means = {}
    for smoothing in (0.05, 0.0):
        policy = fit(obs, obs + noise, trial=STEADY, steps=800, **{"inputs.smoothing": smoothing})
        assert policy.specification.smoothing == smoothing
        means[smoothing] = float(policy.log_prob(obs[:100], (obs + noise)[:100], draws=1024).value.mean())
    truth = -np.log(0.01 * np.sqrt(2 * np.pi * np.e))
    assert means[0.05] < truth - 1.0 and means[0.0] > means[0.05] + 0.3, means
