"""The two cheap baselines: what they compute, what trains them, and that they are saved and act like all others."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cebm import energies
from cebm.demonstrations import Demonstrations
from cebm.energies import MixtureDensity, Nearest, NearestEnergy, TwoStepEnergy
from cebm.learning import fit
from cebm.loading import load
from cebm.objectives import TwoSquares
from cebm.recipes import TRIALS, vary
from cebm.runs import resume, train
from cebm.spaces import Specification
from cebm.trainer import Trainer
from test_runs import small_job
from test_trainer import small


def arrays(steps: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(steps, 3)), rng.uniform(-1, 1, (steps, 2)), np.array([20, 45, steps])


# ---------------------------------------------------------------------------------------------- nearest


def test_nearest_gives_the_chunk_of_the_nearest_demonstration() -> None:
    """In standardised units, among all windows, by brute force."""
    obs, actions, ends = arrays()
    policy = fit(obs, actions, ends, trial="nearest", steps=1, history=2, horizon=3)
    windows = Demonstrations.from_arrays(obs, actions, ends).windows(2, 3)
    seen, done = windows[:]
    asked = np.random.default_rng(1).normal(size=(30, 6)).astype(np.float32)
    scale = np.tile(obs.std(0), 2)
    nearest = (((asked[:, None] - seen) / scale) ** 2).sum(2).argmin(1)
    np.testing.assert_allclose(policy.act(asked), done[nearest], atol=1e-5)
    np.testing.assert_allclose(policy.act(seen), done, atol=1e-5)


def test_nearest_is_saved_with_its_demonstrations(tmp_path: Path) -> None:
    obs, actions, ends = arrays()
    policy = fit(obs, actions, ends, trial="nearest", steps=1)
    policy.save(tmp_path / "policy")
    assert policy.settings == Nearest(60)
    np.testing.assert_array_equal(load(tmp_path / "policy").act(obs), policy.act(obs))


def test_nearest_looks_at_many_observations_in_parts(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    energy = NearestEnergy(3, 2, 50)
    obs = torch.randn(50, 3, generator=generator)
    energy.remember(obs, torch.randn(50, 2, generator=generator))
    whole = energy.encode(obs)
    monkeypatch.setattr(energies.baselines, "_DISTANCES_AT_ONCE", 150)
    torch.testing.assert_close(energy.encode(obs), whole, rtol=0, atol=0)
    torch.testing.assert_close(whole, energy.stored_actions, rtol=0, atol=0)


def test_nearest_of_other_sizes_is_named(unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match=r"room for \(4, 3\) and \(4, 2\)"):
        NearestEnergy(3, 2, 4).remember(torch.zeros(5, 3), torch.zeros(5, 2))
    for make in (lambda: Nearest(0), lambda: NearestEnergy(3, 2, 0)):
        with pytest.raises(ValueError, match="pairs must be at least 1"):
            make()


@pytest.mark.parametrize("name", ["nearest", "two-step"])
def test_a_run_of_a_baseline_is_resumed(name: str, tmp_path: Path) -> None:
    whole = train(small_job(name, steps=8), tmp_path / "whole")
    train(small_job(name, steps=8), tmp_path / "part")
    resumed = resume(tmp_path / "part", steps=16)
    assert resumed.metrics[-1]["step"] == 16
    again, obs = load(tmp_path / "whole"), np.full((1, 8), 0.5, np.float32)
    np.testing.assert_array_equal(again.act(obs), whole.policy.act(obs))


# ---------------------------------------------------------------------------------------------- two steps


def test_two_squares_by_hand(generator: torch.Generator) -> None:
    energy = TwoStepEnergy(3, 2, 8, generator=generator)
    obs, actions = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)
    state = generator.get_state()
    found = TwoSquares().terms(energy, obs, actions, generator)
    generator.set_state(state)
    noise = torch.randn(5, 2, generator=generator)
    start = torch.cat([obs, 0.9 * actions + 0.1 * noise, torch.full((5, 1), 0.9)], 1)
    first = energy.trunk(torch.cat([obs, torch.zeros(5, 3)], 1))
    expected = 0.5 * ((first - actions) ** 2).sum(1) + 0.5 * ((energy.trunk(start) - actions) ** 2).sum(1)
    torch.testing.assert_close(found.loss, expected.mean())
    assert found.positive is not None and not found.positive.requires_grad
    refined = energy.trunk(torch.cat([obs, 0.9 * first, torch.full((5, 1), 0.9)], 1))
    torch.testing.assert_close(energy.best(energy.encode(obs)), refined)


def test_two_steps_learn_a_function() -> None:
    """And what is taken is the refined action: nearer to the truth than half of its spread by far."""
    obs = np.random.default_rng(0).uniform(-1, 1, (400, 1))
    actions = np.concatenate([np.sin(3 * obs), obs**2], 1)
    policy = fit(obs, actions, trial=small(TRIALS["two-step"], **{"energy.width": 64}), steps=200, learning_rate=0.01)
    assert np.abs(policy.act(obs) - actions).mean() < 0.1


def test_two_squares_need_an_energy_that_refines() -> None:
    with pytest.raises(ValueError, match="TwoSquares does not go with Regression"):
        vary(TRIALS["mse"], objective=TwoSquares())
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        TwoStepEnergy(1, 1, level=1.0)
    with pytest.raises(ValueError, match="count must be at least 1"):
        TwoSquares(0)


# ---------------------------------------------------------------------------------------------- the contract


def test_an_energy_with_weights_still_needs_a_gradient() -> None:
    """Without weights a loss without a gradient is right; with weights it stays an error."""
    obs, actions, ends = arrays()
    data = Demonstrations.from_arrays(obs, actions, ends)
    trainer = Trainer(small(TRIALS["nearest"]), data, data, steps=2)
    assert float(trainer.step()["loss"]) == 0 and trainer.state().keys() >= {"learner.energy.stored_obs"}
    broken = Trainer(small(TRIALS["mse"]), data, data, steps=2)
    for parameter in broken.learner.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        broken.step()


def test_settings_are_sized_by_the_training_pairs_alone() -> None:
    built = Nearest(7).build(Specification.flat(3, 2))
    assert isinstance(built, NearestEnergy) and built.stored_obs.shape == (7, 3)
    obs, actions, ends = arrays()
    data = Demonstrations.from_arrays(obs, actions, ends)
    trainer = Trainer(vary(TRIALS["nearest"], horizon=10, padding="drop"), data, data.select([0]), steps=1)
    assert trainer.trial.energy == Nearest(11 + 16 + 6) and TRIALS["nearest"].energy == Nearest()


def test_components_begin_as_wide_as_they_are_told(generator: torch.Generator) -> None:
    """`spread` is their deviation before training; without it they begin at e^−2.5, and weights are drawn alike."""
    obs, seed = torch.randn(50, 3, generator=generator), int(torch.randint(2**31, (), generator=generator))

    def made(**settings: Any) -> Any:
        energy = MixtureDensity(16, **settings).build(Specification.flat(3, 4), torch.Generator().manual_seed(seed))
        return energy.encode(obs)

    plain, wide = made(), made(spread=0.5)
    for found, wanted in ((plain, math.exp(-2.5)), (wide, 0.5), (made(spread=2.0), 2.0)):
        assert float(found.log_stds.detach().median().exp()) == pytest.approx(wanted, rel=0.2)
    torch.testing.assert_close(plain.means, wide.means)
    torch.testing.assert_close(plain.log_weights, wide.log_weights)


@pytest.mark.parametrize("spread", [0.0, -1.0, 1e-4, 8.0, math.nan, math.inf])
def test_a_spread_that_no_component_can_have_is_refused(spread: float) -> None:
    with pytest.raises(ValueError, match=r"spread must be between 9\.1e-04 and 7\.4"):
        MixtureDensity(spread=spread)
