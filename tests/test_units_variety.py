"""Jitter, symmetries and padding: what training may change about the demonstrations."""

import re
from dataclasses import dataclass
from math import pi
from pathlib import Path

import numpy as np
import pytest
import torch

import cebm
from cebm import Demonstrations
from cebm.units import Gaussian, Layout, Mirror, PlanarMirror, PlanarPose, Relative, extended, perturbed
from test_units import trainer_of, trial_with, walks

BODY = ((9.27, 90.04), (-60.95, -1.3), (60.95, -1.3), (-0.27, 25.54), (-14.07, 122.82))
"""Five keypoints of Push-T's block in its own frame, some of them without a partner on the other side."""


def placed(piece, obs=4, actions=2):
    return piece.located(Layout.of("obs", obs), Layout.of("action", actions))


def test_gaussian_jitter_has_its_deviations_and_is_one_for_all_frames(generator):
    n = 20_000
    obs = torch.randn(n, 3, 4, generator=generator)
    before = obs.clone()
    moved = placed(Gaussian((2, 0), (0.5, 3.0))).perturb(obs, generator)
    assert torch.equal(obs, before)
    noise = moved - obs
    assert float(noise[..., [1, 3]].abs().max()) == 0
    torch.testing.assert_close(noise[:, 0], noise[:, 2], atol=1e-5, rtol=0)
    for column, deviation in ((2, 0.5), (0, 3.0)):
        z = (float(noise[:, 0, column].double().var()) / deviation**2 - 1) * (n / 2) ** 0.5
        assert abs(z) < 4.5
        assert abs(float(noise[:, 0, column].double().mean())) < 4.5 * deviation / n**0.5
    assert abs((float(noise[:, 0, 0].double().var()) / 0.5**2 - 1) * (n / 2) ** 0.5) > 4.5  # the test can fail


def test_planar_pose_is_one_rigid_motion_about_the_newest_centre(generator):
    n = 20_000
    obs = 50 * torch.randn(n, 2, 9, generator=generator, dtype=torch.float64)
    piece = placed(PlanarPose("1:7", shift=3.0, turn=0.03, angle=8), obs=9)
    moved = piece.perturb(obs, generator)
    assert torch.equal(moved[..., [0, 7]], obs[..., [0, 7]])
    before, after = (each[..., 1:7].unflatten(-1, (3, 2)).flatten(1, 2) for each in (obs, moved))
    torch.testing.assert_close(torch.cdist(before, before), torch.cdist(after, after), atol=1e-6, rtol=0)  # rigid
    shift, turn = after[:, 3:].mean(1) - before[:, 3:].mean(1), moved[:, 0, 8] - obs[:, 0, 8]
    for values, deviation in ((shift[:, 0], 3.0), (shift[:, 1], 3.0), (turn, 0.03)):
        assert abs((float(values.var()) / deviation**2 - 1) * (n / 2) ** 0.5) < 4.5
    # The points turn the way their angle does.
    arm, turned = before[:, 1] - before[:, 0], after[:, 1] - after[:, 0]
    cross = arm[:, 0] * turned[:, 1] - arm[:, 1] * turned[:, 0]
    torch.testing.assert_close(torch.atan2(cross, (arm * turned).sum(1)), turn, atol=1e-9, rtol=0)


def test_jitter_moves_the_state_and_leaves_absolute_targets(generator):
    """A relative target then leads back: state + action is where it was."""
    data = walks(generator)
    settings = {"history": 2, "horizon": 3, "relative": Relative((0, 1), (0, 1), 50.0)}
    plain = trainer_of(trial_with(**settings), data, data)
    varied = trainer_of(trial_with(**settings, jitter=Gaussian((0, 1), 5.0)), data, data)
    (obs, targets), (moved, changed) = plain._batch(0), varied._batch(0)
    units = varied.units
    states, others = (units.obs_box.denormalise(each).unflatten(1, (2, 3)) for each in (obs, moved))
    shift = (others - states)[:, 1]
    assert float(shift[:, :2].std()) > 2 and float(shift[:, 2].abs().max()) < 1e-3
    torch.testing.assert_close((others - states)[:, 0], shift, atol=1e-3, rtol=0)
    torch.testing.assert_close(50 * (changed - targets), -shift[:, :2].repeat(1, 3), atol=1e-3, rtol=0)
    assert not torch.equal(varied._batch(0)[0], moved)  # a new draw at each step
    assert torch.equal(varied.units.obs_box.centre, plain.units.obs_box.centre)


def test_jitter_teaches_the_way_back(generator):
    """Demonstrations go along a line and never leave it. A chunk that is relative leads back to it after a jitter."""
    random = np.random.default_rng(torch.randint(2**31, (), generator=generator).item())
    obs = np.stack([random.uniform(-1, 1, 400), np.zeros(400)], 1).astype(np.float32)
    actions = obs + np.float32([0.1, 0])
    off = np.stack([np.linspace(-0.5, 0.5, 9), np.full(9, 0.3)], 1).astype(np.float32)
    settings = {"trial": "mse", "steps": 80, "energy.width": 32, "batch_size": 64, "learning_rate": 1e-2}
    settings |= {"relative": Relative((0, 1), (0, 1), 0.5), "limits": (-2.0, 2.0)}
    led = cebm.fit(obs, actions, jitter=Gaussian(1, 0.3), **settings).act(off)
    assert np.abs(led[:, 1]).mean() < 0.1
    assert np.abs(cebm.fit(obs, actions, **settings).act(off)[:, 1]).mean() > 0.2


def test_jitter_is_off_when_a_policy_acts_and_when_it_is_validated(generator):
    data = walks(generator)
    trainer = trainer_of(trial_with(jitter=Gaussian(0, 50.0)), data, data)
    policy, (obs, _) = trainer.policy(), trainer.training[:5]
    torch.testing.assert_close(policy.units.inputs(torch.from_numpy(obs)), trainer.units.inputs(torch.from_numpy(obs)))
    assert trainer.validate(policy, 4, 8) == trainer.validate(policy, 4, 8)


@dataclass(frozen=True)
class Wrong:
    """Jitter that changes the shape."""

    def perturb(self, obs, generator):
        return obs[:, :, :1]


def test_a_jitter_of_ones_own_is_checked(generator):
    with pytest.raises(ValueError, match=r"Wrong.perturb gave \(2, 1, 1\)"):
        perturbed(torch.zeros(2, 3), 1, (Wrong(),), generator)
    data = walks(generator)
    for jitter, message in (
        (Gaussian(7, 1.0), "Gaussian: obs has 3 columns, there is no column 7"),
        (Gaussian((0, 1), (1.0, 2.0, 3.0)), "2 columns have 3 deviations"),
        (PlanarPose((0, 1, 2), 1.0), "PlanarPose: points have two columns each, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(trial_with(jitter=jitter), data, data)


# ---------------------------------------------------------------------------------------------- symmetries


def block(poses, body=BODY):
    """Keypoints in the world of a body at x, y and angle."""
    x, y, angle = poses.T
    turn = np.stack([np.stack([np.cos(angle), -np.sin(angle)], -1), np.stack([np.sin(angle), np.cos(angle)], -1)], -2)
    return (np.einsum("nij,kj->nki", turn, np.array(body)) + np.stack([x, y], -1)[:, None]).reshape(len(poses), -1)


def test_a_planar_mirror_gives_keypoints_of_the_mirrored_pose(generator):
    random = np.random.default_rng(torch.randint(2**31, (), generator=generator).item())
    poses = np.stack([random.uniform(0, 512, 50), random.uniform(0, 512, 50), random.uniform(-pi, pi, 50)], 1)
    obs = np.concatenate([block(poses), poses], 1)
    mirror = PlanarMirror("10:12", (0, 1), (256.0, 256.0), 3 * pi / 4, "0:10", BODY, 12).located(
        Layout.of("obs", 13), Layout.of("action", 2)
    )
    actions = random.uniform(0, 512, (50, 2))
    seen, done = mirror.transform(obs, actions)
    np.testing.assert_allclose(done, 512 - actions[:, ::-1])
    # The pose that is mirrored has these keypoints, by the body's own geometry.
    np.testing.assert_allclose(seen[:, :10], block(seen[:, 10:]), atol=1e-6)
    assert (np.abs(seen[:, 12]) <= pi).all()
    again = mirror.transform(seen, done)
    np.testing.assert_allclose(again[0][:, :12], obs[:, :12], atol=1e-6)
    np.testing.assert_allclose(again[1], actions)
    goal = np.concatenate([block(np.array([[256, 256, pi / 4]])), [[256, 256, pi / 4]]], 1)
    np.testing.assert_allclose(mirror.transform(goal, actions[:1])[0], goal, atol=1e-6)  # the goal is its own image


def test_the_settings_of_push_t_in_the_documentation_mirror_it(generator):
    text = (Path(__file__).parent.parent / "docs" / "units.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[-1]
    names = {}
    exec(code, names)
    assert names["PUSH_T"]["history"] == 2
    body = names["KEYPOINTS"]
    mirror = names["PUSH_T"]["symmetries"].located(Layout.of("obs", 20), Layout.of("action", 2))
    random = np.random.default_rng(torch.randint(2**31, (), generator=generator).item())
    x, y, angle = random.uniform(0, 512, 30), random.uniform(0, 512, 30), random.uniform(-pi, pi, 30)
    agent = random.uniform(0, 512, (30, 2))
    seen, done = mirror.transform(np.concatenate([block(np.stack([x, y, angle], 1), body), agent], 1), agent)
    np.testing.assert_allclose(seen[:, :18], block(np.stack([512 - y, 512 - x, pi / 2 - angle], 1), body), atol=1e-6)
    np.testing.assert_allclose(seen[:, 18:], done)
    np.testing.assert_allclose(done, 512 - agent[:, ::-1])


def test_a_mirror_reflects_and_swaps_columns():
    mirror = placed(Mirror(obs=(0, 1), actions=0, centre=2.0, swap_obs=(("0", 1), (2, 3))), actions=1)
    seen, done = mirror.transform(np.array([[1.0, 5, 7, 8]]), np.array([[3.0]]))
    assert seen.tolist() == [[-1, 3, 8, 7]] and done.tolist() == [[1]]
    with pytest.raises(ValueError, match="must pair each column of obs"):
        placed(Mirror(swap_obs=((0, 1), (1, 2))))


def test_symmetries_double_the_training_data_and_not_the_validation(generator):
    data, other = walks(generator), walks(generator, episodes=3)
    mirrors = (Mirror(obs=0, actions=0, centre=100.0), Mirror(obs=1, actions=1, centre=100.0))
    trainer = trainer_of(trial_with(symmetries=mirrors), data, other)
    assert len(trainer.training) == 4 * len(data.obs) and len(trainer.validation) == len(other.obs)
    four = trainer.training.demonstrations
    np.testing.assert_array_equal(four.obs[: data.steps], data.obs)
    np.testing.assert_allclose(four.obs[-data.steps :, :2], 200 - data.obs[:, :2], rtol=1e-6)
    assert four.episodes == 4 * data.episodes and four.episode_ends[-1] == 4 * data.steps
    assert trainer.units.obs_box.centre[0] == pytest.approx(100, abs=1e-3)


def test_a_symmetry_fills_the_half_that_was_not_demonstrated():
    """Actions are |state|, shown on the right alone; the mirror says what they are on the left."""
    obs = np.linspace(0.1, 1, 200, dtype=np.float32)[:, None]
    settings = {"trial": "mse", "steps": 80, "energy.width": 32, "batch_size": 64, "learning_rate": 1e-2}
    left = -obs[::20]
    known = cebm.fit(obs, np.abs(obs), symmetries=Mirror(obs=0), **settings).act(left)
    assert np.abs(known - np.abs(left)).mean() < 0.1
    assert np.abs(cebm.fit(obs, np.abs(obs), **settings).act(left) - np.abs(left)).mean() > 0.2


@dataclass(frozen=True)
class Shorter:
    """A symmetry that loses a step."""

    def transform(self, obs, actions):
        return obs[1:], actions[1:]


def test_a_symmetry_of_ones_own_is_checked(generator):
    with pytest.raises(ValueError, match=r"Shorter.transform: obs of episode 0 have shape \(19, 3\)"):
        extended(walks(generator), (Shorter(),))


# ---------------------------------------------------------------------------------------------- padding


def ends():
    """Two episodes that end at a place of their own, whose actions count the steps."""
    return Demonstrations.from_episodes(
        [(np.full((5, 1), e, "f4"), np.arange(5, dtype="f4")[:, None] + 100 * e) for e in range(2)]
    )


def test_windows_know_which_actions_are_padding():
    windows = ends().windows(1, 3)
    assert windows.within(0).tolist() == [0, 1, 2, 5, 6, 7]
    assert windows.within(1).tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert windows.within(2).tolist() == list(range(10))
    assert windows.padding([2, 3, 9]).tolist() == [[False] * 3, [False, False, True], [False, True, True]]


@pytest.mark.parametrize("padding, ends_at", [("drop", 2), (0, 2), (1, 3), (2, 4), (7, 4), ("keep", 4)])
def test_padding_beyond_what_is_asked_for_is_never_trained_on(padding, ends_at):
    trainer = trainer_of(trial_with(horizon=3, padding=padding), ends(), ends())
    seen = {tuple(row) for step in range(20) for row in trainer._batch(step)[1].tolist()}
    chunks = trainer.units.act_box.denormalise(torch.tensor(sorted(seen))).round().tolist()
    starts = [episode + step for episode in (0, 100) for step in range(ends_at + 1)]
    assert sorted(chunks) == [[min(a + k, a // 100 * 100 + 4) for k in range(3)] for a in starts]


def test_an_episode_without_windows_is_named():
    with pytest.raises(ValueError, match="padding='drop' leaves no training data: no episode has 6 steps"):
        trainer_of(trial_with(horizon=6, padding="drop"), ends(), ends())
    with pytest.raises(ValueError, match="padding=1 leaves no training data: no episode has 6 steps"):
        trainer_of(trial_with(horizon=7, padding=1), ends(), ends())
    with pytest.raises(ValueError, match="padding must be at least 0 steps, got -1"):
        trial_with(padding=-1)


def test_padding_teaches_to_stand_still_and_dropping_it_does_not():
    """Every action goes one further, up to the end of the episode."""
    obs = np.tile(np.arange(10, dtype=np.float32), 20)[:, None]
    episodes = np.arange(10, 201, 10)
    settings = {"trial": "mse", "steps": 80, "energy.width": 16, "batch_size": 64, "learning_rate": 1e-2}
    settings |= {"horizon": 4, "relative": Relative(0, 0), "limits": (-50.0, 50.0)}
    last = np.float32([[9.0]])
    np.testing.assert_allclose(cebm.fit(obs, obs + 1, episodes, **settings).act(last), 10, atol=0.9)
    moving = cebm.fit(obs, obs + 1, episodes, padding="drop", **settings).act(last)
    np.testing.assert_allclose(moving, [[10, 11, 12, 13]], atol=0.9)


def test_masked_padding_is_filled_with_other_actions():
    trainer = trainer_of(trial_with(horizon=3, padding="mask"), ends(), ends())
    rows = torch.cat([trainer._batch(step)[1] for step in range(40)])
    chunks = trainer.units.act_box.denormalise(rows).round()
    last = chunks[chunks[:, 0] == 4]  # the last step of the first episode: two actions are beyond its end
    assert len(last) > 50 and len(last[:, 1].unique()) > 5 and len(last[:, 2].unique()) > 5
    first = chunks[chunks[:, 0] == 0]
    assert (first == torch.tensor([0.0, 1, 2])).all()
