"""Does this sampler sample what it claims? Analytic targets, and the errors of a sampler on them.

A target is an energy without observation whose mean, standard deviations and correlation are known exactly, and which
can be drawn from. In half of the targets the dimensions depend on each other. A sampler runs on each of them twice: as
`chains` (1000 independent chains, of which the last states count) and as `single` (one chain of 4000 steps, of which
the last 1000 states count: the appendix's experiment). A `Certificate` compares the states with the truth.

`targets` and `dependent` have the targets, `named` the samplers that `cebm certify` knows; `judging` runs a sampler and
judges it, `presenting` prints and draws.
"""

from cebm.certificate.dependent import Banana, CorrelatedGaussian, Funnel, Ring, analytic_targets
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
from cebm.certificate.named import SAMPLERS, LateFall, named_sampler
from cebm.certificate.presenting import conclusion, figure, report, table
from cebm.certificate.targets import BoxedExponential, DoubleWell, Gaussian, Separable, Skewed, Target

__all__ = [
    "CHAINS",
    "SAMPLERS",
    "SINGLE_KEPT",
    "SINGLE_REPLICAS",
    "SINGLE_STEPS",
    "Banana",
    "BoxedExponential",
    "Certificate",
    "CorrelatedGaussian",
    "DoubleWell",
    "Funnel",
    "Gaussian",
    "LateFall",
    "Ring",
    "RunName",
    "SamplerFactory",
    "Separable",
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
