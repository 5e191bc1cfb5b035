"""Many runs: studies of trials, data, seeds and settings, on any engine.

    # study.py
    from cebm.sweep import grid
    study = grid("ibc", seeds=range(3), steps=500, over={"objective.count": [4, 8, 16]})

    $ cebm sweep study.py --engine local --workers 2 --out runs/study

Each run is an ordinary, resumable run directory. Finished runs are not repeated, killed ones go on bit for bit.
"""

from cebm.sweep.driving import estimate, sweep
from cebm.sweep.results import records, table, write_results
from cebm.sweep.studies import Grid, Planned, Study, Tuning, grid, runs_of
from cebm.sweep.working import work

__all__ = [
    "Grid",
    "Planned",
    "Study",
    "Tuning",
    "estimate",
    "grid",
    "records",
    "runs_of",
    "sweep",
    "table",
    "work",
    "write_results",
]
