"""Runs the examples of a page, and puts what they print below them."""

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from cebm.cli import main

FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
PICTURE = re.compile(r"<!-- picture: (\S+): (.*?) -->")
"""Stands in a page where the picture shall be that an example saves."""


def ran(text: str, page: str, where: Path, beginning: str = "") -> str:
    """A page with what its examples print below them: blocks of `python` share their names, and in a block of `shell`
    each line is a command of cebm. Pictures that they save are copied to `where`, beside the page. `beginning` is run
    before, and not shown."""
    # A module, as a reader's own file is one: settings that it defines are found again by their names.
    tutorial = sys.modules["tutorial"] = types.ModuleType("tutorial")
    run = {"python": lambda code: _printed(code, page, tutorial.__dict__), "shell": _commands}
    parts = FENCE.split(text)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(beginning, tutorial.__dict__)
        for at, part in enumerate(parts):
            language, _, code = part.removeprefix("```").removesuffix("```").partition("\n")
            if not part.startswith("```") or language not in run:
                continue
            try:
                printed = run[language](code)
            except Exception as error:
                raise RuntimeError(f"{page}: this example does not run ({error}):\n{code}") from error
            if printed:
                parts[at] += f"\n\n```{{code-block}} text\n:class: output\n\n{printed}```"
        shown = PICTURE.sub(r"![\2](\1)", "".join(parts))
        for name in PICTURE.findall(text):
            if not Path(name[0]).exists():
                raise RuntimeError(f"{page}: no example saved the picture {name[0]}")
            shutil.copy(name[0], where)
    return shown


def _printed(code: str, page: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), names)
    return printed.getvalue()


def _commands(code: str) -> str:
    """What commands of cebm print, one per line; the temporary folder's path is left out."""
    printed = io.StringIO()
    for line in code.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line)
        if program != "cebm":
            raise ValueError(f"a shell block has commands of cebm only, not {program}")
        complaint = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaint):
                main(arguments)
        except SystemExit as stopped:
            if stopped.code:
                raise RuntimeError(complaint.getvalue().strip()) from stopped
    return printed.getvalue().replace(f"{os.getcwd()}/", "")
