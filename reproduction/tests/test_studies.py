"""The studies beside the claims: their runs, the rules that read them, and what becomes of the records."""

from pathlib import Path
from typing import Any

import pytest

from cebm.composition import vary
from cebm.engines import Local
from cebm.recipes import find_trial
from cebm.runs import restored, train
from cebm.sweep import sweep
from reproduction.evidence import markdown
from reproduction.studies import searches
from reproduction.studies.searches import DECIDES, SEARCHES, WEIGHTS, Searches, measured
from reproduction.trainings import SMOKE, training

PAIR = f"correct-mas-maxent − ibc ({DECIDES})"


def record(label: str, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    return {"key": f"{label}-{seed}", "label": label, "seed": seed, "result": result}


def of_searches(shift: float, seeds: int = 5) -> dict[str, Any]:
    """All trials are alike but one, which differs by `shift`, more or less, in the cell that decides."""
    rows = []
    for seed in range(seeds):
        for name in ("ibc", "correct-mas-maxent"):
            off = shift + 0.01 * (seed - 2) if name == "correct-mas-maxent" else 0.0
            rows.append(record(name, seed, dict.fromkeys(Searches.shown, 0.7) | {DECIDES: 0.7 + off}))
    return Searches().evidence(rows)


def compared(evidence: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [row for row in evidence["comparisons"] if row["what"] == name]
    return found


@pytest.mark.parametrize(("shift", "verdict"), [(0.02, "holds"), (-0.3, "does not hold"), (-0.1, "inconclusive")])
def test_on_par_is_within_ten_points(shift: float, verdict: str) -> None:
    found = of_searches(shift)
    assert compared(found, PAIR)["verdict"] == verdict and compared(found, PAIR)["decides"]
    other = compared(found, "correct-mas-maxent − ibc (averaged, 64 × 10)")
    assert other["verdict"] == "holds" and not other["decides"] and other["seeds"] == 5
    assert f"5 seeds: **{verdict}** (decides)" in markdown(found)


def test_fewer_seeds_decide_nothing() -> None:
    found = of_searches(-0.3, seeds=4)
    assert compared(found, PAIR)["verdict"] is None and compared(found, PAIR)["difference"][0] == pytest.approx(-0.305)
    assert "-0.305" in markdown(found) and "4 of 5 seeds, no verdict" in markdown(found)
    assert compared(found, f"ibc-mas − ibc ({DECIDES})")["seeds"] == 0
    assert f"ibc-mas − ibc ({DECIDES}): no seed yet." in markdown(found)
    one = of_searches(-0.3, seeds=1)
    assert compared(one, PAIR)["difference"][1:] == [None, None] and "1 of 5 seeds" in markdown(one)
    with pytest.raises(ValueError, match="searches: there is no record of this study"):
        Searches().evidence([record("another", 0, {})])


def test_pairs_are_of_the_same_seed_and_a_run_that_diverged_has_no_success() -> None:
    rows = [record("ibc", seed, {DECIDES: 0.5 + 0.1 * seed}) for seed in (0, 1, 2)]
    rows += [record("correct-mas-maxent", 2, {DECIDES: 0.7}), record("correct-mas-maxent", 1, {"diverged": "the loss"})]
    found = compared(Searches().evidence(rows), PAIR)
    assert found["seeds"] == 2 and found["difference"][0] == pytest.approx((0.0 - 0.6) / 2)


def test_the_pair_that_decides_runs_first() -> None:
    planned = Searches().plan()
    assert [(run.job.name, run.job.seed) for run in planned[:3]] == [
        ("ibc", 0),
        ("correct-mas-maxent", 0),
        ("ibc", 1),
    ]
    assert {run.job.name for run in planned[:10]} == {"ibc", "correct-mas-maxent"}
    assert len({run.key for run in planned}) == 20
    assert all(run.job.trial.optimiser.average == searches.AVERAGE and run.job.steps == 3000 for run in planned)


def test_raw_and_averaged_weights_are_both_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = vary(find_trial("ibc"), **{"optimiser.average": 0.5})
    job = training(trial, SMOKE, 0, "ibc", steps=4, followed=False).job
    train(job, tmp_path / "run")
    seen = []

    def success(policy: object, task: object, candidates: int, steps: int) -> float:
        seen.append((policy.energy.last.bias.item(), candidates, steps))  # type: ignore[attr-defined]
        return 0.5

    monkeypatch.setattr(searches, "success", success)
    found = measured(tmp_path / "run")
    assert list(found) == [f"{weights}, {search}" for weights in WEIGHTS for search in SEARCHES]
    trainer, _ = restored(job, tmp_path / "run")
    raw, averaged = (trainer.policy(averaged=one).energy.last.bias.item() for one in (False, True))
    assert raw != averaged
    assert seen == [(bias, *effort) for bias in (raw, averaged) for effort in SEARCHES.values()]


@pytest.mark.slow
def test_a_study_may_name_its_measure(tmp_path: Path) -> None:
    trial = vary(find_trial("mse"), **{"optimiser.average": 0.5})
    job = training(trial, SMOKE, 0, "mse", steps=4, followed=False).job
    (found,) = sweep([job], Local(1), tmp_path, measure="reproduction.tests.test_studies:counted", progress=False)
    assert found["result"] == {"files": 1}


def counted(directory: Path) -> dict[str, int]:
    return {"files": len(list(directory.glob("run.json")))}
