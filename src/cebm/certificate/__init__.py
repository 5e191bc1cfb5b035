"""Does this sampler sample what it claims? Analytic targets, and the errors of a sampler on them.

A target is an energy without observation whose mean and standard deviation are known exactly. A sampler runs on it
twice: as `chains` (1000 independent chains, of which the last states count) and as `single` (one chain of 4000 steps,
of which the last 1000 states count: the appendix's experiment). A `Certificate` compares the states with the truth.

`targets` has the targets and the named samplers, `judging` runs a sampler and judges it, `presenting` prints and draws.
"""

from cebm.certificate.judging import (
    CHAINS,
    SINGLE_KEPT,
    SINGLE_REPLICAS,
    SINGLE_STEPS,
    Certificate,
    RunName,
    SamplerFactory,
    Verdict,
    certify,
)
from cebm.certificate.presenting import conclusion, figure, report, table
from cebm.certificate.targets import (
    SAMPLERS,
    BoxedExponential,
    DoubleWell,
    Gaussian,
    LateFall,
    Skewed,
    Target,
    analytic_targets,
    named_sampler,
)

__all__ = [
    "CHAINS",
    "SAMPLERS",
    "SINGLE_KEPT",
    "SINGLE_REPLICAS",
    "SINGLE_STEPS",
    "BoxedExponential",
    "Certificate",
    "DoubleWell",
    "Gaussian",
    "LateFall",
    "RunName",
    "SamplerFactory",
    "Skewed",
    "Target",
    "Verdict",
    "analytic_targets",
    "certify",
    "conclusion",
    "figure",
    "named_sampler",
    "report",
    "table",
]
