"""Reference pages from the source: every public name of `cebm/__init__.pyi`, grouped by room, with its docstring.

Docstrings here are Markdown, which autodoc would read as reStructuredText; so the pages are written from the source's
syntax tree, in which a field's docstring is found too, and Sphinx's Python domain makes them linkable.
"""

import ast
import copy
import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import cebm
from docs.site import examples

LEAST_WORDS = 4
SHAPED = re.compile(r"(?:^|\| )(?:Float|Int|Bool|Shaped|UInt8|Num)\w*\[")


@dataclass(frozen=True)
class Name:
    """A public name: what it is called, the room it is listed in, and the object."""

    name: str
    room: str
    object: Any

    @property
    def path(self) -> str:
        return f"cebm.testing.{self.name}" if self.room == "testing" else f"cebm.{self.name}"


def public_names() -> list[Name]:
    """Every name that `import cebm` offers, and those of `cebm.testing`, in the order of the stub."""
    found = [
        Name(name, module.removeprefix("cebm."), getattr(cebm, name))
        for name, module in cebm.__dict__["_MODULE_OF"].items()
    ]
    testing = import_module("cebm.testing")
    return found + [Name(name, "testing", getattr(testing, name)) for name in testing.__all__]


def docstring(entry: Name) -> str:
    """The docstring that was written for this name; empty where there is none, or only an inherited or made-up one."""
    if not (inspect.isclass(entry.object) or inspect.isroutine(entry.object)):
        return _data_docstring(entry)
    text = inspect.cleandoc(entry.object.__dict__.get("__doc__") or "") if inspect.isclass(entry.object) else None
    if text is None:
        text = inspect.getdoc(entry.object) or ""
    # A dataclass without a docstring is given its signature for one.
    return "" if text.startswith(f"{entry.name}(") else text


def undocumented(entries: list[Name]) -> list[str]:
    """The names whose docstring is shorter than four words."""
    return [entry.path for entry in entries if len(docstring(entry).split()) < LEAST_WORDS]


def _data_docstring(entry: Name) -> str:
    return {"TRIALS": "The named recipes: each is a `Trial`, and its name is what `cebm train NAME` takes."}.get(
        entry.name, ""
    )


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _node(thing: Any) -> ast.ClassDef | ast.FunctionDef | None:
    path = inspect.getsourcefile(inspect.unwrap(thing))
    if path is None:
        return None
    # A room that is a folder may call its pieces its own, whatever file they stand in.
    files = sorted(Path(path).parent.rglob("*.py")) if Path(path).name == "__init__.py" else [Path(path)]
    for file in files:
        for node in _tree(str(file)).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == thing.__name__:
                return node
    return None


@cache
def _own_shapes(path: str) -> dict[str, ast.expr]:
    """The names that a file gives to types with shapes: `Actions` for `Float[Tensor, "batch samples act"]`."""
    return {
        each.id: node.value
        for node in _tree(path).body
        if isinstance(node, ast.Assign) and SHAPED.search(ast.unparse(node.value))
        for each in node.targets
        if isinstance(each, ast.Name)
    }


@cache
def _shapes(path: str, deep: int = 2) -> dict[str, ast.expr]:
    """These names, and those that the file imports from cebm, through at most `deep` files."""
    found = dict(_own_shapes(path))
    for node in _tree(path).body if deep else []:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cebm."):
            others = _shapes(str(inspect.getsourcefile(import_module(str(node.module)))), deep - 1)
            found |= {each.asname or each.name: others[each.name] for each in node.names if each.name in others}
    return found


class _WithShapes(ast.NodeTransformer):
    """Writes out the types with shapes that have a name."""

    def __init__(self, known: dict[str, ast.expr]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.visit(copy.deepcopy(self.known[node.id])) if node.id in self.known else node


def _written_out(annotation: ast.expr | None, known: dict[str, ast.expr]) -> ast.expr | None:
    return None if annotation is None else _WithShapes(known).visit(copy.deepcopy(_unquoted(annotation)))


def _arguments(node: ast.FunctionDef, bound: bool, known: dict[str, ast.expr]) -> str:
    arguments = copy.deepcopy(node.args)
    if bound and (arguments.posonlyargs or arguments.args):
        (arguments.posonlyargs or arguments.args).pop(0)
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = _written_out(each.annotation, known)
    result = _written_out(node.returns, known)
    returns = f" -> {ast.unparse(result)}" if result is not None else ""
    return f"({ast.unparse(arguments)}){returns}"


def _unquoted(annotation: ast.expr | None) -> ast.expr | None:
    """An annotation that is a string as what it says."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def _decorated(node: ast.FunctionDef | ast.ClassDef, name: str) -> bool:
    return any(name in ast.unparse(each) for each in node.decorator_list)


def _fields(node: ast.ClassDef, known: dict[str, ast.expr]) -> list[tuple[str, str, str]]:
    """Name, annotation with default, and docstring of each public field of a dataclass."""
    found = []
    for at, each in enumerate(node.body):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            after = node.body[at + 1] if at + 1 < len(node.body) else None
            words = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            default = f" = {ast.unparse(each.value)}" if each.value is not None else ""
            kind = ast.unparse(_written_out(each.annotation, known) or each.annotation)
            found.append((each.target.id, kind + default, inspect.cleandoc(str(words))))
    return found


def linked(text: str, names: dict[str, str], own: str = "") -> str:
    """Markdown in which `Name` leads to the reference, outside code blocks, headings and links.

    Only names with a capital letter: `run`, `fit` or `contract` are often words of another sense.
    """

    def replace(match: re.Match[str]) -> str:
        word = match[1]
        return (
            f"{{py:obj}}`{word} <{names[word]}>`"
            if word in names and word != own and word != word.lower()
            else match[0]
        )

    parts = re.split(r"(^```.*?^```$|^#[^\n]*$|^    [^\n]*$|!?\[[^\]]*\]\([^)]*\))", text, flags=re.M | re.S)
    parts[::2] = [re.sub(r"(?<![`}])`(\w+)`(?!`)", replace, part) for part in parts[::2]]
    return "".join(parts)


def _markdown(text: str, names: dict[str, str], own: str) -> str:
    """A docstring as Markdown: dollars and angle brackets outside code stand for themselves."""
    parts = re.split(r"(`[^`]*`|^    .*$)", text, flags=re.M)
    parts[::2] = [re.sub(r"([$<*])", r"\\\1", part) for part in parts[::2]]
    return linked("".join(parts), names, own)


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def _entry(entry: Name, names: dict[str, str]) -> str:
    text = _markdown(docstring(entry), names, entry.name)
    if not (inspect.isclass(entry.object) or inspect.isroutine(entry.object)):
        return f"::::{{py:data}} {entry.name}\n\n{text}\n\n{_recipes(entry.object)}\n::::\n"
    node = _node(entry.object)
    known = _shapes(str(inspect.getsourcefile(inspect.unwrap(entry.object))))
    if isinstance(node, ast.FunctionDef):
        return f"::::{{py:function}} {entry.name}{_arguments(node, False, known)}\n\n{text}\n::::\n"
    if node is None:
        raise ValueError(f"{entry.path}: its source was not found")
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    start = next((each for each in methods if each.name == "__init__"), None)
    given = _arguments(start, True, known) if start else ""
    lines = [f"::::{{py:class}} {entry.name}{given.removesuffix(' -> None')}", "", text, ""]
    for name, kind, words in _fields(node, known):
        said = f": {_indented(_markdown(words, names, entry.name))}" if words else ""
        lines.append(f"- **{name}** `{kind}`{said}")
    for method in methods:
        lines += _method(entry, method, names, known)
    return "\n".join([*lines, "::::", ""])


def _method(entry: Name, method: ast.FunctionDef, names: dict[str, str], known: dict[str, ast.expr]) -> list[str]:
    """A public method with its docstring, its own or that of the contract that it keeps; none without one."""
    words = inspect.getdoc(getattr(entry.object, method.name, None))
    if method.name.startswith("_") or not words or _decorated(method, "setter") or _decorated(method, "overload"):
        return []
    kind, given = "method", _arguments(method, not _decorated(method, "staticmethod"), known)
    options = [f":{option}:" for option in ("classmethod", "staticmethod") if _decorated(method, option)]
    if _decorated(method, "property"):
        kind, given = "property", ""
    body = _markdown(words, names, entry.name)
    return ["", f":::{{py:{kind}}} {entry.name}.{method.name}{given}", *options, "", body, ":::"]


def _recipes(trials: dict[str, Any]) -> str:
    rows = [
        f"| `{name}` | `{type(each.energy).__name__}` | `{type(each.objective).__name__}` | "
        f"`{type(each.acting).__name__}` |"
        for name, each in trials.items()
    ]
    return "\n".join(["| recipe | energy | objective | acting |", "|---|---|---|---|", *rows])


def without_example(entries: list[Name]) -> list[str]:
    """The names that no example of their room uses."""
    rooms = dict.fromkeys(entry.room for entry in entries)
    return [
        f"{room}.{name}"
        for room in rooms
        for name in examples.unused(room, [entry.name for entry in entries if entry.room == room])
    ]


def pages(shown: dict[str, str]) -> dict[str, str]:
    """The reference: its overview and one page per room, by the name of the file. `shown`: the rooms' examples."""
    entries = public_names()
    short = undocumented(entries)
    if short:
        raise ValueError(f"these public names need a docstring of {LEAST_WORDS} words or more: {', '.join(short)}")
    lacking = without_example(entries)
    if lacking:
        raise ValueError(f"these public names need an example in docs/reference.md: {', '.join(lacking)}")
    names = {entry.name: entry.path for entry in entries}
    rooms: dict[str, list[Name]] = {}
    for entry in entries:
        rooms.setdefault(entry.room, []).append(entry)
    written = {}
    overview = [examples.parts()[0]]
    for room, inside in rooms.items():
        about = inspect.getdoc(import_module(f"cebm.{room}")) or ""
        home = "cebm.testing" if room == "testing" else "cebm"
        body = [f"# cebm.{room}", "", _markdown(about, names, ""), "", f"```{{py:currentmodule}} {home}", "```", ""]
        body += [
            "## Examples",
            "",
            "They begin as [the overview](../reference.md) says.",
            "",
            shown[room],
            "## Names",
            "",
        ]
        written[f"reference/{room}.md"] = "\n".join([*body, *(_entry(entry, names) for entry in inside)])
        overview += [f"## [{room}](reference/{room}.md)", ""]
        overview += [f"- {{py:obj}}`{entry.name} <{entry.path}>`: {_first(entry)}" for entry in inside]
        overview.append("")
    overview += ["```{toctree}", ":hidden:", "", *(f"reference/{room}" for room in rooms), "```", ""]
    return {"reference.md": "\n".join(overview), **written}


def _first(entry: Name) -> str:
    """The first sentence, or what stands before the first colon of a formula."""
    paragraph = docstring(entry).split("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=[\w)`])\.(?: |$)", paragraph)[0]
    return _markdown(sentence, {}, "").rstrip(":") + "."
