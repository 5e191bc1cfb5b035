"""What the contract tests share: named checks, how they are run, and small data to run them on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from cebm.energies import MLP, EnergyModel
from cebm.energies.base import leaves
from cebm.settings import from_json, to_json
from cebm.spaces import Specification

OBS, ACT, BATCH, SAMPLES = 3, 2, 4, 5
SPEC = Specification.flat(OBS, ACT)
Test = TypeVar("Test", bound=Callable[..., None])


class ContractError(AssertionError):
    """A piece breaks its contract; the message lists the checks that failed, and why."""


@dataclass(frozen=True)
class Check:
    """One promise of a contract, to be called."""

    name: str
    piece: str
    function: Callable[[], None]

    def __call__(self) -> None:
        self.function()

    def __str__(self) -> str:
        return f"{self.piece}-{self.name}"


def run_checks(checks: Sequence[Check], expected_failures: Mapping[str, str] | None = None) -> None:
    """Runs all checks and raises one ContractError for those that failed, or that passed although they were expected
    to fail."""
    expected = dict(expected_failures or {})
    _check_names(checks, expected)
    problems = []
    for check in checks:
        try:
            check()
        except Exception as error:
            if check.name not in expected:
                problems.append(f"{check.name}: {type(error).__name__}: {error}")
        else:
            if check.name in expected:
                problems.append(f"{check.name}: passes, though it is expected to fail ({expected[check.name]})")
    if problems:
        raise ContractError(f"{checks[0].piece}:\n  " + "\n  ".join(problems))


def contract(checks: Sequence[Check], expected_failures: Mapping[str, str] | None = None) -> Callable[[Test], Test]:
    """A pytest decorator: the test gets an argument `check` and runs once per check."""
    import pytest

    expected = dict(expected_failures or {})
    _check_names(checks, expected)
    cases = [
        pytest.param(
            check,
            id=str(check),
            marks=[pytest.mark.xfail(reason=expected[check.name], strict=True)] if check.name in expected else [],
        )
        for check in checks
    ]
    return pytest.mark.parametrize("check", cases)


def _check_names(checks: Sequence[Check], expected: Mapping[str, str]) -> None:
    unknown = set(expected) - {check.name for check in checks}
    if unknown:
        names = ", ".join(check.name for check in checks)
        raise ValueError(f"expected_failures: there is no check {', '.join(sorted(unknown))}; there are {names}")


def named(piece: Any, functions: Sequence[Callable[[Any], None]]) -> list[Check]:
    def bound(function: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: function(piece)

    name = type(piece).__name__
    return [Check(function.__name__.lstrip("_"), name, bound(function)) for function in functions]


def generator_of(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def say(condition: bool, sentence: str) -> None:
    if not condition:
        raise ContractError(sentence)


def equal(one: Any, other: Any, what: str) -> None:
    pairs = zip(leaves(one), leaves(other), strict=True)
    say(all(torch.equal(a, b) for a, b in pairs), what)


def pairs(dtype: torch.dtype = torch.float32, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Observations and actions, normalised."""
    made = torch.rand((batch, OBS + ACT), generator=generator_of(1), dtype=dtype) * 1.8 - 0.9
    return made[:, :OBS].clone(), made[:, OBS:].clone()


def network(dtype: torch.dtype = torch.float32) -> EnergyModel:
    return MLP(16, init="torch").build(SPEC, generator_of(2)).to(dtype)


def without_global_randomness(work: Callable[[], object]) -> None:
    before = torch.random.get_rng_state()
    work()
    message = "torch's global generator was used or seeded: draw from the generator that is passed in"
    say(torch.equal(before, torch.random.get_rng_state()), message)


def is_saved_and_read(piece: Any) -> None:
    """Settings on disk: a frozen dataclass of plain values at module level."""
    again = from_json(to_json(piece))
    say(again == piece, f"settings change when they are saved and read: {piece} became {again}")
