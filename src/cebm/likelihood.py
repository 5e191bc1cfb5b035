"""What a policy's energy says in numbers: log-densities with an error bar, and modes with their masses."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cebm.densities import Estimator, LogProb, Mode, modes_of, warn_untrusted

if TYPE_CHECKING:
    from cebm.policy import EnergyPolicy


def log_prob(
    policy: "EnergyPolicy", obs: Any, action: Any, draws: int, anneal: bool, generator: torch.Generator | None
) -> LogProb:
    """The log-densities that `EnergyPolicy.log_prob` describes."""
    units, box = policy.units, policy.act_box
    if not units.conversion.plain and not units.conversion.relative:
        raise ValueError("log_prob: columns of kinds other than plain ones have no density in the units of the data")
    estimate = Estimator(draws, anneal=anneal, shared=generator is None)
    with torch.no_grad():
        problem = policy.problem(obs, previous=action, generator=generator)  # `previous` is normalised as an action is
        actions = problem.previous
        if actions is None:
            raise ValueError("action must be given")
        found = estimate(policy.energy, problem.context, box.limit, problem.generator)
        warn_untrusted(found, 4)
        value = -problem.energies(actions.unsqueeze(1))[:, 0] - found.log_partition
        if not policy.energy.proposes:
            value = value.masked_fill((actions.abs() > box.limit).any(1), -torch.inf)
        # p(y) of the data's units: the volume that one normalised unit has there.
        return LogProb(value - box.scale.log().sum(), found.standard_error, found.shape)


def modes(policy: "EnergyPolicy", obs: Any, draws: int, generator: torch.Generator | None) -> list[list[Mode]]:
    """The modes that `EnergyPolicy.modes` describes."""
    problem = policy.problem(obs, generator=generator)
    found = Estimator(draws)(policy.energy, problem.context, policy.act_box.limit, problem.generator)
    warn_untrusted(found, 4)
    low, high = (bound.unsqueeze(1) if bound.ndim == 2 else bound for bound in (problem.low, problem.high))
    rows = modes_of(policy.energy, problem.context, found, low, high)
    count = max(map(len, rows))
    # All at once, as units may depend on the observation; rows with fewer modes are filled with their first.
    places = torch.stack([torch.stack([(row + [row[0]] * count)[k].action for k in range(count)]) for row in rows])
    actions = policy.actions(places, obs)
    return [[replace(mode, action=actions[i, k]) for k, mode in enumerate(row)] for i, row in enumerate(rows)]
