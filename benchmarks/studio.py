"""How fast the studio follows a control, and whether its memory stays flat, in a real browser.

    .venv/bin/python -m benchmarks.studio [--interactions 0]

`cebm studio` serves four policies of the particle task, trained for a few steps: what a landscape costs depends on the
network and the search, and not on how good the policy is. A slider of the page is moved, with pauses of up to 0.4
seconds, and the page's own clock runs from the event to the coarse and to the fine picture on the canvas. The
server's processor time for both pictures is read too, because it means something on a busy machine as well. Then
interactions of all kinds follow each other, with small pictures, while the memory of server and page is read.
Writes docs/studio.json.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cebm import ParticleTask, fit
from cebm.composition import vary
from cebm.recipes import TRIALS
from cebm.storage import write_atomically
from tests.browser import Browser, browser

RESULTS = Path(__file__).parent.parent / "docs" / "studio.json"
CHUNK = 16
POLICIES = {"steady": ("steady", 1), "ibc": ("ibc", 1), "annealed": ("annealed", 1), "chunks": ("annealed", CHUNK)}
"""By the names of their directories: the recipe, and how many actions a call gives."""
CASES = {
    **{name: (name, {}) for name in POLICIES},
    "chunks, minimised": ("chunks", {"minimised": True}),
    "chunks, principal directions": ("chunks", {"principal": True}),
}
"""What is timed: a policy, and what is set in its view."""
READY = "Number(document.querySelector('#landscape').dataset.ready || 0)"
SETTLED = "Number(document.querySelector('#words').dataset.ready || 0)"
WATCH = """(async () => {
  const { afterDrawing } = await import('./landscape.js');
  window.drawn = [];
  afterDrawing(() => queueMicrotask(() => window.drawn.push(performance.now())));
  window.moveSlider = (column, share) => {
    const slider = document.querySelector(`[data-column="${column}"]`);
    slider.value = Number(slider.min) + share * (slider.max - slider.min);
    slider.dispatchEvent(new Event('input'));
  };
  window.timed = async (column, share) => {
    window.drawn.length = 0;
    const began = performance.now();
    window.moveSlider(column, share);
    while (window.drawn.length < 2) await new Promise((done) => setTimeout(done, 1));
    return window.drawn.slice(0, 2).map((at) => at - began);
  };
})()"""
"""The picture is on the canvas when the microtask runs; the page draws within the same turn."""
SMALL = """(() => {
  const { fetch } = window;
  const few = '"values":{"candidates":8,"sampler.steps":5}';
  const small = (body) => body.replace(/"points":(64|96)/, '"points":24').replace('"values":{}', few);
  window.fetch = (where, what) => fetch(where, { ...what, body: small(what.body) });
  window.after = async (act) => {
    const ready = () => Number(document.querySelector('#landscape').dataset.ready || 0), before = ready();
    act();
    while (ready() === before) await new Promise((done) => setTimeout(done, 1));
  };
})()"""
"""Smaller pictures and searches, so that 10,000 interactions take minutes: what one leaves behind does not depend on
its size."""


def prepared(folder: Path, steps: int = 10) -> list[Path]:
    """The policies and their data, on disk."""
    task = ParticleTask()
    data = task.demonstrations(40, 0)
    data.save(folder / "demonstrations.npz")
    found = []
    for name, (recipe, horizon) in POLICIES.items():
        trial = TRIALS[recipe]
        chunked = vary(trial, inputs=replace(trial.inputs, horizon=horizon))
        fit(data, trial=chunked, steps=steps, limits=task.limits).save(folder / name)
        found.append(folder / name)
    return found


@contextlib.contextmanager
def studio(folder: Path, policies: list[Path]) -> Iterator[tuple[str, int]]:
    """The address of a studio in a process of its own, and the process."""
    command = [sys.executable, "-m", "cebm", "studio", *map(str, policies), "--no-open", "--task", "particle"]
    command += ["--data", str(folder / "demonstrations.npz")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def look_at(page: Browser, number: int, view: dict[str, Any]) -> None:
    """Shows a policy, with a view, and waits for its picture and for its search."""
    page.run("document.querySelector('#tab-search').click()")  # other tabs search nothing
    ready, settled = page.run(READY), page.run(SETTLED)
    patch = {"principal": False, "minimised": False, **view}
    page.run(
        f"(async () => {{ const box = document.querySelector('#subject'); box.value = '{number}'; box.onchange();"
        f" (await import('./state.js')).change({json.dumps(patch)}); }})()"
    )
    page.until(f"{READY} > {ready} && {SETTLED} > {settled}")


def latency(page: Browser, process: int, moves: int, generator: Random) -> Iterator[dict[str, Any]]:
    """Milliseconds from the event to the pictures, for every case."""
    for case, (name, view) in CASES.items():
        look_at(page, list(POLICIES).index(name), view)
        found = []
        for k in range(-3, moves):
            page.run(f"new Promise((done) => setTimeout(done, {generator.uniform(0, 400):.0f}))")
            times = page.run(f"window.timed({generator.randrange(8)}, {generator.random():.3f})")
            found += [times] if k >= 0 else []
        # With another tab nothing is searched, so the server works for the pictures alone.
        page.run("document.querySelector('#tab-training').click()")
        page.run("window.timed(0, 0.5)")
        began = processor_seconds(process)
        for _ in range(moves):
            page.run(f"window.timed({generator.randrange(8)}, {generator.random():.3f})")
        spent = 1e3 * (processor_seconds(process) - began) / moves
        page.run("document.querySelector('#tab-search').click()")
        coarse, fine = ([row[i] for row in found] for i in (0, 1))
        spread = {**_spread("coarse", coarse), **_spread("fine", fine)}
        yield {"case": case, "moves": moves, **spread, "server_cpu_ms": round(spent, 1)}


def processor_seconds(process: int) -> float:
    """What a process, with all its threads, has used of the processors."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _spread(name: str, times: list[float]) -> dict[str, float]:
    return {f"{name}_ms": round(median(times), 1), f"{name}_ms_p95": round(quantiles(times, n=20)[-1], 1)}


def interact(page: Browser, k: int, generator: Random) -> None:
    """One interaction; kinds follow each other in a fixed order."""
    if k % 200 == 199:
        look_at(page, k // 200 % len(POLICIES), {})
        return
    if k % 20 == 19:
        way, tab = (("ibc", "search"), ("correct", "compare"), ("own", "take"))[k // 20 % 3]
        page.run(f"document.querySelector('[name=way][value={way}]').click()")
        page.run(f"document.querySelector('#tab-{tab}').click()")
        page.run("import('./take.js').then((take) => take.svgOf('landscape').length)")
    elif k % 10 == 9:
        step = "document.querySelector('#step')"
        page.run(f"window.after(() => {{ {step}.value = {generator.randrange(20)}; {step}.oninput(); }})")
    else:
        moved = f"window.moveSlider({generator.randrange(8)}, {generator.random():.3f})"
        page.run(f"window.after(() => {moved})")


def memory(page: Browser, process: int, interactions: int, generator: Random) -> Iterator[dict[str, Any]]:
    """Megabytes of the server and of the page's heap, eleven times."""
    for k in range(interactions + 1):
        if k % (interactions // 10) == 0:
            page.call("HeapProfiler.collectGarbage")
            page.requests.clear()
            heap = page.call("Runtime.getHeapUsage")["usedSize"]
            yield {"interactions": k, "server_mb": resident(process), "page_mb": round(heap / 1e6, 1)}
        interact(page, k, generator)


def resident(process: int) -> float:
    """Megabytes of memory that a process holds."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return round(kilobytes / 1e3, 1)


def measure(moves: int, interactions: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """What is known so far, after each new row: what is not measured is left out."""
    generator = Random(seed)
    found: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__}
    with TemporaryDirectory() as folder:
        policies = prepared(Path(folder))
        with studio(Path(folder), policies) as (address, process), browser() as page:
            page.look(1024, 700)
            page.open(address)
            page.until(f"{READY} > 0 && {SETTLED} > 0")
            page.run(WATCH)
            for row in latency(page, process, moves, generator) if moves else ():
                found["latency"] = [*found.get("latency", []), row]
                yield {**found, "load": round(os.getloadavg()[0], 1)}
            if interactions:
                look_at(page, 0, {})
                page.run(SMALL)
            for row in memory(page, process, interactions, generator) if interactions else ():
                found["memory"] = [*found.get("memory", []), row]
                yield found
            if page.errors:
                raise SystemExit(f"the page complained: {page.errors[:5]}")


def main() -> None:
    """Measures, and writes after each row; what is not measured this time stays as it was."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studio", description=__doc__)
    parser.add_argument("--moves", type=int, default=60, help="moves of a slider per case; 0: none")
    parser.add_argument("--interactions", type=int, default=10_000, help="a multiple of 10; 0: none")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the browser and the studio end too
    before = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for found in measure(arguments.moves, arguments.interactions):
        print({name: rows[-1] for name, rows in found.items() if isinstance(rows, list)}, flush=True)
        write_atomically(arguments.out, (json.dumps({**before, **found}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
