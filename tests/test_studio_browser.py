"""The studio in a real browser: controls do what they say, and the page asks nobody else."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cebm
from cebm.recipes import TRIALS
from cebm.runs import Job, train
from cebm.studio import Desk, landscape, open_subject
from cebm.studio.server import StudioServer
from cebm.tasks import ParticleTask

pytest.importorskip("websockets", reason="the browser is driven over a websocket: pip install 'cebm[serve]'")
from browser import Browser, browser, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium"),
]
SIZES = [(1024, 700), (1440, 900), (420, 800)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small runs of the particle task."""
    found = []
    for seed in (0, 1):
        found.append(tmp_path_factory.mktemp("studio") / f"run-{seed}")
        job = Job("uniform", TRIALS["uniform"], ParticleTask(), steps=60, episodes=40, seed=seed, evaluate_every=60)
        train(job, found[-1])
    return found


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[StudioServer]:
    with StudioServer(Desk([open_subject(run) for run in runs])) as server:
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


def text(page: Browser, selector: str) -> str:
    return page.run(f"document.querySelector('{selector}').textContent")


def shown_action(page: Browser) -> np.ndarray:
    return np.array([float(word) for word in text(page, "#chosen").split(",")])


def settled(page: Browser, act: str, what: str = "#landscape") -> None:
    """Runs a script and waits for the next fine landscape (or search)."""
    ready = f"Number(document.querySelector('{what}').dataset.ready)"
    before = page.run(ready)
    page.run(act)
    page.until(f"{ready} > {before}")


def seen(page: Browser) -> list[float]:
    return page.run("import('./state.js').then((state) => state.view.obs)")


def pixels(page: Browser, selector: str = "#landscape") -> str:
    return page.run(f"document.querySelector('{selector}').toDataURL()")


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
    box = page.run("(({x, y, width, height}) => [x, y, width, height])(document.querySelector('#scene')"
                   ".getBoundingClientRect())")  # fmt: skip
    side, obs, before = min(box[2], box[3]) - 16, seen(page), shown_action(page)
    left, top = box[0] + (box[2] - side) / 2, box[1] + (box[3] - side) / 2
    start = (left + obs[6] * side, top + (1 - obs[7]) * side)
    end = (left + 0.8 * side, top + 0.2 * side)
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


def test_one_switch_shows_that_ibc_collapses(page: Browser) -> None:
    energies = {}
    for way in ("ibc", "correct"):
        settled(page, f"document.querySelector('[name=way][value={way}]').click()", "#words")
        energies[way] = float(page.run("document.querySelector('#along').rows[1].cells[1].textContent"))
    assert energies["ibc"] < energies["correct"]
    before = pixels(page)
    page.run("(() => { const frame = document.querySelector('#frame'); frame.value = 0;"
             " frame.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert text(page, "#frame-value") == "step 0" and pixels(page) != before
    settled(
        page,
        "(() => { const steps = document.querySelector('[data-path=\"sampler.steps\"]'); steps.value = 3;"
        " steps.dispatchEvent(new Event('change')); })()",
        "#words",
    )
    assert text(page, "#frame-value") == "step 3"


def test_curves_of_one_coordinate_and_the_other_palette(page: Browser) -> None:
    settled(page, "(() => { const up = document.querySelector('#axis-up'); up.value = ''; up.onchange(); })()")
    assert "density" in text(page, "#legend")
    settled(page, "(() => { const up = document.querySelector('#axis-up'); up.value = 1; up.onchange(); })()")
    before = pixels(page)
    page.run("(() => { const all = document.querySelector('#palette'); all.value = 'cividis'; all.onchange(); })()")
    assert pixels(page) != before


def test_the_other_panels_draw(page: Browser, runs: list[Path]) -> None:
    page.run("document.querySelector('#tab-compare').click()")
    page.until("document.querySelector('#compared').textContent.includes('Total variation')")
    page.run("document.querySelector('#tab-training').click()")
    page.until("document.querySelector('#trained').textContent.includes('Step 60 of 60')")
    page.until("document.querySelector('#checkpoint').value === '60'")
    page.run("document.querySelector('#tab-take').click()")
    assert "cebm.load" in text(page, "#lines")


def test_a_link_restores_the_view(page: Browser, server: StudioServer) -> None:
    page.until("document.querySelector('#link').value.includes(encodeURIComponent('\"tab\":\"take\"'))")
    link, before, obs = page.run("document.querySelector('#link').value"), shown_action(page), seen(page)
    page.open(link)
    page.until("Number(document.querySelector('#landscape').dataset.ready) > 0")
    assert seen(page) == obs and page.run("document.querySelector('#palette').value") == "cividis"
    np.testing.assert_allclose(shown_action(page), before, atol=1e-6)
    assert page.run("document.querySelector('#tab-take').getAttribute('aria-selected')") == "true"
    page.open(f"{server.url}#%7Bdamaged")
    page.until("Number(document.querySelector('#landscape').dataset.ready) > 0")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_overflows(page: Browser, size: tuple[int, int], dark: bool) -> None:
    page.look(*size, dark=dark)
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
        "[...document.querySelectorAll('input, select, button, canvas')].filter((each) => !(each.labels?.length"
        " || each.getAttribute('aria-label') || each.textContent.trim())).map((each) => each.outerHTML)"
    )
    assert nameless == []
