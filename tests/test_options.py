"""Options from compositions: every piece that is there, ours or a user's, can be set by its dotted path."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Protocol

import pytest
import tyro

from cebm.composition import settings_of
from cebm.options import field_docs, options_of, with_options
from cebm.recipes import TRIALS


class Contract(Protocol):
    def method(self) -> None: ...


class Colour(Enum):
    red = 1


@dataclass(frozen=True)
class Inner:
    size: float = 0.5
    """How large,
    in two lines."""
    undocumented: int = 3

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")

    def method(self) -> None: ...


@dataclass(frozen=True)
class Outer:
    inner: Contract = Inner()
    """A piece."""
    anything: Any = Inner(2.0)
    """Another."""
    several: tuple[Contract, ...] = (Inner(), Inner(1.0))
    """Pieces."""
    count: int = 1
    flag: bool = False
    on: bool = True
    word: str = "a"
    choice: Literal["x", "y"] = "x"
    numbers: tuple[float, ...] = (0.1, 0.2)
    pair: tuple[int, float] = (1, 2.0)
    listed: list[int] | None = None
    maybe: float | None = None
    either: float | Contract = 0.5
    bare: Any = 7
    sloppy: int = 0.5  # type: ignore[assignment]
    whole: float = 1
    function: Callable[[], int] = int
    missing: Contract | None = None
    colour: Colour = Colour.red
    table: Any = None
    empty: tuple[float, ...] = ()


def parsed(piece: Any, *arguments: str) -> Any:
    options = options_of(piece)
    config = (tyro.conf.FlagCreatePairsOff,)
    return with_options(piece, tyro.cli(type(options), args=list(arguments), config=config))


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (["--inner.size", "0.25"], "inner.size", 0.25),
        (["--anything.undocumented", "4"], "anything.undocumented", 4),
        (["--several.1.size", "3"], "several.1.size", 3.0),
        (["--count", "5"], "count", 5),
        (["--flag"], "flag", True),
        (["--no-on"], "on", False),
        (["--word", "b"], "word", "b"),
        (["--choice", "y"], "choice", "y"),
        (["--numbers", "1", "2", "3"], "numbers", (1.0, 2.0, 3.0)),
        (["--pair", "3", "4"], "pair", (3, 4.0)),
        (["--maybe", "0.5"], "maybe", 0.5),
        (["--either", "2"], "either", 2.0),
        (["--bare", "8"], "bare", 8),
        (["--sloppy", "1.5"], "sloppy", 1.5),
        (["--whole", "1.5"], "whole", 1.5),
        (["--empty", "1", "inf"], "empty", (1.0, float("inf"))),
    ],
)
def test_a_setting_is_set_and_the_others_stay(arguments: list[str], path: str, value: Any) -> None:
    piece = Outer()
    changed = parsed(piece, *arguments)
    before, after = settings_of(piece), settings_of(changed)
    assert after == before | {path: value} and type(after[path]) is type(value)


def test_a_list_stays_a_list() -> None:
    assert parsed(Outer(listed=[1, 2]), "--listed", "3", "4", "5").listed == [3, 4, 5]


def test_nothing_given_is_the_piece_itself() -> None:
    piece = Outer()
    assert parsed(piece) is piece


def test_what_a_command_line_cannot_write_is_left_out() -> None:
    names = {field.name for field in fields(options_of(Outer()))}
    assert not names & {"function", "missing", "colour", "table"}
    assert options_of(Outer(function=len), skip=names) is None


def test_a_refused_value_names_its_piece() -> None:
    with pytest.raises(ValueError, match=r"^several\.1: size must not be negative, got -1\.0$"):
        parsed(Outer(), "--several.1.size", "-1")


def test_docs_are_the_strings_under_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert field_docs(Inner) == {"size": "How large, in two lines."}
    with pytest.raises(SystemExit):
        parsed(Outer(), "--help")
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "How large, in two lines. (default: 0.5)" in printed and "Inner. A piece." in printed


@pytest.mark.parametrize("name", TRIALS)
def test_every_setting_of_every_trial_has_an_option_and_a_line_of_documentation(name: str) -> None:
    trial = TRIALS[name]
    options = options_of(trial)
    found, undocumented = {}, []

    def visit(options: Any, piece: Any, path: str) -> None:
        docs = {} if isinstance(piece, tuple) else field_docs(type(piece))
        for field in fields(options):
            value, key = getattr(options, field.name), field.name.removeprefix("part_")
            here = f"{path}.{key}" if path else key
            if is_dataclass(value):
                visit(value, piece[int(key)] if isinstance(piece, tuple) else getattr(piece, key), here)
                continue
            found[here] = value
            if not docs.get(key):
                undocumented.append(here)

    visit(options, trial, "")
    assert found == {path: value for path, value in settings_of(trial).items() if value != () or path in found}
    assert not undocumented, undocumented
