"""Energies: one contract for all of them, closed-form gradients against autograd, initialisation, composition."""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cebm.energies import (
    EnergyModel,
    MarginalEnergy,
    MixtureDensityEnergy,
    MLPEnergy,
    ModuleEnergy,
    NearestEnergy,
    Penalty,
    RegressionEnergy,
    ResidualEnergy,
    TiltedEnergy,
    WeightedSum,
    feedforward,
)
from cebm.energies.base import Context, evaluating, leaves, mapped
from cebm.energies.feedforward import Linear
from cebm.information import Quadrature
from cebm.samplers import Langevin, run

OBS, ACT = 3, 2
# Wide enough that a layer without any active unit is out of the question (2⁻⁴⁸).
WIDTH = 48


class SmoothHead(nn.Module):
    """A user's module: (features, action) rows to one energy each."""

    def __init__(self, features: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features + ACT, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.first(torch.cat([features, actions], 1)))))


def obstacle(obs: Tensor, actions: Tensor) -> Tensor:
    """A bump at the first two coordinates of the observation."""
    return 3 * torch.exp(-(actions - obs[:, None, :ACT]).square().sum(-1))


def limit(obs: Tensor, actions: Tensor) -> Tensor:
    """A soft wall; it does not read the observation."""
    return F.softplus(5 * (actions[..., 0] - 0.2))


def image_energy(generator: torch.Generator) -> ModuleEnergy:
    encoder = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.Flatten(), nn.Linear(8, 5))
    return ModuleEnergy(SmoothHead(5), 16, ACT, encoder, feature_dim=5)


def mlp(generator: torch.Generator, **options: object) -> MLPEnergy:
    return MLPEnergy(OBS, ACT, WIDTH, generator=generator, **options)


def residual(generator: torch.Generator, **options: object) -> ResidualEnergy:
    return ResidualEnergy(OBS, ACT, WIDTH, generator=generator, **options)


@dataclass(frozen=True)
class Case:
    build: Callable[[torch.Generator], EnergyModel]
    obs_shape: tuple[int, ...] = (OBS,)


CASES: dict[str, Case] = {
    "mlp": Case(mlp),
    "mlp, 1 hidden layer": Case(lambda g: mlp(g, hidden_layers=1)),
    "mlp, 4 hidden layers, torch init": Case(lambda g: mlp(g, hidden_layers=4, init="torch")),
    "mlp, torch init": Case(lambda g: mlp(g, init="torch")),
    "mlp, dropout": Case(lambda g: mlp(g, dropout=0.3)),
    "mlp, spectral norm": Case(lambda g: mlp(g, spectral_norm=True)),
    "residual": Case(residual),
    "residual, 2 blocks, torch init": Case(lambda g: residual(g, blocks=2, init="torch")),
    "residual, 3 blocks, dropout": Case(lambda g: residual(g, blocks=3, dropout=0.2)),
    "residual, spectral norm": Case(lambda g: residual(g, spectral_norm=True)),
    "marginal": Case(lambda g: MarginalEnergy(ACT, generator=g)),
    "marginal, 1 hidden layer": Case(lambda g: MarginalEnergy(ACT, WIDTH, 1, generator=g)),
    "pairs": Case(lambda g: mlp(g).pairs()),
    "pairs, residual": Case(lambda g: residual(g, blocks=2).pairs()),
    "pairs, spectral norm": Case(lambda g: mlp(g, spectral_norm=True).pairs()),
    "module": Case(lambda g: ModuleEnergy(SmoothHead(OBS), OBS, ACT)),
    "module, dropout": Case(lambda g: ModuleEnergy(SmoothHead(OBS, 0.4), OBS, ACT)),
    "module, image encoder": Case(image_energy, (1, 4, 4)),
    "penalty": Case(lambda g: Penalty(obstacle, OBS, ACT)),
    "penalty without observation": Case(lambda g: Penalty(limit, OBS, ACT)),
    "sum": Case(lambda g: mlp(g) + residual(g)),
    "scaled": Case(lambda g: -0.5 * mlp(g)),
    "sum with a marginal": Case(lambda g: mlp(g) + 2 * MarginalEnergy(ACT, generator=g)),
    "sum with a penalty function": Case(lambda g: mlp(g) + obstacle),
    "nested sum": Case(lambda g: 0.5 * (mlp(g) + 3 * (residual(g) + limit)) + ModuleEnergy(SmoothHead(OBS), OBS, ACT)),
}
NETWORKS = [name for name in CASES if not name.startswith(("module", "penalty", "nested"))]
every_energy = pytest.mark.parametrize("name", CASES)


def make(
    name: str, generator: torch.Generator, batch: int = 3, samples: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[EnergyModel, Tensor, Tensor]:
    """The energy (in evaluation mode), observations and actions."""
    case = CASES[name]
    energy = case.build(generator).to(dtype).eval()
    obs = torch.randn(batch, *case.obs_shape, generator=generator, dtype=dtype)
    actions = torch.randn(batch, samples, energy.act_dim, generator=generator, dtype=dtype)
    return energy, obs, actions


def detached(context: Context) -> Context:
    return mapped(Tensor.detach, context)


def autograd_gradient(energy: EnergyModel, context: Context, actions: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: ∇_y of `energies`, by autograd."""
    with torch.enable_grad():
        leaf = actions.detach().requires_grad_()
        energies = energy.energies(context, leaf)
        (gradients,) = torch.autograd.grad(energies.sum(), leaf)
    return energies.detach(), gradients


def assert_close(value: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Relative to the largest entry, which must not be 0: a comparison of zeros shows nothing."""
    assert value.shape == expected.shape
    scale = expected.abs().max().item()
    assert scale > 0
    assert (value - expected).abs().max().item() <= tolerance * scale


# -------------------------------------------------------------------------------------------- the contract


@every_energy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [True, False])
def test_shapes_dtype_and_finite_values(name: str, dtype: torch.dtype, grad: bool, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator, dtype=dtype)
    with torch.set_grad_enabled(grad):
        context = energy.encode(obs)
        energies = energy.energies(context, actions)
        again, gradients = energy.energies_and_gradients(context, actions)
    assert all(part.shape[0] == 3 for part in leaves(context))
    assert energy.context_dim is None or context.shape == (3, energy.context_dim)
    assert energies.shape == again.shape == (3, 5)
    assert gradients.shape == (3, 5, energy.act_dim)
    for tensor in (*leaves(context), energies, again, gradients):
        assert tensor.dtype == dtype
        assert torch.isfinite(tensor).all()
    assert_close(again, energies, 1e-4 if dtype == torch.float32 else 1e-12)
    if not grad:
        assert not again.requires_grad and not gradients.requires_grad


@every_energy
@pytest.mark.parametrize("grad", [True, False])
def test_inputs_are_not_modified_and_results_repeat(name: str, grad: bool, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    parameters = [parameter.detach().clone() for parameter in energy.parameters()]
    obs_before, actions_before = obs.clone(), actions.clone()
    with torch.set_grad_enabled(grad):
        context = energy.encode(obs)
        context_before = mapped(torch.clone, detached(context))
        first = (energy.energies(context, actions), *energy.energies_and_gradients(context, actions))
        second = (energy.energies(context, actions), *energy.energies_and_gradients(context, actions))
    assert torch.equal(obs, obs_before) and torch.equal(actions, actions_before)
    assert all(torch.equal(a, b) for a, b in zip(leaves(context), leaves(context_before), strict=True))
    assert not actions.requires_grad and not obs.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(energy.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in energy.parameters())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_energy
def test_a_context_serves_any_number_of_calls(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator, samples=6)
    context = energy.encode(obs)
    whole = energy(obs, actions)
    assert_close(energy.energies(context, actions), whole, 1e-12)
    parts = [energy.energies(context, part) for part in actions.split([1, 5], 1)]
    assert_close(torch.cat(parts, 1), whole, 1e-12)
    with torch.no_grad():
        gradients = [energy.energies_and_gradients(context, part)[1] for part in actions.split([1, 5], 1)]
        assert_close(torch.cat(gradients, 1), energy.energies_and_gradients(context, actions)[1], 1e-12)


@every_energy
def test_observations_and_samples_do_not_mix(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator, batch=4, samples=6)
    rows, columns = torch.randperm(4, generator=generator), torch.randperm(6, generator=generator)
    with torch.no_grad():
        energies, gradients = energy.energies_and_gradients(energy.encode(obs), actions)
        moved = energy.energies_and_gradients(energy.encode(obs[rows]), actions[rows][:, columns])
    assert_close(moved[0], energies[rows][:, columns], 1e-12)
    assert_close(moved[1], gradients[rows][:, columns], 1e-12)


@every_energy
def test_the_observation_matters_unless_there_is_none(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    actions = actions[:1].expand(3, -1, -1)
    energies = energy(obs, actions)
    without = energy.obs_dim == 0 or name == "penalty without observation"
    assert torch.allclose(energies[0], energies[1], rtol=0, atol=1e-12) == without


@every_energy
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch, samples", [(3, 5), (1, 1), (7, 1), (1, 9)])
def test_gradients_are_those_of_autograd(
    name: str, grad: bool, batch: int, samples: int, generator: torch.Generator
) -> None:
    energy, obs, actions = make(name, generator, batch, samples)
    with torch.set_grad_enabled(grad):
        context = energy.encode(obs)
        energies, gradients = energy.energies_and_gradients(context, actions)
        alone = energy.gradients(context, actions)
    expected = autograd_gradient(energy, detached(context), actions)
    assert_close(energies.detach(), expected[0])
    assert_close(gradients.detach(), expected[1])
    assert torch.equal(alone, gradients), "without the energies they are the same to the last bit"


@every_energy
def test_weights_that_are_laid_out_may_still_move(name: str, generator: torch.Generator) -> None:
    """A policy lays out the weights of its copy; what is kept at hand must follow them to another dtype, change with
    them in place, and let a gradient through to them."""
    energy, obs, actions = make(name, generator, dtype=torch.float32)
    wanted = energy.double()(obs.double(), actions.double())
    laid = copy.deepcopy(energy).float()
    for module in laid.modules():
        getattr(module, "lay_out", lambda: None)()
    assert_close(laid(obs, actions).double(), wanted, 1e-4)
    assert_close(laid.double()(obs.double(), actions.double()), wanted, 1e-4)
    slopes = [parameter for parameter in laid.parameters() if parameter.requires_grad]
    if slopes:
        found = torch.autograd.grad(laid(obs.double(), actions.double()).sum(), slopes, allow_unused=True)
        same = [parameter for parameter in energy.parameters() if parameter.requires_grad]
        expected = torch.autograd.grad(energy(obs.double(), actions.double()).sum(), same, allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert_close(one, other, 1e-4)


@pytest.mark.parametrize("block_rows", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize("batch, samples", [(3, 7), (7, 3), (5, 4), (1, 11), (11, 1)])
@pytest.mark.parametrize("name", ["mlp", "mlp, 4 hidden layers, torch init", "residual", "marginal", "pairs", "sum"])
def test_ragged_blocks_change_nothing(
    name: str,
    batch: int,
    samples: int,
    block_rows: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    energy, obs, actions = make(name, generator, batch, samples)
    expected = autograd_gradient(energy, detached(energy.encode(obs)), actions)
    floats = block_rows * (64 if name == "marginal" else WIDTH) // torch.get_num_threads()
    monkeypatch.setattr(feedforward, "_BLOCK_FLOATS", floats)
    with torch.no_grad():
        energies, gradients = energy.energies_and_gradients(energy.encode(obs), actions)
    assert_close(energies, expected[0])
    assert_close(gradients, expected[1])


def test_a_block_size_below_one_row_is_one_row(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    energy, obs, actions = make("mlp", generator)
    context = detached(energy.encode(obs))
    monkeypatch.setattr(feedforward, "_BLOCK_FLOATS", 1)
    with torch.no_grad():
        assert_close(energy.energies_and_gradients(context, actions)[1], autograd_gradient(energy, context, actions)[1])


@pytest.mark.parametrize("block_rows", [0, 1, 3, 5, 100])
@pytest.mark.parametrize("batch, samples", [(3, 7), (7, 3), (1, 11), (11, 1)])
@pytest.mark.parametrize("name", ["mlp", "mlp, spectral norm", "residual", "marginal", "pairs", "sum"])
def test_energies_in_ragged_blocks_have_the_same_derivatives(
    name: str,
    batch: int,
    samples: int,
    block_rows: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Energies, the gradients of parameters and actions, and a second derivative, against one block."""
    energy, obs, actions = make(name, generator, batch, samples)
    energy.eval()
    actions.requires_grad_()
    inputs = [actions, *energy.parameters()]

    def everything() -> list[torch.Tensor]:
        energies = energy(obs, actions)
        gradients = torch.autograd.grad(energies.square().mean(), inputs, create_graph=True, materialize_grads=True)
        again = torch.autograd.grad(gradients[0].square().sum(), inputs, materialize_grads=True)
        return [energies, *gradients, *again]

    expected = everything()
    floats = block_rows * (64 if name == "marginal" else WIDTH) // (2 * torch.get_num_threads())
    monkeypatch.setattr(feedforward, "_BLOCK_FLOATS", floats)
    for found, wanted in zip(everything(), expected, strict=True):
        assert_close(found, wanted)


def test_blocks_survive_transformations(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func sees through them; a compiler gets the whole batch, since it cannot ask for the number of threads."""
    monkeypatch.setattr(feedforward, "_BLOCK_FLOATS", 2 * WIDTH)
    energy, obs, actions = make("mlp", generator, 5, 20)
    expected = energy(obs, actions)
    assert_close(torch.func.vmap(lambda x, y: energy(x[None], y[None])[0])(obs, actions), expected)
    parameters = {name: value.detach() for name, value in energy.named_parameters()}
    call = torch.func.grad(lambda weights: torch.func.functional_call(energy, weights, (obs, actions)).sum())
    plain = torch.autograd.grad(expected.sum(), list(energy.parameters()))
    for found, wanted in zip(call(parameters).values(), plain, strict=True):
        assert_close(found, wanted)
    tangent = torch.func.jvp(lambda y: energy(obs, y), (actions,), (torch.ones_like(actions),))[1]
    with torch.no_grad():
        assert_close(tangent, energy.energies_and_gradients(energy.encode(obs), actions)[1].sum(-1))
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    monkeypatch.setattr("torch.get_num_threads", lambda: pytest.fail("asked for the number of threads"))
    assert_close(energy(obs, actions), expected)


@pytest.mark.parametrize("network", [MLPEnergy, ResidualEnergy])
@pytest.mark.parametrize("batch, samples", [(3, 700), (700, 3), (5, 200), (1, 513), (2, 256), (2, 512)])
def test_gradients_around_the_real_block_boundary(
    network: type, batch: int, samples: int, generator: torch.Generator
) -> None:
    """Width 256 makes blocks of 512 rows per thread."""
    energy = network(OBS, ACT, 256, generator=generator).double()
    obs = torch.randn(batch, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(batch, samples, ACT, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        context = energy.encode(obs)
        energies, gradients = energy.energies_and_gradients(context, actions)
    expected = autograd_gradient(energy, context, actions)
    assert_close(energies, expected[0])
    assert_close(gradients, expected[1])


@every_energy
def test_any_memory_layout_of_the_actions(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    context = detached(energy.encode(obs))
    expected = autograd_gradient(energy, context, actions)
    strided = actions.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    repeated = actions[:, :1].expand(-1, 5, -1)
    with torch.no_grad():
        assert_close(energy.energies_and_gradients(context, strided)[1], expected[1])
        assert_close(energy.energies_and_gradients(context, repeated)[1], expected[1][:, :1].expand(-1, 5, -1))


@every_energy
def test_inference_mode_gives_the_same(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    with torch.no_grad():
        expected = energy.energies_and_gradients(energy.encode(obs), actions)
    with torch.inference_mode():
        inside = energy.energies_and_gradients(energy.encode(obs), actions.clone())
    assert torch.equal(inside[0], expected[0]) and torch.equal(inside[1], expected[1])


@every_energy
def test_gradients_can_be_differentiated_again(name: str, generator: torch.Generator) -> None:
    """The derivative of a loss on E and ∇E, with respect to parameters, observations and actions: against autograd
    twice over `energies`, to rounding, and against central differences along a random direction."""
    energy, obs, actions = make(name, generator)
    tensors = [*energy.parameters(), obs.requires_grad_(), actions.requires_grad_()]

    scale = energy.energies_and_gradients(energy.encode(obs), actions)[1].detach().std()

    def loss() -> Tensor:
        energies, gradients = energy.energies_and_gradients(energy.encode(obs), actions)
        return (gradients / scale).square().sum() + (energies - 0.3).square().sum()

    energies = energy.energies(energy.encode(obs), actions)
    (gradients,) = torch.autograd.grad(energies.sum(), actions, create_graph=True)
    reference_loss = (gradients / scale).square().sum() + (energies - 0.3).square().sum()
    options = {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(reference_loss, tensors, **options)
    derivative = torch.autograd.grad(loss(), tensors, **options)
    flat, flat_expected = (torch.cat([d.flatten() for d in each]) for each in (derivative, expected))
    assert_close(flat, flat_expected)

    def along(direction: list[Tensor], step: float) -> float:
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for tensor, change in zip(tensors, direction, strict=True):
                    tensor.add_(change, alpha=sign * step)
            values.append(loss().item())
            with torch.no_grad():
                for tensor, change in zip(tensors, direction, strict=True):
                    tensor.sub_(change, alpha=sign * step)
        return (values[0] - values[1]) / (2 * step)

    tolerance = 1e-5 * flat.norm().item()
    for _ in range(8):
        direction = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]
        coarse, fine = along(direction, 1e-7), along(direction, 5e-8)
        if abs(coarse - fine) < tolerance:  # otherwise a kink of ReLU lies between: another direction
            break
    else:
        pytest.fail("no direction without a kink")
    assert abs(fine - sum((d * v).sum().item() for d, v in zip(derivative, direction, strict=True))) < tolerance


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("penalty")])
def test_every_parameter_receives_a_gradient(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator, batch=8)
    energy(obs, actions).sum().backward()
    for key, parameter in energy.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


@every_energy
def test_state_dict_round_trip(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    other, _, _ = make(name, generator)
    if energy.state_dict():
        assert not torch.equal(other(obs, actions), energy(obs, actions))
    other.load_state_dict(energy.state_dict())
    assert torch.equal(other(obs, actions), energy(obs, actions))


@every_energy
def test_copies_and_pickles(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    for other in (copy.deepcopy(energy), pickle.loads(pickle.dumps(energy))):
        assert torch.equal(other(obs, actions), energy(obs, actions))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        assert not energy.state_dict() or not torch.equal(other(obs, actions), energy(obs, actions))


@every_energy
def test_results_follow_the_device(name: str, generator: torch.Generator) -> None:
    """The meta device stands in for an accelerator: a tensor made on the CPU along the way would raise."""
    energy, obs, actions = make(name, generator)
    energy, obs, actions = energy.to("meta"), obs.to("meta"), actions.to("meta")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            context = energy.encode(obs)
            energies = energy.energies(context, actions), *energy.energies_and_gradients(context, actions)
        assert {tensor.device.type for tensor in (*leaves(context), *energies)} == {"meta"}


@pytest.mark.parametrize("name", NETWORKS)
def test_initialisation_uses_its_generator_alone(name: str) -> None:
    state = torch.get_rng_state()
    first, same, other = (CASES[name].build(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(value, same.state_dict()[key]) for key, value in first.state_dict().items())
    assert not any(torch.equal(value, other.state_dict()[key]) for key, value in first.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)


@every_energy
def test_gradients_ignore_training_mode(name: str, generator: torch.Generator) -> None:
    """Dropout is for `energies` alone; a chain in training sees the deterministic energy."""
    energy, obs, actions = make(name, generator)
    with torch.no_grad():
        context = energy.encode(obs)
        expected = energy.energies_and_gradients(context, actions)
        plain = energy.energies(context, actions)
        energy.train()
        state = torch.get_rng_state()
        inside = energy.energies_and_gradients(context, actions)
        assert torch.equal(torch.get_rng_state(), state)
        dropped = energy.energies(context, actions)
    assert all(module.training for module in energy.modules())
    assert torch.equal(inside[0], expected[0]) and torch.equal(inside[1], expected[1])
    assert torch.equal(dropped, plain) == ("dropout" not in name)


# -------------------------------------------------------------------------------------------- the networks


def test_the_papers_network_is_three_linear_maps(generator: torch.Generator) -> None:
    shapes = {key: tuple(value.shape) for key, value in MLPEnergy(4, 2, generator=generator).state_dict().items()}
    assert shapes == {
        "first.weight": (256, 6),
        "first.bias": (256,),
        "hidden.0.weight": (256, 256),
        "hidden.0.bias": (256,),
        "last.weight": (1, 256),
        "last.bias": (1,),
    }
    assert MarginalEnergy(2).network.width == 64


@pytest.mark.parametrize("hidden_layers", [1, 2, 3])
def test_the_mlp_is_linear_maps_with_relu_between(hidden_layers: int, generator: torch.Generator) -> None:
    energy = MLPEnergy(OBS, ACT, 8, hidden_layers, init="torch", generator=generator).double()
    obs = torch.randn(4, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(4, 6, ACT, generator=generator, dtype=torch.float64)
    hidden = torch.cat([obs[:, None].expand(-1, 6, -1), actions], -1)
    layers = [energy.first, *energy.hidden, energy.last]
    assert len(layers) == hidden_layers + 1
    for layer in layers[:-1]:
        hidden = (hidden @ layer.weight.t() + layer.bias).clamp(min=0)
    expected = (hidden @ energy.last.weight.t() + energy.last.bias)[..., 0]
    assert_close(energy(obs, actions), expected, 1e-12)


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_residual_network_is_that_of_the_reference_code(blocks: int, generator: torch.Generator) -> None:
    energy = ResidualEnergy(OBS, ACT, 8, blocks, init="torch", generator=generator).double()
    obs = torch.randn(4, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(4, 6, ACT, generator=generator, dtype=torch.float64)
    hidden = energy.first(torch.cat([obs[:, None].expand(-1, 6, -1), actions], -1))
    for inner, outer in zip(energy.inner, energy.outer, strict=True):
        branch = hidden.clamp(min=0) @ inner.weight.t() + inner.bias
        hidden = hidden + branch.clamp(min=0) @ outer.weight.t() + outer.bias
    expected = (hidden @ energy.last.weight.t() + energy.last.bias)[..., 0]
    assert_close(energy(obs, actions), expected, 1e-12)


@pytest.mark.parametrize("network", [MLPEnergy, ResidualEnergy])
def test_normal_initialisation_of_weights_and_biases(network: type, generator: torch.Generator) -> None:
    """z of the mean and of the variance, for all weights and for all biases of two networks: |z| < 5.5 is a false
    alarm in 8 · 4e-8 runs, a few times more for the biases, whose variance has a skewed distribution."""
    energy = network(20, 10, generator=generator)
    for kind, least in (("weight", 70_000), ("bias", 500)):
        values = torch.cat([p.flatten() for key, p in energy.named_parameters() if key.endswith(kind)]).double()
        n = len(values)
        assert n > least
        z_mean = values.mean().item() / (0.05 / math.sqrt(n))
        z_variance = (values.square().mean().item() / 0.05**2 - 1) * math.sqrt(n / 2)
        assert abs(z_mean) < 5.5 and abs(z_variance) < 5.5, (kind, z_mean, z_variance)


def test_torch_initialisation_is_that_of_nn_linear(generator: torch.Generator) -> None:
    """Uniform on ±1/√inputs for weights and biases alike, as nn.Linear; Var(u²) = bound⁴(1/5 − 1/9)."""
    energy = MLPEnergy(20, 10, init="torch", generator=generator)
    for layer in (energy.first, energy.hidden[0], energy.last):
        bound = layer.weight.shape[1] ** -0.5
        for values in (layer.weight, layer.bias):
            assert values.abs().max() <= bound
        flat = layer.weight.detach().double().flatten() / bound
        z_mean = flat.mean() * math.sqrt(3 * len(flat))
        z_variance = (flat.square().mean() - 1 / 3) * math.sqrt(len(flat) / (1 / 5 - 1 / 9))
        assert abs(z_mean) < 5.5 and abs(z_variance) < 5.5
    reference = nn.Linear(30, 256)
    assert reference.weight.abs().max() <= 30**-0.5 and reference.bias.abs().max() <= 30**-0.5
    # The largest of 256 uniform numbers falls short of 90 % with probability 0.9²⁵⁶ = 2e-12.
    assert energy.first.bias.abs().max() > 0.9 * 30**-0.5


def test_without_a_generator_the_global_one_is_used() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = MLPEnergy(OBS, ACT, 4).state_dict()
        torch.manual_seed(3)
        same = MLPEnergy(OBS, ACT, 4).state_dict()
    assert all(torch.equal(first[key], same[key]) for key in first)


def spectral_layers(energy: nn.Module) -> list[Linear]:
    return [layer for layer in energy.modules() if isinstance(layer, Linear)]


@pytest.mark.parametrize("pairs", [False, True])
def test_spectral_norm_brings_the_largest_singular_value_to_one(pairs: bool, generator: torch.Generator) -> None:
    """After k power iterations from a random start the estimate of σ² is short by more than a share e with probability
    at most 0.354/√(e(k−1))·√n·(1−e)^(k−½), whatever the gap (Kuczyński & Woźniakowski 1992). Here k = 400, n = 16,
    e = 0.06: 5e-12, and σ is then within 1/√0.94 = 1.032."""
    energy = MLPEnergy(OBS, ACT, 16, spectral_norm=True, generator=generator).double()
    trained = energy.pairs() if pairs else energy
    with torch.no_grad():
        for layer in spectral_layers(energy):  # training has moved the weights far from where they started
            layer.weight.normal_(generator=generator).mul_(3)
    obs = torch.randn(2, trained.obs_dim, generator=generator, dtype=torch.float64)
    for _ in range(400):
        trained.encode(obs)
    for layer in spectral_layers(energy):
        largest = torch.linalg.matrix_norm(layer.matrix(), 2).item()
        assert 1 - 1e-9 < largest < 1.035


def test_a_fresh_spectral_norm_is_close_already(generator: torch.Generator) -> None:
    """20 iterations in the constructor: by the same bound, n = 32 and e = 0.55, σ is within 1.5 but for 1e-7."""
    energy = MLPEnergy(OBS, ACT, 32, spectral_norm=True, generator=generator)
    for layer in spectral_layers(energy):
        assert 1 - 1e-5 < torch.linalg.matrix_norm(layer.matrix(), 2).item() < 1.5


def test_only_an_encoded_training_batch_moves_the_spectral_norm(generator: torch.Generator) -> None:
    energy, obs, actions = make("mlp, spectral norm", generator)
    with torch.no_grad():
        for layer in spectral_layers(energy):
            layer.weight.normal_(generator=generator)

    def estimates() -> list[Tensor]:
        return [tensor.clone() for layer in spectral_layers(energy) for tensor in (layer.left, layer.right)]

    def moved(action: Callable[[], object]) -> bool:
        before = estimates()
        action()
        return not all(torch.equal(a, b) for a, b in zip(before, estimates(), strict=True))

    context = detached(energy.encode(obs))
    assert not moved(lambda: energy.encode(obs))  # evaluation mode
    energy.train()
    assert moved(lambda: energy.encode(obs))
    with torch.no_grad():
        assert not moved(lambda: energy.encode(obs))
    assert not moved(lambda: energy.energies(context, actions))
    assert not moved(lambda: energy.energies_and_gradients(context, actions))
    # Encoding and the energies after it therefore see the same matrices.
    context = energy.encode(obs)
    matrix = energy.first.matrix()
    pre = (torch.cat([obs[:, None].expand(-1, 5, -1), actions], -1)) @ matrix.t() + energy.first.bias
    assert_close(energy.energies(context, actions), energy.trunk(pre), 1e-12)


def test_dropout_keeps_the_mean_of_a_linear_top_layer(generator: torch.Generator) -> None:
    """One hidden layer: the energy is linear in the dropped units, so dropout leaves its mean; z over 4000 draws."""
    energy = MLPEnergy(OBS, ACT, 64, hidden_layers=1, dropout=0.5, init="torch", generator=generator).double()
    obs = torch.randn(1, OBS, generator=generator, dtype=torch.float64)
    action = torch.randn(1, 1, ACT, generator=generator, dtype=torch.float64)
    draws = energy.train()(obs, action.expand(1, 4000, ACT))[0]
    expected = energy.eval()(obs, action).item()
    assert draws.std() > 0
    assert abs((draws.mean().item() - expected) / (draws.std().item() / math.sqrt(4000))) < 5.5


# -------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("build", [mlp, residual])
def test_pairs_differentiate_with_respect_to_the_observation(
    build: Callable, grad: bool, generator: torch.Generator
) -> None:
    joint = build(generator).double()
    obs = torch.randn(6, OBS, generator=generator, dtype=torch.float64, requires_grad=True)
    actions = torch.randn(6, 1, ACT, generator=generator, dtype=torch.float64, requires_grad=True)
    energies = joint(obs, actions)
    expected = torch.autograd.grad(energies.sum(), (obs, actions))
    pairs = torch.cat([obs, actions[:, 0]], 1).detach()
    view = joint.pairs()
    with torch.set_grad_enabled(grad):
        # One batch row with six samples: pairs are independent of the observation that `encode` is given.
        value, gradients = view.energies_and_gradients(view.encode(torch.zeros(1, 0).double()), pairs[None])
    assert_close(value[0], energies[:, 0].detach())
    assert_close(gradients[0, :, :OBS].detach(), expected[0])
    assert_close(gradients[0, :, OBS:].detach(), expected[1][:, 0])


def test_pairs_share_the_parameters_of_the_energy(generator: torch.Generator) -> None:
    joint = mlp(generator)
    view = joint.pairs()
    assert {id(p) for p in view.parameters()} == {id(p) for p in joint.parameters()}


# -------------------------------------------------------------------------------------------- composition


def test_sums_and_multiples_are_what_they_say(generator: torch.Generator) -> None:
    first, obs, actions = make("mlp", generator)
    second = residual(generator).double()
    marginal = MarginalEnergy(ACT, generator=generator).double()
    energies = {e: e(obs, actions).detach() for e in (first, second, marginal)}
    total = first + 0.5 * second
    assert_close(total(obs, actions), energies[first] + 0.5 * energies[second], 1e-12)
    assert_close((second * 3)(obs, actions), 3 * energies[second], 1e-12)
    assert_close((-1 * first)(obs, actions), -energies[first], 1e-12)
    nested = 2 * (first + 3 * (second + obstacle)) + marginal
    expected = 2 * energies[first] + 6 * energies[second] + 6 * obstacle(obs, actions) + energies[marginal]
    assert_close(nested(obs, actions), expected, 1e-12)
    assert nested.weights == [2, 6, 6, 1]
    assert [type(term) for term in nested.parts()] == [MLPEnergy, ResidualEnergy, Penalty, MarginalEnergy]
    # Gradients are linear too.
    with torch.no_grad():
        gradients = [e.energies_and_gradients(e.encode(obs), actions)[1] for e in (first, second)]
        assert_close(total.energies_and_gradients(total.encode(obs), actions)[1], gradients[0] + 0.5 * gradients[1])


def test_composing_leaves_the_terms_alone(generator: torch.Generator) -> None:
    first, obs, actions = make("mlp", generator)
    before = first(obs, actions)
    inner = first + obstacle
    _ = 5 * inner + first
    assert inner.weights == [1, 1]
    assert torch.equal(first(obs, actions), before)
    assert {id(p) for p in inner.parameters()} == {id(p) for p in first.parameters()}


def test_a_constant_penalty_has_no_gradient(generator: torch.Generator) -> None:
    energy, obs, actions = make("mlp", generator)
    total = energy + (lambda _, y: torch.full(y.shape[:2], 7.0, dtype=y.dtype))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            values, gradients = total.energies_and_gradients(total.encode(obs), actions)
            expected = energy.energies_and_gradients(energy.encode(obs), actions)
        assert_close(values.detach(), expected[0].detach() + 7, 1e-12)
        assert_close(gradients.detach(), expected[1].detach(), 1e-12)


def test_evaluating_gives_every_module_its_mode_back() -> None:
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    module.train()
    module[1].eval()  # frozen by its owner
    with pytest.raises(RuntimeError), evaluating(module):
        assert not module.training and not module[0].training
        raise RuntimeError
    assert module.training and module[0].training and not module[1].training


# -------------------------------------------------------------------------------------------- bad input


@every_energy
@pytest.mark.usefixtures("unchecked_shapes")
def test_wrong_shapes_name_the_argument(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    context = detached(energy.encode(obs))
    for method in (energy.energies, energy.energies_and_gradients):
        for bad in (actions[:2], actions[..., :1], actions[0], actions[..., None], actions[:, :0]):
            with pytest.raises(ValueError, match="actions must"):
                method(context, bad)
        for change in (lambda c: c[:, :-1], lambda c: torch.cat([c, c], 1), lambda c: c[0], lambda c: c[:, None]):
            with pytest.raises(ValueError, match="context must be"):
                method(mapped(change, context), actions)
        with pytest.raises(ValueError, match="actions must not be empty"):
            method(mapped(lambda c: c[:0], context), actions[:0])


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ["mlp", "residual", "module", "penalty", "nested sum"])
def test_wrong_observations_name_the_argument(name: str, generator: torch.Generator) -> None:
    energy, obs, _ = make(name, generator)
    for bad in (obs[:, :-1], torch.cat([obs, obs], 1), obs[0], obs[:, None]):
        with pytest.raises(ValueError, match="obs must be"):
            energy.encode(bad)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: MLPEnergy(-1, 2), "obs_dim must be"),
        (lambda: MLPEnergy(1, 0), "act_dim must be"),
        (lambda: ResidualEnergy(1, 2, width=0), "width must be"),
        (lambda: MLPEnergy(1, 2, 4, hidden_layers=0), "hidden_layers must be"),
        (lambda: ResidualEnergy(1, 2, 4, blocks=0), "blocks must be"),
        (lambda: MLPEnergy(1, 2, 4, dropout=1.0), "dropout must be"),
        (lambda: MLPEnergy(1, 2, 4, dropout=-0.1), "dropout must be"),
        (lambda: ResidualEnergy(1, 2, 4, dropout=math.nan), "dropout must be"),
        (lambda: MLPEnergy(1, 2, 4, init="xavier"), "init must be"),
        (lambda: ModuleEnergy(SmoothHead(5), 3, 2, nn.Linear(3, 5)), "feature_dim must be"),
        (lambda: MLPEnergy(1, 2, 4) + MLPEnergy(1, 3, 4), "act_dim"),
        (lambda: MLPEnergy(1, 2, 4) + MLPEnergy(2, 2, 4), "obs_dim"),
        (lambda: WeightedSum([MLPEnergy(1, 2, 4)], [1.0, 2.0]), "argument 2 is longer"),
    ],
)
def test_bad_arguments_are_named(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_module_or_penalty_of_the_wrong_shape_is_named() -> None:
    context, actions = torch.zeros(2, OBS), torch.zeros(2, 4, ACT)
    with pytest.raises(ValueError, match=r"penalty must return \(2, 4\) energies"):
        Penalty(lambda _, y: y, OBS, ACT).energies(context, actions)

    class Wrong(nn.Module):
        def forward(self, features: Tensor, actions: Tensor) -> Tensor:
            return actions

    with pytest.raises(ValueError, match=r"module must return one energy per row \(8\)"):
        ModuleEnergy(Wrong(), OBS, ACT).energies(context, actions)


# -------------------------------------------------------------------------------------------- an energy of one's own


class Pair(NamedTuple):
    """A user's own kind of context."""

    stiffness: Tensor
    centre: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Context]] = {
    "tensor": lambda a, m: torch.cat([a, m], 1),
    "tuple": lambda a, m: (a, m),
    "named tuple": Pair,
    "list": lambda a, m: [a, m],
    "dict": lambda a, m: {"stiffness": a, "centre": m},
    "nested": lambda a, m: {"inner": ([a], {"centre": m})},
}


class Catenary(EnergyModel):
    """Two methods and no more: E = Σ_d a_d(x) cosh(y_d − m_d(x)), so ∇E = a sinh(y − m), with any form of context."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.obs_dim, self.act_dim = form, OBS, ACT
        self.map = nn.Linear(OBS, 2 * ACT)
        self.dropout = nn.Dropout(0.5)

    def encode(self, obs: Tensor) -> Context:
        stiffness, centre = self.map(obs).chunk(2, 1)
        return FORMS[self.form](0.5 + stiffness.square(), centre)

    def energies(self, context: Context, actions: Tensor) -> Tensor:
        self.check(context, actions)
        stiffness, centre = self.numbers(context)
        return (self.dropout(stiffness).unsqueeze(1) * torch.cosh(actions - centre.unsqueeze(1))).sum(-1)

    def numbers(self, context: Context) -> tuple[Tensor, Tensor]:
        if self.form == "tensor":
            return context.split(ACT, 1)
        stiffness, centre = leaves(context)
        return stiffness, centre


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", FORMS)
def test_two_methods_are_enough(form: str, mode: type, generator: torch.Generator) -> None:
    """Gradients against the closed form and central differences, in each mode of autograd and without dropout."""
    energy = Catenary(form).double().train()
    obs = torch.randn(3, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(3, 5, ACT, generator=generator, dtype=torch.float64)
    assert not energy.closed_form
    with mode():
        context = energy.encode(obs.clone())
        values, gradients = energy.energies_and_gradients(context, actions.clone())
    assert all(module.training for module in energy.modules())
    energy.eval()
    with torch.no_grad():
        context = energy.encode(obs)
        stiffness, centre = (part.unsqueeze(1) for part in energy.numbers(context))
        assert_close(values.detach(), (stiffness * torch.cosh(actions - centre)).sum(-1), 1e-12)
        assert_close(gradients.detach(), stiffness * torch.sinh(actions - centre), 1e-12)
        for dim in range(ACT):
            step = 1e-5 * F.one_hot(torch.tensor(dim), ACT)
            difference = energy.energies(context, actions + step) - energy.energies(context, actions - step)
            assert_close(gradients[..., dim].detach(), difference / 2e-5, 1e-6)
    assert values.requires_grad == gradients.requires_grad == (mode is torch.enable_grad)


@pytest.mark.parametrize("form", FORMS)
def test_the_default_gradient_can_be_differentiated_again(form: str, generator: torch.Generator) -> None:
    """∂/∂y Σ ∇E = a cosh(y − m), and a loss of ∇E reaches the weights."""
    energy = Catenary(form).double().eval()
    obs = torch.randn(3, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(3, 5, ACT, generator=generator, dtype=torch.float64, requires_grad=True)
    context = energy.encode(obs)
    gradients = energy.energies_and_gradients(context, actions)[1]
    second, weights = torch.autograd.grad(gradients.sum(), [actions, energy.map.weight])
    stiffness, centre = (part.detach().unsqueeze(1) for part in energy.numbers(context))
    assert_close(second, stiffness * torch.cosh(actions.detach() - centre), 1e-12)
    assert weights.abs().max() > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_runs_on_any_form_of_context(form: str, generator: torch.Generator) -> None:
    """And the form makes no difference, alone and in a sum."""
    energy, plain, actions = Catenary(form), Catenary("tensor"), torch.zeros(3, 5, ACT)
    plain.load_state_dict(energy.state_dict())
    obs = torch.randn(3, OBS, generator=generator)
    state = generator.get_state()
    for one, other in ((energy, plain), (energy + obstacle, plain + obstacle)):
        chain = run(Langevin(), one, one.encode(obs), actions, generator.set_state(state))
        expected = run(Langevin(), other, other.encode(obs), actions, generator.set_state(state))
        assert torch.equal(chain.actions, expected.actions)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("context, kind", [(3, "int"), ("obs", "str"), (None, "NoneType"), (object(), "object")])
def test_a_context_of_a_strange_type_is_named(context: object, kind: str, generator: torch.Generator) -> None:
    energy, actions = Catenary("tuple"), torch.zeros(3, 5, ACT)
    message = f"a context is made of tensors, tuples, lists and dicts, not {kind}"
    for bad in (context, (context, torch.zeros(3, ACT)), {"inner": [context]}):
        for call in (
            energy.energies,
            energy.energies_and_gradients,
            lambda c, y: run(Langevin(), energy, c, y, generator),
        ):
            with pytest.raises(TypeError, match=message):
                call(bad, actions)
    with pytest.raises(ValueError, match=rf"context must be \[batch, {WIDTH}\], got a {kind}"):
        mlp(generator).energies(context, actions)
    with pytest.raises(ValueError, match=f"context must be a tuple of 2, one per term, got a {kind}"):
        (mlp(generator) + obstacle).energies(context, actions)
    with pytest.raises(ValueError, match=rf"context must be the pair \(of the tilt, of the base\), got a {kind}"):
        tilted(generator).energies(context, actions)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_context_of_the_wrong_length_is_named(generator: torch.Generator) -> None:
    actions = torch.zeros(3, 5, ACT)
    part = torch.zeros(3, WIDTH)
    for call in ("energies", "energies_and_gradients", "excess"):
        with pytest.raises(ValueError, match="context must be a tuple of 2, one per term, got 3 contexts"):
            getattr(mlp(generator) + tilted(generator), call)((part, part, part), actions)
        with pytest.raises(ValueError, match=r"context must be the pair .* got 1 contexts"):
            getattr(tilted(generator), call)((part,), actions)
    for empty in ((), [], {}, torch.zeros(())):
        with pytest.raises(ValueError, match="context must hold tensors whose first axis is the batch"):
            Catenary("tuple").energies(empty, actions)


# -------------------------------------------------------------------------------------------- levels


class Level(EnergyModel):
    """One level of `Levels`: E = g‖y − x‖²/(2(0.01 + s²)), with the gain g of the whole."""

    def __init__(self, whole: "Levels", level: float) -> None:
        super().__init__()
        self.whole, self.level = whole, level
        self.obs_dim, self.act_dim, self.context_dim = whole.obs_dim, whole.act_dim, whole.context_dim

    def encode(self, obs: Tensor) -> Context:
        return obs

    def energies(self, context: Context, actions: Tensor) -> Tensor:
        square = (actions - context[:, None, :ACT]).square().sum(-1)
        return self.whole.gain * square / (2 * (0.01 + self.level**2))


class Levels(EnergyModel):
    """A user's energy with noise levels."""

    levels = (1.0, 0.3, 0.1)

    def __init__(self) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim = OBS, ACT, OBS
        self.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def encode(self, obs: Tensor) -> Context:
        return obs

    def energies(self, context: Context, actions: Tensor) -> Tensor:
        return self.at(0.0).energies(context, actions)

    def at(self, level: float) -> EnergyModel:
        return Level(self, level)


@pytest.mark.parametrize("level", [1.0, 0.3, 0.1])
def test_a_sum_hands_the_level_on(level: float, generator: torch.Generator) -> None:
    """By the same context, with the same weights; a term without levels stays as it is."""
    energy, network = Levels(), mlp(generator).double()
    total = 0.5 * (network + 3 * energy) + obstacle
    obs = torch.randn(3, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(3, 5, ACT, generator=generator, dtype=torch.float64)
    there = total.at(level)
    square = (actions - obs[:, None, :ACT]).square().sum(-1)
    expected = 0.5 * network(obs, actions) + 1.5 * square / (0.01 + level**2) + obstacle(obs, actions)
    assert_close(there.energies(total.encode(obs), actions), expected, 1e-12)
    assert total.levels == Levels.levels
    assert {id(p) for p in there.parameters()} == {id(p) for p in total.parameters()}
    (gradient,) = torch.autograd.grad(there(obs, actions).sum(), energy.gain)
    assert gradient.abs() > 0
    assert torch.equal(energy(obs, actions), Level(energy, 0.0)(obs, actions)), "`at` changed the energy"


@every_energy
def test_an_energy_without_levels_is_itself_at_any(name: str, generator: torch.Generator) -> None:
    energy, _, _ = make(name, generator)
    assert energy.levels == () and energy.at(0.5) is energy


# -------------------------------------------------------------------------------------------- proposals


def tilted(generator: torch.Generator) -> TiltedEnergy:
    base = MixtureDensityEnergy(OBS, ACT, WIDTH, generator=generator)
    return TiltedEnergy(base, mlp(generator, init="torch"))


ANSWERS: dict[str, tuple[Callable[[torch.Generator], EnergyModel], bool, bool, bool]] = {
    "mlp": (mlp, False, False, True),
    "residual": (residual, False, False, True),
    "marginal": (lambda g: MarginalEnergy(ACT, generator=g), False, False, False),
    "pairs": (lambda g: mlp(g).pairs(), False, False, False),
    "module": (lambda g: ModuleEnergy(SmoothHead(OBS), OBS, ACT), False, False, False),
    "penalty": (lambda g: Penalty(obstacle, OBS, ACT), False, False, False),
    "regression": (lambda g: RegressionEnergy(OBS, ACT, WIDTH, generator=g), False, True, False),
    "mixture density": (lambda g: MixtureDensityEnergy(OBS, ACT, WIDTH, generator=g), True, True, False),
    "tilted": (tilted, True, False, False),
    "sum": (lambda g: mlp(g) + obstacle, False, False, False),
    "sum with a tilted one": (lambda g: tilted(g) + obstacle, True, False, False),
    "minus a tilted one": (lambda g: -1.0 * tilted(g), False, False, False),
    "scaled mlp": (lambda g: 0.5 * mlp(g), False, False, True),
    "scaled regression": (lambda g: 2.0 * RegressionEnergy(OBS, ACT, WIDTH, generator=g), False, True, False),
    "minus a regression": (lambda g: -1.0 * RegressionEnergy(OBS, ACT, WIDTH, generator=g), False, False, False),
    "of one's own": (lambda g: Catenary("tuple"), False, False, False),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_energy_says_what_it_can_do(name: str, generator: torch.Generator) -> None:
    """`proposes`, `explicit` and `pairs`; each "no" is also what the method says, by the name of the class."""
    build, proposes, explicit, pairs = ANSWERS[name]
    energy = build(generator).double().eval()
    obs = torch.randn(3, OBS, generator=generator, dtype=torch.float64)
    context, kind = energy.encode(obs), type(energy).__name__
    assert (energy.proposes, energy.explicit) == (proposes, explicit)
    if proposes:
        drawn = energy.propose(context, 7, generator)
        assert drawn.shape == energy.excess(context, drawn).unsqueeze(-1).expand(-1, -1, ACT).shape == (3, 7, ACT)
    else:
        with pytest.raises(TypeError, match=f"{kind} has no proposal|no term of this sum of energies has a proposal"):
            energy.propose(context, 7, generator)
        actions = torch.randn(3, 5, energy.act_dim, generator=generator, dtype=torch.float64)
        assert torch.equal(energy.excess(context, actions), energy.energies(context, actions))
    if explicit:
        assert energy.best(context).shape == (3, ACT)
    else:
        with pytest.raises(TypeError, match=f"{kind} does not know its lowest energy"):
            energy.best(context)
    if pairs:
        assert energy.pairs().act_dim == OBS + ACT
    else:
        with pytest.raises(TypeError, match=r"\w+ has no joint form"):
            energy.pairs()
    assert (energy.contrasted is energy) == ("tilted" not in name or not proposes)
    assert (energy.own_losses(obs, torch.zeros(3, ACT, dtype=torch.float64)) == {}) == ("tilted" not in name)


def test_a_tilted_energy_has_its_base_fitted_by_likelihood(generator: torch.Generator) -> None:
    energy = tilted(generator)
    obs, actions = torch.randn(4, OBS, generator=generator), torch.randn(4, ACT, generator=generator)
    assert energy.contrasted is energy.tilt
    losses = energy.own_losses(obs, actions)
    assert list(losses) == ["proposal_loss"]
    assert torch.equal(losses["proposal_loss"], energy.base(obs, actions.unsqueeze(1)).mean())


def test_a_sum_hands_on_what_its_terms_can_do(generator: torch.Generator) -> None:
    """Losses of their own, the part that contrast trains, demonstrations to store, the best action, the joint form."""
    one, other = tilted(generator).double(), tilted(generator).double()
    obs = torch.randn(4, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(4, 5, ACT, generator=generator, dtype=torch.float64)
    total = 2.0 * one + obstacle + 0.5 * other
    losses, parts = total.own_losses(obs, actions[:, 0]), [each.own_losses(obs, actions[:, 0]) for each in (one, other)]
    assert [*losses] == ["proposal_loss", "proposal_loss_2"]
    assert [*losses.values()] == [each["proposal_loss"] for each in parts]
    for each in (total, one + obstacle, 1.0 * one):
        assert_close(each.contrasted(obs, actions), each.excess(each.encode(obs), actions), 1e-12)
    store = NearestEnergy(OBS, ACT, 4).double()
    stored = 2.0 * store
    stored.remember(obs, actions[:, 0])
    assert torch.equal(stored.best(stored.encode(obs)), actions[:, 0])
    network = mlp(generator).double()
    assert torch.equal(
        (0.5 * network).pairs()(obs, actions.new_zeros(4, 5, OBS + ACT)),
        0.5 * network.pairs()(obs, actions.new_zeros(4, 5, OBS + ACT)),
    )
    density = MixtureDensityEnergy(OBS, ACT, WIDTH, generator=generator)
    assert (1.0 * density).smoothable and not (2.0 * density).smoothable and not (density + obstacle).smoothable


def test_the_excess_is_the_energy_plus_log_q(generator: torch.Generator) -> None:
    """Against E + log q computed directly, and against the formula in f, E and the other terms."""
    energy = tilted(generator).double()
    other = MixtureDensityEnergy(OBS, ACT, WIDTH, generator=generator).double()
    obs = torch.randn(3, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(3, 5, ACT, generator=generator, dtype=torch.float64)
    f, whole, log_q = energy.tilt(obs, actions), energy(obs, actions), -energy.base(obs, actions)
    bump = obstacle(obs, actions)
    steeper = TiltedEnergy(energy, mlp(generator).double())  # the base is a tilted energy itself
    cases: list[tuple[EnergyModel, Tensor]] = [
        (energy, f),
        (1.0 * energy, f),
        (energy + obstacle, f + bump),
        (energy + 0.5 * Penalty(obstacle, OBS, ACT), f + 0.5 * bump),
        (Penalty(obstacle, OBS, ACT) + energy, f + bump),
        (2.0 * energy, f + whole),
        (2.0 * (energy + 0.5 * Penalty(obstacle, OBS, ACT)), f + whole + bump),
        (0.5 * energy, f - 0.5 * whole),
        (energy + other, f + other(obs, actions)),  # the first one proposes
        (energy + -1.0 * other, f - other(obs, actions)),
        (-1.0 * other + energy, f - other(obs, actions)),  # a negative weight turns a density over
        (steeper, f + steeper.tilt(obs, actions)),
    ]
    for total, expected in cases:
        found = total.excess(total.encode(obs), actions)
        assert_close(found, expected, 1e-12)
        assert_close(found, total(obs, actions) + log_q, 1e-9)
    weighted = 1.0 * energy
    assert torch.equal(weighted.excess(weighted.encode(obs), actions), energy.excess(energy.encode(obs), actions))


@pytest.mark.usefixtures("unchecked_shapes")
def test_the_excess_of_a_density_is_zero(generator: torch.Generator) -> None:
    energy = MixtureDensityEnergy(OBS, ACT, WIDTH, generator=generator)
    context = energy.encode(torch.randn(3, OBS, generator=generator))
    excess = energy.excess(context, energy.propose(context, 7, generator))
    assert torch.equal(excess, torch.zeros(3, 7))
    with pytest.raises(ValueError, match="actions must be"):
        energy.excess(context, torch.zeros(2, 7, ACT))


def test_a_proposal_without_an_excess_is_refused(generator: torch.Generator) -> None:
    """The default excess is that of a uniform proposal, which would give wrong weights without a word."""

    class Half(Catenary):
        def propose(self, context: Context, n: int, generator: torch.Generator, shared: bool = False) -> Tensor:
            return torch.randn(3, n, ACT, generator=generator)

    energy, actions = Half("tuple"), torch.zeros(3, 5, ACT)
    for total in (energy, energy + obstacle):
        with pytest.raises(TypeError, match="Half has `propose` but no `excess`"):
            total.excess(total.encode(torch.zeros(3, OBS)), actions)


@pytest.mark.parametrize("name", [name for name, answers in ANSWERS.items() if answers[1]])
def test_shared_numbers_make_a_row_independent_of_its_batch(name: str, generator: torch.Generator) -> None:
    energy = ANSWERS[name][0](generator).double()
    obs = torch.randn(4, OBS, generator=generator, dtype=torch.float64)
    context, state = energy.encode(obs), generator.get_state()

    def draws(part: Context, shared: bool) -> Tensor:
        generator.set_state(state)
        return energy.propose(part, 50, generator, shared).detach()

    together = draws(context, True)
    for i in range(4):
        alone = draws(mapped(lambda tensor, i=i: tensor[i : i + 1], context), True)
        torch.testing.assert_close(alone[0], together[i])
    repeated = mapped(lambda tensor: tensor[:1].expand_as(tensor), context)
    same, own = draws(repeated, True), draws(repeated, False)
    assert torch.equal(same, same[:1].expand_as(same))
    assert not torch.equal(own[0], own[1])


def narrow_mixture() -> MixtureDensityEnergy:
    """0.3 N(−0.5, 0.3²) + 0.7 N(0.4, 0.2²), whatever the observation."""
    energy = MixtureDensityEnergy(1, 1, 4, 0, 2).double()
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.zero_()
        energy.weighing.layers[-1].bias.copy_(torch.tensor([0.3, 0.7]).log())
        # The inverse of log σ = 4.5 tanh(raw / 4.5) − 2.5.
        raw = 4.5 * torch.atanh((torch.tensor([0.3, 0.2], dtype=torch.float64).log() + 2.5) / 4.5)
        energy.placing.layers[-1].bias.copy_(torch.cat([torch.tensor([-0.5, 0.4], dtype=torch.float64), raw]))
    return energy


WEIGHTED: dict[str, Callable[[TiltedEnergy, Penalty], EnergyModel]] = {
    "tilted": lambda energy, wall: energy,
    "with a penalty": lambda energy, wall: energy + 0.5 * wall,
    "doubled": lambda energy, wall: 2.0 * energy,
    "doubled, with a penalty": lambda energy, wall: 2.0 * (energy + wall),
}


@pytest.mark.parametrize("bug", [None, "energies for excess", "half of it", "no weights"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_draws_of_the_proposal_are_draws_of_p(name: str, bug: str | None, generator: torch.Generator) -> None:
    """Draws yᵢ of q with weights wᵢ = exp(−excess) stand for p: E_q[w (g(y) − E_p g)] = 0 for any g, with E_p by
    quadrature. So z = Σ wᵢ(gᵢ − E_p g) / √Σ wᵢ²(gᵢ − E_p g)² is standard normal: the weights are bounded, and at n =
    20,000 its skewness moves a tail probability by a few per cent. Three g: |z| < 5 errs in two of a million runs."""
    tilt = Penalty(lambda x, y: 0.8 * y[..., 0] + 0.5 * torch.sin(3 * y[..., 0]), 1, 1)
    wall = Penalty(lambda x, y: F.softplus(6 * (y[..., 0] - 0.3)), 1, 1)
    energy = WEIGHTED[name](TiltedEnergy(narrow_mixture(), tilt), wall)
    obs = torch.zeros(1, 1, dtype=torch.float64)

    def statistics(y: Tensor) -> Tensor:
        return torch.stack([y[:, 0], y[:, 0].square(), (y[:, 0] > 0).to(y.dtype)], 1)

    with torch.no_grad():
        exact = Quadrature((-4.0,), (4.0,), 1024).expectation(energy, obs, statistics)
        context = energy.encode(obs)
        drawn = energy.propose(context, 20_000, generator)
        exponents = {
            None: -energy.excess(context, drawn),
            "energies for excess": -energy.energies(context, drawn),
            "half of it": -0.5 * energy.excess(context, drawn),
            "no weights": torch.zeros(1, 20_000, dtype=torch.float64),
        }
    weights = exponents[bug][0].exp()
    terms = weights.unsqueeze(1) * (statistics(drawn[0]) - exact)
    z = terms.sum(0) / terms.square().sum(0).sqrt()
    assert (z.abs().max() < 5) == (bug is None), z
