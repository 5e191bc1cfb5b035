"""Units: relative actions, limits that move with the observation, and what they do to a policy and its training."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import cebm
from cebm import Adam, Demonstrations, Inputs, Job, Trainer, vary
from cebm.commands import train_command
from cebm.parts import Part
from cebm.recipes import TRIALS
from cebm.runs import load_job, resume, train
from cebm.settings import from_json, to_json
from cebm.spaces import Box
from cebm.units import Angle, Conversion, Form, Layout, Relative, Units, from_words

SMALL = {"energy.tilt.width": 16, "energy.base.width": 16, "batch_size": 32}


def walks(generator, episodes=12, length=20, columns=3, actions=2):
    """Episodes whose states are of the order of 100, and actions near the first columns of the state."""
    random = np.random.default_rng(torch.randint(2**31, (), generator=generator).item())
    made = []
    for _ in range(episodes):
        obs = 100 + np.cumsum(random.normal(size=(length, columns)), 0)
        made.append((obs.astype(np.float32), (obs[:, :actions] + random.normal(size=(length, actions))).astype("f4")))
    return Demonstrations.from_episodes(made)


def trial_with(**inputs):
    return vary(TRIALS["steady"], inputs=Inputs("standardise", smoothing=0.05, **inputs), **SMALL)


def trainer_of(trial, training, validation, limits=None):
    return Trainer(trial, training, validation, 0, limits=limits, steps=100)


def units_of(generator, **inputs):
    data = walks(generator)
    trainer = trainer_of(trial_with(**inputs), data, data)
    return trainer.units, trainer.training[:]


# ---------------------------------------------------------------------------------------------- relative actions


def test_a_scale_that_some_samplers_cannot_follow_is_said(generator):
    data = walks(generator)
    trainers = [trainer_of(trial_with(relative=Relative((0, 1), (0, 1), scale)), data, data) for scale in (0.5, 64.0)]
    reach = float(trainers[0].units.targets(*map(torch.from_numpy, (data.actions, data.obs))).abs().max())
    assert trainers[0].notes[1].startswith(f"actions reach {reach:.3g} in these units") and reach > 2
    assert trainers[0].units.act_box.limit == pytest.approx(1.1 * reach, rel=1e-5)
    assert len(trainers[1].notes) == 1 and trainers[1].units.act_box.margin == 0.05


@pytest.mark.parametrize("scale", [None, 64.0])
def test_relative_actions_are_differences_from_the_newest_frame(generator, scale):
    units, (obs, actions) = units_of(generator, history=2, horizon=4, relative=Relative((0, 1), (1, 0), scale))
    obs, actions = torch.from_numpy(obs), torch.from_numpy(actions)
    inside = units.targets(actions, obs)
    wanted = actions.reshape(-1, 4, 2) - obs[:, None, [4, 3]]
    if scale is None:
        assert float(inside.amax()) == pytest.approx(1, abs=1e-5) and float(inside.amin()) == pytest.approx(
            -1, abs=1e-5
        )
        low, high = wanted.flatten(0, 1).amin(0), wanted.flatten(0, 1).amax(0)
        wanted = (wanted - (low + high) / 2) / ((high - low) / 2)
    else:
        wanted = wanted / 64
        assert units.act_box.limit >= float(inside.abs().max())
    torch.testing.assert_close(inside, wanted.flatten(1), atol=1e-5, rtol=0)
    back = units.actions(inside.unsqueeze(1), obs)[:, 0]
    torch.testing.assert_close(back, actions, atol=1e-4, rtol=0)


def test_some_columns_may_be_relative_and_others_not(generator):
    units, (obs, actions) = units_of(generator, relative=Relative(1, 2))
    plain, _ = units_of(generator)
    obs, actions = torch.from_numpy(obs), torch.from_numpy(actions)
    assert units.conversion.origins == (-1, 2)
    features = units.features(actions, obs)
    torch.testing.assert_close(features, actions - torch.stack([torch.zeros(len(obs)), obs[:, 2]], 1))
    assert plain.conversion.plain
    units, _ = units_of(generator, relative=Relative(0, 0))
    assert units.conversion.origins == (0, -1)
    torch.testing.assert_close(units.features(actions, obs)[:, 1], actions[:, 1])
    units, _ = units_of(generator, relative=Relative(1, 0))
    torch.testing.assert_close(units.features(actions, obs), actions - obs[:, [0, 0]] * torch.tensor([0, 1]))


def test_limits_of_relative_actions_move_with_the_observation(generator):
    trial = trial_with(horizon=2, relative="Relative((0, 1), (0, 1), 64)")
    data = walks(generator)
    trainer = trainer_of(trial, data, data, limits=([90.0, 95.0], [110.0, 105.0]))
    trainer.step()
    policy = trainer.policy()
    obs = np.array([[95, 100, 100], [130, 60, 100], [100, 100, 100]], np.float32)
    problem = policy.problem(obs)
    assert problem.low.shape == problem.high.shape == (3, 4)
    torch.testing.assert_close(problem.low[1], torch.tensor([-40.0, 35, -40, 35]) / 64)
    far = torch.full((3, 5, 4), 1e3)
    np.testing.assert_allclose(policy.actions(problem.clip(far), obs)[:, 0], [[110, 105] * 2] * 3, rtol=1e-5)
    np.testing.assert_allclose(policy.actions(problem.clip(-far), obs)[:, 4], [[90, 95] * 2] * 3, rtol=1e-5)
    with pytest.raises(ValueError, match="obs must be given: these actions are relative to it"):
        policy.units.actions(torch.zeros(3, 1, 4))
    acted = policy.act(obs)
    assert (acted >= [90, 95] * 2).all() and (acted <= [110, 105] * 2).all()
    proposal = policy.propose(obs, candidates=6)
    assert proposal.candidates.shape == (3, 6, 4) and bool((proposal.candidates <= 110).all())


def test_without_limits_relative_actions_stay_in_the_range_of_the_data(generator):
    data = walks(generator)
    policy = trainer_of(trial_with(relative=Relative("0:2", "0:2")), data, data).policy()
    box = Box.fit(data.actions)
    low, high = policy.limits
    torch.testing.assert_close(low, box.centre - 1.1 * box.scale)
    torch.testing.assert_close(high, box.centre + 1.1 * box.scale)


def test_a_saved_policy_with_relative_actions_acts_the_same(generator, tmp_path):
    data = walks(generator)
    trainer = trainer_of(trial_with(history=2, horizon=3, relative=Relative((0, 1), (0, 1))), data, data)
    for _ in range(3):
        trainer.step()
    policy = trainer.policy()
    policy.save(tmp_path / "policy")
    loaded, obs = cebm.load(tmp_path / "policy"), trainer.training[:7][0]
    assert loaded.conversion == policy.conversion and loaded.columns == (3, 2)
    np.testing.assert_array_equal(loaded.act(obs), policy.act(obs))
    np.testing.assert_array_equal(
        loaded.act(obs, previous=np.full((7, 6), 100.0)), policy.act(obs, previous=np.full((7, 6), 100.0))
    )


def test_previous_actions_and_warm_starts_are_in_raw_units(generator):
    data = walks(generator)
    policy = trainer_of(trial_with(horizon=2, relative=Relative((0, 1), (0, 1), 10.0)), data, data).policy()
    problem = policy.problem(np.array([[100.0, 90, 0]]), previous=[[101.0, 92, 103, 94]])
    torch.testing.assert_close(problem.previous, torch.tensor([[0.1, 0.2, 0.3, 0.4]]))


def test_a_run_with_relative_actions_resumes_bit_for_bit(generator, tmp_path):
    walks(generator).save(tmp_path / "data.npz")
    inputs = {"relative": Relative((0, 1), (0, 1)), "jitter": "Gaussian((0, 1), 0.5)", "padding": "mask", "horizon": 3}
    trial = vary(trial_with(**inputs), optimiser=Adam(batch_size=32))  # a rate that does not follow the run's length
    job = Job(
        "mine",
        trial,
        data=str(tmp_path / "data.npz"),
        steps=6,
        checkpoint_every=3,
        log_every=1,
        evaluate_every=6,
    )
    whole = train(job, tmp_path / "whole")
    train(replace(job, steps=3), tmp_path / "half")
    again = resume(tmp_path / "half", steps=6)
    losses = [[row["loss"] for row in each.metrics if row["kind"] == "train"] for each in (whole, again)]
    assert losses[0][-3:] == losses[1][-3:] and len(losses[0]) == 6
    record = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert any("relative to obs columns 0, 1" in line for line in record["units"])


def test_relative_actions_generalise_to_where_no_demonstration_was(generator):
    """The action is one unit beyond the state, whatever the state: told in differences, that holds everywhere."""
    random = np.random.default_rng(torch.randint(2**31, (), generator=generator).item())
    obs = random.uniform(0, 10, (200, 1)).astype(np.float32)
    actions = obs + 1 + random.normal(0, 0.02, obs.shape).astype(np.float32)
    far = np.array([[100.0], [-60.0]], np.float32)
    settings = {"trial": "mdn", "steps": 60, "limits": (-1e3, 1e3), "energy.width": 16, "batch_size": 64}
    policy = cebm.fit(obs, actions, relative=Relative(0, 0), **settings)
    assert np.abs(policy.act(far) - far - 1).max() < 1
    assert np.abs(cebm.fit(obs, actions, **settings).act(far) - far - 1).max() > 5


@pytest.mark.parametrize(
    ("relative", "message"),
    [
        (Relative((0, 1), 0), "2 columns of an action have 1 columns as their origin"),
        (Relative(0, 3), "Relative: obs has 3 columns, there is no column 3"),
        (Relative("speed", 0), "Relative: action has no column 'speed'"),
        ((Relative(0, 0), Relative(0, 1)), r"the columns \(0,\) do not fit"),
    ],
)
def test_relative_actions_that_fit_no_columns_are_named(generator, relative, message):
    data = walks(generator)
    with pytest.raises(ValueError, match=message):
        trainer_of(trial_with(relative=relative), data, data)


def test_units_are_checked_against_their_boxes():
    box = Box.from_bounds([0.0, 0], [1.0, 1])
    with pytest.raises(ValueError, match="obs_box has 2 dimensions, the units have 1 × 3"):
        Units(box, box, 1, 1, Conversion(Form(3), Form(2)))


# ---------------------------------------------------------------------------------------------- settings


def test_settings_of_units_are_json_and_words():
    trial = trial_with(
        relative="Relative('0:2', (0, 1), 64)",
        jitter=("Gaussian((0, 1), 5)", "PlanarPose('2:20', shift=3.0, turn=0.03)"),
        symmetries="PlanarMirror(points=(0, 1), actions=(0, 1), through=(256, 256), line=2.36)",
    )
    assert trial.inputs.relative == (Relative("0:2", (0, 1), 64.0),)
    assert [type(each).__name__ for each in trial.inputs.jitter] == ["Gaussian", "PlanarPose"]
    assert from_json(json.loads(json.dumps(to_json(trial))), type(trial)) == trial
    assert vary(TRIALS["steady"], relative=Relative(slice(0, 2), (0, 1))).inputs.relative == (Relative("0:2", (0, 1)),)


def test_settings_of_units_are_given_on_the_command_line(generator, tmp_path, capsys):
    walks(generator).save(tmp_path / "data.npz")
    words = f"""mdn --steps 1 --data {tmp_path / "data.npz"} --out {tmp_path / "run"} --energy.width 8
        --inputs.padding drop
        --inputs.horizon 2 --inputs.action-scaling robust --inputs.relative Relative((0,1),'0:2')
        --inputs.jitter Gaussian((0,1),5) Gaussian(2,0.5) --inputs.obs-kinds Angle(2,period=360)""".split()
    train_command(words)()
    inputs = load_job(tmp_path / "run").trial.inputs
    assert inputs.relative == (Relative((0, 1), "0:2"),) and len(inputs.jitter) == 2 and inputs.padding == "drop"
    assert inputs.obs_kinds == (Angle(2, 360.0),) and inputs.action_scaling == "robust"
    assert "action columns 0, 1: relative to obs columns 0, 1\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="inputs: jitter: there is no piece 'Gausian'"):
        train_command([*words[:-1], "Angle(2)", "--inputs.jitter", "Gausian(0,1)", "--out", str(tmp_path / "no")])()


@dataclass(frozen=True)
class Own:
    """A piece of the user's."""

    size: float = 1.0

    def perturb(self, obs, generator):
        return obs + self.size


def test_words_name_ones_own_pieces_by_their_module(unchecked_shapes):
    assert from_words(f"{__name__}.Own(size=2.0)", "jitter") == Own(2.0)
    for words, message in (
        ("Gaussian", "a name with its settings in brackets"),
        ("Gaussian(", "is no piece"),
        ("Gausian(1, 2)", "there is no piece 'Gausian'"),
        ("Gaussian(0, -1)", "deviation must be at least 0"),
        ("Gaussian(0, open('x'))", "its settings: columns, deviation"),
        ("nowhere.Own()", "import nowhere first"),
        ("annotations()", "there is no piece"),
    ):
        with pytest.raises(ValueError, match=message):
            from_words(words, "jitter")
    with pytest.raises(ValueError, match="jitter must be objects with a method `perturb`"):
        Inputs(jitter=Relative(0, 0))


def test_columns_by_index_slice_and_name():
    layout = Layout.of("obs", 9, [Part("agent", (2,), ("x", "y")), Part("points", (3, 2)), Part("goal", (1,), ("x",))])
    for columns, wanted in (
        (-1, (8,)),
        ("2:8:2", (2, 4, 6)),
        ("-2:", (7, 8)),
        ("points", (2, 3, 4, 5, 6, 7)),
        ("points[1:3]", (3, 4)),
        (("y", "goal.x", 3), (1, 8, 3)),
        ("agent,points[-1]", (0, 1, 7)),
    ):
        assert layout.columns(columns, "Gaussian") == wanted
    assert layout.name(1) == "obs column 1 (agent.y)"
    for columns, message in (
        (9, "Gaussian: obs has 9 columns, there is no column 9"),
        ("x", "obs has no column 'x'; there are agent, "),
        ("5:5", "'5:5' holds no columns"),
        ((0, "agent"), r"obs column 0 \(agent.x\) comes twice"),
        ("points[6]", "obs part 'points' has 6 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            layout.columns(columns, "Gaussian")


def test_parts_of_the_data_name_columns_and_stay_with_the_policy(generator, tmp_path):
    data = walks(generator)
    parts = (Part("agent", (2,), ("x", "y")), Part("wrist", (1,)))
    named = replace(data, parts=parts, action_parts=(Part("place", (2,), ("x", "y")),))
    trial = trial_with(
        obs_kinds="Angle('wrist')", relative="Relative('place', 'agent')", jitter="Gaussian('agent.y', 2)"
    )
    trainer = trainer_of(trial, named, named)
    assert trainer.notes[0].startswith("obs column 2 (wrist): angle")
    assert (
        trainer.notes[1] == "action columns 0 (place.x), 1 (place.y): relative to obs columns 0 (agent.x), 1 (agent.y)"
    )
    assert trainer.spec.parts == (parts[0], Part("wrist", (2,)))
    trainer.policy().save(tmp_path / "policy")
    assert cebm.load(tmp_path / "policy").parts == parts
    joined = trainer_of(trial_with(obs_kinds="Angle((1, 2))"), named, named)
    assert joined.spec.parts == (Part("obs", (5,)),)
