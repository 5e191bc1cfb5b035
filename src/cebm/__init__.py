"""cebm: conditional energy-based models for implicit policies.

`import cebm` is quick: a name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "spaces": "Box Part Specification",
    "energies": "EnergyModel MLP MLPEnergy MarginalEnergy MixtureDensity MixtureDensityEnergy ModuleEnergy Penalty "
    "Regression RegressionEnergy Residual ResidualEnergy Tilted TiltedEnergy WeightedSum",
    "samplers": "Langevin MALA DerivativeFree Constant Polynomial Exponential Collect StepInfo run",
    "certificate": "certify Certificate",
    "negatives": "Negatives Uniform GaussianMixture InBatch Proposed ShortChains LongChain Replay ReplayBuffer "
    "MarginalActions MarginalActionSampler Mixture",
    "objectives": "InfoNCE RankingNCE ImportanceNLL MCMC MaximumEntropy Likelihood PositiveL2 EntropyRegulariser "
    "GradientPenalty Terms contrast",
    "optimisers": "Adam Cosine Decay",
    "acting": "Search Direct Problem Found",
    "demonstrations": "Demonstrations DemonstrationError",
    "tasks": "Task Gym GymnasiumTask ParticleTask BatchedParticle ParticleEnv ParticleExpert collect_particle",
    "settings": "StorageError",
    "policy": "EnergyPolicy Policy Proposal Runner load",
    "recipes": "TRIALS Inputs Trial",
    "composition": "vary",
    "trainer": "Trainer fit",
    "runs": "Job resume train",
    "evaluation": "Evaluation evaluate wilson_interval",
    "regressor": "ConditionalEBMRegressor",
    "report": "write_report",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"cebm.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'cebm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
