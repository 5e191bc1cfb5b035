"""The open house, end to end: a user's file of pieces goes through demonstrations, training, a kill, resuming,
evaluation, the report and loading, with nothing in the library touched."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import cebm
from cebm import certify
from cebm.runs import load_job, load_metrics
from cebm.settings import find_piece, import_piece_module
from cebm.testing import (
    acting_checks,
    contract,
    energy_checks,
    objective_checks,
    sampler_checks,
    source_checks,
    task_checks,
)
from test_runs import comparable, contents
from waiting import eventually

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_pieces.py"
PIECES = import_piece_module(str(EXAMPLE))
CEBM = [sys.executable, "-m", "cebm"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
SHORT = ["--steps", "60", "--evaluate-every", "30", "--checkpoint-every", "10", "--log-every", "5"]
SMALL = {
    "mine": [
        *("--energy.width", "8", "--objective.margin", "0.5", "--objective.source.deviation", "0.3"),
        *("--acting.sampler.steps", "5", "--acting.sampler.friction", "4.0", "--acting.candidates", "8"),
    ],
    "levels": ["--energy.width", "16", "--objective.smallest", "0.1", "--acting.candidates", "4"],
}


def call(folder: Path, *arguments: str) -> str:
    done = subprocess.run([*CEBM, *arguments], cwd=folder, env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with the file of pieces and demonstrations of its task."""
    place = tmp_path_factory.mktemp("user")
    shutil.copy(EXAMPLE, place)
    out = call(place, "demos", "own_pieces.py:reach", "--episodes", "40", "--out", "reach.npz")
    assert "40 episodes, 800 steps" in out
    return place


def test_each_piece_has_at_most_30_lines() -> None:
    """Lines of code: neither blank ones nor documentation count."""
    source = EXAMPLE.read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes} >= {"Underdamped", "Blurred", "Hinge", "TransformerEnergy", "LevelEnergy"}
    for node in classes:
        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
        docs = len((ast.get_docstring(node, clean=False) or "").splitlines())
        assert sum(bool(line.strip()) for line in lines) - docs <= 30, node.name


@pytest.mark.parametrize("name", ["mine", pytest.param("levels", marks=pytest.mark.slow)])
def test_a_run_of_ones_own_pieces(name: str, folder: Path) -> None:
    """Trained whole, and killed by SIGKILL and resumed: the same rows, the same weights. Then evaluated, reported, and
    loaded in a fresh process that has imported the file: the same actions."""
    arguments = [
        *("train", f"own_pieces.py:{name}", "--data", "reach.npz", "--task", "own_pieces.py:reach"),
        *(*SHORT, *SMALL[name], "--evaluation-episodes", "3"),
    ]
    whole, broken = folder / f"{name}-whole", folder / f"{name}-broken"
    out = call(folder, *arguments, "--out", whole.name)
    assert "36 demonstrations to train on, 4 to validate on" in out and "clean height" in out

    for _ in range(5):  # on a busy machine the run may end before it can be killed
        process = subprocess.Popen(
            [*CEBM, *arguments, "--out", broken.name],
            cwd=folder,
            env=ENV,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

        def under_way(process: subprocess.Popen[bytes] = process) -> bool:
            return process.poll() is not None or any(row["step"] >= 25 for row in load_metrics(broken))

        eventually(under_way, pause=0.001)
        process.kill()
        _, errors = process.communicate()
        if process.returncode == -signal.SIGKILL:
            break
        assert process.returncode == 0, errors
        shutil.rmtree(broken)
    assert process.returncode == -signal.SIGKILL
    done = subprocess.run(
        [*CEBM, "train", "--resume", broken.name], cwd=folder, env=ENV, capture_output=True, text=True
    )
    assert done.returncode != 0 and "--with own_pieces.py" in done.stderr  # it says what it needs
    call(folder, "train", "--resume", broken.name, "--with", "own_pieces.py")
    assert comparable(load_metrics(broken)) == comparable(load_metrics(whole))
    for part in ("policy", "best"):
        assert contents(broken / part) == contents(whole / part)

    assert "clean height" in call(folder, "eval", whole.name, "--with", "own_pieces.py", "--episodes", "4")
    figures = json.loads((whole / "evaluation.json").read_text())
    assert figures["episodes"] == 4 and -1 <= figures["clean_height"] <= 2 and figures["clean_height_se"] >= 0
    call(folder, "report", whole.name, "--with", "own_pieces.py", "--out", f"{name}.html")
    page = (folder / f"{name}.html").read_text()
    assert "clean height" in page and ("Underdamped" if name == "mine" else "Annealed") in page

    code = (
        "import own_pieces, cebm, json\n"
        f"policy = cebm.load({str(whole)!r})\n"
        "print(json.dumps(policy.act([[0.1, -1.0], [0.5, 0.2], [-0.4, 0.0]]).tolist()))"
    )
    fresh = subprocess.run([sys.executable, "-c", code], cwd=folder, env=ENV, capture_output=True, text=True)
    assert fresh.returncode == 0, fresh.stderr
    here = cebm.load(whole).act([[0.1, -1.0], [0.5, 0.2], [-0.4, 0.0]])
    np.testing.assert_array_equal(np.array(json.loads(fresh.stdout), np.float32), here)
    job = load_job(whole)
    assert type(job.task).__name__ == "Reach" and job.trial == settings_from(name)


def test_levels_train_act_and_load(folder: Path) -> None:
    """The energy with noise levels, in this process; `make test-all` takes it through the whole course, too."""
    data = cebm.Demonstrations.load(folder / "reach.npz")
    trial = cebm.vary(PIECES.levels, **{"energy.width": 32})
    policy = cebm.fit(data.obs, data.actions, data.episode_ends, trial=trial, steps=300)
    untrained = cebm.fit(data.obs, data.actions, data.episode_ends, trial=trial, steps=1)
    errors = [float(np.abs(each.act(data.obs[:200]) - data.actions[:200]).mean()) for each in (policy, untrained)]
    assert errors[0] < 0.7 * errors[1]
    policy.save(folder / "levels")
    np.testing.assert_array_equal(cebm.load(folder / "levels").act(data.obs[:5]), policy.act(data.obs[:5]))


def settings_from(name: str) -> cebm.Trial:
    """The trial that the command line's settings describe, composed by hand."""
    trial = find_piece(f"{EXAMPLE}:{name}")
    if name == "levels":
        return cebm.vary(trial, **{"energy.width": 16, "objective.smallest": 0.1, "acting.candidates": 4})
    objective = replace(trial.objective, margin=0.5, source=replace(trial.objective.source, deviation=0.3))
    acting = replace(trial.acting, candidates=8, sampler=replace(trial.acting.sampler, steps=5, friction=4.0))
    return replace(trial, energy=replace(trial.energy, width=8), objective=objective, acting=acting)


@contract(sampler_checks(PIECES.Underdamped(200)))
def test_the_sampler_keeps_the_contract(check: cebm.testing.Check) -> None:
    check()


@contract(source_checks(PIECES.Blurred()))
def test_the_source_keeps_the_contract(check: cebm.testing.Check) -> None:
    check()


@contract(
    [
        *objective_checks(PIECES.Hinge(), PIECES.Transformer(8)),
        *objective_checks(PIECES.Denoising(), PIECES.Levels(8)),
    ]
)
def test_the_objectives_keep_the_contract(check: cebm.testing.Check) -> None:
    check()


@contract([*energy_checks(PIECES.Transformer(8)), *energy_checks(PIECES.Levels(8))])
def test_the_energies_keep_the_contract(check: cebm.testing.Check) -> None:
    check()


@contract([*acting_checks(PIECES.Annealed(), PIECES.Levels(8)), *acting_checks(PIECES.mine.acting)])
def test_the_ways_to_act_keep_the_contract(check: cebm.testing.Check) -> None:
    check()


@contract(task_checks(PIECES.reach))
def test_the_task_keeps_the_contract(check: cebm.testing.Check) -> None:
    check()


def test_the_certificate_judges_the_sampler() -> None:
    """With its walls off the sampler knows no box, so the boxed target is none of its own."""
    rows = certify(PIECES.Underdamped(2000, margin=None), runs=["chains"], generator=torch.Generator().manual_seed(0))
    verdicts = {row.target: row.verdict for row in rows}
    assert list(verdicts.values()).count("samples the target") >= 3, verdicts
    biased = certify(
        PIECES.Underdamped(2000, 1.9, margin=None), runs=["chains"], generator=torch.Generator().manual_seed(0)
    )
    assert "samples the target" not in {row.verdict for row in biased}


# ---------------------------------------------------------------------------------------------- types

SCRIPT = """
import numpy as np
import cebm

trial: cebm.Trial = cebm.TRIALS["ibc"]
policy = cebm.fit(np.zeros((4, 3)), np.zeros((4, 2)), trial=trial, steps=1)
action: np.ndarray = policy.act(np.zeros(3))
policy.nosuch()
cebm.nothing
cebm.Langevin(step="many")
cebm.Search(candidates="8")
count: str = policy.specification.history
"""


def test_type_checkers_see_through_the_package(tmp_path: Path) -> None:
    """The lines with a mistake are refused under `mypy --strict`, and no others."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,matplotlib.*]\nfollow_imports = skip\n")  # to be quick
    options = ["--strict", "--no-error-summary", "--python-version", "3.11", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("script.py") and " error: " in line]
    wrong = {i for i, line in enumerate(SCRIPT.splitlines(), 1) if line.startswith(("policy.no", "cebm.", "count"))}
    assert {int(line.split(":")[1]) for line in lines} == wrong, done.stdout + done.stderr
