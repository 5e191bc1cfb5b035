"""The study of searches: its runs, and the rule that reads them."""

from pathlib import Path

import pytest

from cebm.composition import vary
from cebm.engines import Local
from cebm.recipes import find_trial
from cebm.runs import restored, train
from cebm.sweep import sweep
from reproduction import searches
from reproduction.searches import DECIDES, SEARCHES, WEIGHTS, Searches, cells, measured
from reproduction.trainings import SMOKE, training


def record(name: str, seed: int, **changes: float) -> dict[str, object]:
    result = {f"{weights}, {search}": 0.7 for weights in WEIGHTS for search in SEARCHES}
    return {"key": f"{name}-{seed}", "label": name, "seed": seed, "result": result | changes}


def table(shift: float, seeds: int = 5) -> dict[str, dict[str, searches.Cell]]:
    """All trials are alike but one, which differs by `shift`, more or less, in the cell that decides."""
    rows = []
    for seed in range(seeds):
        for name in searches.PAPERS:
            off = shift + 0.01 * (seed - 2) if name == "correct-mas-maxent" else 0.0
            rows.append(record(name, seed, **{", ".join(DECIDES): 0.7 + off}))
    return cells({str(row["key"]): row for row in rows})


@pytest.mark.parametrize(("shift", "verdict"), [(0.02, "holds"), (-0.3, "does not hold"), (-0.1, "inconclusive")])
def test_on_par_is_within_ten_points(shift: float, verdict: str) -> None:
    found = table(shift)["correct-mas-maxent"]
    assert found[", ".join(DECIDES)].verdict == verdict
    assert found["averaged, 64 × 10"].verdict == "holds" and len(found["averaged, 64 × 10"].success) == 5


def test_fewer_seeds_decide_nothing_and_none_is_an_error() -> None:
    assert table(-0.3, seeds=4)["correct-mas-maxent"][", ".join(DECIDES)].verdict == "inconclusive"
    with pytest.raises(ValueError, match="no seed has been run for all four trials"):
        cells({"ibc-0": record("ibc", 0)})


def test_the_study_has_every_trial_at_every_seed() -> None:
    planned = Searches().plan()
    assert [(run.job.name, run.job.seed) for run in planned[:5]] == [
        *((name, 0) for name in searches.PAPERS),
        ("ibc", 1),
    ]
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
def test_a_study_may_name_its_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = vary(find_trial("mse"), **{"optimiser.average": 0.5})
    job = training(trial, SMOKE, 0, "mse", steps=4, followed=False).job
    (found,) = sweep([job], Local(1), tmp_path, measure="reproduction.tests.test_searches:counted", progress=False)
    assert found["result"] == {"files": 1}


def counted(directory: Path) -> dict[str, int]:
    return {"files": len(list(directory.glob("run.json")))}
