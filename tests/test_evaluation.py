"""Evaluation: intervals, seeded episodes, the particle task and any Gymnasium environment."""

import csv
import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import cebm.tasks
from cebm.acting import Direct, Search
from cebm.energies import EnergyModel
from cebm.energies.base import Actions, Context, Energies, Obs
from cebm.evaluation import TEST_SEED, VALIDATION_SEED, Evaluation, evaluate, paired_rates, wilson_interval
from cebm.policy import EnergyPolicy, Policy
from cebm.runner import Runner
from cebm.spaces import Box, Specification
from cebm.tasks.particle import BatchedParticle, ParticleEnv, ParticleExpert, ParticleTask

TASK = ParticleTask(dim=2)


class SetPoint(EnergyModel):
    """E = ½‖y − target(x)‖²: heads for the first goal, the second, or stays. No weights, no randomness."""

    def __init__(self, dim: int, target: str, velocity: bool = True, history: int = 1) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim = (4 if velocity else 3) * dim * history, dim, dim
        self.columns = {"first": slice(-2 * dim, -dim), "second": slice(-dim, None), "start": slice(0, dim)}[target]

    def encode(self, obs: Obs) -> Context:
        return obs[:, self.columns]

    def energies(self, context: Context, actions: Actions) -> Energies:
        return 0.5 * (actions - context.unsqueeze(1)).square().sum(-1)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        return self.energies(context, actions), actions - context.unsqueeze(1)

    def best(self, context: Context) -> Tensor:
        return context


def identity(dim: int) -> Box:
    return Box(torch.zeros(dim), torch.ones(dim))


def heading(target: str, task: ParticleTask = TASK, history: int = 1) -> EnergyPolicy:
    energy = SetPoint(task.dim, target, not task.hide_velocity, history)
    spec = Specification.flat(energy.obs_dim // history, task.dim, history)
    return EnergyPolicy(energy, identity(energy.obs_dim), identity(task.dim), Direct(), spec)


def searching(target: str) -> EnergyPolicy:
    """The same, found by a search: ten steps leave Π(1 − λ/2) = 0.12 of the distance to the nearest candidate."""
    return EnergyPolicy(SetPoint(2, target), identity(8), identity(2), Search(candidates=64))


class FollowExpert:
    """The scripted expert behind a policy's interface; it remembers, so one object serves one evaluation."""

    def __init__(self, expert: ParticleExpert) -> None:
        self.expert = expert

    def reset(self) -> None:
        """The expert has just been made."""

    def act(self, obs: Any) -> Any:
        return self.expert.act(obs)


def follow_expert(task: ParticleTask, seed: int, episodes: int) -> FollowExpert:
    return FollowExpert(ParticleExpert(task, seed, episodes))


# -------------------------------------------------------------------------------------------- the interval


@pytest.mark.parametrize(
    "successes, episodes, low, high",
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3 (z = 1.96): to four decimals.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_of_the_literature(successes: int, episodes: int, low: float, high: float) -> None:
    assert wilson_interval(successes, episodes) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_solves_its_equation() -> None:
    """Its ends are the p with |p̂ − p| = z √(p(1 − p)/n), which is how Wilson defined it."""
    for episodes in (1, 7, 100):
        for successes in range(episodes + 1):
            rate = successes / episodes
            low, high = wilson_interval(successes, episodes)
            assert 0 <= low <= rate + 1e-12 and rate - 1e-12 <= high <= 1
            for end in (low, high):
                assert abs(rate - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / episodes), abs=1e-7)


def wald_interval(successes: int, episodes: int) -> tuple[float, float]:
    """The textbook's p̂ ± z √(p̂(1 − p̂)/n), which is too short near 0 and 1."""
    rate = successes / episodes
    spread = 1.96 * math.sqrt(rate * (1 - rate) / episodes)
    return rate - spread, rate + spread


@pytest.mark.parametrize("interval", [wilson_interval, wald_interval])
@pytest.mark.parametrize("episodes", [10, 100])
def test_the_interval_covers_the_truth(interval: Callable[..., tuple[float, float]], episodes: int) -> None:
    """Exactly, by summing the binomial over its outcomes: never below 83 % (Brown, Cai & DasGupta 2001: the worst
    case, near 0 and 1), and 95 % in the mean over all rates. The textbook's interval fails."""
    rates = np.linspace(0.01, 0.99, 99)
    coverage = np.zeros_like(rates)
    for k in range(episodes + 1):
        low, high = interval(k, episodes)
        inside = (low <= rates) & (rates <= high)
        coverage += inside * float(math.comb(episodes, k)) * rates**k * (1 - rates) ** (episodes - k)
    covers = coverage.min() > 0.83 and abs(coverage.mean() - 0.95) < 0.015
    assert covers == (interval is wilson_interval)


@pytest.mark.parametrize("successes, episodes", [(0, 0), (-1, 5), (6, 5)])
def test_impossible_counts_are_refused(successes: int, episodes: int) -> None:
    with pytest.raises(ValueError, match=f"between 0 and episodes \\({episodes}\\), got {successes}"):
        wilson_interval(successes, episodes)


def test_wider_intervals_for_larger_z() -> None:
    assert wilson_interval(5, 10, z=2.6)[0] < wilson_interval(5, 10)[0] < wilson_interval(5, 10)[1]


# -------------------------------------------------------------------------------------------- the particle task


def test_heading_for_the_first_goal_reaches_it_and_fails() -> None:
    """In 2.5 seconds of a damped spring the particle is at the set-point to 1e-2; the second goal is elsewhere."""
    result = evaluate(heading("first"), TASK, episodes=40, seed=3, latency_calls=0)
    assert all(row["min_distance_first"] <= 0.05 for row in result.rows)
    env = BatchedParticle(TASK)
    env.reset(3, 40)
    apart = np.linalg.norm(env.first_goal - env.second_goal, axis=1)
    far = apart > 0.15
    assert far.sum() > 10
    for row, distance, is_far in zip(result.rows, apart, far, strict=True):
        assert row["final_distance"] == pytest.approx(distance, abs=0.03)
        if is_far:
            assert row["success"] is False


def test_heading_for_the_second_goal_ends_there() -> None:
    result = evaluate(heading("second"), TASK, episodes=40, seed=3, latency_calls=0)
    assert all(row["final_distance"] <= 0.05 and row["min_distance_second"] <= 0.05 for row in result.rows)
    # Success only where the way led past the first goal.
    assert all(row["success"] == (row["min_distance_first"] <= 0.05) for row in result.rows)
    assert result.successes < 40


@pytest.mark.parametrize("task", [ParticleTask(1), ParticleTask(3), ParticleTask(2, hide_velocity=True)])
def test_the_expert_succeeds_always(task: ParticleTask) -> None:
    result = evaluate(follow_expert(task, 17, 60), task, episodes=60, seed=17, latency_calls=0)
    assert result.successes == 60
    assert result.summary()["success"] == 1.0


def test_the_rows_are_the_outcome_of_the_batched_task() -> None:
    result = evaluate(heading("second"), TASK, episodes=9, seed=5, latency_calls=0)
    env = BatchedParticle(TASK)
    obs = env.reset(5, 9)
    while not env.done:
        obs = env.step(obs[:, -2:])
    outcome = env.outcome()
    for i, row in enumerate(result.rows):
        assert row["episode"] == i and row["length"] == TASK.steps
        assert row["success"] is bool(outcome.success[i])
        for name in ("min_distance_first", "min_distance_second", "final_distance"):
            assert row[name] == getattr(outcome, name)[i]


@pytest.mark.parametrize("policy", [heading("second"), searching("second")])
def test_the_seed_decides_everything(policy: Policy) -> None:
    task = ParticleTask(steps=10)
    one, again = (evaluate(policy, task, episodes=5, seed=8, latency_calls=2) for _ in range(2))
    other = evaluate(policy, task, episodes=5, seed=9, latency_calls=2)
    assert one.rows == again.rows and one.seed == 8
    assert all(a["final_distance"] != b["final_distance"] for a, b in zip(one.rows, other.rows, strict=True))


def test_an_episode_does_not_depend_on_how_many_there_are() -> None:
    few, many = (evaluate(heading("second"), TASK, episodes=n, seed=8, latency_calls=0).rows for n in (3, 11))
    assert many[:3] == few


def test_the_default_seeds_are_disjoint() -> None:
    """The episodes that choose, those that test and those of the demonstrations: no start in common."""
    starts = [BatchedParticle(TASK).reset(seed, 50)[:, 0].tolist() for seed in (0, VALIDATION_SEED, TEST_SEED)]
    assert len({x for start in starts for x in start}) == 150
    assert evaluate(heading("first"), TASK, episodes=1, latency_calls=0).seed == TEST_SEED


def test_a_search_is_as_good_as_knowing() -> None:
    known, found = (
        evaluate(p, TASK, episodes=10, seed=4, latency_calls=0) for p in (heading("second"), searching("second"))
    )
    for a, b in zip(known.rows, found.rows, strict=True):
        assert b["final_distance"] == pytest.approx(a["final_distance"], abs=0.05)


def test_the_runner_gets_its_settings() -> None:
    """History: the observations stack up. Candidates: an impossible number shows that it arrives."""
    result = evaluate(heading("second", history=2), TASK, episodes=4, seed=5, latency_calls=1)
    assert result.rows == evaluate(heading("second"), TASK, episodes=4, seed=5, latency_calls=1).rows
    with pytest.raises(ValueError, match="candidates must be at least 1, got 0"):
        evaluate(searching("second"), TASK, episodes=1, candidates=0)
    with pytest.raises(ValueError, match="execute must be between"):
        evaluate(searching("second"), TASK, episodes=1, execute=2)
    warm = evaluate(searching("second"), TASK, episodes=4, seed=5, latency_calls=1, warm_start=True, candidates=8)
    assert max(row["final_distance"] for row in warm.rows) < 0.1


def test_a_policy_for_another_task_is_refused() -> None:
    sizes = "3-D particle task: env has 12 observation and 3 action dimensions, the policy 8 and 2"
    with pytest.raises(ValueError, match=sizes):
        evaluate(heading("first"), ParticleTask(3), episodes=2)


@pytest.mark.parametrize("env", [TASK, "cebm/Particle-v0"])
def test_impossible_numbers_are_refused_with_a_sentence(env: Any, unchecked_shapes: None) -> None:
    """Before anything is allocated: a million times a million episodes would end in a MemoryError."""
    for episodes, words in {
        0: "episodes must be at least 1, got 0",
        999_999_999_999: "episodes must be at most 1,000,000, got 999,999,999,999",
        2.5: "episodes must be a whole number, got 2.5",
    }.items():
        with pytest.raises(ValueError, match=words):
            evaluate(heading("first"), env, episodes=episodes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="latency_calls must be at least 0, got -1"):
        evaluate(heading("first"), env, episodes=1, latency_calls=-1)
    with pytest.raises(ValueError, match="max_steps must be a whole number of at least 1, or None, got 0"):
        evaluate(heading("first"), env, episodes=1, max_steps=0)
    with pytest.raises(TypeError, match="a float is no task"):
        evaluate(heading("first"), 3.0, episodes=1)


def test_max_steps_cuts_episodes_short() -> None:
    result = evaluate(heading("second"), TASK, episodes=3, seed=3, latency_calls=0, max_steps=4)
    assert [row["length"] for row in result.rows] == [4, 4, 4] and result.successes == 0
    longer = evaluate(heading("second"), TASK, episodes=3, seed=3, latency_calls=0, max_steps=400)
    assert longer.rows == evaluate(heading("second"), TASK, episodes=3, seed=3, latency_calls=0).rows


# -------------------------------------------------------------------------------------------- numbers and tables


def test_the_summary() -> None:
    result = evaluate(heading("second"), TASK, episodes=12, seed=3, latency_calls=5)
    summary = result.summary()
    assert list(summary)[:6] == ["episodes", "seed", "successes", "success", "success_low", "success_high"]
    wanted = {"length", "min_distance_first", "min_distance_second", "final_distance"}
    wanted |= {f"{name}_se" for name in wanted}
    assert summary.keys() - set(list(summary)[:6]) == wanted | {"action_ms_p50", "action_ms_p99", "seconds"}
    assert summary["episodes"] == result.episodes == 12
    assert summary["successes"] == sum(row["success"] for row in result.rows)
    assert (summary["success_low"], summary["success_high"]) == wilson_interval(summary["successes"], 12)
    assert summary["success_low"] <= summary["success"] == summary["successes"] / 12 <= summary["success_high"]
    assert summary["final_distance"] == pytest.approx(sum(row["final_distance"] for row in result.rows) / 12)
    assert 0 < summary["action_ms_p50"] <= summary["action_ms_p99"] < 1e3 * summary["seconds"]
    assert json.loads(json.dumps(summary)) == summary
    for name in ("final_distance", "min_distance_first"):
        values = np.array([row[name] for row in result.rows])
        assert summary[name] == pytest.approx(values.mean(), rel=1e-12)
        assert summary[f"{name}_se"] == pytest.approx(np.sqrt(np.var(values, ddof=1) / 12), rel=1e-12)
    assert summary["length_se"] == 0


def test_one_episode_has_no_standard_error() -> None:
    summary = evaluate(heading("second"), TASK, episodes=1, seed=3, latency_calls=0).summary()
    assert "final_distance" in summary and not [name for name in summary if name.endswith("_se")]


def test_columns_that_are_not_numbers_everywhere_have_no_mean() -> None:
    rows = [
        {"episode": 0, "success": True, "a": 1, "word": "x", "gone": None, "flag": True, "wild": math.inf},
        {"episode": 1, "success": True, "a": np.float32(3), "word": "y", "gone": 1.0, "flag": False, "wild": 1.0},
    ]
    rows.append({"episode": 2, "success": False, "a": 5, "flag": False, "wild": 2.0, "new": 1})
    result = Evaluation(rows, 0, 1.0, 0.1, 0.1)
    assert result.columns == ["episode", "success", "a", "word", "gone", "flag", "wild", "new"]
    summary = result.summary()
    assert summary["a"] == 3 and summary["flag"] == pytest.approx(1 / 3)
    assert summary["wild"] == math.inf and math.isnan(summary["wild_se"])
    assert not {"word", "gone", "new", "episode", "episode_se", "success_se"} & summary.keys()
    assert summary["successes"] == 2


def test_the_score_is_the_mean_of_the_metric() -> None:
    rows = [{"episode": i, "success": None, "x": float(i), "part": None if i else 1.0} for i in range(4)]
    result = Evaluation(rows, 0, 1.0, 0.1, 0.2)
    assert result.score("x") == 1.5
    with pytest.raises(ValueError, match="no column 'y' to score; they have episode, success, x, part"):
        result.score("y")
    for name in ("success", "part"):
        with pytest.raises(ValueError, match=f"column '{name}' cannot score"):
            result.score(name)
    played = evaluate(heading("second"), TASK, episodes=8, seed=3, latency_calls=0)
    assert played.score(TASK.metric) == played.summary()["success"]


def test_without_latency_calls_there_are_no_times() -> None:
    result = evaluate(heading("second"), TASK, episodes=1, seed=3, latency_calls=0)
    assert math.isnan(result.action_ms_p50) and math.isnan(result.action_ms_p99)


def test_the_csv_has_one_row_per_episode(tmp_path: Path) -> None:
    result = evaluate(heading("second"), TASK, episodes=7, seed=3, latency_calls=0)
    result.write_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 8
    with open(tmp_path / "rows.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 7
    for text, row in zip(read, result.rows, strict=True):
        assert text.keys() == row.keys()
        assert text["success"] == str(row["success"]) and int(text["episode"]) == row["episode"]
        for name in ("min_distance_first", "min_distance_second", "final_distance"):
            assert float(text[name]) == row[name]


def test_an_unknown_success_is_none_and_left_out() -> None:
    rows = [{"episode": i, "success": s, "length": 2, "return_sum": float(i)} for i, s in enumerate([True, None])]
    result = Evaluation(rows, 0, 1.0, 0.1, 0.2)
    assert result.successes is None
    assert "success" not in result.summary() and result.summary()["return_sum"] == 0.5
    assert Evaluation([{"x": 1.0}], 0, 1.0, 0.1, 0.2).successes is None


def test_a_full_disk_leaves_the_old_table_and_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the bytes are to reach it, which is when `fsync` fails."""
    target = tmp_path / "rows.csv"
    old, new = (evaluate(heading("second"), TASK, episodes=n, seed=3, latency_calls=0) for n in (2, 5))
    old.write_csv(target)
    before = target.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr("os.fsync", full)
        new.write_csv(target)
    assert target.read_bytes() == before and list(tmp_path.iterdir()) == [target]
    new.write_csv(target)
    assert target.read_bytes().count(b"\n") == 6


# -------------------------------------------------------------------------------------------- foreign policies


class Stranger:
    """A policy of somebody else: it keeps its own state, and has none of cebm's attributes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def reset(self) -> None:
        self.calls.append("reset")

    def act(self, obs: np.ndarray) -> Any:
        assert obs.dtype == np.float32
        self.calls.append(obs.shape)
        return obs[:, -2:].astype(np.float64)


def test_a_foreign_policy_is_called_as_it_is() -> None:
    policy = Stranger()
    result = evaluate(policy, TASK, episodes=4, seed=3, latency_calls=2)
    assert policy.calls == ["reset", *[(4, 8)] * 50, *["reset", (1, 8)] * 3]
    assert result.rows == evaluate(heading("second"), TASK, episodes=4, seed=3, latency_calls=0).rows
    assert 0 < result.action_ms_p50 <= result.action_ms_p99
    again = evaluate(Stranger(), "cebm/Particle-v0", episodes=4, seed=3, latency_calls=0)
    assert again.rows == evaluate(heading("second"), "cebm/Particle-v0", episodes=4, seed=3, latency_calls=0).rows


def test_a_runner_is_such_a_policy() -> None:
    runner = Runner(heading("second", history=2))
    result = evaluate(runner, TASK, episodes=4, seed=5, latency_calls=1)
    assert result.rows == evaluate(heading("second"), TASK, episodes=4, seed=5, latency_calls=0).rows


def test_lists_and_tensors_are_actions_too() -> None:
    for kind in (np.ndarray.tolist, torch.from_numpy):
        policy = Stranger()
        policy.act = lambda obs, kind=kind: kind(obs[:, -2:])  # type: ignore[method-assign,misc]
        for env in (TASK, "cebm/Particle-v0"):
            assert evaluate(policy, env, episodes=2, seed=3, latency_calls=0).rows == (
                evaluate(heading("second"), env, episodes=2, seed=3, latency_calls=0).rows
            )


def test_what_is_no_policy_is_named() -> None:
    with pytest.raises(TypeError, match=r"policy: a float has no act\(\) and no reset\(\)"):
        evaluate(0.5, TASK, episodes=1)
    with pytest.raises(TypeError, match=r"policy: a ParticleExpert has no reset\(\)"):
        evaluate(ParticleExpert(TASK, 3, 1), TASK, episodes=1)
    with pytest.raises(ValueError, match=r"Stranger\.act does not take candidates, previous"):
        evaluate(Stranger(), TASK, episodes=1, warm_start=True, candidates=3)


def test_the_device_is_asked_for_only_where_there_is_one(unchecked_shapes: None) -> None:
    """A policy with a history and a horizon, and nothing else of cebm's, gets a Runner and its generator."""

    class Small:
        history, horizon = 2, 1

        def reset(self) -> None:
            """It keeps no state."""

        def act(self, obs: np.ndarray, *, generator: torch.Generator) -> np.ndarray:
            assert obs.shape == (3, 16) and generator.initial_seed() == 3
            return obs[:, -2:]

    result = evaluate(Small(), TASK, episodes=3, seed=3, latency_calls=0)
    assert result.rows == evaluate(heading("second"), TASK, episodes=3, seed=3, latency_calls=0).rows


# -------------------------------------------------------------------------------------------- Gymnasium


class Line(gymnasium.Env[np.ndarray, np.ndarray]):
    """Moves along a line of shape [1, 2] by what it is told, for as many steps as the seed says. Counts its calls."""

    made: list["Line"] = []  # noqa: RUF012

    def __init__(self, tells: str | None = None, low: float = -1.0, high: float = 1.0) -> None:
        self.tells = tells
        self.observation_space = gymnasium.spaces.Box(-10, 10, (1, 2), np.float64)
        self.action_space = gymnasium.spaces.Box(low, high, (2, 1), np.float64)
        self.actions: list[np.ndarray] = []
        self.closed = False
        self.seeds: list[int | None] = []
        Line.made.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.length = int(self.np_random.integers(1, 9))
        self.place = self.np_random.random((1, 2))
        self.steps = 0
        return self.place.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.steps < self.length, "stepped after the end"
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.place = self.place + action.reshape(1, 2)
        self.steps += 1
        over = self.steps == self.length
        info = {self.tells: np.bool_(over and self.length > 4)} if self.tells else {}
        return self.place.copy(), 0.5, over and self.length % 2 == 0, over and self.length % 2 == 1, info

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def line() -> type[Line]:
    Line.made = []
    return Line


def played(line: type[Line]) -> list[Line]:
    """Those in which episodes ran; one more was made to read the spaces."""
    return [env for env in line.made if env.seeds]


def back(scale: float = 1.0) -> EnergyPolicy:
    """The set-point is the observation itself, in actions of `scale`."""
    energy = SetPoint(2, "start")
    energy.obs_dim = 2
    units = Box(torch.zeros(2), torch.ones(2)), Box(torch.zeros(2), torch.full((2,), scale))
    return EnergyPolicy(energy, *units, Direct())


def test_the_registered_particle_gives_rows() -> None:
    assert cebm.tasks.ENV_ID == "cebm/Particle-v0"
    result = evaluate(heading("second"), "cebm/Particle-v0", episodes=4, seed=3, latency_calls=1)
    assert [row["episode"] for row in result.rows] == [0, 1, 2, 3]
    for row in result.rows:
        told = {"success", "min_distance_first", "min_distance_second", "final_distance", "seed", "episode"}
        returns = {"return_sum", "return_max", "return_last", "return_mean", "truncated_by_limit"}
        infos = {f"info_{name}{end}" for name in told for end in ("", "_max")}
        assert row.keys() == {"episode", "success", "length"} | returns | infos
        assert row["length"] == 50 and isinstance(row["success"], bool) and row["truncated_by_limit"] is False
        assert row["return_sum"] == row["return_max"] == row["return_last"] == float(row["success"])
        assert row["return_mean"] == row["return_sum"] / 50
        assert row["info_success"] == float(row["success"])
        assert row["info_min_distance_first"] <= row["info_min_distance_first_max"]
    assert result.summary()["success"] == result.successes / 4


def test_a_function_that_makes_an_environment() -> None:
    """An easy task, on which the policy succeeds: success and its reward come through."""
    easy = ParticleTask(2, goal_distance=2.0, steps=7)
    result = evaluate(heading("second", easy), lambda: ParticleEnv(easy), episodes=3, seed=3, latency_calls=0)
    assert result.successes == 3
    assert all(row["length"] == 7 and row["return_sum"] == 1.0 for row in result.rows)


def test_gymnasium_and_batched_dynamics_agree() -> None:
    """The same start in both gives the same distances: the roll-outs differ in nothing but their seeds."""
    env, seen = ParticleEnv(TASK), []

    class Watch(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            result = self.env.step(action)
            seen.append((result[4]["seed"], result[4]["final_distance"]))
            return result

    evaluate(heading("second"), lambda: Watch(env), episodes=1, seed=3, latency_calls=0)
    seed, distance = seen[-1]
    expected = evaluate(heading("second"), TASK, episodes=1, seed=seed, latency_calls=0).rows[0]["final_distance"]
    assert distance == pytest.approx(expected, abs=1e-6)


def test_episodes_of_different_lengths(line: type[Line]) -> None:
    """Each is as long as its seed says and is stepped no more after its end, by termination or truncation."""
    result = evaluate(back(), line, episodes=20, seed=1, latency_calls=1)
    assert len(played(line)) == 20 and len(line.made) == 21 and all(env.closed for env in line.made)
    assert [row["length"] for row in result.rows] == [env.length for env in played(line)]
    assert len({row["length"] for row in result.rows}) > 1
    assert all(row["return_sum"] == 0.5 * row["length"] for row in result.rows)


def test_without_word_of_success_there_is_none(line: type[Line]) -> None:
    result = evaluate(back(), line, episodes=3, seed=1, latency_calls=0)
    assert result.successes is None and all(row["success"] is None for row in result.rows)
    assert result.summary().keys() & {"success", "successes", "success_low"} == set()
    assert result.summary()["return_sum"] > 0


@pytest.mark.parametrize("tells", ["success", "is_success"])
def test_success_is_what_the_last_step_says(tells: str, line: type[Line]) -> None:
    result = evaluate(back(), lambda: line(tells), episodes=20, seed=1, latency_calls=0)
    assert [row["success"] for row in result.rows] == [env.length > 4 for env in played(line)]
    assert all(type(row["success"]) is bool for row in result.rows)


def test_actions_are_clipped_to_the_space_and_have_its_shape(line: type[Line]) -> None:
    """The step itself checks that its action is in the space; here that the limits were met at all."""
    evaluate(back(5.0), lambda: line(low=-0.1, high=0.2), episodes=5, seed=1, latency_calls=0)
    actions = np.stack([action for env in line.made for action in env.actions])
    assert actions.shape[1:] == (2, 1) and actions.max() == 0.2


def test_seeds_of_episodes(line: type[Line]) -> None:
    """Repeatable, the same for any number of episodes, and other ones for the next seed: not shifted by one."""
    few, many, again, other = (
        evaluate(back(), line, episodes=n, seed=s, latency_calls=0).rows for n, s in ((3, 7), (9, 7), (9, 7), (9, 8))
    )
    seeds = [env.seeds[0] for env in played(line)]
    assert many[:3] == few and many == again
    assert seeds[3:12] == seeds[12:21] and seeds[:3] == seeds[3:6]
    assert not set(seeds[12:21]) & set(seeds[21:]) and len(set(seeds[21:])) == 9
    assert other != many


def test_environments_are_closed_after_an_error(line: type[Line]) -> None:
    with pytest.raises(ValueError, match="env has 2 observation and 2 action dimensions, the policy 8 and 2"):
        evaluate(heading("first"), line, episodes=2)
    assert len(line.made) == 1 and all(env.closed for env in line.made)


def test_spaces_that_do_not_fit_are_named(line: type[Line]) -> None:
    with pytest.raises(ValueError, match="env has 12 observation and 3 action dimensions, the policy 8 and 2"):
        evaluate(heading("first"), lambda: ParticleEnv(dim=3), episodes=1)
    with pytest.raises(ValueError, match="env has a Discrete action space, a policy needs a Box"):
        evaluate(back(), "CartPole-v1", episodes=1)


def test_history_and_chunks_count_in_the_dimensions(line: type[Line]) -> None:
    """Two observations of 8 in, and the environment's are 8."""
    result = evaluate(heading("second", history=2), lambda: ParticleEnv(TASK), episodes=2, seed=3, latency_calls=0)
    assert result.rows == evaluate(heading("second"), "cebm/Particle-v0", episodes=2, seed=3, latency_calls=0).rows


# ---------------------------------------------------------------------------------------------- paired differences


def of_rows(values: list[bool], seed: int = 1, metric: list[float] | None = None) -> Evaluation:
    rows = [{"episode": i, "success": value} for i, value in enumerate(values)]
    for row, value in zip(rows, metric or [], strict=False):
        row["reward"] = value  # type: ignore[assignment]
    return Evaluation(rows, seed, 0.0, 0.0, 0.0)


def test_a_difference_of_rates_is_newcombes() -> None:
    """His example: 36 pairs of both, 12 and 2 of one alone, none of neither: 0.0569 to 0.3404."""
    one = [True] * 48 + [False] * 2
    other = [True] * 36 + [False] * 12 + [True] * 2
    found = of_rows(one).minus(of_rows(other), "success")
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    back = of_rows(other).minus(of_rows(one), "success")
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))
    same = of_rows([True] * 50).minus(of_rows([True] * 50), "success")
    assert same.mean == 0 and same.low < 0 < same.high  # Student's t has no width here


def test_the_interval_of_a_difference_covers_it(generator: torch.Generator) -> None:
    """Of 1,000 times 100 pairs, 80 and 60 % of which succeed, the same numbers deciding in seven of ten pairs: covered
    in 95 %, with a deviation of 0.7 points. The planted fault, Wilson's interval of one rate alone, covers less."""
    covered, wrong = 0, 0
    for _ in range(1000):
        first, second, same = torch.rand(3, 100, generator=generator)
        one, other = first < 0.8, torch.where(same < 0.7, first, second) < 0.6
        found = paired_rates(one.tolist(), other.tolist())
        covered += found.low <= 0.2 <= found.high
        low, high = wilson_interval(int(one.sum()), 100)
        rate = float(other.double().mean())
        wrong += low - rate <= 0.2 <= high - rate
    assert covered / 1000 > 0.95 - 4.5 * 0.0069 > wrong / 1000


def test_only_the_same_episodes_are_compared() -> None:
    one = of_rows([True, False], metric=[1.0, 0.5])
    found = one.minus(of_rows([True, True], metric=[0.5, 0.0]), "reward")
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="other: 2 episodes of seed 2, expected the same 2 of seed 1"):
        one.minus(of_rows([True, True], seed=2), "success")
    with pytest.raises(ValueError, match="other: 1 episodes"):
        one.minus(of_rows([True]), "success")
    with pytest.raises(ValueError, match="'reward' cannot be compared"):
        one.minus(of_rows([True, True]), "reward")
    with pytest.raises(ValueError, match="other has 1 episodes, expected 2"):
        paired_rates([True, True], [True])
