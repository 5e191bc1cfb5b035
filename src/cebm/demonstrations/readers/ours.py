"""cebm's own format, and parts of it by their names."""

from pathlib import Path
from typing import Any

from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.readers.assembling import Wanted, assembled
from cebm.parts import Part


def read_ours(path: Path, wanted: Wanted) -> Demonstrations:
    """What `Demonstrations.save` wrote. `obs` and `action` choose among its parts and columns by name."""
    data = Demonstrations.load(path)
    wanted.listen(1.0)
    if wanted.episodes not in ((), ("episode_ends",)):
        raise wanted.error("cebm's own files know their episodes: leave episodes away")
    defaults = (("obs",), (part.name for part in data.parts)), (("action",), (part.name for part in data.action_parts))
    asked = [tuple(words) for words in (wanted.obs, wanted.action)]
    if all(words in ((), plain, tuple(names)) for words, (plain, names) in zip(asked, defaults, strict=True)):
        return data
    held: dict[str, Any] = {}
    names: dict[str, Any] = {}
    usual = []
    for array, parts in ((data.obs, data.parts), (data.actions, data.action_parts)):
        _add(held, names, array, parts, wanted)
        usual.append(tuple(part.name for part in parts))
    chosen = Wanted(wanted.source, asked[0] or usual[0], asked[1] or usual[1])
    found = assembled(chosen, held, names=names, ends=data.episode_ends)
    return Demonstrations(found.obs, found.actions, found.episode_ends, data.metadata, found.parts, found.action_parts)


def _add(held: dict[str, Any], names: dict[str, Any], array: Any, parts: tuple[Part, ...], wanted: Wanted) -> None:
    """Each part, and each column that has a name of its own, as an array."""
    start = 0
    for part in parts:
        values = array[:, start : start + part.size]  # a view, on disk where the array is
        if part.name in held:
            raise wanted.error(f"obs and action both have a part {part.name!r}, so it cannot be chosen by its name")
        held[part.name] = values.reshape(len(values), *part.shape)
        names[part.name] = part.columns
        for index, column in enumerate(part.columns):
            held.setdefault(column, values[:, index])
        start += part.size
