"""The contract tests for users' pieces: ours pass, and for every check a planted fault fails it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import cebm
from cebm import testing
from cebm.acting import Found
from cebm.energies import MLPEnergy
from cebm.negatives import Negatives, Uniform
from cebm.objectives import Terms, contrast
from cebm.samplers import Langevin, LangevinState, StepInfo

SAMPLING = Langevin(steps=50, schedule=cebm.Constant(0.002), step_clip=None, margin=None)
MINIMISER = {"samples_a_gaussian": "it seeks minima and does not sample"}


def cases(*checks):
    return [check for each in checks for check in each]


@testing.contract(cases(testing.sampler_checks(SAMPLING), testing.sampler_checks(cebm.MALA(margin=None))))
def test_our_samplers(check):
    check()


@testing.contract(testing.sampler_checks(cebm.DerivativeFree()), expected_failures=MINIMISER)
def test_a_minimiser_fails_where_it_is_expected_to(check):
    check()


@testing.contract(
    cases(
        *(
            testing.source_checks(source)
            for source in (
                cebm.Uniform(),
                cebm.GaussianMixture(),
                cebm.InBatch(),
                cebm.ShortChains(),
                cebm.LongChain(),
                cebm.Replay(),
                cebm.Replay(joint=True),
                cebm.MarginalActions(),
                cebm.Mixture((cebm.Uniform(), cebm.GaussianMixture()), (0.5, 0.5)),
            )
        ),
        testing.source_checks(cebm.Proposed(), energy=cebm.Tilted()),
    )
)
def test_our_sources(check):
    check()


@testing.contract(
    cases(
        *(
            testing.energy_checks(settings)
            for settings in (
                cebm.MLP(),
                cebm.MLP(dropout=0.2, spectral_norm=True),
                cebm.Residual(),
                cebm.Regression(),
                cebm.MixtureDensity(),
                cebm.Tilted(),
                cebm.Tilted(base_sees="nothing"),
            )
        )
    )
)
def test_our_energies(check):
    check()


@testing.contract(
    cases(
        *(
            testing.objective_checks(objective)
            for objective in (
                cebm.InfoNCE(),
                cebm.InfoNCE(cebm.MarginalActions()),
                cebm.RankingNCE(),
                cebm.ImportanceNLL(),
                cebm.MCMC(),
                cebm.MaximumEntropy(),
            )
        ),
        testing.objective_checks(cebm.Likelihood(), energy=cebm.MixtureDensity()),
        testing.objective_checks(cebm.InfoNCE(cebm.Proposed(), 4), energy=cebm.Tilted()),
    )
)
def test_our_objectives(check):
    check()


@testing.contract(
    cases(
        testing.acting_checks(cebm.Search()),
        testing.acting_checks(cebm.Search(choice="draw", keep=4), energy=cebm.Tilted()),
        testing.acting_checks(cebm.Direct(), energy=cebm.MixtureDensity()),
        testing.acting_checks(cebm.Direct(), energy=cebm.Regression()),
        testing.task_checks(cebm.ParticleTask()),
    )
)
def test_our_ways_to_act_and_task(check):
    check()


@pytest.mark.parametrize("trial", ["steady", "ibc", "mse"])
def test_our_policies(trial):
    rng = np.random.default_rng()
    obs, actions = rng.normal(size=(64, 3)), rng.normal(size=(64, 2))
    testing.check_policy(cebm.fit(obs, actions, trial=trial, steps=1), obs[:5])


# ---------------------------------------------------------------------------------------------- planted faults


def failing(checks, name):
    """Only this check fails, and says so."""
    with pytest.raises(testing.ContractError, match=name) as caught:
        testing.run_checks(checks)
    return str(caught.value)


@dataclass(frozen=True)
class FaultySampler:
    """Langevin with one fault."""

    fault: str = ""
    steps: int = 50
    settings: Any = SAMPLING

    def init(self, energy, context, start, generator):
        if self.fault == "in place":
            start += 0.1
        return LangevinState(start)

    def step(self, energy, context, state, k, generator):
        inner = Langevin(steps=50, schedule=cebm.Constant(0.002), step_clip=None, margin=None)
        if self.fault == "still":
            return state, StepInfo.of(energy.energies(context, state.actions))
        if self.fault == "global":
            torch.rand(())
        if self.fault == "random":
            generator = torch.Generator()
            generator.seed()
        new, info = inner.step(energy, context, state, k, generator)
        if self.fault == "no sqrt 2":
            noise = (new.actions - state.actions + 0.002 * energy.energies_and_gradients(context, state.actions)[1]) / 2
            return LangevinState(new.actions - noise), info
        if self.fault == "dtype":
            return LangevinState(new.actions.float()), info
        if self.fault == "info":
            return new, info._replace(energy=info.energy * torch.nan)
        return new, info


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("in place", "leaves_inputs_as_they_are"),
        ("still", "moves"),
        ("global", "leaves_global_randomness_alone"),
        ("random", "same_generator_same_result"),
        ("no sqrt 2", "samples_a_gaussian"),
        ("dtype", "keeps_shape_dtype_and_info"),
        ("info", "keeps_shape_dtype_and_info"),
    ],
)
def test_a_faulty_sampler_is_caught(fault, name):
    assert "is_saved_and_read" not in failing(testing.sampler_checks(FaultySampler(fault)), name)


def test_a_sampler_without_a_fault_passes():
    testing.check_sampler(FaultySampler())


def test_what_is_no_sampler_is_caught():
    failing(testing.sampler_checks(Uniform()), "has_steps_init_and_step")


@dataclass(frozen=True)
class FaultySource:
    """Gaussian noise around the demonstrated action, with one fault."""

    fault: str = ""

    def sample(self, energy, obs, actions, n, generator):
        if n < 1 and self.fault != "zero":
            raise ValueError("n must be at least 1")
        if self.fault == "random":
            generator = torch.Generator()
            generator.seed()
        if self.fault == "in place":
            actions += 0.1
        if self.fault == "global":
            torch.rand(())
        noise = torch.randn((len(actions), n, actions.shape[1]), generator=generator, dtype=actions.dtype)
        drawn = actions.unsqueeze(1) + 0.3 * noise
        if self.fault == "shape":
            drawn = drawn[:, 0]
        if self.fault == "graph":
            drawn = drawn * (1 + 0 * next(energy.parameters()).sum())
        log_q = self.log_prob(actions, drawn) if drawn.ndim == 3 else None
        if self.fault == "other density":
            log_q = log_q + 0.1
        return Negatives(drawn, obs, log_q, self.log_prob(actions, actions.unsqueeze(1))[:, 0])

    def log_prob(self, positives, actions):
        away = (actions - positives.unsqueeze(1)) / 0.3
        mass = -2 * np.log(0.3) - (0 if self.fault == "mass" else np.log(2 * np.pi))
        return -0.5 * away.square().sum(-1) + mass


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("random", "same_generator_same_result"),
        ("in place", "leaves_inputs_as_they_are"),
        ("global", "leaves_global_randomness_alone"),
        ("graph", "gives_constants_to_autograd"),
        ("zero", "refuses_no_negatives"),
        ("other density", "log_q_is_the_density"),
        ("mass", "log_q_is_the_density"),
    ],
)
def test_a_faulty_source_is_caught(fault, name):
    failing(testing.source_checks(FaultySource(fault)), name)


def test_a_source_of_the_wrong_shape_is_caught(unchecked_shapes):
    failing(testing.source_checks(FaultySource("shape")), "keeps_shape_and_dtype")


def test_a_source_without_a_fault_passes():
    testing.check_source(FaultySource())


class FaultyEnergy(MLPEnergy):
    """The paper's network with one fault."""

    fault = ""

    def energies(self, context, actions):
        values = super().energies(context, actions)
        if self.fault == "mixes":
            return values - values.mean()
        if self.fault == "not saved":
            return values + self.secret
        return values

    def energies_and_gradients(self, context, actions):
        values, slopes = super().energies_and_gradients(context, actions)
        if self.fault == "sign":
            slopes = -slopes
        if self.fault == "detached":
            slopes = slopes.detach()
        if self.fault == "in place":
            actions += 0.1
        if self.fault == "dropout":
            slopes = torch.nn.functional.dropout(slopes, 0.5, self.training)
        return values, slopes

    def at(self, level):
        return self if self.fault != "levels" else MLPEnergy(self.obs_dim, self.act_dim, 7)


@dataclass(frozen=True)
class Faulty:
    fault: str = ""

    def build(self, spec, generator=None):
        if self.fault == "random weights":
            generator = None
        energy = FaultyEnergy(spec.obs_dim, spec.act_dim, 16, init="torch", generator=generator)
        energy.fault = self.fault
        if self.fault == "not saved":
            energy.secret = float(torch.rand((), generator=generator))
        if self.fault == "unused weight":
            energy.idle = torch.nn.Parameter(torch.zeros(1))
        return energy


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("sign", "gradients_are_those_of_the_energies"),
        ("detached", "gradients_can_be_differentiated"),
        ("mixes", "rows_do_not_mix"),
        ("in place", "leaves_inputs_as_they_are"),
        ("unused weight", "every_weight_gets_a_gradient"),
        ("dropout", "chains_run_without_dropout"),
        ("random weights", "generator_decides_the_weights"),
        ("not saved", "weights_say_everything"),
        ("levels", "levels_share_the_context"),
    ],
)
def test_a_faulty_energy_is_caught(fault, name):
    failing(testing.energy_checks(Faulty(fault)), name)


def test_an_energy_without_a_fault_passes():
    testing.check_energy(Faulty())


@dataclass(frozen=True)
class FaultyObjective:
    """InfoNCE's parts with one fault."""

    fault: str = ""

    def terms(self, energy, obs, actions, generator):
        if self.fault == "random":
            generator = torch.Generator()
            generator.seed()
        if self.fault == "in place":
            obs += 0.1
        if self.fault == "global":
            torch.rand(())
        found = contrast(energy, Uniform(), 4, obs, actions, generator)
        loss = (found.positive.unsqueeze(1) - found.negative).mean()
        if self.fault == "sign":
            loss = -loss
        if self.fault == "detached":
            return Terms(loss.detach().requires_grad_())
        if self.fault == "nan":
            loss = loss * torch.nan
        return replace(found, loss=loss)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("random", "same_generator_same_result"),
        ("in place", "leaves_inputs_as_they_are"),
        ("global", "leaves_global_randomness_alone"),
        ("sign", "training_lowers_the_energy_of_the_data"),
        ("detached", "loss_reaches_the_energy"),
        ("nan", "gives_terms_with_a_finite_loss"),
    ],
)
def test_a_faulty_objective_is_caught(fault, name):
    failing(testing.objective_checks(FaultyObjective(fault)), name)


def test_an_objective_without_a_fault_passes():
    testing.check_objective(FaultyObjective())


@dataclass(frozen=True)
class FaultyActing:
    """Takes the lowest of uniform candidates, with one fault."""

    fault: str = ""

    def search(self, problem):
        count = 16 if problem.candidates is None or self.fault == "deaf" else problem.candidates
        actions = problem.uniform(count)
        if self.fault == "random":
            actions = actions * (0.5 + 0.5 * np.random.default_rng().random())
        if self.fault == "global":
            torch.rand(())
        if self.fault == "alike":  # the last observation's limits for all
            actions = actions.clamp(*(limit.reshape(-1, actions.shape[2])[-1] for limit in (problem.low, problem.high)))
        elif self.fault != "beyond":
            actions = problem.clip(actions)
        energies = problem.energies(actions)
        return Found(actions, energies, energies.argmin(1) + (count if self.fault == "index" else 0))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("deaf", "gives_the_candidates_asked_for"),
        ("random", "same_generator_same_result"),
        ("global", "leaves_global_randomness_alone"),
        ("beyond", "finds_candidates_within_the_limits"),
        ("index", "finds_candidates_within_the_limits"),
        ("alike", "takes_limits_of_each_observation"),
    ],
)
def test_a_faulty_way_to_act_is_caught(fault, name):
    failing(testing.acting_checks(FaultyActing(fault)), name)


def test_a_way_to_act_without_a_fault_passes():
    testing.check_acting(FaultyActing())


class FaultyPolicy:
    """A policy that counts its calls."""

    def __init__(self, fault=""):
        self.fault, self.calls = fault, 0

    def reset(self):
        if self.fault != "remembers":
            self.calls = 0

    def act(self, obs):
        self.calls += 1
        if self.fault == "in place":
            obs += 1
        actions = np.full((len(obs), 2), float(self.calls))
        return actions * np.nan if self.fault == "nan" else actions


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("remembers", "repeats_itself_after_reset"),
        ("in place", "leaves_observations_as_they_are"),
        ("nan", "acts_on_a_batch"),
    ],
)
def test_a_faulty_policy_is_caught(fault, name):
    failing(testing.policy_checks(FaultyPolicy(fault), np.zeros((3, 2))), name)


# ---------------------------------------------------------------------------------------------- how they are run


def test_a_failure_that_does_not_come_is_an_error():
    with pytest.raises(testing.ContractError, match=r"moves: passes, though it is expected to fail \(it stands\)"):
        testing.check_sampler(FaultySampler(), expected_failures={"moves": "it stands"})


def test_an_expected_failure_must_be_a_check_that_exists():
    with pytest.raises(ValueError, match="there is no check no_such"):
        testing.check_sampler(FaultySampler(), expected_failures={"no_such": "?"})


def test_all_failures_are_listed():
    with pytest.raises(testing.ContractError) as caught:
        testing.check_sampler(FaultySampler("still"))
    assert {"moves", "samples_a_gaussian"} <= {line.split(":")[0].strip() for line in str(caught.value).splitlines()}


def test_a_class_that_cannot_be_saved_is_caught():
    @dataclass(frozen=True)
    class Local(FaultySource):
        pass

    failing(testing.source_checks(Local()), "is_saved_and_read")
