"""Tasks: the environments in which policies act, with their limits, experts and metrics.

Importing this module registers `cebm/Particle-v0`; so does `gymnasium.make("cebm.tasks:cebm/Particle-v0")`.
"""

import gymnasium

from cebm.tasks.base import (
    MOST_EPISODES,
    TEST_SEED,
    VALIDATION_SEED,
    Actor,
    Handle,
    RollOut,
    Sketch,
    Task,
    TaskError,
)
from cebm.tasks.forks import ENV_ID as FORKS_ID
from cebm.tasks.forks import BatchedForks, Forks, ForksEnv, ForksExpert
from cebm.tasks.gym import Gym, GymnasiumTask, MadeEnvironments, OneEnvironment
from cebm.tasks.lookup import SHIPPED, as_task, shipped, task_of
from cebm.tasks.metaworld import MetaWorld, MetaWorldEnv, MetaWorldExpert
from cebm.tasks.particle import (
    ENV_ID,
    BatchedParticle,
    ParticleEnv,
    ParticleExpert,
    ParticleOutcome,
    ParticleTask,
    collect_particle,
)
from cebm.tasks.pusht import ENV_ID as PUSHT_ID
from cebm.tasks.pusht import PushT, PushTEnv

__all__ = [
    "ENV_ID",
    "FORKS_ID",
    "MOST_EPISODES",
    "PUSHT_ID",
    "SHIPPED",
    "TEST_SEED",
    "VALIDATION_SEED",
    "Actor",
    "BatchedForks",
    "BatchedParticle",
    "Forks",
    "ForksEnv",
    "ForksExpert",
    "Gym",
    "GymnasiumTask",
    "Handle",
    "MadeEnvironments",
    "MetaWorld",
    "MetaWorldEnv",
    "MetaWorldExpert",
    "OneEnvironment",
    "ParticleEnv",
    "ParticleExpert",
    "ParticleOutcome",
    "ParticleTask",
    "PushT",
    "PushTEnv",
    "RollOut",
    "Sketch",
    "Task",
    "TaskError",
    "as_task",
    "collect_particle",
    "shipped",
    "task_of",
]

# No `max_episode_steps`: the length is a setting of the task, and the environment ends its own episodes.
if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="cebm.tasks.particle:ParticleEnv")
if PUSHT_ID not in gymnasium.registry:
    gymnasium.register(id=PUSHT_ID, entry_point="cebm.tasks.pusht:PushTEnv", max_episode_steps=300)
if FORKS_ID not in gymnasium.registry:
    gymnasium.register(id=FORKS_ID, entry_point="cebm.tasks.forks:ForksEnv")
