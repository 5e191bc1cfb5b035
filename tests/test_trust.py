"""Calibrated abstention, the guard, and conformal sets."""

import math
from dataclasses import replace
from functools import cache
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cebm
from cebm import Abstention, ConformalSets, Demonstrations, FailureAlarm, Guard, KeepOutCircle
from cebm.acting import Search
from cebm.composition import vary
from cebm.energies.base import Penalty
from cebm.policy import EnergyPolicy
from cebm.samplers import Langevin
from cebm.spaces import Box
from cebm.storage import StorageError
from cebm.trust.calibration import Calibration, distances, signals, threshold
from cebm.trust.guard import DENSITY

STEPS = 20


def seed_of(generator: torch.Generator) -> int:
    return int(torch.randint(2**31, (), generator=generator))


def walks(episodes: int, rng: np.random.Generator) -> Demonstrations:
    """Episodes whose steps are alike: a place per episode and steps around it; the action is the place."""
    places = np.repeat(rng.normal(size=(episodes, 2)), STEPS, 0)
    obs = places + 0.4 * rng.normal(size=places.shape)
    actions = np.clip(obs + 0.05 * rng.normal(size=obs.shape), -4, 4)
    return Demonstrations.from_arrays(
        obs.astype(np.float32), actions.astype(np.float32), np.arange(1, episodes + 1) * STEPS
    )


def bowl(obs: Tensor, actions: Tensor) -> Tensor:
    return 50 * (actions - obs.unsqueeze(1) / 4).square().sum(-1)


def policy_of(rng: np.random.Generator) -> EnergyPolicy:
    """Acts by a bowl around the observation, and has seen 300 observations."""
    obs_box, act_box = Box(torch.zeros(2), torch.ones(2)), Box(torch.zeros(2), torch.full((2,), 4.0))
    seen = torch.from_numpy(rng.normal(size=(300, 2)).astype(np.float32))
    return EnergyPolicy(
        Penalty(bowl, 2, 2), obs_box, act_box, Search(Langevin("ibc", 2, noise=0.01), 64), seen=seen, settings=None
    )


def test_false_alarms_of_episodes_are_at_alpha_and_those_of_steps_are_not(generator):
    """Over S splits with n calibrated and m tested episodes the rate has the mean α' = 1 − ⌈(n+1)(1−α)⌉/(n+1), and a
    variance of at most α'(1−α')(1/m + 1/(n+2))/S: that of a beta-binomial. A threshold per step would not hold."""
    rng, alpha, splits, count, test = np.random.default_rng(seed_of(generator)), 0.1, 8, 75, 100
    policy, rates, naive = policy_of(rng), [], []
    for seed in range(splits):
        calibrated = policy.calibrate(walks(count, rng), alpha, seed=seed)
        settings = calibrated.calibration
        assert settings is not None and settings.episodes == count - 15
        new = walks(test, rng)
        decision = calibrated.decide(new.obs)
        rates.append(1 - decision.acts.reshape(test, STEPS).all(1).float().mean().item())
        by_step = distances(policy.seen, torch.from_numpy(new.obs), 5).numpy().reshape(test, STEPS)
        naive.append((by_step > np.quantile(by_step, 1 - alpha)).any(1).mean())
    n = count - 15
    expected = 1 - math.ceil((n + 1) * (1 - alpha)) / (n + 1)
    error = math.sqrt(expected * (1 - expected) * (1 / test + 1 / (n + 2)) / splits)
    assert abs(np.mean(rates) - expected) < 4.5 * error
    assert np.mean(naive) - expected > 4.5 * error, "a threshold of steps must fail this test"


def test_it_asks_with_the_reason_and_acts_as_before_elsewhere(generator):
    rng = np.random.default_rng(seed_of(generator))
    policy = policy_of(rng)
    calibrated = policy.calibrate(walks(60, rng), 0.05)
    obs = np.array([[0.0, 0.1], [30.0, 0.0]])
    decision = calibrated.decide(obs)
    assert decision.acts.tolist() == [True, False]
    assert "the observation is unfamiliar" in decision.reasons[1]
    assert bool(decision.action[1].isnan().all())
    np.testing.assert_array_equal(decision.action[0].numpy(), policy.act(obs)[0])
    with pytest.raises(Abstention, match="observation 1: the observation is unfamiliar"):
        decision.required()

    # An action that stands far from all that the demonstrations do here.
    far = calibrated.with_constraint(lambda scene: (scene.actions > 3).all(-1).all(-1)).decide(np.zeros((1, 2)))
    assert far.reasons[0].startswith("the action is unlikely")
    with pytest.raises(ValueError, match="no thresholds"):
        policy.decide(np.zeros(2))
    with pytest.raises(ValueError, match="keeps no training observations"):
        replace(policy, seen=None).calibrate(walks(60, rng))


def test_tied_modes_are_a_reason_where_the_user_says_so(generator):
    def fork(obs: Tensor, actions: Tensor) -> Tensor:
        ways = torch.stack([(actions - side).square().sum(-1) * 40 for side in (0.5, -0.5)], -1)
        ways[..., 0] += (3 * obs[:, :1]).clamp_min(0)  # one way is worse by 3 · obs
        return -(-ways).logsumexp(-1)

    rng = np.random.default_rng(seed_of(generator))
    policy = replace(policy_of(rng), energy=Penalty(fork, 2, 2), acting=Search(Langevin("ibc", 5, noise=0.0), 256))
    obs = np.array([[0.0, 0.0], [1.0, 0.0]])
    # One way is 3 nats worse: the candidates' own spread is far below that with 256 of them.
    plain, tied = (policy.calibrate(walks(40, rng), 0.1, tie=tie) for tie in (None, 1.0))
    wide = [replace(each, calibration=replace(each.calibration, threshold=1e6)) for each in (plain, tied)]
    assert wide[0].decide(obs).reasons == ("", "")
    assert wide[1].decide(obs).reasons == ("two modes are tied", "")


def test_too_few_episodes_for_alpha_are_refused():
    assert threshold(np.arange(19.0), 0.05) == 18
    assert threshold(np.arange(99.0), 0.05) == 94
    with pytest.raises(ValueError, match=r"alpha=0.05 needs at least 19 held-out episodes .* got 18"):
        threshold(np.arange(18.0), 0.05)
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1"):
        threshold(np.arange(18.0), 1.0)


def test_familiarity_sees_a_single_column_that_moved(generator):
    """Where p(y|x) ignores a column, the energy is blind to it and the distance is not."""
    seen = torch.randn(500, 6, generator=generator)
    clean, moved = torch.randn(400, 6, generator=generator), torch.randn(400, 6, generator=generator)
    moved[:, 3] += 4
    one, other = distances(seen, clean, 5), distances(seen, moved, 5)
    auroc = float((other.unsqueeze(1) > one).double().mean())
    assert auroc > 0.966 - 4.5 * 0.0095  # mean and deviation of 50 repetitions
    assert float(distances(seen, seen, 1).max()) < 1e-2


@cache
def fitted() -> tuple[Any, Guard]:
    """A guard of a small density, and what it learned from: the action is the observation, turned."""
    rng = np.random.default_rng(5)
    obs = rng.uniform(-1, 1, (120 * STEPS, 2)).astype(np.float32)
    actions = np.stack([obs[:, 1] * 0.5 + 0.5, -obs[:, 0]], 1) + 0.02 * rng.normal(size=obs.shape)
    data = Demonstrations.from_arrays(obs, actions.astype(np.float32), np.arange(1, 121) * STEPS)
    trial = vary(DENSITY, **{"energy.width": 32, "batch_size": 128})
    return data, Guard.fit(data, 0.1, steps=300, trial=trial)


def test_the_guard_tells_planted_faults_and_repairs_them():
    data, guard = fitted()
    obs, actions = np.asarray(data.obs[:400]), np.asarray(data.actions[:400])
    right = guard(obs, actions)
    assert right.supported.float().mean() > 0.9
    faults = {
        "swapped axes": actions[:, ::-1].copy(),
        "shifted frame": actions + 0.4,
        "stale observation": np.roll(actions, 1, 0),
    }
    for name, odd in faults.items():
        away = np.linalg.norm(odd - actions, axis=1) > 0.4  # a fault that changes nothing is none
        verdict = guard(obs[away], odd[away])
        assert verdict.supported.float().mean() < 0.1, name
        assert all("the action is unlikely" in reason for reason in verdict.reasons if reason)
        repaired = guard.repair(obs[away], odd[away])
        assert repaired.acts.float().mean() > 0.9
        error = np.linalg.norm(repaired.action.numpy() - actions[away], axis=1)[repaired.acts.numpy()]
        assert np.median(error) < 0.3
        assert guard(obs[away][repaired.acts.numpy()], repaired.action[repaired.acts]).supported.all()
    stranger = guard.repair(np.full((1, 2), 9.0), np.zeros((1, 2)))
    assert not stranger.acts[0] and "unfamiliar" in stranger.reasons[0]
    same = guard.repair(obs[right.supported.numpy()], actions[right.supported.numpy()])
    np.testing.assert_allclose(same.action.numpy(), actions[right.supported.numpy()], rtol=1e-6)


def test_a_guarded_policy_of_anybody(tmp_path):
    _, guard = fitted()

    class Theirs:
        """A hand-written controller whose axes are swapped."""

        resets = 0

        def reset(self) -> None:
            Theirs.resets += 1

        def act(self, obs: np.ndarray) -> np.ndarray:
            return np.stack([-obs[:, 0], obs[:, 1] * 0.5 + 0.5], 1)

    obs = np.array([[0.8, -0.3], [-0.5, -0.5]], np.float32)
    wrapped = guard.wrap(Theirs())
    right = np.stack([obs[:, 1] * 0.5 + 0.5, -obs[:, 0]], 1)
    assert np.abs(wrapped.act(obs) - right).max() < 0.4 < np.abs(Theirs().act(obs) - right).max()
    asking = guard.wrap(Theirs(), repair=False)
    with pytest.raises(Abstention, match="the action is unlikely"):
        asking.act(obs)
    runner = cebm.Runner(asking, fallback=lambda seen: np.zeros((len(seen), 2)))
    runner.reset()
    assert Theirs.resets == 1
    assert runner.act(obs).tolist() == [[0.0, 0.0]] * 2 and runner.asked[-1][0].all()

    guard.save(tmp_path / "guard")
    again = Guard.load(tmp_path / "guard", [KeepOutCircle((0.35, -0.8), 0.05)])
    torch.testing.assert_close(again(obs, right).score, guard(obs, right).score)
    verdict = again(obs, right)
    assert verdict.reasons[0] == "the chunk breaks a constraint"
    free = again.repair(obs, right)
    assert bool(free.acts[0]) and float((free.action[0] - torch.tensor([0.35, -0.8])).norm()) >= 0.05


def turned(episodes: int, rng: np.random.Generator) -> Demonstrations:
    """More episodes like those that the fitted guard learned from."""
    obs = rng.uniform(-1, 1, (episodes * STEPS, 2)).astype(np.float32)
    actions = np.stack([obs[:, 1] * 0.5 + 0.5, -obs[:, 0]], 1) + 0.02 * rng.normal(size=obs.shape)
    return Demonstrations.from_arrays(obs, actions.astype(np.float32), np.arange(1, episodes + 1) * STEPS)


def test_chunks_together_show_a_fault_that_stays(tmp_path, generator):
    """A shift that four chunks of five hide alone. False alarms are as of any split conformal threshold; the mean
    forgets what was before its window, and a reset all of it."""
    _, guard = fitted()
    rng, alpha, n, m = np.random.default_rng(seed_of(generator)), 0.2, 99, 100
    several = guard.over_chunks(turned(n, rng), alpha, every=2, window=5)
    several.save(tmp_path / "guard")
    several = Guard.load(tmp_path / "guard")
    assert several.calibration.recent is not None
    new = turned(m, rng)
    obs, actions = (part.reshape(m, STEPS, 2)[:, ::2] for part in (new.obs, new.actions))

    class Playing:
        def __init__(self, chunks: np.ndarray) -> None:
            self.chunks, self.step = chunks, -1

        def act(self, obs: np.ndarray) -> np.ndarray:
            self.step += 1
            return self.chunks[:, self.step]

    def stopped(guard: Guard, chunks: np.ndarray) -> np.ndarray:
        """In which episodes and at which steps the last chunks together were a reason."""
        wrapped = guard.wrap(Playing(chunks), repair=False)
        decisions = [wrapped.decide(obs[:, step]) for step in range(STEPS // 2)]
        assert all(reason or acts for each in decisions for reason, acts in zip(each.reasons, each.acts, strict=True))
        return np.array([["together" in reason for reason in each.reasons] for each in decisions]).T

    share = stopped(several, actions).any(1).mean()
    assert share < alpha + 4.5 * math.sqrt(alpha * (1 - alpha) * (1 / m + 1 / (n + 2)))
    shifted = actions + np.float32(0.05)
    assert not stopped(guard, shifted).any()
    alone = np.mean([guard(obs[:, step], shifted[:, step]).supported.numpy() for step in range(STEPS // 2)])
    assert stopped(several, shifted).any(1).mean() > 0.9 > 0.5 < alone

    wrapped = several.wrap(Playing(shifted))
    for step in range(7):
        wrapped.decide(obs[:, step])
    assert len(wrapped.past) == 5
    wrapped.policy.chunks = shifted[:3]
    with pytest.raises(ValueError, match="obs has 3 rows, the episodes under way are 100: reset first"):
        wrapped.decide(obs[:3, 7])
    wrapped.reset()
    assert wrapped.past == []
    with pytest.raises(ValueError, match="window must be at least 1"):
        guard.over_chunks(new, 0.1, window=0)


def test_a_call_of_the_guard_is_quick():
    """2 ms are promised on a machine at rest: by the processor's time, and the fastest of many calls."""
    data, guard = fitted()
    times = []
    for row in range(60):
        began = process_time()
        guard(data.obs[row], data.actions[row])
        times.append(process_time() - began)
    assert min(times) < 2e-3 * 3  # the shape checks of the tests take their part


def test_thresholds_travel_with_the_policy_file(tmp_path, generator):
    data = walks(60, np.random.default_rng(seed_of(generator)))
    policy = cebm.fit(data, trial="mdn", steps=2)
    assert policy.seen is not None and len(policy.seen) == 1024
    calibrated = policy.calibrate(data, 0.1, tie=0.5)
    calibrated.save(tmp_path / "policy")
    again = cebm.load(tmp_path / "policy")
    assert again.calibration == calibrated.calibration
    assert again.decide(data.obs[:50]).reasons == calibrated.decide(data.obs[:50]).reasons
    policy.save(tmp_path / "plain")
    assert cebm.load(tmp_path / "plain").calibration is None


def test_signals_judge_given_actions_by_row():
    data, guard = fitted()
    with pytest.raises(ValueError, match="actions has 3 rows, obs has 2"):
        signals(guard.density, data.obs[:2], data.actions[:3], 5)
    assert isinstance(guard.calibration, Calibration)
    with pytest.raises(ValueError, match="no thresholds"):
        _ = Guard(replace(guard.density, calibration=None)).calibration
    assert issubclass(StorageError, ValueError)


def test_evaluate_tells_how_often_it_asked(generator):
    task = cebm.ParticleTask(dim=2, steps=5)
    data = task.demonstrations(60, 0)
    calibrated = cebm.fit(data, trial="mdn", steps=2, limits=task.limits).calibrate(task.demonstrations(60, 1), 0.1)
    for level, share in ((1e9, 0.0), (-1e9, 1.0)):
        policy = replace(calibrated, calibration=replace(calibrated.calibration, threshold=level))
        found = cebm.evaluate(policy, task, episodes=4, latency_calls=0, fallback=lambda obs: obs[:, :2].clip(0, 1))
        assert [row["asked"] for row in found.rows] == [share] * 4
        assert [row["first_asked"] for row in found.rows] == [0 if share else None] * 4
        summary = found.summary()
        assert summary["asked_episodes"] == share
        assert ("success_where_acted" in summary) == (share == 0)


def test_conformal_sets_of_a_fork_are_two_intervals_with_their_coverage(generator):
    """Coverage over n calibrated and m new pairs: mean 1 − α', variance at most α'(1−α')(1/m + 1/(n+2))."""
    rng, alpha, n, m = np.random.default_rng(seed_of(generator)), 0.1, 400, 1000

    def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.uniform(-1, 1, (count, 1))
        return x, rng.choice([-1.0, 1.0], count) * (1 + x[:, 0]) + 0.1 * rng.normal(size=count)

    def log_density(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        ways = [-((y - side * (1 + x[:, 0])) ** 2) / 0.02 for side in (-1, 1)]
        return np.logaddexp(*ways)

    sets, (x, y) = ConformalSets.fit(log_density, *pairs(n), alpha), pairs(m)
    expected = 1 - math.ceil((n + 1) * (1 - alpha)) / (n + 1)
    error = math.sqrt(expected * (1 - expected) * (1 / m + 1 / (n + 2)))
    inside = sets.contains(x, y)
    assert abs((1 - inside.mean()) - expected) < 4.5 * error

    rows = sets.intervals(x, 1024)
    by_interval = [any(low <= value <= high for low, high in row) for row, value in zip(rows, y, strict=True)]
    assert np.mean(np.array(by_interval) != inside) < 0.01  # only at the ends of an interval
    fork = sets.intervals(np.array([[0.9]]))[0]
    assert len(fork) == 2 and fork[0].high < 0 < fork[1].low
    assert len(sets.intervals(np.array([[-1.0]]))[0]) == 1
    # The ideal size: ±1.645 deviations around each of the two ways.
    assert abs(np.median(sets.sizes(x, 1024)) / (4 * 1.645 * 0.1) - 1) < 0.2

    # A wrong density still covers, by larger sets.
    wrong = ConformalSets.fit(lambda x, y: -np.abs(y), *pairs(n), alpha)
    assert abs((1 - wrong.contains(x, y).mean()) - expected) < 4.5 * error
    assert np.median(wrong.sizes(x)) > 2 * np.median(sets.sizes(x))


def test_conformal_sets_refuse_what_makes_no_sense():
    x = np.zeros((30, 1))
    for y, message in ((np.zeros((30, 2)), "y must be"), (np.full(30, np.nan), "y must be finite")):
        with pytest.raises(ValueError, match=message):
            ConformalSets.fit(lambda x, y: y, x, y)
    with pytest.raises(ValueError, match="points must be at least 2"):
        ConformalSets.fit(lambda x, y: y, x, np.arange(30.0)).intervals(x, 1)


def roads(lengths: np.ndarray, rng: np.random.Generator) -> Demonstrations:
    """Episodes along a road to 0: the first column is the distance that is left, the second says nothing."""
    left = np.concatenate([np.arange(length)[::-1] for length in lengths])
    obs = np.stack([left, rng.normal(size=len(left))], 1).astype(np.float32)
    return Demonstrations.from_arrays(obs, np.zeros((len(obs), 1), np.float32), np.cumsum(lengths))


def test_episodes_that_stand_still_are_announced_and_few_successes_are(generator):
    """Announced successes are at most a share α of m new ones, with the deviation of a beta-binomial."""
    rng, alpha, n, m = np.random.default_rng(seed_of(generator)), 0.2, 60, 200
    lengths = rng.integers(20, 80, 40)
    alarm = FailureAlarm.fit(roads(lengths, rng), roads(rng.integers(20, 80, n), rng), alpha, neighbours=5)
    obs = np.array([[30.0, 0.0], [10.0, 0.0]])
    assert np.abs(alarm.expected(obs, 7).numpy() - [37, 17]).max() < 3
    new = roads(rng.integers(20, 80, m), rng)
    starts = np.repeat(new.episode_starts, new.episode_ends - new.episode_starts)
    told = alarm(new.obs, np.arange(new.steps) - starts).numpy()
    announced = np.mean([part.any() for part in np.split(told, new.episode_ends[:-1])])
    expected = 1 - math.ceil((n + 1) * (1 - alpha)) / (n + 1)
    error = math.sqrt(expected * (1 - expected) * (1 / m + 1 / (n + 2)))
    assert abs(announced - expected) < 4.5 * error

    # One that stands still is announced while it could still arrive: the limit less what it has left.
    still = alarm(np.tile([[30.0, 0.0]], (100, 1)), np.arange(100)).numpy()
    assert not still[0] and still[-1] and abs(still.argmax() - (alarm.limit - 30)) < 4
    assert alarm.limit <= 80 + 3


def test_a_failure_alarm_refuses_what_does_not_fit():
    rng = np.random.default_rng(0)
    data = roads(np.full(12, 20), rng)
    other = Demonstrations.from_arrays(np.zeros((4, 3)), np.zeros((4, 1)), np.array([4]))
    for arguments, message in (
        ((data, other), "an observation has 3 columns, the demonstrations have 2"),
        ((data, data.select([0, 1])), "needs at least 9 held-out episodes"),
    ):
        with pytest.raises(ValueError, match=message):
            FailureAlarm.fit(*arguments)
    with pytest.raises(ValueError, match="neighbours must be at least 1"):
        FailureAlarm.fit(data, data, neighbours=0)
    alarm = FailureAlarm.fit(data, data)
    for obs, message in ((np.zeros(2), "obs must be"), (np.full((1, 2), np.nan), "obs must be finite")):
        with pytest.raises(ValueError, match=message):
            alarm(obs, 0)
