"""Contract tests of the upper rooms: objectives, ways to act, policies, tasks."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cebm.acting import Found, Problem
from cebm.composition import built, modules_in
from cebm.energies import MLP, EnergyModel
from cebm.energies.base import evaluating
from cebm.objectives import Terms
from cebm.spaces import Box
from cebm.tasks import Task
from cebm.testing.checks import (
    ACT,
    BATCH,
    SPEC,
    Check,
    ContractError,
    equal,
    generator_of,
    is_saved_and_read,
    named,
    pairs,
    run_checks,
    say,
    without_global_randomness,
)

# ---------------------------------------------------------------------------------------------- objectives


def objective_checks(objective: Any, energy: Any = None) -> list[Check]:
    """The promises of an objective: see `cebm.objectives.Objective`. `energy`: the settings of the energy it is for; by
    default a small MLP."""
    settings = MLP(16, init="torch") if energy is None else energy

    def found(piece: Any, batch: int = 16) -> tuple[Terms, EnergyModel]:
        model, made = settings.build(SPEC, generator_of(2)), built(piece, SPEC, generator_of(6))
        return made.terms(model, *pairs(batch=batch), generator_of(5)), model

    def gives_terms_with_a_finite_loss(piece: Any) -> None:
        terms, _ = found(piece)
        say(isinstance(terms, Terms), f"terms must return cebm.objectives.Terms, got {type(terms).__name__}")
        say(terms.loss.ndim == 0 and bool(torch.isfinite(terms.loss)), "the loss must be one finite number")
        if terms.positive is not None:
            say(terms.positive.shape == (16,), f"positive has shape {tuple(terms.positive.shape)}")

    def loss_reaches_the_energy(piece: Any) -> None:
        terms, model = found(piece)
        terms.loss.backward()
        total = sum(float(weight.grad.abs().sum()) for weight in model.parameters() if weight.grad is not None)
        say(math.isfinite(total) and total > 0, f"the gradients of the weights add up to {total}")

    def same_generator_same_result(piece: Any) -> None:
        equal(found(piece)[0].loss, found(piece)[0].loss, "the same generator gives different losses")

    def leaves_inputs_as_they_are(piece: Any) -> None:
        made, (obs, actions) = built(piece, SPEC, generator_of(6)), pairs(batch=16)
        made.terms(settings.build(SPEC, generator_of(2)), obs, actions, generator_of())
        equal((obs, actions), pairs(batch=16), "observations or actions were changed in place")

    def leaves_global_randomness_alone(piece: Any) -> None:
        without_global_randomness(lambda: found(piece))

    def training_lowers_the_energy_of_the_data(piece: Any) -> None:
        """Sixty steps on actions at one place: their energy falls below that of actions elsewhere."""
        model, made = settings.build(SPEC, generator_of(2)), built(piece, SPEC, generator_of(6))
        generator, obs = generator_of(10), pairs(batch=64)[0]
        weights = [*model.parameters(), *(w for module in modules_in(made).values() for w in module.parameters())]
        optimiser = torch.optim.Adam(weights, 3e-3)

        def gap() -> float:
            here, there = torch.full((64, 1, ACT), 0.5), torch.full((64, 1, ACT), -0.5)
            with torch.no_grad(), evaluating(model):
                return float((model(obs, there) - model(obs, here)).mean())

        before = gap()
        for _ in range(60):
            actions = 0.5 + 0.05 * torch.randn((64, ACT), generator=generator)
            terms = made.terms(model, obs, actions, generator)
            own = model.own_losses(obs, actions) | terms.own
            optimiser.zero_grad()
            sum(own.values(), terms.loss).backward()
            optimiser.step()
        say(gap() > before, f"the energy elsewhere minus that at the data went from {before:.3f} to {gap():.3f}")

    functions = [
        gives_terms_with_a_finite_loss,
        loss_reaches_the_energy,
        same_generator_same_result,
        leaves_inputs_as_they_are,
        leaves_global_randomness_alone,
        training_lowers_the_energy_of_the_data,
        is_saved_and_read,
    ]
    return named(objective, functions)


def check_objective(objective: Any, expected_failures: Mapping[str, str] | None = None, energy: Any = None) -> None:
    """Raises a ContractError unless the objective keeps its contract."""
    run_checks(objective_checks(objective, energy), expected_failures)


# ---------------------------------------------------------------------------------------------- acting


def acting_checks(acting: Any, energy: Any = None) -> list[Check]:
    """The promises of a way to act: see `cebm.acting.Acting`. `energy`: the settings of the energy it is for."""
    settings = MLP(16, init="torch") if energy is None else energy

    def problem(limit: Tensor | None = None, **wishes: Any) -> Problem:
        model = settings.build(SPEC, generator_of(2)).eval().requires_grad_(False)
        limit = torch.full((ACT,), 0.7) if limit is None else limit
        box = Box(torch.zeros(ACT), torch.ones(ACT))
        context = model.encode(pairs()[0])
        return Problem(model, context, BATCH, box, -limit, limit, generator_of(4), **wishes)

    def search(piece: Any, **wishes: Any) -> Found:
        with torch.no_grad():
            return piece.search(problem(**wishes))

    def finds_candidates_within_the_limits(piece: Any) -> None:
        found = search(piece)
        rows, count, act = found.actions.shape
        say((rows, act) == (BATCH, ACT), f"candidates have shape {tuple(found.actions.shape)}")
        say(found.energies.shape == (rows, count), f"energies have shape {tuple(found.energies.shape)}")
        say(found.chosen.shape == (rows,), f"chosen has shape {tuple(found.chosen.shape)}: an index per observation")
        inside = bool((found.chosen >= 0).all() and (found.chosen < count).all())
        say(inside, "chosen holds an index that is no candidate")
        say(bool((found.actions.abs() <= 0.7 + 1e-6).all()), "candidates lie beyond the limits: see Problem.clip")

    def same_generator_same_result(piece: Any) -> None:
        equal(search(piece).actions, search(piece).actions, "the same generator gives different candidates")

    def leaves_global_randomness_alone(piece: Any) -> None:
        without_global_randomness(lambda: search(piece))

    def takes_limits_of_each_observation(piece: Any) -> None:
        limit = torch.linspace(0.2, 0.8, BATCH).unsqueeze(1).expand(-1, ACT)
        found = search(piece, limit=limit)
        say(
            bool((found.actions.abs() <= limit.unsqueeze(1) + 1e-6).all()),
            "limits may be [rows, act]: see Problem.clip",
        )

    def gives_the_candidates_asked_for(piece: Any) -> None:
        found = search(piece, candidates=7, everything=True)
        say(found.actions.shape[1] == 7, f"7 candidates were asked for, {found.actions.shape[1]} came")

    functions = [
        finds_candidates_within_the_limits,
        takes_limits_of_each_observation,
        same_generator_same_result,
        leaves_global_randomness_alone,
        gives_the_candidates_asked_for,
        is_saved_and_read,
    ]
    return named(acting, functions)


def check_acting(acting: Any, expected_failures: Mapping[str, str] | None = None, energy: Any = None) -> None:
    """Raises a ContractError unless the way to act keeps its contract."""
    run_checks(acting_checks(acting, energy), expected_failures)


# ---------------------------------------------------------------------------------------------- policies, tasks


def policy_checks(policy: Any, obs: Any) -> list[Check]:
    """The promises of a policy, ours or yours, on a few of its observations [batch, obs]."""
    seen = np.asarray(obs)

    def acts_on_a_batch(piece: Any) -> None:
        piece.reset()
        actions = np.asarray(piece.act(seen.copy()))
        say(actions.ndim == 2 and len(actions) == len(seen), f"{len(seen)} observations gave {actions.shape}")
        say(bool(np.isfinite(actions).all()), "actions are NaN or infinite")

    def repeats_itself_after_reset(piece: Any) -> None:
        given = []
        for _ in range(2):
            piece.reset()
            given.append(np.asarray(piece.act(seen.copy())))
        say(bool((given[0] == given[1]).all()), "the same observation gives another action after reset")

    def leaves_observations_as_they_are(piece: Any) -> None:
        passed = seen.copy()
        piece.reset()
        piece.act(passed)
        say(bool((passed == seen).all()), "observations were changed in place")

    return named(policy, [acts_on_a_batch, repeats_itself_after_reset, leaves_observations_as_they_are])


def check_policy(policy: Any, obs: Any, expected_failures: Mapping[str, str] | None = None) -> None:
    """Raises a ContractError unless the policy keeps its contract."""
    run_checks(policy_checks(policy, obs), expected_failures)


class _Still:
    """Acts in the middle of the limits."""

    def __init__(self, task: Task) -> None:
        if task.sizes is None:
            raise ContractError("the task must know its `sizes`, the columns of an observation and of an action")
        low, high = task.limits if task.limits is not None else (np.zeros(task.sizes[1]), np.zeros(task.sizes[1]))
        self.middle = (np.nan_to_num(low, neginf=-1.0) + np.nan_to_num(high, posinf=1.0)) / 2

    def reset(self) -> None:
        """There is nothing to forget."""

    def act(self, obs: np.ndarray) -> np.ndarray:
        return np.tile(self.middle, (len(obs), 1))


def task_checks(task: Any) -> list[Check]:
    """The promises of a task: see `cebm.tasks.Task`."""

    def rolls_out_with_its_metric(piece: Any) -> None:
        played = piece.roll_out(_Still(piece), 2, 11)
        say(len(played.rows) == 2, f"2 episodes gave {len(played.rows)} rows")
        for row in played.rows:
            say(piece.metric in row, f"an episode's row has no {piece.metric!r}; it has {', '.join(row)}")

    def same_seed_same_episodes(piece: Any) -> None:
        one, two = (copy.deepcopy(piece.roll_out(_Still(piece), 2, 11).rows) for _ in range(2))
        say(one == two, "the same seed gives different episodes")

    def an_episode_does_not_depend_on_the_others(piece: Any) -> None:
        alone, together = piece.roll_out(_Still(piece), 1, 11).rows[0], piece.roll_out(_Still(piece), 3, 11).rows[0]
        say(alone == together, "episode 0 is another one when more episodes are played")

    def limits_fit_the_action(piece: Any) -> None:
        if piece.limits is not None and piece.sizes is not None:
            shapes = {np.shape(limit) for limit in piece.limits}
            say(shapes == {(piece.sizes[1],)}, f"limits have shapes {shapes} for {piece.sizes[1]} action columns")

    def demonstrations_fit_the_task(piece: Any) -> None:
        """Where it has an expert."""
        if type(piece).demonstrations is Task.demonstrations:
            return
        shown = piece.demonstrations(2, 12)
        say(shown.episodes == 2, f"2 demonstrations were asked for, {shown.episodes} came")
        if piece.sizes is not None:
            found = (shown.obs_dim, shown.act_dim)
            say(found == piece.sizes, f"demonstrations have {found} columns, the task has {piece.sizes}")

    functions = [
        rolls_out_with_its_metric,
        same_seed_same_episodes,
        an_episode_does_not_depend_on_the_others,
        limits_fit_the_action,
        demonstrations_fit_the_task,
        is_saved_and_read,
    ]
    return named(task, functions)


def check_task(task: Any, expected_failures: Mapping[str, str] | None = None) -> None:
    """Raises a ContractError unless the task keeps its contract."""
    run_checks(task_checks(task), expected_failures)
