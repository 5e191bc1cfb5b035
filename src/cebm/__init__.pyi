"""The public names, each from its room. `__init__.py` reads this file too."""

from cebm import testing as testing
from cebm.spaces import Box as Box, Part as Part, Specification as Specification
from cebm.energies import EnergyModel as EnergyModel, EnergySettings as EnergySettings, MLP as MLP
from cebm.energies import MLPEnergy as MLPEnergy, MarginalEnergy as MarginalEnergy, MixtureDensity as MixtureDensity
from cebm.energies import MixtureDensityEnergy as MixtureDensityEnergy, ModuleEnergy as ModuleEnergy
from cebm.energies import Penalty as Penalty, Regression as Regression, RegressionEnergy as RegressionEnergy
from cebm.energies import Residual as Residual, ResidualEnergy as ResidualEnergy, Tilted as Tilted
from cebm.energies import TiltedEnergy as TiltedEnergy, WeightedSum as WeightedSum
from cebm.samplers import MALA as MALA, Collect as Collect, Constant as Constant, DerivativeFree as DerivativeFree
from cebm.samplers import Exponential as Exponential, Langevin as Langevin, Polynomial as Polynomial
from cebm.samplers import Sampler as Sampler, StepInfo as StepInfo, run as run
from cebm.certificate import Certificate as Certificate, certify as certify
from cebm.negatives import GaussianMixture as GaussianMixture, InBatch as InBatch, LongChain as LongChain
from cebm.negatives import MarginalActionSampler as MarginalActionSampler, MarginalActions as MarginalActions
from cebm.negatives import Mixture as Mixture, Negatives as Negatives, Proposed as Proposed, Replay as Replay
from cebm.negatives import ReplayBuffer as ReplayBuffer, ShortChains as ShortChains, Uniform as Uniform
from cebm.objectives import MCMC as MCMC, EntropyRegulariser as EntropyRegulariser, GradientPenalty as GradientPenalty
from cebm.objectives import ImportanceNLL as ImportanceNLL, InfoNCE as InfoNCE, Likelihood as Likelihood
from cebm.objectives import MaximumEntropy as MaximumEntropy, PositiveL2 as PositiveL2, RankingNCE as RankingNCE
from cebm.objectives import Terms as Terms, contrast as contrast
from cebm.optimisers import Adam as Adam, Cosine as Cosine, Decay as Decay
from cebm.acting import Direct as Direct, Found as Found, Problem as Problem, Search as Search
from cebm.demonstrations import DemonstrationError as DemonstrationError, Demonstrations as Demonstrations
from cebm.tasks import BatchedParticle as BatchedParticle, Gym as Gym, GymnasiumTask as GymnasiumTask
from cebm.tasks import ParticleEnv as ParticleEnv, ParticleExpert as ParticleExpert, ParticleTask as ParticleTask
from cebm.tasks import Task as Task, collect_particle as collect_particle
from cebm.settings import StorageError as StorageError
from cebm.policy import EnergyPolicy as EnergyPolicy, Policy as Policy, Proposal as Proposal, Runner as Runner
from cebm.policy import load as load
from cebm.composition import vary as vary
from cebm.recipes import TRIALS as TRIALS, Inputs as Inputs, Trial as Trial
from cebm.trainer import Trainer as Trainer, fit as fit
from cebm.runs import Job as Job, resume as resume, train as train
from cebm.evaluation import Evaluation as Evaluation, evaluate as evaluate, wilson_interval as wilson_interval
from cebm.regressor import ConditionalEBMRegressor as ConditionalEBMRegressor
from cebm.report import write_report as write_report

__version__: str
