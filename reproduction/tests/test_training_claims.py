"""The claims that are decided by trainings: their rules by hand-made results, their code end to end at toy size."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cebm.demonstrations import Demonstrations
from cebm.engines import Local
from cebm.objectives import MCMC, MaximumEntropy
from cebm.recipes import find_trial, vary
from cebm.samplers import Langevin
from cebm.tasks import ParticleTask, collect_particle
from cebm.trainer import Trainer
from reproduction import anchoring
from reproduction.claims import chains, dimensions, joint, mcmc_loss, noise
from reproduction.claims.chains import Chains
from reproduction.claims.dimensions import Dimensions, skill
from reproduction.claims.joint import EARLY, FREE, Joint, five_epochs
from reproduction.claims.maxent import BESIDE, LITTLE, MaxEnt, beside
from reproduction.claims.mcmc_loss import McmcLoss, no_better
from reproduction.claims.noise import Noise
from reproduction.intervals import Interval, Verdict, all_parts
from reproduction.ledger import Claim, Finding, Results
from reproduction.running import draw, reproduce
from reproduction.tests.test_formulation import run_short
from reproduction.trainings import PAPER, SMOKE, Result, Training, bare, training

CLAIMS: tuple[Claim, ...] = (Noise(), Chains(), McmcLoss(), MaxEnt(), Joint(), Dimensions())
TINY = replace(SMOKE, steps=6, demonstrations=1, many=1, evaluate_every=6, evaluation_episodes=1)


# ---------------------------------------------------------------------------------------------- hand-made results


def result(
    success: float = 0.5,
    *,
    train: float = 0.1,
    validation: float = 0.1,
    entropy: float = 0.0,
    information: float = 1.0,
    distances: tuple[float, float] = (1.0, 1.0),
) -> Result:
    """What `measure` gives, as far as these claims read it; the distances are those of the two halves of training."""
    row = {"step": 100, "success": success, "train_action_error": train, "validation_action_error": validation}
    row |= {"mi_bound": information}
    return {
        "steps": 100,
        "curve": [row | {"step": 49, "success": 0.0, "train_action_error": 9.0, "validation_action_error": 9.0}, row],
        "training": [
            {
                "step": step,
                "negative_distance": distances[step > 50],
                "energy_gap": step / 10,
                "clipped": step / 200,
                "gradient_norm_last": step / 4,
            }
            for step in (10, 30, 50, 51, 75, 100)
        ],
        "last": {"success": success},
        "raw": {"success": success},
        "conditional_entropy": entropy,
        "mutual_information": information,
        "coarse": 0.0,
    }


def judged(claim: Claim, made: Callable[[str, int], Result], seeds: int = 5) -> Finding:
    """The finding on results that are a function of label and seed."""
    tasks = {task.key: task for task in claim.tasks(PAPER, range(seeds))}
    known = {key: made(task.label, task.seed) for key, task in tasks.items()}
    while more := [task for task in claim.further(PAPER, range(seeds), known) if task.key not in known]:
        tasks |= {task.key: task for task in more}
        known |= {task.key: made(task.label, task.seed) for task in more}
    return claim.judge(Results.of(tasks.values(), known))


def by_success(claim: Claim, success: dict[str, float], spread: float = 0.01) -> Verdict:
    """The verdict where each trial has this success, and seeds differ by `spread` in each trial on its own."""

    def made(label: str, seed: int) -> Result:
        family = next((name for name in success if label.startswith(f"{name}-anchored")), label)
        return result(success[family] + spread * wave(family, seed))

    return judged(claim, made).verdict


def wave(label: str, seed: int) -> float:
    """Deviations of five seeds, of variance 1 and uncorrelated between the trials of a claim."""
    angle = 2 * math.pi * seed / 5
    waves = (math.cos(angle), math.sin(angle), math.cos(2 * angle), math.sin(2 * angle))
    return math.sqrt(8 / 5) * waves[{"ibc": 0, "correct": 1, EARLY: 2, "short-chains": 2, LITTLE: 2}.get(label, 3)]


# ---------------------------------------------------------------------------------------------- end to end


@pytest.mark.usefixtures("unchecked_shapes")  # for the time they take; test_training.py checks those of every trial
def test_all_claims_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer values of what is swept, for the time it takes.
    monkeypatch.setattr(noise, "SIGMAS", (1.0, 0.1))
    monkeypatch.setattr(dimensions, "DIMENSIONS", (2, 3))
    out, runs = tmp_path / "results", tmp_path / "runs"
    tasks = {task.key: task for claim in CLAIMS for task in (*claim.tasks(TINY, [0]), *claim.further(TINY, [0], {}))}
    assert (
        sum(task.label.startswith(("mcmc-loss-anchored", "conditional-maxent-anchored")) for task in tasks.values())
        == 6
    )
    for task in tasks.values():
        run_short(task, out, runs)
    findings = reproduce(CLAIMS, TINY, 1, Local(1), out, runs)  # nothing is missing, so it only judges
    for claim in CLAIMS:
        record = json.loads((out / f"{claim.number:02d}-{claim.slug}.json").read_text())
        assert record["verdict"] == findings[claim.slug].verdict == "inconclusive"  # one seed decides nothing
        assert (out / f"{claim.number:02d}-{claim.slug}.png").stat().st_size > 5000

    def of(slug: str, *path: Any) -> Any:
        value: Any = findings[slug].numbers
        for part in path:
            value = value[part]
        return value

    # What is told of a trial is what its run measured.
    ibc = json.loads((out / "runs" / f"{training('ibc', TINY, 0).key}.json").read_text())["result"]
    rows = [row["negative_distance"] for row in ibc["training"] if row["step"] > 3]
    assert of("noise", "values", "distance", 1, 0) == pytest.approx(np.mean(rows))
    assert of("noise", "values", "entropy", 1, 0) == ibc["conditional_entropy"]
    assert of("joint", "success", "ibc") == [ibc["last"]["success"]]
    for slug in ("chains", "mcmc-loss", "maxent", "joint"):
        if slug != "joint":
            assert of(slug, "success", "ibc") == [ibc["curve"][-1]["success"]]
            assert of(slug, "last", "ibc") == [ibc["last"]["success"]]
        assert of(slug, "curves", "ibc", 0, -1) == (6.0, ibc["curve"][-1]["success"])
    assert of("joint", "errors", "ibc", "validation", 0) == ibc["curve"][-1]["validation_action_error"]
    key = dimensions.in_dimensions("ibc", 2, TINY, 0, "").key
    planar = json.loads((out / "runs" / f"{key}.json").read_text())["result"]["curve"][-1]
    assert planar["step"] == TINY.steps // 2
    assert of("dimensions", "skill", "ibc", 0, 0) == skill(planar["validation_action_error"], 2)
    # An untrained energy is flat: its density is uniform on [-1.1, 1.1], and knows nothing of the observation. The
    # actions of demonstrations of three steps never change, so that one column of them is left to learn.
    assert of("noise", "values", "entropy", 0, 0) == pytest.approx(math.log(2.2), abs=0.05)
    assert of("noise", "values", "information", 0, 0) == pytest.approx(0, abs=0.05)
    # Five epochs are five steps here, where an epoch is one batch.
    early = next(task for task in tasks.values() if task.label == EARLY)
    assert json.loads((out / "runs" / f"{early.key}.json").read_text())["result"]["curve"][-1]["step"] == 5


def test_claims_share_the_trainings_that_they_can() -> None:
    plain = training("ibc", PAPER, 0).key
    keys = {claim.slug: {task.key for task in claim.tasks(PAPER, range(claim.most_seeds))} for claim in CLAIMS}
    for slug in ("noise", "chains", "mcmc-loss", "maxent", "joint"):
        assert plain in keys[slug]
    assert training("correct", PAPER, 4).key in keys["chains"] & keys["maxent"]
    sizes = {slug: len(found) for slug, found in keys.items()}
    assert sizes == {"noise": 15, "chains": 20, "mcmc-loss": 13, "maxent": 26, "joint": 18, "dimensions": 45}
    assert len(set().union(*keys.values())) == 5 * 9 + 3 + 2 * 3 + 3 + 3 * 3 + 45


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.slug)
def test_findings_are_plain_json_and_enough_for_the_figure(claim: Claim, tmp_path: Path) -> None:
    finding = judged(claim, lambda label, seed: result(0.1 * seed, train=0.1 + 0.01 * seed), seeds=3)
    numbers = json.loads(json.dumps(finding.numbers, allow_nan=False))
    draw(claim, replace(finding, numbers=numbers), tmp_path)
    assert (tmp_path / f"{claim.number:02d}-{claim.slug}.png").stat().st_size > 5000
    for text in (claim.statement, claim.protocol, claim.metric, claim.rule, finding.measured, finding.comment):
        assert text.endswith(".")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.slug)
def test_a_run_that_diverges_is_judged_and_drawn_too(claim: Claim, tmp_path: Path) -> None:
    def made(label: str, seed: int) -> Result:
        whole = result(0.5)
        # Its curve is filled up by what measures it, its log ends where it does.
        return whole | {"diverged": "the loss is nan", "training": whole["training"][:2]} if seed == 1 else whole

    finding = judged(claim, made, seeds=3)
    draw(claim, replace(finding, numbers=json.loads(json.dumps(finding.numbers, allow_nan=False))), tmp_path)
    assert (tmp_path / f"{claim.number:02d}-{claim.slug}.png").stat().st_size > 5000


def test_parts_make_a_whole() -> None:
    assert all_parts(["holds", "holds"]) == "holds"
    assert all_parts(["holds", "inconclusive"]) == "inconclusive"
    assert all_parts(["inconclusive", "does not hold", "holds"]) == "does not hold"


# ---------------------------------------------------------------------------------------------- 4, noise


def sweep(
    entropy: float, distance: float, information: float, spread: float = 0.01, at: float = 2.0
) -> Callable[[str, int], Result]:
    """Results that change by so much with every factor of ten of σ; slopes differ by `spread` between seeds."""

    def made(label: str, seed: int) -> Result:
        decades = math.log10(float(label.removeprefix("ibc-noise-")))
        off = spread * (seed - 1) * decades
        return result(
            entropy=entropy * decades + off,
            information=at + information * decades + off,
            distances=(7.0 - seed, 1 + distance * decades + off),
        )

    return made


def test_noise_verdicts() -> None:
    def verdict(*slopes: float, spread: float = 0.002, at: float = 2.0) -> Verdict:
        return judged(Noise(), sweep(*slopes, spread=spread, at=at), seeds=3).verdict

    assert verdict(0.5, 0.1, -0.5) == "holds"
    assert verdict(-0.5, -0.1, 0.5) == "does not hold"
    for reversed_part in ((-0.5, 0.1, -0.5), (0.5, -0.1, -0.5), (0.5, 0.1, 0.5)):
        assert verdict(*reversed_part) == "does not hold"
    assert verdict(0.5, 0.0, -0.5) == "does not hold"  # no effect is an effect below what counts
    assert verdict(0.5, 0.1, -0.5, spread=0.5) == "inconclusive"
    # At the ceiling of what 64 observations can tell, no change means nothing: the entropy decides.
    assert verdict(0.5, 0.1, 0.0) == verdict(0.5, 0.1, 0.0, at=noise.CEILING - 0.31) == "does not hold"
    assert verdict(0.5, 0.1, 0.0, at=noise.CEILING - 0.29) == "holds"
    assert verdict(-0.5, 0.1, 0.0, at=noise.CEILING - 0.01) == "does not hold"
    assert verdict(0.5, -0.1, 0.0, at=noise.CEILING - 0.01) == "does not hold"


def test_what_is_said_about_noise_follows_the_parts() -> None:
    finding = judged(Noise(), sweep(0.5, 0.0, 0.0, spread=0.002, at=noise.CEILING), seeds=3)
    assert finding.verdict == "does not hold" and finding.numbers["parts"].keys() == {"distance", "entropy"}
    assert "does not depend on σ" in finding.comment and "get narrower with less noise, as" in finding.comment
    assert "can tell, and says nothing." in finding.comment
    told, early = finding.measured.split(" In the first fifth of training ")
    assert told.endswith("information: at its ceiling).") and early.startswith("a tenth of σ lowers the distance by")
    assert finding.comment.endswith("All valleys are wide enough for the quadrature's nodes.")
    narrow = judged(Noise(), lambda label, seed: result() | {"coarse": 0.25 if seed == 1 else 0.0}, seeds=3)
    assert "valleys of 25 % of the observations are too narrow" in narrow.comment


def test_noise_tells_the_beginning_of_training_from_its_second_half() -> None:
    def made(early: float) -> Callable[[str, int], Result]:
        def each(label: str, seed: int) -> Result:
            decades = math.log10(float(label.removeprefix("ibc-noise-")))
            found = result(distances=(1 + 0.002 * seed * decades, 1 + 0.002 * seed))
            found["training"][0]["negative_distance"] += early * decades  # step 10 of 100; step 30 is no longer early
            return found

        return each

    found = judged(Noise(), made(0.1), seeds=3)
    assert found.numbers["early slope"][0] == pytest.approx(0.102)
    assert found.numbers["slopes"]["distance"][0] == pytest.approx(0)
    assert found.verdict == "does not hold"
    assert "norm of 25 (25 to 25) at the end" in found.comment and "50 % of the moves are clipped" in found.comment
    assert "1.000 away with σ = 1, 0.898 with 0.1 and 0.796 with 0.01. Then" in found.comment
    for other in (made(-0.1), made(0.0)):  # the other way round, or not at all
        assert "nearer negatives" not in judged(Noise(), other, seeds=3).comment

    def to_a_tenth(label: str, seed: int) -> Result:
        found = result(distances=(1.0, 1 + 0.002 * seed))
        decades = max(-1.0, math.log10(float(label.removeprefix("ibc-noise-"))))
        found["training"][0]["negative_distance"] += 0.2 * decades
        return found

    assert "below 0.1 hardly anything changes. Then" in judged(Noise(), to_a_tenth, seeds=3).comment


def test_noise_recovers_slopes_from_the_second_half_of_training() -> None:
    found = judged(Noise(), sweep(0.5, 0.1, -0.25), seeds=3).numbers
    assert found["slopes"]["entropy"][0] == pytest.approx(0.5)
    assert found["slopes"]["distance"][0] == pytest.approx(0.1)  # the first half, 7 − seed, would give 0
    assert found["slopes"]["information"][0] == pytest.approx(0.25)  # of −I
    half = 4.303 * 0.01 / math.sqrt(3)  # Student's t with 2 degrees of freedom, of −0.01, 0, 0.01
    assert found["slopes"]["entropy"][2] == pytest.approx(0.5 + half)


def test_noise_changes_the_training_chains_alone() -> None:
    plain = find_trial("ibc")
    for task in Noise().tasks(PAPER, [0]):
        assert isinstance(task, Training)
        trial = task.job.trial
        sampler = trial.objective.source.sampler
        assert isinstance(sampler, Langevin)
        assert task.label == f"ibc-noise-{sampler.noise:g}"
        assert vary(trial, **{"objective.source.sampler": plain.objective.source.sampler}) == plain


# ---------------------------------------------------------------------------------------------- 5 and 6


def test_chains_verdicts() -> None:
    success = {"short-chains": 0.6, "long-chain": 0.3, "ibc": 0.1, "correct": 0.1}
    assert by_success(Chains(), success) == "holds"  # although the other two are worse: they do not decide
    assert by_success(Chains(), success | {"short-chains": 0.3, "long-chain": 0.6}) == "does not hold"
    beside = {"correct": 0.9, "ibc": 0.9}
    assert by_success(Chains(), success | {"short-chains": 0.1} | beside) == "does not hold"
    assert by_success(Chains(), success, spread=0.3) == "inconclusive"
    assert by_success(Chains(), dict.fromkeys(chains.TRIALS, 0.0), spread=0.0) == "inconclusive"  # all fail


def test_the_papers_own_comparison_of_chains_is_spoken_of_where_it_comes_out_otherwise() -> None:
    def comment(short: float, ibc: float) -> str:
        success = {"short-chains": short, "long-chain": 0.5, "ibc": ibc, "correct": 0.5}
        return judged(Chains(), lambda label, seed: result(success[label] + 0.001 * seed)).comment

    assert "how the paper compares them" in comment(0.3, 0.8)
    assert "how the paper compares them" not in comment(0.8, 0.8)
    assert "how the paper compares them" not in comment(0.3, 0.4)


def test_last_policies_are_spoken_of_where_they_say_something_else() -> None:
    def comment(last: float) -> str:
        def made(label: str, seed: int) -> Result:
            other = last if label == "short-chains" else 0.5
            return result(0.5 + 0.01 * wave(label, seed)) | {"last": {"success": other + 0.01 * wave(label, seed)}}

        return judged(Chains(), made).comment

    assert "the long chain's policies are the better ones, which does not decide" in comment(0.3)
    assert "the short chains' policies are the better ones, which does not decide" in comment(0.7)
    assert "At the end" not in comment(0.5)


def test_the_deciding_pair_differs_in_the_chains_alone() -> None:
    tasks = {task.label: task for task in Chains().tasks(PAPER, [0])}
    one, many = (task.job.trial for task in (tasks["long-chain"], tasks["short-chains"]) if isinstance(task, Training))
    assert vary(one, **{"objective.source": many.objective.source}) == many
    sampler = many.objective.source.sampler
    assert sampler == one.objective.source.sampler
    assert isinstance(sampler, Langevin) and sampler.formulation == "correct"
    assert sampler.schedule(0, 10) == sampler.schedule(9, 10) == 0.01 and sampler.steps == 10
    plain = find_trial("ibc")
    assert vary(many, **{"objective.source.sampler": plain.objective.source.sampler}) == plain
    long = one.objective
    assert (long.source.burn_in, long.source.thin, long.count) == (50, 5, 8)  # as the protocol says


def test_mcmc_loss_verdicts() -> None:
    def verdict(gain: float, spread: float = 0.01) -> Verdict:
        return by_success(McmcLoss(), {"ibc": 0.4, "mcmc-loss": 0.4 + gain, mcmc_loss.PENALISED: 0.9}, spread)

    assert verdict(0.3) == "does not hold"
    assert verdict(-0.3) == "holds"  # worse is no improvement either
    assert verdict(0.0) == "holds"
    assert verdict(0.0, spread=0.2) == "inconclusive"  # too wide to exclude an improvement
    assert find_trial("mcmc-loss") == replace(find_trial("ibc"), objective=MCMC(find_trial("ibc").objective.source, 8))
    found = judged(McmcLoss(), lambda label, seed: result(0.5)).comment
    assert "lie 10 (10 to 10) above" in found and "have 50 % of their moves clipped" in found  # the last of the log
    assert "Without an anchor the loss fails" not in found
    worse = judged(McmcLoss(), lambda label, seed: result(0.8 if label == "ibc" else 0.0))
    assert worse.verdict == "holds" and "Without an anchor the loss fails" in worse.comment


def test_the_anchored_loss_decides_with_the_weight_that_validation_chose() -> None:
    def made(label: str, seed: int) -> Result:
        validation = {"mcmc-loss-anchored-0.1": 0.9}.get(label, 0.1)
        held_out = {"ibc": 0.5, "mcmc-loss-anchored-0.1": 0.8}.get(label, 0.0)
        return result(validation) | {key: {"success": held_out + 0.01 * wave(label, seed)} for key in ("last", "raw")}

    found = judged(McmcLoss(), made)
    assert found.verdict == "does not hold"  # an improvement, though the bare loss has none
    assert found.numbers["anchored"]["weight"] == 0.1 and len(found.numbers["anchored"]["success"]["0.1"]) == 5
    assert found.numbers["anchored"]["success"].keys() == {"0.01", "0.1", "1"}
    assert all(len(found.numbers["anchored"]["success"][weight]) == 2 for weight in ("0.01", "1"))
    assert found.numbers["decisive"][0] == pytest.approx(0.3, abs=1e-6)
    assert "(chosen weight 0.1), +30.0 points" in found.measured and "no verdict" not in found.measured


@pytest.mark.parametrize("claim", [McmcLoss(), MaxEnt()], ids=lambda claim: claim.slug)
def test_anchored_losses_have_no_verdict_before_five_seeds(claim: Claim) -> None:
    def made(label: str, seed: int) -> Result:
        return result(0.5 + 0.01 * wave(label, seed))

    four = judged(claim, made, seeds=4)
    assert four.verdict == "inconclusive" and "4 of 5 seeds, no verdict" in four.measured
    assert judged(claim, made).verdict == "holds"
    tasks = claim.tasks(PAPER, range(5))  # no anchored run at all
    none = claim.judge(Results.of(tasks, {task.key: made(task.label, task.seed) for task in tasks}))
    assert none.verdict == "inconclusive" and none.measured.startswith("Anchored: no weight is chosen yet")
    json.dumps(none.numbers, allow_nan=False)


def test_a_weight_is_chosen_by_two_seeds_and_the_rest_of_the_seeds_follow() -> None:
    known: dict[str, Result] = {}
    family = "conditional-maxent-both"
    first = anchoring.planned(family, PAPER, range(5), known)
    assert [(task.label.rpartition("-")[2], task.seed) for task in first] == [
        (weight, seed) for seed in (0, 1) for weight in ("0.01", "0.1", "1")
    ]
    # The mean over the seeds counts, and of two that are equal the smaller weight.
    success = {("0.01", 0): 0.9, ("0.01", 1): 0.1, ("0.1", 0): 0.6, ("0.1", 1): 0.6, ("1", 0): 0.6, ("1", 1): 0.6}
    for task in first:
        known[task.key] = result(success[task.label.rpartition("-")[2], task.seed])
    later = anchoring.planned(family, PAPER, range(5), known)[len(first) :]
    assert [(task.label, task.seed) for task in later] == [(f"{family}-0.1", seed) for seed in (2, 3, 4)]
    assert anchoring.planned(family, PAPER, range(2), known) == first


def test_no_better_needs_an_interval_that_excludes_improvement() -> None:
    assert no_better(Interval(0.02, 0.01, 0.03)) == "does not hold"  # small, but certain
    assert no_better(Interval(0.0, -0.05, 0.05)) == "holds"
    assert no_better(Interval(0.1, -0.05, 0.25)) == "inconclusive"
    # The margin is what a comparison of two runs can show, each of the scale's test episodes.
    error = math.sqrt(0.25 / (2 * PAPER.evaluation_episodes))
    assert pytest.approx(1.96 * math.sqrt(2) * error, abs=0.003) == mcmc_loss.NOTICED


# ---------------------------------------------------------------------------------------------- 7, maxent


def test_maxent_verdicts() -> None:
    def verdict(maxent: float, correct: float, ibc: float, spread: float = 0.01, little: float = 0.5) -> Verdict:
        success = {"conditional-maxent": maxent, "correct": correct, "ibc": ibc, LITTLE: little}
        success |= dict.fromkeys(BESIDE, 0.99)  # they decide nothing, nor does the bare loss
        return by_success(MaxEnt(), success, spread)

    assert verdict(0.4, 0.1, 0.5) == "holds"
    assert verdict(0.5, 0.1, 0.4, little=0.4) == "does not hold"  # better than ibc
    assert verdict(0.5, 0.1, 0.4, little=0.6) == "holds"  # with little noise, that is
    assert verdict(0.2, 0.1, 0.5) == "does not hold"  # less than half of ibc: not usable
    assert verdict(0.4, 0.6, 0.5) == "holds"  # `correct` decides nothing
    assert verdict(0.4, 0.1, 0.5, spread=0.5) == "inconclusive"
    trial = find_trial("conditional-maxent")
    plain = find_trial("correct")
    assert trial == replace(plain, objective=MaximumEntropy(plain.objective.source, 8))
    one, other = beside().values()
    assert replace(one, penalties=()) == bare("conditional-maxent")
    assert replace(other, penalties=()) == find_trial("correct")


def test_a_loss_that_runs_away_is_spoken_of() -> None:
    def finding(gap: float) -> Finding:
        def made(label: str, seed: int) -> Result:
            found = result(0.0 if label == "conditional-maxent" else 0.6)
            found["training"][-1]["energy_gap"] = (gap if label == "conditional-maxent" else 30.0) + seed
            return found

        return judged(MaxEnt(), made)

    assert "no minimum" in finding(200.0).comment and "lie 202 (200 to 204) above" in finding(200.0).comment
    assert "no minimum" not in finding(20.0).comment
    assert "(usable: does not hold, not better: holds)" in finding(200.0).measured  # of the bare loss, deciding nothing
    assert finding(200.0).verdict == "holds"


def test_what_an_energy_looks_like_is_told_as_measured() -> None:
    def comment(entropy: float, norm: float, bound: float) -> str:
        def made(label: str, seed: int) -> Result:
            mine = label == "conditional-maxent"
            found = result(0.1 if mine else 0.5, entropy=entropy if mine else -5.0, information=bound if mine else 4.0)
            found["training"][-1]["gradient_norm_last"] = norm if mine else 90.0
            return found

        return judged(MaxEnt(), made).comment.split("With `conditional-maxent` H(y|x)")[1].split(" With `")[0]

    assert comment(1.0, 2.0, 3.0).endswith("the norm 2 (2 to 2): flatter, so that a search has less to follow.")
    assert "sharp in the wrong place" in comment(-9.0, 20.0, -10.0)
    assert comment(-9.0, 2.0, 3.0).endswith("2 (2 to 2).") and comment(1.0, 100.0, 3.0).endswith("100 (100 to 100).")


# ---------------------------------------------------------------------------------------------- 8, joint


def joint_verdict(
    early: float = 0.05, gap: float = 0.3, success: float = 0.1, ibc: float = 0.5, spread: float = 0.002
) -> Verdict:
    return joint_finding(early, gap, success, ibc, spread).verdict


def joint_finding(early: float, gap: float, success: float, ibc: float, spread: float = 0.002) -> Finding:
    def made(label: str, seed: int) -> Result:
        off = spread * wave(label, seed)
        if label == "ibc":
            return result(ibc + off, train=0.08, validation=0.12 + off)
        if label == EARLY:
            return result(0.9, train=early + off, validation=0.5)
        return result(success + off, train=0.02, validation=0.02 + gap + off)

    return judged(Joint(), made)


def test_what_is_said_about_the_joint_energy_follows_the_parts() -> None:
    assert "hardly trained" in joint_finding(0.05, 0.3, 0.1, 0.5).comment
    assert "not by overfitting" in joint_finding(0.05, 0.0, 0.1, 0.5).comment
    assert "the gap does not tell" in joint_finding(0.05, 0.04, 0.1, 0.5, spread=0.01).comment
    assert "acts no worse" in joint_finding(0.05, 0.3, 0.5, 0.1).comment
    equal = joint_finding(0.05, 0.3, 0.5, 0.5, spread=0.005)
    assert "these seeds do not tell. Whether it acts worse without the squared" in equal.comment

    def at_the_end_alone(label: str, seed: int) -> Result:
        """`ibc` was better along training, and is not at its end."""
        found = result(0.5 + 0.001 * seed)
        found["curve"].insert(1, found["curve"][-1] | {"step": 75, "success": 0.9 if label == "ibc" else 0.1})
        return found

    along = judged(Joint(), at_the_end_alone)
    assert "Over the second half of training it does" in along.comment and "has +40.0 points" in along.measured
    assert along.numbers["parts"]["generalises poorly"] == "inconclusive"


def test_joint_verdicts() -> None:
    assert joint_verdict() == "holds"
    assert joint_verdict(early=0.3) == "does not hold"  # does not fit in five epochs
    assert joint_verdict(gap=0.0) == "does not hold"  # a smaller gap than that of ibc
    assert joint_verdict(success=0.5, ibc=0.1) == "does not hold"
    assert joint_verdict(gap=0.04, spread=0.01) == "inconclusive"
    assert joint_verdict(spread=0.5) == "inconclusive"


def test_the_joint_energy_without_squared_energies_is_told_and_decides_nothing() -> None:
    def finding(success: float) -> Finding:
        return judged(Joint(), lambda label, seed: result(success if label == FREE else 0.4 + 0.01 * seed))

    assert f"`{FREE}` has errors of 0.1 (0.1 to 0.1) in training" in finding(0.3).measured
    assert finding(0.0).verdict == finding(1.0).verdict and finding(0.0).measured != finding(1.0).measured
    assert finding(0.3).numbers["kept by squared energies"][0] == pytest.approx(0.11)  # 0.41, of the first three seeds
    assert "squared energies in its loss it acts worse" in finding(0.3).comment
    assert "squared energies in its loss it acts better" in finding(0.5).comment
    assert "do not tell." in finding(0.41).comment.split("squared")[1]
    assert "training data worse" not in finding(0.3).comment
    worse = judged(Joint(), lambda label, seed: result(train=0.3 if label == FREE else 0.1 + 0.001 * seed))
    assert worse.numbers["training error without them"][0] == pytest.approx(0.199)
    assert "training data worse, too. At the end its negatives' energies lie 10 (10 to 10) above" in worse.comment
    free = next(task for task in Joint().tasks(PAPER, [0]) if task.label == FREE)
    assert isinstance(free, Training) and vary(free.job.trial, anchor=1.0) == find_trial("joint-replay")


@pytest.mark.parametrize("scale", [PAPER, SMOKE, TINY], ids=["paper", "smoke", "tiny"])
def test_five_epochs_are_those_of_the_trainer(scale: Any) -> None:
    task = training("joint-replay", scale, 0)
    pairs = scale.demonstrations * ParticleTask().steps
    blank = Demonstrations.from_arrays(
        np.random.default_rng(0).random((pairs, 8), np.float32),
        np.random.default_rng(1).random((pairs, 2), np.float32),
        np.arange(1, scale.demonstrations + 1) * ParticleTask().steps,
    )
    trainer = Trainer(task.job.trial, blank, blank, steps=1)
    assert five_epochs(scale) == min(scale.steps, 5 * trainer.steps_per_epoch)
    assert joint.FITS == 0.1 and five_epochs(PAPER) == 145


# ---------------------------------------------------------------------------------------------- 9, dimensions


def dimensions_verdict(
    ibc: tuple[float, float], gmm: tuple[float, float], uniform: tuple[float, float], spread: float = 0.01
) -> Verdict:
    return dimensions_finding(ibc, gmm, uniform, spread).verdict


def dimensions_finding(
    ibc: tuple[float, float],
    gmm: tuple[float, float],
    uniform: tuple[float, float],
    spread: float = 0.01,
    bound: float = 1.0,
    success_in_16: float = 0.5,
) -> Finding:
    """For the skills that trials have in 2 and in 16 dimensions."""
    skills = {"ibc": ibc, "gmm-nll": gmm, "uniform": uniform}

    def made(label: str, seed: int) -> Result:
        trial, _, dim = label.removesuffix("d").rpartition("-")
        few, many = skills[trial]
        wanted = {2: few, 16: many}.get(int(dim), (few + many) / 2)
        wanted += spread * (seed - 1) * (-1) ** ["ibc", "gmm-nll", "uniform"].index(trial)
        success = success_in_16 if dim == "16" else 0.5
        return result(success, validation=(1 - wanted) * math.sqrt(int(dim) / 12), information=bound)

    return judged(Dimensions(), made, seeds=3)


def test_what_is_said_about_dimensions_follows_the_parts() -> None:
    found = dimensions_finding((0.9, 0.8), (0.2, 0.1), (0.85, 0.75), spread=0.001).comment
    assert "`gmm-nll` falls behind; whether by more than in few dimensions" in found
    assert "`uniform` keeps up." in found and "`uniform` 10 (10 to 10) and 1 (1 to 1)" in found
    assert "in skill alone" not in found
    failing = dimensions_finding((0.9, 0.8), (0.2, 0.1), (0.85, 0.75), success_in_16=0.1).comment
    assert "in skill alone: it succeeds in 50 % of the episodes in 2 dimensions and in 10 % in 16" in failing
    assert "`gmm-nll` falls behind." in dimensions_finding((0.9, 0.8), (0.9, 0.1), (0.8, 0.2)).comment
    wrong = dimensions_finding((0.9, 0.8), (0.9, 0.1), (0.8, 0.2), bound=-3.0).comment
    assert "`gmm-nll` falls behind: its energy is confident and wrong on held-out pairs." in wrong


def test_dimensions_verdicts() -> None:
    assert dimensions_verdict((0.9, 0.8), (0.9, 0.1), (0.8, 0.2)) == "holds"
    assert dimensions_verdict((0.9, 0.1), (0.9, 0.8), (0.9, 0.8)) == "inconclusive"  # reversed: ibc is no reference
    assert dimensions_verdict((0.9, 0.4), (0.9, 0.0), (0.9, 0.0)) == "inconclusive"  # all fall, ibc as well
    assert dimensions_verdict((0.9, 0.6), (0.9, 0.8), (0.9, 0.8)) == "does not hold"
    assert dimensions_verdict((0.9, 0.8), (0.9, 0.1), (0.9, 0.8)) == "does not hold"  # one of them scales
    assert dimensions_verdict((0.9, 0.8), (0.2, 0.1), (0.2, 0.1)) == "inconclusive"  # bad, but everywhere
    assert dimensions_verdict((0.9, 0.1), (0.9, 0.1), (0.9, 0.1)) == "inconclusive"  # none works
    assert dimensions_verdict((0.9, 0.8), (0.9, 0.1), (0.8, 0.2), spread=0.5) == "inconclusive"


@pytest.mark.parametrize("dim", [2, 16])
def test_acting_at_the_centre_has_the_skill_that_the_metric_says(dim: int, generator: torch.Generator) -> None:
    goals = torch.rand(20_000, dim, generator=generator, dtype=torch.float64)
    errors = (goals - 0.5).norm(dim=1)
    # The mean distance from a square's centre, (√2 + log(1 + √2))/6; and E‖z‖ ≈ √(E‖z‖²)(1 − Var‖z‖²/8(E‖z‖²)²) with
    # Var‖z‖² = dim/180, its next term below 0.001 in 16 dimensions.
    exact = {2: (math.sqrt(2) + math.log(1 + math.sqrt(2))) / 6, 16: math.sqrt(16 / 12) * (1 - 0.8 / (8 * 16))}[dim]
    error = float(errors.std()) / math.sqrt(len(errors))
    assert abs(float(errors.mean()) - exact) < 4.5 * error + 0.001
    assert skill(exact, dim) == pytest.approx({2: 0.06, 16: 0.01}[dim], abs=0.005)
    # Planted: the scale of one dimension for all, which would tell even ibc to lose skill as the dimension grows.
    assert dim == 2 or skill(exact, 1) < -2


def test_the_experts_actions_are_goals_in_the_box_that_skill_is_scaled_by(generator: torch.Generator) -> None:
    # Root mean square of the distance to the centre: √(dim/12) for uniform goals. 150 episodes show 300 goals per
    # dimension with Var(z²) = 1/180, and an episode's two goals share its steps as they may: at worst one counts.
    for dim in (2, 16):
        actions = collect_particle(ParticleTask(dim=dim), 150, generator.initial_seed() % 2**31).actions
        square = float(((actions - 0.5) ** 2).sum(1).mean())
        assert abs(square - dim / 12) < 4.5 * math.sqrt(dim / 180 / 150)
