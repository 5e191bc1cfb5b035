"""The particle task: dynamics, success rule, expert, that the single and the batched form agree, and the contract of
a task. Gymnasium environments as tasks are in test_tasks_gym.py."""

import json
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from cebm.demonstrations import Demonstrations
from cebm.tasks import (
    ENV_ID,
    TEST_SEED,
    Actor,
    BatchedParticle,
    Gym,
    ParticleEnv,
    ParticleExpert,
    ParticleOutcome,
    ParticleTask,
    RollOut,
    Task,
    TaskError,
    as_task,
    collect_particle,
    task_of,
)
from cebm.tasks.particle import cluster_places
from waiting import PATIENCE

SEED = int(np.random.SeedSequence().entropy) % 2**31  # no test depends on a chosen one


def run_expert(task: ParticleTask, seed: int, episodes: int) -> tuple[ParticleOutcome, np.ndarray, np.ndarray]:
    """Outcome, positions [steps + 1, episodes, dim] and actions [steps, episodes, dim]."""
    env, expert = BatchedParticle(task), ParticleExpert(task, seed, episodes)
    obs, positions, actions = env.reset(seed, episodes), [], []
    positions.append(env.position)
    while not env.done:
        actions.append(expert.act(obs))
        obs = env.step(actions[-1])
        positions.append(env.position)
    return env.outcome(), np.stack(positions), np.stack(actions)


# The environment and Gymnasium


@pytest.mark.parametrize("dim", [1, 2, 16])
@pytest.mark.parametrize("settings", [{}, {"hide_velocity": True, "random_order": True, "steps": 7}])
def test_passes_gymnasiums_checker_without_a_warning(dim: int, settings: dict[str, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(ENV_ID, dim=dim, render_mode="rgb_array", **settings)
        check_env(env.unwrapped)
    assert env.observation_space.shape == ((3 if settings else 4) * dim,)
    assert env.action_space.shape == (dim,)
    assert env.spec is not None and env.spec.max_episode_steps is None


def test_gymnasium_finds_it_by_module_and_cebm_alone_imports_neither_torch_nor_gymnasium() -> None:
    code = (
        "import sys, cebm; assert not {'gymnasium', 'torch'} & set(sys.modules)\n"
        "import gymnasium; env = gymnasium.make('cebm.tasks:cebm/Particle-v0', dim=3)\n"
        "assert env.action_space.shape == (3,) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_episode_of_the_environment() -> None:
    env = ParticleEnv(ParticleTask(dim=2, steps=9))
    obs, info = env.reset(seed=SEED)
    assert obs.dtype == np.float32 and not obs[2:4].any()
    assert info["min_distance_first"] == pytest.approx(np.linalg.norm(obs[:2] - obs[4:6]), abs=1e-6)
    assert info["final_distance"] == pytest.approx(np.linalg.norm(obs[:2] - obs[6:8]), abs=1e-6)
    ends = []
    for _ in range(9):
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert (reward, terminated, info["success"]) == (0.0, False, False)
        ends.append(truncated)
    assert ends == [False] * 8 + [True]
    with pytest.raises(RuntimeError, match="over after 9 steps"):
        env.step(obs[:2])


def test_reward_is_one_at_the_end_of_success() -> None:
    env = ParticleEnv(dim=2)
    obs, info = env.reset(seed=SEED)
    expert = ParticleExpert(env.task, info["seed"], [info["episode"]])
    rewards, successes, truncated = [], [], False
    while not truncated:
        obs, reward, _, truncated, info = env.step(expert.act(obs[None])[0])
        rewards.append(reward)
        successes.append(info["success"])
    assert rewards == [0.0] * 49 + [1.0] and successes == [False] * 49 + [True]
    assert max(info["min_distance_first"], info["min_distance_second"], info["final_distance"]) <= 0.05


def test_reset_without_a_seed_goes_to_the_next_episode() -> None:
    env, batch = ParticleEnv(), BatchedParticle(ParticleTask())
    starts = [env.reset(seed=SEED)[0], env.reset()[0], env.reset()[0], env.reset(options={"episode": 7})[0]]
    np.testing.assert_array_equal(np.stack(starts), batch.reset(SEED, [0, 1, 2, 7]))
    a, b = ParticleEnv().reset()[0], ParticleEnv().reset()[0]
    assert not np.array_equal(a, b), "unseeded environments start alike"
    with pytest.raises(ValueError, match="'where'"):
        env.reset(options={"where": 0})


def test_bad_input_is_named(unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match="render_mode"):
        ParticleEnv(render_mode="ansi")
    with pytest.raises(TypeError, match="dimension"):
        ParticleEnv(dimension=3)
    for name, value in {"dim": 0, "steps": 0, "inner_steps": 0, "wait": -1, "dt": 0.0, "goal_distance": -1.0}.items():
        with pytest.raises(ValueError, match=f"{name} is"):
            ParticleTask(**{name: value})  # type: ignore[arg-type]
    for name, value in {"dt": "fast", "velocity_gain": True, "hide_velocity": "no", "random_order": 1}.items():
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            ParticleTask(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unstable"):
        ParticleTask(dt=1.0)
    batch = BatchedParticle(ParticleTask(dim=2))
    with pytest.raises(RuntimeError, match="reset"):
        batch.step(np.zeros((3, 2)))
    batch.reset(0, [4, 9, 2])
    with pytest.raises(ValueError, match=r"shape \(3, 1\), expected \(3, 2\)"):
        batch.step(np.zeros((3, 1)))
    with pytest.raises(ValueError, match="episode 9: action column 1 is nan"):
        batch.step([[0, 0], [0, np.nan], [0, 0]])
    for seed, episodes in ((-1, 3), (0, 0), (0, [-1]), (0, [])):
        with pytest.raises(ValueError, match=r"expected .*0 or more"):
            batch.reset(seed, episodes)


# Dynamics


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 5]), st.booleans())
@settings(max_examples=10, deadline=None)
def test_dynamics_are_the_stated_recurrence(seed: int, dim: int, corners: bool) -> None:
    """Against scalar Python, one number at a time."""
    env = BatchedParticle(ParticleTask(dim=dim))
    env.reset(seed, 2)
    positions, velocities = env.position.tolist(), env.velocity.tolist()
    rng = np.random.default_rng(seed)
    while not env.done:
        actions = rng.random((2, dim))
        env.step(actions.round() if corners else actions)
        for row in range(2):
            for column in range(dim):
                x, v = positions[row][column], velocities[row][column]
                a = float(actions.round()[row, column] if corners else actions[row, column])
                for _ in range(10):
                    x, v = x + 0.005 * v, v + 0.005 * (10 * (a - x) - 5 * v)
                positions[row][column], velocities[row][column] = x, v
    np.testing.assert_allclose(env.position, positions, atol=1e-12)
    np.testing.assert_allclose(env.velocity, velocities, atol=1e-12)


@pytest.mark.parametrize("gains", [{}, {"velocity_gain": 1.0}, {"position_gain": 40.0, "steps": 30}])
def test_reach_bounds_every_state_and_is_attained(gains: dict[str, float]) -> None:
    """The worst set-points for the position after t steps are the signs of the impulse response."""
    task = ParticleTask(dim=2, **gains)  # type: ignore[arg-type]
    matrix = np.array([[1, task.dt], [-task.position_gain * task.dt, 1 - task.velocity_gain * task.dt]])
    powers = [np.linalg.matrix_power(matrix, 10 * k)[:, 0] for k in range(task.steps + 1)]
    impulse = np.diff(powers, axis=0)[::-1]  # the last set-point has the youngest response
    far, fast = task.reach()
    worst = np.zeros(2)
    env = BatchedParticle(task)
    for last in range(1, task.steps + 1):
        env.reset(SEED, 1)
        env.position = np.array([[powers[last][0] > 0, powers[last][1] > 0]], np.float64)
        for k in range(last):
            env.step(impulse[task.steps - last + k][None] < 0)
            worst = np.maximum(worst, [np.abs(env.position - 0.5).max(), np.abs(env.velocity).max()])
    assert worst[0] <= far + 1e-12 and worst[1] <= fast + 1e-12
    np.testing.assert_allclose(worst, [far, fast], rtol=1e-9)
    box = ParticleEnv(task).observation_space
    assert isinstance(box, gymnasium.spaces.Box)
    np.testing.assert_allclose(box.high[[0, 2, 4]], [0.5 + far, fast, 1.0], atol=1e-5)


def test_set_points_are_clipped_to_the_unit_box() -> None:
    a, b = BatchedParticle(ParticleTask()), BatchedParticle(ParticleTask())
    a.reset(SEED, 3)
    b.reset(SEED, 3)
    np.testing.assert_array_equal(a.step([[-3, 9], [0.5, 2], [-1, 0.2]]), b.step([[0, 1], [0.5, 1], [0, 0.2]]))


@pytest.mark.parametrize("task", [ParticleTask(dim=1), ParticleTask(), ParticleTask(dim=16, hide_velocity=True)])
def test_single_and_batched_trajectories_are_equal(task: ParticleTask) -> None:
    rng = np.random.default_rng(SEED)
    actions = rng.random((task.steps, 4, task.dim)).astype(np.float32)
    batch, env = BatchedParticle(task), ParticleEnv(task)
    together = [batch.reset(SEED, 4), *(batch.step(action) for action in actions)]
    for episode in range(4):
        alone = [env.reset(seed=SEED, options={"episode": episode})[0]]
        alone += [env.step(action[episode])[0] for action in actions]
        np.testing.assert_allclose(np.stack(together)[:, episode], alone, rtol=0, atol=1e-6)
        info, outcome = env.unwrapped._info(), batch.outcome()
        assert info["final_distance"] == pytest.approx(outcome.final_distance[episode], abs=1e-6)
        assert info["min_distance_first"] == pytest.approx(outcome.min_distance_first[episode], abs=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 16])
def test_an_episode_does_not_depend_on_its_batch(dim: int) -> None:
    task = ParticleTask(dim=dim, random_order=True)
    _, whole, actions = run_expert(task, SEED, 20)
    chosen = np.array([13, 2, 7])
    env, expert = BatchedParticle(task), ParticleExpert(task, SEED, chosen)
    obs = env.reset(SEED, chosen)
    for step in range(task.steps):
        np.testing.assert_array_equal(env.position, whole[step, chosen])
        action = expert.act(obs)
        np.testing.assert_array_equal(action, actions[step, chosen])
        obs = env.step(action)


def test_starts_are_uniform_and_differ_between_episodes_and_seeds() -> None:
    env = BatchedParticle(ParticleTask(dim=4, hide_velocity=True))
    n = 4000
    obs = env.reset(SEED, n).astype(np.float64)
    # Moments of U[0, 1]; 12 columns, both moments: |z| < 5 fails once in about 70,000 runs.
    z_mean = (obs.mean(0) - 1 / 2) / np.sqrt(1 / 12 / n)
    z_square = (np.square(obs).mean(0) - 1 / 3) / np.sqrt(4 / 45 / n)
    assert np.abs([z_mean, z_square]).max() < 5
    drawn = np.stack([env.position, env.first_goal, env.second_goal])  # in float64, where no two are alike
    assert len(np.unique(drawn)) == drawn.size
    env.reset(SEED + 1, n)
    assert not np.isin(env.position, drawn).any()


def test_batched_roll_outs_make_100_000_control_steps_a_second() -> None:
    """Of the processor's time, as the machine may be busy; the best of four."""
    env, actions, rates = BatchedParticle(ParticleTask(dim=2)), np.full((500, 2), 0.5), []
    for _ in range(4):
        begin = time.process_time()
        env.reset(SEED, 500)
        while not env.done:
            env.step(actions)
        rates.append(500 * 50 / (time.process_time() - begin))
    assert max(rates) > 100_000, rates


# Success and the expert


@pytest.mark.parametrize("dim", [1, 2, 16])
@pytest.mark.parametrize("random_order", [False, True])
def test_expert_succeeds_in_all_of_1000_episodes(dim: int, random_order: bool) -> None:
    outcome, positions, _ = run_expert(ParticleTask(dim=dim, random_order=random_order), SEED, 1000)
    assert outcome.success.all(), f"{outcome.success.sum()} of 1000 with seed {SEED}"
    assert positions.shape == (51, 1000, dim)


def test_success_needs_both_goals_and_the_end_at_the_second() -> None:
    """Set-points at fixed goals; the rule is computed again here from the path."""
    task, n = ParticleTask(dim=1, steps=60), 300
    for random_order in (False, True):
        env = BatchedParticle(replace(task, random_order=random_order))
        seen = set()
        for plan in ((0, 0), (1, 1), (0, 1), (1, 0)):
            env.reset(SEED, n)
            goals = [env.first_goal, env.second_goal]
            path = [env.position]
            while not env.done:
                assert not env.outcome().success.any()
                env.step(goals[plan[env.step_count >= 30]])
                path.append(env.position)
            distance = [np.abs(np.stack(path) - goal)[..., 0] for goal in goals]
            ends = distance[1][-1] <= 0.05
            if random_order:
                ends |= distance[0][-1] <= 0.05
            expected = (distance[0].min(0) <= 0.05) & (distance[1].min(0) <= 0.05) & ends
            np.testing.assert_array_equal(env.outcome().success, expected)
            seen.add((plan, bool(expected.mean() > 0.9)))
        ordered = {((0, 0), False), ((1, 1), False), ((0, 1), True), ((1, 0), random_order)}
        assert seen == ordered


def test_expert_switches_once_when_within_the_switch_distance() -> None:
    task, n = ParticleTask(dim=2), 200
    _, positions, actions = run_expert(task, SEED, n)
    env = BatchedParticle(task)
    env.reset(SEED, n)
    first, second = env.first_goal.astype(np.float32), env.second_goal.astype(np.float32)
    at_second = (actions == second).all(-1)
    np.testing.assert_array_equal(np.where(at_second[..., None], second, first), actions)
    near = np.linalg.norm(positions[:-1] - env.first_goal, axis=-1) <= task.switch_distance
    np.testing.assert_array_equal(at_second, np.logical_or.accumulate(near))
    # Latched: some step after the switch is far from the first goal, and all episodes do switch.
    assert at_second[-1].all() and not near[-1].all()


def test_velocity_tells_the_way_out_from_the_way_back() -> None:
    """The same position, goals alike, in both halves: another set-point, and the opposite velocity."""
    task, n = ParticleTask(dim=1), 400
    data = collect_particle(task, n, SEED)
    compared = 0
    for episode in range(n):
        obs, actions = data.episode(episode)
        x, v, first, second = obs.T
        there, back = actions[:, 0] == first, actions[:, 0] == second
        if np.sign(x[0] - first[0]) != np.sign(second[0] - first[0]) or abs(second[0] - first[0]) < 0.3:
            continue
        for step in np.flatnonzero(there & (np.abs(x - first) > 0.1) & (v != 0)):
            twin = np.flatnonzero(back)[np.abs(x[back] - x[step]).argmin()]
            if abs(x[twin] - x[step]) < 0.02:
                compared += 1
                assert v[twin] * v[step] < 0
    assert compared > 50


def test_random_order_is_a_coin_flip_that_leaves_the_starts_alone() -> None:
    # In 8 dimensions no episode starts at a goal, so the first set-point is the goal to visit first.
    plain, either = ParticleTask(dim=8), ParticleTask(dim=8, random_order=True)
    n = 2000
    expert = ParticleExpert(either, SEED, n)
    assert abs(expert.second_first.mean() - 0.5) < 4.5 * 0.5 / np.sqrt(n)
    assert not ParticleExpert(plain, SEED, n).second_first.any()
    obs = BatchedParticle(either).reset(SEED, n)
    np.testing.assert_array_equal(obs, BatchedParticle(plain).reset(SEED, n))
    first, second = obs[:, 16:24], obs[:, 24:]
    np.testing.assert_array_equal(expert.act(obs), np.where(expert.second_first[:, None], second, first))


@pytest.mark.parametrize("dim", [1, 16])
def test_waiting_delays_the_switch_and_needs_longer_episodes(dim: int) -> None:
    n, wait = 200, 15
    _, _, prompt = run_expert(ParticleTask(dim=dim, steps=90), SEED, n)
    outcome, _, patient = run_expert(ParticleTask(dim=dim, steps=90, wait=wait), SEED, n)
    switch = [(actions != actions[0]).any(-1).argmax(0) for actions in (prompt, patient)]
    started_there = switch[0] == 0  # then the first set-point is the second goal already
    assert started_there.mean() < 0.1
    np.testing.assert_array_equal((switch[1] - switch[0])[~started_there], wait)
    assert outcome.success.all()
    short, _, _ = run_expert(ParticleTask(dim=dim, wait=25), SEED, n)
    assert short.success.mean() < 0.5


def test_expert_needs_no_velocity_but_the_right_columns() -> None:
    a = run_expert(ParticleTask(hide_velocity=True), SEED, 50)[1]
    np.testing.assert_array_equal(a, run_expert(ParticleTask(), SEED, 50)[1])
    with pytest.raises(ValueError, match=r"expected \(2, 6\)"):
        ParticleExpert(ParticleTask(hide_velocity=True), SEED, 2).act(np.zeros((2, 8)))


def test_collected_demonstrations_replay_and_rebuild_their_task() -> None:
    task = ParticleTask(dim=3, steps=45, wait=1, random_order=True)
    data = collect_particle(task, 6, SEED)
    assert (data.episodes, data.steps, data.obs_dim, data.act_dim) == (6, 270, 12, 3)
    assert data.metadata["env"] == ENV_ID and data.metadata["seed"] == SEED
    rebuilt = ParticleTask(**data.metadata["task"])
    assert rebuilt == task and asdict(rebuilt) == data.metadata["task"]
    env = BatchedParticle(rebuilt)
    obs = env.reset(data.metadata["seed"], 6)
    actions = data.actions.reshape(6, 45, 3)
    for step in range(45):
        np.testing.assert_array_equal(obs, data.obs.reshape(6, 45, 12)[:, step])
        obs = env.step(actions[:, step])
    assert data.metadata["expert_successes"] == env.outcome().success.sum()
    again: Demonstrations = collect_particle(task, 4, SEED)
    np.testing.assert_array_equal(again.obs, data.obs[: 4 * 45])


# The contract of a task


class Follow:
    """An actor that heads for the first goal until `switch`, then for the second; counts its calls."""

    def __init__(self, dim: int, switch: int = 25) -> None:
        self.dim, self.switch, self.resets, self.steps = dim, switch, 0, 0

    def reset(self) -> None:
        self.resets, self.steps = self.resets + 1, 0

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.steps += 1
        return obs[:, -2 * self.dim : -self.dim] if self.steps <= self.switch else obs[:, -self.dim :]


def test_goals_in_clusters_lie_around_places_that_the_settings_decide() -> None:
    task, plain = ParticleTask(goal_clusters=3), ParticleTask()
    env, other = BatchedParticle(task), BatchedParticle(plain)
    env.reset(SEED, 400)
    other.reset(SEED, 400)
    np.testing.assert_array_equal(env.position, other.position)
    goals = np.concatenate([env.first_goal, env.second_goal])
    places = cluster_places(task)
    assert np.array_equal(places, cluster_places(ParticleTask(goal_clusters=3))) and places.shape == (3, 2)
    assert places.min() >= 0.15 and places.max() <= 0.85 and goals.min() >= 0 and goals.max() <= 1
    nearest = np.linalg.norm(goals[:, None] - places, axis=2)
    away, which = nearest.min(axis=1), nearest.argmin(axis=1)
    # 800 goals, each with probability 1/3 at a place: 4.5 standard deviations of the share.
    assert np.abs(np.bincount(which, minlength=3) / 800 - 1 / 3).max() < 4.5 * np.sqrt(2 / 9 / 800)
    # E‖N(0, s² I)‖² = 2 s², with a relative error of 1/√800.
    assert abs((away**2).mean() / (2 * 0.05**2) - 1) < 4.5 / np.sqrt(800)
    again = BatchedParticle(task)
    again.reset(SEED, [7])
    np.testing.assert_array_equal(again.first_goal[0], env.first_goal[7])
    assert collect_particle(task, 30, SEED).metadata["expert_successes"] == 30


def test_the_particle_is_a_task() -> None:
    task = ParticleTask(dim=3, hide_velocity=True)
    assert isinstance(task, Task) and as_task(task) is task
    assert (task.name, task.metric, task.sizes) == ("3-D particle task", "success", (9, 3))
    assert [limit.tolist() for limit in task.limits] == [[0.0] * 3, [1.0] * 3]
    task.check_policy(9, 3)
    sizes = "3-D particle task: env has 9 observation and 3 action dimensions, the policy 12 and 3"
    with pytest.raises(ValueError, match=sizes):
        task.check_policy(12, 3)
    # Headers of demonstrations and runs hold these; a new name is a new format.
    dynamics = ["dim", "steps", "inner_steps", "dt", "position_gain", "velocity_gain", "goal_distance"]
    assert list(asdict(task)) == [
        *dynamics,
        "hide_velocity",
        "random_order",
        "switch_distance",
        "wait",
        "goal_clusters",
    ]


def test_the_particles_roll_out_and_demonstrations() -> None:
    task, actor = ParticleTask(dim=2), Follow(2)
    played = task.roll_out(actor, 6, SEED)
    assert actor.resets == 1 and actor.steps == 50 and isinstance(actor, Actor)
    env, again = BatchedParticle(task), Follow(2)
    obs = env.reset(SEED, 6)
    while not env.done:
        obs = env.step(again.act(obs))
    np.testing.assert_array_equal(played.last_obs, obs)
    outcome = env.outcome()
    for i, row in enumerate(played.rows):
        assert list(row.items())[:3] == [("episode", i), ("success", bool(outcome.success[i])), ("length", 50)]
        assert row["final_distance"] == outcome.final_distance[i]
    short = task.roll_out(actor, 2, SEED, max_steps=3)
    assert [(row["length"], row["success"]) for row in short.rows] == [(3, False)] * 2
    own, direct = task.demonstrations(3, SEED), collect_particle(task, 3, SEED)
    np.testing.assert_array_equal(own.obs, direct.obs)
    assert own.metadata == direct.metadata
    for wrong in (task.demonstrations, lambda episodes, seed: task.roll_out(actor, episodes, seed)):
        with pytest.raises(ValueError, match="episodes must be at most 1,000,000, got 2,000,000"):
            wrong(2_000_000, 0)


def test_a_task_of_ones_own_needs_a_metric_and_a_roll_out() -> None:
    @dataclass(frozen=True)
    class Coin(Task):
        """Guess a coin; knows no sizes, no limits, no expert and no picture."""

        bias: float = 0.5
        metric: str = "right"

        def roll_out(self, actor: Actor, episodes: int, seed: int, max_steps: int | None = None) -> RollOut:
            actor.reset()
            coins = np.random.default_rng(seed).random(episodes) < self.bias
            guesses = actor.act(np.zeros((episodes, 2), np.float32))[:, 0] > 0
            rows: list[dict[str, Any]] = [
                {"episode": i, "right": bool(coins[i] == guesses[i])} for i in range(episodes)
            ]
            return RollOut(rows, np.zeros((episodes, 2), np.float32))

    task = Coin()
    assert (task.name, task.limits, task.sizes, task.scene(Follow(1), 2)) == ("Coin", None, None, None)
    task.check_policy(17, 4)
    with pytest.raises(TaskError, match="Coin has no expert"):
        task.demonstrations(1, 0)
    assert len(task.roll_out(Follow(1), 5, 0).rows) == 5
    with pytest.raises(TypeError, match="metric"):
        type("Bare", (Task,), {"roll_out": Coin.roll_out})()


@pytest.mark.parametrize("task", [ParticleTask(1, steps=60), ParticleTask(2), ParticleTask(5, random_order=True)])
def test_the_scene_is_plain_data_about_the_held_out_episodes(task: ParticleTask) -> None:
    actor, n = Follow(task.dim), 8
    scene = task.scene(actor, n)
    assert actor.resets == 1 and json.loads(json.dumps(scene)).keys() == scene.keys()
    rows = task.roll_out(actor, n, TEST_SEED).rows
    assert [each["success"] for each in scene["episodes"]] == [row["success"] for row in rows]
    assert scene["successes"] == sum(bool(row["success"]) for row in rows) > 0 and scene["expert_successes"] == n
    assert scene["episodes"][scene["shown"]]["success"] and (scene["steps"], scene["dim"]) == (task.steps, task.dim)
    for each, row in zip(scene["episodes"], rows, strict=True):
        assert np.shape(each["policy"]) == np.shape(each["expert"]) == (task.steps + 1, 2)
        assert np.shape(each["aims"]) == np.shape(each["expert_aims"]) == (task.steps, 2)
        nearest = np.min(each["distances"], axis=0)
        assert nearest == pytest.approx([row["min_distance_first"], row["min_distance_second"]], abs=1e-4)
        assert each["success"] == (each["remark"] == "success")
    assert "Success: within 0.05 of both goals" in scene["note"]
    assert ("first two of 5 dimensions" in scene["note"]) == (task.dim == 5)


def test_the_moments_of_a_scene_carry_their_past() -> None:
    task = ParticleTask(2)
    scene = task.scene(Follow(2), 4)
    moments = scene["moments"]
    assert [moment["title"].split(": ")[1] for moment in moments][::3] == ["start", "end"] and len(moments) == 4
    env, actor = BatchedParticle(task), Follow(2)
    obs, seen = env.reset(TEST_SEED, 4), []
    while not env.done:
        seen.append(obs[scene["shown"]])
        obs = env.step(actor.act(obs))
    for moment in moments:
        step = moment["step"]
        np.testing.assert_array_equal(np.array(moment["obs"], np.float32), seen[: step + 1])
        kinds, places, radii = zip(*moment["marks"], strict=True)
        assert kinds == ("goal 1", "goal 2", "agent") and radii == (0.05, 0.05, 0.0)
        assert places[2] == pytest.approx(seen[step][:2].tolist(), abs=1e-6)


def test_a_scene_of_failures_shows_the_first_episode() -> None:
    scene = ParticleTask(8).scene(Follow(8, switch=99), 3)
    assert scene["successes"] == 0 and scene["shown"] == 0
    assert all(each["remark"].startswith("missed goal 2 by") for each in scene["episodes"])


def test_the_header_of_demonstrations_names_the_task(unchecked_shapes: None) -> None:
    task = ParticleTask(dim=3, steps=45, wait=1, random_order=True)
    assert task_of(collect_particle(task, 2, SEED).metadata) == task
    assert task_of({}) is None and task_of({"env": "Pendulum-v1", "task": "swing up"}) is None
    assert task_of({"env": ENV_ID, "task": {}}) == ParticleTask()
    for wrong, words in {
        "missing": "names cebm/Particle-v0, but the settings under 'task' are missing",
        "words": "'task' is 'reach', expected the settings",
        "unknown": "'task' has unknown settings colour, size; cebm/Particle-v0 has dim, steps",
        "value": "'task' is wrong: ParticleTask: dim is 0",
        "kind": "'task' is wrong: ParticleTask: dt is 'fast'",
    }.items():
        settings: Any = {
            "words": "reach",
            "unknown": {"size": 1, "colour": 2},
            "value": {"dim": 0},
            "kind": {"dt": "fast"},
        }
        header = {"env": ENV_ID} | ({"task": settings[wrong]} if wrong in settings else {})
        with pytest.raises(ValueError, match=f"header.*{words}") as caught:
            task_of(header)
        assert type(caught.value) is ValueError


def test_what_is_no_task_is_named(unchecked_shapes: None) -> None:
    assert as_task("Pendulum-v1") == Gym("Pendulum-v1")
    for wrong in (3, None, [ParticleTask()]):
        with pytest.raises(TypeError, match=f"a {type(wrong).__name__} is no task: give a cebm.tasks.Task"):
            as_task(wrong)  # type: ignore[arg-type]


# Pictures


def test_render_shows_goals_and_agent_where_they_are() -> None:
    env = ParticleEnv(render_mode="rgb_array")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.render()
    env.reset(seed=SEED)
    batch = env._batch
    batch.first_goal[0], batch.second_goal[0] = (0.25, 0.75), (0.75, 0.25)
    env._path = [np.array([0.5, 0.5])]
    frame = env.render()
    assert frame is not None and frame.shape == (256, 256, 3) and frame.dtype == np.uint8
    # Columns run right, rows run down; the unit square is 216 pixels wide in a margin of 20.
    assert frame[20 + 54, 20 + 54, 2] < 225 < frame[20 + 54, 20 + 54, 0], "orange, upper left"
    assert frame[20 + 162, 20 + 162, 0] < 225 < frame[20 + 162, 20 + 162, 2], "blue, lower right"
    assert (frame[126:130, 126:130] < 60).all(), "the agent is dark"
    assert (frame[20 + 54, 20 + 162] == 255).all() and (frame[0, 0] < 255).all()
    assert len(np.unique(frame[120:136, 120:136])) > 2, "edges are blended"
    env.step(np.array([0.9, 0.1], np.float32))
    after = env.render()
    assert after is not None and (after != frame).any()


@pytest.mark.parametrize("dim", [1, 16])
def test_render_in_other_dimensions_and_off_the_picture(dim: int) -> None:
    env = ParticleEnv(dim=dim, velocity_gain=0.2, render_mode="rgb_array")
    env.reset(seed=SEED)
    for step in range(50):
        env.step(np.full(dim, float(step // 20 % 2), np.float32))
    assert np.ptp(np.stack(env._path)[:, 0]) > 1.3, "this particle should swing out of the picture"
    frame = env.render()
    assert frame is not None and frame.shape == (256, 256, 3)


def test_render_without_a_mode_warns() -> None:
    env = ParticleEnv()
    env.reset(seed=SEED)
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None
