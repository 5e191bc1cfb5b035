"""What a run was made by: the commit of the code and the versions of what it stands on."""

import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

from cebm import __version__


def versions() -> dict[str, str]:
    """Of cebm, torch, numpy and Python."""
    found = {"cebm": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**found, "python": platform.python_version()}


def source_commit() -> str | None:
    """The commit of the code that runs, where it is a checkout; '-dirty' where the code is not as committed. None where
    cebm is installed inside somebody else's repository."""
    here = Path(__file__)

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        if git("ls-files", "--error-unmatch", here.name).returncode != 0:
            return None
        commit = git("rev-parse", "HEAD").stdout.strip()
        dirty = git("diff", "--quiet", "HEAD", "--", ".").returncode == 1
    except OSError:  # there is no git
        return None
    return f"{commit}-dirty" if commit and dirty else commit or None
