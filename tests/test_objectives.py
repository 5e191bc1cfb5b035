"""Objectives and penalties are the functions of `losses` on their own source's negatives; pieces that do not go
together say so when a trial is made, and name both."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cebm import losses
from cebm.acting import Direct, Search
from cebm.composition import built, modules_in
from cebm.demonstrations import Demonstrations
from cebm.energies import MLP, EnergyModel, MixtureDensity, MLPEnergy, Regression, Tilted, TiltedEnergy
from cebm.negatives import (
    GaussianMixture,
    InBatch,
    LongChain,
    MarginalActions,
    MarginalActionSampler,
    Mixture,
    Negatives,
    Proposed,
    Replay,
    ReplayBuffer,
    ShortChains,
    Uniform,
)
from cebm.objectives import (
    MCMC,
    EntropyRegulariser,
    GradientPenalty,
    ImportanceNLL,
    InfoNCE,
    Likelihood,
    LossPenalty,
    MaximumEntropy,
    Objective,
    PositiveL2,
    RankingNCE,
    Terms,
    contrast,
)
from cebm.optimisers import Adam
from cebm.recipes import TRIALS, Inputs, Trial
from cebm.samplers import MALA, DerivativeFree, Langevin
from cebm.spaces import Specification
from cebm.trainer import Learner, Trainer

OBS, ACT, BATCH, COUNT = 3, 2, 6, 4
SPEC = Specification.flat(OBS, ACT)
CHAIN = Langevin("correct", steps=3)
ByHand = Callable[[Tensor, Tensor, Negatives], Tensor]

BY_HAND: dict[str, tuple[Any, ByHand]] = {
    "InfoNCE": (InfoNCE(ShortChains(CHAIN), COUNT), lambda p, n, d: losses.info_nce(p, n)),
    "InfoNCE, in-batch": (InfoNCE(InBatch(), COUNT), lambda p, n, d: losses.info_nce(p, n)),
    "InfoNCE, long chain": (InfoNCE(LongChain(CHAIN, 2, 1), COUNT), lambda p, n, d: losses.info_nce(p, n)),
    "InfoNCE, replay": (InfoNCE(Replay(CHAIN, 40), COUNT), lambda p, n, d: losses.info_nce(p, n)),
    "InfoNCE, marginal": (InfoNCE(MarginalActions(CHAIN), COUNT), lambda p, n, d: losses.info_nce(p, n)),
    "RankingNCE": (
        RankingNCE(GaussianMixture(), COUNT),
        lambda p, n, d: losses.ranking_nce(p, n, d.log_q_positive, d.log_q),
    ),
    "RankingNCE, mixed": (
        RankingNCE(Mixture((Uniform(0.5), GaussianMixture()), (0.5, 0.5)), COUNT),
        lambda p, n, d: losses.ranking_nce(p, n, d.log_q_positive, d.log_q),
    ),
    "ImportanceNLL": (ImportanceNLL(Uniform(), COUNT), lambda p, n, d: losses.importance_nll(p, n, d.log_q)),
    "MCMC": (MCMC(ShortChains(CHAIN), COUNT), lambda p, n, d: losses.mcmc_loss(p, n) + p.square().mean()),
    "MCMC, bare": (MCMC(ShortChains(CHAIN), COUNT, 0.0), lambda p, n, d: losses.mcmc_loss(p, n)),
    "MCMC, both anchored": (
        MCMC(ShortChains(CHAIN), COUNT, 0.1, 0.2),
        lambda p, n, d: losses.mcmc_loss(p, n) + 0.1 * p.square().mean() + 0.2 * n.square().mean(),
    ),
    "MaximumEntropy": (
        MaximumEntropy(ShortChains(CHAIN), COUNT),
        lambda p, n, d: losses.maximum_entropy_loss(p, n) + p.square().mean(),
    ),
    "MaximumEntropy, bare": (
        MaximumEntropy(ShortChains(CHAIN), COUNT, 0.0),
        lambda p, n, d: losses.maximum_entropy_loss(p, n),
    ),
}


def batch(generator: torch.Generator, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    obs = 2 * torch.rand(rows, OBS, generator=generator, dtype=torch.float64) - 1
    return obs, 2 * torch.rand(rows, ACT, generator=generator, dtype=torch.float64) - 1


def network(generator: torch.Generator) -> MLPEnergy:
    return MLPEnergy(OBS, ACT, 48, init="torch", generator=generator).double()


def tilted(generator: torch.Generator) -> TiltedEnergy:
    energy = Tilted(MLP(16, init="torch"), MixtureDensity(16)).build(SPEC, generator)
    assert isinstance(energy, TiltedEnergy)
    return energy.double()


def made(objective: Any, generator: torch.Generator) -> Any:
    """The objective as a learner has it, in float64."""
    objective = built(objective, SPEC, generator)
    for module in modules_in(objective).values():
        module.double()
    return objective


def twin(generator: torch.Generator) -> torch.Generator:
    return torch.Generator().set_state(generator.get_state())


# ---------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("name", BY_HAND)
def test_an_objective_is_its_function(name: str, generator: torch.Generator) -> None:
    """Loss and gradient of the weights, with the same generator; every random number comes from it."""
    objective, loss = BY_HAND[name]
    assert isinstance(objective, Objective)
    energy, (obs, actions) = network(generator), batch(generator)
    objective = made(objective, generator)
    other, elsewhere = twin(generator), torch.get_rng_state()
    terms = objective.terms(energy, obs, actions, generator)
    if isinstance(objective.source, ReplayBuffer):
        objective.source.count.zero_()  # as it was before
    drawn = objective.source.sample(energy, obs, actions, COUNT, other)
    positive, negative = energy(obs, actions.unsqueeze(1))[:, 0], energy(obs, drawn.actions)
    assert drawn.actions.shape == (BATCH, COUNT, ACT)
    assert terms.positive is not None and terms.negative is not None and terms.drawn is not None
    assert torch.equal(terms.drawn.actions, drawn.actions)
    torch.testing.assert_close(terms.positive, positive, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms.negative, negative, rtol=1e-12, atol=1e-12)
    expected = loss(positive, negative, drawn)
    torch.testing.assert_close(terms.loss, expected, rtol=1e-12, atol=1e-12)
    weights = list(energy.parameters())
    gradients, by_hand = (torch.autograd.grad(each, weights, allow_unused=True) for each in (terms.loss, expected))
    for one, two in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert torch.equal(generator.get_state(), other.get_state())
    assert torch.equal(torch.get_rng_state(), elsewhere)


def test_a_tilted_energy_is_contrasted_by_its_tilt(generator: torch.Generator) -> None:
    energy, (obs, actions) = tilted(generator), batch(generator)
    other = twin(generator)
    terms = InfoNCE(Proposed(), COUNT).terms(energy, obs, actions, generator)
    drawn = energy.base.propose(energy.base.encode(obs), COUNT, other)
    expected = losses.info_nce(energy.tilt(obs, actions.unsqueeze(1))[:, 0], energy.tilt(obs, drawn))
    torch.testing.assert_close(terms.loss, expected, rtol=1e-12, atol=1e-12)
    assert terms.drawn is not None and not terms.drawn.actions.requires_grad
    terms.loss.backward()
    assert all(parameter.grad is None for parameter in energy.base.parameters())


@pytest.mark.parametrize("settings", [Regression(16), MixtureDensity(16)])
@pytest.mark.parametrize(("rows", "negatives"), [(BATCH, COUNT), (3, 2), (2, 1), (1, 1)])
def test_likelihood_is_the_mean_energy(settings: Any, rows: int, negatives: int, generator: torch.Generator) -> None:
    """Its negatives serve the log: as many as there are other examples, and one even for a batch of one."""
    energy, (obs, actions) = settings.build(SPEC, generator).double(), batch(generator, rows)
    terms = Likelihood(COUNT).terms(energy, obs, actions, generator)
    torch.testing.assert_close(terms.loss, energy(obs, actions.unsqueeze(1)).mean(), rtol=1e-12, atol=1e-12)
    assert terms.negative is not None and terms.negative.shape == (rows, negatives)


PENALTIES: dict[str, tuple[Any, Callable[[MLPEnergy, Tensor, Terms], Tensor]]] = {
    "positive": (PositiveL2(0.3), lambda e, x, t: 0.3 * losses.positive_l2(t.positive)),
    "entropy": (EntropyRegulariser(0.7), lambda e, x, t: 0.7 * losses.entropy_regulariser(t.negative)),
    "gradient": (
        GradientPenalty(2.0, 1e-6),
        lambda e, x, t: 2 * losses.gradient_penalty(e.energies_and_gradients(e.encode(x), t.drawn.actions)[1], 1e-6),
    ),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_its_function(name: str, generator: torch.Generator) -> None:
    penalty, by_hand = PENALTIES[name]
    assert isinstance(penalty, LossPenalty)
    energy, (obs, actions) = network(generator), batch(generator)
    terms = InfoNCE(ShortChains(CHAIN), COUNT).terms(energy, obs, actions, generator)
    value = penalty.penalty(energy, obs, terms)
    torch.testing.assert_close(value, by_hand(energy, obs, terms), rtol=1e-12, atol=1e-12)
    assert value > 0
    gradient = torch.autograd.grad(value, energy.last.weight)[0]
    assert gradient.abs().max() > 0
    assert replace(penalty, weight=0.0).penalty(energy, obs, terms) == 0


def test_the_gradient_penalty_of_a_joint_model_is_at_its_pairs(generator: torch.Generator) -> None:
    energy, (obs, actions) = network(generator), batch(generator)
    objective = made(MCMC(Replay(CHAIN, joint=True), COUNT), generator)
    terms = objective.terms(energy, obs, actions, generator)
    drawn = terms.drawn
    pairs = torch.cat([drawn.obs, drawn.actions], -1).requires_grad_()
    x, y = pairs.flatten(0, 1).split([OBS, ACT], 1)
    (gradients,) = torch.autograd.grad(energy(x, y.unsqueeze(1)).sum(), pairs)
    expected = losses.gradient_penalty(gradients, 1e-6)
    torch.testing.assert_close(GradientPenalty(1.0, 1e-6).penalty(energy, obs, terms), expected)


def test_a_learner_adds_its_penalties_in_order(generator: torch.Generator) -> None:
    """The whole loss of a trial, by hand; and what is logged of it."""
    penalties = tuple(penalty for penalty, _ in PENALTIES.values())
    trial = Trial(MLP(16), InfoNCE(ShortChains(CHAIN), COUNT), penalties)
    learner = Learner(trial, SPEC, generator).double()
    obs, actions = batch(generator)
    other = twin(generator)
    loss, log = learner.loss(obs, actions, generator)
    terms = trial.objective.terms(learner.energy, obs, actions, other)
    expected = terms.loss
    for _, by_hand in PENALTIES.values():
        expected = expected + by_hand(learner.energy, obs, terms)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(log["loss"], loss.detach())
    torch.testing.assert_close(log["info_nce"], terms.loss.detach())


# ---------------------------------------------------------------------------------------------- contrast


def test_contrast_of_a_joint_replay(generator: torch.Generator) -> None:
    """Negatives are pairs: each energy is that of an action under its own observation."""
    energy, (obs, actions) = network(generator), batch(generator)
    source = Replay(CHAIN, 40, joint=True).build(SPEC, generator).double()
    found = contrast(energy, source, COUNT, obs, actions, generator)
    assert found.drawn is not None and found.drawn.obs.shape == (BATCH, COUNT, OBS)
    x, y = found.drawn.obs.flatten(0, 1), found.drawn.actions.flatten(0, 1)
    expected = energy(x, y.unsqueeze(1)).view(BATCH, COUNT)
    torch.testing.assert_close(found.negative, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.positive, energy(obs, actions.unsqueeze(1))[:, 0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(expected, energy(obs, found.drawn.actions)), "planted: the batch's observations"
    assert found.loss == 0 and found.own == {}
    stored = source.stored[: BATCH * COUNT]
    torch.testing.assert_close(stored, torch.cat([x, y], 1))


@dataclass(frozen=True)
class Constants:
    """A source that gives one value and says what its own loss was given."""

    value: float
    seen: list[Tensor]

    def sample(self, energy: EnergyModel, obs: Tensor, actions: Tensor, n: int, generator: Any) -> Negatives:
        return Negatives(torch.full((len(actions), n, ACT), self.value, dtype=actions.dtype), obs)

    def own_losses(self, actions: Tensor, negatives: Tensor) -> dict[str, Tensor]:
        self.seen.append(negatives)
        return {"constant_loss": negatives.sum()}


def test_a_mixture_gives_each_source_its_own_negatives(generator: torch.Generator) -> None:
    energy, (obs, actions) = network(generator), batch(generator)
    one, two, idle = Constants(0.25, []), Constants(-0.5, []), Constants(9.0, [])
    source = Mixture((one, Uniform(), two, idle), (0.25, 0.25, 0.5, 0.0))
    terms = InfoNCE(source, 8).terms(energy, obs, actions, generator)
    for part, count in ((one, 2), (two, 4)):
        assert [each.shape for each in part.seen] == [(BATCH, count, ACT)]
        assert bool((part.seen[0] == part.value).all())
    assert idle.seen == []
    # Two losses of one name are both kept.
    assert {name: float(loss) for name, loss in terms.own.items()} == {
        "constant_loss": BATCH * 2 * ACT * 0.25,
        "constant_loss_2": -BATCH * 4 * ACT * 0.5,
    }


def test_a_mixture_trains_what_learns_inside_it(generator: torch.Generator) -> None:
    """One step moves the weights of both marginals and of the energy; each marginal's loss is on its own samples."""
    source = Mixture((MarginalActions(CHAIN), Uniform(), MarginalActions(CHAIN, "maxent")), (0.25, 0.5, 0.25))
    trial = Trial(MLP(16), InfoNCE(source, 8), optimiser=Adam(batch_size=16))
    rng = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
    data = Demonstrations.from_arrays(rng.uniform(-1, 1, (40, OBS)), rng.uniform(-1, 1, (40, ACT)), [40])
    trainer = Trainer(trial, data, data, seed=int(rng.integers(2**31)))
    marginals = trainer.learner.objective.source.sources
    assert set(trainer.learner.pieces) == {"source-sources-0", "source-sources-2"}
    assert isinstance(marginals[0], MarginalActionSampler) and isinstance(marginals[2], MarginalActionSampler)
    before = {name: value.clone() for name, value in trainer.learner.state_dict().items()}
    log = trainer.step()
    assert {"marginal_loss", "marginal_loss_2"} <= set(log)
    moved = {name for name, value in trainer.learner.state_dict().items() if not torch.equal(value, before[name])}
    for place in ("energy", "pieces.source-sources-0", "pieces.source-sources-2"):
        assert any(name.startswith(place) for name in moved), place
    # By hand, from here.
    learner, obs = trainer.learner.double(), torch.zeros(5, OBS, dtype=torch.float64)
    actions = torch.zeros(5, ACT, dtype=torch.float64)
    terms = learner.objective.terms(learner.energy, obs, actions, generator)
    drawn = terms.drawn.actions
    torch.testing.assert_close(terms.own["marginal_loss"], marginals[0].loss(actions, drawn[:, :2]))
    torch.testing.assert_close(terms.own["marginal_loss_2"], marginals[2].loss(actions, drawn[:, 6:]))


def test_a_mixture_keeps_the_graph_of_its_chains(generator: torch.Generator) -> None:
    energy, (obs, actions) = network(generator), batch(generator)
    source = Mixture((Uniform(), ShortChains(CHAIN, keep_graph=True)), (0.5, 0.5))
    drawn = source.sample(energy, obs, actions, COUNT, generator).actions
    assert drawn.requires_grad
    gradient = torch.autograd.grad(drawn.square().sum(), energy.first.weight)[0]
    assert gradient.abs().max() > 0


def test_an_objective_that_is_a_module_is_trained(generator: torch.Generator) -> None:
    """A user's objective may build a module with weights of its own."""
    trial = Trial(MLP(16), Scaled(), optimiser=Adam(batch_size=16))
    learner = Learner(trial, SPEC, generator).double()
    loss, _ = learner.loss(*batch(generator), generator)
    loss.backward()
    assert learner.objective.scale.grad is not None and learner.objective.scale.grad != 0
    assert any(parameter is learner.objective.scale for parameter in learner.parameters())


class ScaledLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def terms(self, energy: EnergyModel, obs: Tensor, actions: Tensor, generator: torch.Generator) -> Terms:
        found = InfoNCE(Uniform(), COUNT).terms(energy, obs, actions, generator)
        return replace(found, loss=self.scale * found.loss)


@dataclass(frozen=True)
class Scaled:
    """Settings of a loss with a learned scale."""

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> ScaledLoss:
        return ScaledLoss()


# ---------------------------------------------------------------------------------------------- composition errors


class Nothing:
    """No source, no objective."""

    def __repr__(self) -> str:
        return "Nothing()"


@dataclass(frozen=True)
class LossOnly:
    """A user's objective that gives a loss and nothing else."""

    def terms(self, energy: EnergyModel, obs: Tensor, actions: Tensor, generator: torch.Generator) -> Terms:
        return Terms(energy(obs, actions.unsqueeze(1)).mean())


STEADY = TRIALS["steady"]
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "importance without a density": (
        lambda: ImportanceNLL(ShortChains()),
        "ImportanceNLL does not go with ShortChains: the density of the negatives must be known",
    ),
    "ranking without a density": (lambda: RankingNCE(InBatch()), "RankingNCE does not go with InBatch"),
    "ranking of a mixture without a density": (
        lambda: RankingNCE(Mixture((Uniform(), InBatch()), (0.5, 0.5))),
        "RankingNCE does not go with Mixture",
    ),
    "ranking of a mixture in a mixture": (
        lambda: RankingNCE(Mixture((Mixture((Uniform(),), (1.0,)), Uniform()), (0.5, 0.5))),
        "RankingNCE does not go with Mixture",
    ),
    "no source": (lambda: InfoNCE(Nothing()), "InfoNCE does not go with Nothing: a source has a method `sample`"),
    "a negative anchor": (lambda: MCMC(anchor=-1.0), "anchor must be at least 0 and finite, got -1.0"),
    "an anchor of negatives that is NaN": (
        lambda: MaximumEntropy(anchor_negatives=float("nan")),
        "anchor_negatives must be at least 0 and finite, got nan",
    ),
    "the class of a source": (lambda: MCMC(Uniform), "MCMC: source must be an object, not the class Uniform"),
    "likelihood of a network": (
        lambda: Trial(MLP(), Likelihood()),
        "Likelihood does not go with MLP: it needs an energy that is −log p(y|x) in closed form",
    ),
    "direct action of a network": (
        lambda: Trial(MLP(), acting=Direct()),
        "Direct does not go with MLP: it needs an energy whose best action is known",
    ),
    "direct action of a tilted energy": (
        lambda: replace(STEADY, acting=Direct()),
        "Direct does not go with Tilted",
    ),
    "a tilt with uniform negatives": (
        lambda: replace(STEADY, objective=InfoNCE(Uniform())),
        "Tilted (base_sees='observation') does not go with InfoNCE with Uniform",
    ),
    "a tilt with marginal negatives": (
        lambda: replace(STEADY, objective=InfoNCE(InBatch())),
        "Tilted (base_sees='observation') does not go with InfoNCE with InBatch",
    ),
    "a tilt with the MCMC loss": (
        lambda: replace(STEADY, objective=MCMC(Proposed())),
        "Tilted (base_sees='observation') does not go with MCMC with Proposed",
    ),
    "a tilt with a likelihood": (
        lambda: replace(STEADY, objective=LossOnly()),
        "Tilted (base_sees='observation') does not go with LossOnly: it needs an objective",
    ),
    "a marginal tilt with uniform negatives": (
        lambda: Trial(Tilted(base_sees="nothing"), InfoNCE(Uniform())),
        "Tilted (base_sees='nothing') does not go with InfoNCE with Uniform",
    ),
    "a joint replay of a tilted energy": (
        lambda: Trial(Tilted(), InfoNCE(Replay(joint=True))),
        "Tilted (base_sees='observation') does not go with InfoNCE with Replay",
    ),
    "a joint replay of a mixture": (
        lambda: Trial(MixtureDensity(), MCMC(Replay(joint=True))),
        "Replay (joint=True) needs an energy with a joint form over pairs (x, y) (`joint = True` in its settings), "
        "which MixtureDensity has not",
    ),
    "chains from a start that learns": (
        lambda: Trial(objective=InfoNCE(ShortChains(start=MarginalActions()))),
        "ShortChains does not train its start: MarginalActions, which learns, must be the source itself",
    ),
    "a long chain from a start that learns": (
        lambda: Trial(objective=InfoNCE(LongChain(start=MarginalActions()))),
        "LongChain does not train its start: MarginalActions",
    ),
    "a start that learns inside": (
        lambda: Trial(objective=InfoNCE(ShortChains(start=Mixture((Uniform(), MarginalActions()), (0.5, 0.5))))),
        "ShortChains does not train its start: MarginalActions",
    ),
    "a start that learns in a mixture": (
        lambda: Trial(objective=InfoNCE(Mixture((Uniform(), MarginalActions(start=MarginalActions())), (0.5, 0.5)))),
        "MarginalActions does not train its start: MarginalActions",
    ),
    "an objective by name": (
        lambda: Trial(objective="info-nce"),
        "objective must be an object with a method `terms` or `build`, got 'info-nce'",
    ),
    "the class of an energy": (
        lambda: Trial(energy=MLP),
        "energy must be an object with a method `build`, got MLP",
    ),
    "the class of an objective": (lambda: Trial(objective=InfoNCE), "objective must be an object with a method"),
    "the class of a way to act": (lambda: Trial(acting=Search), "acting must be an object with a method `search`"),
    "an optimiser by name": (lambda: Trial(optimiser="adam"), "optimiser must be an object with a method `make`"),
    "no penalty": (
        lambda: Trial(penalties=(PositiveL2(), InfoNCE())),
        "penalties.1 must be an object with a method `penalty`, got InfoNCE(",
    ),
    "a misspelt choice": (lambda: Search(choice="minimun"), "choice must be 'minimum' or 'draw', got 'minimun'"),
    "a misspelt scaling": (
        lambda: Inputs("min-mix"),
        "obs_scaling must be 'min-max', 'standardise' or 'robust', got 'min-mix'",
    ),
    "a misspelt objective": (
        lambda: MarginalActions(objective="max-ent"),
        "objective must be 'mcmc' or 'maxent', got 'max-ent'",
    ),
    "a misspelt view": (
        lambda: Tilted(base_sees="obs"),
        "base_sees must be 'observation' or 'nothing', got 'obs'",
    ),
    "no negatives": (lambda: InfoNCE(count=0), "count must be at least 1, got 0"),
    "no other examples": (lambda: Likelihood(0), "count must be at least 1, got 0"),
    "a negative weight": (lambda: PositiveL2(-1.0), "weight must be at least 0 and finite, got -1.0"),
    "an infinite weight": (lambda: EntropyRegulariser(float("inf")), "weight must be at least 0 and finite, got inf"),
    "a weight that is NaN": (lambda: GradientPenalty(float("nan")), "weight must be at least 0 and finite, got nan"),
    "a negative margin": (lambda: GradientPenalty(1.0, -1.0), "margin must be at least 0 and finite, got -1.0"),
    "a negative weight of a marginal": (lambda: MarginalActions(positive_l2=-1.0), "positive_l2 must be at least 0"),
    "chains by name": (
        lambda: ShortChains("langevin"),
        "ShortChains: sampler must be an object with steps, init and step, got 'langevin'",
    ),
    "the class of a sampler": (
        lambda: LongChain(MALA),
        "LongChain: sampler must be an object with steps, init and step, got the class MALA",
    ),
    "replay without a sampler": (lambda: Replay(None), "Replay: sampler must be an object"),
    "a marginal without a sampler": (lambda: MarginalActions(Nothing()), "MarginalActions: sampler must be an object"),
    "replay without a place": (lambda: Replay(capacity=0), "capacity must be at least 1, got 0"),
    "replay of more than all": (lambda: Replay(reinitialise=1.5), "reinitialise must be in [0, 1], got 1.5"),
    "replay in a negative margin": (lambda: Replay(margin=-0.1), "margin must be at least 0"),
    "a graph through resampling": (
        lambda: ShortChains(DerivativeFree(), keep_graph=True),
        "keep_graph needs a sampler with differentiable moves, not DerivativeFree",
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ERRORS)
def test_pieces_that_do_not_go_together_are_named(name: str) -> None:
    make, message = ERRORS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_every_named_trial_is_a_composition_that_is_allowed() -> None:
    for trial in TRIALS.values():
        assert replace(trial) == trial


def test_terms_without_energies_refuse_penalties_by_name(generator: torch.Generator) -> None:
    energy, (obs, actions) = network(generator), batch(generator)
    terms = LossOnly().terms(energy, obs, actions, generator)
    for penalty, _ in PENALTIES.values():
        with pytest.raises(ValueError, match=f"{type(penalty).__name__} needs an objective whose terms hold"):
            penalty.penalty(energy, obs, terms)


def test_a_source_that_promised_a_density_and_gives_none_is_named(generator: torch.Generator) -> None:
    class Empty(Uniform):
        def sample(self, *args: Any) -> Negatives:
            return replace(super().sample(*args), log_q=None)

    energy, (obs, actions) = network(generator), batch(generator)
    for objective in (RankingNCE(Empty(), COUNT), ImportanceNLL(Empty(), COUNT)):
        with pytest.raises(ValueError, match=f"{type(objective).__name__} does not go with Empty: the source gave no"):
            objective.terms(energy, obs, actions, generator)


def test_a_proposal_is_asked_of_an_energy_that_has_one(generator: torch.Generator) -> None:
    energy, (obs, actions) = network(generator), batch(generator)
    with pytest.raises(TypeError, match="MLPEnergy has no proposal to draw from"):
        InfoNCE(Proposed(), COUNT).terms(energy, obs, actions, generator)


# ---------------------------------------------------------------------------------------------- what an anchor biases


@pytest.mark.parametrize(
    ("weight", "both", "divergence", "width"),
    [(0.01, False, 0.0001, 1.01), (0.1, False, 0.006, 1.08), (1.0, False, 0.10, 1.37), (0.1, True, 0.045, 1.51)],
)
def test_the_optimum_of_an_anchored_loss(weight: float, both: bool, divergence: float, width: float) -> None:
    """With exact samples the loss is stationary where p_θ = p (1 + 2wE), for both energies anchored where
    p_θ = p (1 + 2wE)/(1 − 2wE) (docs/theory.md). An energy per cell of a grid, trained on a Gaussian of deviation 0.1
    in [-1, 1], gets there; it is too wide by what the formula says."""
    y = torch.linspace(-1, 1, 401, dtype=torch.float64)
    p = torch.softmax(-(y**2) / (2 * 0.1**2), 0)
    energies = torch.zeros_like(y, requires_grad=True)
    for _ in range(60):
        # Newton's steps of the stationarity condition, on the diagonal of its Jacobian, are slow but sure.
        for _ in range(500):
            model = torch.softmax(-energies.detach(), 0)
            positive, negative = p * (energies + weight * energies**2), model * (weight * both * energies**2 - energies)
            (slope,) = torch.autograd.grad((positive + negative).sum(), energies)
            curvature = model + 2 * weight * (p + both * model)
            energies.data -= 0.5 * slope / curvature
        if slope.abs().max() < 1e-12:
            break
    with torch.no_grad():
        model = torch.softmax(-energies, 0)
        found, expected = model * (1 - 2 * weight * both * energies), p * (1 + 2 * weight * energies)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert float((p * (p / model).log()).nan_to_num().sum()) == pytest.approx(divergence, rel=0.1, abs=2e-4)
        assert float((model * y**2).sum().sqrt()) == pytest.approx(0.1 * width, rel=0.02)
