"""Contract tests of the lower rooms: samplers, sources of negatives, energies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cebm.certificate import Gaussian, certify
from cebm.composition import built, modules_in
from cebm.energies import MLP, EnergyModel
from cebm.energies.base import evaluating, mapped
from cebm.negatives import Density, Negatives
from cebm.samplers import Sampler, StepInfo, run
from cebm.testing.checks import (
    ACT,
    BATCH,
    OBS,
    SAMPLES,
    SPEC,
    Check,
    ContractError,
    equal,
    generator_of,
    is_saved_and_read,
    named,
    network,
    pairs,
    run_checks,
    say,
    without_global_randomness,
)

# ---------------------------------------------------------------------------------------------- samplers


def sampler_checks(sampler: Any) -> list[Check]:
    """The promises of a sampler: see `cebm.samplers.Sampler`."""

    def start(dtype: torch.dtype) -> tuple[EnergyModel, Any, Tensor]:
        energy, (obs, _) = network(dtype), pairs(dtype)
        begin = torch.rand((BATCH, SAMPLES, ACT), generator=generator_of(3), dtype=dtype) * 2 - 1
        return energy, energy.encode(obs).detach(), begin

    def has_steps_init_and_step(piece: Any) -> None:
        say(isinstance(piece, Sampler), "a sampler has `steps`, `init` and `step`")
        say(isinstance(piece.steps, int) and piece.steps >= 1, f"steps must be at least 1, got {piece.steps!r}")

    def keeps_shape_dtype_and_info(piece: Any) -> None:
        for dtype in (torch.float32, torch.float64):
            energy, context, begin = start(dtype)
            chain = run(piece, energy, context, begin, generator_of())
            say(chain.actions.shape == begin.shape, f"actions are {tuple(chain.actions.shape)}, not {begin.shape}")
            say(chain.actions.dtype == dtype, f"actions are {chain.actions.dtype}, the start is {dtype}")
            say(bool(torch.isfinite(chain.actions).all()), "actions are NaN or infinite on a harmless energy")
            for name, column in zip(StepInfo._fields, chain.info, strict=True):
                say(column.shape == (piece.steps,), f"info.{name} has {tuple(column.shape)}: one number per step")
                say(bool(torch.isfinite(column).all()), f"info.{name} is NaN or infinite on a harmless energy")

    def same_generator_same_result(piece: Any) -> None:
        energy, context, begin = start(torch.float32)
        one, two = (run(piece, energy, context, begin, generator_of(4)).actions for _ in range(2))
        equal(one, two, "the same generator gives different actions: something else is random, or state is kept")

    def leaves_inputs_as_they_are(piece: Any) -> None:
        energy, context, begin = start(torch.float32)
        kept = context.clone(), begin.clone()
        run(piece, energy, context, begin, generator_of())
        equal((context, begin), kept, "the start or the context was changed in place")

    def leaves_global_randomness_alone(piece: Any) -> None:
        energy, context, begin = start(torch.float32)
        without_global_randomness(lambda: run(piece, energy, context, begin, generator_of()))

    def works_on_one_chain(piece: Any) -> None:
        energy, context, begin = start(torch.float32)
        actions = run(piece, energy, context[:1], begin[:1, :1], generator_of()).actions
        say(actions.shape == (1, 1, ACT), f"one chain of one observation gave {tuple(actions.shape)}")

    def moves(piece: Any) -> None:
        energy, context, begin = start(torch.float32)
        after = run(piece, energy, context, begin, generator_of()).actions
        say(not torch.equal(after, begin), "no candidate moved in all of its steps")

    def samples_a_gaussian(piece: Any) -> None:
        """A minimiser fails this, and says so with `expected_failures`."""
        [row] = certify(piece, targets=[Gaussian()], runs=["chains"])
        say(not row.failed, f"{row.verdict}: mean off by {row.mean_error:.2f}, deviation by {row.std_error:.2f}")

    functions = [
        has_steps_init_and_step,
        keeps_shape_dtype_and_info,
        same_generator_same_result,
        leaves_inputs_as_they_are,
        leaves_global_randomness_alone,
        works_on_one_chain,
        moves,
        samples_a_gaussian,
        is_saved_and_read,
    ]
    return named(sampler, functions)


def check_sampler(sampler: Any, expected_failures: Mapping[str, str] | None = None) -> None:
    """Raises a ContractError unless the sampler keeps its contract; `cebm.certify` judges it on harder targets."""
    run_checks(sampler_checks(sampler), expected_failures)


# ---------------------------------------------------------------------------------------------- negatives


@dataclass(frozen=True)
class _SourceChecks:
    """What a source of negatives promises, one method each."""

    settings: Any
    """Of the energy that it is for."""

    def drawn(self, piece: Any, n: int = 3, seed: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Negatives, Any]:
        made = built(piece, SPEC, generator_of(6))
        for module in modules_in(made).values():
            module.to(dtype)
        obs, actions = pairs(dtype)
        model = self.settings.build(SPEC, generator_of(2)).to(dtype)
        return made.sample(model, obs, actions, n, generator_of(seed)), made

    def keeps_shape_and_dtype(self, piece: Any) -> None:
        for dtype in (torch.float32, torch.float64):
            for n in (1, 3):
                found, _ = self.drawn(piece, n, dtype=dtype)
                shape = tuple(found.actions.shape)
                say(shape == (BATCH, n, ACT), f"{n} negatives for {BATCH} pairs have shape {shape}")
                say(found.actions.dtype == dtype, f"negatives are {found.actions.dtype}, the pairs are {dtype}")
                say(bool(torch.isfinite(found.actions).all()), "negatives are NaN or infinite")

    def same_generator_same_result(self, piece: Any) -> None:
        equal(
            self.drawn(piece)[0].actions, self.drawn(piece)[0].actions, "the same generator gives different negatives"
        )

    def leaves_inputs_as_they_are(self, piece: Any) -> None:
        made, model, (obs, actions) = (
            built(piece, SPEC, generator_of(6)),
            self.settings.build(SPEC, generator_of(2)),
            pairs(),
        )
        made.sample(model, obs, actions, 3, generator_of())
        equal((obs, actions), pairs(), "observations or actions were changed in place")

    def leaves_global_randomness_alone(self, piece: Any) -> None:
        without_global_randomness(lambda: self.drawn(piece))

    def gives_constants_to_autograd(self, piece: Any) -> None:
        """Unless it keeps the graph of its chains on purpose (`keep_graph`)."""
        found, made = self.drawn(piece)
        if not getattr(made, "keep_graph", False):
            say(not found.actions.requires_grad, "negatives carry a graph: draw them under torch.no_grad()")

    def refuses_no_negatives(self, piece: Any) -> None:
        try:
            self.drawn(piece, 0)
        except ValueError:
            return
        raise ContractError("n = 0 must be a ValueError")

    def log_q_is_the_density(self, piece: Any) -> None:
        """Where the source tells a density: of the right shape, that of `log_prob`, and with a total mass of 1."""
        found, made = self.drawn(piece, dtype=torch.float64)
        if found.log_q is None:
            return
        say(found.log_q.shape == found.actions.shape[:2], f"log_q has shape {tuple(found.log_q.shape)}")
        say(found.log_q_positive is not None, "log_q is given, log_q_positive is not")
        if not isinstance(made, Density):
            return
        _, actions = pairs(torch.float64)
        same = torch.allclose(made.log_prob(actions, found.actions), found.log_q)
        say(same, "log_q differs from log_prob at the same actions")
        edge = torch.linspace(-8, 8, 801, dtype=torch.float64)
        grid = torch.cartesian_prod(edge, edge).unsqueeze(0)
        mass = float(made.log_prob(actions[:1], grid).exp().sum() * (edge[1] - edge[0]) ** 2)
        say(abs(mass - 1) < 0.02, f"the density has a mass of {mass:.3f}, not 1")

    def own_losses_train_its_own_weights(self, piece: Any) -> None:
        found, made = self.drawn(piece)
        own = getattr(made, "own_losses", None)
        losses = {} if own is None else own(pairs()[1], found.actions)
        for name, loss in losses.items():
            say(loss.ndim == 0 and bool(torch.isfinite(loss)), f"own loss {name} is no finite number")
            say(loss.requires_grad, f"own loss {name} reaches no weight")


def source_checks(source: Any, energy: Any = None) -> list[Check]:
    """The promises of a source of negatives, or of settings that build one: see `cebm.negatives.Source`. `energy`: the
    settings of the energy it is for; by default a small MLP."""
    checks = _SourceChecks(MLP(16, init="torch") if energy is None else energy)
    functions = [
        checks.keeps_shape_and_dtype,
        checks.same_generator_same_result,
        checks.leaves_inputs_as_they_are,
        checks.leaves_global_randomness_alone,
        checks.gives_constants_to_autograd,
        checks.refuses_no_negatives,
        checks.log_q_is_the_density,
        checks.own_losses_train_its_own_weights,
        is_saved_and_read,
    ]
    return named(source, functions)


def check_source(source: Any, expected_failures: Mapping[str, str] | None = None, energy: Any = None) -> None:
    """Raises a ContractError unless the source of negatives keeps its contract."""
    run_checks(source_checks(source, energy), expected_failures)


# ---------------------------------------------------------------------------------------------- energies


@dataclass(frozen=True)
class _EnergyChecks:
    """What an energy promises, one method each."""

    def made(self, piece: Any, dtype: torch.dtype = torch.float64) -> EnergyModel:
        return piece.build(SPEC, generator_of(7)).to(dtype).eval()

    def given(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        actions = torch.rand((BATCH, SAMPLES, ACT), generator=generator_of(8), dtype=dtype) * 1.8 - 0.9
        return pairs(dtype)[0], actions

    def keeps_shape_and_dtype(self, piece: Any) -> None:
        for dtype in (torch.float32, torch.float64):
            energy, (obs, actions) = self.made(piece, dtype), self.given(dtype)
            say(
                (energy.obs_dim, energy.act_dim) == (OBS, ACT), "obs_dim and act_dim must be those of the specification"
            )
            values = energy(obs, actions)
            say(values.shape == (BATCH, SAMPLES), f"energies have shape {tuple(values.shape)}")
            say(values.dtype == dtype, f"energies are {values.dtype}, the actions are {dtype}")
            say(bool(torch.isfinite(values).all()), "energies are NaN or infinite inside the box")

    def gradients_are_those_of_the_energies(self, piece: Any) -> None:
        """Against central differences in float64, in three modes of autograd."""
        energy, (obs, actions) = self.made(piece), self.given()
        with torch.no_grad():
            context, step = energy.encode(obs), 1e-6
            wanted = torch.zeros_like(actions)
            for d in range(ACT):
                move = torch.zeros(ACT, dtype=torch.float64)
                move[d] = step
                difference = energy.energies(context, actions + move) - energy.energies(context, actions - move)
                wanted[..., d] = difference / (2 * step)
        modes = [torch.no_grad, torch.enable_grad] + ([torch.inference_mode] if energy.closed_form else [])
        for mode in modes:
            with mode():
                values, slopes = energy.energies_and_gradients(energy.encode(obs), actions)
                same = torch.allclose(values, energy(obs, actions), atol=1e-8)
                again = torch.allclose(energy.gradients(energy.encode(obs), actions), slopes, atol=1e-8)
            name = mode.__name__
            say(again, f"gradients gives others than energies_and_gradients, under {name}")
            say(same, f"energies_and_gradients gives other energies than energies, under {name}")
            # A kink (ReLU) between the two ends of a difference may spoil one of many entries.
            off = ((slopes.detach() - wanted).abs() > 1e-4 * (1 + wanted.abs())).double().mean()
            say(
                float(off) < 0.05, f"gradients differ from finite differences in {off:.0%} of the entries, under {name}"
            )

    def gradients_can_be_differentiated(self, piece: Any) -> None:
        energy, (obs, actions) = self.made(piece), self.given()
        slopes = energy.energies_and_gradients(energy.encode(obs), actions)[1]
        say(
            slopes.requires_grad, "while autograd is on, gradients must reach the weights (a gradient penalty needs it)"
        )
        slopes.square().sum().backward()

    def rows_do_not_mix(self, piece: Any) -> None:
        """An energy belongs to one observation and one action, whatever else is in the batch."""
        energy, (obs, actions) = self.made(piece), self.given()
        with torch.no_grad():
            together, alone = energy(obs, actions), energy(obs[1:2], actions[1:2, 2:3])
        say(torch.allclose(together[1:2, 2:3], alone, atol=1e-8), "an energy depends on the rest of the batch")

    def context_can_be_cut(self, piece: Any) -> None:
        energy, (obs, actions) = self.made(piece), self.given()
        with torch.no_grad():
            context = energy.encode(obs)
            part = energy.energies(mapped(lambda tensor: tensor[1:2], context), actions[1:2])
            same = torch.allclose(part, energy.energies(context, actions)[1:2], atol=1e-8)
        say(same, "each tensor of a context must have the batch as its first axis")

    def leaves_inputs_as_they_are(self, piece: Any) -> None:
        energy, (obs, actions) = self.made(piece), self.given()
        energy.energies_and_gradients(energy.encode(obs), actions)
        equal((obs, actions), self.given(), "observations or actions were changed in place")

    def every_weight_gets_a_gradient(self, piece: Any) -> None:
        energy, (obs, actions) = self.made(piece, torch.float32).train(), self.given(torch.float32)
        own = sum(energy.own_losses(obs, actions[:, 0]).values(), torch.zeros(()))
        (energy(obs, actions).square().mean() + own).backward()
        missing = [name for name, weight in energy.named_parameters() if weight.requires_grad and weight.grad is None]
        say(not missing, f"these weights get no gradient: {', '.join(missing)}")

    def chains_run_without_dropout(self, piece: Any) -> None:
        energy, (obs, actions) = self.made(piece, torch.float32).train(), self.given(torch.float32)
        with torch.no_grad():
            with evaluating(energy):
                context = energy.encode(obs)
            one, two = (energy.energies_and_gradients(context, actions) for _ in range(2))
        equal(one, two, "energies_and_gradients is random while training: switch dropout off in it (`evaluating`)")
        say(energy.training, "energies_and_gradients leaves the energy in evaluation mode")

    def generator_decides_the_weights(self, piece: Any) -> None:
        one, two = self.made(piece).state_dict(), self.made(piece).state_dict()
        same = all(torch.equal(value, two[name]) for name, value in one.items())
        say(same, "the same generator builds different weights (see cebm.energies.initialised_by)")
        without_global_randomness(lambda: self.made(piece))

    def weights_say_everything(self, piece: Any) -> None:
        """Loading the state of one energy into another makes them equal."""
        energy, other, (obs, actions) = (
            self.made(piece),
            piece.build(SPEC, generator_of(9)).double().eval(),
            self.given(),
        )
        other.load_state_dict(energy.state_dict())
        with torch.no_grad():
            equal(energy(obs, actions), other(obs, actions), "something that decides the energy is not in state_dict")

    def proposal_draws_and_weighs(self, piece: Any) -> None:
        energy, (obs, _) = self.made(piece), self.given()
        if not energy.proposes:
            return
        with torch.no_grad():
            context = energy.encode(obs)
            draws = energy.propose(context, SAMPLES, generator_of())
            say(draws.shape == (BATCH, SAMPLES, ACT), f"proposals have shape {tuple(draws.shape)}")
            equal(draws, energy.propose(context, SAMPLES, generator_of()), "the same generator proposes other actions")
            excess = energy.excess(context, draws)
        say(excess.shape == (BATCH, SAMPLES), f"excess has shape {tuple(excess.shape)}")
        say(bool(torch.isfinite(excess).all()), "excess is NaN or infinite at the energy's own proposals")

    def levels_share_the_context(self, piece: Any) -> None:
        energy, (obs, actions) = self.made(piece), self.given()
        with torch.no_grad():
            context = energy.encode(obs)
            for level in energy.levels or (0.5,):
                values = energy.at(level).energies(context, actions)
                say(values.shape == (BATCH, SAMPLES), f"energies at level {level} have shape {tuple(values.shape)}")
                say(bool(torch.isfinite(values).all()), f"energies at level {level} are NaN or infinite")


def energy_checks(settings: Any) -> list[Check]:
    """The promises of settings that build an energy, and of the energy: see `cebm.energies.EnergyModel`."""
    checks = _EnergyChecks()
    functions = [
        checks.keeps_shape_and_dtype,
        checks.gradients_are_those_of_the_energies,
        checks.gradients_can_be_differentiated,
        checks.rows_do_not_mix,
        checks.context_can_be_cut,
        checks.leaves_inputs_as_they_are,
        checks.every_weight_gets_a_gradient,
        checks.chains_run_without_dropout,
        checks.generator_decides_the_weights,
        checks.weights_say_everything,
        checks.proposal_draws_and_weighs,
        checks.levels_share_the_context,
        is_saved_and_read,
    ]
    return named(settings, functions)


def check_energy(settings: Any, expected_failures: Mapping[str, str] | None = None) -> None:
    """Raises a ContractError unless the settings build an energy that keeps its contract."""
    run_checks(energy_checks(settings), expected_failures)
