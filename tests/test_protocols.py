"""Protocols: which checkpoints are measured on which episodes, and what is reported of them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cebm.cli import main
from cebm.evaluation import TEST_SEED, evaluate
from cebm.intervals import Interval
from cebm.loading import load
from cebm.protocols import CHOSEN, LAST, PROTOCOLS, Protocol, measure, words
from cebm.runs import load_checkpoint, load_job, load_metrics, train, trainer_of
from cebm.storage import read_document
from cebm.tasks import ParticleTask
from test_runs import small_job

TASK = ParticleTask(steps=12)
PICKING = Protocol("picking", 2, 5, 3)
"""As Diffusion Policy's, on fewer episodes and checkpoints."""


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds with four checkpoints each, at steps 6, 12, 18 and 24."""
    where = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        train(small_job("mse", seed=seed, keep_checkpoints=0), where / str(seed))
    return [where / "0", where / "1"]


def test_the_protocols_are_those_of_the_publications() -> None:
    sizes = {name: (each.seeds, each.episodes, each.checkpoints) for name, each in PROTOCOLS.items()}
    assert sizes == {"ours": (5, 200, 0), "diffusion-policy": (3, 50, 10), "lerobot": (1, 500, 0)}


def test_the_last_checkpoint_stands_beside_the_chosen_one(two_runs: list[Path]) -> None:
    lines = measure(Protocol("ours", 2, 6), two_runs)
    assert [(line.metric, line.what) for line in lines] == [("success", CHOSEN), ("success", LAST)]
    for line, name in zip(lines, ("best", "policy"), strict=True):
        expected = [evaluate(load(run / name), TASK, episodes=6, latency_calls=0).score("success") for run in two_runs]
        assert list(line.seeds) == expected and line.interval == Interval.of(expected)


def test_one_run_has_the_interval_of_its_episodes(two_runs: list[Path]) -> None:
    lines = measure(Protocol("lerobot", 1, 6), two_runs[:1])
    expected = evaluate(load(two_runs[0] / "policy"), TASK, episodes=6, latency_calls=0).interval("success")
    assert lines[-1].what == LAST and lines[-1].interval == expected and expected.low < expected.high


def test_best_and_mean_of_the_last_checkpoints(two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint is measured on the same episodes; the steps before the last three play no part."""
    played: list[str] = []
    lines = measure(PICKING, two_runs, listen=played.append)
    assert [line.split(":")[0] for line in played] == [
        f"{seed}, {what}" for seed in (0, 1) for what in (LAST, "step 18", "step 12")
    ]
    assert [line.what for line in lines] == ["best of the last 3 checkpoints", "mean of the last 3 checkpoints", LAST]
    for place, run in enumerate(two_runs):
        trainer, found = trainer_of(load_job(run)), []
        for step in (12, 18, 24):
            _, tensors = load_checkpoint(run / f"checkpoints/step-{step:08d}")
            trainer.load_state(tensors, step)
            result = evaluate(trainer.policy(), TASK, episodes=5, seed=TEST_SEED, latency_calls=0)
            found.append(result.score("success"))
        assert [line.seeds[place] for line in lines] == pytest.approx([max(found), np.mean(found), found[-1]])


def test_what_cannot_be_measured_is_named(two_runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"asks for the last 10 checkpoints, the run kept 4.*--keep-checkpoints 10"):
        measure(PROTOCOLS["diffusion-policy"], two_runs)
    with pytest.raises(ValueError, match=r"no run\.json"):
        measure(PICKING, [tmp_path])
    with pytest.raises(ValueError, match="at least one run"):
        measure(PICKING, [])


def test_words_say_how_many_seeds_are_missing(two_runs: list[Path]) -> None:
    text = words(PICKING, measure(PICKING, two_runs[:1]))
    assert "1 training seed (it asks for 2)" in text and "(one value: no interval)" in text
    assert len(text.splitlines()) == 4


def test_the_command_prints_and_keeps_its_numbers(
    two_runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROTOCOLS, "ours", Protocol("ours", 5, 3))
    run = tmp_path / "run"
    shutil.copytree(two_runs[0], run)
    main(["eval", str(run), "--protocol", "ours", "--seeds", str(two_runs[1]), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["runs"] == [str(run), str(two_runs[1])] and printed["episodes"] == 3
    kept = read_document(run / "protocol-ours.json", "protocol")
    assert kept["lines"] == printed["lines"] and len(kept["lines"][0]["seeds"]) == 2
    assert load_metrics(run)
    for wrong, message in ((["--protocol", "ours", "--last"], "--last does not go"), (["--seeds", "x"], "belong to")):
        with pytest.raises(SystemExit):
            main(["eval", str(run), *wrong])
        assert message in capsys.readouterr().err
