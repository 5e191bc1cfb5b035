"""cebm: conditional energy-based models for implicit policies.

`import cebm` is quick: a name is imported from its module when it is first used. `__init__.pyi` beside this file lists
the names once, for type checkers and for this module.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {
    name: module
    for module, names in re.findall(r"^from (cebm\.\w+) import (.+)$", _STUB, re.MULTILINE)
    for name in re.findall(r"(\w+) as \w+", names)
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    if name == "testing":
        return import_module("cebm.testing")
    raise AttributeError(f"module 'cebm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
