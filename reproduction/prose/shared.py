"""Texts that several claims share."""

PLATEAU = (
    "Success on validation episodes, the mean over the evaluations of the second half of training, per seed, as that "
    "of a single moment scatters; 0 for a run that diverges."
)
"""The metric of claims that are decided by `Results.plateau`."""
