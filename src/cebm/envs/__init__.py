"""Gymnasium environments and their scripted experts.

Importing this module registers `cebm/Particle-v0`; so does `gymnasium.make("cebm.envs:cebm/Particle-v0")`.
"""

import gymnasium

from cebm.envs.particle import (
    ENV_ID,
    BatchedParticle,
    ParticleEnv,
    ParticleExpert,
    ParticleOutcome,
    ParticleTask,
    collect_particle,
)

__all__ = [
    "ENV_ID",
    "BatchedParticle",
    "ParticleEnv",
    "ParticleExpert",
    "ParticleOutcome",
    "ParticleTask",
    "collect_particle",
]

# No `max_episode_steps`: the length is a setting of the task, and the environment ends its own episodes.
if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="cebm.envs.particle:ParticleEnv")
