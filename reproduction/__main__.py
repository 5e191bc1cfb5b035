"""`python -m reproduction …` is `cebm reproduce …`."""

import sys

from cebm.cli import main

if __name__ == "__main__":  # worker processes import this file too
    main(["reproduce", *sys.argv[1:]])
