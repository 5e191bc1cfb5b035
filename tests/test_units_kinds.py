"""Kinds of columns: angles, quaternions, categories, constants, heavy tails. Round trips, trainings, files, errors."""

import warnings
from dataclasses import replace
from math import pi

import numpy as np
import pytest
import torch

import cebm
from cebm import Demonstrations, Inputs, Job
from cebm.runs import load_job, resume, train
from cebm.settings import StorageError
from cebm.units import Angle, Category, Constant, HeavyTailWarning, Kind, Quaternion, Relative, Robust
from test_units import trainer_of, trial_with, walks

QUICK = {"steps": 60, "energy.width": 32, "batch_size": 64, "learning_rate": 1e-2}


def random_of(generator):
    return np.random.default_rng(torch.randint(2**31, (), generator=generator).item())


def unit_quaternions(generator, n):
    values = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return values / values.norm(dim=-1, keepdim=True)


CASES = {
    "angle": (Angle((0, 1)), lambda g: 2 * pi * torch.rand(50, 2, generator=g, dtype=torch.float64) - pi, 4),
    "degrees": (Angle(0, 360.0), lambda g: 360 * torch.rand(50, 1, generator=g, dtype=torch.float64), 2),
    "quaternion": (Quaternion((0, 1, 2, 3)), lambda g: unit_quaternions(g, 50), 4),
    "w first": (Quaternion((0, 1, 2, 3), "first"), lambda g: unit_quaternions(g, 50), 4),
    "category": (Category((0, 1)), lambda g: 3.0 * torch.randint(-1, 2, (50, 2), generator=g).double(), 6),
    "constant": (Constant((0, 1)), lambda g: torch.tensor([[0.1, -7.0]], dtype=torch.float64).expand(50, 2), 0),
    "kept": (Constant(0, keep=True), lambda g: torch.full((50, 1), 0.1, dtype=torch.float64), 1),
    "robust": (Robust((0, 1)), lambda g: torch.randn(50, 2, generator=g, dtype=torch.float64).exp() ** 3, 2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kind_keeps_its_contract(name, dtype, generator):
    kind, values, features = CASES[name]
    raw = values(generator).to(dtype)
    before = raw.clone()
    fitted = kind.fitted(raw, name)
    assert isinstance(fitted, Kind) and type(fitted) is type(kind)
    assert fitted.fitted(raw, name) == fitted  # what is known stays
    inside = fitted.inside(raw)
    assert inside.shape == (50, features) and inside.dtype == dtype and torch.equal(raw, before)
    if fitted.fixed:
        assert bool((inside.abs() <= 1 + 1e-6).all())
    back = fitted.outside(inside)
    assert back.dtype == dtype
    tight = 1e-4 if dtype == torch.float32 else 1e-9
    away = fitted.difference(back, raw) / (1 + raw.abs())
    assert float(away.abs().max()) < tight
    torch.testing.assert_close(fitted.settled(back), back, atol=tight, rtol=tight)
    low, high = fitted.bounds(raw - 1, raw + 1)
    assert low.shape == inside.shape and bool((low <= inside).all()) and bool((inside <= high).all())
    # More axes in front, any features at all.
    wild = 3 * torch.randn(4, 5, features, generator=generator, dtype=dtype)
    out = fitted.outside(wild)
    assert out.shape == (4, 5, raw.shape[1]) and bool(torch.isfinite(out).all())
    torch.testing.assert_close(fitted.settled(out), out, atol=tight, rtol=tight)


def test_an_angle_is_the_same_a_turn_later_and_stays_in_its_period(generator):
    angle = Angle(0).fitted(torch.tensor([[-3.0], [3.0]]), "")
    assert angle.start == -pi
    assert Angle(0).fitted(torch.tensor([[0.5], [6.0]]), "").start == 0
    assert Angle(0, 360.0).fitted(torch.tensor([[-0.1], [400.0]]), "").start == -180
    assert Angle(0, start=1.0).fitted(torch.zeros(1, 1), "").start == 1
    values = 20 * torch.randn(100, 1, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(angle.inside(values), angle.inside(values + 2 * pi))
    settled = angle.settled(values)
    assert bool((settled >= -pi).all()) and bool((settled < pi).all())
    torch.testing.assert_close(settled.sin(), values.sin())
    edge = torch.tensor([[-1e-9], [-0.0], [pi], [-pi]])  # rounding must not leave the period
    for start in (0.0, -pi):
        wrapped = replace(angle, start=start).settled(edge)
        assert bool((wrapped >= start).all()) and bool((wrapped < start + 2 * pi).all())
    assert float(angle.difference(torch.tensor([[-3.1]]), torch.tensor([[3.1]]))) == pytest.approx(
        2 * pi - 6.2, abs=1e-5
    )


def test_two_quaternions_of_one_rotation_are_one(generator):
    values = unit_quaternions(generator, 20)
    for kind, place in ((Quaternion((0, 1, 2, 3)), 3), (Quaternion((0, 1, 2, 3), "first"), 0)):
        torch.testing.assert_close(kind.inside(values), kind.inside(-values))
        assert bool((kind.inside(values)[:, place] >= 0).all())
        assert float(kind.difference(values, -values).abs().max()) < 1e-12
        out = kind.outside(torch.zeros(1, 4))
        assert out.norm() == 1 and out[0, place] == 1
    with pytest.raises(ValueError, match="Quaternion of obs columns 0, 1, 2: a quaternion has 4 columns"):
        trainer_of(trial_with(obs_kinds=Quaternion((0, 1, 2))), walks(generator), walks(generator))
    with pytest.raises(ValueError, match="these are no unit quaternions"):
        trainer_of(trial_with(obs_kinds=Quaternion((0, 1, 2, 3))), walks(generator, columns=4), walks(generator))


def test_a_category_is_one_hot_inside_and_a_class_outside():
    kind = Category(0).fitted(torch.tensor([[2.0], [7.0], [2.0], [-1.0]]), "")
    assert kind.classes == (-1, 2, 7)
    assert kind.inside(torch.tensor([[2.0], [6.0]])).tolist() == [[-1, 1, -1], [-1, -1, 1]]  # 6 is nearest to 7
    assert kind.outside(torch.tensor([[0.1, 0.3, 0.2]])).tolist() == [[2]]
    with pytest.raises(ValueError, match="Category of x: 3 is none of the classes 1, 2"):
        Category(0, (1.0, 2.0)).fitted(torch.tensor([[3.0]]), "Category of x")
    with pytest.raises(ValueError, match="300 different values are too many"):
        Category(0).fitted(torch.arange(300.0)[:, None], "")


# ---------------------------------------------------------------------------------------------- trainings


def wrapped(angle):
    return (angle + pi) % (2 * pi) - pi


def test_an_action_angle_is_learned_across_the_end_of_its_period(generator):
    obs = random_of(generator).uniform(-1, 1, (400, 1)).astype(np.float32)
    actions = wrapped(pi + 0.5 * obs)
    near = np.linspace(-0.1, 0.1, 21, dtype=np.float32)[:, None]

    def error(**settings):
        chosen = cebm.fit(obs, actions, trial="mse", **settings, **QUICK).act(near)
        assert (np.abs(chosen) <= pi * 1.2).all()
        return np.abs(wrapped(chosen - pi - 0.5 * near)).mean()

    assert error(action_kinds=Angle(0)) < 0.1
    assert error() > 0.5


def test_an_observed_angle_has_no_seam(generator):
    """What is next to −π is next to π: the policy saw no angle above 2.8."""
    random = random_of(generator)
    angle = random.uniform(-pi, 2.8, (400, 1)).astype(np.float32)
    actions = np.sin(angle)
    unseen = np.linspace(2.9, 3.1, 9, dtype=np.float32)[:, None]

    def difference(**settings):
        policy = cebm.fit(angle, actions, trial="mse", **settings, **{**QUICK, "steps": 10})
        return np.abs(policy.act(unseen) - policy.act(unseen - 2 * np.float32(pi))).max()

    assert difference(obs_kinds=Angle(0)) < 1e-4
    assert difference() > 1e-2


def test_a_category_is_never_between_two_classes(generator):
    """The class is 5 left of 0 and 0 right of it, and never the 1 that lies between."""
    random = random_of(generator)
    obs = random.uniform(-1, 1, (400, 1)).astype(np.float32)
    actions = np.where(obs < 0, 5.0, 0.0).astype(np.float32)
    actions[:20] = 1.0
    near = np.linspace(-0.2, 0.2, 41, dtype=np.float32)[:, None]
    policy = cebm.fit(obs, actions, trial="mse", action_kinds="Category(0)", **QUICK)
    chosen = policy.act(near)
    assert set(chosen.ravel().tolist()) <= {0.0, 1.0, 5.0} and {0.0, 5.0} <= set(chosen.ravel().tolist())
    assert (chosen == np.where(near < 0, 5.0, 0.0)).mean() > 0.75
    plain = cebm.fit(obs, actions, trial="mse", **QUICK).act(near)
    assert ((plain > 0.5) & (plain < 4.5)).any()


def test_a_constant_action_comes_out_exactly(generator):
    data = walks(generator, actions=3)
    actions = data.actions.copy()
    actions[:, 1] = 0.1
    data = replace(data, actions=actions)
    exact = trainer_of(trial_with(horizon=2), data, data)
    assert exact.spec.action == 2 and exact.notes == ("action column 1: constant (values [0.1])",)
    exact.step()
    acted = exact.policy().act(data.obs[:9])
    assert acted.shape == (9, 6) and (acted[:, [1, 4]] == np.float32(0.1)).all()
    proposal = exact.policy().propose(data.obs[:2], candidates=5)
    assert bool((proposal.candidates[..., [1, 4]] == np.float32(0.1)).all())
    learned = trainer_of(trial_with(horizon=2, constants="learn"), data, data)
    assert learned.spec.action == 3 and learned.units.conversion.plain
    assert (learned.policy().act(data.obs[:9])[:, [1, 4]] != np.float32(0.1)).any()


def test_an_action_that_is_constant_altogether_is_learned_as_one_column(generator):
    policy = cebm.fit(random_of(generator).random((50, 2)), np.full((50, 2), 3.0), steps=2, **{"energy.base.width": 8})
    assert policy.energy.act_dim == 1
    np.testing.assert_array_equal(policy.act(np.zeros((4, 2))), np.full((4, 2), 3.0))


def test_a_constant_that_is_declared_and_changes_is_named(generator):
    data = walks(generator)
    with pytest.raises(ValueError, match="Constant of action column 0: it is not constant, it goes from"):
        trainer_of(trial_with(action_kinds=Constant(0)), data, data)
    obs = data.obs.copy()
    obs[:, 2] = 4.0
    still = replace(data, obs=obs)
    assert trainer_of(trial_with(obs_kinds=Constant(2)), still, still).spec.frame == 2


def heavy(generator, n=2000):
    """y has a Student-t distribution with one degree of freedom; x tells whether it is above the median."""
    random = random_of(generator)
    y = random.standard_t(1, (n, 1))
    return (y > 0) + 0.3 * random.normal(size=(n, 1)), y


def test_outliers_are_named_and_robust_scaling_is_not_squeezed(generator):
    x, y = heavy(generator)
    data = Demonstrations.from_arrays(x, y, np.arange(1, len(x) + 1))
    with pytest.warns(
        HeavyTailWarning, match="action column 0: outliers stretch its range to .* action_scaling='robust'"
    ):
        squeezed = trainer_of(trial_with(), data, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeavyTailWarning)
        robust = trainer_of(trial_with(action_scaling="robust"), data, data)
        kind = trainer_of(trial_with(action_kinds=Robust(0)), data, data)
        trainer_of(trial_with(), walks(generator), walks(generator))
    assert robust.units.conversion == kind.units.conversion
    spreads = [
        float(
            np.subtract(
                *np.quantile(each.units.targets(*map(torch.from_numpy, (data.actions, data.obs))), [0.75, 0.25])
            )
        )
        for each in (squeezed, robust)
    ]
    assert spreads[0] < 0.04 and spreads[1] > 0.1
    with pytest.warns(HeavyTailWarning, match="obs column 0: outliers"):
        trainer_of(trial_with(), replace(data, obs=data.actions, actions=data.obs), data)
    swapped = replace(data, obs=data.actions, actions=data.obs)
    assert trainer_of(replace(trial_with(), inputs=Inputs("robust")), swapped, data).units.conversion.obs.kinds


@pytest.mark.slow
def test_robust_scaling_finds_the_information_that_min_max_scaling_loses(generator):
    """0.57 nats are there. Of 8000 rows the largest is about 5000 times the middle one."""
    x, y = heavy(generator, 8000)
    data = Demonstrations.from_arrays(x, y, np.arange(1, len(x) + 1)).split(0.5, 0)
    settings = {"learning_rate": 2e-3, "energy.width": 64, "batch_size": 128, "energy.init": "torch"}
    found = {}
    for scaling in ("min-max", "robust"):
        trial = cebm.vary(cebm.TRIALS["in-batch"], action_scaling=scaling, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeavyTailWarning)
            trainer = cebm.Trainer(trial, *data, steps=400)
        for _ in range(400):
            trainer.step()
        found[scaling] = trainer.validate(trainer.policy(), 2, 1024)["mi_bound"]
    assert found["robust"] > 0.4 and found["min-max"] < 0.2


# ---------------------------------------------------------------------------------------------- together, and files


def mixed(generator, episodes=8, length=12):
    """Observations: x, angle, class, quaternion. Actions: class, x, constant, angle."""
    random, made = random_of(generator), []
    for _ in range(episodes):
        turn = unit_quaternions(generator, length).numpy()
        plain = random.normal(size=(length, 2))
        angle = random.uniform(-pi, pi, (length, 2))
        classes = random.integers(0, 3, (length, 2))
        obs = np.concatenate([plain[:, :1], angle[:, :1], classes[:, :1], turn], 1)
        actions = np.concatenate([classes[:, 1:], plain[:, :1] + 1, np.full((length, 1), 0.3), angle[:, 1:]], 1)
        made.append((obs.astype("f4"), actions.astype("f4")))
    return Demonstrations.from_episodes(made)


MIXED = {
    "obs_kinds": (Angle(1), Category(2), Quaternion("3:7")),
    "action_kinds": (Angle(3), Category(0)),
    "relative": (Relative(1, 0), Relative(3, 1)),
}


def test_all_kinds_together_round_trip_save_and_load(generator, tmp_path):
    data = mixed(generator)
    trainer = trainer_of(trial_with(history=2, horizon=3, **MIXED), data, data)
    assert (trainer.spec.frame, trainer.spec.action) == (1 + 2 + 3 + 4, 3 + 1 + 2)
    obs, actions = map(torch.from_numpy, trainer.training[:])
    inside = trainer.units.targets(actions, obs)
    assert bool((inside.abs() <= 1.001).all())
    back = trainer.units.actions(inside.unsqueeze(1), obs)[:, 0]
    assert float(trainer.units.difference(back, actions).abs().max()) < 1e-4
    torch.testing.assert_close(back[:, ::4], actions[:, ::4], atol=0, rtol=0)  # classes
    torch.testing.assert_close(back[:, 2::4], actions[:, 2::4], atol=0, rtol=0)  # the constant
    for _ in range(2):
        trainer.step()
    policy = trainer.policy()
    policy.save(tmp_path / "policy")
    loaded, seen = cebm.load(tmp_path / "policy"), trainer.training[:5][0]
    np.testing.assert_array_equal(loaded.act(seen), policy.act(seen))
    assert loaded.columns == (7, 4) and repr(loaded).count("2×7 observation → 3×4 action columns")
    acted = loaded.act(seen).reshape(-1, 4)
    assert set(acted[:, 0].tolist()) <= {0, 1, 2} and (acted[:, 2] == np.float32(0.3)).all()
    assert (np.abs(acted[:, 3]) <= pi).all()
    with pytest.raises(ValueError, match=r"obs must be \[14\] or \[batch, 14\], got \(5, 20\)"):
        policy.act(np.zeros((5, 20)))
    with pytest.raises(ValueError, match="obs has NaN or infinite values in dimension 9"):
        policy.act(np.where(np.arange(14) == 9, np.nan, 0.5))
    runner = cebm.Runner(policy)
    assert runner.act(data.obs[0]).shape == (4,)
    assert policy.candidates_within(1000.0, 1) >= 1


def test_a_run_with_kinds_resumes_and_says_what_it_takes_for_what(generator, tmp_path, capsys):
    mixed(generator).save(tmp_path / "data.npz")
    trial = cebm.vary(trial_with(**MIXED), optimiser=cebm.Adam(batch_size=16))
    said = []
    job = Job(
        "kinds", trial, data=str(tmp_path / "data.npz"), steps=4, checkpoint_every=2, evaluate_every=2, log_every=1
    )
    whole = train(job, tmp_path / "whole", say=said.append)
    train(replace(job, steps=2), tmp_path / "half")
    again = resume(tmp_path / "half", steps=4)
    assert [row["loss"] for row in whole.metrics if "loss" in row] == [
        row["loss"] for row in again.metrics if "loss" in row
    ]
    assert load_job(tmp_path / "half") == replace(job, steps=4)
    assert said[0] == "obs column 1: angle (period 6.28319, start -3.14159)"
    assert "action column 2: constant (values [0.3])" in said
    assert "action column 3: relative to obs column 1" in said


def test_a_policy_whose_units_make_no_sense_is_refused(generator, tmp_path):
    import json

    from cebm.storage import load_bundle, save_bundle

    data = mixed(generator)
    trainer_of(trial_with(**MIXED), data, data).policy().save(tmp_path / "good")
    header, tensors = load_bundle(tmp_path / "good", "cebm.policy", 4)
    fields = {name: header[name] for name in ("energy", "acting", "spec", "obs_margin", "act_margin", "units")}
    for change, message in (
        (lambda units: units["obs"].update(size=9), "obs has 9 columns, its parts have 7"),
        (lambda units: units["obs"].update(kinds=[]), "obs_box has 10 dimensions, the units have 1 × 7"),
        (lambda units: units["obs"]["kinds"][0].update(columns=[7]), "Angle: obs has 7 columns, there is no column 7"),
        (lambda units: units["obs"]["kinds"][0].update(columns="x"), "must be located first"),
        (lambda units: units["relative"][0].update(origin=[12]), "the origin"),
        (lambda units: units["action"].update(kinds=[{"type": "os:path"}]), "units"),
    ):
        wrong = json.loads(json.dumps(fields))
        change(wrong["units"])
        save_bundle(tmp_path / "wrong", "cebm.policy", 4, wrong, tensors)
        with pytest.raises(StorageError, match=message):
            cebm.load(tmp_path / "wrong")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_kinds": (Category(0),), "relative": Relative(0, 0)}, "Relative does not go with Category"),
        ({"obs_kinds": (Angle(1), Category((0, 1)))}, "obs column 1 is both Angle and Category"),
        ({"action_kinds": Robust(1), "relative": Relative(1, 0, 2.0)}, "Relative: a scale does not go with Robust"),
        ({"obs_kinds": Angle(7)}, "Angle: obs has 7 columns, there is no column 7"),
        ({"action_kinds": "Angle('wrist')"}, "Angle: action has no column 'wrist'"),
    ],
)
def test_kinds_that_do_not_go_together_are_both_named(generator, settings, message):
    data = mixed(generator)
    with pytest.raises(ValueError, match=message):
        trainer_of(trial_with(**settings), data, data)


def test_settings_that_are_no_choice_are_named(unchecked_shapes):
    for name in ("obs_scaling", "action_scaling", "constants", "padding"):
        with pytest.raises(ValueError, match=f"{name} must be '.*' or '.*', got 'none'"):
            Inputs(**{name: "none"})
    with pytest.raises(ValueError, match="obs_kinds must be objects with a method `inside`, got Angle"):
        Inputs(obs_kinds=Angle)


def test_a_run_that_began_before_constants_were_exact_goes_on_learning_them(generator, tmp_path):
    from cebm.storage import read_document, write_document

    walks(generator).save(tmp_path / "data.npz")
    trial = cebm.vary(trial_with(), optimiser=cebm.Adam(batch_size=16))
    train(Job("old", trial, data=str(tmp_path / "data.npz"), steps=1), tmp_path / "run")
    record = read_document(tmp_path / "run" / "run.json", "run directory")
    del record["job"]["trial"]["inputs"]["constants"]
    write_document(tmp_path / "run" / "run.json", {k: v for k, v in record.items() if k != "checksum"})
    assert load_job(tmp_path / "run").trial.inputs.constants == "learn"


@pytest.mark.slow
def test_units_are_exported_as_they_are(generator):
    data = mixed(generator)
    trainer = trainer_of(trial_with(history=2, horizon=3, **MIXED), data, data)
    units = trainer.units

    class Converting(torch.nn.Module):
        def forward(self, normalised, obs):
            return units.inputs(obs), units.actions(normalised, obs)

    obs = torch.from_numpy(trainer.training[:6][0])
    inputs = (torch.randn(6, 2, units.act_box.dim, generator=generator), obs)
    exported = torch.export.export(Converting(), inputs).module()
    for one, other in zip(exported(*inputs), Converting()(*inputs), strict=True):
        torch.testing.assert_close(one, other)
