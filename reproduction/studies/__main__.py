"""`python -m reproduction.studies NAME FOLDER`: the evidence of a study's records so far, into the ledger."""

import argparse
import importlib
import json
from pathlib import Path

from cebm.storage import write_atomically
from reproduction.evidence import markdown
from reproduction.page import write_ledger
from reproduction.studies.reading import Evidence, Inquiry

NAMES = tuple(
    sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if path.stem not in ("__init__", "__main__", "reading", "measuring")
    )
)


def find_study(name: str) -> Inquiry:
    """The study of that name."""
    found = importlib.import_module(f"reproduction.studies.{name}").study
    if not isinstance(found, Inquiry):
        raise TypeError(f"reproduction.studies.{name}: study is a {type(found).__name__}, expected an Inquiry")
    return found


def write_evidence(study: Inquiry, folder: Path, out: Path) -> Evidence:
    """Write the evidence of the records in a sweep's folder, together with those that were written before, and the
    ledger with it where there is one."""
    path = out / "studies" / f"{study.slug}.json"
    earlier = json.loads(path.read_bytes())["runs"] if path.exists() else []
    known = {row["key"]: row for row in earlier} | dict(study.records(folder))
    evidence = study.evidence(known.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(evidence, indent=1) + "\n").encode())
    if any(out.glob("[0-9][0-9]-*.json")):  # without a claim there is no ledger
        write_ledger(out)
    return evidence


def main() -> None:
    parser = argparse.ArgumentParser(description="The evidence of a study's records so far.")
    parser.add_argument("study", choices=NAMES)
    parser.add_argument("folder", type=Path, help="the folder of `cebm sweep`; of ten_seeds, that of the results")
    parser.add_argument("--out", type=Path, default=Path("reproduction/results"))
    words = parser.parse_args()
    print(markdown(write_evidence(find_study(words.study), words.folder, words.out)))


if __name__ == "__main__":
    main()
