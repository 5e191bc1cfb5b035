"""cebm: conditional energy-based models for implicit policies.

`import cebm` is quick: a name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "spaces": "Box",
    "energy": "EnergyModel ModuleEnergy Penalty WeightedSum",
    "networks": "MLPEnergy ResidualEnergy MarginalEnergy JointEnergy",
    "samplers": "Langevin MALA DerivativeFree Constant Polynomial Exponential Collect run",
    "certificate": "certify Certificate",
    "negatives": "Negatives Uniform GaussianMixture InBatch ShortChains LongChain Replay MarginalActionSampler Mixture",
    "demonstrations": "Demonstrations DemonstrationError",
    "envs": "ParticleTask BatchedParticle ParticleEnv ParticleExpert collect_particle",
    "policy": "ImplicitPolicy ExplicitPolicy Network Proposal Runner load",
    "evaluation": "Evaluation evaluate wilson_interval",
    "trials": "TRIALS Trial",
    "trainer": "Trainer fit",
    "training": "Job resume train",
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
