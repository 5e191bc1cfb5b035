"""Writes requirements.lock from constraints.txt: the same versions with the checksums that the package index lists.

Run it after a change of constraints.txt: `.venv/bin/python tools/lock.py`. Torch is left out: its CPU builds come from
different places, and pip can check a file only where its checksum is known.
"""

import os
import re
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"torch"}


def pinned(text: str) -> dict[str, str]:
    """Versions by name."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return {name: version for name, _, version in (line.partition("==") for line in lines) if version}


def checksums(name: str, version: str, index: str) -> list[str]:
    """Those of every file of this version: wheels for all platforms, and the source."""
    plain = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(f"{index}/{plain}/", timeout=60) as answer:
        page = answer.read().decode()
    stem = re.sub(r"[-_.]+", "[-_.]+", name)
    wanted = re.compile(rf"/{stem}-{re.escape(version)}(-|\.tar|\.zip)[^/]*#sha256=([0-9a-f]{{64}})", re.IGNORECASE)
    return sorted({found[1] for found in wanted.findall(page)})


def main() -> None:
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    lines = ["# Made by tools/lock.py from constraints.txt; pip checks every file against these."]
    for name, version in pinned((ROOT / "constraints.txt").read_text()).items():
        if name in LEFT_OUT:
            continue
        found = checksums(name, version, index)
        if not found:
            sys.exit(f"{name} {version}: the index lists no file with a checksum")
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in found)]))
    (ROOT / "requirements.lock").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
