"""Forks: what is a crash, which way was taken, how evenly the ways are taken, and the expert."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from scipy import stats

from cebm.demonstrations import Demonstrations
from cebm.evaluation import evaluate
from cebm.tasks import shipped, task_of
from cebm.tasks.base import Actor
from cebm.tasks.forks import FINISH, BatchedForks, Forks, ForksExpert, entropy_of
from cebm.testing import check_task


class Expert:
    """The expert as an actor, of as many episodes as come first."""

    def __init__(self, task: Forks, seed: int) -> None:
        self.task, self.seed = task, seed

    def reset(self) -> None:
        self.expert: ForksExpert | None = None

    def act(self, obs: np.ndarray) -> np.ndarray:
        if self.expert is None or len(self.expert.goals) != len(obs):
            self.expert = ForksExpert(self.task, self.seed, len(obs))
        return self.expert.act(obs)


class Ahead:
    """Always in one direction."""

    def __init__(self, x: float, y: float) -> None:
        self.action = np.array([x, y])

    def reset(self) -> None:
        pass

    def act(self, obs: np.ndarray) -> np.ndarray:
        return np.tile(self.action, (len(obs), 1))


def played(task: Forks, actor: Actor, episodes: int) -> Any:
    return evaluate(actor, task, episodes=episodes, latency_calls=0)


# ---------------------------------------------------------------------------------------------- the rules


def test_there_are_24_ways() -> None:
    task = Forks()
    assert task.ways == 24 and task.name == "Forks, 24 ways" and shipped("forks") == task
    assert len(task.obstacles()) == 3 + 4 + 5
    free = [1 - sum(high - low for at, low, _, high in task.obstacles() if at == x) for x in task.rows]
    np.testing.assert_allclose(free, [0.2, 0.3, 0.4], atol=1e-12)


def test_straight_ahead_ends_at_the_first_row() -> None:
    result = played(Forks(), Ahead(1, 0), 2)
    for row in result.rows:
        assert not row["success"] and row["passed"] == 0 and row["way"] is None
        assert row["length"] == math.ceil(0.25 / 0.03), "the step that touches the obstacle is the last"
    assert result.summary()["entropy"] == 0


def test_one_wide_row_is_passed_straight_ahead() -> None:
    """In a row with one gap in the middle."""
    task = Forks(gaps=(1, 1))
    row = played(task, Ahead(1, 0), 1).rows[0]
    assert row["success"] and row["way"] == "1-1" and row["length"] == math.ceil(FINISH / 0.03)
    assert played(task, Ahead(1, 0), 1).summary()["entropy"] == 1.0


def test_a_crossing_counts_where_the_move_crosses_the_row() -> None:
    """From below the gap to within it: the place between the two decides, not its ends."""
    task = Forks(gaps=(1,), gap_width=0.1, speed=0.1)
    for start, aim, free in (((0.495, 0.42), (1.0, 1.0), False), ((0.405, 0.36), (1.0, 1.0), True)):
        env = BatchedForks(task)
        env.reset(0, 1)
        env.position = np.array([start])
        env.step([aim])
        assert env.running.tolist() == [free], start


def test_a_way_back_is_forgotten() -> None:
    task = Forks(gaps=(2,), gap_width=0.3, speed=0.1)
    env = BatchedForks(task)
    env.reset(0, 1)
    env.position = np.array([[0.45, 0.75]])
    env.step([[1.0, 0.0]])
    assert env.taken.tolist() == [[1]]
    env.step([[-1.0, 0.0]])
    assert env.taken.tolist() == [[-1]] and env.running.all()
    for _ in range(5):
        env.step([[0.0, -1.0]])
    for _ in range(6):
        env.step([[1.0, 0.0]])
    assert env.success.all() and env.outcome()[0]["way"] == "1"


def test_standing_still_ends_at_the_step_limit() -> None:
    row = played(Forks(steps=7), Ahead(0, 0), 1).rows[0]
    assert row["length"] == 7 and not row["success"]
    assert evaluate(Ahead(0, 0), Forks(), episodes=1, max_steps=3, latency_calls=0).rows[0]["length"] == 3


def test_what_is_no_action_is_named(unchecked_shapes: None) -> None:
    env = BatchedForks(Forks())
    env.reset(0, 3)
    with pytest.raises(ValueError, match=r"shape \(3, 1\)"):
        env.step(np.zeros((3, 1)))
    with pytest.raises(ValueError, match="episode 1"):
        env.step([[0, 0], [math.nan, 0], [0, 0]])
    with pytest.raises(ValueError, match="seed"):
        env.reset(-1, 1)
    with pytest.raises(ValueError, match="shape"):
        ForksExpert(Forks(), 0, 2).act(np.zeros((1, 2)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"gaps": ()},
        {"gaps": (0,)},
        {"gap_width": 0.3},
        {"speed": 0},
        {"steps": 0},
        {"noise": -1},
        {"odds": ((1.0,),)},
        {"odds": ((0.0, 0.0), (1.0,) * 3, (1.0,) * 4)},
    ],
)
def test_settings_that_make_no_sense_are_named(wrong: dict[str, Any], unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match=f"Forks: {next(iter(wrong))}"):
        Forks(**wrong)
    with pytest.raises(ValueError, match="no variant"):
        shipped("forks:small")


# ---------------------------------------------------------------------------------------------- the expert


def shares_are(counts: Counter, expected: np.ndarray) -> float:
    """The probability of counts at least this far from the expected shares (Pearson's χ²)."""
    observed = np.array([counts[i] for i in range(len(expected))])
    return float(stats.chisquare(observed, expected * observed.sum()).pvalue)


def test_the_expert_always_succeeds_and_takes_all_ways(generator: torch.Generator) -> None:
    """Of N uniform draws of K ways 2N(log K - H) is χ² with K - 1 degrees of freedom: of 2,000 episodes the entropy is
    above 0.993 of log 24 with probability 1 - 1e-5."""
    seed, n, task = int(torch.randint(2**31, (), generator=generator)), 2000, Forks()
    result = played(task, Expert(task, seed), n)
    assert result.successes == n
    lowest = 1 - stats.chi2.isf(1e-5, task.ways - 1) / (2 * n * math.log(task.ways))
    assert lowest > 0.99 and result.summary()["entropy"] > lowest
    # An expert that prefers a gap by 3 to 1 fails this.
    preferring = Forks(odds=((3.0, 1.0), (1.0,) * 3, (1.0,) * 4))
    assert played(preferring, Expert(preferring, seed), n).summary()["entropy"] < lowest


def test_demonstrations_pass_in_spite_of_gusts(tmp_path: Path, generator: torch.Generator) -> None:
    """A gust has a standard deviation of 0.003, the expert passes 0.025 from an obstacle or further: 8 deviations."""
    seed, task = int(torch.randint(2**31, (), generator=generator)), Forks()
    data = task.demonstrations(200, seed)
    assert data.episodes == data.metadata["expert_successes"] == 200
    assert data.metadata["expert_entropy"] > 1 - stats.chi2.isf(1e-5, 23) / (400 * math.log(24)) > 0.94
    assert np.linalg.norm(data.actions, axis=1).max() <= 1 + 1e-6
    starts = data.obs[data.episode_starts]
    assert (starts == np.array([0.0, 0.5], np.float32)).all()
    # What moved the point is not what was demonstrated: the gusts are in the observations alone.
    obs, actions = data.episode(0)
    gusts = np.diff(obs, axis=0) / task.speed - actions[:-1]
    inside = (obs[1:, 0] > 0) & (obs[1:, 0] < 1)
    assert 0.05 < gusts[inside].std() < 0.2
    data.save(tmp_path / "forks.npz")
    assert task_of(Demonstrations.load(tmp_path / "forks.npz").metadata) == task


def test_given_odds_are_taken(generator: torch.Generator) -> None:
    seed = int(torch.randint(2**31, (), generator=generator))
    odds = ((9.0, 1.0), (1.0, 1.0, 2.0), (1.0, 0.0, 0.0, 3.0))
    task = Forks(odds=odds)
    rows = played(task, Expert(task, seed), 2000).rows
    for row, wanted in enumerate(odds):
        counts = Counter(int(str(each["way"]).split("-")[row]) - 1 for each in rows)
        shares = np.array(wanted) / sum(wanted)
        assert all(counts[i] == 0 for i in np.flatnonzero(shares == 0))
        kept = np.flatnonzero(shares)
        assert shares_are(Counter({k: counts[i] for k, i in enumerate(kept)}), shares[kept]) > 1e-6
        even = np.full(len(kept), 1 / len(kept))
        assert shares_are(Counter({k: counts[i] for k, i in enumerate(kept)}), even) < 1e-6


def test_an_episode_of_the_expert_does_not_depend_on_the_others() -> None:
    task = Forks()
    np.testing.assert_array_equal(ForksExpert(task, 5, 3).goals[:2], ForksExpert(task, 5, 2).goals)
    assert not np.array_equal(ForksExpert(task, 5, 2).goals, ForksExpert(task, 6, 2).goals)


def test_entropy() -> None:
    assert entropy_of([]) == entropy_of([5]) == entropy_of([0, 3]) == 0
    assert math.copysign(1, entropy_of([5])) == 1, "and not -0.0, as a table would show it"
    assert entropy_of([4, 4, 4]) == pytest.approx(math.log(3))
    assert entropy_of([1, 3]) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    rows: list[dict[str, Any]] = [{"success": True, "way": way} for way in ("1-1-1", "2-1-1")]
    lost = {"success": False, "way": None}
    assert Forks().summarise([*rows, lost])["entropy"] == pytest.approx(math.log(2) / math.log(24))


# ---------------------------------------------------------------------------------------------- around it


def test_the_environment_plays_the_same_episode() -> None:
    env = gymnasium.make("cebm/Forks-v0", render_mode="rgb_array")
    obs, _ = env.reset(seed=1)
    batch, expert = BatchedForks(Forks()), ForksExpert(Forks(), 1, 1)
    expected, reward, over = batch.reset(1, 1)[0], 0.0, False
    while not over:
        np.testing.assert_array_equal(obs, expected)
        action = expert.act(expected[None])[0]
        obs, reward, over, cut, info = env.step(action)
        expected = batch.step(action[None])[0]
        assert not cut
    assert reward == 1 and info["success"] and info["way"] == batch.outcome()[0]["way"]
    picture = env.render()
    assert picture.shape == (256, 256, 3) and len(np.unique(picture.reshape(-1, 3), axis=0)) == 4


def test_the_contract_of_tasks_holds() -> None:
    check_task(Forks())


def test_its_scene_has_walls_and_both_players() -> None:
    task = Forks()
    scene = task.scene(Expert(task, 3), 4)
    assert scene["expert_successes"] == scene["successes"] == 4 and len(scene["walls"]) == 12
    for episode in scene["episodes"]:
        assert len(episode["policy"]) == task.steps + 1 == len(episode["aims"]) + 1
        assert episode["policy"][0] == [0, 0.5] and episode["policy"][-1][0] > FINISH
    assert all(moment["obs"] for moment in scene["moments"])


def test_a_metric_of_all_episodes_may_score(generator: torch.Generator) -> None:
    task = Forks()
    result = played(task, Expert(task, int(torch.randint(2**31, (), generator=generator))), 50)
    assert result.score("entropy") == result.summary()["entropy"] == result.overall["entropy"]
    assert "way" not in result.summary() and "entropy_se" not in result.summary()
