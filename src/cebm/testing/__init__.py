"""Contract tests for your own pieces, as scikit-learn's `check_estimator` does it for estimators.

    cebm.testing.check_sampler(Underdamped())  # raises ContractError that lists what failed

    @cebm.testing.contract(sampler_checks(Underdamped()), expected_failures={"samples_a_gaussian": "it minimises"})
    def test_my_sampler(check):  # one pytest case per named check
        check()

An expected failure is strict: a check that passes after all is an error.
"""

from cebm.testing.checks import Check, ContractError, contract, run_checks
from cebm.testing.lower import check_energy, check_sampler, check_source, energy_checks, sampler_checks, source_checks
from cebm.testing.units import (
    check_kind,
    check_perturbation,
    check_symmetry,
    kind_checks,
    perturbation_checks,
    symmetry_checks,
)
from cebm.testing.upper import (
    acting_checks,
    check_acting,
    check_objective,
    check_policy,
    check_task,
    objective_checks,
    policy_checks,
    task_checks,
)

__all__ = [
    "Check",
    "ContractError",
    "acting_checks",
    "check_acting",
    "check_energy",
    "check_kind",
    "check_objective",
    "check_perturbation",
    "check_policy",
    "check_sampler",
    "check_source",
    "check_symmetry",
    "check_task",
    "contract",
    "energy_checks",
    "kind_checks",
    "objective_checks",
    "perturbation_checks",
    "policy_checks",
    "run_checks",
    "sampler_checks",
    "source_checks",
    "symmetry_checks",
    "task_checks",
]
