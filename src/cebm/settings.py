"""Settings as JSON: a dataclass becomes `{"type": "module:Qualname", field: value, …}` and comes back. No registry.

Reading never imports a stranger's code: a class is found inside cebm, or in a module that the program has imported
already. `import_piece_module` and `find_piece` are the two ways in which a user names such a module.
"""

import collections.abc
import dataclasses
import enum
import importlib
import importlib.util
import math
import reprlib
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType, NoneType, UnionType
from typing import Any

DEEPEST = 50
"""Levels of nesting that settings may have."""

_MAIN = ("__main__", "__mp_main__")
"""Names of the module that runs as a script; the second in a process that multiprocessing started."""
_SPECIAL_FLOATS = ("inf", "-inf", "nan")
_NO_CLASSES: Mapping[str, type] = MappingProxyType({})


class StorageError(ValueError):
    """A file is missing, damaged, altered or of a newer format; the message names it."""


# -------------------------------------------------------------------------------------------- to JSON


def to_json(value: Any) -> Any:
    """Dataclasses become objects with a `type`, tuples become lists, infinite floats and NaN become `{"float": "inf"}`.
    The result is strict JSON. A TypeError names the place and the type of a value that cannot be saved."""
    return _write(value, "settings", 0)


def tag_of(cls: type) -> str:
    """`module:Qualname` of a class, under which `resolve` finds it again. A class of a script that runs as `__main__`
    gets the name that the script has when it is imported."""
    if "<locals>" in cls.__qualname__:
        raise TypeError(f"{cls.__name__} is defined inside a function and cannot be saved: define it at module level")
    tag = f"{_module_name(cls.__module__)}:{cls.__qualname__}"
    try:
        resolve(tag)
    except StorageError as error:
        raise TypeError(
            f"{tag} cannot be found again by this name: define it as a dataclass at module level"
        ) from error
    return tag


def _write(value: Any, path: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise TypeError(f"{path[:80]}…: nested deeper than {DEEPEST} levels")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _write_object(value, path, depth)
    if isinstance(value, list | tuple):
        return [_write(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _write_mapping(value, path, depth)
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, enum.Enum):
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        for kind in (int, str):
            if isinstance(value, kind):
                return kind(value)
    raise TypeError(f"{path}: {type(value).__name__} cannot be saved as JSON; use a dataclass of plain values")


def _write_object(value: Any, path: str, depth: int) -> dict[str, Any]:
    try:
        written = {"type": tag_of(type(value))}
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    for field in dataclasses.fields(value):
        if field.name == "type":
            raise TypeError(f"{path}: {type(value).__qualname__} has a field named 'type', which is taken; rename it")
        if field.init:
            written[field.name] = _write(getattr(value, field.name), f"{path}.{field.name}", depth + 1)
    return written


def _write_mapping(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{path}: the key {key!r} is a {type(key).__name__}; JSON has strings only")
    if "type" in value or value.keys() == {"float"}:
        raise TypeError(
            f"{path}: the key {'type' if 'type' in value else 'float'!r} has a meaning of its own; rename it"
        )
    return {str(key): _write(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}


# -------------------------------------------------------------------------------------------- classes by name


def resolve(tag: str, where: str = "settings", legacy: Mapping[str, type] = _NO_CLASSES) -> type:
    """The dataclass of a tag: from `legacy`, from cebm, or from a module that is imported already. `where` (the file)
    begins the message of the StorageError when there is none."""
    if tag in legacy:
        return _dataclass(legacy[tag], tag, where)
    module, colon, qualname = tag.partition(":")
    if not colon:
        known = f"; known without a module: {', '.join(sorted(legacy))}" if legacy else ""
        raise StorageError(f"{where}: unknown type {tag!r}{known}")
    modules = list(_modules(module, tag, where))
    if not modules:
        option = f"name its file with --with {module}.py" if "." not in module else f"name it with --with {module}"
        raise StorageError(f"{where} was made with {tag}: import {module} first, or {option}")
    for candidate in modules:
        found = _inside(candidate, qualname)
        if found is not None:
            return _dataclass(found, tag, where)
    raise StorageError(f"{where} was made with {tag}: {module} is imported and has no class {qualname}")


def _dataclass(cls: Any, tag: str, where: str) -> type:
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return cls
    raise StorageError(f"{where}: {tag} is not a dataclass")


def _modules(name: str, tag: str, where: str) -> Iterator[ModuleType]:
    """The modules of this name that may be looked into; of all modules, only cebm's own are imported for it."""
    if name == "cebm" or name.startswith("cebm."):
        if "__main__" in name or not all(part.isidentifier() for part in name.split(".")):
            raise StorageError(f"{where}: {tag}: {name!r} is not a module of settings")
        try:
            yield importlib.import_module(name)
        except ImportError as error:
            raise StorageError(f"{where} was made with {tag}, which this cebm cannot import: {error}") from error
        return
    script = sys.modules.get("__main__")
    if script is not None and _module_name("__main__") == name:
        yield script
    imported = sys.modules.get(name)
    if imported is not None and imported is not script:
        yield imported


def _inside(module: ModuleType, qualname: str) -> Any:
    """A class of a module, or a class inside its classes. Looks only at what is there: no lazy imports."""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
        if not isinstance(found, type):
            return found if qualname == part else None
    return found


def _module_name(name: str) -> str:
    """The name by which others would import a module; of a script, the stem of its file."""
    script = sys.modules.get(name)
    if name not in _MAIN or script is None:
        return name
    spec = getattr(script, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name)
    file = getattr(script, "__file__", None)
    return Path(file).stem if file else name  # an interactive session has no file


# -------------------------------------------------------------------------------------------- from JSON


def from_json(
    data: Any, expected: Any = object, where: str = "settings", legacy: Mapping[str, type] = _NO_CLASSES
) -> Any:
    """The inverse of `to_json`. Every value is checked against the annotation of its field, the whole against
    `expected` (a class or an annotation). A field that is missing takes its default; an unknown one is an error.
    `legacy` names the classes of tags without a module, as earlier versions wrote them. A StorageError begins with
    `where`, the file."""
    check_json(data, where)
    try:
        return _Reader(where, legacy).read(data, expected)
    except _MismatchError as error:
        raise StorageError(f"{where}: {error}") from error


class _MismatchError(Exception):
    """A value does not fit an annotation; another member of a union may still take it."""


def _mismatch(hint: Any, data: Any) -> _MismatchError:
    name = hint.__qualname__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    got = data["type"] if isinstance(data, dict) and isinstance(data.get("type"), str) else reprlib.repr(data)
    return _MismatchError(f"expected {name.replace('typing.', '')}, got {got}")


def check_json(data: Any, where: str, deepest: int = DEEPEST) -> None:
    """Refuses what is not JSON and what is nested too deeply, before anything descends into it."""
    waiting: list[tuple[Any, int]] = [(data, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > deepest:
            raise StorageError(f"{where}: nested deeper than {deepest} levels")
        if isinstance(item, dict):
            strange = [key for key in item if not isinstance(key, str)]
            if strange:
                raise StorageError(f"{where}: the key {reprlib.repr(strange[0])} is not a string")
            waiting += [(part, depth + 1) for part in item.values()]
        elif isinstance(item, list | tuple):
            waiting += [(part, depth + 1) for part in item]
        elif not (item is None or isinstance(item, bool | int | float | str)):
            raise StorageError(f"{where}: {type(item).__name__} is not JSON")


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads one document. A value that does not fit its annotation raises a _MismatchError, so that a union can try
    its next member; anything wrong inside an object is final and raises a StorageError."""

    where: str
    legacy: Mapping[str, type]

    def read(self, data: Any, hint: Any) -> Any:
        hint = _unwrapped(hint)
        origin = typing.get_origin(hint) or hint
        if origin in (typing.Union, UnionType):
            return self._read_union(data, hint)
        if isinstance(data, dict) and data.keys() == {"float"} and data["float"] in _SPECIAL_FLOATS:
            data = float(data["float"])
        if origin is typing.Literal:
            if any(data == choice and type(data) is type(choice) for choice in typing.get_args(hint)):
                return data
            raise _mismatch(hint, data)
        if isinstance(data, dict):
            return self._read_object(data, hint) if "type" in data else self._read_mapping(data, hint)
        if isinstance(data, list | tuple):
            return self._read_sequence(data, hint)
        return _read_plain(data, hint)

    def _read_union(self, data: Any, hint: Any) -> Any:
        # float comes last: it would turn the 1 of `float | int` into 1.0.
        for member in sorted(typing.get_args(hint), key=lambda member: member is float):
            try:
                return self.read(data, member)
            except _MismatchError:
                continue
        raise _mismatch(hint, data)

    def _read_mapping(self, data: dict[str, Any], hint: Any) -> dict[str, Any]:
        origin = typing.get_origin(hint) or hint
        if not _anything(origin) and origin not in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
            raise _mismatch(hint, data)
        key_hint, value_hint = typing.get_args(hint) or (Any, Any)
        return {
            self._read_part(key, key_hint, f"the key {key!r}"): self._read_part(part, value_hint, f"[{key!r}]")
            for key, part in data.items()
        }

    def _read_sequence(self, data: Sequence[Any], hint: Any) -> Sequence[Any]:
        origin = typing.get_origin(hint) or hint
        args = typing.get_args(hint)
        hints: Sequence[Any]
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(args) != len(data):
                raise _mismatch(hint, data)
            hints = args
        elif _anything(origin) or _is_abstract_sequence(origin) or origin in (tuple, list):
            hints = [args[0] if args else Any] * len(data)
        else:
            raise _mismatch(hint, data)
        items = (self._read_part(item, part, f"[{i}]") for i, (item, part) in enumerate(zip(data, hints, strict=True)))
        return list(items) if origin in (list, collections.abc.MutableSequence) else tuple(items)

    def _read_part(self, data: Any, hint: Any, place: str) -> Any:
        try:
            return self.read(data, hint)
        except _MismatchError as error:
            raise _MismatchError(f"{place}: {error}") from error

    def _read_object(self, data: dict[str, Any], hint: Any) -> Any:
        tag = data["type"]
        if not isinstance(tag, str):
            raise StorageError(f"{self.where}: a type is the name of a class, got {reprlib.repr(tag)}")
        cls = resolve(tag, self.where, self.legacy)
        # Before it is built: the constructor of a class that has no business here must not run.
        if not _class_fits(cls, hint):
            raise _mismatch(hint, data)
        values = self._read_fields(cls, data)
        try:
            value = cls(**values)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise StorageError(f"{self.where}: {cls.__qualname__}: {error}") from error
        if not _fits(value, hint):
            raise _mismatch(hint, data)
        return value

    def _read_fields(self, cls: Any, data: dict[str, Any]) -> dict[str, Any]:
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        for name in data:
            if name != "type" and name not in fields:
                names = ", ".join(fields) or "none"
                raise StorageError(f"{self.where}: {cls.__qualname__} has no field {name!r}; its fields: {names}")
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except (NameError, TypeError) as error:
            raise StorageError(f"{self.where}: {cls.__qualname__}: cannot read its annotations ({error})") from error
        values = {}
        for name, field in fields.items():
            if name in data:
                try:
                    values[name] = self.read(data[name], hints[name])
                except _MismatchError as error:
                    raise StorageError(f"{self.where}: {cls.__qualname__}.{name}: {error}") from error
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise StorageError(f"{self.where}: {cls.__qualname__}: the field {name!r} is missing")
        return values


def _read_plain(data: Any, hint: Any) -> Any:
    """None, bool, int, float and str. An int may stand for a float; a bool stands only for itself."""
    if _anything(hint):
        return data
    if hint is float and type(data) is int:
        try:
            return float(data)
        except OverflowError as error:
            raise _mismatch(hint, data) from error
    if data is None or hint in (NoneType, None, bool, int, float, str):
        if type(data) is hint or (data is None and hint is None):
            return data
    elif not _is_container(hint) and _class_fits(type(data), hint) and _fits(data, hint):
        return data
    raise _mismatch(hint, data)


def _unwrapped(hint: Any) -> Any:
    """The annotation behind Annotated, Final, an alias, a NewType or a type variable."""
    while True:
        if typing.get_origin(hint) in (typing.Annotated, typing.Final):
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.TypeVar):
            hint = hint.__bound__ or Any
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # `type X = …`, from Python 3.12
            hint = hint.__value__
        else:
            return hint


def _anything(hint: Any) -> bool:
    return hint is Any or hint is object


def _is_abstract_sequence(hint: Any) -> bool:
    return hint in (
        collections.abc.Sequence,
        collections.abc.MutableSequence,
        collections.abc.Collection,
        collections.abc.Iterable,
    )


def _is_container(hint: Any) -> bool:
    """A string is a Sequence of strings, but no setting means that."""
    origin = typing.get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, collections.abc.Iterable)


def _class_fits(cls: type, hint: Any) -> bool:
    """Whether instances of a class fit an annotation, as far as the class tells."""
    origin = typing.get_origin(hint) or hint
    if _anything(origin):
        return True
    if not isinstance(origin, type):
        return False
    if getattr(origin, "_is_protocol", False):
        fields = getattr(cls, "__dataclass_fields__", {})
        return all(name in fields or any(name in vars(base) for base in cls.__mro__) for name in _methods(origin))
    return issubclass(cls, origin)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the attributes of a runtime-checkable protocol; the class tells all the rest."""
    origin = typing.get_origin(hint) or hint
    if getattr(origin, "_is_protocol", False) and getattr(origin, "_is_runtime_protocol", False):
        return isinstance(value, origin)
    return True


def _methods(protocol: type) -> set[str]:
    """Methods and properties that a protocol asks for."""
    own = {"__init__", "__new__", "__subclasshook__", "__init_subclass__", "__class_getitem__"}
    kinds = (FunctionType, property, classmethod, staticmethod)
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not typing.Protocol]
    return {name for base in bases for name, value in vars(base).items() if isinstance(value, kinds)} - own


# -------------------------------------------------------------------------------------------- pieces of the user's own


def find_piece(reference: str) -> Any:
    """What `path/to/file.py:name` or `package.module:name` names; the file or the module is imported."""
    place, _, name = reference.rpartition(":")
    if not place or not name or name.endswith(".py"):
        raise ValueError(f"{reference!r}: write FILE.py:NAME or MODULE:NAME")
    module = import_piece_module(place)
    try:
        return getattr(module, name)
    except AttributeError as error:
        names = ", ".join(_public_names(module)) or "no public names"
        raise ValueError(f"{place} has no {name!r}; it has {names}") from error


def import_piece_module(reference: str) -> ModuleType:
    """Imports `path/to/file.py` (as the module of its stem, its folder on `sys.path`, as `python file.py` does; a file
    of a package as that package's module) or `package.module`. The same file twice gives the same module."""
    if reference.endswith(".py") or "/" in reference or "\\" in reference:
        return _import_file(Path(reference))
    if not all(part.isidentifier() for part in reference.split(".")):
        raise ValueError(f"{reference!r} is neither a file that ends in .py nor the name of a module")
    if Path(f"{reference}.py").is_file() and reference not in sys.modules:
        hint = f"; for the file in this folder write {reference}.py"
    else:
        hint = ""
    return _importing(f"module {reference}", lambda: importlib.import_module(reference), hint)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file() or path.suffix != ".py":
        problem = "not a Python file (.py)" if path.exists() else "no such file"
        raise ValueError(f"{path}: {problem}")
    path = path.resolve()
    if (path.parent / "__init__.py").is_file():
        return _import_of_package(path)
    name = path.stem
    for other in (sys.modules.get("__main__"), sys.modules.get(name)):
        if other is not None and _file_of(other) == path:
            return other
    if name in sys.modules or name in sys.stdlib_module_names:
        origin = _file_of(sys.modules[name]) if name in sys.modules else None
        raise ValueError(f"{path}: another module is named {name} ({origin or 'part of Python'}); rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    run, folder = spec.loader.exec_module, str(path.parent)

    def load() -> ModuleType:
        added = folder not in sys.path
        if added:
            sys.path.insert(0, folder)
        sys.modules[name] = module
        try:
            run(module)
        except BaseException:
            del sys.modules[name]
            if added:
                sys.path.remove(folder)
            raise
        return module

    return _importing(str(path), load)


def _import_of_package(path: Path) -> ModuleType:
    """The file as `package.module`, with the folder above the package on `sys.path`."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    name = ".".join(parts)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = _importing(str(path), lambda: importlib.import_module(name))
    if _file_of(module) != path:
        raise ValueError(f"{path}: another module is named {name} ({_file_of(module) or 'part of Python'}); rename it")
    return module


def _importing(what: str, load: Callable[[], ModuleType], hint: str = "") -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:  # a script without a main guard may end itself
        raise ValueError(f"{what} cannot be imported: {type(error).__name__}: {error}{hint}") from error


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def _public_names(module: ModuleType) -> list[str]:
    """Names that a module defines; not what it imports, as far as one can tell."""

    def defined(value: Any) -> bool:
        imported = isinstance(value, type | FunctionType) and value.__module__ != module.__name__
        return not imported and not isinstance(value, ModuleType)

    names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if defined(v)]
    return sorted(str(name) for name in names if not str(name).startswith("_"))
