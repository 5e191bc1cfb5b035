"""Claim 13: the gradient is that of the chain, the comparison is of like with like, and the rule."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cebm.energies import MLPEnergy
from cebm.losses import info_nce
from cebm.negatives import ShortChains, Source, chains
from cebm.recipes import find_trial, vary
from cebm.runs import trainer_of
from cebm.samplers import run
from reproduction.claims.through_chain import LABEL, THROUGH, ThroughChain, extra_gradient, job_of
from reproduction.ledger import Results
from reproduction.running import conclude, run_task
from reproduction.trainings import SMOKE, Result, Training, training

CLAIM = ThroughChain()
TOY = replace(SMOKE, steps=3, demonstrations=2, evaluate_every=2, evaluation_episodes=2)


def test_end_to_end(tmp_path: Path) -> None:
    """The computation and the claim's own training are run; the shared training is stood in for."""
    pytest.importorskip("matplotlib")
    tasks = CLAIM.tasks(TOY, [0])
    plain, through = (task for task in tasks if isinstance(task, Training))
    assert plain.key == training("ibc", TOY, 0).key and through.job.trial.objective.source.keep_graph
    (tmp_path / "runs").mkdir()
    logged = [{"step": 3, "info_nce": 2.0, "gradient_norm_last": 1.0}]
    stand_in = {"steps": 3, "curve": [{"step": 2, "success": 0.5}, {"step": 3, "success": 0.5}], "training": logged}
    record = {"result": stand_in, "commit": None}
    (tmp_path / "runs" / f"{plain.key}.json").write_text(json.dumps(record))
    for task in tasks:
        if task is not plain:
            run_task(task, tmp_path, tmp_path)
    finding = conclude(CLAIM, tasks, TOY, tmp_path)
    assert finding.verdict == "inconclusive"  # one seed has no interval
    assert [[step for step, _ in points] for points in finding.numbers["curves"][LABEL]] == [[2, 3]]
    assert min(finding.numbers["seconds_per_step"]["through"]) > 0
    assert min(finding.numbers["extra_gradient"]["rest"]) > 1e-4
    assert max(finding.numbers["extra_gradient"]["observation"]) < 1e-5
    assert json.loads((tmp_path / "13-through-chain.json").read_text())["rule"] == CLAIM.rule
    assert (tmp_path / "13-through-chain.png").stat().st_size > 5000


def test_the_two_runs_differ_in_the_graph_alone() -> None:
    trainers = [trainer_of(job_of(trial, TOY, 0)) for trial in (find_trial("ibc"), THROUGH)]
    losses = [float(trainer.step()["loss"]) for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    parameters = [torch.cat([p.flatten() for p in trainer.learner.parameters()]) for trainer in trainers]
    assert not torch.equal(*parameters)
    assert all(torch.equal(a, b) for a, b in zip(trainers[0]._batch(1), trainers[1]._batch(1), strict=True))


def test_the_gradient_is_that_of_the_loss_as_a_function_of_the_weights(generator: torch.Generator) -> None:
    """Against central differences, for which the chain runs anew, along what the two gradients differ by."""
    for _ in range(8):
        energy = MLPEnergy(3, 2, 16, init="torch", generator=generator).double()
        obs, actions = (2 * torch.rand(6, n, generator=generator).double() - 1 for n in (3, 2))
        seed = int(torch.randint(2**31, (), generator=generator))

        def loss(source: Source, energy=energy, obs=obs, actions=actions, seed=seed) -> Tensor:
            drawn = source.sample(energy, obs, actions, 4, torch.Generator().manual_seed(seed)).actions
            return info_nce(energy(obs, actions.unsqueeze(1))[:, 0], energy(obs, drawn))

        weights = list(energy.parameters())
        constant = torch.autograd.grad(loss(ShortChains()), weights)
        through = torch.autograd.grad(loss(ShortChains(keep_graph=True)), weights)
        direction = [a - b for a, b in zip(through, constant, strict=True)]
        norm = torch.cat([d.flatten() for d in direction]).norm()

        def along(step: float, weights=weights, direction=direction, norm=norm, loss=loss) -> float:
            values = []
            with torch.no_grad():
                for sign in (1, -2, 1):
                    for weight, change in zip(weights, direction, strict=True):
                        weight.add_(change, alpha=sign * step / float(norm))
                    values.append(loss(ShortChains()).item())
            return (values[0] - values[1]) / (2 * step)

        def dot(gradient: tuple[Tensor, ...], direction=direction, norm=norm) -> float:
            return float(sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)) / norm)

        coarse, fine = along(1e-6), along(5e-7)
        if norm > 1e-3 and abs(coarse - fine) < 1e-3 * norm:  # otherwise a kink lies between: another network
            assert abs(fine - dot(through)) < 1e-2 * norm
            assert abs(fine - dot(constant)) > 0.9 * norm  # planted: negatives held constant
            return
    pytest.fail("no network without a kink")


def test_without_the_graph_nothing_is_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(job_of(THROUGH, TOY, 0))
    objective, before = trainer.learner.objective, trainer.generator.get_state()
    assert extra_gradient(trainer)["rest"] > 1e-4
    assert trainer.learner.objective is objective and torch.equal(trainer.generator.get_state(), before)

    def planted(*args: Any, keep_graph: bool = False) -> Any:
        return run(*args)

    monkeypatch.setattr(chains, "run", planted)
    assert extra_gradient(trainer) == {"observation": 0.0, "rest": 0.0}


def test_only_chains_that_can_be_differentiated() -> None:
    with pytest.raises(ValueError, match="keep_graph needs a sampler with differentiable moves, not DerivativeFree"):
        vary(THROUGH, **{"objective.source.sampler": find_trial("dfo").acting.sampler})


def results_of(through: list[float], constant: list[float], slope: float = 1.0, loss: float = 1.0) -> Results:
    """`slope` and `loss` are the norm of the energy's gradient and InfoNCE at the end, through the chain; both are 1
    without."""

    def run_of(success: float, seed: int, slope: float, loss: float) -> Result:
        logged = [
            {"info_nce": 2.0, "gradient_norm_last": 9.0},
            {"info_nce": loss, "gradient_norm_last": slope + seed / 50},
        ]
        return {"steps": 1, "curve": [{"step": 1, "success": success}], "training": logged}

    computed = {
        "seconds_per_step": {"through": 0.6, "constant": 0.2},
        "extra_gradient": {"later": {"observation": 0.0, "rest": 0.1}},
    }
    return Results(
        {
            LABEL: [run_of(success, seed, slope, loss) for seed, success in enumerate(through)],
            "ibc": [run_of(success, seed, 1.0, 1.0) for seed, success in enumerate(constant)],
            "computation": [computed for _ in through],
        }
    )


LOW, HIGH = [0.50, 0.52, 0.54], [0.91, 0.90, 0.93]


@pytest.mark.parametrize(
    ("expected", "through", "constant"),
    [
        ("holds", HIGH, LOW),
        ("does not hold", LOW, HIGH),
        ("inconclusive", HIGH, [0.90, 0.93, 0.91]),
        ("inconclusive", HIGH[:1], LOW[:1]),
    ],
)
def test_the_rule(expected: str, through: list[float], constant: list[float]) -> None:
    finding = CLAIM.judge(results_of(through, constant))
    assert finding.verdict == expected
    assert finding.numbers["ratio"][0] == pytest.approx(3)


def test_comments_do_not_contradict_the_verdict() -> None:
    comments = {
        finding.verdict: finding.comment
        for finding in map(CLAIM.judge, (results_of(HIGH, LOW), results_of(LOW, HIGH), results_of(HIGH, HIGH)))
    }
    assert len(set(comments.values())) == len(comments) == 3


def test_a_flat_energy_is_spoken_of() -> None:
    flat = CLAIM.judge(results_of(LOW, HIGH, slope=0.1))
    assert "has the norm 0.12" in flat.comment and "is kept flat" in flat.comment
    assert "InfoNCE is 1 (1 to 1) through the chain" in flat.measured and "guessing gives 2.2." in flat.measured
    assert "is kept flat" not in CLAIM.judge(results_of(LOW, HIGH)).comment
    assert "ends lower with" in CLAIM.judge(results_of(LOW, HIGH, loss=2.0)).comment
    assert "ends lower with" not in flat.comment
    assert "is kept flat" not in CLAIM.judge(results_of(LOW, HIGH, slope=8.0)).comment
