"""The former place of `cebm.tasks.particle`."""

from cebm.tasks.particle import (
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
