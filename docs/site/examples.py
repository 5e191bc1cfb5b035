"""The examples of the reference: docs/reference.md has a section for each room, whose code uses every name of it."""

import ast
import re
from pathlib import Path

from docs.site.running import FENCE, ran

SOURCE = Path(__file__).parents[1] / "reference.md"


def parts() -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the sections by the name of their room."""
    first, *others = re.split(r"^## (\w+)\n", SOURCE.read_text(encoding="utf-8"), flags=re.M)
    return first, dict(zip(others[::2], others[1::2], strict=True))


def code(text: str) -> str:
    """The Python blocks of a text."""
    blocks = [part for part in FENCE.split(text) if part.startswith("```python\n")]
    return "\n".join(block.removeprefix("```python\n").removesuffix("```") for block in blocks)


def shown(room: str, where: Path | None) -> str:
    """A room's examples; with a folder they are run, and what they print stands below them."""
    first, sections = parts()
    text = sections.get(room, "")
    return text if where is None else ran(text, f"docs/reference.md, {room}", where, code(first))


def rooms(where: Path | None) -> dict[str, str]:
    """The examples of all rooms."""
    return {room: shown(room, where) for room in parts()[1]}


def unused(room: str, names: list[str]) -> list[str]:
    """The names that no example of the room uses."""
    used = set()
    for node in ast.walk(ast.parse(code(parts()[1].get(room, "")))):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
    return [name for name in names if name not in used]
