"""The report: self-contained, says the right numbers, shows true states, and runs in a real browser."""

import ast
import base64
import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from cebm import acting as acting_room
from cebm import energies, negatives, objectives, optimisers, samplers, tasks
from cebm import report as report_room
from cebm.acting import Found, Problem, Search
from cebm.annealing import AnnealedSearch
from cebm.charts import Chart, Series, number, thinned, tick_labels, ticks
from cebm.composition import settings_of, vary
from cebm.demonstrations import Demonstrations
from cebm.evaluation import evaluate, wilson_interval
from cebm.learning import fit
from cebm.loading import load
from cebm.objectives import PositiveL2
from cebm.recipes import TRIALS
from cebm.report import write_report
from cebm.report.page import guesses, information_words, learning_charts
from cebm.report.records import Run, grouped, interval_of, verdict
from cebm.report.scenes import LEVEL_FRAMES, LEVEL_GRID, Moment, landscapes, moments_of_scene
from cebm.runs import Job, load_metrics, read_record, resume, train
from cebm.samplers import MALA, Langevin
from cebm.settings import StorageError
from cebm.storage import row_line, write_document
from cebm.studio import landscape, search
from cebm.studio.landscape import at_level, energies_of
from cebm.studio.leaf import bundled
from cebm.tasks import Forks, GymnasiumTask, ParticleTask
from cebm.units import Relative
from waiting import PATIENCE

SHORT = ParticleTask(steps=8)
"""Too short to succeed in, but quick."""
SECTIONS = ("learning", "landscape", "rollouts", "energies", "information", "settings")
GOLDEN = Path(__file__).parent / "golden"


def small_job(name: str = "ibc", changed: dict[str, Any] | None = None, **changes: Any) -> Job:
    """A run of seconds; `changed` are settings of the trial by their path."""
    smaller = {"energy.width": 32, "energy.tilt.width": 32, "energy.base.width": 32}
    smaller |= {"optimiser.batch_size": 64, "acting.candidates": 64, **(changed or {})}
    has = settings_of(TRIALS[name]).keys() | (changed or {}).keys()
    trial = vary(TRIALS[name], **{path: value for path, value in smaller.items() if path in has})
    settings = {"task": ParticleTask(), "episodes": 20, "steps": 20, "log_every": 5, "evaluate_every": 10}
    settings |= {"evaluation_episodes": 5, "evaluation_candidates": 8, **changes}
    return Job(name, trial, **settings)


# ---------------------------------------------------------------------------------------------- a user's own pieces


class Line(gymnasium.Env):
    """Move a number to 0.3."""

    observation_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = self.np_random.uniform(-1, 1, 2), 0
        return self.place.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.place = np.clip(self.place + 0.2 * np.array([action[0], -action[0]]), -2, 2)
        away = abs(float(self.place[0]) - 0.3)
        return self.place.astype(np.float32), -away, False, self.time >= 4, {"closeness": 1 - away}


@dataclass(frozen=True)
class LineTask(GymnasiumTask):
    """Without a scene and without a word on success."""

    metric: str = "closeness_at_end"

    def make(self) -> gymnasium.Env:
        return Line()

    def measure(self, rewards: list[float], infos: list[dict[str, Any]]) -> dict[str, float]:
        return {"closeness_at_end": infos[-1]["closeness"]}


@dataclass(frozen=True)
class GradedTask(LineTask):
    """With success beside its metric, and a scene of its own."""

    def measure(self, rewards: list[float], infos: list[dict[str, Any]]) -> dict[str, float]:
        return {**super().measure(rewards, infos), "success": rewards[-1] > -0.1}

    def scene(self, actor: Any, episodes: int) -> dict[str, Any]:
        path = [[0.0, 0.2], [1.0, 0.3]]
        names = ("policy", "expert", "distances", "expert_distances")
        one = {"index": 0, "success": True, "remark": "success", "goals": path, "aims": path[1:]}
        one |= {"expert_aims": path[1:], **dict.fromkeys(names, path)}
        moment = {"title": "Only moment", "step": 1, "obs": [[0.1, 0.2], [0.3, 0.4]], "marks": [("hole", [0.3], 0.1)]}
        scene = {"episodes": [one], "shown": 0, "steps": 1, "dim": 1, "radius": 0.1, "successes": 1}
        return scene | {"expert_successes": 1, "note": "The hole is at 0.3.", "moments": [moment]}


@dataclass(frozen=True)
class SecondBest:
    """A way to act that nobody expects: the second-lowest of 9 draws, and no word on how it went."""

    def search(self, problem: Problem) -> Found:
        actions = problem.clip(problem.uniform(9))
        energies = problem.energies(actions)
        return Found(actions, energies, energies.argsort(1)[:, 1])


@dataclass(frozen=True)
class Boastful(SecondBest):
    """Shows states that are not those of its search."""

    def states(self, problem: Problem) -> Any:
        yield 0, problem.uniform(9)
        yield 1, problem.uniform(9)


def line_data(path: Path) -> str:
    rng = np.random.default_rng(0)
    obs = rng.uniform(-1, 1, (200, 2))
    Demonstrations.from_arrays(obs, np.clip(5 * (0.3 - obs[:, :1]), -1, 1), np.arange(20, 201, 20)).save(path)
    return str(path)


@pytest.fixture(scope="module")
def line_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a user's task."""
    where = tmp_path_factory.mktemp("line")
    job = small_job("steady", task=LineTask(), data=line_data(where / "line.npz"), evaluation_episodes=8)
    train(job, where / "run")
    return where / "run"


# ---------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("runs") / "first"
    train(small_job(), where)
    return where


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    """The page about that run."""
    return write_report([run], run.parent / "report.html").read_text()


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """The run, free to be altered."""
    return Path(shutil.copytree(run, tmp_path / "copied"))


def page(tmp_path: Path, *runs: Path) -> str:
    return write_report(list(runs), tmp_path / "deep" / "report.html").read_text()


def scenes(html: str) -> list[dict[str, Any]]:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html)
    assert found is not None
    return json.loads(found[1])


def unpack(array: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["f32"]), "<f4").reshape(array["shape"])


def marked(scene: dict[str, Any]) -> list[str]:
    """The first mark of every panel."""
    return [panel["picture"]["marks"][0]["kind"] for panel in scene["landscape"]["panels"]]


def heading(html: str) -> str:
    found = re.search(r'<h1 id="verdict">(.*?)</h1>', html, re.DOTALL)
    assert found is not None
    return unescape(found[1]).replace("\u00a0", " ")


def rewrite_metrics(run: Path, change: Any) -> None:
    rows = [change(row) for row in load_metrics(run)]
    (run / "metrics.jsonl").write_text("".join(map(row_line, rows)))


def changed(run: Run, change: Any) -> Run:
    return replace(run, metrics=[change(dict(row)) for row in run.metrics])


def words(html: str) -> str:
    """The text of a page, without what its script draws."""
    text = re.sub(r"<(style|script|svg).*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(text))


def drawn(html: str, where: Path, *arguments: str) -> dict[str, Any]:
    """What the page's script draws, in a document that has just enough of a browser's."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    where.mkdir(exist_ok=True)
    (where / "page.html").write_text(html)
    command = [node, str(Path(__file__).parent / "report_dom.js"), str(where / "page.html"), *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout)


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "action", "xlink:href", "data", "poster")
        self.found += [value or "" for name, value in attrs if name in names]


# ---------------------------------------------------------------------------------------------- the page


def test_page_is_self_contained_and_small(run: Path, html: str) -> None:
    links = Links()
    links.feed(html)
    assert links.found and all(link.startswith(("#", "data:")) for link in links.found)
    for forbidden in ("http://", "https://", "@import", "fetch(", "XMLHttpRequest"):
        assert forbidden not in html
    assert not re.search(r"url\((?!#)", html)  # a clip's own name is no address
    assert len(html) < 3_000_000
    assert str(run.parent) not in html  # no machine paths


def test_every_section_has_its_plots(html: str) -> None:
    assert all(f'<section id="{name}">' in html for name in SECTIONS)
    titles = re.findall(r'class="chart" .*?aria-label="([^"]*)"', html)
    assert titles == [
        *("Success", "InfoNCE", "Action error"),
        *("Energy of data and negatives", "Energy gap", "Gradient norms", "Clipped moves"),
        "Mutual information, nats",
    ]
    (scene,) = scenes(html)
    assert len(scene["landscape"]["panels"]) == 4
    assert scene["landscape"]["steps"] == list(range(11))
    assert len(scene["episodes"]["episodes"]) == 12
    for field in ("learning rate", "batch size", "position gain", "torch", "commit", "hidden layers"):
        assert f"<th>{field}</th>" in html


def test_page_is_a_function_of_the_run(run: Path, html: str, tmp_path: Path) -> None:
    assert page(tmp_path, run) == html


def test_verdict_tells_validation_from_test(copied: Path, html: str, tmp_path: Path) -> None:
    best = max(row["success"] for row in load_metrics(copied) if row["kind"] == "evaluation")
    low, high = wilson_interval(round(best * 5), 5)
    expected = (
        "ibc on the 2-D particle task, 20 demonstrations: "
        f"{100 * best:.0f} % of the 5 validation episodes that chose the checkpoint succeed "
        f"(95 % interval {100 * low:.0f}–{100 * high:.0f} %)."
    )
    assert heading(html) == expected
    assert "Without evaluation on held-out episodes: first." in html

    summary = evaluate(load(copied / "best"), SHORT, episodes=3, latency_calls=1, candidates=4).summary()
    low, high = wilson_interval(91, 100)
    summary |= {"episodes": 100, "successes": 91, "success": 0.91, "success_low": low, "success_high": high}
    write_document(copied / "evaluation.json", summary)
    html = page(tmp_path, copied)
    assert heading(html) == (
        "ibc on the 2-D particle task, 20 demonstrations: "
        "91 % of 100 held-out episodes succeed (95 % interval 84–95 %)."
    )
    table = html.split('<section id="settings">')[1].replace("\u00a0", " ")
    assert "84–95 %" in table and "Final distance" in table
    today = Run.read(copied).evaluation
    (copied / "evaluation.json").write_text(json.dumps(summary))  # as earlier versions wrote it, without a checksum
    assert Run.read(copied).evaluation == today == summary


def test_cautions(copied: Path, html: str, tmp_path: Path) -> None:
    assert 'class="cautions"' not in html

    def spoil(row: dict[str, Any]) -> dict[str, Any]:
        if row["kind"] == "train" and row["step"] > 15:
            row["negative_energy"] = 5e4
        if row["kind"] == "evaluation":
            rate, low, high = (0.9, 0.83, 0.94) if row["step"] == 10 else (0.4, 0.31, 0.5)
            row |= {"success": rate, "success_low": low, "success_high": high}
        return row

    rewrite_metrics(copied, spoil)
    html = page(tmp_path, copied).replace("\u00a0", " ")
    assert "energies diverge: their mean size is 50,000 at the end" in html
    assert "success fell from 90 % at step 10 to 40 % at step 20." in html


def test_a_run_that_only_began(copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "best")
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    (copied / "metrics.jsonl").write_text(lines[0] + "\n" + lines[1][:20])
    html = page(tmp_path, copied)
    assert heading(html).endswith("no evaluation yet after 5 training steps.")
    assert "the run stands at step 5 of 20" in html
    assert scenes(html)[0]["landscape"] is None and "holds no policy yet" in html
    (copied / "metrics.jsonl").unlink()
    assert "Nothing was logged" in page(tmp_path, copied)


def test_errors_name_the_file(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere/run\.json: not a run directory"):
        page(tmp_path, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("evaluation.json", lambda text: "{", r"evaluation\.json: damaged"),
        ("evaluation.json", lambda text: "[]", r"evaluation\.json: damaged"),
        ("evaluation.json", lambda text: '{"episodes": "many"}', r"evaluation\.json: has no number under 'episodes'"),
        ("evaluation.json", lambda text: '{"episodes": 3, "sha256": "0"}', r"evaluation\.json: damaged or altered"),
        ("run.json", lambda text: text[:90], r"run\.json: damaged"),
        ("run.json", lambda text: text.replace('"steps": 20', '"steps": 30'), r"run\.json: damaged or altered"),
        ("metrics.jsonl", lambda text: text.replace('"step": 5', '"step": 6'), r"metrics\.jsonl, line 1: damaged"),
        (
            "metrics.jsonl",
            lambda text: '{"step": 5, "kind": "evaluation"}\n',
            r"metrics\.jsonl: the evaluation of step 5",
        ),
        ("best/header.json", lambda text: text[:90], r"best/header\.json: damaged"),
    ],
)
def test_damaged_files_are_named(file: str, damage: Any, message: str, copied: Path, tmp_path: Path) -> None:
    path = copied / file
    path.write_text(damage(path.read_text() if path.exists() else ""))
    with pytest.raises(StorageError, match=message):
        page(tmp_path, copied)
    assert not (tmp_path / "deep" / "report.html").exists()


def test_several_runs_overlay(run: Path, tmp_path: Path) -> None:
    for name, job in (("second", small_job(seed=1)), ("third", small_job("mse", task=SHORT))):
        train(job, tmp_path / name)
    html = page(tmp_path, run, tmp_path / "second", tmp_path / "third")
    assert re.match(r"Highest of 2 settings(, though not clearly)?: (ibc|mse) on the 2-D", heading(html))
    success = re.search(r'aria-label="Success" data-hover="([^"]*)"(.*?)</svg>', html, re.DOTALL)
    assert success is not None
    lines = json.loads(unescape(success[1]))["lines"]
    assert [line["label"] for line in lines] == ["ibc", "mse"]
    assert success[2].count('class="curve"') == 2 and success[2].count('class="band"') == 2
    rates = [
        next(row["success"] for row in load_metrics(path) if row["kind"] == "evaluation" and row["step"] == 10)
        for path in (run, tmp_path / "second")
    ]
    expected = [number(100 * rate) for rate in (np.mean(rates), min(rates), max(rates))]
    assert lines[0]["text"]["10"] == f"{expected[0]} % ({expected[1]} % to {expected[2]} %)"
    assert [scene["label"] for scene in scenes(html)] == ["ibc", "mse"]
    assert "on average" in html and "What differs" in html and "<td>0, 1</td>" in html


def test_labels_say_what_differs(run: Path) -> None:
    first = Run.read(run)
    longer = replace(first, job=replace(first.job, steps=60))
    assert [group.label for group in grouped([first, longer])] == ["ibc (steps 20)", "ibc (steps 60)"]
    assert "not clearly" in verdict(grouped([first, longer]))
    trial = first.job.trial
    regular = replace(first, job=replace(first.job, trial=replace(trial, penalties=(PositiveL2(0.5),))))
    labels = [group.label for group in grouped([first, regular])]
    assert labels == ["ibc (penalties none)", "ibc (penalties 0 PositiveL2, weight 0.5)"]
    one, two = (replace(first, job=replace(first.job, data=f"/{where}/arm.npz")) for where in "ab")
    assert [group.label for group in grouped([one, two])] == ["ibc", "ibc #2"]


def test_hostile_names_are_escaped(copied: Path, tmp_path: Path) -> None:
    hostile = '</script><script>alert("x")</script><img src=x onerror=alert(1)>\'&'
    record = read_record(copied)
    record["job"]["name"] = hostile
    write_document(copied / "run.json", record)
    renamed = copied.rename(tmp_path / "<b onclick='x'>")
    html = page(tmp_path, renamed)
    links = Links()
    links.feed(html)
    assert links.tags.count("script") == 2 and "img" not in links.tags
    assert "<b onclick" not in html
    assert scenes(html)[0]["label"] == hostile
    assert heading(html).startswith(hostile)


# ---------------------------------------------------------------------------------------------- other kinds of run


@pytest.mark.parametrize("name", ["mse", "mdn"])
def test_explicit_policies_have_a_landscape_without_motion(name: str, tmp_path: Path) -> None:
    train(small_job(name, task=SHORT, steps=10), tmp_path / "run")
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    assert not scene["landscape"]["moves"] and scene["landscape"]["steps"] == [0]
    assert all(panel["moves"]["states"]["shape"] == [1, 1, 2] for panel in scene["landscape"]["panels"])
    assert "explicit" in scene["landscape"]["caption"]
    assert len(scene["episodes"]["episodes"]) == 12


def test_the_scene_of_forks_has_walls_and_no_goals(tmp_path: Path) -> None:
    """Two figures, of expert and policy, and no chart of distances to goals."""
    train(small_job("mse", task=Forks(steps=30), evaluation_episodes=4, steps=5), tmp_path / "run")
    html = page(tmp_path, tmp_path / "run")
    (scene,) = scenes(html)
    assert len(scene["episodes"]["walls"]) == 12 and "all 24 ways" in scene["episodes"]["caption"]
    seen = drawn(html, tmp_path / "node", "", "press")
    assert seen["problems"] == [] and (seen["small"], seen["stage"], seen["strip"]) == (12, 2, 0)


class DrawnLine(Line):
    """Draws its time as a shade of red, in a picture larger than the page wants."""

    def render(self) -> Any:
        return np.full((400, 330, 3), (50 * self.time, 0, 7), np.uint8)


@dataclass(frozen=True)
class DrawnTask(LineTask):
    """A task without a scene of its own, whose environment gives pictures."""

    def make(self) -> gymnasium.Env:
        return DrawnLine()


def test_a_task_without_a_scene_shows_its_own_pictures(tmp_path: Path) -> None:
    """Five of them, the start and four steps, shrunk; and where there are none the page says why."""
    data = line_data(tmp_path / "line.npz")
    train(small_job("mse", task=DrawnTask(), data=data, evaluation_episodes=2, steps=5), tmp_path / "run")
    html = page(tmp_path, tmp_path / "run")
    (scene,) = scenes(html)
    film = scene["film"]
    assert scene["episodes"] is None and film["at"] == film["strip"] == [0, 1, 2, 3, 4]
    assert "4 steps, closeness at end" in film["caption"] and scene["why"] == film["caption"]
    heads = [base64.b64decode(each.partition(",")[2]) for each in film["frames"]]
    assert {struct.unpack(">II", head[16:24]) for head in heads} == {(110, 133)}
    for time, head in enumerate(heads):
        start = head.index(b"IDAT")
        size = struct.unpack(">I", head[start - 4 : start])[0]
        assert zlib.decompress(head[start + 4 : start + 4 + size])[:4] == bytes([0, 50 * time, 0, 7])
    seen = drawn(html, tmp_path / "node", "")
    assert seen["problems"] == [] and seen["strip"] == 5
    assert seen["film"] == {"shown": True, "button": True, "label": "step 0"}
    train(small_job("mse", task=LineTask(), data=data, evaluation_episodes=2, steps=5), tmp_path / "bare")
    (scene,) = scenes(page(tmp_path, tmp_path / "bare"))
    assert scene["film"] is None and "cannot be filmed" in scene["why"]


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_demonstrations_alone(columns: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(200, 3))
    actions = 100 + 7 * obs[:, :columns]
    Demonstrations.from_arrays(obs, actions, np.arange(20, 201, 20)).save(tmp_path / "arm.npz")
    train(small_job(task=None, data=str(tmp_path / "arm.npz"), steps=10), tmp_path / "run")
    html = page(tmp_path, tmp_path / "run")
    (scene,) = scenes(html)
    assert scene["episodes"] is None and "There are no roll-outs" in scene["why"]
    assert heading(html).startswith("ibc, demonstrations from arm.npz: on validation pairs the action is ")
    assert len(scene["landscape"]["panels"]) == 4
    pictures = [panel["picture"] for panel in scene["landscape"]["panels"]]
    assert all(len(picture["energies"]["shape"]) == min(columns, 2) for picture in pictures)
    assert all((picture["density"] is not None) == (columns == 1) for picture in pictures)
    assert marked(scene) == ["demonstrated"] * 4
    assert ("slice" in scene["landscape"]["caption"]) == (columns > 2)
    assert drawn(html, tmp_path / "node", "#frame=0")["problems"] == []
    changed = Demonstrations.from_arrays(obs + 1, actions, np.arange(20, 201, 20))
    changes = (lambda path: path.unlink(), changed.save, lambda path: path.write_bytes(b"damaged"))
    for change in changes if columns == 2 else changes[:1]:
        change(tmp_path / "arm.npz")
        html = page(tmp_path, tmp_path / "run")
        (scene,) = scenes(html)
        assert "not at hand" in scene["landscape"]["panels"][0]["title"] and "one observation" in words(html)


@pytest.mark.parametrize("dim", [1, 16])
def test_other_dimensions(dim: int, tmp_path: Path) -> None:
    train(small_job(task=ParticleTask(dim=dim, steps=8), steps=10), tmp_path / "run")
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    assert scene["episodes"]["dim"] == dim
    assert np.shape(scene["episodes"]["episodes"][0]["policy"]) == (9, 2)
    assert ("slice" in scene["landscape"]["caption"]) == (dim > 2)


def test_history_and_horizon(tmp_path: Path) -> None:
    job = small_job(task=SHORT, steps=10)
    train(replace(job, trial=vary(job.trial, history=2, horizon=3)), tmp_path / "run")
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    assert scene["landscape"]["act_dim"] == 6
    policy = load(tmp_path / "run" / "best")
    seen = [{"title": "", "obs": [[float(t)] * 6 for t in range(count)], "marks": []} for count in (1, 2, 3)]
    windows = [moment.obs for moment in moments_of_scene(policy, {"moments": seen})]
    assert [(window[0], window[-1]) for window in windows] == [(0, 0), (0, 1), (1, 2)]


@pytest.mark.parametrize("name", sorted(path.name for path in (GOLDEN / "runs").iterdir()))
def test_runs_of_the_first_format(name: str, tmp_path: Path) -> None:
    where = tmp_path / name
    shutil.copytree(GOLDEN / "runs" / name, where)
    resume(where)
    html = page(tmp_path, where)
    assert heading(html).startswith(f"{name} on the 2-D particle task")
    assert scenes(html)[0]["landscape"]["panels"] and "<th>learning rate</th>" in html


# ---------------------------------------------------------------------------------------------- contracts, not names


def test_report_names_no_concrete_piece() -> None:
    """What a newcomer adds shows up without a change here."""
    contracts = {"Task", "Actor", "RollOut", "Problem", "Found", "Acting", "TaskError"}
    rooms = (acting_room, energies, negatives, objectives, optimisers, samplers, tasks)
    names = {name for room in rooms for name, value in vars(room).items() if isinstance(value, type)} - contracts
    assert {"Search", "InfoNCE", "Langevin", "ParticleTask", "Tilted", "TiltedEnergy"} <= names
    wrong = names - set(vars(__import__("builtins"))) - {"Any", "Tensor", "Sequence", "Float"}
    for path in Path(report_room.__file__).parent.glob("*.py"):
        used = set()
        for node in ast.walk(ast.parse(path.read_text())):
            used |= {node.id} if isinstance(node, ast.Name) else set()
            used |= {node.attr} if isinstance(node, ast.Attribute) else set()
            used |= {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
        assert not used & wrong, path.name


def test_a_users_task_has_curves_and_landscapes_on_validation_pairs(line_run: Path, tmp_path: Path) -> None:
    html = page(tmp_path, line_run)
    rows = [row for row in load_metrics(line_run) if row["kind"] == "evaluation"]
    best = max(rows, key=lambda row: row["closeness_at_end"])
    low, high = interval_of(best, "closeness_at_end")
    error = 1.96 * best["closeness_at_end_se"]
    assert (low, high) == (best["closeness_at_end"] - error, best["closeness_at_end"] + error)
    assert heading(html) == (
        f"steady on LineTask, demonstrations from line.npz: the mean closeness at end is "
        f"{number(best['closeness_at_end'])} over the 8 validation episodes that chose the checkpoint "
        f"(95 % interval {number(low)} to {number(high)})."
    )
    assert "mean closeness at end of validation episodes" in html and 'aria-label="Success"' not in html
    chart = re.search(r'aria-label="Closeness at end" data-hover="([^"]*)"(.*?)</svg>', html, re.DOTALL)
    assert chart is not None and chart[2].count('class="band"') == 1
    (line,) = json.loads(unescape(chart[1]))["lines"]
    expected = [number(value) for value in (best["closeness_at_end"], low, high)]
    assert line["text"][str(best["step"])] == f"{expected[0]} ({expected[1]} to {expected[2]})"
    (scene,) = scenes(html)
    assert scene["episodes"] is None and "LineTask could not play them" in scene["why"]
    assert marked(scene) == ["demonstrated"] * 4
    seen = drawn(html, tmp_path / "node")
    assert seen["problems"] == [] and seen["ready"] == "true" and all(seen["captions"])
    assert seen["chain"] == {"shown": True, "button": False, "label": "after step 1 of 1"}


def test_an_evaluation_in_a_users_task(line_run: Path, tmp_path: Path) -> None:
    where = Path(shutil.copytree(line_run, tmp_path / "run"))
    summary = evaluate(load(where / "best"), LineTask(), episodes=6, latency_calls=1, candidates=4).summary()
    write_document(where / "evaluation.json", summary)
    html = page(tmp_path, where)
    mean, error = summary["closeness_at_end"], 1.96 * summary["closeness_at_end_se"]
    spread = f"{number(mean - error)} to {number(mean + error)}"
    assert heading(html).endswith(f"is {number(mean)} over 6 held-out episodes (95 % interval {spread}).")
    table = words(html.split('<section id="settings">')[1])
    assert "Run Episodes Closeness at end 95 % interval Return sum" in table and spread in table
    assert "Also in evaluation.json: truncated by limit, info closeness, info closeness max." in table
    # Of one episode there is no error, and no interval.
    write_document(where / "evaluation.json", {"episodes": 1, "closeness_at_end": 0.5})
    html = page(tmp_path, where)
    assert heading(html).endswith("the mean closeness at end is 0.5 over 1 held-out episodes.")
    assert "– / – ms" in words(html)


def test_a_users_scene_with_success_beside_the_metric(tmp_path: Path) -> None:
    job = small_job("steady", task=GradedTask(), data=line_data(tmp_path / "line.npz"), steps=10)
    train(job, tmp_path / "run")
    html = page(tmp_path, tmp_path / "run")
    assert "of the 5 validation episodes that chose the checkpoint succeed" in heading(html)
    titles = re.findall(r'class="chart" .*?aria-label="([^"]*)"', html)
    assert titles[:3] == ["Success", "Closeness at end", "InfoNCE"]
    (scene,) = scenes(html)
    assert scene["episodes"]["caption"].endswith("the expert in 1. The hole is at 0.3.")
    (panel,) = scene["landscape"]["panels"]
    assert panel["title"] == "Only moment" and marked(scene) == ["hole"]
    seen = drawn(html, tmp_path / "node", "", "buttons")
    assert seen["problems"] == [] and "hole" in seen["keys"] and seen["small"] == 1 and seen["stage"] == 3
    assert not seen["episode"]["button"]


def test_a_scene_that_cannot_be_played_is_explained(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(self: Any, actor: Any, episodes: int) -> None:
        raise ValueError("the simulator is not installed")

    monkeypatch.setattr(ParticleTask, "scene", fail)
    (scene,) = scenes(page(tmp_path, run))
    assert "could not play them (the simulator is not installed)" in scene["why"]
    assert scene["landscape"]["panels"][0]["title"].startswith("Validation pair")
    monkeypatch.setattr(ParticleTask, "scene", lambda self, actor, episodes: {"episodes": []})
    (scene,) = scenes(page(tmp_path, run))
    assert "lacks shown, steps, dim" in scene["why"]


@pytest.mark.parametrize(("acting", "moves"), [(SecondBest(), False), (Search(Langevin("ibc", 2), 90), True)])
def test_a_users_way_to_act(acting: Any, moves: bool, tmp_path: Path) -> None:
    job = small_job("uniform", task=SHORT, steps=10)
    train(replace(job, trial=replace(job.trial, acting=acting)), tmp_path / "run")
    html = page(tmp_path, tmp_path / "run")
    (scene,) = scenes(html)
    data = scene["landscape"]
    assert data["moves"] == moves and data["steps"] == ([0, 1, 2] if moves else [0])
    if moves:
        assert "80 of the 90 candidates of the search, in the very states" in data["caption"]
        assert "(8 candidates per action)" in scene["episodes"]["caption"]
    else:
        assert "Dots: the 9 candidates of the search. The ringed one is chosen and" in data["caption"]
        assert "per action" not in scene["episodes"]["caption"] and ">SecondBest<" in html
        policy = load(tmp_path / "run" / "best")
        obs = np.zeros(policy.obs_box.dim, np.float32)
        assert isinstance(policy.acting, SecondBest) and search(policy, obs).chosen >= 0
    seen = drawn(html, tmp_path / "node")
    assert seen["problems"] == [] and seen["chain"]["button"] == moves == seen["chain"]["shown"]
    assert "chosen" in seen["keys"] and "mean energy" in seen["notes"][0]


def test_settings_are_those_of_the_composition(run: Path, line_run: Path, tmp_path: Path) -> None:
    html = page(tmp_path, line_run)
    blocks = re.findall(r'<div class="block"><h3>(.*?)</h3>(.*?)</table>', html, re.DOTALL)
    tables = {title: dict(re.findall(r"<th>(.*?)</th><td>(.*?)</td>", body)) for title, body in blocks}
    titles = ["Run", "Task", "Energy", "Objective", "Penalties", "Optimiser", "Acting", "Inputs", "Made with"]
    assert list(tables) == titles
    assert tables["Task"] == {"task": "LineTask", "metric": "closeness_at_end"}
    energy = tables["Energy"]
    assert energy["energy"] == "Tilted" and energy["tilt"] == "MLP" and energy["tilt.hidden layers"] == "2"
    assert tables["Objective"] == {"objective": "InfoNCE", "source": "Proposed", "count": "4"}
    assert tables["Acting"]["sampler.schedule"] == "Constant" and "test_report" not in str(tables)
    assert tables["Run"]["data"] == "line.npz" and tables["Run"]["steps"] == "20"
    both = page(tmp_path, run, line_run)
    differs = both.split("What differs")[1].split("What is the same")[0]
    assert "<th>Energy: tilt</th><td>–</td><td>MLP</td>" in differs
    assert "<th>Objective: source</th><td>ShortChains</td><td>Proposed</td>" in differs
    assert "Objective: objective" not in differs  # both have InfoNCE


# ---------------------------------------------------------------------------------------------- words for any metric


def test_a_metric_that_fell(line_run: Path) -> None:
    def spoil(row: dict[str, Any]) -> dict[str, Any]:
        if row["kind"] == "evaluation":
            row |= {"closeness_at_end": -120.0 if row["step"] == 10 else -1500.0, "closeness_at_end_se": 30.0}
        return row

    run = changed(Run.read(line_run), spoil)
    assert run.best is not None and run.best["step"] == 10
    assert run.cautions() == ["closeness at end fell from −120 at step 10 to −1,500 at step 20"]
    wide = changed(run, lambda row: row | {"closeness_at_end_se": 900.0})
    unknown = changed(run, lambda row: {k: v for k, v in row.items() if k != "closeness_at_end_se"})
    assert wide.cautions() == unknown.cautions() == []
    (group,) = grouped([unknown])
    assert not len(learning_charts([group])[0].series[0].low)  # no errors, no band


def test_settings_are_ranked_by_any_metric(run: Path, line_run: Path) -> None:
    def at(value: float, error: float | None, **job: Any) -> Run:
        first = Run.read(line_run)
        found = {"closeness_at_end": value} | ({} if error is None else {"closeness_at_end_se": error})
        return replace(first, job=replace(first.job, **job), evaluation={"episodes": 9, **found})

    text = verdict(grouped([at(1.0, 0.1), at(2.0, 0.1, steps=30)]))
    assert text == (
        "Highest of 2 settings: steady on LineTask, demonstrations from line.npz: the mean closeness at end is 2 over "
        "9 held-out episodes (95 % interval 1.8 to 2.2)."
    )
    assert "though not clearly" in verdict(grouped([at(1.0, 1.0), at(2.0, 1.0, steps=30)]))
    assert "though not clearly" in verdict(grouped([at(1.0, None), at(2.0, None, steps=30)]))
    (seeds,) = grouped([at(1.0, 0.1), at(2.0, 0.1, seed=1)])
    assert seeds.result == "on average the mean closeness at end is 1.5 over 9 held-out episodes (seeds 1 to 2)"
    assert "not all of them evaluated alike" in verdict(grouped([at(1.0, 0.1), Run.read(run)]))


@pytest.mark.parametrize("value", [None, math.nan, "high", True])
def test_a_metric_that_is_no_number_is_missing(value: Any, line_run: Path) -> None:
    run = replace(Run.read(line_run), evaluation={"episodes": 9, "success": value, "closeness_at_end": value})
    (group,) = grouped([run])
    assert group.standing.kind == "validation"


def test_a_bound_of_nothing_says_so(copied: Path, tmp_path: Path) -> None:
    first = Run.read(copied)

    def at(bound: float, **job: Any) -> Run:
        found = changed(first, lambda row: row | ({"mi_bound": bound} if "mi_bound" in row else {}))
        return replace(found, job=replace(first.job, **job))

    nothing = "The bound is 0 at the end: there it says nothing. A bound below 0 is logged as 0; "
    (said,) = information_words(grouped([at(0.0)]))
    assert said.startswith(nothing)
    assert information_words(grouped([at(-0.3)])) == [said]  # as the first versions logged it
    assert information_words(grouped([at(5.5)]))[0].startswith("The value is at its ceiling: ")
    assert information_words(grouped([at(2.0)]))[0].startswith("The ceiling is not reached")
    silent, full = information_words(grouped([at(0.0), at(5.5, steps=30)]))
    assert silent.startswith("The bound is 0 at the end for ibc (steps 20)") and "ceiling: ibc (steps 30)" in full
    rewrite_metrics(copied, lambda row: row | ({"mi_bound": 0.0} if "mi_bound" in row else {}))
    assert nothing in words(page(tmp_path, copied))


def test_a_guess_says_so_in_words(line_run: Path, run: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng()

    def logged(first: Run, guess: float, size: float) -> Run:
        rows = [
            {
                "step": k,
                "kind": "train",
                "info_nce": guess + size * generator.normal(),
                "proposal_loss": 1.0,
                "loss": 1.0,
            }
            for k in range(1, 41)
        ]
        return replace(first, metrics=rows)

    steady, ibc = Run.read(line_run), Run.read(run)
    guess = math.log(5)
    # A hundredth of a guess, 0.016, is 25 standard errors of the mean of the last 10 rows: no false alarm.
    assert guesses(grouped([logged(steady, guess, 0.002)])) == [
        "InfoNCE ends at the value of a guess, 1.61: the energy tells nothing beyond its proposal."
    ]
    assert guesses(grouped([logged(steady, guess - 0.3, 0.01)])) == []
    assert guesses(grouped([replace(steady, metrics=[])])) == []
    without = changed(logged(ibc, math.log(9), 0.002), lambda row: {k: v for k, v in row.items() if "pro" not in k})
    both = guesses(grouped([logged(steady, guess, 0.002), without]))
    assert (
        both[1]
        == "ibc: InfoNCE ends at the value of a guess, 2.20: the energy does not tell the data from its negatives."
    )

    where = Path(shutil.copytree(line_run, tmp_path / "run"))
    rows = [*logged(steady, guess, 0.002).metrics, *(row for row in load_metrics(where) if row["kind"] != "train")]
    (where / "metrics.jsonl").write_text("".join(map(row_line, rows)))
    assert "the energy tells nothing beyond its proposal." in words(page(tmp_path, where))


# ---------------------------------------------------------------------------------------------- true pictures


@pytest.mark.parametrize(
    "acting",
    [
        Search(Langevin("ibc", 10, noise=0.1), 64),
        Search(Langevin("ibc", 3, noise=0.1), 64, keep=8),
        Search(Langevin("correct", 5), 16, "draw", 4),
        Search(MALA(steps=100), 8),
        SecondBest(),
        Boastful(),
    ],
    ids=["minimum", "keep", "draw", "long", "second-best", "boastful"],
)
def test_frames_are_the_states_behind_the_action(acting: Any, run: Path) -> None:
    policy = replace(load(run / "best"), acting=acting)
    obs = torch.rand(1, policy.obs_box.dim)
    moves = search(policy, obs, frames=26)
    np.testing.assert_array_equal(moves.action, policy.act(obs)[0])
    found = acting.search(policy.problem(obs))
    assert moves.chosen == int(found.chosen[0])
    np.testing.assert_array_equal(moves.states[-1], found.actions[0])
    if isinstance(acting, Search):  # every frame is a state of the search
        passed = dict(acting.states(policy.problem(obs)))
        assert moves.steps[0] == 0 and moves.steps[-1] == acting.sampler.steps
        for step, state in zip(moves.steps[:-1], moves.states[:-1], strict=False):
            np.testing.assert_array_equal(state, passed[step][0])
    else:
        assert moves.steps == [0]


def test_the_panels_are_the_search_that_acts(run: Path) -> None:
    """The lowest candidate is chosen by default, and what the page gets is what the policy did."""
    policy = load(run / "best")
    moments = [Moment(f"{i}", torch.rand(policy.obs_box.dim).double().numpy()) for i in range(2)]
    found = landscapes(policy, moments)
    assert found["steps"] == list(range(11)) and found["lowest"] and found["moves"]
    for moment, panel in zip(moments, found["panels"], strict=True):
        moves = search(policy, moment.obs)
        assert moves.states.shape == (11, 64, 2) and moves.chosen == moves.energies[-1].argmin()
        np.testing.assert_allclose(unpack(panel["moves"]["states"]), moves.states, atol=1e-6)
        np.testing.assert_allclose(panel["picture"]["action"], policy.act(moment.obs), rtol=1e-6)
        energies = unpack(panel["picture"]["energies"])
        assert min(energies.min(), min(panel["moves"]["lowest"])) == pytest.approx(0, abs=1e-5)
        assert energies.min() >= -1e-5


def test_a_landscape_of_relative_actions_marks_raw_places(generator: torch.Generator) -> None:
    obs = 100 + torch.rand(64, 2, generator=generator)
    policy = fit(obs.numpy(), (obs + 1).numpy(), steps=2, relative=Relative((0, 1), (0, 1), 4.0), trial="mdn")
    at = obs[0].double().numpy()
    marks = [("demonstrated", [float(at[0] + 2), float(at[1] - 1)], 1.0), ("goal", [float(at[0] + 2)], 0.0)]
    drawn = landscapes(policy, [Moment("One", at, marks)])["panels"][0]["picture"]
    for mark in drawn["marks"]:
        assert mark["x"] == pytest.approx(2 / 4, abs=1e-3)
    assert drawn["marks"][0]["y"] == pytest.approx(-1 / 4, abs=1e-3)
    np.testing.assert_allclose(drawn["action"], policy.act(at), rtol=1e-5)


def test_long_chains_show_some_frames(run: Path) -> None:
    policy = replace(load(run / "best"), acting=Search(MALA(steps=100), 8))
    moves = search(policy, torch.zeros(1, policy.obs_box.dim), frames=26)
    assert moves.steps[0] == 0 and moves.steps[-1] == 100 and len(moves.states) == len(moves.steps) == 26


def test_outcomes_on_the_page_are_those_of_the_paths(html: str) -> None:
    (scene,) = scenes(html)
    data = scene["episodes"]
    for episode in data["episodes"]:
        path, goals = np.array(episode["policy"]), np.array(episode["goals"])
        distances = np.linalg.norm(path[:, None] - goals, axis=-1)
        np.testing.assert_allclose(distances, episode["distances"], atol=3e-4)
        nearest, final = distances.min(0), distances[-1, 1]
        if np.abs([*nearest, final] - np.array(0.05)).min() > 1e-3:
            assert episode["success"] == bool((nearest <= 0.05).all() and final <= 0.05)
        expert = np.array(episode["expert_distances"])
        assert expert.min(0).max() <= 0.05 and expert[-1, 1] <= 0.05
    assert data["successes"] == sum(episode["success"] for episode in data["episodes"])


def test_one_script_holds_all_modules() -> None:
    script = bundled("take")
    assert "import {" not in script and "\nexport " not in script
    order = [script.index(f"modules.{name} = ") for name in ("numbers", "svg", "draw", "plane", "landscape", "take")]
    assert order == sorted(order)
    with pytest.raises(ValueError, match=r"no module nowhere\.js"):
        bundled("nowhere")
    with pytest.raises(ValueError, match=r"main\.js imports in a way"):
        bundled("main")


# ---------------------------------------------------------------------------------------------- charts


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 41), (1e-6, 3e-6), (0, 123456), (2.18, 2.1957), (-1e7, 5)])
def test_ticks_are_round_few_and_told_apart(low: float, high: float) -> None:
    places = ticks(low, high)
    assert 2 <= len(places) <= 6 and low <= places[0] and places[-1] <= high + 1e-9 * abs(high)
    assert len(set(tick_labels(places))) == len(places)


def test_long_curves_keep_their_spikes() -> None:
    y = np.zeros(10_000)
    y[[17, 5_003]] = 9.0, -4.0
    short = thinned(Series("loss", range(10_000), y.tolist()), 240)
    assert len(short.x) <= 250 and max(short.y) == 9.0 and min(short.y) == -4.0


def test_gaps_interrupt_a_curve() -> None:
    nan, inf = float("nan"), float("inf")
    html = Chart("x", [Series("loss", [1, 2, 3, 4, 5], [1.0, 2.0, nan, 3.0, inf])]).__html__()
    path = re.search(r'class="curve" .*? d="([^"]*)"', html)
    assert path is not None and path[1].count("M") == 2
    assert "nan" not in html and "inf" not in path[1]
    assert "Nothing was logged" in Chart("x", [Series("loss", [1], [nan])]).__html__()


def test_bands_stop_where_nothing_is_known() -> None:
    nan = float("nan")
    html = Chart("x", [Series("y", [1, 2, 3], [1.0, 2.0, 3.0], low=[0.0, nan, 2.0], high=[2.0, nan, 4.0])]).__html__()
    band = re.search(r'class="band" .*? d="([^"]*)"', html)
    assert band is not None and band[1].count("M") == 2 and "nan" not in html


# ---------------------------------------------------------------------------------------------- in a browser


def test_light_and_dark_have_the_same_colours(html: str) -> None:
    light, dark = re.findall(r":root[^{]*\{(.*?)\}", html, re.DOTALL)
    names = [set(re.findall(r"(--[a-z]+):", block)) for block in (light, dark)]
    assert names[0] == names[1] and "@media screen and (prefers-color-scheme: dark)" in html
    assert set(re.findall(r"var\((--[a-z]+)\)", html)) <= names[0]


def test_script_draws_the_numbers(html: str, tmp_path: Path) -> None:
    seen = drawn(html, tmp_path, "#frame=3&time=20")
    assert seen["problems"] == [] and seen["ready"] == "true"
    assert (seen["charts"], seen["panels"], seen["images"], seen["small"], seen["stage"]) == (8, 4, 4, 12, 3)
    assert seen["chain"] == {"shown": True, "button": True, "label": "after step 3 of 10"}
    assert seen["episode"]["label"] == "control step 20 of 50"
    (scene,) = scenes(html)
    for panel, circles in zip(scene["landscape"]["panels"], seen["circles"], strict=True):
        limit, chosen = panel["picture"]["limit"], panel["moves"]["chosen"]
        # The picture has a side of 952 in the test's canvas of 1000; circles of 3 are candidates, of 7 the chosen one.
        states = unpack(panel["moves"]["states"])[3]
        places = [(40 + (x / limit + 1) * 476, 6 + (1 - y / limit) * 476) for x, y in states]
        small = [circle[:2] for circle in circles if circle[2] == 3]
        np.testing.assert_allclose(sorted(small), sorted(places), atol=1e-2)
        (ring,) = {tuple(circle[:2]) for circle in circles if circle[2] == 7}
        np.testing.assert_allclose(ring, places[chosen], atol=1e-2)
    assert drawn(html, tmp_path, "", "buttons")["problems"] == []
    # And a number that is none would be seen.
    assert drawn(html.replace('"radius": 0.05', '"radius": "x"'), tmp_path)["problems"]


def test_page_runs_in_chromium(html: str, tmp_path: Path) -> None:
    """It draws, asks nobody for anything, and fits narrow windows, in light and dark; and an error would be seen."""
    driver = pytest.importorskip("browser", reason="the browser is driven over a websocket: pip install 'cebm[serve]'")
    if driver.chromium() is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    report, broken = tmp_path / "report.html", tmp_path / "broken.html"
    report.write_text(html)
    broken.write_text(html.replace("document.body.dataset.ready", "document.boody.dataset.ready"))
    with driver.browser() as browser:
        for width, dark in ((1200, False), (800, True), (400, False)):
            browser.look(width, 900, dark=dark)
            browser.open(f"{report.as_uri()}#frame=3&time=20", "document.body?.dataset.ready === 'true'")
            assert browser.run("document.documentElement.scrollWidth") <= width
            colours = browser.run(
                "[...document.querySelectorAll('#panels canvas')].map((canvas) => new Set(canvas.getContext('2d')"
                ".getImageData(0, 0, canvas.width, canvas.height).data).size)"
            )
            assert len(colours) == 4 and min(colours) > 50
            across = browser.run(
                "new Set([...document.querySelectorAll('#panels figure')].map((each) => each.offsetLeft)).size"
            )
            assert across == (4 if width == 1200 else 2)
            browser.keep(f"report-{width}-{'dark' if dark else 'light'}")
        labels = browser.run("[...document.querySelectorAll('.player output')].map((each) => each.textContent)")
        assert labels[:2] == ["after step 3 of 10", "control step 20 of 50"]
        browser.run("""(() => { const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
            chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top })); })()""")
        assert browser.run("document.querySelector('#tip').firstChild.textContent") == "step 20"
        assert browser.errors == []
        assert {url.split(":")[0] for url in browser.requests} <= {"file", "data", "about"}
        browser.call("Page.navigate", url=broken.as_uri())
        browser.until("document.readyState === 'complete'")
        assert browser.errors and browser.run("document.body.dataset.ready") is None


# ---------------------------------------------------------------------------------------------- what the energy adds


def with_difference(run: Path, difference: Any, **changes: Any) -> None:
    """An evaluation in which the energy was ignored too, as `cebm eval --without-energy` leaves it."""
    ends = dict(zip(("success_low", "success_high"), wilson_interval(60, 100), strict=True))
    bare = {"episodes": 100, "seed": 1, "successes": 60, "success": 0.6, **ends, "difference": difference}
    ends = dict(zip(("success_low", "success_high"), wilson_interval(90, 100), strict=True))
    summary = {"episodes": 100, "seed": 1, "metric": "success", "successes": 90, "success": 0.9, **ends}
    write_document(run / "evaluation.json", summary | {"without_energy": bare} | changes)


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ([0.3, 0.2, 0.4], "Its energy adds +30.0 points (95 % interval +20.0 to +40.0, paired by episode)."),
        ([0.01, -0.02, 0.04], "The energy adds nothing that these episodes can tell: +1.0 points"),
        ([-0.3, -0.4, -0.2], "Its energy does harm: −30.0 points (95 % interval −40.0 to −20.0, paired by episode)."),
    ],
)
def test_the_page_says_what_the_energy_adds(difference: list[float], said: str, copied: Path, tmp_path: Path) -> None:
    with_difference(copied, difference)
    html = page(tmp_path, copied).replace("\u00a0", " ")
    assert said in html and "With the energy ignored, success in the same episodes is 60 %" in html
    assert "<th" in html and f"{copied.name}, energy ignored" in html.split('<section id="settings">')[1]


def test_without_a_difference_the_page_says_nothing_of_it(copied: Path, html: str, tmp_path: Path) -> None:
    for difference in (None, [0.1], [None, 0.0, 1.0]):
        with_difference(copied, difference)
        assert "energy adds" not in (found := page(tmp_path, copied)) and "energy ignored" in found
    with_difference(copied, [0.1, 0.0, 0.2], without_energy="many")
    assert "energy ignored" not in page(tmp_path, copied)
    assert "energy ignored" not in html


def test_candidates_fall_through_levels_each_with_its_own_landscape(tmp_path: Path) -> None:
    """Every frame shows the energy at the level of its candidates, and they are counted by that energy."""
    changes = {"energy.encoder_width": 32, "acting.candidates": 8}
    train(small_job("annealed", changes, steps=10, evaluate_every=10), tmp_path / "run")
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    shown, policy = scene["landscape"], load(tmp_path / "run/best")
    acting, d = policy.acting, policy.energy.deviation
    assert isinstance(acting, AnnealedSearch)
    levels = [acting.sampler.level(k) * d for k in range(5)]
    assert shown["levels"] == pytest.approx([*levels, acting.level * d]) and len(shown["spans"]) == 6
    assert "fall through noise levels from 2.5" in shown["caption"]
    moment = Moment("One", np.full(policy.obs_box.dim, 0.3))
    found = landscapes(policy, [moment])
    (panel,) = found["panels"]
    moves = search(policy, moment.obs)
    assert len(panel["grounds"]) == len(moves.states) == 6 and moves.levels == pytest.approx(found["levels"])
    for frame, level in enumerate(found["levels"]):
        ground = landscape(policy, moment.obs, points=LEVEL_GRID, level=level, held=moves.states[-1, moves.chosen])
        drawn, energies = unpack(panel["grounds"][frame]), unpack(panel["moves"]["energies"])[frame]
        np.testing.assert_allclose(drawn - drawn.min(), ground.energies - ground.energies.min(), atol=1e-4)
        own = at_level(policy.problem(moment.obs), level)
        wanted = energies_of(own, torch.as_tensor(moves.states[frame]).float())
        np.testing.assert_allclose(energies - energies[0], wanted - wanted[0], atol=1e-3)
        assert min(drawn.min(), energies.min()) == pytest.approx(0, abs=1e-4)
    fifty = replace(policy, acting=replace(acting, sampler=replace(acting.sampler, steps=50)))
    assert len(landscapes(fifty, [moment])["levels"]) == LEVEL_FRAMES
