"""Settings: dataclasses survive JSON by the name of their class, and what does not fit is refused by name."""

import dataclasses
import json
import math
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NewType, Protocol, TypeVar, runtime_checkable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cebm.energies import Residual
from cebm.recipes import TRIALS, Trial
from cebm.runs import Job
from cebm.samplers import MALA, Constant, DerivativeFree, Exponential, Langevin, Polynomial, Sampler, Schedule
from cebm.settings import (
    StorageError,
    find_piece,
    from_json,
    import_piece_module,
    resolve,
    tag_of,
    to_json,
)
from cebm.tasks import ParticleTask
from waiting import PATIENCE

# -------------------------------------------------------------------------------------------- classes of a stranger


@runtime_checkable
class Shape(Protocol):
    """With a property, as the samplers' contract has one."""

    @property
    def sides(self) -> int: ...

    def area(self) -> float: ...


class Named(Protocol):
    """Not runtime-checkable."""

    def name(self) -> str: ...


class Animal(ABC):
    @abstractmethod
    def sound(self) -> str: ...


@dataclass(frozen=True)
class Square:
    side: float = 1.0
    sides: int = 4

    def area(self) -> float:
        return self.side**2

    def name(self) -> str:
        return "square"


@dataclass(frozen=True)
class Dog(Animal):
    volume: float = 1.0

    def sound(self) -> str:
        return "woof"


BUILT: list[str] = []


@dataclass(frozen=True)
class Loud:
    """Notes that it was built."""

    def __post_init__(self) -> None:
        BUILT.append("Loud")


@dataclass(frozen=True)
class Node:
    child: "Node | None" = None
    children: tuple["Node", ...] = ()


Metres = NewType("Metres", float)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Everything:
    """One field per kind of annotation."""

    required: int
    anything: Any = None
    thing: object = None
    nothing: None = None
    flag: bool = False
    number: float = 1.0
    text: str = ""
    choice: Literal["a", "b", 3, True] = "a"
    optional: int | None = None
    whole_or_not: float | int = 1
    pair: tuple[int, str] = (1, "x")
    many: tuple[float, ...] = ()
    several: list[int] = field(default_factory=list)
    sequence: Sequence[float] = ()
    mapping: Mapping[str, float] = field(default_factory=dict)
    table: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shape: Shape | None = None
    named: Named | None = None
    animal: Animal | None = None
    call: Callable[[int, int], float] | None = None
    annotated: Annotated[int, "of things"] = 1
    metres: Metres = Metres(1.0)
    kind: ClassVar[str] = "not a field"
    derived: int = field(init=False, default=0)

    @dataclass(frozen=True)
    class Inner:
        depth: int = 1


@dataclass(frozen=True)
class Taken:
    type: str = "a name that the tag has"


@dataclass
class Refusing:
    """Refuses in different ways."""

    how: str = "no"

    def __post_init__(self) -> None:
        error = {"value": ValueError("how is wrong"), "zero": ZeroDivisionError("by zero"), "key": KeyError("there")}
        if self.how in error:
            raise error[self.how]


@dataclass
class Unreadable:
    value: "NoSuchName"  # type: ignore[name-defined]


class Colour(IntEnum):
    RED = 1


def everything(**changes: Any) -> dict[str, Any]:
    return to_json(Everything(1)) | changes


def through_text(value: Any) -> Any:
    """Strict JSON: no NaN, no Infinity."""
    return json.loads(json.dumps(to_json(value), allow_nan=False))


SETTINGS: dict[str, Any] = {
    "langevin, constant": Langevin("correct", 7, Constant(0.03), step_clip=None, margin=None),
    "langevin, polynomial": Langevin("ibc", 12, Polynomial(0.7, 1e-5, 3.0), 0.1, 0.125, "half-range", 0.2),
    "langevin, exponential": Langevin("ibc", schedule=Exponential(0.2, 0.9), noise=1 / 3),
    "mala": MALA(11, 0.1 + 0.2, 3, 0.6, None),
    "derivative-free": DerivativeFree(5, 0.1, 0.7, 2.0, 0.0, True),
    "network": Residual(17, 3, 0.1, "torch", True),
    "task": ParticleTask(3, 70, hide_velocity=True, random_order=True, wait=4, dt=0.004),
    "job": Job("mine", TRIALS["mdn"], ParticleTask(1), None, 7, 11, 13),
    "a stranger's": Everything(
        3,
        anything=(1, {"a": (2.5, None)}, Square(2.0)),
        thing=Constant(0.5),
        flag=True,
        number=-math.inf,
        text="é\n",
        choice=3,
        optional=4,
        pair=(7, "y"),
        many=(1.0, math.inf),
        several=[1, 2],
        sequence=(0.5,),
        mapping={"x": 1.0, "y": 2.0},
        table={"a": (1, 2), "b": ()},
        shape=Square(3.0),
        named=Square(4.0),
        animal=Dog(2.0),
        call=Polynomial(),
        metres=Metres(2.5),
    ),
    "a class inside a class": Everything.Inner(4),
    "nested": Node(Node(Node()), (Node(), Node(None, (Node(),)))),
    **{f"trial {name}": trial for name, trial in TRIALS.items()},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_survive_json(name: str) -> None:
    """Through text, and with equal types: 1 and 1.0 are equal but not the same."""
    value = SETTINGS[name]
    read = from_json(through_text(value), type(value))
    assert read == value and type(read) is type(value)
    for part in dataclasses.fields(value):
        assert type(getattr(read, part.name)) is type(getattr(value, part.name))


def test_every_field_is_written_and_none_that_is_not() -> None:
    written = to_json(Everything(1))
    assert written["type"] == "test_settings:Everything"
    names = {part.name for part in dataclasses.fields(Everything)} - {"derived"}
    assert written.keys() - {"type"} == names and "kind" not in written


plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text()
keys = st.text().filter(lambda key: key not in ("type", "float"))
documents = st.recursive(
    plain,
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.builds(Everything, st.just(1), inner),
)


@settings(deadline=None, max_examples=60)
@given(documents)
def test_any_plain_value_survives(value: Any) -> None:
    assert repr(from_json(through_text(value))) == repr(value)  # by repr: NaN is not equal to itself


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(
        plain | st.just({"type": "test_settings:Node"}),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["type", "float", "child", "children", "required", "many"]), inner)
        ),
    )
)
def test_any_json_is_read_or_refused(data: Any) -> None:
    """Whatever stands in the file: a StorageError, and no other."""
    for expected in (object, Node, Everything, Shape, Mapping[str, int], tuple[int, ...], int | None):
        try:
            from_json(data, expected, "here")
        except StorageError as error:
            assert str(error).startswith("here")


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(set(everything()) - {"type"})), documents)
def test_a_field_with_any_value_is_read_as_its_annotation_says_or_refused(name: str, value: Any) -> None:
    try:
        read = from_json(everything(**{name: to_json(value)}), Everything, "here")
    except StorageError as error:
        assert f"here: Everything.{name}: " in str(error)
        return
    assert from_json(through_text(read)) is not None


# -------------------------------------------------------------------------------------------- to JSON


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.zeros(1), "settings: Tensor cannot be saved"),
        (Langevin(schedule=lambda k, n: 0.1), "settings.schedule: function cannot be saved"),
        ({"a": [1, object()]}, r"settings\['a'\]\[1\]: object cannot be saved"),
        (Langevin, "settings: type cannot be saved"),
        (Colour.RED, "settings: Colour cannot be saved"),
        ({1: 2}, "settings: the key 1 is a int"),
        (Everything(1, mapping={"type": 1.0}), "settings.mapping: the key 'type' has a meaning"),
        ({"float": 1}, "the key 'float' has a meaning"),
        (Taken(), "Taken has a field named 'type'"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        to_json(value)


def test_a_cycle_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(TypeError, match="nested deeper than 50"):
        to_json(cycle)


def test_a_local_class_is_refused() -> None:
    @dataclass
    class Local:
        pass

    with pytest.raises(TypeError, match=r"settings\[0\]: Local is defined inside a function .* at module level"):
        to_json([Local()])


def test_a_class_that_would_not_be_found_again_is_refused() -> None:
    made = dataclasses.make_dataclass("Made", ["x"])
    with pytest.raises(TypeError, match=r"Made cannot be found again by this name"):
        to_json(made(1))


def test_numbers_of_numpy_are_plain_numbers() -> None:
    number = torch.tensor(0.5, dtype=torch.float64).numpy()[()]
    assert type(to_json(number)) is float


# -------------------------------------------------------------------------------------------- from JSON


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("required", True, "expected int, got True"),
        ("required", 1.0, r"expected int, got 1\.0"),
        ("required", "1", "expected int, got '1'"),
        ("required", None, "expected int, got None"),
        ("nothing", 0, "expected NoneType, got 0"),
        ("flag", 1, "expected bool, got 1"),
        ("number", "1", "expected float, got '1'"),
        ("number", True, "expected float, got True"),
        ("number", 10**400, "expected float, got 1000"),
        ("number", {"float": "infinity"}, "expected float, got {'float': 'infinity'}"),
        ("text", 1, "expected str, got 1"),
        ("choice", "c", "expected Literal.*, got 'c'"),
        ("choice", 1, "expected Literal.*, got 1"),
        ("choice", ["a"], "expected Literal"),
        ("optional", "x", r"expected int \| None, got 'x'"),
        ("pair", [1], r"expected tuple\[int, str\], got \[1\]"),
        ("pair", [1, 2], r"\[1\]: expected str, got 2"),
        ("many", [0.5, "x"], r"\[1\]: expected float, got 'x'"),
        ("many", "abc", r"expected tuple\[float, \.\.\.\], got 'abc'"),
        ("sequence", "abc", "expected .*Sequence.*, got 'abc'"),
        ("several", {"a": 1}, r"expected list\[int\]"),
        ("mapping", {"a": "x"}, r"\['a'\]: expected float, got 'x'"),
        ("mapping", [1.0], "expected .*Mapping.*, got"),
        ("table", {"a": [1, None]}, r"\['a'\]: \[1\]: expected int, got None"),
        ("shape", {"type": "test_settings:Dog"}, r"expected .*Shape.*, got test_settings:Dog"),
        ("named", {"type": "test_settings:Dog"}, r"expected .*Named.*, got test_settings:Dog"),
        ("animal", {"type": "test_settings:Square"}, r"expected .*Animal.*, got test_settings:Square"),
        ("call", {"type": "test_settings:Square"}, r"expected .*Callable.*, got test_settings:Square"),
        ("annotated", "x", "expected int, got 'x'"),
        ("metres", "x", "expected float, got 'x'"),
    ],
)
def test_a_value_that_does_not_fit_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(StorageError, match=rf"here: Everything\.{name}: {message}"):
        from_json(everything(**{name: value}), Everything, "here")


def test_an_int_becomes_a_float_where_the_annotation_says_so() -> None:
    read = from_json(everything(number=2, many=[1, 2], mapping={"a": 1}, whole_or_not=3))
    assert repr((read.number, read.many, read.mapping)) == "(2.0, (1.0, 2.0), {'a': 1.0})"
    assert type(read.whole_or_not) is int


def test_missing_fields_take_their_defaults() -> None:
    assert from_json({"type": "test_settings:Everything", "required": 5}) == Everything(5)
    with pytest.raises(StorageError, match="here: Everything: the field 'required' is missing"):
        from_json({"type": "test_settings:Everything"}, where="here")


@pytest.mark.parametrize("name", ["height", "kind", "derived"])
def test_unknown_fields_are_named(name: str) -> None:
    """A ClassVar and a field that the class computes are none."""
    with pytest.raises(StorageError, match=f"here: Everything has no field '{name}'; its fields: required, anything"):
        from_json(everything(**{name: 3}), where="here")


def test_an_object_inside_is_checked_too() -> None:
    data = to_json(Langevin("ibc", schedule=Constant(0.1)))
    data["schedule"]["value"] = "fast"
    with pytest.raises(StorageError, match=r"here: Constant\.value: expected float, got 'fast'"):
        from_json(data, Langevin, "here")


@pytest.mark.parametrize("how, message", [("value", "how is wrong"), ("zero", "by zero"), ("key", "'there'")])
def test_a_value_that_its_class_refuses_is_named(how: str, message: str) -> None:
    with pytest.raises(StorageError, match=f"here: Refusing: {message}"):
        from_json({"type": "test_settings:Refusing", "how": how}, where="here")
    with pytest.raises(StorageError, match="here: Langevin: noise must be at least 0"):
        from_json(to_json(Langevin("ibc")) | {"noise": -1.0}, Langevin, "here")


@pytest.mark.parametrize(
    "value, expected",
    [(Langevin(), Sampler), (Polynomial(), Schedule), (Square(), Shape), (Square(), Named), (Dog(), Animal)],
)
def test_the_root_is_checked_against_a_contract(value: Any, expected: Any) -> None:
    assert from_json(to_json(value), expected) == value
    with pytest.raises(StorageError, match=r"here: expected .*, got cebm.energies.feedforward:Residual"):
        from_json(to_json(Residual()), expected, "here")
    with pytest.raises(StorageError, match=r"here: expected .*, got 3"):
        from_json(3, expected, "here")


def test_a_class_that_does_not_fit_is_not_even_built() -> None:
    BUILT.clear()
    for data in ({"type": "test_settings:Loud"}, everything(shape={"type": "test_settings:Loud"})):
        with pytest.raises(StorageError, match="got test_settings:Loud"):
            from_json(data, Everything)
    assert not BUILT


def test_annotations_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(StorageError, match="here: Unreadable: cannot read its annotations"):
        from_json({"type": "test_settings:Unreadable", "value": 1}, where="here")


def test_deep_documents_are_refused() -> None:
    for outer in ([], {}):
        data: Any = None
        for _ in range(100_000):
            data = [data] if outer == [] else {"child": data}
        with pytest.raises(StorageError, match="here: nested deeper than 50"):
            from_json(data, where="here")
    data = None
    for _ in range(50):
        data = {"type": "test_settings:Node", "child": data}
    assert from_json(data, Node).child.child is not None
    with pytest.raises(StorageError, match="nested deeper"):
        from_json({"type": "test_settings:Node", "child": data}, Node)


@pytest.mark.parametrize("data", [{1: 2}, {"a": object()}, [set()], {"type": 3}, {"type": None}, {"type": ["a"]}])
def test_what_is_not_json_is_refused(data: Any) -> None:
    with pytest.raises(StorageError, match="here: "):
        from_json(data, where="here")


# -------------------------------------------------------------------------------------------- classes by name


def test_old_tags_are_found_in_legacy_only() -> None:
    old = {"type": "Langevin", "steps": 3, "schedule": {"type": "Constant", "value": 0.25}}
    read = from_json(old, Sampler, legacy={"Langevin": Langevin, "Constant": Constant})
    assert read == Langevin(steps=3, schedule=Constant(0.25))
    with pytest.raises(StorageError, match="here: unknown type 'Constant'; known without a module: Langevin"):
        from_json(old, Sampler, "here", {"Langevin": Langevin})
    with pytest.raises(StorageError, match="here: unknown type 'Langevin'"):
        from_json(old, Sampler, "here")


@pytest.mark.parametrize(
    "tag, message",
    [
        ("my_pieces:Underdamped", "here was made with my_pieces:Underdamped: import my_pieces first, "
         "or name its file with --with my_pieces.py"),
        ("own.pieces:Underdamped", "here was made with .*: import own.pieces first, or name it with --with own.pieces"),
        ("cebm.nowhere:Langevin", "here was made with .*, which this cebm cannot import: No module"),
        ("cebm.samplers:Nothing", "here was made with .*: cebm.samplers is imported and has no class Nothing"),
        ("cebm.samplers:Langevin.steps", "has no class Langevin.steps"),
        ("cebm.samplers:torch.Tensor", "has no class torch.Tensor"),
        ("cebm.samplers:", "has no class"),
        ("cebm.samplers:Sampler", "cebm.samplers:Sampler is not a dataclass"),
        ("cebm.samplers:run", "cebm.samplers:run is not a dataclass"),
        ("os:system", "os:system is not a dataclass"),
        ("builtins:dict", "builtins:dict is not a dataclass"),
        ("cebm.__main__:main", "is not a module of settings"),
        ("cebm..samplers:Langevin", "is not a module of settings"),
        ("cebm.:Langevin", "is not a module of settings"),
        ("cebm:Langevin", "has no class Langevin"),
        (":Langevin", "here was made with"),
        ("", "unknown type ''"),
    ],
)  # fmt: skip
def test_a_tag_without_a_class_is_refused(tag: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        resolve(tag, "here")


def test_nothing_is_imported_for_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_imported.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StorageError, match="import never_imported first"):
        from_json({"type": "never_imported:Piece"})
    assert "never_imported" not in sys.modules


PIECES = """
import sys
from dataclasses import dataclass
from cebm.settings import from_json, tag_of, to_json
import json

@dataclass(frozen=True)
class Underdamped:
    steps: int = 7

mine = Underdamped(3)

if __name__ == "__main__":
    print(json.dumps(to_json(mine)))
    assert from_json(json.loads(sys.argv[1]), Underdamped) == mine
"""


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of a user's own; what it leaves in sys.modules and sys.path is removed."""
    path = tmp_path / "my_pieces.py"
    path.write_text(PIECES)
    before = list(sys.path)
    modules = set(sys.modules)
    yield path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_and_its_import_write_the_same_tag(as_module: bool, pieces: Path) -> None:
    expected = {"type": "my_pieces:Underdamped", "steps": 3}
    how = ["-m", "my_pieces"] if as_module else ["my_pieces.py"]
    command = [sys.executable, *how, json.dumps(expected)]
    done = subprocess.run(command, cwd=pieces.parent, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    with pytest.raises(StorageError, match="import my_pieces first"):
        from_json(expected)
    assert to_json(find_piece(f"{pieces}:mine")) == expected
    assert from_json(expected).steps == 3


# -------------------------------------------------------------------------------------------- pieces of the user's own


def test_a_piece_of_a_file(pieces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = find_piece(f"{pieces}:mine")
    cls = find_piece(f"{pieces}:Underdamped")
    assert mine == cls(3), "the same file twice is the same module"
    assert import_piece_module(str(pieces)) is sys.modules["my_pieces"]
    monkeypatch.chdir(pieces.parent)
    assert find_piece("my_pieces.py:mine") is mine and find_piece("./my_pieces.py:mine") is mine
    assert find_piece("my_pieces:mine") is mine
    assert tag_of(cls) == "my_pieces:Underdamped" and from_json(to_json(mine)) is not mine


def test_a_file_may_import_its_neighbours(pieces: Path) -> None:
    (pieces.parent / "own_user.py").write_text("from my_pieces import mine\nother = mine")
    assert find_piece(f"{pieces.parent / 'own_user.py'}:other") is find_piece(f"{pieces}:mine")


def test_a_file_of_a_package_is_its_module(pieces: Path) -> None:
    """Such as `cebm sweep reproduction/studies/searches.py`, which imports its own package."""
    package = pieces.parent / "own_package" / "studies"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package.parent / "parts.py").write_text("value = 3")
    lines = ("from dataclasses import dataclass", "from own_package.parts import value", "", "@dataclass(frozen=True)")
    (package / "one.py").write_text("\n".join((*lines, "class Kept:", "    size: int = value")))
    module = import_piece_module(str(package / "one.py"))
    assert module.value == 3 and module is sys.modules["own_package.studies.one"]
    assert tag_of(module.Kept) == "own_package.studies.one:Kept"
    twin = pieces.parent / "elsewhere" / "own_package"
    twin.mkdir(parents=True)
    (twin / "__init__.py").touch()
    (twin / "parts.py").touch()
    with pytest.raises(ValueError, match=r"another module is named own_package\.parts"):
        import_piece_module(str(twin / "parts.py"))


def test_a_piece_of_a_module() -> None:
    assert find_piece("cebm.samplers:Langevin") is Langevin
    assert find_piece("cebm:Langevin") is Langevin
    assert import_piece_module("cebm.samplers") is sys.modules["cebm.samplers"]


@pytest.mark.parametrize(
    "reference, message",
    [
        ("my_pieces.py:Nothing", "my_pieces.py has no 'Nothing'; it has Underdamped, mine$"),
        ("my_pieces.py", "write FILE.py:NAME or MODULE:NAME"),
        ("my_pieces.py:", "write FILE.py:NAME"),
        (":mine", "write FILE.py:NAME"),
        ("", "write FILE.py:NAME"),
        ("missing.py:mine", "missing.py: no such file"),
        ("folder/missing.py:mine", "missing.py: no such file"),
        ("./folder:mine", "folder: not a Python file"),
        ("not_there.at_all:mine", "module not_there.at_all cannot be imported: ModuleNotFoundError: No module"),
        ("my_pieces:mine", "No module named 'my_pieces'; for the file in this folder write my_pieces.py"),
        ("cebm.samplers:Langevim", "cebm.samplers has no 'Langevim'; it has .*Langevin"),
        ("no name:mine", "'no name' is neither a file that ends in .py nor the name of a module"),
        ("broken.py:mine", "broken.py cannot be imported: SyntaxError"),
        ("raising.py:mine", "raising.py cannot be imported: ZeroDivisionError"),
        ("leaving.py:mine", "leaving.py cannot be imported: SystemExit: bye"),
        ("json.py:mine", "json.py: another module is named json .*rename the file"),
        ("antigravity.py:mine", "antigravity.py: another module is named antigravity .part of Python."),
        ("folder/cebm.py:mine", r"cebm.py: another module is named cebm .*__init__.py.; rename the file"),
    ],
)  # fmt: skip
def test_a_piece_that_is_not_there_is_named(
    reference: str, message: str, pieces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pieces.parent
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (folder / "folder").mkdir()
    files = {"broken": "def", "raising": "1 / 0", "leaving": "raise SystemExit('bye')"}
    for name, text in {**files, "json": "mine = 1", "antigravity": "mine = 1", "folder/cebm": "mine = 1"}.items():
        (folder / f"{name}.py").write_text(text)
    path, modules = list(sys.path), set(sys.modules)
    with pytest.raises(ValueError, match=message):
        find_piece(reference)
    if "Nothing" not in reference:
        assert sys.path == path and set(sys.modules) == modules, "a failure leaves nothing behind"


def test_an_other_file_of_the_same_name_is_refused(pieces: Path) -> None:
    find_piece(f"{pieces}:mine")
    other = pieces.parent / "elsewhere" / "my_pieces.py"
    other.parent.mkdir()
    other.write_text(PIECES)
    with pytest.raises(ValueError, match=f"{other}: another module is named my_pieces .{pieces}.; rename the file"):
        find_piece(f"{other}:mine")


def test_trial_is_a_contract_for_from_json() -> None:
    """The root of a run: a job of the right class and nothing else."""
    assert from_json(to_json(TRIALS["ibc"]), Trial) == TRIALS["ibc"]
    with pytest.raises(StorageError, match=r"here: expected Job, got cebm.recipes:Trial"):
        from_json(to_json(TRIALS["ibc"]), Job, "here")
