"""The study behind docs/stability.md: trains a case for each seed, then measures its checkpoints.

    python -m benchmarks.stability steady-2d-2000 --seeds 0 1 2 3 4 --out docs/stability

Every run is an ordinary run directory under --runs and resumes where it stopped; a measured run is one JSON file
`CASE-SEED.json` under --out, and is not measured again. One thread, so that two can run side by side.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from cebm.acting import Found, Problem, Search
from cebm.energies import MLP, EnergyModel
from cebm.energies.base import Actions, Context, Energies, Obs
from cebm.evaluation import TEST_SEED, evaluate
from cebm.objectives import GradientPenalty
from cebm.optimisers import Cosine, Decay
from cebm.policy import EnergyPolicy
from cebm.recipes import TRIALS, Trial, vary
from cebm.runs import Job, load_checkpoint, resume, train, trainer_of
from cebm.samplers import Constant, Langevin, LangevinState, StepInfo, run
from cebm.tasks import ParticleTask
from cebm.trainer import Trainer

STEADY, IBC = TRIALS["steady"], TRIALS["ibc"]
PLANE, RANDOM_ORDER = ParticleTask(), ParticleTask(random_order=True)


@dataclass(frozen=True)
class Case:
    """What is trained, and what is measured of it."""

    trial: Trial
    task: ParticleTask = PLANE
    episodes: int = 2000
    steps: int = 10_000
    procedures: tuple[str, ...] = ("as-trained",)
    """Ways to act, each tried on the same weights."""
    every: int = 0
    """Also measure the second half of training, every so many steps, with the first procedure."""
    at: tuple[int, ...] = ()
    """Checkpoints at which all procedures are tried, besides the last."""
    eval_episodes: int = 200


HOW = ("as-trained", "minimum", "proposal-only")
LONGER = (*HOW, "three-steps")
CORRECTION = ("corrected", "corrected-box", "corrected-draw", "uncorrected")
CHAINS = ("raw", "averaged", "averaged-softmax", "averaged-16", "averaged-40-steps", "averaged-normalised")
_IBC_AVERAGED = vary(IBC, average=0.995)
_WIDE = vary(STEADY, **{"energy.base.spread": 0.5})
CASES = {
    "steady-2d-2000": Case(STEADY, procedures=LONGER, every=500),
    "steady-2d-300": Case(STEADY, episodes=300, procedures=LONGER, every=500),
    "steady-16d": Case(STEADY, ParticleTask(dim=16), steps=5000, procedures=LONGER),
    "steady-32d": Case(STEADY, ParticleTask(dim=32), steps=5000, procedures=LONGER),
    # Components that begin wide: none takes all data for itself before the others have learned.
    **{
        f"steady-{dim}d-wide": Case(_WIDE, ParticleTask(dim=dim), steps=5000, procedures=LONGER) for dim in (16, 32, 64)
    },
    "steady-2d-2000-wide": Case(_WIDE, procedures=LONGER),
    "steady-random-order": Case(STEADY, RANDOM_ORDER, steps=5000, procedures=LONGER),
    "steady-random-order-history": Case(vary(STEADY, history=8), RANDOM_ORDER, steps=5000, procedures=LONGER),
    "ibc-2d-300": Case(_IBC_AVERAGED, episodes=300, procedures=CHAINS, every=1000, at=(1000, 3000), eval_episodes=100),
}


# What the regression test in tests/test_training.py may expect.
CASES["steady-short"] = Case(STEADY, episodes=300, steps=1000, eval_episodes=100)
# Longer than the ablations: it learns more slowly.
CASES["ibc-penalty"] = Case(
    replace(_IBC_AVERAGED, penalties=(GradientPenalty(1.0, margin=10.0),)),
    steps=3000,
    procedures=("raw", "averaged", "averaged-softmax"),
    at=(1000, 2000),
)


def _ablation(trial: Trial, *procedures: str) -> Case:
    halfway = (1000,) if "as-trained" in procedures else ()  # where acting takes little time
    return Case(trial, steps=2000, procedures=procedures, at=halfway)


# One change at a time, from the published recipe towards ours and back; 2,000 steps, 2,000 demonstrations. The search
# of `steady` had three steps then.
_THREE = vary(STEADY, **{"acting.sampler.steps": 3})
CASES |= {
    "ablation-ibc": _ablation(_IBC_AVERAGED, "raw", "averaged", "averaged-softmax"),
    "ablation-ibc-rate": _ablation(
        vary(
            _IBC_AVERAGED,
            energy=MLP(init="torch"),
            obs_scaling="standardise",
            learning_rate=3e-3,
            **{"optimiser.schedule": Cosine()},
        ),
        "raw",
        "averaged",
        "averaged-softmax",
    ),
    "ablation-ibc-smoothing": _ablation(vary(_IBC_AVERAGED, smoothing=0.05), "raw", "averaged", "averaged-softmax"),
    "marginal-in-batch": _ablation(vary(TRIALS["in-batch-corrected"], average=0.995), *CORRECTION),
    "marginal-mas": _ablation(vary(TRIALS["ibc-mas-corrected"], average=0.995), *CORRECTION),
    "ablation-steady": _ablation(_THREE, *HOW),
    "ablation-steady-min-max": _ablation(vary(_THREE, obs_scaling="min-max"), *HOW),
    "ablation-steady-rate-0.001": _ablation(vary(_THREE, learning_rate=1e-3), *HOW),
    "ablation-steady-no-average": _ablation(vary(_THREE, average=0.0), *HOW),
    "ablation-steady-no-cosine": _ablation(vary(_THREE, **{"optimiser.schedule": Decay()}), *HOW),
    "ablation-steady-smoothing-0.01": _ablation(
        vary(
            _THREE,
            smoothing=0.01,
            **{"acting.sampler": Langevin("ibc", 3, Constant(2 * 0.01**2), noise=0.0)},
        ),
        *HOW,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=Path("runs/stability"))
    parser.add_argument("--out", type=Path, default=Path("docs/stability"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for name in arguments.cases:
            record = arguments.out / f"{name}-{seed}.json"
            if record.exists():
                continue
            measured = measure(CASES[name], name, seed, arguments.runs / f"{name}-{seed}")
            record.write_text(json.dumps(measured, indent=1) + "\n")
            print(name, seed, {key: value["success"] for key, value in measured["last"].items()}, flush=True)


def measure(case: Case, name: str, seed: int, directory: Path) -> dict[str, Any]:
    """Trains, unless that is done, and measures."""
    job = Job(
        name,
        case.trial,
        case.task,
        episodes=case.episodes,
        steps=case.steps,
        seed=seed,
        log_every=50,
        evaluate_every=case.steps,
        checkpoint_every=500,
        keep_checkpoints=0,
        evaluation_episodes=100,
    )
    outcome = resume(directory) if (directory / "run.json").exists() else train(job, directory)
    trainer = trainer_of(job)
    result: dict[str, Any] = {
        "case": name,
        "seed": seed,
        "steps": case.steps,
        "demonstrations": case.episodes,
        "dim": case.task.dim,
        "random_order": case.task.random_order,
        "history": case.trial.inputs.history,
        "episodes": case.eval_episodes,
        "training_seconds": outcome.metrics[-1]["seconds"],
        "training": [
            {key: value for key, value in row.items() if key not in ("kind", "seconds", "steps_per_second")}
            for row in outcome.metrics
            if row["kind"] == "train" and row["step"] % 500 == 0
        ],
        "checkpoints": {},
    }
    second_half = range(case.steps // 2, case.steps + 1, case.every) if case.every else ()
    for step in sorted({*case.at, *second_half, case.steps}):
        _, tensors = load_checkpoint(directory / "checkpoints" / f"step-{step:08d}")
        trainer.load_state(tensors, step)
        thorough = step in case.at or step == case.steps
        ways = case.procedures if thorough else case.procedures[:1]
        rows = {way: success(trainer, way, case) for way in ways}
        result["checkpoints"][str(step)] = rows | ({"energy": energies(trainer)} if thorough else {})
    result["last"] = {way: result["checkpoints"][str(case.steps)][way] for way in case.procedures}
    return result


@dataclass(frozen=True)
class NormalisedDescent:
    """y' = y − r_k ∇E/‖∇E‖, r_k falling from 0.5 to 0.005 by a constant factor: the energy's scale plays no part."""

    steps: int = 10

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> LangevinState:
        return LangevinState(start)

    def step(
        self, energy: EnergyModel, context: Context, state: LangevinState, k: int, generator: torch.Generator
    ) -> tuple[LangevinState, StepInfo]:
        energies, gradients = energy.energies_and_gradients(context, state.actions)
        norm = gradients.norm(dim=-1, keepdim=True)
        radius = 0.5 * 0.01 ** (k / (self.steps - 1))
        actions = (state.actions - radius * gradients / norm.clamp_min(1e-12)).clamp(-1.1, 1.1)
        none = torch.zeros_like(norm.mean())
        return LangevinState(actions), StepInfo(energies.mean(), norm.mean(), none, none + 1)


@dataclass(frozen=True)
class SoftmaxOfCandidates:
    """Takes candidate i, where the search has left it, with probability ∝ exp(−Eᵢ)."""

    inner: Search = Search()

    def search(self, problem: Problem) -> Found:
        found = self.inner.search(problem)
        drawn = torch.multinomial((-found.energies).softmax(1), 1, generator=problem.generator)
        return replace(found, chosen=drawn[:, 0])


class WithoutProposal(EnergyModel):
    """The same energy, searched from the box and not from draws of its proposal."""

    def __init__(self, energy: EnergyModel) -> None:
        super().__init__()
        self.energy, self.obs_dim, self.act_dim = energy, energy.obs_dim, energy.act_dim
        self.closed_form = energy.closed_form

    def encode(self, obs: Obs) -> Context:
        return self.energy.encode(obs)

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.energy.energies(context, actions)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        return self.energy.energies_and_gradients(context, actions)


def _searching(policy: EnergyPolicy, **changes: Any) -> EnergyPolicy:
    """The policy with other settings of its search."""
    return replace(policy, acting=vary(policy.acting, **changes))


def _corrected(policy: EnergyPolicy, way: str) -> EnergyPolicy:
    """The policy with or without the correction by p̂(y), as the names in `CORRECTION` say."""
    if way == "uncorrected":
        policy = replace(policy, energy=policy.energy.contrasted)
    if way == "corrected-box":
        policy = replace(policy, energy=WithoutProposal(policy.energy))
    return _searching(policy, choice="draw" if way == "corrected-draw" else "minimum")


def acting(trainer: Trainer, way: str) -> tuple[EnergyPolicy, dict[str, Any]]:
    """The policy and its effort."""
    policy = trainer.policy()
    if way == "as-trained":
        return policy, {}
    if way == "three-steps":
        return policy, {"steps": 3}
    if way == "minimum":
        return _searching(policy, choice="minimum"), {}
    if way == "proposal-only":  # one draw, so that there is nothing for the tilt to choose from
        return _searching(policy, choice="draw"), {"candidates": 1}
    if way in CORRECTION:
        return _corrected(policy, way), {"candidates": 64}
    if way.startswith("raw"):
        policy = replace(policy, energy=trainer.learner.energy)
    if way == "averaged-normalised":
        policy = _searching(policy, sampler=NormalisedDescent())
    if way.endswith("softmax"):
        policy = replace(policy, acting=SoftmaxOfCandidates(policy.acting))  # type: ignore[arg-type]  # a Search
    if way == "averaged-40-steps":
        return policy, {"candidates": 64, "steps": 40}
    return policy, {"candidates": 16 if way == "averaged-16" else 64}


def success(trainer: Trainer, way: str, case: Case) -> dict[str, float]:
    policy, effort = acting(trainer, way)
    began = perf_counter()
    found = evaluate(policy, case.task, episodes=case.eval_episodes, seed=TEST_SEED, latency_calls=100, **effort)
    wanted = ("success", "min_distance_first", "min_distance_second", "action_ms_p50", "action_ms_p99")
    summary = found.summary()
    return {key: summary[key] for key in wanted} | {"seconds": perf_counter() - began}


def energies(trainer: Trainer) -> dict[str, float]:
    """The landscape on 256 validation pairs: range over the box, gradients there and at the demonstrated action, and
    how much of the acting search is clipped."""
    policy = trainer.policy()
    obs, actions = trainer._normalised(trainer.validation, slice(0, 256))
    generator = torch.Generator().manual_seed(0)
    box = torch.rand(len(obs), 64, actions.shape[1], generator=generator) * 2.2 - 1.1
    with torch.no_grad():
        context = policy.energy.encode(obs)
        everywhere, slopes = policy.energy.energies_and_gradients(context, box)
        at_data, slopes_data = policy.energy.energies_and_gradients(context, actions.unsqueeze(1))
        sampler = getattr(policy.acting, "sampler", None)
        info = None if sampler is None else run(sampler, policy.energy, context, box, generator).info
    spread = everywhere.max(1).values - everywhere.min(1).values
    return {
        "range": float(spread.mean()),
        "gradient_norm_box": float(slopes.norm(dim=-1).mean()),
        "gradient_norm_data": float(slopes_data.norm(dim=-1).mean()),
        "mean_box": float(everywhere.mean()),
        "mean_data": float(at_data.mean()),
        "clipped_acting": float(info.clipped.mean()) if info is not None else 0.0,
    }


if __name__ == "__main__":
    main()
