"""The paper as evidence: one file per claim, each with the rule that decides its verdict."""

from cebm.experiments.bound import Bound
from cebm.experiments.chains import Chains
from cebm.experiments.descent import Descent
from cebm.experiments.dimensions import Dimensions
from cebm.experiments.explicit_policies import ExplicitPolicies
from cebm.experiments.formulation import Formulation
from cebm.experiments.integral import Integral
from cebm.experiments.joint import Joint
from cebm.experiments.langevin import LangevinStep
from cebm.experiments.ledger import Claim
from cebm.experiments.marginal import Marginal
from cebm.experiments.maxent import MaxEnt
from cebm.experiments.mcmc_loss import McmcLoss
from cebm.experiments.noise import Noise
from cebm.experiments.thesis import Thesis
from cebm.experiments.through_chain import ThroughChain
from cebm.experiments.validation import Validation

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
)
"""In the order of their numbers."""


def find_claim(name: str) -> Claim:
    """By number or by slug; a ValueError lists what there is."""
    for claim in CLAIMS:
        if name in (claim.slug, str(claim.number)):
            return claim
    raise ValueError(f"there is no claim {name!r}; there are {', '.join(f'{c.number} {c.slug}' for c in CLAIMS)}")
