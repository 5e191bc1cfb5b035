"""Energies E(x, y): the contract, and what fulfils it.

`base` has the contract, any module or function as an energy; `feedforward` the networks with closed-form gradients;
`density` the explicit ones, whose normaliser is known; `correlated` a mixture with whole covariance matrices;
`baselines` the nearest demonstration and a refined regression; `tilted` a density times an energy; `levels` an energy
at every noise level; `judged` one whose draws another chooses from; `sums` the weighted sum.
"""

from cebm.energies.base import EnergyModel, EnergySettings, ModuleEnergy, Penalty, initialised_by
from cebm.energies.baselines import Nearest, NearestEnergy, TwoStep, TwoStepEnergy
from cebm.energies.correlated import CorrelatedMixture, CorrelatedMixtureEnergy
from cebm.energies.density import (
    MixtureDensity,
    MixtureDensityEnergy,
    Regression,
    RegressionEnergy,
)
from cebm.energies.feedforward import MLP, FeedForwardEnergy, MarginalEnergy, MLPEnergy, Residual, ResidualEnergy
from cebm.energies.levels import NoiseConditional, NoiseConditionalEnergy, NoiseConditionalTilt
from cebm.energies.sums import WeightedSum
from cebm.energies.tilted import Tilted, TiltedEnergy

__all__ = [
    "MLP",
    "CorrelatedMixture",
    "CorrelatedMixtureEnergy",
    "EnergyModel",
    "EnergySettings",
    "FeedForwardEnergy",
    "MLPEnergy",
    "MarginalEnergy",
    "MixtureDensity",
    "MixtureDensityEnergy",
    "ModuleEnergy",
    "Nearest",
    "NearestEnergy",
    "NoiseConditional",
    "NoiseConditionalEnergy",
    "NoiseConditionalTilt",
    "Penalty",
    "Regression",
    "RegressionEnergy",
    "Residual",
    "ResidualEnergy",
    "Tilted",
    "TiltedEnergy",
    "TwoStep",
    "TwoStepEnergy",
    "WeightedSum",
    "initialised_by",
]
