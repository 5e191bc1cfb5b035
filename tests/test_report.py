"""The report: self-contained, says the right numbers, shows true states, and runs in a real browser."""

import base64
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cebm.envs.particle import ParticleTask
from cebm.training import Job, load_metrics, train
from cebm.trials import TRIALS

from cebm.demonstrations import Demonstrations
from cebm.evaluation import evaluate, wilson_interval
from cebm.policy import ImplicitPolicy, load
from cebm.report import write_report
from cebm.report.charts import Chart, Series, heat_map, number, thinned, tick_labels, ticks
from cebm.report.records import Run, grouped, verdict
from cebm.report.scenes import chain
from cebm.samplers import MALA
from cebm.storage import StorageError

SHORT = ParticleTask(steps=8)
"""Too short to succeed in, but quick."""
SECTIONS = ("learning", "landscape", "rollouts", "energies", "information", "settings")


def small_job(name: str = "ibc", **changes: Any) -> Job:
    trial = TRIALS[name]
    trial = replace(trial, network=replace(trial.network, width=32), batch_size=64, candidates=64)
    settings = {"task": ParticleTask(), "episodes": 20, "steps": 20, "log_every": 5, "evaluate_every": 10}
    settings |= {"evaluation_episodes": 5, "evaluation_candidates": 8, **changes}
    return Job(name, trial, **settings)


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
    found = re.search(r"const SCENES = (.*);\n", html)
    assert found is not None
    return json.loads(found[1])


def heading(html: str) -> str:
    found = re.search(r'<h1 id="verdict">(.*?)</h1>', html, re.DOTALL)
    assert found is not None
    return unescape(found[1]).replace("\u00a0", " ")


def rewrite_metrics(run: Path, change: Any) -> None:
    rows = [change(row) for row in load_metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    for forbidden in ("http://", "https://", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert forbidden not in html
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
    (copied / "evaluation.json").write_text(json.dumps(summary))
    html = page(tmp_path, copied)
    assert heading(html) == (
        "ibc on the 2-D particle task, 20 demonstrations: "
        "91 % of 100 held-out episodes succeed (95 % interval 84–95 %)."
    )
    assert "84–95 %" in html.split('<section id="settings">')[1]


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
    (copied / "evaluation.json").write_text("{")
    with pytest.raises(StorageError, match=r"evaluation\.json: damaged"):
        page(tmp_path, copied)


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


def test_hostile_names_are_escaped(copied: Path, tmp_path: Path) -> None:
    hostile = '</script><script>alert("x")</script><img src=x onerror=alert(1)>\'&'
    record = json.loads((copied / "run.json").read_text())
    record["job"]["name"] = hostile
    (copied / "run.json").write_text(json.dumps(record))
    renamed = copied.rename(tmp_path / "<b onclick='x'>")
    html = page(tmp_path, renamed)
    links = Links()
    links.feed(html)
    assert links.tags.count("script") == 1 and "img" not in links.tags
    assert "<b onclick" not in html
    assert scenes(html)[0]["label"] == hostile
    assert heading(html).startswith(hostile)


# ---------------------------------------------------------------------------------------------- other kinds of run


@pytest.mark.parametrize("name", ["mse", "mdn"])
def test_explicit_policies_have_a_landscape_without_motion(name: str, tmp_path: Path) -> None:
    train(small_job(name, task=SHORT, steps=10), tmp_path / "run")
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    assert not scene["landscape"]["moves"] and scene["landscape"]["steps"] == [0]
    assert all(len(panel["dots"][0]) == 1 for panel in scene["landscape"]["panels"])
    assert "explicit" in scene["landscape"]["caption"]
    assert len(scene["episodes"]["episodes"]) == 12


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
    assert all(("curve" in panel) == (columns == 1) for panel in scene["landscape"]["panels"])
    assert all(panel["marks"][0]["kind"] == "demonstrated" for panel in scene["landscape"]["panels"])
    assert ("slice" in scene["landscape"]["caption"]) == (columns > 2)
    (tmp_path / "arm.npz").unlink()
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    assert "not at hand" in scene["landscape"]["panels"][0]["title"]


@pytest.mark.parametrize("dim", [1, 16])
def test_other_dimensions(dim: int, tmp_path: Path) -> None:
    train(small_job(task=ParticleTask(dim=dim, steps=8), steps=10), tmp_path / "run")
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    assert scene["episodes"]["dim"] == dim
    assert np.shape(scene["episodes"]["episodes"][0]["policy"]) == (9, 2)
    assert ("slice" in scene["landscape"]["caption"]) == (dim > 2)


def test_history_and_horizon(tmp_path: Path) -> None:
    job = small_job(task=SHORT, steps=10)
    train(replace(job, trial=replace(job.trial, history=2, horizon=3)), tmp_path / "run")
    (scene,) = scenes(page(tmp_path, tmp_path / "run"))
    assert scene["landscape"]["act_dim"] == 6


# ---------------------------------------------------------------------------------------------- true pictures


def test_frames_are_the_states_behind_the_action(run: Path) -> None:
    policy = load(run / "best")
    obs = torch.rand(1, policy.obs_box.dim)
    context = policy.energy.encode(policy.obs_box.normalise(obs))
    frames, steps = chain(policy, context)
    assert steps == list(range(11)) and all(frame.shape == (1, 64, 2) for frame in frames)
    winner = policy.energy.energies(context, frames[-1]).argmin()
    chosen = policy.act_box.denormalise(frames[-1][0, winner]).clamp(*policy.limits)
    torch.testing.assert_close(chosen, policy.act(obs)[0], rtol=0, atol=0)


def test_long_chains_show_some_frames(run: Path) -> None:
    policy = load(run / "best")
    assert isinstance(policy, ImplicitPolicy)
    long = replace(policy, sampler=MALA(steps=100), candidates=8)
    frames, steps = chain(long, long.energy.encode(torch.zeros(1, policy.obs_box.dim)))
    assert steps[0] == 0 and steps[-1] == 100 and len(frames) == len(steps) == 26


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


def test_png_holds_the_values() -> None:
    values = np.linspace(0.0, 4.0, 12).reshape(3, 4)
    values[2, 3] = 99.0
    content = base64.b64decode(heat_map(values, 0.0, 4.0).removeprefix("data:image/png;base64,"))
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, place = {}, 8
    while place < len(content):
        length = int.from_bytes(content[place : place + 4])
        kind, data = content[place + 4 : place + 8], content[place + 8 : place + 8 + length]
        assert int.from_bytes(content[place + 8 + length : place + 12 + length]) == zlib.crc32(kind + data)
        chunks[kind] = data
        place += 12 + length
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    pixels = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(3, 5)
    np.testing.assert_allclose(pixels[:, 1:], 255 * np.sqrt(np.minimum(values / 4, 1)), atol=0.51)
    assert len(chunks[b"PLTE"]) == 3 * 256


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


# ---------------------------------------------------------------------------------------------- in a browser


def browse(url: str, profile: Path) -> tuple[str, str]:
    """The document after its script has run, and what Chromium logged."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000"]
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def test_page_runs_in_chromium(html: str, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    # A pointer over the first chart, then the document as it is.
    hover = """<script>
    const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
    chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top }));
    </script></body>"""
    report.write_text(html.replace("</body>", hover))
    dom, log = browse(f"{report.as_uri()}#frame=3&time=20", tmp_path / "profile")
    assert "CONSOLE" not in log
    assert 'data-ready="true"' in dom
    assert dom.count('class="chart heat"') == 4 and dom.count("<image ") == 5  # four panels and the colour bar
    assert len(re.findall(r'class="small( failed)?"', dom)) == 12
    assert dom.count("<svg") > 8 + 4 + 12 + 3
    assert "<div>step 20</div>" in dom
    assert "after step 3 of 10" in dom and "control step 20 of 50" in dom
    # The dots of frame 3 are where the numbers say.
    (scene,) = scenes(html)
    for panel in scene["landscape"]["panels"]:
        x, y = panel["dots"][3][5]
        assert re.search(rf'cx="{x}" cy="{y}"', dom)

    # And an error would be seen.
    broken = tmp_path / "broken.html"
    broken.write_text(html.replace("document.body.dataset.ready", "document.boody.dataset.ready"))
    dom, log = browse(broken.as_uri(), tmp_path / "profile")
    assert "CONSOLE" in log and 'data-ready="true"' not in dom
