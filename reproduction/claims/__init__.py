"""The claims, one file each: tasks, statistics, the rule that decides the verdict, and the figure. Their texts are in
`reproduction.prose`.
"""

from reproduction.claims.bound import Bound
from reproduction.claims.chains import Chains
from reproduction.claims.descent import Descent
from reproduction.claims.dimensions import Dimensions
from reproduction.claims.explicit_parts import ExplicitParts
from reproduction.claims.explicit_policies import ExplicitPolicies
from reproduction.claims.formulation import Formulation
from reproduction.claims.integral import Integral
from reproduction.claims.joint import Joint
from reproduction.claims.langevin import LangevinStep
from reproduction.claims.marginal import Marginal
from reproduction.claims.maxent import MaxEnt
from reproduction.claims.mcmc_loss import McmcLoss
from reproduction.claims.noise import Noise
from reproduction.claims.thesis import Thesis
from reproduction.claims.through_chain import ThroughChain
from reproduction.claims.validation import Validation
from reproduction.ledger import Claim

CLAIMS: tuple[Claim, ...] = (
    Integral(),
    LangevinStep(),
    Formulation(),
    Noise(),
    Chains(),
    McmcLoss(),
    MaxEnt(),
    Joint(),
    Dimensions(),
    Bound(),
    Marginal(),
    Validation(),
    ThroughChain(),
    ExplicitPolicies(),
    Thesis(),
    Descent(),
    ExplicitParts(),
)
"""All claims, in the order of their numbers."""


def find_claim(name: str) -> Claim:
    """The claim with this number or slug; a ValueError lists all claims."""
    for claim in CLAIMS:
        if name in (claim.slug, str(claim.number)):
            return claim
    raise ValueError(f"there is no claim {name!r}; there are {', '.join(f'{c.number} {c.slug}' for c in CLAIMS)}")
