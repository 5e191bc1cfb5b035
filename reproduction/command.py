"""The command `cebm reproduce`: its arguments are those of `cebm.cli.Reproduce`."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cebm.commands import engine_of
from reproduction.claims import CLAIMS, find_claim
from reproduction.claims.validation import Validation
from reproduction.ledger import Claim
from reproduction.page import write_page
from reproduction.running import ReproductionError, judge_anew, reproduce
from reproduction.trainings import SCALES

if TYPE_CHECKING:
    from cebm.cli import Reproduce

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference"
"""Where reference curves are looked for by default: in a folder beside the repository."""


def reproduce_claims(arguments: "Reproduce") -> None:
    """Print one line per claim, then the ledger's path; with `report` the page's path alone. A task that fails ends
    the program with one line and exit code 1, after all other tasks have run."""
    if arguments.report:
        if arguments.claims:
            raise ValueError("the page shows all claims that were measured: name none with --report")
        print(write_page(arguments.out, arguments.out.with_suffix(".html")))
        return
    named = list(dict.fromkeys(map(find_claim, arguments.claims))) or CLAIMS
    claims = with_reference(named, arguments.reference)
    if importlib.util.find_spec("matplotlib") is None:  # figures come at the end: better to say so now
        raise ImportError("figures need matplotlib: pip install 'cebm[plot]'")
    if not arguments.out.name:
        raise ValueError(f"out must be a folder with a name, which the ledger beside it takes, got {arguments.out}")
    scale, out = SCALES[arguments.scale], arguments.out
    try:
        if arguments.judge:
            findings = judge_anew(claims, scale, arguments.seeds, out)
        else:
            engine = engine_of(arguments, arguments.runs / "logs")
            findings = reproduce(claims, scale, arguments.seeds, engine, out, arguments.runs, arguments.retries)
    except ReproductionError as error:
        print(f"cebm: {error}", file=sys.stderr)
        sys.exit(1)
    width = max(len(claim.slug) for claim in claims)
    for claim in claims:
        finding = findings[claim.slug]
        print(f"{claim.number:>2} {claim.slug:<{width}}  {finding.verdict:<13}  {finding.measured}")
    print(out.with_suffix(".md"))


def with_reference(claims: Sequence[Claim], folder: Path | None) -> list[Claim]:
    """The claims, with the folder of reference curves given to the one that reads them; without a folder it gets the
    default one if that exists."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"reference must be a folder of reference curves, got {folder}")
    if folder is None and REFERENCE.is_dir():
        folder = REFERENCE
    place = None if folder is None else str(folder.absolute())  # workers may run in another directory
    return [replace(claim, reference=place) if isinstance(claim, Validation) else claim for claim in claims]
