"""Push-T: exact states, replayed human demonstrations, the layout of keypoints, and the three metrics."""

import importlib.util
import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from benchmarks.task_studies import push_t
from cebm.cli import main
from cebm.demonstrations import DemonstrationError, Demonstrations
from cebm.evaluation import evaluate
from cebm.learning import fit
from cebm.runs import train
from cebm.tasks import TEST_SEED, VALIDATION_SEED, TaskError, shipped, task_of
from cebm.tasks.pusht import KEYPOINTS, PushT, PushTEnv
from test_runs import small_job

needs_simulator = pytest.mark.skipif(
    importlib.util.find_spec("gym_pusht") is None, reason="Push-T needs the extra pusht"
)
HUMAN = Path(__file__).resolve().parents[2] / "shared/data/pusht/pusht.npz"
needs_humans = pytest.mark.skipif(not HUMAN.exists(), reason="the human demonstrations are not there")


class Still:
    """Stays where the agent is."""

    def reset(self) -> None:
        pass

    def act(self, obs: np.ndarray) -> np.ndarray:
        return obs[:, -2:]


def human_file(folder: Path, **changed: np.ndarray) -> Path:
    """A recording of two episodes in the layout of Chi et al., as an `.npz`."""
    states = np.random.default_rng(0).uniform((50, 50, 100, 100, 0), (450, 450, 400, 400, 6), (7, 5))
    cosine, sine = np.cos(states[:, 4]), np.sin(states[:, 4])
    turned = np.einsum("ijt,kj->tki", np.array([[cosine, -sine], [sine, cosine]]), KEYPOINTS)
    arrays = {
        "obs": states.astype(np.float32),
        "action": states[:, :2].astype(np.float32),
        "keypoint": (turned + states[:, None, 2:4]).reshape(7, 18).astype(np.float32),
        "episode_ends": np.array([3, 7]),
    }
    np.savez(folder / "human.npz", **(arrays | changed))
    return folder / "human.npz"


# ---------------------------------------------------------------------------------------------- the environment


@needs_simulator
def test_a_state_is_set_exactly_and_the_simulators_own_way_moves_the_block() -> None:
    """The planted fault is `reset_to_state`, which sets the position before the angle."""
    env = PushTEnv("state")
    state = np.array([100.0, 120.0, 300.0, 310.0, 2.5])
    obs, info = env.reset(options={"state": state})
    np.testing.assert_allclose(obs, state, rtol=1e-6)
    assert 0 <= info["coverage"] < 1
    env.simulator.reset(options={"reset_to_state": state})
    assert np.abs(env.state[2:4] - state[2:4]).max() > 50


@needs_simulator
def test_the_goal_pose_covers_all_of_the_goal() -> None:
    env = PushTEnv("state")
    _, info = env.reset(options={"state": [50, 50, 256, 256, np.pi / 4]})
    assert info["coverage"] == pytest.approx(1.0, abs=1e-6)
    _, reward, terminated, _, info = env.step(np.array([50.0, 50.0]))
    assert reward == 1 and terminated and info["success"]


@needs_simulator
@pytest.mark.parametrize("wrong", [{"state": [1, 2]}, {"place": 1}, {"state": [0] * 5, "demonstration": 1}])
def test_wrong_reset_options_are_named(wrong: dict) -> None:
    with pytest.raises(ValueError, match="state"):
        PushTEnv("state").reset(options=wrong)
    with pytest.raises(ValueError, match="demonstration is -1"):
        PushTEnv("state").reset(options={"demonstration": -1})


@needs_simulator
def test_the_observations_show_the_same_moment() -> None:
    state = [100.0, 120.0, 300.0, 310.0, 2.5]
    seen = {}
    for name in ("state", "keypoints", "pixels"):
        env = PushTEnv(name, size=32)
        seen[name], _ = env.reset(options={"state": state})
        assert env.observation_space.contains(seen[name]) and len(seen[name]) == PushT(name, size=32).sizes[0]
        assert env.render().shape == (256, 256, 3)
    assert seen["keypoints"][-2:].tolist() == seen["pixels"][-2:].tolist() == [100, 120]
    # Nine points are rigid: their differences are those of the block's own frame, turned.
    points = seen["keypoints"][:18].reshape(9, 2)
    lengths = np.linalg.norm(points[:, None] - points, axis=2)
    np.testing.assert_allclose(lengths, np.linalg.norm(KEYPOINTS[:, None] - KEYPOINTS, axis=2), atol=1e-3)
    picture = seen["pixels"][:-2].reshape(32, 32, 3)
    agent = picture[int(120 / 16), int(100 / 16)]
    assert agent[2] > agent[0] + 50, "the agent is a blue disc"


@needs_simulator
def test_gymnasium_makes_it_by_its_id() -> None:
    env = gymnasium.make("cebm/PushT-v0", observation="state")
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    assert first.tolist() == again.tolist() and env.spec.max_episode_steps == 300


# ---------------------------------------------------------------------------------------------- the human set


def replayed(episode: int, obs: np.ndarray, actions: np.ndarray, **options: object) -> float:
    """The largest error of positions in pixels, beyond the rounding of the recording to float32."""
    env = PushTEnv("state")
    env.reset(options=options or {"demonstration": episode})
    worst = 0.0
    for t, recorded in enumerate(obs):
        rounding = np.spacing(recorded[:4]) / 2
        worst = max(worst, float((np.abs(env.state[:4] - recorded[:4]) - rounding).max()))
        env.step(actions[t])
    return worst


@needs_simulator
@needs_humans
def test_human_demonstrations_are_replayed() -> None:
    data = Demonstrations.load(HUMAN)
    for episode in np.random.default_rng().choice(data.episodes, 4, replace=False).tolist():
        assert replayed(episode, *data.episode(episode)) < 1e-5
    # The right start matters: that of another episode is far off.
    assert replayed(0, *data.episode(0), demonstration=1) > 10


@pytest.mark.slow
@needs_simulator
@needs_humans
def test_all_human_demonstrations_are_replayed() -> None:
    data = Demonstrations.load(HUMAN)
    assert max(replayed(episode, *data.episode(episode)) for episode in range(data.episodes)) < 1e-5


@needs_simulator
@needs_humans
def test_recorded_keypoints_agree_with_those_of_the_environment() -> None:
    """Where the agent pushes, the recording is up to 2 px off its own states: the median and the share are tested."""
    with np.load(HUMAN) as file:
        states, keypoints = file["obs"], file["keypoint"]
    converted = PushT().convert(HUMAN)
    assert converted.obs_dim == 20 and converted.episodes == 206
    error = np.abs(converted.obs[:, :18] - keypoints).max(1)
    assert np.median(error) < 1e-4 and np.mean(error < 1e-3) > 0.75 and np.mean(error < 0.1) > 0.99
    env = PushTEnv("keypoints")
    for step in np.random.default_rng().choice(len(states), 20).tolist():
        obs, _ = env.reset(options={"state": states[step]})
        np.testing.assert_allclose(obs, converted.obs[step], atol=1e-4)


@pytest.mark.parametrize("observation", ["state", "keypoints"])
def test_a_recording_becomes_demonstrations_that_name_their_task(tmp_path: Path, observation: str) -> None:
    task = PushT(observation)  # type: ignore[arg-type]
    data = task.convert(human_file(tmp_path))
    assert (data.obs_dim, data.act_dim) == task.sizes and data.episode_ends.tolist() == [3, 7]
    data.save(tmp_path / "ours.npz")
    assert task_of(Demonstrations.load(tmp_path / "ours.npz").metadata) == task


@needs_simulator
def test_pixels_are_drawn_from_the_recorded_states(tmp_path: Path) -> None:
    data = PushT("pixels", size=16).convert(human_file(tmp_path))
    assert data.obs_dim == 770 and data.obs[:, :768].std() > 5
    np.testing.assert_array_equal(data.obs[:, -2:], data.actions)


def test_a_zarr_directory_is_read(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", reason="the extra zarr is missing")
    with np.load(human_file(tmp_path)) as file:
        arrays = dict(file)
    group = zarr.open_group(str(tmp_path / "human.zarr"), mode="w", zarr_format=2)
    for name, key in (("data/state", "obs"), ("data/action", "action"), ("meta/episode_ends", "episode_ends")):
        group.create_array(name, data=arrays[key])
    found, expected = PushT("state").convert(tmp_path / "human.zarr"), PushT("state").convert(tmp_path / "human.npz")
    assert found.fingerprint() == expected.fingerprint()


def test_a_recording_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemonstrationError, match="no recording of Push-T"):
        PushT().convert(human_file(tmp_path, keypoint=np.zeros((7, 18), np.float32)))
    with pytest.raises(DemonstrationError, match=r"state has shape \(7, 4\)"):
        PushT().convert(human_file(tmp_path, obs=np.zeros((7, 4), np.float32)))
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(DemonstrationError, match="readable"):
        PushT().convert(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", obs=np.zeros((2, 5)))
    with pytest.raises(DemonstrationError, match="there is no array data/action or action"):
        PushT().convert(tmp_path / "other.npz")
    with pytest.raises(FileNotFoundError):
        PushT().convert(tmp_path / "nowhere")
    with pytest.raises(TaskError, match="cebm demos TASK --from"):
        PushT().demonstrations(1, 0)


# ---------------------------------------------------------------------------------------------- the metrics


def test_the_three_metrics_are_three_numbers() -> None:
    infos = [{"coverage": value} for value in (0.2, 0.93, 0.5)]
    measured = PushT().measure([0.0] * 3, infos)
    assert measured == {"reward": pytest.approx(0.93 / 0.95), "success": False, "final_coverage": 0.5}
    measured = PushT().measure([0.0], [{"coverage": 0.951}])
    assert measured == {"reward": 1.0, "success": True, "final_coverage": 0.951}


@needs_simulator
def test_a_roll_out_measures_the_task() -> None:
    task = PushT()
    result = evaluate(Still(), task, episodes=3, max_steps=4, latency_calls=0)
    for row in result.rows:
        assert row["length"] == 4 and row["success"] is False and row["truncated_by_limit"]
        assert row["reward"] == pytest.approx(row["return_max"]) and 0 <= row["final_coverage"] < 0.95
    assert result.score(task.metric) == np.mean([row["reward"] for row in result.rows])
    assert len({row["reward"] for row in result.rows}) > 1 or result.score("reward") == 0


def test_names_and_settings(unchecked_shapes: None) -> None:
    assert shipped("push-t") == PushT() and shipped("push-t:state") == PushT("state") and shipped("particle") is None
    for wrong in ({"observation": "sound"}, {"size": 1}, {"max_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PushT(**wrong)  # type: ignore[arg-type]


def test_a_missing_simulator_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gym_pusht.envs", None)
    with pytest.raises(ImportError, match=r"cebm\[pusht\]"):
        PushTEnv("state")


@needs_simulator
def test_training_rolls_out_the_task_that_the_data_name(tmp_path: Path) -> None:
    """On seeds that test nothing, and the metric is in the rows that choose."""
    PushT("state", max_steps=3).convert(human_file(tmp_path)).save(tmp_path / "ours.npz")
    outcome = train(
        small_job("mse", task=None, data=str(tmp_path / "ours.npz"), steps=2, evaluate_every=1), tmp_path / "run"
    )
    rows = [row for row in outcome.metrics if row["kind"] == "evaluation"]
    assert len(rows) == 2 and all({"reward", "reward_se", "success", "final_coverage"} <= row.keys() for row in rows)
    assert outcome.best_step == max(rows, key=lambda row: (row["reward"], -row["validation_action_error"]))["step"]
    low, high = outcome.policy.limits
    assert low.tolist() == [0, 0] and high.tolist() == [512, 512]
    assert VALIDATION_SEED != TEST_SEED


def numbers_of(line: str) -> list[float]:
    return [float({"True": "1", "False": "0"}.get(cell, cell)) for cell in line.split(",")]


@needs_simulator
def test_the_command_line_converts_and_films(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["demos", "push-t:state", "--from", str(human_file(tmp_path)), "--out", str(tmp_path / "ours.npz")])
    assert "2 episodes, 7 steps" in capsys.readouterr().out
    train(
        small_job("mse", task=None, data=str(tmp_path / "ours.npz"), steps=2, evaluation_episodes=1), tmp_path / "run"
    )
    asked = ["--episodes", "3", "--max-steps", "4", "--metric", "final_coverage", "--json"]
    alone, shared = [], []
    for found, extra in ((alone, ["--video", str(tmp_path / "film"), "--film", "1"]), (shared, ["--workers", "2"])):
        main(["eval", str(tmp_path / "run"), *asked, *extra])
        found.append(json.loads(capsys.readouterr().out))
        found.append((tmp_path / "run/evaluation.csv").read_text().split())
    for one, other in zip(alone[1][1:], shared[1][1:], strict=True):
        # The same episodes; the simulator's geometry may round otherwise in another process.
        assert numbers_of(one) == pytest.approx(numbers_of(other), rel=1e-9, abs=1e-12)
    summary = alone[0]
    assert summary["metric"] == "final_coverage"
    assert summary["final_coverage_low"] <= summary["final_coverage"] <= summary["final_coverage_high"]
    assert [path.stem for path in (tmp_path / "film").iterdir()] == ["episode-1"]
    main(["eval", str(tmp_path / "run"), *asked[:4]])
    assert "reward" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute where nothing else runs
@needs_simulator
@needs_humans
@pytest.mark.parametrize(("trial", "steps"), [("steady", 1000), ("annealed", 2500)])
def test_a_minute_of_training_beats_a_random_policy_by_far(trial: str, steps: int) -> None:
    """Of 30 episodes each: a random policy's mean reward is 0.08 with a standard error of 0.02. The difference must be
    more than four times its own standard error, and more than 0.2."""
    task = PushT()
    own = push_t.recipes[trial].settings
    policy = fit(task.convert(HUMAN), trial=trial, limits=task.limits, steps=steps, history=2, horizon=16, **own)
    random = np.random.default_rng(0)

    class Random(Still):
        def act(self, obs: np.ndarray) -> np.ndarray:
            return random.uniform(0, 512, (len(obs), 2))

    found = [
        np.array([row["reward"] for row in evaluate(each, task, episodes=30, latency_calls=0, **settings).rows])
        for each, settings in ((policy, {"execute": 8}), (Random(), {}))
    ]
    error = np.sqrt(sum(rewards.var(ddof=1) / len(rewards) for rewards in found))
    assert found[0].mean() - found[1].mean() > max(4 * error, 0.2)


@needs_simulator
def test_the_contract_of_tasks_holds(generator: torch.Generator) -> None:
    from cebm.testing import check_task

    check_task(PushT("state", max_steps=3))
