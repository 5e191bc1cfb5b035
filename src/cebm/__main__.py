"""`python -m cebm` is `cebm`."""

from cebm.cli import main

main()
