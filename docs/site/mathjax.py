"""MathJax in the site itself, so that formulas need no network: one file from its npm package, and its licence."""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

VERSION = "3.2.2"
INTEGRITY = "sha512-Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw=="
"""The SHA-512 of the package, as npm's registry publishes it."""
CACHE = Path(__file__).parents[2] / "build/docs/npm"
WANTED = {"package/es5/tex-svg.js": "tex-svg.js", "package/LICENSE": "LICENSE"}


def vendor(where: Path) -> None:
    """Copies script and licence into the folder; the package is fetched once, by npm, and checked each time."""
    archive = CACHE / f"mathjax-{VERSION}.tgz"
    if not archive.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(f"make docs needs npm, or the file {archive} (npm pack mathjax@{VERSION})")
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [npm, "pack", "--silent", f"mathjax@{VERSION}"], cwd=CACHE, check=True, stdout=subprocess.DEVNULL
        )
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise SystemExit(f"{archive}: its checksum is {found}, expected {INTEGRITY}; delete it and try again")
    where.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as package:
        for member, name in WANTED.items():
            stored = package.extractfile(member)
            if stored is None:
                raise SystemExit(f"{archive}: {member} is missing")
            (where / name).write_bytes(stored.read())
