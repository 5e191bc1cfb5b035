"""The studio in a real browser: controls do what they say, and the page asks nobody else. A picture of each panel is
kept in build/screenshots."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cebm
from cebm.acting import Search
from cebm.annealing import AnnealedSearch
from cebm.energies import MLP, NoiseConditional
from cebm.policy import EnergyPolicy
from cebm.recipes import TRIALS
from cebm.runs import Job, train
from cebm.samplers import Langevin
from cebm.spaces import Box, Specification
from cebm.studio import (
    Desk,
    Subject,
    compare,
    formulations,
    landscape,
    log_densities,
    open_subject,
    principal,
    rolled,
    search,
    with_values,
)
from cebm.studio.server import StudioServer
from cebm.tasks import ParticleTask, PushT

pytest.importorskip("websockets", reason="the browser is driven over a websocket: pip install 'cebm[serve]'")
from browser import Browser, browser, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium"),
]
SIZES = [(1024, 700), (1440, 900), (420, 800)]
PUSHT, LEVELS, CHUNK = 2, 3, 4
"""Policies that the page is asked for by their number, after the two runs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small runs of the particle task."""
    found = []
    for seed in (0, 1):
        found.append(tmp_path_factory.mktemp("studio") / f"run-{seed}")
        job = Job("uniform", TRIALS["uniform"], ParticleTask(), steps=60, episodes=40, seed=seed, evaluate_every=60)
        quick = replace(job, evaluation_episodes=4, evaluation_candidates=16, checkpoint_every=30, log_every=10)
        train(quick, found[-1])
    return found


def untrained(energy: Any, obs_dim: int, act_dim: int, **settings: Any) -> EnergyPolicy:
    """A policy with random weights, for things that no training changes."""
    generator = torch.Generator()
    generator.seed()
    spec = Specification.flat(obs_dim, act_dim)
    side = settings.pop("side", 1.0)
    boxes = (Box.from_bounds([0.0] * dim, [side] * dim) for dim in (obs_dim, act_dim))
    return EnergyPolicy(energy.build(spec, generator), *boxes, **settings)


@pytest.fixture(scope="module")
def subjects(runs: list[Path]) -> list[Subject]:
    """The runs, one of Push-T, one with noise levels, and one with more coordinates than a picture has."""
    acting = Search(Langevin("ibc", steps=5, noise=0.1), candidates=32)
    pushed = untrained(MLP(), 5, 2, side=512.0, acting=acting)
    chunk = untrained(MLP(), 2, 4, acting=acting)
    actions = np.random.default_rng(0).uniform(size=(60, 4))
    data = cebm.Demonstrations.from_arrays(np.linspace(0, 1, 120).reshape(60, 2), actions, [30, 60])
    return [
        *map(open_subject, runs),
        Subject("push-t", pushed, task=PushT("state")),
        Subject("levels", untrained(NoiseConditional(), 2, 2, acting=AnnealedSearch(candidates=4))),
        Subject("chunk", chunk, demonstrations=data),
    ]


@pytest.fixture(scope="module")
def server(subjects: list[Subject]) -> Iterator[StudioServer]:
    with StudioServer(Desk(subjects)) as server:
        yield server


@pytest.fixture(scope="module")
def page(server: StudioServer) -> Iterator[Browser]:
    with browser() as page:
        page.look(1024, 700)
        page.open(server.url)
        page.until("Number(document.querySelector('#landscape').dataset.ready) > 0")
        page.until("document.querySelector('#words').textContent")
        yield page
        assert page.errors == []
        hosts = {url.split("/")[2] for url in page.requests if url.startswith("http")}
        assert hosts == {f"127.0.0.1:{server.port}"}


def put(page: Browser, selector: str, value: Any, event: str = "change") -> None:
    """Sets a control as a person does."""
    page.run(
        f"(() => {{ const each = document.querySelector({json.dumps(selector)}); each.value = {json.dumps(value)};"
        f" each.dispatchEvent(new Event('{event}')); }})()"
    )


def look_at(page: Browser, subject: int) -> None:
    """Chooses a policy and waits for its picture."""
    ready = "Number(document.querySelector('#landscape').dataset.ready)"
    before = page.run(ready)
    put(page, "#subject", str(subject))
    page.until(f"{ready} > {before}")


def text(page: Browser, selector: str) -> str:
    return page.run(f"document.querySelector('{selector}').textContent")


PUT = """(where, what, event = "onchange") => {
    const each = document.querySelector(where); each.value = what; each[event](); }"""
"""Sets a control, in a page's own script."""


def shown_action(page: Browser) -> np.ndarray:
    return np.array([float(word) for word in text(page, "#chosen").split(",")])


def settled(page: Browser, act: str, what: str = "#landscape") -> None:
    """Runs a script and waits for the next fine landscape (or search)."""
    ready = f"Number(document.querySelector('{what}').dataset.ready || 0)"
    before = page.run(ready)
    page.run(act)
    page.until(f"{ready} > {before}")


def seen(page: Browser) -> list[float]:
    return page.run("import('./state.js').then((state) => state.view.obs)")


def pixels(page: Browser, selector: str = "#landscape") -> str:
    return page.run(f"document.querySelector('{selector}').toDataURL()")


def scene_place(page: Browser, at: tuple[float, float], side: float = 1.0, down: bool = False) -> tuple[float, float]:
    """Where a place of the scene is on the screen."""
    box = page.run("(({x, y, width, height}) => [x, y, width, height])(document.querySelector('#scene')"
                   ".getBoundingClientRect())")  # fmt: skip
    size = min(box[2], box[3]) - 16
    left, top = box[0] + (box[2] - size) / 2, box[1] + (box[3] - size) / 2
    up = at[1] / side if down else 1 - at[1] / side
    return left + at[0] / side * size, top + up * size


def test_the_numbers_shown_are_those_of_the_library(page: Browser, runs: list[Path]) -> None:
    policy = cebm.load(runs[0])
    mine = landscape(policy, seen(page))
    np.testing.assert_allclose(shown_action(page), mine.action, atol=1e-5)
    assert float(text(page, "#energy")) == pytest.approx(mine.energy, abs=1e-5)


def test_a_slider_changes_the_landscape(page: Browser, runs: list[Path]) -> None:
    before, obs = pixels(page), seen(page)
    settled(
        page,
        "(() => { const slider = document.querySelector('[data-column=\"6\"]'); slider.value = 0.05;"
        " slider.dispatchEvent(new Event('input')); })()",
    )
    assert seen(page)[6] == pytest.approx(0.05, abs=0.01) != obs[6] and pixels(page) != before
    mine = landscape(cebm.load(runs[0]), seen(page))
    np.testing.assert_allclose(shown_action(page), mine.action, atol=1e-5)


def test_dragging_a_goal_moves_the_chosen_action(page: Browser, runs: list[Path]) -> None:
    obs, before = seen(page), shown_action(page)
    start, end = scene_place(page, (obs[6], obs[7])), scene_place(page, (0.8, 0.8))
    ready = "Number(document.querySelector('#landscape').dataset.ready)"
    count = page.run(ready)
    page.drag(start, end)
    page.until(f"{ready} > {count}")
    page.until("Math.abs(Number(document.querySelector('[data-column=\"6\"]').value) - 0.8) < 0.02")
    after = seen(page)
    assert after[6:] == pytest.approx([0.8, 0.8], abs=0.02) and after[:6] == pytest.approx(obs[:6])
    page.until("document.querySelector('#latency').textContent")
    np.testing.assert_allclose(shown_action(page), cebm.load(runs[0]).act(np.array(after)), atol=1e-5)
    assert np.abs(shown_action(page) - before).max() > 1e-3


def test_keys_move_a_point_of_the_scene(page: Browser) -> None:
    obs = seen(page)
    page.run("document.querySelector('#scene').focus()")
    for key in ("3", "ArrowRight"):
        page.run(f"document.querySelector('#scene').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
    assert seen(page)[0] == pytest.approx(obs[0] + 0.01) and seen(page)[1:] == pytest.approx(obs[1:])


def test_one_switch_shows_that_ibc_collapses(page: Browser, runs: list[Path]) -> None:
    energies = {}
    for way in ("ibc", "correct"):
        settled(page, f"document.querySelector('[name=way][value={way}]').click()", "#words")
        energies[way] = float(page.run("document.querySelector('#numbers-along').rows[1].cells[1].textContent"))
        page.keep(f"search-{way}")
    assert energies["ibc"] < energies["correct"]
    before = pixels(page)
    put(page, "#frame", 0, "input")
    assert text(page, "#frame-value") == "step 0" and pixels(page) != before
    page.run("document.querySelector('#play').click()")
    page.until("document.querySelector('#frame-value').textContent !== 'step 0'")
    page.run("document.querySelector('#play').click()")
    settled(page, "document.querySelector('#anew').click()", "#words")
    settled(page, f"({PUT})('[data-path=\"sampler.steps\"]', 3)", "#words")
    settled(page, f"({PUT})('[data-path=\"candidates\"]', 20)", "#words")
    settled(page, f"({PUT})('#seed', 11)", "#words")
    assert text(page, "#frame-value") == "step 3"
    way = with_values(formulations()["correct"], {"sampler.steps": 3, "candidates": 20})
    moves = search(cebm.load(runs[0]), seen(page), way, seed=11)
    told = [float(row) for row in page.run("[...document.querySelector('#numbers-along').rows].map((row) =>"
                                          " row.cells[1].textContent)")]  # fmt: skip
    mine = [20, moves.energies[-1].mean(), moves.energies[-1].min(), moves.gradients[-1], moves.changed[-1]]
    np.testing.assert_allclose(told, [*mine, moves.spread[-1]], rtol=1e-5, atol=1e-5)
    assert page.run("document.querySelectorAll('#along .curve').length") == 3
    settled(page, "document.querySelector('#reset').click()", "#words")
    page.run("document.querySelector('#certify').click()")
    page.until("document.querySelector('#certificate').textContent.includes('gaussian: samples the target')")


def test_curves_of_one_coordinate_and_the_other_palette(page: Browser) -> None:
    settled(page, "(() => { const up = document.querySelector('#axis-up'); up.value = ''; up.onchange(); })()")
    assert "density" in text(page, "#legend")
    page.keep("curve")
    settled(page, "(() => { const up = document.querySelector('#axis-up'); up.value = 1; up.onchange(); })()")
    before = pixels(page)
    page.run("(() => { const all = document.querySelector('#palette'); all.value = 'cividis'; all.onchange(); })()")
    assert pixels(page) != before


def test_a_fresh_roll_out_is_stepped_through(page: Browser, subjects: list[Subject]) -> None:
    settled(page, f"({PUT})('#episode', 4)", "#scene")
    settled(page, f"({PUT})('#source', 'rolled')", "#scene")
    settled(page, f"({PUT})('#step', 7, 'oninput')", "#scene")
    played, row = rolled(subjects[0], 4)
    np.testing.assert_allclose(seen(page), played.obs[7], atol=1e-6)
    assert "success" in text(page, "#rolled") and str(row["success"]).lower() in text(page, "#rolled")
    page.run("document.querySelector('#walk').click()")
    page.until("Number(document.querySelector('#step-value').textContent) > 8")
    page.run("document.querySelector('#walk').click()")
    settled(page, f"({PUT})('#source', 'data')", "#scene")


def test_two_policies_are_compared(page: Browser, runs: list[Path]) -> None:
    page.run("document.querySelector('#tab-compare').click()")
    page.until("document.querySelector('#compared').textContent.includes('Total variation')")
    page.until("Number(document.querySelector('#densities').dataset.ready) > 0")
    policies, obs = [cebm.load(run) for run in runs], seen(page)
    both = compare(*policies, obs, points=64)
    told = text(page, "#compared")
    numbers = [float(each) for each in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", re.sub(r"run-\d", "", told))]
    np.testing.assert_allclose(numbers, [*both.first.action, *both.second.action, both.distance], rtol=1e-5, atol=1e-5)
    cell = float(text(page, "#densities tr:nth-child(2) td:nth-child(2)").split(" ")[0])
    assert cell == pytest.approx(log_densities(policies[:1], obs, policies[0].act(obs))[0][0], abs=1e-2)
    page.keep("compare")


def test_training_is_followed_without_being_disturbed(page: Browser, runs: list[Path]) -> None:
    """A checkpoint that appears is shown; the run's files stay as they are."""
    page.run("document.querySelector('#tab-training').click()")
    page.until("document.querySelector('#trained').textContent.includes('Step 60 of 60')")
    page.until("document.querySelector('#checkpoint').value === '60'")
    page.until("document.querySelector('#curves .curve') !== null")
    page.until("document.querySelector('#moment-title').textContent.includes('Step 60 chooses')")
    page.keep("training")
    files = {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")}
    newest = runs[0] / "checkpoints" / "step-00000060"
    newest.rename(runs[0] / "hidden")
    try:
        page.until("document.querySelector('#checkpoint').value !== '60'")
    finally:
        (runs[0] / "hidden").rename(newest)
    page.until("document.querySelector('#checkpoint').value === '60'")
    touched = [path for path, when in files.items() if path.is_file() and path.stat().st_mtime_ns != when]
    assert touched == []


def test_every_panel_is_taken_away_as_png_and_svg(page: Browser) -> None:
    page.run("document.querySelector('#tab-take').click()")
    assert "cebm.load" in text(page, "#lines")
    panels = page.run(
        "[...new Set([...document.querySelectorAll('#images button:enabled')].map((each) => each.dataset.of))]"
    )
    assert panels == ["landscape", "scene", "along", "second", "difference", "curves", "moment"]
    for panel in panels:
        svg = page.run(f"import('./take.js').then((take) => take.svgOf('{panel}'))")
        drawn = re.sub(r'base64,[^"]*', "", svg)  # letters of a picture may spell anything
        assert drawn.startswith("<svg") and "NaN" not in drawn and "var(" not in drawn and drawn.count("<") > 20
        size = page.run(
            "import('./take.js').then(async (take) => {"
            f" const map = await createImageBitmap(await take.pngOf('{panel}'));"
            " const canvas = new OffscreenCanvas(map.width, map.height), pen = canvas.getContext('2d');"
            " pen.drawImage(map, 0, 0); const { data } = pen.getImageData(0, 0, map.width, map.height);"
            " return [map.width, new Set(data).size]; })"
        )
        assert size[0] > 300 and size[1] > 20, panel
    page.keep("take-away")


def test_the_view_is_taken_away_as_a_page(page: Browser, tmp_path: Path) -> None:
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    settled(page, "document.querySelector('#leaf').click()", "#leaf")
    end = tmp_path / "cebm-view.html"
    page.until("true")
    for _ in range(100):
        if end.exists() and end.stat().st_size:
            break
        page.run("new Promise((done) => setTimeout(done, 50))")
    with browser() as other:
        other.look(900, 900)
        other.open(end.as_uri())
        assert other.run("document.querySelector('#landscape').dataset.drawn") == "1"
        assert "of draws would lie" in other.run("document.body.textContent").replace("those ", "")
        other.keep("leaf")
        assert other.errors == [] and not [url for url in other.requests if url.startswith("http")]


def test_a_link_gives_the_same_picture(page: Browser, server: StudioServer) -> None:
    page.until("document.querySelector('#link').value.includes(encodeURIComponent('\"tab\":\"take\"'))")
    link, before, obs = page.run("document.querySelector('#link').value"), shown_action(page), seen(page)
    drawn = pixels(page)
    page.open(link)
    page.until("Number(document.querySelector('#landscape').dataset.ready) > 0")
    assert seen(page) == obs and page.run("document.querySelector('#palette').value") == "cividis"
    np.testing.assert_allclose(shown_action(page), before, atol=1e-6)
    assert page.run("document.querySelector('#tab-take').getAttribute('aria-selected')") == "true"
    page.until(f"document.querySelector('#landscape').toDataURL() === {json.dumps(drawn)}", 10)
    for damaged in ("%7Bdamaged", "%7B%22axes%22%3A%5B7%2C9%5D%2C%22obs%22%3A%5B1%5D%2C%22level%22%3A3%7D"):
        page.open(f"{server.url}#{damaged}")
        page.until("Number(document.querySelector('#landscape').dataset.ready) > 0")


# ---------------------------------------------------------------------------------------------- other policies


def test_dragging_the_block_of_push_t_moves_the_landscape(page: Browser, subjects: list[Subject]) -> None:
    look_at(page, PUSHT)
    obs, before = seen(page), pixels(page)
    start = scene_place(page, (obs[2], obs[3]), 512, down=True)
    ready = "Number(document.querySelector('#landscape').dataset.ready)"
    count = page.run(ready)
    # Block and agent lie on each other in the middle: the second point is taken with a key, and moved by keys.
    page.run("document.querySelector('#scene').focus()")
    for key in ("2", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.run(f"document.querySelector('#scene').dispatchEvent(new KeyboardEvent('keydown',"
                 f" {{key: '{key}', shiftKey: true}}))")  # fmt: skip
    page.until(f"{ready} > {count}")
    moved = seen(page)
    assert moved[:2] == pytest.approx([obs[0] + 25.6, obs[1] + 51.2]) and moved[2:] == pytest.approx(obs[2:])
    count = page.run(ready)
    page.drag(start, scene_place(page, (100, 400), 512, down=True))
    page.until(f"{ready} > {count}")
    page.until("Math.abs(Number(document.querySelector('[data-column=\"2\"]').value) - 100) < 6")
    after = seen(page)
    assert after[2:4] == pytest.approx([100, 400], abs=6) and after[:2] == pytest.approx(moved[:2])
    np.testing.assert_allclose(shown_action(page), subjects[PUSHT].policy.act(np.array(after)), rtol=1e-5, atol=1e-3)
    assert pixels(page) != before
    page.keep("push-t")


def test_another_policy_does_not_show_the_search_of_the_one_before(page: Browser) -> None:
    look_at(page, 0)
    page.until("document.querySelector('#words').textContent")
    left = page.run(
        f"(() => {{ ({PUT})('#subject', '{PUSHT}'); return document.querySelector('#words').textContent"
        " + document.querySelector('#numbers-along').textContent + document.querySelector('#along').textContent; })()"
    )
    assert left == ""
    page.until("document.querySelector('#words').textContent")


def test_the_slider_goes_through_the_noise_levels(page: Browser, subjects: list[Subject]) -> None:
    look_at(page, LEVELS)
    before, policy = pixels(page), subjects[LEVELS].policy
    settled(page, f"({PUT})('#level', document.querySelector('#level').max, 'oninput')")
    level = policy.energy.levels[0]
    assert float(text(page, "#level-value")) == pytest.approx(level, rel=1e-2) and pixels(page) != before
    mine = landscape(policy, seen(page), level=level)
    assert float(text(page, "#energy")) == pytest.approx(mine.energy, rel=1e-5, abs=1e-5)
    page.keep("levels")


def test_a_plane_is_of_coordinates_directions_or_minimised(page: Browser, subjects: list[Subject]) -> None:
    look_at(page, CHUNK)
    policy, obs = subjects[CHUNK].policy, seen(page)
    shown = "import('./landscape.js').then(({ shown }) => Array.from(shown.picture.values))"
    choices = {
        "axes": (f"({PUT})('#axis-up', 3)", {"axes": (0, 3)}),
        "minimised": ("document.querySelector('#minimised').click()", {"axes": (0, 3), "minimised": True}),
        "principal": ("document.querySelector('#principal').click()", {"minimised": True}),
    }
    for name, (act, view) in choices.items():
        settled(page, act)
        directions = principal(subjects[CHUNK]) if name == "principal" else None
        mine = landscape(policy, obs, **view, directions=directions)
        np.testing.assert_allclose(page.run(shown), mine.energies.ravel(), rtol=1e-4, atol=1e-4)
        page.keep(f"plane-{name}")
    assert "principal direction 1" in page.run("document.querySelector('#landscape').getAttribute('aria-label')")


def test_a_run_that_is_deleted_is_a_message_and_no_crash(runs: list[Path], tmp_path: Path) -> None:
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    with StudioServer(Desk([open_subject(copy)])) as server, browser() as page:
        page.open(server.url)
        page.run("document.querySelector('#tab-training').click()")
        page.until("document.querySelector('#checkpoint').value")
        shutil.rmtree(copy)
        page.until("document.querySelector('#error').textContent.includes('copy')")
        settled(page, "document.querySelector('#tab-search').click()", "#words")
        page.errors.clear()  # the refused question itself, which Chromium logs


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_overflows(page: Browser, size: tuple[int, int], dark: bool) -> None:
    page.look(*size, dark=dark)
    if page.run("document.querySelector('#subject').value") != "0":
        look_at(page, 0)
    for tab in ("compare", "training", "take", "search"):
        page.run(f"document.querySelector('#tab-{tab}').click()")
        page.until(f"!document.querySelector('#panel-{tab}').hidden")
        assert page.run("document.documentElement.scrollWidth") <= size[0], tab
    page.keep(f"{size[0]}-{'dark' if dark else 'light'}")
    assert page.run("document.documentElement.scrollWidth") <= size[0]
    wide = page.run(
        "[...document.querySelectorAll('section')].filter((each) => each.scrollWidth > each.clientWidth + 1)"
        ".map((each) => each.id)"
    )
    assert wide == []
    red, green, blue = page.run(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
    )
    assert (max(red, green, blue) < 60) is dark


def test_every_control_has_a_name(page: Browser) -> None:
    nameless = page.run(
        "[...document.querySelectorAll('input, select, button, canvas:not([aria-hidden])')].filter((each) =>"
        " !(each.labels?.length || each.getAttribute('aria-label') || each.textContent.trim()))"
        ".map((each) => each.outerHTML)"
    )
    assert nameless == []
