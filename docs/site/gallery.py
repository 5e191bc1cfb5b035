"""The gallery's pictures and numbers, made by running the examples: `python -m docs.site.gallery [NAME ...]`.

The results are committed (docs/gallery), as some examples take minutes or need a browser. Each is kept with a
fingerprint of its example's code, so that the tests say when one has to be made again.
"""

import ast
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import cebm
from tests.browser import browser as chromium

ROOT = Path(__file__).parents[2]
WHERE = ROOT / "docs/gallery"
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
SOURCES = {
    "compose": "compose.py",
    "new_trial": "new_trial.py",
    "own_pieces": "own_pieces.py",
    "obstacle": "obstacle.py",
    "control_loop": "control_loop.py",
    "browser": "deploy/page.py",
    "robot": "deploy/act.cpp",
}
"""The examples by the names of their pictures."""
Numbers = dict[str, str]


def of_python(source: str) -> str:
    """The code of a Python file without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body.pop(0)
    return ast.dump(tree)


def fingerprint(name: str) -> str:
    """Of an example's code: another one asks for another picture."""
    path = ROOT / "examples" / SOURCES[name]
    text = path.read_text(encoding="utf-8")
    return hashlib.sha256((of_python(text) if path.suffix == ".py" else text).encode()).hexdigest()[:16]


def records() -> dict[str, dict[str, Any]]:
    """By picture: the fingerprint of the code that made it, and the numbers that it printed."""
    path = WHERE / "records.json"
    return json.loads(path.read_text()) if path.exists() else {}


def example(name: str) -> Any:
    """The module of an example."""
    sys.path.insert(0, str((ROOT / "examples" / SOURCES[name]).parent))
    return importlib.import_module(Path(SOURCES[name]).stem)


def panels(count: int, width: float = 3.0, height: float = 2.7) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    figure = Figure(figsize=(count * width, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, count)))


# ---------------------------------------------------------------------------------------------- the examples


def compose() -> tuple[Figure, Numbers]:
    """The densities that three ways to train learn from the same data."""
    found = example("compose").main()
    figure, each = panels(len(found))
    x, y = torch.linspace(-1, 1, 80), torch.linspace(-1.1, 1.1, 160)
    for axes, (name, (energy, nll)) in zip(each, found.items(), strict=True):
        with torch.no_grad():
            energies = energy(x[:, None], y[None, :, None].expand(len(x), -1, -1))
        density = torch.softmax(-energies, 1) * len(y) / 2.2
        axes.imshow(density.T, origin="lower", extent=(-1, 1, -1.1, 1.1), aspect="auto")
        axes.set(title=f"{name}\n{nll:.2f} nats", xlabel="observation")
        axes.title.set_fontsize(8)
    each[0].set_ylabel("action")
    return figure, {name: f"{nll:.2f}" for name, (_, nll) in found.items()}


def new_trial() -> tuple[Figure, Numbers]:
    """Loss and learned energy of the recipe."""
    module = example("new_trial")
    with tempfile.TemporaryDirectory() as folder:
        losses: list[tuple[int, float]] = []

        def listen(row: dict[str, Any]) -> None:
            if row["kind"] == "train":
                losses.append((row["step"], row["loss"]))

        longer = replace(module.job, steps=800, episodes=200, evaluate_every=800)
        outcome = cebm.train(longer, f"{folder}/mine", listen=listen)
    figure, (left, right) = panels(2, 3.6)
    left.plot(*zip(*losses, strict=True), color=BLUE)
    left.set(xlabel="training step", ylabel="loss", ylim=(0, None))
    action = torch.linspace(-1, 1, 200)
    obs = module.job.task.demonstrations(1, 0).obs
    for frame, colour in ((0, ORANGE), (len(obs) - 1, GREEN)):
        seen = outcome.policy.obs_box.normalise(torch.as_tensor(obs[frame])[None])
        with torch.no_grad():
            energies = outcome.policy.energy(seen, action[None, :, None])[0]
        right.plot(action, energies - energies.min(), color=colour, label=f"step {frame} of an episode")
    right.set(xlabel="action, normalised", ylabel="energy above its minimum")
    right.legend(fontsize=8)
    return figure, {"loss": f"{losses[-1][1]:.2f}"}


class Paths:
    """Notes where an actor was and what it did."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.obs, self.actions = actor, [], []  # type: ignore[var-annotated]

    def reset(self) -> None:
        """A new batch of episodes."""
        self.actor.reset()

    def act(self, obs: np.ndarray) -> np.ndarray:
        """The actor's action."""
        actions = np.asarray(self.actor.act(obs))
        self.obs.append(np.array(obs))
        self.actions.append(actions)
        return actions


def own_pieces() -> tuple[Figure, Numbers]:
    """Roll-outs of both compositions past the wall."""
    module = example("own_pieces")
    task, numbers = module.reach, {}
    shown = task.demonstrations(200, 0)
    figure, each = panels(2, 3.2)
    for axes, name in zip(each, ("mine", "levels"), strict=True):
        policy = cebm.fit(shown, trial=getattr(module, name), steps=400, limits=task.limits)
        clean, generator = 0, torch.Generator().manual_seed(0)
        for seed in range(20):
            paths = Paths(cebm.Runner(policy, generator=generator))
            row = task.roll_out(paths, 1, 100 + seed).rows[0]
            fine = row["clean_height"] > 0.5
            clean += fine
            track = np.concatenate(paths.obs)
            axes.plot(track[:, 0], track[:, 1], color=BLUE if fine else ORANGE, alpha=0.5)
        axes.add_patch(_rectangle())
        axes.set(title=f"{name}: {clean} of 20 get past", xlim=(-1.4, 1.4), ylim=(-1.3, 2), xlabel="place")
        numbers[name] = str(clean)
    return figure, numbers


def _rectangle() -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((-0.3, -0.2), 0.6, 0.4, color="#444444")


def obstacle() -> tuple[Figure, Numbers]:
    """Set-points with and without the constraints, and the success of all ways to act."""
    module = example("obstacle")
    task = cebm.ParticleTask(dim=2)
    from matplotlib.patches import Circle

    numbers = {"reachable": f"{100 * module.reachable(task, 200, 11):.1f} %"}
    figure, each = panels(2, 3.2)
    drawn = dict(zip(("steady, no constraint", "steady, constrained"), each, strict=True))
    for name, actor in module.actors(task, 1500).items():
        watched = module.Watched(actor)
        paths = Paths(watched)
        rows = task.roll_out(paths, 200, 11).rows
        success = np.mean([bool(row["success"]) for row in rows])
        numbers |= {name: str(watched.collisions), f"{name}, success": f"{100 * success:.1f} %"}
        if name in drawn:
            axes, points = drawn[name], np.concatenate(paths.actions)
            for disc in module.DISCS:
                axes.add_patch(Circle(disc.centre, 0.08, color="#444444", alpha=0.5))
            axes.plot(points[:, 0], points[:, 1], ".", color=BLUE, alpha=0.15, markersize=3)
            title = f"{watched.collisions} set-points in a disc\n{success:.1%} of episodes succeed"
            axes.set_title(title, fontsize=9)
            axes.set_aspect("equal")
    return figure, numbers


def control_loop() -> tuple[Figure, Numbers]:
    """The action over the ticks of one episode, with an answer that is late."""
    module = example("control_loop")
    task, numbers = cebm.ParticleTask(dim=2), {}
    figure, each = panels(2, 3.8)
    policy = module.chunked(task, 600)
    with cebm.serve(policy) as server, cebm.connect(server.url, timeout_s=5.0) as remote:
        for axes, latency in zip(each, (0.0, 0.1), strict=True):
            actions, log, _ = module.loop(remote, task, 1, 7, latency)
            axes.plot(actions, drawstyle="steps-post", label=["first column", "second column"])
            axes.plot(log.fresh, actions[log.fresh, 0], "k|", markersize=10, label="a new chunk begins")
            axes.set(title=f"{1e3 * latency:.0f} ms late, {log.held} of {log.ticks} ticks held", xlabel="tick of 20 ms")
            numbers[f"held at {1e3 * latency:.0f} ms"] = f"{log.held} of {log.ticks}"
    each[0].set_ylabel("action")
    each[0].legend(fontsize=8)
    return figure, numbers


def _trained(folder: str) -> cebm.EnergyPolicy:
    task = cebm.ParticleTask()
    policy = cebm.fit(task.demonstrations(300, 0), steps=600, limits=task.limits)
    policy.save(f"{folder}/policy")
    return policy


def browser() -> tuple[Path, Numbers]:
    """The page in a browser, its first action computed."""
    module, out = example("browser"), Path(tempfile.mkdtemp())
    policy = _trained(str(out))
    policy.export(out / "policy.onnx")
    page, picture = out / "page.html", out / "browser.png"
    page.write_text(module.page(policy, out / "policy.onnx"))
    with chromium() as window:
        window.look(620, 480)
        window.call("Page.navigate", url=page.as_uri())
        window.until("document.getElementById('action')?.textContent.includes('.')")
        window.picture(picture)
    return picture, {"megabytes": f"{page.stat().st_size / 1e6:.1f}"}


def robot() -> tuple[Figure, Numbers]:
    """Actions of the C++ program beside those of Python, with the same random numbers."""
    out = Path(tempfile.mkdtemp())
    policy = _trained(str(out))
    policy.export(out / "policy.pt2", format="aoti")
    place = Path(torch.__file__).parent
    build = ["g++", "-O1", "-std=c++20", str(ROOT / "examples/deploy/act.cpp"), "-o", str(out / "act")]
    build += [f"-I{place}/include", f"-I{place}/include/torch/csrc/api/include", f"-L{place}/lib"]
    subprocess.run([*build, f"-Wl,-rpath,{place}/lib", "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    exported = cebm.load_exported(out / "policy.pt2")
    obs = torch.as_tensor(cebm.ParticleTask().demonstrations(2, 5).obs)
    numbers = exported.numbers(len(obs), torch.Generator().manual_seed(0))
    rows = torch.cat([obs, *(numbers[name] for name in ("normal", "uniform") if name in numbers)], 1)
    lines = "\n".join(" ".join(f"{x:.9g}" for x in row) for row in rows.tolist())
    told = subprocess.run([str(out / "act"), str(out / "policy.pt2")], input=lines, capture_output=True, text=True)
    if told.returncode:
        raise SystemExit(told.stderr)
    theirs = np.array([[float(word) for word in line.split()] for line in told.stdout.splitlines()])
    ours = exported.act_with(obs, numbers).numpy()
    figure, (axes,) = panels(1, 3.6, 3.2)
    axes.plot(ours.ravel(), theirs.ravel(), ".", color=BLUE)
    axes.set(xlabel="action of the same file in Python", ylabel="action of the C++ program", aspect="equal")
    return figure, {"difference": f"{np.abs(ours - theirs).max():.0e}", "actions": str(len(obs))}


MADE: dict[str, Callable[[], tuple[Figure | Path, Numbers]]] = {name: globals()[name] for name in SOURCES}


def main(names: list[str]) -> None:
    """Runs examples and writes their pictures and numbers."""
    WHERE.mkdir(exist_ok=True)
    for name in names or list(MADE):
        torch.manual_seed(0)
        picture, numbers = MADE[name]()
        if isinstance(picture, Figure):
            picture.savefig(WHERE / f"{name}.png", dpi=100)
        else:
            shutil.copy(picture, WHERE / f"{name}.png")
        kept = records() | {name: {"fingerprint": fingerprint(name), "numbers": numbers}}
        text = json.dumps(dict(sorted(kept.items())), indent=1)
        (WHERE / "records.json").write_text(text + "\n")
        print(name, numbers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
