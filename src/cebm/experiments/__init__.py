"""The paper as evidence: one file per claim, each with the rule that decides its verdict."""

from cebm.experiments.formulation import Formulation
from cebm.experiments.integral import Integral
from cebm.experiments.ledger import Claim

CLAIMS: tuple[Claim, ...] = (Integral(), Formulation())
"""In the order of their numbers."""


def find_claim(name: str) -> Claim:
    """By number or by slug; a ValueError lists what there is."""
    for claim in CLAIMS:
        if name in (claim.slug, str(claim.number)):
            return claim
    raise ValueError(f"there is no claim {name!r}; there are {', '.join(f'{c.number} {c.slug}' for c in CLAIMS)}")
