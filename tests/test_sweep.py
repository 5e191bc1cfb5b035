"""Studies: what they name, how they run on each engine, and that kills lose nothing."""

import csv
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slurm
from cebm.cli import main
from cebm.composition import vary
from cebm.engines import Engine, Local, Submitit, TaskError, drive
from cebm.intervals import Interval
from cebm.recipes import TRIALS
from cebm.runs import Job
from cebm.sweep import Planned, Tuning, estimate, grid, records, runs_of, sweep, write_results
from cebm.sweep.display import Display, share_of_steps
from cebm.sweep.results import effects, groups, main_metric, table
from cebm.tasks import ParticleTask
from waiting import eventually

TINY = {"energy.width": 8, "optimiser.batch_size": 16, "acting.candidates": 4, "acting.sampler.steps": 2}
SHORT = {
    "steps": 40,
    "evaluate_every": 20,
    "evaluation_episodes": 2,
    "episodes": 3,
    "checkpoint_every": 4,
    "log_every": 4,
}
STUDY = f"""
from cebm.sweep import grid
study = grid("ibc", over={{"objective.count": [2, 3]}}, **{TINY | SHORT})
"""


def small(**more: Any) -> Any:
    return grid("ibc", **({"over": {"objective.count": [2, 3]}} | TINY | SHORT | more))


def have(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# ---------------------------------------------------------------------------------------------- what it names


def test_a_grid_is_all_combinations_with_each_seed() -> None:
    study = grid("ibc", over={"objective.count": [2, 4], "steps": [10, 20]}, seeds=[3, 5], **{"energy.width": 8})
    runs = list(runs_of(study).values())
    assert [(run.job.trial.objective.count, run.job.steps, run.job.seed) for run in runs] == [
        (count, steps, seed) for seed in (3, 5) for count in (2, 4) for steps in (10, 20)
    ]
    assert runs[0].job == Job(
        "ibc", vary(TRIALS["ibc"], count=2, **{"energy.width": 8}), ParticleTask(), steps=10, seed=3
    )
    assert runs[1].values == {"objective.count": 2, "steps": 20}
    assert len({run.key for run in runs}) == 8


def test_a_key_tells_settings_and_seed_apart_and_nothing_else() -> None:
    job = Job("my trial: [1]", TRIALS["ibc"], ParticleTask())
    key = Planned(job).key
    assert key.startswith("my-trial-1-") and key.endswith("-0") and Planned(job, {"a": 1}).key == key
    assert Planned(replace(job, seed=1)).key == key[:-1] + "1"
    assert Planned(replace(job, steps=7)).key != key
    assert Planned(replace(job, trial=vary(TRIALS["ibc"], count=9))).key != key


def test_trials_can_be_varied() -> None:
    study = grid("ibc", over={"trial": [TRIALS["ibc"], TRIALS["correct"]]}, **{"energy.width": 8})
    assert [run.job.trial for run in study.plan()] == [
        vary(TRIALS[name], **{"energy.width": 8}) for name in ("ibc", "correct")
    ]


def test_functions_lists_and_jobs_are_studies() -> None:
    job = Job("ibc", TRIALS["ibc"], ParticleTask())

    def named() -> Iterator[Job]:
        yield job
        yield replace(job, seed=1)

    assert list(runs_of(named)) == list(runs_of([job, Planned(replace(job, seed=1))]))
    assert len(runs_of([job, job])) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: runs_of("ibc"), "a study must give runs, got 'ibc'"),
        (lambda: runs_of(lambda: 3), "a study must give runs, got 3"),
        (lambda: runs_of([3]), "a study gives runs or jobs, got 3"),
        (lambda: grid("ibc", over={"steps": 3}), "over: steps must have a list of values, got 3"),
        (lambda: grid("ibc", over={"steps": []}), "over: steps must have a list"),
        (lambda: grid("ibc", seeds=[]), "seeds must name at least one"),
        (lambda: runs_of(grid("ibc", over={"nothing": [1]})), "nothing"),
        (lambda: grid("nobody"), "there is no trial 'nobody'"),
        (lambda: Local(0), "workers must be at least 1"),
    ],
)
def test_what_is_no_study_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------------------- engines

TASKS = """
import os, pathlib, signal, sys, time

def note(folder, name):
    pathlib.Path(folder, name).write_text(str(os.getpid()))

def fail(folder, name):
    print("so it was")
    raise ValueError("it cannot\\n be")

def die_twice(folder, name):
    tries = sorted(pathlib.Path(folder).glob(f"{name}-*"))
    pathlib.Path(folder, f"{name}-{len(tries)}").touch()
    if len(tries) < 2:
        os.kill(os.getpid(), signal.SIGKILL)

def linger(folder, name):
    note(folder, name)
    time.sleep(3000)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sweep_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_tasks_that_are_lost_run_again_and_those_that_fail_say_why(tasks: Path) -> None:
    """Killed twice, the task ends well at its third attempt; one that fails is given up after three."""
    engine = Local(2, logs=tasks / "logs")
    planned = {
        "good": ("sweep_tasks:note", str(tasks), "good"),
        "dies": ("sweep_tasks:die_twice", str(tasks), "dies"),
        "bad": ("sweep_tasks:fail", str(tasks), "bad"),
    }
    ended = {each.name: each for each in drive(planned, engine, retries=2, every=0.01)}
    assert (ended["good"].error, ended["good"].attempts) == ("", 1) and (tasks / "good").exists()
    assert (ended["dies"].error, ended["dies"].attempts) == ("", 3)
    assert (ended["bad"].error, ended["bad"].attempts) == ("ValueError: it cannot be", 3)
    assert (tasks / "logs/bad.log").read_text().count("so it was") == 3


def test_closing_an_engine_ends_its_tasks(tasks: Path) -> None:
    engine = Local(1)
    process, _ = engine.submit(("sweep_tasks:linger", str(tasks), "here"))
    eventually(lambda: (tasks / "here").exists())
    assert engine.outcome((process, None)) is None
    engine.close()
    assert process.poll() == -signal.SIGTERM


def test_a_worker_ends_with_its_driver(tasks: Path) -> None:
    code = (
        "import time; from cebm.engines import Local\n"
        f"Local(1).submit(('sweep_tasks:linger', {str(tasks)!r}, 'here')); time.sleep(3000)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    eventually(lambda: (tasks / "here").exists() and (tasks / "here").read_text())
    worker = int((tasks / "here").read_text())
    driver.kill()
    driver.wait()
    eventually(lambda: not Path(f"/proc/{worker}").exists())


# ---------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study on the local engine, by the command line."""
    place = tmp_path_factory.mktemp("study")
    (place / "study.py").write_text(STUDY)
    command = [sys.executable, "-m", "cebm", "sweep", "study.py", "--out", "out", "--workers", "2", "--episodes", "3"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "out/results.csv" and "2 of 2: ibc-" in done.stderr
    return place / "out"


def comparable(folder: Path) -> dict[str, Any]:
    return {key: {**record, "seconds": 0} for key, record in records(folder).items()}


def test_a_study_gives_records_a_table_and_a_page(undisturbed: Path) -> None:
    found = records(undisturbed)
    assert list(found) == sorted(run.key for run in small().plan())
    with open(undisturbed / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["objective.count"], row["seed"]) for row in rows] == [("2", "0"), ("3", "0")]
    assert all(0 <= float(row["test.success"]) <= 1 and float(row["training.step"]) == 40 for row in rows)
    page = (undisturbed / "results.html").read_text()
    assert "2 runs of 2 settings with 1 seed<" in page and "objective.count" in page and "test.success" in page
    for record in found.values():
        assert (undisturbed / "runs" / record["key"] / "run.json").exists()
        assert [point[0] for point in record["result"]["curve"]] == [20, 40]


def test_finished_runs_are_not_repeated(undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.glob("records/*")}

    class Idle:
        workers = 1

        def submit(self, task: tuple[str, ...]) -> Any:
            raise AssertionError("nothing is missing")

        def outcome(self, handle: Any) -> str | None: ...

        def close(self) -> None: ...

    found = sweep(small(), Idle(), undisturbed, progress=False)
    assert [record["key"] for record in found] == [run.key for run in small().plan()]
    assert before == {path: path.stat().st_mtime_ns for path in undisturbed.glob("records/*")}


def test_one_folder_has_one_driver(undisturbed: Path) -> None:
    from cebm.storage import LockedError, locked

    with locked(undisturbed, "study"):
        code = f"from cebm.sweep import sweep; sweep([], None, {str(undisturbed)!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert LockedError.__name__ in done.stderr and f"in use by process {os.getpid()}" in done.stderr


def kill_at_random(folder: Path, study: Path, kills: int, seed: int) -> int:
    """Drives the study until it is finished, and kills: workers mostly, every fifth time the driver with them. Returns
    how many processes were killed."""
    chance, done = random.Random(seed), 0
    command = [sys.executable, "-m", "cebm", "sweep", str(study), "--out", str(folder)]
    command += ["--workers", "2", "--episodes", "3", "--retries", "1000"]
    while True:
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while driver.poll() is None:
            time.sleep(chance.uniform(2.0, 4.5))  # a worker takes two seconds to begin
            if done >= kills:
                continue
            children = subprocess.run(["pgrep", "-P", str(driver.pid)], capture_output=True, text=True).stdout.split()
            victims = [int(child) for child in children]
            if victims and chance.random() < 0.8:
                victims = [chance.choice(victims)]
            else:
                victims = [driver.pid]
            for victim in victims:
                try:
                    os.kill(victim, signal.SIGKILL)
                    done += 1
                except ProcessLookupError:
                    pass
        if driver.returncode == 0:
            return done


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_kills_lose_nothing(kills: int, undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(STUDY)
    killed = kill_at_random(tmp_path / "out", tmp_path / "study.py", kills, random.SystemRandom().randrange(1000))
    assert killed == kills
    assert comparable(tmp_path / "out") == comparable(undisturbed)


@pytest.mark.skipif(not have("submitit"), reason="needs the extra submitit")
@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=pytest.mark.slow)])
def test_submitit_gives_the_same(cluster: str, undisturbed: Path, tmp_path: Path) -> None:
    """Without SLURM: its executor's debug mode runs in this process, `local` in processes of its own."""
    engine: Engine = Submitit(tmp_path / "logs", 2, cluster=cluster)
    sweep(small(), engine, tmp_path / "out", episodes=3, progress=False)
    assert comparable(tmp_path / "out") == comparable(undisturbed)


@pytest.fixture
def on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A SLURM of this machine, in folders of its own."""
    (tmp_path / "slurm").mkdir()
    with slurm.running(tmp_path / "slurm") as configuration:
        monkeypatch.setenv("SLURM_CONF", str(configuration))
        yield


@pytest.mark.slow
@pytest.mark.skipif(not have("submitit"), reason="needs the extra submitit")
@pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "SLURM is here")
def test_slurm_gives_the_same_though_a_job_is_killed(
    on_slurm: None, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This SLURM keeps no accounts, so that nobody but its queue knows of the job that is gone."""
    monkeypatch.setattr("cebm.engines.GRACE", 3.0)
    engine = Submitit(tmp_path / "logs", 2)
    assert engine._executor.cluster == "slurm"
    submit, killed = engine.submit, []

    def killing(task: tuple[str, ...]) -> Any:
        job = submit(task)
        if not killed:
            killed.append(job.job_id)
            subprocess.run(["scancel", "--signal=KILL", "--full", job.job_id], check=True)
            subprocess.run(["scancel", job.job_id], check=True)
        return job

    monkeypatch.setattr(engine, "submit", killing)
    sweep(small(), engine, tmp_path / "out", episodes=3, progress=False)
    assert killed and comparable(tmp_path / "out") == comparable(undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(not have("ray"), reason="needs the extra ray")
def test_ray_gives_the_same(undisturbed: Path, tmp_path: Path) -> None:
    from cebm.engines import Ray

    sweep(small(), Ray(2), tmp_path / "out", episodes=3, progress=False)
    assert comparable(tmp_path / "out") == comparable(undisturbed)


def count_files(directory: Path) -> dict[str, Any]:
    return {"files": len(list(directory.iterdir()))}


def test_a_measure_of_ones_own_and_runs_that_fail(tmp_path: Path) -> None:
    """The run with data that are not there fails; the other one is finished, and measured by a function."""
    good = small(over={}, seeds=[0]).plan()[0].job
    bad = replace(good, data=str(tmp_path / "nothing.npz"))
    with pytest.raises(TaskError, match=r"1 of 2 runs failed, the others are finished: ibc-.*nothing.npz.*1 attempts"):
        engine = Local(2, logs=tmp_path / "logs")
        sweep([good, bad], engine, tmp_path / "out", measure=count_files, retries=0, progress=False)
    (record,) = records(tmp_path / "out").values()
    assert record["result"]["files"] >= 4 and main_metric([record]) == "files"
    with pytest.raises(ValueError, match="measure must be a function of a module"):
        sweep([good], Local(1), tmp_path / "out", measure=lambda directory: {})


# ---------------------------------------------------------------------------------------------- results


def record(count: int, seed: int, success: float | None, **more: Any) -> dict[str, Any]:
    result = {"metric": "success", "test.success": success, "curve": [[10, 0.1], [20, success]]} | more
    values = {"objective.count": count, "name": "one" if seed else "two"}
    return {"key": f"{count}-{seed}", "label": "ibc", "seed": seed, "values": values, "seconds": 36, "result": result}


def test_groups_and_effects_are_those_of_the_records(tmp_path: Path) -> None:
    rows = [record(count, seed, 0.1 * count + 0.01 * seed) for count in (2, 4) for seed in (0, 1)]
    rows.append({**record(8, 0, None), "result": {"diverged": "loss is nan"}})
    assert main_metric(rows) == "test.success"
    merged = [{**row, "values": {"objective.count": row["values"]["objective.count"]}} for row in rows]
    best = groups(merged, "test.success")
    assert [group[0] for group in best] == [
        {"trial": "ibc", "objective.count": 4},
        {"trial": "ibc", "objective.count": 2},
    ]
    assert best[0][1].to_json() == pytest.approx(Interval.of([0.4, 0.41]).to_json())
    found = effects(rows, "test.success")
    assert [(value, count) for value, _, count in found["objective.count"]] == [(2, 2), (4, 2)]
    assert found["name"][0][0] == "one"
    assert found["name"][0][1].to_json() == pytest.approx(Interval.of([0.21, 0.41]).to_json())
    written = write_results(rows, tmp_path)
    assert tmp_path / "results.html" in written
    page = (tmp_path / "results.html").read_text()
    assert "8-0 diverged and counts in no mean" in page and "<svg" in page
    assert table(rows)[-1]["diverged"] == "loss is nan"
    assert (
        groups([record(2, 0, None, **{"test.error": 2.0}), record(4, 0, None, **{"test.error": 1.0})], "test.error")[0][
            0
        ]["objective.count"]
        == 4
    )


@pytest.mark.skipif(not have("pyarrow"), reason="needs the extra parquet")
def test_the_table_as_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet

    rows = [record(2, seed, 0.5 * seed) for seed in (0, 1)]
    rows[1]["values"]["name"] = 3
    write_results(rows, tmp_path)
    found = pyarrow.parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert [row["test.success"] for row in found] == [0.0, 0.5] and [row["name"] for row in found] == ["two", "3"]


# ---------------------------------------------------------------------------------------------- before and beyond


def test_an_estimate_counts_what_is_missing(undisturbed: Path, tmp_path: Path) -> None:
    more = small(seeds=range(2))
    here, there = estimate(more, undisturbed, 3), estimate(more, tmp_path, 3)
    assert (here.runs, here.finished, there.finished) == (4, 2, 0)
    assert 0 < here.core_hours < there.core_hours and there.disk_bytes == 2 * here.disk_bytes > 0
    assert "4 runs, 2 of them finished" in here.words(2)


def test_dry_run_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweep_study.py").write_text(STUDY.replace("study =", "mine ="))
    monkeypatch.chdir(tmp_path)
    main(["sweep", "sweep_study.py:mine", "--dry-run", "--out", "out"])
    assert capsys.readouterr().out.startswith("2 runs, 0 of them finished; ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "auto"], "--address belongs to --engine ray, not to local"),
        (["--option", "a=1"], "--option belongs to --engine submitit"),
        (["--workers", "0"], "workers must be at least 1"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / f"other{arguments[0][2:]}.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["sweep", f"other{arguments[0][2:]}.py", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(not have("optuna"), reason="needs the extra optuna")
def test_a_search_is_determined_by_its_records() -> None:
    """Told a metric that falls with the distance of the rate from 1e-3, later rounds come closer than the first."""
    import math

    job = Job("ibc", TRIALS["ibc"], ParticleTask())
    space = {"optimiser.learning_rate": (1e-5, 1e-1, "log"), "objective.count": [4, 8], "steps": (100, 200)}
    study = Tuning(job, space, "score", trials=24, together=4, seeds=(0, 1))

    def told(run: Planned) -> dict[str, Any]:
        value = -abs(math.log10(run.job.trial.optimiser.learning_rate) + 3)
        return {"key": run.key, "result": {"score": value}}

    known: list[dict[str, Any]] = []
    sizes = []
    while missing := [run for key, run in runs_of(study, known).items() if key not in {row["key"] for row in known}]:
        assert [run.key for run in study.plan(known)] == [run.key for run in study.plan(list(reversed(known)))]
        sizes.append(len(missing))
        known += [told(run) for run in missing]
    assert sizes[0] == 8 and sum(sizes) <= 48 and all(100 <= run.job.steps <= 200 for run in study.plan(known))
    scores = [row["result"]["score"] for row in known]
    assert sum(scores[-16:]) / 16 > sum(scores[:16]) / 16
    with pytest.raises(ValueError, match="there is no 'other' in the results; there are score"):
        replace(study, metric="other").plan(known)


@pytest.mark.skipif(not have("optuna"), reason="needs the extra optuna")
def test_a_pruner_gives_settings_up_after_their_first_seeds() -> None:
    """Settings far from the best are not run with all seeds, the best are; records alone determine which."""
    import math

    import optuna

    job = Job("ibc", TRIALS["ibc"], ParticleTask())
    space = {"optimiser.learning_rate": (1e-5, 1e-1, "log")}
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    study = Tuning(job, space, "score", trials=16, together=4, seeds=(0, 1, 2), pruner=pruner)

    def told(run: Planned) -> dict[str, Any]:
        value = -abs(math.log10(run.job.trial.optimiser.learning_rate) + 3)
        return {"key": run.key, "result": {"diverged": "the loss"} if value < -1.8 else {"score": value}}

    known: list[dict[str, Any]] = []
    sizes = []
    while missing := [run for key, run in runs_of(study, known).items() if key not in {row["key"] for row in known}]:
        assert [run.key for run in study.plan(known)] == [run.key for run in study.plan(list(reversed(known)))]
        sizes.append(len(missing))
        known += [told(run) for run in missing]
    planned = study.plan(known)
    seeds: dict[float, set[int]] = {}
    for run in planned:
        seeds.setdefault(run.job.trial.optimiser.learning_rate, set()).add(run.job.seed)
    assert len(seeds) == 16 and sizes[0] == 4  # one seed of each setting of the first round
    assert len(planned) < 48 and all(each in ({0}, {0, 1}, {0, 1, 2}) for each in seeds.values())
    assert seeds[min(seeds, key=lambda rate: abs(math.log10(rate) + 3))] == {0, 1, 2}
    everything = replace(study, pruner=None)
    assert len(everything.plan()) == 12


def test_plans_are_words_only(undisturbed: Path) -> None:
    """A run is described by its settings: what a worker reads is JSON."""
    for path in undisturbed.glob("plans/*.json"):
        plan = json.loads(path.read_text())
        assert plan["job"]["type"] == "cebm.runs:Job" and plan["measure"] is None


def test_the_time_left_is_by_the_pace_since_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((100.0, 160.0, 160.0))
    monkeypatch.setattr("cebm.sweep.display.time", SimpleNamespace(monotonic=lambda: next(clock)))
    shares = {"first": 0.0, "second": 0.0}
    display = Display("test", {"first": 1.0, "second": 2.0}, 4, shares.__getitem__)
    display.finished("first", "")  # a third of the work, in a minute
    assert "3 of 4: first  about 2 min left" in capsys.readouterr().err
    assert display.left(0.0) == ""  # nothing done yet tells nothing


def test_a_log_says_once_in_a_while_how_far_a_long_run_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("cebm.sweep.display.time", SimpleNamespace(monotonic=lambda: now[0]))
    shares = {"first": 0.0, "second": 0.0}
    display = Display("test", {"first": 1.0, "second": 1.0}, 3, shares.__getitem__)
    now[0], shares["first"] = 390.0, 0.5
    display.update()
    assert not capsys.readouterr().err  # too soon
    now[0] = 700.0
    for _ in range(2):
        display.update()
    assert capsys.readouterr().err.splitlines() == ["1 of 3 runs  about 30 min left, 25% of the steps"]


def test_a_share_is_that_of_the_last_row() -> None:
    assert share_of_steps([], 10) == 0.0
    assert share_of_steps([{"step": 2}, {"step": 5}], 10) == 0.5
    assert share_of_steps([{"step": 30}], 10) == 1.0
