"""What files of earlier formats mean today: JSON in, JSON out. Nothing else in the library knows the old words."""

from typing import Any

from torch import Tensor

from cebm.settings import StorageError
from cebm.storage import take

Json = dict[str, Any]

_SAMPLERS = "Langevin MALA DerivativeFree Constant Polynomial Exponential"
_TYPES = {name: f"cebm.samplers:{name}" for name in _SAMPLERS.split()}
_TYPES["ParticleTask"] = "cebm.tasks.particle:ParticleTask"

_OBJECTIVES = {
    "info-nce": "InfoNCE",
    "ranking-nce": "RankingNCE",
    "nll": "ImportanceNLL",
    "mcmc": "MCMC",
    "maxent": "MaximumEntropy",
}
_STATELESS = {
    "uniform": "Uniform",
    "in-batch": "InBatch",
    "gaussian-mixture": "GaussianMixture",
    "proposal": "Proposed",
}


def piece(old: Any, where: str) -> Any:
    """A sampler, schedule or task of the old format: the same fields under a name with a module."""
    if not isinstance(old, dict):
        return old
    fields = {name: piece(value, where) for name, value in old.items() if name != "type"}
    if "type" not in old:
        return fields
    if old["type"] not in _TYPES:
        raise StorageError(f"{where}: unknown type {old['type']!r}")
    return {"type": _TYPES[old["type"]], **fields}


def energy(network: Any, where: str) -> tuple[Json, float]:
    """Settings of the energy, and the smoothing, which was one of the network's."""
    if not isinstance(network, dict):
        raise StorageError(f"{where}: the network's settings are missing")

    def of(module: str, *names: str, **fields: Any) -> Json:
        return {"type": f"cebm.energies.{module}", **{name: take(network, name, where) for name in names}, **fields}

    kind = take(network, "kind", where)
    shared = ("width", "dropout", "init", "spectral_norm")
    depth = take(network, "hidden_layers", where)
    mlp = of("feedforward:MLP", *shared, hidden_layers=depth)
    mixture = of("density:MixtureDensity", "width", "init", "components", hidden_layers=depth)
    kinds = {
        "mlp": mlp,
        "residual": of("feedforward:Residual", *shared, blocks=depth),
        "regression": of("density:Regression", "width", "init", hidden_layers=depth),
        "mixture-density": mixture,
        "tilted": {
            "type": "cebm.energies.tilted:Tilted",
            "tilt": mlp,
            "base": {**mixture, "init": "torch"},
            "base_sees": "observation" if take(network, "proposal", where) == "conditional" else "nothing",
        },
    }
    if kind not in kinds:
        raise StorageError(f"{where}: there is no {kind!r} network")
    return kinds[kind], take(network, "smoothing", where)


def acting(old: Json, sampler: Any, explicit: bool, where: str) -> Json:
    """A policy's way to act."""
    if explicit:
        return {"type": "cebm.acting:Direct"}
    search = {name: take(old, name, where) for name in ("candidates", "choice", "keep")}
    return {"type": "cebm.acting:Search", "sampler": piece(sampler, where), **search}


def _explicit(network: Json) -> bool:
    return network["kind"] in ("regression", "mixture-density")


def _source(old: Json, where: str) -> Json:
    kind, sampler = take(old, "negatives", where), piece(take(old, "sampler", where), where)
    if kind in _STATELESS:
        return {"type": f"cebm.negatives:{_STATELESS[kind]}"}
    if kind == "long-chain":
        return {
            "type": "cebm.negatives:LongChain",
            "sampler": sampler,
            "burn_in": old["burn_in"],
            "thin": old["thin"],
        }
    if kind == "replay":
        capacity = old["replay_capacity"]
        return {"type": "cebm.negatives:Replay", "sampler": sampler, "capacity": capacity, "joint": True}
    if kind == "mas":
        return {
            "type": "cebm.negatives:MarginalActions",
            "sampler": sampler,
            "objective": old["marginal_objective"],
            "positive_l2": old["marginal_l2"],
            "width": old["marginal_width"],
        }
    return {"type": "cebm.negatives:ShortChains", "sampler": sampler, "keep_graph": old.get("through_chain", False)}


def trial(old: Json, where: str) -> Json:
    """A trial of strings and flags, as a composition."""
    network, smoothing = energy(take(old, "network", where), where)
    count = take(old, "negative_count", where)
    if take(old, "objective", where) == "likelihood":
        objective: Json = {"type": "cebm.objectives:Likelihood", "count": count}
    else:
        name = _OBJECTIVES[old["objective"]]
        objective = {"type": f"cebm.objectives:{name}", "source": _source(old, where), "count": count}
        if name in ("MCMC", "MaximumEntropy"):  # the weight of the positive energies belongs to these losses today
            objective["anchor"] = old.get("positive_l2", 0.0)
    penalties = [
        {"type": f"cebm.objectives:{name}", "weight": old[weight], **more}
        for name, weight, more in (
            ("PositiveL2", "positive_l2", {}),
            ("EntropyRegulariser", "entropy_weight", {}),
            ("GradientPenalty", "gradient_penalty", {"margin": old.get("gradient_margin", 1.0)}),
        )
        if old.get(weight) and not (name == "PositiveL2" and "anchor" in objective)
    ]
    schedule: Json = {"type": "cebm.optimisers:Cosine"}
    if old.get("schedule", "decay") == "decay":
        schedule = {"type": "cebm.optimisers:Decay", "factor": old["decay"], "epochs": old["decay_epochs"]}
    return {
        "type": "cebm.recipes:Trial",
        "energy": network,
        "objective": objective,
        "penalties": penalties,
        "optimiser": {
            "type": "cebm.optimisers:Adam",
            "learning_rate": old["learning_rate"],
            "schedule": schedule,
            "batch_size": old["batch_size"],
            "average": old["ema"],
        },
        "acting": acting(old, take(old, "acting", where), _explicit(old["network"]), where),
        "inputs": {
            "type": "cebm.recipes:Inputs",
            **{name: old[name] for name in ("obs_scaling", "history", "horizon")},
            "smoothing": smoothing,
        },
    }


def job(old: Json, where: str) -> Json:
    """The settings of a run."""
    try:
        changed = {"trial": trial(take(old, "trial", where), where), "task": piece(old.get("task"), where)}
    except (KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{where}: a run of an earlier format, and not a whole one ({error!r})") from error
    return {**old, "type": "cebm.runs:Job", **changed}


def with_learned_constants(job: Json) -> Json:
    """A run that began before constant actions were given back exactly goes on learning them: its weights are made for
    all columns."""
    trial = job.get("trial")
    inputs = trial.get("inputs") if isinstance(trial, dict) else None
    if not isinstance(trial, dict) or not isinstance(inputs, dict) or "constants" in inputs:
        return job
    return {**job, "trial": {**trial, "inputs": {**inputs, "constants": "learn"}}}


def upgraded_policy(header: Json, tensors: dict[str, Tensor], where: str) -> tuple[Json, dict[str, Tensor]]:
    """Header and tensors of a policy of format 2."""
    network = take(header, "network", where)
    settings, smoothing = energy(network, where)
    tensors = {name.replace("energy.proposal.", "energy.base.", 1): value for name, value in tensors.items()}
    history, horizon = take(header, "history", where), take(header, "horizon", where)
    columns = []
    for name, count in (("obs", history), ("act", horizon)):
        dim = take(tensors, f"{name}_box.centre", where).shape[0]
        if not isinstance(count, int) or count < 1 or dim % count:
            raise StorageError(f"{where}: {count!r} observations or actions do not make {dim} columns")
        columns.append(dim // count)
    explicit = _explicit(network)
    if explicit != (take(header, "kind", where) == "ExplicitPolicy"):
        raise StorageError(f"{where}: a {network['kind']!r} network does not make an {header['kind']}")
    new = {
        **{name: take(header, name, where) for name in ("obs_margin", "act_margin")},
        "energy": settings,
        "acting": acting(header, header.get("sampler"), explicit, where),
        "spec": {
            "type": "cebm.spaces:Specification",
            "parts": [{"type": "cebm.spaces:Part", "name": "obs", "shape": [columns[0]]}],
            "action": columns[1],
            "history": history,
            "horizon": horizon,
            "smoothing": smoothing,
        },
    }
    return new, tensors


def upgraded_checkpoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint of format 1 under today's names."""
    joint = any(name.startswith("learner.energy.network.") for name in tensors)
    names = {
        "learner.energy.proposal.": "learner.energy.base.",
        "average.proposal.": "average.base.",
        "learner.source.": "learner.pieces.source.",
        **({"learner.energy.network.": "learner.energy."} if joint else {}),
    }

    def renamed(name: str) -> str:
        for old, new in names.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return {renamed(name): value for name, value in tensors.items()}
