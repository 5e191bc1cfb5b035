"""Every source of negatives keeps one contract; each density is the one its samples follow; each state is kept."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from torch import Tensor, nn

from cebm.energies import EnergyModel, MixtureDensityEnergy, MLPEnergy, ModuleEnergy, TiltedEnergy
from cebm.losses import importance_nll, info_nce, info_nce_per_example, ranking_nce
from cebm.negatives import (
    Density,
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
    Source,
    Uniform,
    has_density,
    own_losses,
)
from cebm.samplers import MALA, Constant, DerivativeFree, Langevin, Polynomial, Sampler, run
from cebm.spaces import Specification

OBS, ACT, BATCH, N = 3, 2, 6, 4
FALSE_ALARM = 1e-5  # of one statistical check, all its comparisons together
MAX_Z = 4.5  # two-sided, 7e-6

# A chain that does not move: what comes out is what its start was.
STANDSTILL = Langevin("ibc", steps=1, schedule=Constant(1e-12), noise=0.0, step_clip=None, margin=None)

SAMPLERS: dict[str, Sampler] = {
    "ibc": Langevin("ibc", noise=0.1),
    "correct": Langevin("correct"),
    "mala": MALA(steps=5, adapt=2),
    "derivative-free": DerivativeFree(),
    "autoregressive": DerivativeFree(autoregressive=True),
}
STARTS: dict[str, Callable[[], Source]] = {
    "uniform": Uniform,
    "data": InBatch,
    "proposal": GaussianMixture,
    "replay": lambda: ReplayBuffer(ACT, Langevin("correct", steps=2), capacity=40),
}
Factory = Callable[[torch.Generator], Source]


def _short_chains(sampler: str, start: str) -> Factory:
    return lambda generator: ShortChains(SAMPLERS[sampler], STARTS[start]())


SOURCES: dict[str, Factory] = {
    "uniform": lambda generator: Uniform(),
    "gaussian-mixture": lambda generator: GaussianMixture(),
    "in-batch": lambda generator: InBatch(),
    "long-chain": lambda generator: LongChain(burn_in=3, thin=2),
    "long-chain-from-data": lambda generator: LongChain(Langevin("ibc", noise=0.1), 0, 1, InBatch()),
    "replay": lambda generator: ReplayBuffer(ACT, capacity=40),
    "replay-pairs": lambda generator: ReplayBuffer(OBS + ACT, capacity=40, joint=True),
    "mas-mcmc": lambda generator: MarginalActionSampler(ACT, generator=generator),
    "mas-ibc": lambda generator: MarginalActionSampler(ACT, SAMPLERS["ibc"], start=InBatch(), generator=generator),
    "mas-shared": lambda generator: MarginalActionSampler(ACT, shared=True, generator=generator),
    "mas-maxent": lambda generator: MarginalActionSampler(
        ACT, objective="maxent", positive_l2=1.0, generator=generator
    ),
    "mixture-with-density": lambda generator: Mixture([Uniform(), GaussianMixture()], (0.5, 0.5)),
    "mixture-in-part": lambda generator: Mixture([Uniform(), InBatch(), ShortChains()], (0.25, 0.25, 0.5)),
    "mixture-with-state": lambda generator: Mixture(
        [MarginalActionSampler(ACT, generator=generator), ReplayBuffer(ACT, capacity=40)], (0.5, 0.5)
    ),
    **{f"short-chains-{s}-from-{b}": _short_chains(s, b) for s in SAMPLERS for b in STARTS},
}
WITH_DENSITY = {"uniform", "gaussian-mixture", "mixture-with-density"}


def _energy(name: str, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> EnergyModel:
    """With dropout and in training mode: that must not reach the chains."""
    network = MLPEnergy(OBS, ACT, 16, dropout=0.5, init="torch", generator=generator)
    return network.to(dtype)


def _source(name: str, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Source:
    source = SOURCES[name](generator)
    for part in [source, *getattr(source, "sources", [])]:
        if isinstance(part, nn.Module):
            part.to(dtype)
    return source


def _batch(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    obs = 2 * torch.rand(BATCH, OBS, generator=generator, dtype=dtype) - 1
    return obs, 2 * torch.rand(BATCH, ACT, generator=generator, dtype=dtype) - 1


def _clone(generator: torch.Generator) -> torch.Generator:
    return torch.Generator().set_state(generator.get_state())


def _tensors(negatives: Negatives) -> list[Tensor]:
    fields = (negatives.actions, negatives.obs, negatives.log_q, negatives.log_q_positive)
    return [field for field in fields if field is not None]


# ---------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SOURCES)
def test_shapes_and_dtypes(name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    energy, source = _energy(name, generator, dtype), _source(name, generator, dtype)
    obs, actions = _batch(generator, dtype)
    for _ in range(2):  # a replay buffer is empty the first time, and holds something the second
        negatives = source.sample(energy, obs, actions, N, generator)
        assert negatives.actions.shape == (BATCH, N, ACT)
        assert all(values.dtype == dtype and values.device == obs.device for values in _tensors(negatives))
        assert all(bool(torch.isfinite(values).all()) for values in _tensors(negatives))
        if name == "replay-pairs":
            assert negatives.obs.shape == (BATCH, N, OBS)
        else:
            assert negatives.obs is obs
        if name in WITH_DENSITY:
            assert negatives.log_q is not None and negatives.log_q.shape == (BATCH, N)
            assert negatives.log_q_positive is not None and negatives.log_q_positive.shape == (BATCH,)
        else:
            assert negatives.log_q is None and negatives.log_q_positive is None


@pytest.mark.parametrize("name", SOURCES)
def test_same_generator_same_negatives(name: str, generator: torch.Generator) -> None:
    energy, source = _energy(name, generator), _source(name, generator)
    obs, actions = _batch(generator)
    twin, twin_generator = copy.deepcopy(source), _clone(generator)
    elsewhere = torch.get_rng_state()
    for _ in range(2):
        first = source.sample(energy, obs, actions, N, generator)
        second = twin.sample(energy, obs, actions, N, twin_generator)
        assert all(torch.equal(a, b) for a, b in zip(_tensors(first), _tensors(second), strict=True))
    assert torch.equal(torch.get_rng_state(), elsewhere), "drew from torch's global generator"
    later = source.sample(energy, obs, actions, N, generator)
    assert not torch.equal(later.actions, first.actions), "does not draw from the generator"


@pytest.mark.parametrize("name", SOURCES)
def test_inputs_are_not_modified(name: str, generator: torch.Generator) -> None:
    energy, source = _energy(name, generator), _source(name, generator)
    obs, actions = _batch(generator)
    list(energy.children())[-1].eval()  # each module keeps its own mode
    modes = [module.training for module in energy.modules()]
    before = [values.clone() for values in (obs, actions, *energy.state_dict().values())]
    negatives = source.sample(energy, obs, actions, N, generator)
    negatives.actions.zero_()  # nor does the result share memory with them
    after = [obs, actions, *energy.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [module.training for module in energy.modules()] == modes
    assert all(parameter.grad is None for parameter in energy.parameters())


@pytest.mark.parametrize("name", SOURCES)
def test_negatives_are_constants(name: str, generator: torch.Generator) -> None:
    energy, source = _energy(name, generator), _source(name, generator)
    obs, actions = _batch(generator)
    negatives = source.sample(energy, obs, actions.requires_grad_(), N, generator)
    assert not any(values.requires_grad for values in _tensors(negatives))


@pytest.mark.parametrize("name", ["short-chains-ibc-from-uniform", "long-chain", "replay"])
def test_steep_energies_give_finite_negatives(name: str, generator: torch.Generator) -> None:
    energy, source = 1e6 * _energy(name, generator), _source(name, generator)
    negatives = source.sample(energy, *_batch(generator), N, generator)
    assert bool(torch.isfinite(negatives.actions).all())


class _Noisy(nn.Module):
    """Dropout and batch statistics: what must stand still while a chain runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.map = nn.BatchNorm1d(OBS), nn.Dropout(0.5), nn.Bilinear(OBS, ACT, 1)

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        return self.map(self.drop(self.norm(features)), actions)


@pytest.mark.parametrize("name", ["short-chains-correct-from-uniform", "long-chain", "replay"])
def test_a_users_module_is_evaluated_in_chains(name: str, generator: torch.Generator) -> None:
    energy = ModuleEnergy(_Noisy(), OBS, ACT)
    energy.module.map.train(False)
    obs, actions = _batch(generator)
    before, elsewhere = copy.deepcopy(energy.state_dict()), torch.get_rng_state()
    _source(name, generator).sample(energy, obs, actions, N, generator)
    assert all(torch.equal(value, before[key]) for key, value in energy.state_dict().items())
    assert torch.equal(torch.get_rng_state(), elsewhere)
    assert energy.module.drop.training and not energy.module.map.training, "each module gets its own mode back"


@pytest.mark.parametrize("name", SOURCES)
def test_bad_input_is_named(name: str, generator: torch.Generator, unchecked_shapes: None) -> None:
    energy, source = _energy(name, generator), _source(name, generator)
    obs, actions = _batch(generator)
    nan = torch.full_like
    cases: dict[str, tuple[Tensor, Tensor, int]] = {
        "n must be at least 1": (obs, actions, 0),
        "actions must be a non-empty": (obs[:0], actions[:0], N),
        r"actions must be a non-empty \[batch, act\]": (obs, actions.unsqueeze(1), N),
        "obs must have 6 rows": (obs[:-1], actions, N),
        "obs has NaN": (nan(obs, torch.nan), actions, N),
        "actions has NaN": (obs, nan(actions, torch.inf), N),
    }
    for message, (bad_obs, bad_actions, n) in cases.items():
        with pytest.raises(ValueError, match=message):
            source.sample(energy, bad_obs, bad_actions, n, generator)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(-0.1), "margin"),
        (lambda: GaussianMixture(()), "deviations"),
        (lambda: GaussianMixture((0.1, 0.0)), "deviations"),
        (lambda: GaussianMixture((math.nan,)), "deviations"),
        (lambda: GaussianMixture((math.inf,)), "deviations"),
        (lambda: LongChain(burn_in=-1), "burn_in"),
        (lambda: LongChain(thin=0), "thin"),
        (lambda: ReplayBuffer(ACT, capacity=0), "capacity"),
        (lambda: ReplayBuffer(0), "dim"),
        (lambda: ReplayBuffer(ACT, reinitialise=-0.1), "reinitialise"),
        (lambda: ReplayBuffer(ACT, reinitialise=math.nan), "reinitialise"),
        (lambda: ReplayBuffer(ACT, margin=-0.1), "margin"),
        (lambda: MarginalActionSampler(ACT, objective="nll"), "objective"),
        (lambda: MarginalActionSampler(ACT, positive_l2=-1.0), "positive_l2"),
        (lambda: MarginalActionSampler(0), "act_dim"),
        (lambda: Mixture([Uniform()], (0.5, 0.5)), "fractions"),
        (lambda: Mixture([], ()), "fractions"),
        (lambda: Mixture([Uniform(), InBatch()], (1.5, -0.5)), "fractions"),
        (lambda: Mixture([Uniform(), InBatch()], (0.5, 0.4)), "fractions"),
        (lambda: Mixture([Uniform()], (math.nan,)), "fractions"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Source], message: str, unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------------------- densities
#
# A density is integrated over cells (intervals, or their products in 2-D); the numbers of samples in the cells are
# then binomial. The cells' edges include the jumps of the uniform densities, so that the quadrature is exact.

EDGES = (-7.0, -1.5, -1.3, -1.1, -0.8, -0.4, -0.1, 0.1, 0.25, 0.4, 0.7, 1.1, 1.3, 1.5, 7.0)
POSITIVES = (0.3, -0.7)

DENSITIES: dict[str, Density] = {
    "uniform": Uniform(),
    "uniform-wide": Uniform(margin=0.15),
    "gaussian": GaussianMixture((0.2,)),
    "gaussian-mixture": GaussianMixture(),
    "gaussian-mixture-unequal": GaussianMixture((0.05, 0.5)),
}
# Counts that are far from the shares, so that a density with the wrong ones shows.
MIXTURE = Mixture([GaussianMixture((0.1, 0.4)), Uniform(0.15), Uniform()], (0.5, 0.3, 0.2))
MIXTURE_N, MIXTURE_COUNTS = 3, (1, 1, 1)


def _rule(act: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes [nodes, act], their weights, and the cell that each is in: Gauss-Legendre on panels of at most 0.1."""
    nodes, weights, cells = [], [], []
    unit_nodes, unit_weights = np.polynomial.legendre.leggauss(8)
    for cell, (low, high) in enumerate(pairwise(EDGES)):
        ends = np.linspace(low, high, math.ceil((high - low) / 0.1) + 1)
        for a, b in pairwise(ends):
            nodes.append(a + (b - a) * (unit_nodes + 1) / 2)
            weights.append((b - a) / 2 * unit_weights)
            cells.append(np.full(8, cell))
    node, weight, cell = (torch.from_numpy(np.concatenate(parts)) for parts in (nodes, weights, cells))
    if act == 1:
        return node.unsqueeze(1), weight, cell
    cells_per_dim = len(EDGES) - 1
    return (
        torch.cartesian_prod(node, node),
        torch.outer(weight, weight).flatten(),
        (cells_per_dim * cell.unsqueeze(1) + cell).flatten(),
    )


def _cell_masses(log_prob: Callable[[Tensor, Tensor], Tensor], positive: Tensor) -> Tensor:
    nodes, weights, cells = _rule(positive.shape[0])
    masses = log_prob(positive.unsqueeze(0), nodes.unsqueeze(0))[0].exp() * weights
    return masses.new_zeros((len(EDGES) - 1) ** positive.shape[0]).index_add(0, cells, masses)


def _p_value(samples: Tensor, masses: Tensor) -> float:
    """Bonferroni over the cells and the two sides of exact binomial tails; samples [rows, act] are independent."""
    edges = torch.tensor(EDGES[1:-1], dtype=samples.dtype)
    index = torch.bucketize(samples.contiguous(), edges)
    cells = index[:, 0] if samples.shape[1] == 1 else (len(EDGES) - 1) * index[:, 0] + index[:, 1]
    counts = torch.bincount(cells, minlength=len(masses)).numpy()
    share = masses.clamp(0, 1).numpy()
    tails = np.minimum(binom.cdf(counts, len(samples), share), binom.sf(counts - 1, len(samples), share))
    return float(2 * len(masses) * tails.min())


def _hand_mixture(positives: Tensor, actions: Tensor, weights: tuple[float, ...] = MIXTURE_COUNTS) -> Tensor:
    """log Σ_j w_j q_j / Σ_j w_j, from the parts of MIXTURE."""
    total = sum(weights)
    terms = [
        source.log_prob(positives, actions) + math.log(weight / total)
        for source, weight in zip(MIXTURE.sources, weights, strict=True)
        if isinstance(source, Density)
    ]
    return torch.stack(terms).logsumexp(0)


def _positives(act: int, rows: int, value: float) -> tuple[Tensor, Tensor]:
    positive = torch.linspace(value, -0.2, act, dtype=torch.float64)
    return positive, positive.expand(rows, act)


@pytest.mark.parametrize("act", [1, 2])
@pytest.mark.parametrize("value", POSITIVES)
@pytest.mark.parametrize("name", [*DENSITIES, "mixture"])
def test_density_integrates_to_one(name: str, value: float, act: int) -> None:
    log_prob = _hand_mixture if name == "mixture" else DENSITIES[name].log_prob
    positive, _ = _positives(act, 1, value)
    assert _cell_masses(log_prob, positive).sum().item() == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize("act", [1, 2])
@pytest.mark.parametrize("name", DENSITIES)
def test_samples_follow_the_density(name: str, act: int, generator: torch.Generator) -> None:
    source, energy = DENSITIES[name], MLPEnergy(OBS, act, 4, generator=generator)
    assert isinstance(source, Uniform | GaussianMixture)
    for value in POSITIVES:
        positive, positives = _positives(act, 5000, value)
        masses = _cell_masses(source.log_prob, positive)
        negatives = source.sample(energy, positives.new_zeros(5000, OBS), positives, N, generator)
        assert negatives.log_q is not None and negatives.log_q_positive is not None
        samples = negatives.actions.flatten(0, 1)
        assert _p_value(samples, masses) > FALSE_ALARM
        assert _p_value(0.9 * samples, masses) < FALSE_ALARM, "planted: samples drawn 10 % too narrow"
        assert torch.equal(negatives.log_q, source.log_prob(positives, negatives.actions))
        at_positive = source.log_prob(positives, positives.unsqueeze(1))[:, 0]
        assert torch.equal(negatives.log_q_positive, at_positive)


def test_gaussian_components_are_shared_by_the_dimensions(generator: torch.Generator) -> None:
    """A σ drawn per coordinate has the same marginals as a σ drawn per sample: only the joint cells tell."""
    source = GaussianMixture((0.05, 0.5))
    positive, positives = _positives(2, 20_000, 0.3)
    masses = _cell_masses(source.log_prob, positive)
    energy = MLPEnergy(OBS, 2, 4, generator=generator)
    draw = source.sample(energy, positives.new_zeros(20_000, OBS), positives, 2, generator).actions
    assert _p_value(draw[:, 0], masses) > FALSE_ALARM
    planted = torch.stack([draw[:, 0, 0], draw[:, 1, 1]], 1)
    assert _p_value(planted, masses) < FALSE_ALARM


def test_known_densities(generator: torch.Generator) -> None:
    positives = 2 * torch.rand(5, ACT, generator=generator, dtype=torch.float64) - 1
    values = 2 * torch.rand(5, N, ACT, generator=generator, dtype=torch.float64) - 1
    assert torch.allclose(Uniform().log_prob(positives, values), values.new_full((), -ACT * math.log(2.2)))
    assert bool((Uniform().log_prob(positives, 1.11 * values.sign()) == -torch.inf).all())
    deviations = (0.1, 0.4, 0.8)
    components = [
        torch.distributions.Normal(positives.unsqueeze(1), deviation).log_prob(values).sum(-1)
        for deviation in deviations
    ]
    expected = torch.stack(components).logsumexp(0) - math.log(3)
    assert torch.allclose(GaussianMixture(deviations).log_prob(positives, values), expected)


# ---------------------------------------------------------------------------------------------- mixtures


@st.composite
def _shares(draw: st.DrawFn) -> tuple[float, ...]:
    parts = draw(st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda parts: sum(parts) > 1e-3))
    return tuple(part / sum(parts) for part in parts)


@given(_shares(), st.integers(1, 10**9))
def test_counts_add_up_and_stay_close(fractions: tuple[float, ...], n: int) -> None:
    counts = Mixture([Uniform()] * len(fractions), fractions).counts(n)
    assert sum(counts) == n
    for count, fraction in zip(counts, fractions, strict=True):
        assert abs(count - fraction * n) < 1 + 1e-6 * n / 10**3
        assert count == 0 or fraction > 0


def test_counts_of_shares_that_are_rounded() -> None:
    assert Mixture([Uniform()] * 3, (0.3333333, 0.3333333, 0.3333333)).counts(10**8) == [33333334, 33333333, 33333333]
    assert sum(Mixture([Uniform()] * 2, (0.5000004, 0.5000004)).counts(10**8)) == 10**8
    assert Mixture([Uniform()] * 3, (0.7, 0.2, 0.1)).counts(10) == [7, 2, 1]
    assert tuple(MIXTURE.counts(MIXTURE_N)) == MIXTURE_COUNTS


@pytest.mark.parametrize("act", [1, 2])
def test_mixture_density_has_the_actual_counts(act: int, generator: torch.Generator) -> None:
    energy = MLPEnergy(OBS, act, 4, generator=generator)
    positives = 2 * torch.rand(BATCH, act, generator=generator, dtype=torch.float64) - 1
    negatives = MIXTURE.sample(energy, positives.new_zeros(BATCH, OBS), positives, MIXTURE_N, generator)
    assert negatives.log_q is not None and negatives.log_q_positive is not None
    assert torch.allclose(negatives.log_q, _hand_mixture(positives, negatives.actions))
    assert torch.allclose(negatives.log_q_positive, _hand_mixture(positives, positives.unsqueeze(1))[:, 0])


@pytest.mark.parametrize("act", [1, 2])
def test_mixture_samples_follow_its_density(act: int, generator: torch.Generator) -> None:
    """One of the n negatives of a row, picked at random, is a sample of the mixture."""
    rows = 20_000
    positive, positives = _positives(act, rows, 0.3)
    energy = MLPEnergy(OBS, act, 4, generator=generator)
    negatives = MIXTURE.sample(energy, positives.new_zeros(rows, OBS), positives, MIXTURE_N, generator)
    pick = torch.randint(MIXTURE_N, (rows,), generator=generator)
    samples = negatives.actions[torch.arange(rows), pick]
    assert _p_value(samples, _cell_masses(_hand_mixture, positive)) > FALSE_ALARM
    nominal = _cell_masses(lambda p, y: _hand_mixture(p, y, MIXTURE.fractions), positive)
    assert _p_value(samples, nominal) < FALSE_ALARM, "planted: the shares asked for instead of the counts"


def test_importance_integral_is_unbiased(generator: torch.Generator) -> None:
    """1/n Σ f(ỹ)/q(ỹ) has the mean ∫f, and a variance of Σ_j n_j Var_{q_j}(f/q)/n² that quadrature gives."""
    rows = 20_000
    positive, positives = _positives(1, rows, 0.3)
    energy = MLPEnergy(OBS, 1, 4, generator=generator)

    def f(y: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((y[..., 0] + 0.5) / 0.3) ** 2)

    nodes, weights, _ = _rule(1)
    at_nodes = lambda log_prob: log_prob(positive.unsqueeze(0), nodes.unsqueeze(0))[0].exp() * weights  # noqa: E731
    exact = (f(nodes) * weights).sum()
    ratio = f(nodes) * weights / at_nodes(_hand_mixture)
    variance = ratio.new_zeros(())
    for source, count in zip(MIXTURE.sources, MIXTURE_COUNTS, strict=True):
        assert isinstance(source, Density)
        mass = at_nodes(source.log_prob)
        variance += count * ((mass * ratio**2).sum() - (mass * ratio).sum() ** 2) / MIXTURE_N**2

    negatives = MIXTURE.sample(energy, positives.new_zeros(rows, OBS), positives, MIXTURE_N, generator)
    assert negatives.log_q is not None

    def z(log_q: Tensor) -> float:
        estimate = (f(negatives.actions) / log_q.exp()).mean()
        return ((estimate - exact) / (variance / rows).sqrt()).item()

    assert abs(z(negatives.log_q)) < MAX_Z
    planted = _hand_mixture(positives, negatives.actions, MIXTURE.fractions)
    assert abs(z(planted)) > MAX_Z, "planted: the shares asked for instead of the counts"


def test_mixture_parts_keep_their_order_and_draw_in_turn(generator: torch.Generator) -> None:
    energy, (obs, actions) = _energy("", generator), _batch(generator)
    sources, twin = [InBatch(), ShortChains(), GaussianMixture()], _clone(generator)
    mixed = Mixture(sources, (0.25, 0.5, 0.25)).sample(energy, obs, actions, N, generator)
    parts = [source.sample(energy, obs, actions, n, twin) for source, n in zip(sources, (1, 2, 1), strict=True)]
    assert torch.equal(mixed.actions, torch.cat([part.actions for part in parts], 1))
    assert mixed.log_q is None and mixed.info is not None


def test_mixture_without_a_share_is_the_other_source(generator: torch.Generator) -> None:
    """A share of 0 is not drawn, so it does not take the density away either."""
    energy, (obs, actions), twin = _energy("", generator), _batch(generator), _clone(generator)
    mixed = Mixture([InBatch(), Uniform()], (0.0, 1.0)).sample(energy, obs, actions, N, generator)
    alone = Uniform().sample(energy, obs, actions, N, twin)
    assert all(torch.allclose(a, b) for a, b in zip(_tensors(mixed), _tensors(alone), strict=True))


def test_pairs_do_not_mix(generator: torch.Generator) -> None:
    mixture = Mixture([Uniform(), ReplayBuffer(OBS + ACT, joint=True)], (0.5, 0.5))
    with pytest.raises(ValueError, match="do not mix"):
        mixture.sample(_energy("replay-pairs", generator), *_batch(generator), N, generator)


def test_densities_fit_the_objectives(generator: torch.Generator) -> None:
    energy, (obs, actions) = _energy("", generator).eval(), _batch(generator)
    positive = energy(obs, actions.unsqueeze(1))[:, 0]
    for source in (Uniform(), GaussianMixture(), Mixture([Uniform(), GaussianMixture()], (0.5, 0.5))):
        negatives = source.sample(energy, obs, actions, N, generator)
        assert negatives.log_q is not None and negatives.log_q_positive is not None
        negative = energy(negatives.obs, negatives.actions)
        weighted = ranking_nce(positive, negative, negatives.log_q_positive, negatives.log_q)
        assert bool(torch.isfinite(importance_nll(positive, negative, negatives.log_q)))
        if isinstance(source, Uniform):
            assert torch.allclose(weighted, info_nce(positive, negative))


def test_ranking_nce_is_biased_for_a_proposal_around_the_positive() -> None:
    """Is -E = log p a stationary point of the expected loss with one negative? All pairs of a grid, no sampling.

    Yes where q does not depend on the positive. For q(ỹ|y⁺) = q(y⁺|ỹ) the log q terms give the positive away, and it
    is InfoNCE, without them, that is right (for one negative; ranking NCE comes right as M grows).
    """
    grid = torch.linspace(-1, 1, 41, dtype=torch.float64)
    p = torch.softmax(-0.5 * (grid / 0.3) ** 2, 0)
    negatives = grid.view(1, -1, 1).expand(len(grid), -1, -1)

    def slope(source: Uniform | GaussianMixture, weighted: bool) -> float:
        """Largest derivative of the loss with respect to an energy, at the true energies."""
        energies = (-p.log()).requires_grad_()
        log_q = source.log_prob(grid.unsqueeze(1), negatives)
        pairs = p.unsqueeze(1) * log_q.exp() * (grid[1] - grid[0])
        rows = torch.cartesian_prod(torch.arange(len(grid)), torch.arange(len(grid)))
        positive, negative = energies[rows[:, 0]], energies[rows[:, 1]].unsqueeze(1)
        if weighted:
            positive = positive + log_q.diagonal()[rows[:, 0]]
            negative = negative + log_q.reshape(-1, 1)
        (info_nce_per_example(positive, negative) * pairs.flatten()).sum().backward()
        assert energies.grad is not None
        return energies.grad.abs().max().item()

    assert slope(Uniform(0.0), weighted=True) < 1e-12
    assert slope(GaussianMixture(), weighted=False) < 1e-12
    assert slope(GaussianMixture(), weighted=True) > 1e-3


# ---------------------------------------------------------------------------------------------- in-batch


def _labels(batch: int) -> tuple[Tensor, Tensor]:
    """Actions that tell which example they belong to."""
    return torch.zeros(batch, OBS), torch.arange(batch, dtype=torch.float32).unsqueeze(1)


@given(st.integers(2, 12), st.data())
def test_in_batch_takes_others_once(batch: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, batch - 1))
    generator = torch.Generator()
    generator.seed()
    obs, labels = _labels(batch)
    drawn = InBatch().sample(MLPEnergy(OBS, 1, 4), obs, labels, n, generator).actions[..., 0]
    assert bool((drawn != labels).all()), "the row's own example is no negative"
    assert all(len(set(row)) == n for row in drawn.tolist()), "an example came twice"


def test_in_batch_takes_all_others_equally_often(generator: torch.Generator) -> None:
    batch, n, calls = 5, 2, 1500
    obs, labels = _labels(batch)
    energy = MLPEnergy(OBS, 1, 4, generator=generator)
    counts = np.zeros((batch, batch), dtype=int)
    for _ in range(calls):
        drawn = InBatch().sample(energy, obs, labels, n, generator).actions[..., 0].long().numpy()
        np.add.at(counts, (np.arange(batch)[:, None], drawn), 1)

    def p_value(counts: np.ndarray) -> float:
        others = counts[~np.eye(batch, dtype=bool)]
        share = n / (batch - 1)
        tails = np.minimum(binom.cdf(others, calls, share), binom.sf(others - 1, calls, share))
        return 2 * len(others) * tails.min()

    assert p_value(counts) > FALSE_ALARM
    neighbours = sum(np.roll(np.eye(batch, dtype=int), shift, axis=1) for shift in range(1, n + 1))
    assert p_value(np.round(0.7 * counts + 0.3 * calls * neighbours)) < FALSE_ALARM, "planted: 30 % take the next ones"


def test_in_batch_needs_enough_others(generator: torch.Generator) -> None:
    obs, labels = _labels(4)
    energy = MLPEnergy(OBS, 1, 4, generator=generator)
    with pytest.raises(ValueError, match="n must be at most 3"):
        InBatch().sample(energy, obs, labels, 4, generator)
    with pytest.raises(ValueError, match="n must be at most 0"):
        InBatch().sample(energy, obs[:1], labels[:1], 1, generator)


# ---------------------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_short_chains_are_a_start_and_a_run(sampler: str, start: str, generator: torch.Generator) -> None:
    energy, (obs, actions) = _energy("", generator).eval(), _batch(generator)
    base, twin = STARTS[start](), _clone(generator)
    negatives = ShortChains(SAMPLERS[sampler], copy.deepcopy(base)).sample(energy, obs, actions, N, generator)
    begin = base.sample(energy, obs, actions, N, twin).actions
    with torch.no_grad():
        chain = run(SAMPLERS[sampler], energy, energy.encode(obs), begin, twin)
    assert torch.equal(negatives.actions, chain.actions)
    assert negatives.info is not None and torch.equal(negatives.info.energy, chain.info.energy)
    assert len(negatives.info.energy) == SAMPLERS[sampler].steps


def test_long_chain_gives_the_states_of_one_chain(generator: torch.Generator) -> None:
    energy, (obs, actions) = _energy("", generator).eval(), _batch(generator)
    sampler = Langevin("correct", schedule=Polynomial(0.1, 0.01))
    source, twin = LongChain(sampler, burn_in=3, thin=2), _clone(generator)
    negatives = source.sample(energy, obs, actions, N, generator)
    by_hand = replace(sampler, steps=3 + 2 * (N - 1) + 1)
    context = energy.encode(obs).detach()
    state = by_hand.init(energy, context, Uniform().sample(energy, obs, actions, 1, twin).actions, twin)
    states = []
    with torch.no_grad():
        for k in range(by_hand.steps):
            state, _ = by_hand.step(energy, context, state, k, twin)
            states.append(state.actions[:, 0])
    assert torch.equal(negatives.actions, torch.stack(states[3::2], 1))
    assert torch.equal(generator.get_state(), twin.get_state())
    assert not torch.equal(negatives.actions, torch.stack(states[2:-1:2], 1)), "planted: burn-in one step short"


# ---------------------------------------------------------------------------------------------- replay


def _buffered(value: float, capacity: int = 50, reinitialise: float = 0.05) -> ReplayBuffer:
    """A full buffer of one value, outside the box so that a state drawn anew cannot be mistaken for it."""
    replay = ReplayBuffer(ACT, STANDSTILL, capacity, reinitialise)
    replay.stored.fill_(value)
    replay.count.fill_(capacity)
    return replay


def test_replay_reinitialises_five_per_cent(generator: torch.Generator) -> None:
    rows, batch = 20_000, 2000
    energy = MLPEnergy(OBS, ACT, 4, generator=generator)

    def p_value(replay: ReplayBuffer) -> float:
        negatives = replay.sample(energy, torch.zeros(batch, OBS), torch.zeros(batch, ACT), rows // batch, generator)
        fresh = int((negatives.actions.abs() <= 1.1).all(-1).sum())
        return 2 * min(binom.cdf(fresh, rows, 0.05), binom.sf(fresh - 1, rows, 0.05))

    assert p_value(_buffered(5.0)) > FALSE_ALARM
    assert p_value(_buffered(5.0, reinitialise=0.07)) < FALSE_ALARM, "planted: 7 %"


@pytest.mark.parametrize(("rate", "fresh"), [(0.0, False), (1.0, True)])
def test_replay_rates_at_their_ends(rate: float, fresh: bool, generator: torch.Generator) -> None:
    drawn = _buffered(5.0, reinitialise=rate).draw(1000, torch.zeros(1), generator)
    assert bool(((drawn.abs() <= 1.1) == fresh).all())


def test_replay_draws_every_place_equally_often(generator: torch.Generator) -> None:
    capacity, rows = 8, 16_000
    replay = _buffered(0.0, capacity, reinitialise=0.0)
    replay.stored[:] = torch.arange(capacity).unsqueeze(1)

    def p_value(places: Tensor) -> float:
        counts = torch.bincount(places, minlength=capacity).numpy()
        tails = np.minimum(binom.cdf(counts, rows, 1 / capacity), binom.sf(counts - 1, rows, 1 / capacity))
        return 2 * capacity * tails.min()

    places = replay.draw(rows, torch.zeros(1), generator)[:, 0].long()
    assert p_value(places) > FALSE_ALARM
    assert p_value(places % (capacity - 1)) < FALSE_ALARM, "planted: the last place is never drawn"


def test_replay_fills_in_order_then_overwrites(generator: torch.Generator) -> None:
    replay = ReplayBuffer(1, STANDSTILL, capacity=5)
    column = lambda *values: torch.tensor(values, dtype=torch.float32).unsqueeze(1)  # noqa: E731
    replay.put(column(1.0, 2.0), generator)
    replay.put(column(3.0), generator)
    assert replay.stored[:3, 0].tolist() == [1.0, 2.0, 3.0] and int(replay.count) == 3
    replay.put(column(4.0, 5.0, 6.0, 7.0), generator)
    assert int(replay.count) == 5
    stored = replay.stored[:, 0].tolist()
    assert {6.0, 7.0} <= set(stored) and len(set(stored)) == 5, "two new ones in the place of two old ones"
    replay.put(column(*range(10, 23)), generator)
    assert int(replay.count) == 5 and sorted(replay.stored[:, 0].tolist()) == [18.0, 19.0, 20.0, 21.0, 22.0]


def test_replay_stores_where_its_chains_end(generator: torch.Generator) -> None:
    replay = ReplayBuffer(ACT, Langevin("correct", steps=3), capacity=100)
    negatives = replay.sample(_energy("", generator), *_batch(generator), N, generator)
    assert int(replay.count) == BATCH * N
    assert torch.equal(replay.stored[: BATCH * N], negatives.actions.flatten(0, 1))
    assert not replay.stored[BATCH * N :].any()


def test_replay_of_pairs_moves_both(generator: torch.Generator) -> None:
    energy = _energy("replay-pairs", generator).eval()
    obs, actions = _batch(generator)
    sampler, twin = Langevin("correct", steps=3), _clone(generator)
    replay = ReplayBuffer(OBS + ACT, sampler, capacity=100, joint=True)
    negatives = replay.sample(energy, obs, actions, N, generator)
    start = replay_start = Uniform().sample(energy, obs, torch.zeros(BATCH, OBS + ACT), N, twin).actions
    with torch.no_grad():
        pairs = run(sampler, energy.pairs(), energy.pairs().encode(obs), start, twin).actions
    assert torch.allclose(torch.cat([negatives.obs, negatives.actions], -1), pairs)
    assert torch.allclose(replay.stored[: BATCH * N].view(BATCH, N, -1), pairs)
    assert not torch.allclose(pairs[..., :OBS], replay_start[..., :OBS])
    # The energy of each pair is the conditional energy of its action under its own observation.
    again = energy(negatives.obs.flatten(0, 1), negatives.actions.reshape(-1, 1, ACT))
    assert torch.allclose(again.view(BATCH, N), energy.pairs()(obs, pairs), atol=1e-6)


@pytest.mark.parametrize("name", ["replay", "replay-pairs"])
def test_replay_continues_from_its_state_dict(name: str, generator: torch.Generator) -> None:
    energy, (obs, actions) = _energy(name, generator), _batch(generator)
    replay, restored = _source(name, generator), _source(name, generator)
    assert isinstance(replay, ReplayBuffer) and isinstance(restored, ReplayBuffer)
    replay.sample(energy, obs, actions, N, generator)
    restored.load_state_dict(replay.state_dict())
    twin = _clone(generator)
    for _ in range(3):  # past the capacity, so that random places are overwritten
        first = replay.sample(energy, obs, actions, N, generator)
        second = restored.sample(energy, obs, actions, N, twin)
        assert torch.equal(first.actions, second.actions) and torch.equal(first.obs, second.obs)
    assert torch.equal(replay.stored, restored.stored)


def test_replay_dimension_must_fit(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="dim of the replay buffer is 2, the chain has 5"):
        ReplayBuffer(ACT, joint=True).sample(_energy("replay-pairs", generator), *_batch(generator), N, generator)
    with pytest.raises(ValueError, match="dim of the replay buffer is 5, the chain has 2"):
        ReplayBuffer(OBS + ACT).sample(_energy("", generator), *_batch(generator), N, generator)


# ---------------------------------------------------------------------------------------------- marginal


MAS_SETTINGS = [("mcmc", 0.0), ("maxent", 0.0), ("mcmc", 0.5), ("maxent", 1.0)]


@pytest.mark.parametrize(("objective", "weight"), MAS_SETTINGS)
def test_marginal_loss_by_hand(objective: str, weight: float, generator: torch.Generator) -> None:
    mas = MarginalActionSampler(ACT, objective=objective, positive_l2=weight, generator=generator).double()
    actions = 2 * torch.rand(BATCH, ACT, generator=generator, dtype=torch.float64) - 1
    negatives = 2 * torch.rand(BATCH, N, ACT, generator=generator, dtype=torch.float64) - 1
    first, (second,), last = mas.marginal.network.first, mas.marginal.network.hidden, mas.marginal.network.last

    def energy(y: Tensor) -> Tensor:
        hidden = torch.relu(torch.relu(y @ first.weight.T + first.bias) @ second.weight.T + second.bias)
        return hidden @ last.weight[0] + last.bias

    positive = torch.stack([energy(y) for y in actions])
    negative = torch.stack([energy(y) for row in negatives for y in row])
    expected = positive.sum() / BATCH - negative.sum() / (BATCH * N)
    if objective == "maxent":
        expected = expected + 0.5 * ((negative**2).mean() - negative.mean() ** 2)
    expected = expected + weight * (positive**2).sum() / BATCH
    assert torch.allclose(mas.loss(actions, negatives), expected, rtol=1e-12)


@pytest.mark.parametrize(("objective", "weight"), MAS_SETTINGS)
def test_marginal_loss_trains_the_marginal_alone(objective: str, weight: float, generator: torch.Generator) -> None:
    energy, (obs, actions) = _energy("", generator), _batch(generator)
    mas = MarginalActionSampler(ACT, objective=objective, positive_l2=weight, generator=generator)
    negatives = mas.sample(energy, obs, actions, N, generator)
    assert all(parameter.grad is None for parameter in mas.parameters()), "sampling trains nothing"
    mas.loss(actions, negatives.actions).backward()
    for name, parameter in mas.named_parameters():
        assert parameter.grad is not None, name
        # A constant added to E(y) changes no difference of energies: only the L2 term sees the last bias.
        if name != "marginal.network.last.bias" or weight:
            assert bool(parameter.grad.any()), name
    assert all(parameter.grad is None for parameter in energy.parameters())
    # And the other way round: the conditional loss on these negatives leaves the marginal alone.
    mas.zero_grad()
    info_nce(energy(obs, actions.unsqueeze(1))[:, 0], energy(obs, negatives.actions)).backward()
    assert all(parameter.grad is None for parameter in mas.parameters())
    assert any(bool(parameter.grad.any()) for parameter in energy.parameters() if parameter.grad is not None)


def test_marginal_negatives_ignore_obs_and_conditional_energy(generator: torch.Generator) -> None:
    obs, actions = _batch(generator)
    mas, twin = MarginalActionSampler(ACT, generator=generator), _clone(generator)
    first = mas.sample(_energy("", twin), obs, actions, N, generator=_clone(generator))
    second = mas.sample(_energy("", twin), -obs, actions, N, generator=_clone(generator))
    assert torch.equal(first.actions, second.actions)


def test_shared_chains_serve_the_whole_batch(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    obs, actions = _batch(generator)
    mas = MarginalActionSampler(ACT, positive_l2=0.5, generator=generator, shared=True)
    rows: list[int] = []
    gradients = mas.marginal.energies_and_gradients

    def counted(context: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        rows.append(moved.shape[0] * moved.shape[1])
        return gradients(context, moved)

    monkeypatch.setattr(mas.marginal, "energies_and_gradients", counted)
    negatives = mas.sample(mas.marginal, obs, actions, N, generator).actions
    assert set(rows) == {N}, "the chains are those of one example"
    assert bool((negatives == negatives[0]).all()) and len(negatives[0].unique(dim=0)) == N
    # The marginal's own loss looks at each sample once. Its mean over the copies would be the same.
    alone = MarginalActionSampler(ACT, positive_l2=0.5, generator=generator)
    alone.load_state_dict(mas.state_dict())
    plain = mas.marginal.energies
    monkeypatch.setattr(mas.marginal, "energies", lambda context, y: rows.append(y.shape[1]) or plain(context, y))
    assert torch.allclose(mas.loss(actions, negatives), alone.loss(actions, negatives), atol=1e-6)
    assert rows[-1] == BATCH + N
    mixed = Mixture([mas, InBatch()], (0.5, 0.5))
    drawn = mixed.sample(mas.marginal, obs, actions, 4, generator).actions
    expected = alone.loss(actions, drawn[:, :2])
    assert torch.allclose(mixed.own_losses(actions, drawn)["marginal_loss"], expected, atol=1e-6)


def test_marginal_loss_names_bad_input(generator: torch.Generator, unchecked_shapes: None) -> None:
    mas = MarginalActionSampler(ACT, generator=generator)
    _, actions = _batch(generator)
    negatives = actions.unsqueeze(1).expand(-1, N, -1)
    with pytest.raises(ValueError, match="negatives must be"):
        mas.loss(actions, negatives[..., :1])
    with pytest.raises(ValueError, match="negatives must be"):
        mas.loss(actions, actions)
    with pytest.raises(ValueError, match="negatives must be"):
        mas.loss(actions, negatives[:, :0])
    with pytest.raises(ValueError, match="actions must be"):
        mas.loss(actions[:0], negatives)
    with pytest.raises(ValueError, match="actions has NaN"):
        mas.loss(actions * torch.nan, negatives)
    with pytest.raises(ValueError, match="negatives has NaN"):
        mas.loss(actions, negatives * torch.nan)


def _near_the_data(mas: MarginalActionSampler, modes: Tensor, generator: torch.Generator) -> Tensor:
    """Shares of 4000 independent samples that lie near each mode."""
    act = modes.shape[1]
    energy = MLPEnergy(OBS, act, 4, generator=generator)
    draw = mas.sample(energy, torch.zeros(1000, OBS), torch.zeros(1000, act), 4, generator)
    return (torch.cdist(draw.actions.flatten(0, 1), modes) < 0.25 * act**0.5).float().mean(0)


@pytest.mark.parametrize(
    ("act", "sampler", "objective", "weight"),
    [
        (1, Langevin("ibc", noise=0.1), "mcmc", 0.0),
        (2, Langevin("ibc", noise=0.1), "maxent", 1.0),
        (2, Langevin("correct", schedule=Polynomial(0.2, 0.01)), "mcmc", 0.0),
    ],
)
def test_marginal_learns_two_modes(
    act: int, sampler: Langevin, objective: str, weight: float, generator: torch.Generator
) -> None:
    """Hoeffding: a share of 4000 samples is off by more than `error` with a probability below FALSE_ALARM."""
    error = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * 4000))
    modes = torch.tensor([[0.6] * act, [-0.6] * act])

    def train(sign: float) -> tuple[Tensor, Tensor]:
        mas = MarginalActionSampler(act, sampler, objective, weight, generator=generator)
        optimiser = torch.optim.Adam(mas.parameters(), 5e-3)
        before = _near_the_data(mas, modes, generator)
        for _ in range(60):
            actions = modes[torch.randint(2, (64,), generator=generator)]
            actions = actions + 0.05 * torch.randn(64, act, generator=generator)
            negatives = mas.sample(mas.marginal, actions, actions, 4, generator).actions
            optimiser.zero_grad()
            (sign * mas.loss(actions, negatives)).backward()
            optimiser.step()
        return before, _near_the_data(mas, modes, generator)

    before, after = train(1.0)
    assert (after - before).sum() > 2 * error, f"near the modes: {before.tolist()} -> {after.tolist()}"
    if sampler.formulation == "ibc":
        assert bool((after - before > 2 * error).all()), "both modes are found"
        before, after = train(-1.0)
        assert not bool((after - before > 2 * error).all()), "planted: a flipped sign does not find both"


# ---------------------------------------------------------------------------------------------- settings, proposals


SPEC = Specification.flat(OBS, ACT)


@pytest.mark.parametrize("joint", [False, True])
def test_replay_settings_build_their_buffer(joint: bool, generator: torch.Generator) -> None:
    buffer = Replay(STANDSTILL, 30, 0.2, 0.1, joint).build(SPEC, generator)
    assert buffer.stored.shape == (30, ACT + OBS * joint) and int(buffer.count) == 0
    assert (buffer.sampler, buffer.reinitialise, buffer.margin, buffer.joint) == (STANDSTILL, 0.2, 0.1, joint)


def test_marginal_settings_build_their_sampler(generator: torch.Generator) -> None:
    settings, twin = MarginalActions(STANDSTILL, "maxent", 0.5, 7, InBatch()), _clone(generator)
    built = settings.build(SPEC, generator)
    assert (built.sampler, built.objective, built.positive_l2, built.start) == (STANDSTILL, "maxent", 0.5, InBatch())
    same = MarginalActionSampler(ACT, STANDSTILL, "maxent", 0.5, 7, generator=twin)
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), same.parameters(), strict=True))


def test_proposed_negatives_are_draws_of_the_energys_proposal(generator: torch.Generator) -> None:
    base = MixtureDensityEnergy(OBS, ACT, 16, generator=generator)
    obs, actions = _batch(generator)
    for energy in (base, TiltedEnergy(base, _energy("", generator)), 0.5 * base):
        twin = _clone(generator)
        drawn = Proposed().sample(energy, obs, actions, N, generator)
        assert torch.equal(drawn.actions, base.propose(base.encode(obs), N, twin))
        assert drawn.obs is obs and drawn.log_q is None and not drawn.actions.requires_grad


def test_what_the_sources_say_of_themselves() -> None:
    names = {type(s): getattr(s, "distribution", None) for s in (Uniform(), InBatch(), Proposed(), MarginalActions())}
    assert list(names.values()) == [None, "marginal", "proposal", "marginal"]
    assert [has_density(s) for s in (Uniform(), GaussianMixture(), InBatch(), Proposed(), ShortChains())] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert has_density(Mixture([Uniform(), GaussianMixture()], (0.5, 0.5)))
    assert not has_density(Mixture([Uniform(), InBatch()], (0.5, 0.5)))
    assert not has_density(Mixture([Mixture([Uniform()], (1.0,))], (1.0,))), "as `sample` gives none"


def test_sources_without_weights_have_no_losses(generator: torch.Generator) -> None:
    _, actions = _batch(generator)
    negatives = actions.unsqueeze(1)
    for source in (Uniform(), ShortChains(), ReplayBuffer(ACT), Mixture([Uniform(), InBatch()], (0.5, 0.5))):
        assert own_losses(source, actions, negatives) == {}
    mas = MarginalActionSampler(ACT, generator=generator)
    assert own_losses(mas, actions, negatives) == {"marginal_loss": mas.loss(actions, negatives)}
