"""Policies: on energies whose minimum is known, on disk, in threads, and with history and chunks around them."""

import copy
import math
import threading
from dataclasses import dataclass, field, fields, replace
from time import thread_time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cebm.policy
from cebm.acting import Direct, Found, Problem, Search
from cebm.annealing import AnnealedSearch
from cebm.energies import (
    MLP,
    EnergyModel,
    MixtureDensity,
    MixtureDensityEnergy,
    MLPEnergy,
    ModuleEnergy,
    NoiseConditional,
    Penalty,
    Regression,
    RegressionEnergy,
    Residual,
    Tilted,
    TiltedEnergy,
)
from cebm.policy import EnergyPolicy, Policy
from cebm.recipes import TRIALS
from cebm.runner import Runner
from cebm.samplers import MALA, Constant, DerivativeFree, Langevin, Sampler, StepInfo
from cebm.spaces import Box, Part, Specification
from waiting import PATIENCE

# Units that differ per dimension and between observations and actions.
OBS_BOX = Box.from_bounds([0.0, -5.0], [10.0, 5.0])
ACT_BOX = Box.from_bounds([-100.0, 2.0], [300.0, 3.0])
UNIT = Box.from_bounds([-1.0], [1.0])
VARIANCE = 0.5
# λ falls from 1 to 1e-3; with curvature 1/VARIANCE the first step of λ/2 · 2 = 1 lands on the minimum, the others
# shake by λσ = 0.01 λ: noise of 0.01 or less is within 0.1 with certainty.
TOLERANCE = 0.1


class Bowl(nn.Module):
    """E = ½‖y − f(x)‖²/s² with f(x) = ½ (x₁, x₀), normalised."""

    def __init__(self, variance: float = VARIANCE) -> None:
        super().__init__()
        self.variance = variance

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        return (actions - 0.5 * features.flip(1)).square().sum(1) / (2 * self.variance)


class TwoModes(nn.Module):
    """−log of two Gaussians at ±place with σ = 0.1; the one at +place is the better by log 3/2."""

    def __init__(self, place: float) -> None:
        super().__init__()
        self.place = place

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        parts = [math.log(w) - 50 * (actions[:, 0] - m).square() for w, m in ((0.4, -self.place), (0.6, self.place))]
        return -torch.stack(parts).logsumexp(0)


def searching(energy: EnergyModel, obs_box: Box, act_box: Box, **settings: Any) -> EnergyPolicy:
    """A policy with settings of its own and of its search."""
    search = {each.name: settings.pop(each.name) for each in fields(Search) if each.name in settings}
    return EnergyPolicy(energy, obs_box, act_box, Search(**search), **settings)


def bowl(**changes: Any) -> EnergyPolicy:
    return searching(ModuleEnergy(Bowl(), 2, 2), OBS_BOX, ACT_BOX, **{"candidates": 64, **changes})


def minimum(obs: np.ndarray) -> np.ndarray:
    """Of the bowl, in units: by hand, without Box."""
    normalised = np.stack([(obs[..., 0] - 5) / 5, obs[..., 1] / 5], -1)
    best = 0.5 * normalised[..., ::-1]
    return np.stack([100 + 200 * best[..., 0], 2.5 + 0.5 * best[..., 1]], -1)


def assert_near(actions: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Within `tolerance` normalised units."""
    error = (np.asarray(actions) - expected) / np.array([200.0, 0.5])
    assert np.abs(error).max() < tolerance


def two_modes(sampler: Sampler | None = None, place: float = 0.6, **changes: Any) -> EnergyPolicy:
    energy = ModuleEnergy(TwoModes(place), 1, 1)
    chosen = sampler or Langevin("ibc", noise=0.01)
    return searching(energy, UNIT, UNIT, **{"sampler": chosen, "candidates": 128, **changes})


def network_policy(settings: Any, generator: torch.Generator, **changes: Any) -> EnergyPolicy:
    """With random weights, large enough to make a landscape; with what the file format has to keep."""
    spec = changes.pop("spec", Specification.flat(2, 2))
    acting = Direct() if settings.explicit else Search(candidates=32)
    search = {each.name: changes.pop(each.name) for each in fields(Search) if each.name in changes}
    if search:
        acting = replace(acting, **search)
    defaults = {"low": torch.tensor([-90.0, 2.0]), **changes}
    return EnergyPolicy(settings.build(spec, generator), OBS_BOX, ACT_BOX, acting, spec, settings, **defaults)


def random_obs(count: int, generator: torch.Generator) -> np.ndarray:
    return OBS_BOX.denormalise(2 * torch.rand(count, 2, generator=generator) - 1).numpy()


# -------------------------------------------------------------------------------------------- acting


@pytest.mark.parametrize(
    "sampler",
    [
        Langevin("ibc", noise=0.01),
        Langevin("ibc", noise=0.0),
        DerivativeFree(steps=8, temperature=0.01),
        MALA(steps=30, adapt=20),
    ],
)
def test_act_finds_the_minimum_in_the_users_units(sampler: Sampler, generator: torch.Generator) -> None:
    """Langevin goes there: the best of 512 that noise of 0.01 shakes. The others have 512 chances each of about
    (0.15/s)²/2 = 2 % or more, in their last step alone, to be within 0.15: (1 − 0.02)⁵¹² = 3e-5."""
    obs = random_obs(8, generator)
    policy = bowl(sampler=sampler, candidates=512)
    assert_near(policy.act(obs), minimum(obs), 0.02 if isinstance(sampler, Langevin) else 0.15)


def test_the_defaults_are_the_papers() -> None:
    policy = EnergyPolicy(ModuleEnergy(Bowl(), 2, 2), OBS_BOX, ACT_BOX)
    assert policy.acting == Search(Langevin("ibc", noise=0.01), 512, "minimum", 0)
    assert policy.propose(np.zeros(2)).candidates.shape == (1, 512, 2)


def test_a_planted_bug_in_the_units_would_be_seen(generator: torch.Generator) -> None:
    """The check above has teeth: a policy with unit boxes, or with those of the others, is far off."""
    obs = random_obs(8, generator)
    for wrong in ({"obs_box": ACT_BOX}, {"act_box": OBS_BOX}):
        with pytest.raises(AssertionError):
            assert_near(replace(bowl(), **wrong).act(obs), minimum(obs))


def test_one_observation_and_a_batch_agree(generator: torch.Generator) -> None:
    obs = random_obs(5, generator)
    policy = bowl(sampler=Langevin("ibc", noise=0.0))
    together = policy.act(obs)
    assert together.shape == (5, 2)
    for row, action in zip(obs, together, strict=True):
        alone = policy.act(row)
        assert alone.shape == (2,)
        # Rounding depends on the batch, the candidates do not.
        assert_near(alone, action, 1e-4)
        assert np.array_equal(policy.act(row[None])[0], alone)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8, ">f4", bool])
def test_numpy_in_numpy_out(dtype: Any) -> None:
    obs = np.array([[1, 0], [0, 1], [1, 1]]).astype(dtype)
    policy = bowl()
    before = obs.copy()
    action = policy.act(obs)
    assert isinstance(action, np.ndarray) and action.dtype == np.float32
    assert np.array_equal(action, policy.act(obs.astype(np.float32)))
    assert np.array_equal(obs, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int32])
def test_torch_in_torch_out(dtype: torch.dtype) -> None:
    obs = torch.tensor([[3, -2], [7, 4]]).to(dtype)
    action = bowl().act(obs)
    assert isinstance(action, Tensor) and action.dtype == torch.float32 and action.shape == (2, 2)
    assert np.array_equal(action.numpy(), bowl().act(obs.double().numpy()))
    assert bowl().act(obs[0]).shape == (2,)


def test_any_memory_layout(generator: torch.Generator) -> None:
    """Read-only, reversed, strided and memory-mapped-like arrays; a tensor with a graph."""
    obs = random_obs(4, generator)
    policy = bowl()
    expected = policy.act(obs)
    frozen = obs.copy()
    frozen.flags.writeable = False
    assert np.array_equal(policy.act(frozen), expected)
    assert np.array_equal(policy.act(obs[::-1].copy()[::-1]), expected)
    assert np.array_equal(policy.act(np.asfortranarray(obs)), expected)
    assert np.array_equal(policy.act(np.repeat(obs, 2, 0)[::2]), expected)
    tensor = torch.from_numpy(obs).requires_grad_()
    acted = policy.act(tensor)
    assert not acted.requires_grad and np.array_equal(acted.numpy(), expected)


class Row:
    """As a row of a table: no sequence, but numpy knows what to do."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.values, dtype)


def test_lists_and_rows_of_a_table(generator: torch.Generator) -> None:
    policy = bowl()
    for values in ([3.0, -2.0], [3, -2]):
        expected = policy.act(np.array(values, np.float32))
        previous = [120.0, 2.5]
        warm = policy.act(np.array(values), previous=np.array(previous))
        for obs in (values, tuple(values), Row(values), [torch.tensor(float(value)) for value in values]):
            acted = policy.act(obs)
            assert isinstance(acted, np.ndarray) and np.array_equal(acted, expected)
            assert np.array_equal(policy.act(obs, previous=previous), warm)
            assert np.array_equal(policy.act(obs, previous=Row(previous)), warm)
        assert np.array_equal(policy.act([values, values])[0], policy.act(np.array([values, values]))[0])
        assert policy.act([values, values], budget_ms=5.0).shape == (2, 2)
    for wrong in (["a", "b"], [[1.0], [1.0, 2.0]], None):
        with pytest.raises(ValueError, match="obs must be"):
            policy.act(wrong)
    with pytest.raises(ValueError, match="obs: obs is missing; the parts are 'obs'"):
        policy.act({"x": 1.0})


def test_a_policy_is_one_line() -> None:
    spec = Specification((Part("joints", (1,)), Part("goal", ())), 1, 1, 2)
    line = repr(bowl(spec=spec))
    assert line == "EnergyPolicy(ModuleEnergy, Search, 1×2 observation → 2×1 action columns, cpu)"
    assert isinstance(bowl(), Policy) and bowl().reset() is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_acting_in_any_autograd_mode(mode: type, generator: torch.Generator) -> None:
    obs = random_obs(2, generator)
    expected = bowl().act(obs)
    with mode():
        assert np.array_equal(bowl().act(obs), expected)


class OwnAutograd(MLPEnergy):
    """Somebody's energy that calls autograd itself, which inference mode would not let it."""

    closed_form = False

    def energies_and_gradients(self, context: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = actions.detach().requires_grad_()
            energies = self.energies(context, leaf)
            return energies.detach(), torch.autograd.grad(energies.sum(), leaf)[0]


@pytest.mark.parametrize("settings", [MLP(8), Residual(8), Tilted(MLP(8), MixtureDensity(8))], ids=repr)
def test_what_is_found_can_enter_a_graph(settings: Any, generator: torch.Generator) -> None:
    """The search of our own energies runs in inference mode, whose tensors autograd refuses: none may leave it."""
    policy = network_policy(settings, generator)
    assert policy.energy.closed_form
    proposal = policy.propose(torch.zeros(3, policy.obs_box.dim), candidates=5)
    weight = torch.ones((), requires_grad=True)
    for tensor in (proposal.action, proposal.score, proposal.candidates, proposal.energies):
        assert not tensor.is_inference()
        (weight * tensor).sum().backward()


def test_an_energy_that_calls_autograd_acts(generator: torch.Generator) -> None:
    policy = network_policy(MLP(8), generator)
    own = OwnAutograd(policy.energy.obs_dim, policy.energy.act_dim, 8)
    own.load_state_dict(policy.energy.state_dict())
    obs = np.zeros((2, policy.obs_box.dim))
    for energy in (own, 1.0 * own):
        other = replace(policy, energy=energy)
        assert not other.energy.closed_form
        np.testing.assert_allclose(other.act(obs), policy.act(obs), atol=1e-5)


def test_actions_stay_within_their_limits(generator: torch.Generator) -> None:
    """Without limits: the demonstrations' range with its margin of 5 %. With them: those."""
    obs = 3 * random_obs(20, generator)  # minima far outside
    free = bowl().act(obs)
    assert (free >= [-120, 1.95]).all() and (free <= [320, 3.05]).all()
    assert np.abs(free[:, 0] - 100).max() > 150  # and the limits are met
    low, high = torch.tensor([-50.0, 2.4]), torch.tensor([120.0, 2.45])
    policy = bowl(low=low, high=high)
    proposal = policy.propose(obs)
    for actions in (proposal.action, proposal.candidates):
        assert (actions >= low).all() and (actions <= high).all()
    inside = np.clip(minimum(obs), low.numpy(), high.numpy())
    assert_near(proposal.action.numpy(), inside)
    one_sided = bowl(low=torch.tensor([100.0, -math.inf])).act(obs)
    assert (one_sided[:, 0] >= 100).all() and (one_sided <= [320, 3.05]).all()


def test_rounding_does_not_leave_the_limits(generator: torch.Generator) -> None:
    """An environment that checks its actions refuses one that is beyond by a single bit."""
    obs = 3 * random_obs(4, generator)
    for _ in range(50):
        shift, width = torch.rand(2, 2, generator=generator)
        low = ACT_BOX.low + shift * ACT_BOX.scale
        high = low + 0.1 * width * ACT_BOX.scale
        proposal = bowl(low=low, high=high, candidates=8).propose(obs, steps=2)
        for actions in (proposal.action, proposal.candidates):
            assert (actions >= low).all() and (actions <= high).all()


def test_the_best_action_within_the_limits_is_chosen() -> None:
    """A narrow diagonal valley: the best point on the limit is not the clipped best point beyond it. The unbounded
    minimum is (1, 1); clipping it to y₀ ≤ 0 gives (0, 1), but the best with y₀ = 0 is (0, 0.1)."""

    def valley(obs: Tensor, actions: Tensor) -> Tensor:
        along, across = actions.sum(-1) - 2, actions[..., 0] - actions[..., 1]
        return 0.1 * along.square() + across.square()

    box = Box.from_bounds([-1.0, -1.0], [1.0, 1.0])
    # At y₀ = 0: 0.1 (y₁ − 2)² + y₁², least at y₁ = 0.2 / 1.1.
    policy = searching(Penalty(valley, 1, 2), UNIT, box, high=torch.tensor([0.0, 1.0]), candidates=2048)
    proposal = policy.propose(np.zeros(1), steps=1)
    chosen = proposal.action[0]
    best = 0.1 * (0.2 / 1.1 - 2) ** 2 + (0.2 / 1.1) ** 2
    assert valley(torch.zeros(1, 1), chosen.view(1, 1, 2)).item() < best + 0.05
    assert proposal.energies[0, 0].item() == pytest.approx(valley(torch.zeros(1, 1), chosen.view(1, 1, 2)).item())


def test_without_a_generator_a_call_repeats(generator: torch.Generator) -> None:
    obs = random_obs(3, generator)
    policy = bowl()
    before = torch.get_rng_state()
    first, second = policy.propose(obs), policy.propose(obs)
    for name in ("action", "candidates", "energies"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_decides_the_candidates(generator: torch.Generator) -> None:
    obs = random_obs(3, generator)
    policy = bowl(sampler=Langevin("ibc", steps=1, schedule=Constant(1e-3)))
    state = generator.get_state()
    first, second = policy.propose(obs, generator=generator), policy.propose(obs, generator=generator)
    assert not torch.allclose(first.candidates, second.candidates)
    generator.set_state(state)
    assert torch.equal(policy.propose(obs, generator=generator).candidates, first.candidates)
    # With a generator every observation has its own candidates, without one they share them.
    same = np.repeat(obs[:1], 2, 0)
    own = policy.propose(same, generator=generator).candidates.sort(1).values
    shared = policy.propose(same).candidates.sort(1).values
    assert (own[0] - own[1]).abs().max() > 0.01
    assert ((shared[0] - shared[1]) / ACT_BOX.scale).abs().max() < 0.02  # the noise of one small step


# -------------------------------------------------------------------------------------------- the proposal


@pytest.mark.parametrize("limits", [{}, {"low": torch.tensor([0.0, 2.3]), "high": torch.tensor([120.0, 2.6])}])
def test_candidates_come_sorted_with_their_energies(limits: dict[str, Tensor], generator: torch.Generator) -> None:
    obs = random_obs(4, generator)
    policy = bowl(**limits)
    proposal = policy.propose(obs, candidates=33)
    assert proposal.candidates.shape == (4, 33, 2) and proposal.energies.shape == (4, 33)
    assert (proposal.energies.diff(dim=1) >= 0).all()
    inputs = OBS_BOX.normalise(torch.from_numpy(obs))
    expected = policy.energy(inputs, ACT_BOX.normalise(proposal.candidates))
    torch.testing.assert_close(proposal.energies, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(proposal.action, proposal.candidates[:, 0])


def test_of_equal_energies_the_chosen_one_comes_first(generator: torch.Generator) -> None:
    """Steps of energy: many candidates tie for the lowest."""
    policy = searching(Penalty(lambda obs, y: (4 * y[..., 0]).round(), 1, 1), UNIT, UNIT, candidates=200)
    proposal = policy.propose(np.zeros((20, 1)), generator=generator)
    assert (proposal.energies[:, 0] == proposal.energies[:, 1]).any()
    assert torch.equal(proposal.action, proposal.candidates[:, 0])


def test_the_candidates_show_both_modes() -> None:
    """A uniform start has a candidate in each basin but for 2⁻¹²⁷ of runs; from there it is downhill."""
    candidates = two_modes().propose(np.zeros(1)).candidates[0, :, 0]
    for mode in (-0.6, 0.6):
        assert (candidates - mode).abs().min() < 0.05


def test_the_score_is_a_rank_by_hand() -> None:
    """The energy is the observation itself, so the chosen energy is known: the share of data strictly below it."""
    energy = Penalty(lambda obs, actions: obs.expand(-1, actions.shape[1]), 1, 1)
    data = torch.tensor([0.1, 0.2, 0.3, 0.4])
    policy = searching(energy, UNIT, UNIT, data_energies=data, candidates=4)
    obs = np.array([[0.05], [0.15], [0.2], [0.25], [0.35], [0.4], [0.9]], np.float32)
    assert policy.propose(obs).score.tolist() == [0.0, 0.25, 0.25, 0.5, 0.75, 0.75, 1.0]
    assert replace(policy, data_energies=None).propose(obs).score.isnan().all()


@pytest.mark.parametrize("kind", ["regression", "mixture-density"])
def test_the_score_of_explicit_policies(kind: str, generator: torch.Generator) -> None:
    policy = explicit_policy(kind, generator)
    obs = random_obs(3, generator)
    energies = policy.propose(obs).energies[:, 0]
    data = torch.linspace(float(energies.min()) - 0.5, float(energies.max()) + 1, 7)
    expected = [(data < energy).float().mean().item() for energy in energies]
    score = replace(policy, data_energies=data).propose(obs).score
    assert score.tolist() == pytest.approx(expected)


def test_a_candidate_without_an_energy_is_never_chosen() -> None:
    """NaN for y < 0, as a logarithm gives: the minimum of the rest wins. Nothing but NaN: an error that says so."""

    def logarithm(obs: Tensor, actions: Tensor) -> Tensor:
        return actions[..., 0] - 0.3 * actions[..., 0].log()  # least at 0.3

    policy = searching(Penalty(logarithm, 1, 1), UNIT, UNIT, candidates=64)
    fallen = searching(Penalty(lambda obs, y: logarithm(obs, y).nan_to_num(-torch.inf), 1, 1), UNIT, UNIT)
    assert abs(fallen.act(np.zeros(1)) - 0.3) < 0.05  # −∞ is overflow as well
    proposal = policy.propose(np.zeros((2, 1)))
    assert (proposal.action - 0.3).abs().max() < 0.05
    assert not proposal.energies.isnan().any()
    hopeless = searching(Penalty(lambda obs, y: y[..., 0] * torch.nan, 1, 1), UNIT, UNIT, candidates=4)
    with pytest.raises(ValueError, match="NaN or infinite at every candidate for observation 0"):
        hopeless.act(np.zeros((2, 1)))


# -------------------------------------------------------------------------------------------- effort


@pytest.mark.parametrize("count", [1, 2, 77])
def test_the_number_of_candidates_is_chosen_per_call(count: int) -> None:
    proposal = bowl().propose(np.zeros((2, 2)), candidates=count)
    assert proposal.candidates.shape == (2, count, 2)


def test_steps_are_chosen_per_call() -> None:
    """One candidate, steps of a fixed contraction, no noise: the distance left is (1 − λ/2s²)^steps of the first."""
    policy = bowl(sampler=Langevin("ibc", schedule=Constant(0.1), noise=0.0, step_clip=None))
    obs = np.array([5.0, 0.0])  # the minimum is the centre
    distances = [np.abs((policy.act(obs, candidates=1, steps=n) - [100, 2.5]) / [200, 0.5]).max() for n in (1, 3, 6)]
    rate = 1 - 0.1 / (2 * VARIANCE)
    assert distances[1] == pytest.approx(distances[0] * rate**2, rel=1e-3)
    assert distances[2] == pytest.approx(distances[0] * rate**5, rel=1e-3)
    assert isinstance(policy.acting, Search) and policy.acting.sampler.steps == 10


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clocked(clock: Clock, fixed_ms: float, row_ms: float) -> EnergyPolicy:
    """Every evaluation of the energy takes fixed_ms + rows · row_ms of the clock's time."""

    def energy(obs: Tensor, actions: Tensor) -> Tensor:
        clock.now += (fixed_ms + actions.shape[0] * actions.shape[1] * row_ms) / 1e3
        return actions.square().sum(-1)

    # One step and the last look: two evaluations.
    return searching(Penalty(energy, 1, 1), UNIT, UNIT, sampler=Langevin("ibc", 1))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("budget", [2.0, 5.0, 11.3, 40.0])
def test_a_budget_is_kept_on_a_clock(budget: float, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cebm.policy, "perf_counter", clock)
    policy = clocked(clock, 0.5, 0.01)
    count = policy.candidates_within(budget, batch)
    # 2 (0.5 + 0.01 batch n) = 0.8 budget.
    assert count == pytest.approx((0.8 * budget / 2 - 0.5) / (0.01 * batch), abs=1.5)
    for _ in range(2):  # measured once, not at every call
        began = clock.now
        proposal = policy.propose(np.zeros((batch, 1)), budget_ms=budget)
        assert proposal.candidates.shape[1] == count
        took = (clock.now - began) * 1e3
        assert 0.8 * budget - 1.5 * 2 * 0.01 * batch <= took <= 0.8 * budget + 1e-6  # whole candidates


def test_budgets_beyond_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cebm.policy, "perf_counter", clock)
    assert clocked(clock, 5.0, 0.01).candidates_within(1.0) == 1
    assert clocked(clock, 0.0, 0.0).candidates_within(1.0) == 16_384
    many = [clocked(clock, 0.1, 0.01).candidates_within(budget) for budget in (0.3, 1.0, 3.0, 10.0)]
    assert many == sorted(many) and many[0] < many[-1]


def test_more_steps_leave_room_for_fewer_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cebm.policy, "perf_counter", clock)
    policy = clocked(clock, 0.1, 0.01)
    assert policy.candidates_within(10.0, steps=9) == pytest.approx((8 / 10 - 0.1) / 0.01, abs=1.5)
    assert policy.candidates_within(10.0) == pytest.approx((8 / 2 - 0.1) / 0.01, abs=1.5)


def test_a_budget_on_the_real_clock(generator: torch.Generator) -> None:
    """Loose, since the machine is shared: more time never means fewer candidates, and there is always one."""
    policy = bowl()
    counts = [policy.candidates_within(budget) for budget in (1e-3, 10.0, 100.0, 1000.0)]
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] > 1
    obs = random_obs(1, generator)[0]
    proposal = policy.propose(obs, budget_ms=1000.0)
    assert proposal.candidates.shape[1] == counts[-1]
    assert policy.act(obs, budget_ms=1000.0).shape == (2,)


def test_a_budget_is_kept_within_a_fifth_of_real_work(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a policy like the default one. The clock is this thread's own time of the processor, as others would take
    theirs of any other clock; medians, and of five attempts one must keep it."""
    monkeypatch.setattr(cebm.policy, "perf_counter", thread_time)
    mixture, tilt = MixtureDensityEnergy(4, 2, generator=generator), MLPEnergy(4, 2, generator=generator)
    policy = EnergyPolicy(
        TiltedEnergy(mixture, tilt),
        Box.from_bounds([-1.0] * 4, [1.0] * 4),
        Box.from_bounds([-1.0] * 2, [1.0] * 2),
        Search(Langevin("ibc", 3), choice="draw"),
    )
    obs = np.zeros(4, np.float32)

    def took(budget: float) -> float:
        fresh = replace(policy)
        fresh.candidates_within(budget)
        times = []
        for _ in range(21):
            began = thread_time()
            fresh.act(obs, budget_ms=budget)
            times.append((thread_time() - began) * 1e3)
        return float(np.median(times))

    budget = 8 * took(1e-3)  # of one candidate, whatever the machine
    attempts = []
    while len(attempts) < 5:
        attempts.append(took(budget) / budget)
        if attempts[-1] == pytest.approx(0.8, abs=0.4):
            return
    raise AssertionError(attempts)


# -------------------------------------------------------------------------------------------- warm starts


@pytest.mark.parametrize("sampler", [Langevin("ibc", noise=0.01), DerivativeFree(), MALA(steps=20)])
@pytest.mark.parametrize("place", [0.6, 0.35])
def test_a_warm_start_stays_in_its_mode(sampler: Sampler, place: float) -> None:
    """Cold, the search goes to the better mode on the right. From a last action near the left one it stays there and
    still finds its minimum. The nearer pair is within one full step of each other (0.5), but not of a warm one."""
    policy = two_modes(sampler, place)
    obs = np.zeros((2, 1), np.float32)
    assert np.abs(policy.act(obs) - place).max() < 0.1
    for offset in (0.0, 0.05, -0.08):
        warm = policy.act(obs, previous=np.full((2, 1), offset - place, np.float32))
        assert np.abs(warm + place).max() < 0.08, (offset, warm)
    mixed = policy.act(obs, previous=np.array([[-place], [place]], np.float32))
    assert np.abs(mixed[:, 0] - [-place, place]).max() < 0.08


def test_a_warm_start_is_in_the_users_units(generator: torch.Generator) -> None:
    """One step of almost no length: candidates are around the last action."""
    policy = bowl(sampler=Langevin("ibc", steps=1, schedule=Constant(1e-6), noise=0.0))
    last = np.array([250.0, 2.2], np.float32)
    candidates = policy.propose(random_obs(1, generator)[0], previous=last).candidates[0].numpy()
    assert np.abs((candidates - last) / [200, 0.5]).max() < 0.056
    assert np.abs((candidates - last) / [200, 0.5]).max() > 0.03


def test_a_warm_start_follows_a_moving_minimum(generator: torch.Generator) -> None:
    """The bowl's minimum moves by 0.1 per call; the warm search keeps up."""
    policy = bowl()
    action = None
    for first in np.linspace(0, 10, 11):
        obs = np.array([5.0, first - 5], np.float32)
        action = policy.act(obs, previous=action)
        assert_near(action, minimum(obs), 0.05)


def test_a_draw_near_the_last_action_has_the_tilted_shares() -> None:
    """p(y) exp(−c/2 (y − y₀)²) of two Gaussians: component k keeps w_k N(y₀; μ_k, σ² + 1/c). Without the weight of
    closeness, or with twice of it, the share of draws on the left is off by more than ten standard errors."""
    closeness, last, rows = 12.0, -0.15, 400
    still = Langevin("ibc", 1, Constant(1e-9), noise=0.0)
    policy = two_modes(still, choice="draw", candidates=4096, closeness=closeness)
    generator = torch.Generator().manual_seed(3)
    taken = policy.act(np.zeros((rows, 1)), previous=np.full((rows, 1), last), generator=generator)[:, 0]

    def share(closeness: float) -> float:
        spread = 2 * (0.01 + 1 / closeness)
        left, right = (w * math.exp(-((last - m) ** 2) / spread) for w, m in ((0.4, -0.6), (0.6, 0.6)))
        return left / (left + right)

    error = math.sqrt(share(closeness) * (1 - share(closeness)) / rows)
    assert abs((taken < 0).mean() - share(closeness)) < 4.5 * error
    assert abs(share(2 * closeness) - share(closeness)) > 4.5 * error and share(closeness) - 0.4 > 10 * error
    assert np.abs(np.abs(taken) - 0.6).max() < 0.5, "draws of the modes, and not of a place between them"


def test_closeness_chooses_the_mode_that_is_near_and_lets_go_of_one_that_is_gone() -> None:
    """A warm start would stay where there is nothing left; a search with closeness begins everywhere."""
    policy = two_modes(closeness=20.0)
    obs = np.zeros((2, 1), np.float32)
    found = policy.act(obs, previous=np.array([[-0.5], [0.5]]))
    assert np.abs(found[:, 0] - [-0.6, 0.6]).max() < 0.08
    assert np.abs(policy.act(obs) - 0.6).max() < 0.1, "without a last action the better mode"
    one = searching(ModuleEnergy(Bowl(0.01), 1, 1), UNIT, UNIT, closeness=1.0)
    assert np.abs(one.act(np.array([[0.2]]), previous=np.array([[-0.9]])) - 0.1).max() < 0.08
    with pytest.raises(ValueError, match="closeness must be at least 0 and finite, got -1"):
        Search(closeness=-1.0)


@pytest.mark.parametrize("choice", ["minimum", "draw"])
def test_inertia_keeps_its_share_of_the_last_action(choice: str) -> None:
    """Exactly, between the last action and what the same search finds without it; not where there is no last one."""
    near = Langevin("ibc", 3, Constant(0.005), noise=0.0)
    plain, heavy = (two_modes(near, choice=choice, closeness=20.0, inertia=share) for share in (0.0, 0.75))
    obs, last = np.zeros((3, 1)), np.array([[-0.5], [0.1], [0.5]])
    found, kept = (policy.act(obs, previous=last) for policy in (plain, heavy))
    np.testing.assert_allclose(kept, 0.75 * last + 0.25 * found, atol=1e-6)
    np.testing.assert_array_equal(plain.act(obs), heavy.act(obs))
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="inertia must be at least 0 and below 1"):
            Search(closeness=1.0, inertia=share)
    with pytest.raises(ValueError, match="needs closeness above 0: a mean of two modes is neither"):
        Search(inertia=0.5)


@dataclass(frozen=True)
class Downhill:
    """Somebody's sampler: plain gradient descent, with a state of its own and no small steps."""

    size: float = 0.01
    steps: int = 20

    def init(self, energy: EnergyModel, context: Any, start: Tensor, generator: torch.Generator) -> "Downhill.State":
        return self.State(start)

    def step(
        self, energy: EnergyModel, context: Any, state: "Downhill.State", k: int, generator: torch.Generator
    ) -> tuple["Downhill.State", StepInfo]:
        energies, gradients = energy.energies_and_gradients(context, state.actions)
        return self.State(state.actions - self.size * gradients), StepInfo.of(energies, gradients)

    @dataclass
    class State:
        actions: Tensor


@dataclass(frozen=True)
class Cautious(Downhill):
    """With small steps, too; without them it would leap away."""

    size: float = 5.0

    def small_steps(self, size: float) -> "Cautious":
        return replace(self, size=size / 2)


@pytest.mark.parametrize("sampler", [Downhill(), Cautious()])
def test_a_warm_start_with_a_sampler_that_is_not_ours(sampler: Sampler) -> None:
    policy = two_modes(sampler)
    warm = policy.act(np.zeros((2, 1)), previous=np.array([[-0.55], [0.65]]))
    assert np.abs(warm[:, 0] - [-0.6, 0.6]).max() < 0.05
    assert policy.act(np.zeros(1), steps=3, previous=np.array([-0.6])).shape == (1,)


def test_a_sampler_whose_steps_are_fixed_says_so() -> None:
    class Fixed(Downhill):
        steps = 2  # type: ignore[misc]

        def __init__(self) -> None:
            pass

    policy = two_modes(Fixed())
    assert policy.act(np.zeros(1)).shape == (1,)
    with pytest.raises((ValueError, TypeError), match="steps"):
        policy.act(np.zeros(1), steps=3)


def test_one_observation_with_its_last_action() -> None:
    policy = two_modes()
    assert policy.act(np.zeros(1), previous=np.array([-0.6])).shape == (1,)
    assert policy.act(torch.zeros(1), previous=torch.tensor([-0.6])).item() == pytest.approx(-0.6, abs=0.05)


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", ["implicit", "regression", "mixture-density"])
@pytest.mark.parametrize(
    "obs, message",
    [
        (np.array([1.0, np.nan]), "obs has NaN or infinite values in dimension 1"),
        (np.array([[0.0, 0.0], [np.inf, 0.0]]), "obs has NaN or infinite values in dimension 0"),
        (np.array([1e300, 0.0]), "obs has NaN or infinite values in dimension 0"),
        (np.zeros(3), r"obs must be \[2\] or \[batch, 2\], got \(3,\)"),
        (np.zeros((4, 1)), r"obs must be \[2\] or \[batch, 2\], got \(4, 1\)"),
        (np.zeros((1, 1, 2)), r"obs must be \[2\] or \[batch, 2\], got \(1, 1, 2\)"),
        (np.zeros((0, 2)), r"obs must be \[2\] or \[batch, 2\], got \(0, 2\)"),
        (np.array(1.0), r"obs must be \[2\] or \[batch, 2\], got \(\)"),
    ],
)
def test_bad_observations_are_named(kind: str, obs: np.ndarray, message: str, generator: torch.Generator) -> None:
    policy = bowl() if kind == "implicit" else explicit_policy(kind, generator)
    for values in (obs, torch.from_numpy(obs)):
        with pytest.raises(ValueError, match=message):
            policy.act(values)


@pytest.mark.parametrize("settings", [MLP(16), Regression(16), MixtureDensity(16)], ids=repr)
def test_observations_that_overflow_the_network_are_refused(settings: Any, generator: torch.Generator) -> None:
    """3e38 is a float32, but no network sums such numbers: explicit policies say so, as those that search do."""
    policy = network_policy(settings, generator)
    with torch.no_grad():
        for parameter in policy.energy.parameters():
            parameter.mul_(1e3)  # so that all overflow, whatever the weights
    assert np.isfinite(policy.act(np.zeros((2, 2)))).all()
    with pytest.raises(ValueError, match=r"NaN or infinite (values|at every candidate for observation 1)"):
        policy.act(np.array([[0.0, 0.0], [3e38, -3e38]], np.float32))


@pytest.mark.parametrize("kind", ["implicit", "mixture-density"])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"candidates": 0}, "candidates must be at least 1, got 0"),
        ({"candidates": -3}, "candidates must be at least 1, got -3"),
        ({"candidates": 5, "budget_ms": 5.0}, "give candidates or budget_ms, not both"),
    ],
)
def test_bad_effort_is_named(kind: str, options: dict[str, Any], message: str, generator: torch.Generator) -> None:
    policy = bowl() if kind == "implicit" else explicit_policy(kind, generator)
    with pytest.raises(ValueError, match=message):
        policy.act(np.zeros(2), **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"budget_ms": 0.0}, "budget_ms must be positive, got 0"),
        ({"budget_ms": math.nan}, "budget_ms must be positive, got nan"),
        ({"previous": np.array([0.0, np.nan])}, "previous has NaN or infinite values in dimension 1"),
        ({"previous": np.zeros(3)}, r"previous must be \[2\] or \[batch, 2\], got \(3,\)"),
        ({"previous": np.zeros((2, 2))}, "previous has 2 rows, obs has 1"),
    ],
)
def test_bad_arguments_of_the_search_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bowl().act(np.zeros(2), **options)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"obs_box": UNIT}, "obs_box has 1 dimensions, the energy expects 2"),
        ({"act_box": UNIT}, "act_box has 1 dimensions, the energy expects 2"),
        ({"spec": Specification.flat(3, 2)}, "obs_box has 2 dimensions, the specification has 3"),
        ({"spec": Specification.flat(2, 2, horizon=3)}, "act_box has 2 dimensions, the specification has 6"),
        ({"acting": Langevin("ibc")}, "acting must have a method `search`, which Langevin has not"),
        ({"high": torch.tensor([1.0, math.nan])}, "high must not be NaN"),
        ({"data_energies": torch.zeros(2, 2)}, r"data_energies must be a vector, got shape \(2, 2\)"),
        ({"low": torch.zeros(3)}, r"low has shape \(3,\), actions have 2 dimensions"),
        ({"low": torch.tensor([0.0, 3.0]), "high": torch.tensor([1.0, 2.0])}, "low must not be above high"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str, unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match=message):
        replace(bowl(), **changes)


def test_an_explicit_policy_needs_an_explicit_energy() -> None:
    policy = EnergyPolicy(ModuleEnergy(Bowl(), 2, 2), OBS_BOX, ACT_BOX, Direct())
    with pytest.raises(TypeError, match="ModuleEnergy does not know its lowest energy"):
        policy.act(np.zeros(2))


# -------------------------------------------------------------------------------------------- explicit policies


def explicit_policy(kind: str, generator: torch.Generator, **changes: Any) -> EnergyPolicy:
    settings = {"regression": Regression(16), "mixture-density": MixtureDensity(16, components=3)}[kind]
    return network_policy(settings, generator, **{"low": None, **changes})


@pytest.mark.parametrize("kind", ["regression", "mixture-density"])
def test_explicit_policies_answer_in_units(kind: str, generator: torch.Generator) -> None:
    policy = explicit_policy(kind, generator)
    obs = random_obs(5, generator)
    assert isinstance(policy.energy, RegressionEnergy | MixtureDensityEnergy)
    answer = policy.energy.best(policy.energy.encode(OBS_BOX.normalise(torch.from_numpy(obs))))
    expected = ACT_BOX.denormalise(answer.clamp(-1.1, 1.1))
    torch.testing.assert_close(torch.from_numpy(policy.act(obs)), expected, rtol=1e-5, atol=1e-4)
    for effort in ({"steps": 3}, {"budget_ms": 2.0}, {"candidates": 9}, {"previous": np.zeros((5, 2))}):
        assert np.array_equal(policy.act(obs, **effort), policy.act(obs))
    assert policy.act(obs[0]).shape == (2,)


@pytest.mark.parametrize("kind", ["regression", "mixture-density"])
def test_explicit_candidates_are_sorted_and_hold_the_answer(kind: str, generator: torch.Generator) -> None:
    policy = explicit_policy(kind, generator, low=torch.tensor([0.0, 2.4]), high=torch.tensor([150.0, 2.6]))
    obs = random_obs(3, generator)
    proposal = policy.propose(obs, candidates=6)
    assert proposal.candidates.shape == (3, 6, 2)
    assert (proposal.energies.diff(dim=1) >= 0).all()
    distance = (proposal.candidates - proposal.action.unsqueeze(1)).abs().sum(-1)
    assert (distance.min(1).values == 0).all()
    expected = policy.energy(OBS_BOX.normalise(torch.from_numpy(obs)), ACT_BOX.normalise(proposal.candidates))
    torch.testing.assert_close(proposal.energies, expected, rtol=1e-3, atol=1e-3)
    assert (proposal.candidates >= policy.low).all() and (proposal.candidates <= policy.high).all()


# -------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("kind", ["mlp", "residual", "regression", "module"])
def test_threads_do_not_disturb_each_other(kind: str, generator: torch.Generator) -> None:
    policies = {"module": bowl(), "regression": explicit_policy("regression", generator)}
    networks = {"mlp": MLP(32, init="torch"), "residual": Residual(32, init="torch")}
    policy = policies.get(kind) or network_policy(networks[kind], generator)
    obs = [random_obs(2, generator) for _ in range(4)]
    serial = [policy.act(rows, candidates=32) for rows in obs]
    barrier, wrong = threading.Barrier(4), []

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(8):
            if not np.array_equal(policy.act(obs[index], candidates=32), serial[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_a_call_leaves_nothing_behind(generator: torch.Generator) -> None:
    """Other calls, with other effort and other observations, change nothing about a call."""
    policy = network_policy(MLP(16), generator)
    obs = random_obs(3, generator)
    expected = policy.act(obs)
    weights = copy.deepcopy(policy.energy.state_dict())
    policy.act(random_obs(1, generator)[0], candidates=5, steps=2, previous=np.array([0.0, 2.5]), generator=generator)
    policy.act(random_obs(7, generator), budget_ms=1.0)
    assert np.array_equal(policy.act(obs), expected)
    assert all(torch.equal(value, weights[name]) for name, value in policy.energy.state_dict().items())
    assert not policy.energy.training


# -------------------------------------------------------------------------------------------- choosing

SPREAD = 0.05
# y − s²∇E: exactly onto the mean for a component of deviation s.
DENOISE = Langevin("ibc", 3, Constant(2 * SPREAD**2), noise=0.0)


class Lean(nn.Module):
    """f = lean for y > 0: the tilt that makes the right-hand mode rarer."""

    def __init__(self, lean: float) -> None:
        super().__init__()
        self.lean = lean

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        return self.lean * (actions[:, 0] > 0).to(actions.dtype)


def leaning(lean: float, **changes: Any) -> EnergyPolicy:
    """q = 0.5 N(-0.5, s²) + 0.5 N(0.5, s²), tilted: p(right) = e^-lean / (1 + e^-lean)."""
    proposal = MixtureDensityEnergy(1, 1, 4, 0, 2, SPREAD)
    with torch.no_grad():
        for parameter in proposal.parameters():
            parameter.zero_()
        proposal.placing.layers[0].bias.copy_(torch.tensor([-0.5, 0.5, -50.0, -50.0]))
    energy = TiltedEnergy(proposal, ModuleEnergy(Lean(lean), 1, 1))
    return searching(energy, UNIT, UNIT, **{"sampler": DENOISE, "candidates": 64, "choice": "draw", **changes})


@pytest.mark.parametrize("keep", [0, 1, 5])
@pytest.mark.parametrize("lean", [0.0, 1.0, -2.0])
def test_a_draw_takes_the_modes_as_often_as_they_are_likely(lean: float, keep: int, generator: torch.Generator) -> None:
    """z-score of the right-hand share over 4,000 rows. Of 64 candidates from q the drawn one follows p up to
    O(1/64), 0.4 points here; |z| < 6 allows 4.7. What forgets log q or the tilt is 10 points off or more at lean ±1."""
    policy = leaning(lean, keep=keep)
    chosen = policy.act(torch.zeros(4000, 1), generator=generator)[:, 0]
    share = math.exp(-lean) / (1 + math.exp(-lean))
    score = (float((chosen > 0).float().mean()) - share) / math.sqrt(share * (1 - share) / 4000)
    assert abs(score) < 6
    assert float((chosen.abs() - 0.5).abs().max()) < 1e-3  # and the search has climbed to the top of the mode


def test_pruning_does_not_change_what_is_drawn() -> None:
    """The drawn candidate goes on in any case, and moves alone."""
    for seed in range(5):
        generators = [torch.Generator().manual_seed(seed) for _ in range(3)]
        chosen = [
            leaning(0.5, keep=k).act(torch.zeros(50, 1), generator=g)
            for k, g in zip((0, 1, 4), generators, strict=True)
        ]
        torch.testing.assert_close(chosen[1], chosen[0])
        torch.testing.assert_close(chosen[2], chosen[0])


def test_the_minimum_takes_the_likelier_mode(generator: torch.Generator) -> None:
    policy = leaning(0.5, choice="minimum")
    assert (policy.act(torch.zeros(200, 1), generator=generator) < 0).all()


def test_a_draw_without_a_generator_is_the_same_in_any_batch(generator: torch.Generator) -> None:
    policy = leaning(0.3)
    alone = policy.act(torch.zeros(1, 1))
    together = policy.act(torch.zeros(9, 1))
    torch.testing.assert_close(together, alone.expand(9, -1))
    assert torch.equal(policy.act(torch.zeros(9, 1)), together)


def test_a_draw_from_the_box_follows_the_energy(generator: torch.Generator) -> None:
    """Without a proposal candidates are uniform, and a draw is by exp(−E): 40 to 60 for the two modes."""
    policy = two_modes(Langevin("ibc", 3, Constant(0.005), noise=0.0), choice="draw", candidates=256)
    chosen = policy.act(torch.zeros(4000, 1), generator=generator)[:, 0]
    # About 256 · 0.25/2.2 = 30 candidates per mode, so the share is right up to O(1/30).
    assert abs(float((chosen > 0).float().mean()) - 0.6) < 6 * math.sqrt(0.24 / 4000) + 0.02


@pytest.mark.parametrize("keep", [1, 4, 16])
def test_pruning_finds_what_the_full_search_finds(keep: int, generator: torch.Generator) -> None:
    obs = random_obs(20, generator)
    full, pruned = bowl(candidates=128), bowl(candidates=128, keep=keep)
    assert pruned.acting.search(pruned.problem(obs)).actions.shape == (20, keep, 2)
    assert_near(pruned.act(obs), full.act(obs), 0.02)
    assert_near(pruned.act(obs), minimum(obs), 0.02)


def test_pruning_keeps_the_lowest_energies(generator: torch.Generator) -> None:
    """With a search that does not move, what is left is what the full search has first."""
    still = Langevin("ibc", 1, Constant(1e-12), noise=0.0)
    obs = random_obs(5, generator)
    full, pruned = bowl(candidates=64, sampler=still), bowl(candidates=64, sampler=still, keep=7)
    kept = pruned.acting.search(pruned.problem(obs)).energies.sort(1).values
    torch.testing.assert_close(kept, full.propose(obs).energies[:, :7])


@pytest.mark.parametrize("choice", ["minimum", "draw"])
def test_a_proposal_shows_all_candidates_that_were_asked_for(choice: Any, generator: torch.Generator) -> None:
    """Those that were not moved too; and the chosen one is the one that acts."""
    policy = bowl(candidates=64, keep=5, choice=choice)
    obs = random_obs(3, generator)
    for options, count in (({}, 64), ({"candidates": 200}, 200), ({"candidates": 2}, 2)):
        proposal = policy.propose(obs, **options)
        assert proposal.candidates.shape == (3, count, 2) and (proposal.energies.diff(dim=1) >= 0).all()
        assert np.array_equal(proposal.action.numpy(), policy.act(obs, **options))


def test_keeping_more_than_there_are_keeps_all(generator: torch.Generator) -> None:
    obs = random_obs(5, generator)
    assert np.array_equal(bowl(candidates=8, keep=50).act(obs), bowl(candidates=8).act(obs))


def test_a_tilted_policy_starts_near_the_previous_action() -> None:
    policy = leaning(0.0)
    for place in (-0.5, 0.5):
        chosen = policy.act(torch.zeros(50, 1), previous=torch.full((50, 1), place))
        assert float((chosen - place).abs().max()) < 0.1


# -------------------------------------------------------------------------------------------- pieces of one's own


def test_the_users_network_stays_as_it_is(generator: torch.Generator) -> None:
    """Not frozen, not switched to evaluation; and what happens to it later does not change the policy."""
    for frozen in (False, True):
        energy = MLPEnergy(2, 2, 8, dropout=0.5, init="torch", generator=generator)
        energy.hidden.eval()  # a mixture of modes
        if frozen:  # as a moving average is, which somebody goes on updating
            energy.eval().requires_grad_(False)
        modes = [module.training for module in energy.modules()]
        flags = [parameter.requires_grad for parameter in energy.parameters()]
        policy = EnergyPolicy(energy, OBS_BOX, ACT_BOX, Search(candidates=8))
        obs = random_obs(2, generator)
        expected = policy.act(obs)
        assert [module.training for module in energy.modules()] == modes
        assert [parameter.requires_grad for parameter in energy.parameters()] == flags
        assert not any(module.training for module in policy.energy.modules())
        assert not any(parameter.requires_grad for parameter in policy.energy.parameters())
        with torch.no_grad():
            for parameter in energy.parameters():
                parameter.normal_(generator=generator)
        assert np.array_equal(policy.act(obs), expected)
        assert not np.array_equal(replace(policy, energy=energy).act(obs), expected)


def test_an_energy_that_cannot_be_copied_is_named() -> None:
    energy = ModuleEnergy(Bowl(), 2, 2)
    energy.lock = threading.Lock()
    with pytest.raises(ValueError, match="energy: a ModuleEnergy cannot be copied"):
        EnergyPolicy(energy, OBS_BOX, ACT_BOX)


@pytest.mark.parametrize("settings", [Tilted(MLP(16, init="torch"), MixtureDensity(16)), MLP(16, init="torch")])
def test_neutral_sums_act_exactly_like_the_energy(settings: Any, generator: torch.Generator) -> None:
    """Under the default recipe's search, which asks for the proposal and its density."""
    energy = settings.build(Specification.flat(2, 2, smoothing=0.05), generator)
    penalty = Penalty(lambda obs, actions: actions.square().sum(-1), 2, 2)
    obs, state = random_obs(50, generator), generator.get_state()
    acted = []
    for each in (energy, 1.0 * energy, energy + 0.0 * penalty, 0.0 * penalty + 0.5 * (2.0 * energy)):
        policy = EnergyPolicy(each, OBS_BOX, ACT_BOX, TRIALS["steady"].acting)
        generator.set_state(state)
        acted.append((policy.act(obs, generator=generator), policy.act(obs)))
    for drawn, default in acted[1:]:
        assert np.array_equal(drawn, acted[0][0]) and np.array_equal(default, acted[0][1])
    generator.set_state(state)
    moved = EnergyPolicy(energy + 5.0 * penalty, OBS_BOX, ACT_BOX, TRIALS["steady"].acting)
    assert not np.array_equal(moved.act(obs, generator=generator), acted[0][0])  # a weight that counts is seen


class Contexts(EnergyModel):
    """Somebody's energy, whose context is a tuple with a dict inside."""

    obs_dim, act_dim = 2, 2

    def encode(self, obs: Tensor) -> Any:
        return obs.flip(1), {"half": torch.full_like(obs[:, :1], 0.5)}

    def energies(self, context: Any, actions: Tensor) -> Tensor:
        self.check(context, actions)
        best = context[0] * context[1]["half"]
        return (actions - best.unsqueeze(1)).square().sum(-1) / (2 * VARIANCE)


def test_an_energy_with_a_context_of_its_own_kind(generator: torch.Generator) -> None:
    obs = random_obs(4, generator)
    for choice in ("minimum", "draw"):
        for energy in (Contexts(), Contexts() + 0.0 * ModuleEnergy(Bowl(), 2, 2)):
            policy = searching(energy, OBS_BOX, ACT_BOX, candidates=64, choice=choice)
            assert_near(policy.act(obs), minimum(obs))
            assert_near(policy.act(obs, previous=minimum(obs)), minimum(obs))
            assert policy.propose(obs).candidates.shape == (4, 64, 2)


@dataclass(frozen=True)
class Grid:
    """Somebody's way to act: the best point of a grid."""

    points: int = 21

    def search(self, problem: Problem) -> Found:
        axis = torch.linspace(-1, 1, self.points)
        actions = torch.cartesian_prod(axis, axis).expand(problem.rows, -1, -1)
        energies = problem.energies(problem.clip(actions))
        return Found(actions, energies, energies.argmin(1))


def test_a_way_to_act_of_ones_own(generator: torch.Generator) -> None:
    policy = EnergyPolicy(ModuleEnergy(Bowl(), 2, 2), OBS_BOX, ACT_BOX, Grid())
    obs = random_obs(3, generator)
    assert_near(policy.act(obs), minimum(obs), 0.0501)  # half a cell
    assert policy.propose(obs).candidates.shape == (3, 441, 2)
    assert Runner(policy, warm_start=True).act(obs).shape == (3, 2)
    assert "Grid" in repr(policy)


# -------------------------------------------------------------------------------------------- the runner


@dataclass
class Echo:
    """Answers with the step count and its own plan: action h of a chunk is 10 · calls + h. Records its calls."""

    history: int = 1
    horizon: int = 1
    calls: list[dict[str, Any]] = field(default_factory=list)
    resets: int = 0

    def act(self, obs: Any, **options: Any) -> np.ndarray:
        self.calls.append({"obs": np.array(obs), **options})
        return np.tile(10.0 * len(self.calls) + np.arange(self.horizon), (len(obs), 1))

    def reset(self) -> None:
        self.resets += 1


def echo(history: int = 1, horizon: int = 1) -> Echo:
    return Echo(history, horizon)


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def test_history_begins_with_the_first_observation_repeated() -> None:
    policy = echo(history=3)
    runner = Runner(policy)
    for step in range(5):
        runner.act(column(step, step + 0.5))
    windows = [call["obs"].tolist() for call in policy.calls]
    assert [row[0] for row in windows] == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert [row[1] for row in windows] == [[x + 0.5 for x in row[0]] for row in windows]


def test_history_of_wide_observations_is_oldest_first() -> None:
    policy = echo(history=2)
    runner = Runner(policy)
    runner.act(np.array([[1.0, 2.0]]))
    runner.act(np.array([[3.0, 4.0]]))
    assert policy.calls[1]["obs"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "execute, calls", [(None, [1, 1, 1, 2, 2, 2, 3]), (2, [1, 1, 2, 2, 3, 3, 4]), (1, range(1, 8))]
)
def test_chunks_are_played_out(execute: int | None, calls: list[int]) -> None:
    policy = echo(horizon=3)
    runner = Runner(policy, execute=execute)
    played = [runner.act(column(step, step)) for step in range(7)]
    length = execute or 3
    assert all(action.shape == (2, 1) for action in played)
    expected = [10 * call + step % length for step, call in enumerate(calls)]
    assert [float(action[1, 0]) for action in played] == expected


def test_history_goes_on_while_a_chunk_is_played() -> None:
    policy = echo(history=2, horizon=3)
    runner = Runner(policy)
    for step in range(4):
        runner.act(column(step))
    assert [call["obs"].tolist() for call in policy.calls] == [[[0, 0]], [[2, 3]]]


def test_reset_forgets_everything() -> None:
    policy = echo(history=2, horizon=2)
    runner = Runner(policy, warm_start=True)
    runner.act(column(1.0, 2.0))
    runner.reset()
    assert runner.act(column(7.0))[0, 0] == 20  # a new call, another number of episodes
    assert policy.calls[1]["obs"].tolist() == [[7, 7]] and "previous" not in policy.calls[1]
    assert policy.resets == 1


def test_a_warm_start_hands_the_last_action_back() -> None:
    policy = echo()
    cold, warm = Runner(policy), Runner(policy, warm_start=True)
    for runner in (cold, warm):
        for step in range(2):
            runner.act(column(step, step))
    previous = [call.get("previous") for call in policy.calls]
    assert previous[0] is previous[1] is previous[2] is None
    assert previous[3].tolist() == [[30.0], [30.0]]


def test_a_warm_start_of_a_chunk_is_what_was_not_played() -> None:
    policy = echo(horizon=4)
    runner = Runner(policy, execute=3, warm_start=True)
    for step in range(4):
        runner.act(column(step))
    assert policy.calls[1]["previous"].tolist() == [[13.0, 13.0, 13.0, 13.0]]
    policy = echo(horizon=4)
    runner = Runner(policy, execute=1, warm_start=True)
    for step in range(2):
        runner.act(column(step))
    assert policy.calls[1]["previous"].tolist() == [[11.0, 12.0, 13.0, 13.0]]


def test_effort_and_generator_go_to_the_policy(generator: torch.Generator) -> None:
    policy = echo()
    Runner(policy, generator=generator, candidates=7, steps=3).act(column(0))
    (call,) = policy.calls
    assert call["candidates"] == 7 and call["steps"] == 3 and call["generator"] is generator


def test_arrays_may_be_reused_by_the_caller() -> None:
    """An environment that writes its observations into one array, and a user who changes the action."""
    policy = echo(history=2)
    runner = Runner(policy, warm_start=True)
    buffer = column(1.0)
    action = runner.act(buffer)
    action += 1000
    buffer[:] = 2.0
    runner.act(buffer)
    assert policy.calls[1]["obs"].tolist() == [[1, 2]]
    assert policy.calls[1]["previous"].tolist() == [[10.0]]


def test_runners_of_one_policy_are_apart() -> None:
    policy = echo(history=2, horizon=2)
    one, other = Runner(policy), Runner(policy)
    assert one.act(column(1.0))[0, 0] == 10
    assert other.act(column(5.0))[0, 0] == 20
    assert one.act(column(2.0))[0, 0] == 11
    assert other.act(column(6.0))[0, 0] == 21
    one.act(column(3.0))
    assert policy.calls[2]["obs"].tolist() == [[2, 3]]


def test_a_runner_around_a_real_policy_keeps_its_mode() -> None:
    """The end of the story: cold the policy would sit at +0.6, warm it stays where it was put."""
    policy = two_modes()
    runner = Runner(policy, warm_start=True)
    obs = np.zeros((3, 1), np.float32)
    assert np.abs(runner.act(obs) - 0.6).max() < 0.1
    runner._last = np.full((3, 1), -0.6, np.float32)
    for _ in range(5):
        assert np.abs(runner.act(obs) + 0.6).max() < 0.08


@pytest.mark.parametrize("execute", [0, 4, -1])
def test_execute_is_within_the_horizon(execute: int) -> None:
    with pytest.raises(ValueError, match=f"execute must be between 1 and the policy's horizon 3, got {execute}"):
        Runner(echo(horizon=3), execute=execute)


def test_another_number_of_episodes_needs_a_reset() -> None:
    runner = Runner(echo(horizon=2))
    runner.act(column(1.0, 2.0))
    with pytest.raises(ValueError, match=r"obs has shape \(1, 1\), the episodes under way have \(2, 1\); reset first"):
        runner.act(column(1.0))


# -------------------------------------------------------------------------------------------- what a runner refuses


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_refused_observation_leaves_the_runner_as_it_was(bad: float, generator: torch.Generator) -> None:
    """Also while a chunk is played, when nobody looks at the observation for an action. 1e300 is no float32."""
    obs_box, act_box = OBS_BOX.tiled(2), UNIT.tiled(3)
    energy = MLPEnergy(4, 3, 8, generator=generator)
    policy = EnergyPolicy(energy, obs_box, act_box, Search(candidates=4), Specification.flat(2, 1, 2, 3))
    frames = random_obs(9, generator).astype(np.float64)
    disturbed, calm = Runner(policy), Runner(policy)
    for step, frame in enumerate(frames):
        wrong = frame.copy()
        wrong[step % 2] = bad
        with pytest.raises(ValueError, match="obs has NaN or infinite values"):
            disturbed.act(wrong)
        with pytest.raises(ValueError, match="obs"):
            disturbed.act(np.zeros((2, 3)))
        assert np.array_equal(disturbed.act(frame), calm.act(frame)), step


def test_a_runner_with_one_observation(generator: torch.Generator) -> None:
    for obs in ([1.0, 2.0], np.array([1, 2]), torch.tensor([1.0, 2.0]), Row([1.0, 2.0])):
        single, batch = Runner(bowl()), Runner(bowl())
        for _ in range(2):
            action = single.act(obs)
            assert action.shape == (2,) and np.array_equal(action, batch.act(np.array([[1.0, 2.0]]))[0])
    assert isinstance(Runner(bowl()), Policy)


def test_a_runner_takes_any_policy() -> None:
    class Zero:
        def act(self, obs: np.ndarray) -> np.ndarray:
            return np.zeros((len(obs), 3))

        def reset(self) -> None:
            pass

    assert Runner(Zero(), generator=torch.Generator()).act(np.zeros(5)).shape == (3,)
    assert Runner(Zero()).act(np.zeros((2, 5))).shape == (2, 3)
    with pytest.raises(ValueError, match=r"Zero.act does not take candidates, previous"):
        Runner(Zero(), candidates=3, warm_start=True)


def test_a_policy_lays_out_its_copy_of_the_weights(generator: torch.Generator) -> None:
    """Column by column, which products with few rows read faster; the values and the energy that was given stay."""
    energy = MLPEnergy(3, 2, 16, generator=generator)
    box = [Box.from_bounds([-1.0] * dim, [1.0] * dim) for dim in (3, 2)]
    policy = EnergyPolicy(energy, *box)
    for own, copied in zip(energy.parameters(), policy.energy.parameters(), strict=True):
        assert torch.equal(own, copied) and own.is_contiguous()
        assert copied.ndim == 1 or copied.t().is_contiguous()
    obs, actions = torch.randn(5, 3, generator=generator), torch.randn(5, 7, 2, generator=generator)
    torch.testing.assert_close(policy.energy(obs, actions), energy(obs, actions), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- with its energy ignored


def plain_policy(energy: EnergyModel, acting: Any) -> EnergyPolicy:
    boxes = (Box(torch.zeros(n), torch.ones(n)) for n in (energy.obs_dim, energy.act_dim))
    return EnergyPolicy(energy, *boxes, acting)


def test_without_its_energy_the_part_that_acts_alone_acts(generator: torch.Generator) -> None:
    """Of a tilted mixture the mixture: as if the tilt were 0."""
    tilted = Tilted(MLP(8), MixtureDensity(8)).build(Specification.flat(3, 2), generator)
    policy = plain_policy(tilted, TRIALS["steady"].acting)
    obs = torch.randn(5, 3, generator=generator)
    alone = plain_policy(tilted.base, TRIALS["steady"].acting).act(obs)
    torch.testing.assert_close(policy.without_energy().act(obs), alone, rtol=0, atol=0)
    assert not torch.equal(policy.act(obs), alone)
    for weight in tilted.tilt.parameters():
        weight.data.zero_()
    flat = plain_policy(tilted, TRIALS["steady"].acting)
    torch.testing.assert_close(flat.act(obs), flat.without_energy().act(obs))


def test_without_its_energy_one_draw_acts_where_it_chooses_among_draws(generator: torch.Generator) -> None:
    energy = NoiseConditional(width=8, encoder_width=8).build(Specification.flat(3, 2), generator)
    policy, obs = plain_policy(energy, AnnealedSearch()), torch.randn(5, 3, generator=generator)
    bare = policy.without_energy()
    assert bare.acting == AnnealedSearch(choice="first", candidates=1)
    for effort in ({}, {"candidates": 8}):  # whoever asks for more candidates does not get a choice back
        found = bare.acting.search(bare.problem(obs, generator=torch.Generator().manual_seed(3), **effort))
        assert not found.chosen.any()


@pytest.mark.parametrize(
    ("settings", "acting"),
    [
        (MLP(8), Search()),
        (MixtureDensity(8), Direct()),
        (Tilted(MLP(8), MixtureDensity(8), "nothing"), Search()),
        (NoiseConditional(width=8, encoder_width=8), AnnealedSearch(choice="first")),
    ],
    ids=["nothing is left", "explicit", "the base is a marginal", "it is ignored already"],
)
def test_where_nothing_is_left_without_the_energy_it_is_said(
    settings: Any, acting: Any, generator: torch.Generator
) -> None:
    policy = plain_policy(settings.build(Specification.flat(3, 2), generator), acting)
    with pytest.raises(ValueError, match="does nothing without its energy"):
        policy.without_energy()
