"""How long `make demo` takes once everything is installed: demonstrations, two trainings, 800 roll-outs, a report.

    .venv/bin/python -m benchmarks.demo

Runs it as a newcomer does, which writes `runs/demo` anew, and writes docs/demo.json. A minute or two.
"""

import json
import os
import subprocess
from pathlib import Path
from time import perf_counter

import torch

from cebm.storage import write_atomically

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "demo.json"


def main() -> None:
    """Installs, and then times."""
    subprocess.run(["make", "install"], cwd=ROOT, check=True)
    began = perf_counter()
    subprocess.run(["make", "demo"], cwd=ROOT, check=True)
    found = {"seconds": round(perf_counter() - began, 1), "cores": os.cpu_count(), "torch": torch.__version__}
    write_atomically(RESULT, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
