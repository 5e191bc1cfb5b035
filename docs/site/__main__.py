"""`python -m docs.site SOURCE`: writes the site's pages to a folder that Sphinx reads.

`python -m docs.site --records` writes the numbers of all pages from the committed records anew.
"""

import argparse
import shutil
from pathlib import Path

from docs.site.mathjax import vendor
from docs.site.numbers import refreshed
from docs.site.pages import PAGES, ROOT, assemble


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("source", nargs="?", type=Path, help="the folder to write; what it held is deleted")
    parser.add_argument("--records", action="store_true", help="refresh the numbers of all pages and stop")
    parser.add_argument("--quick", action="store_true", help="do not run the examples: pages lack what they print")
    given = parser.parse_args()
    if given.records:
        for page in map(ROOT.joinpath, PAGES):
            page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if given.source is None:
        parser.error("name the folder to write, or --records")
    source = given.source.resolve()
    if source.exists():
        shutil.rmtree(source)
    assemble(source, run_tutorials=not given.quick)
    vendor(source / "_static/mathjax")


if __name__ == "__main__":
    main()
