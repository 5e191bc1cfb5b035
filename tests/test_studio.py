"""The studio: the panels' numbers, the desk's answers, and what a hostile client or a vanishing run does."""

import base64
import http.client
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cebm
from cebm.acting import Direct, Search
from cebm.annealing import AnnealedSearch
from cebm.cli import main
from cebm.energies import MLP, EnergyModel, NoiseConditional
from cebm.policy import EnergyPolicy
from cebm.recipes import TRIALS
from cebm.runs import Job, train
from cebm.samplers import Langevin
from cebm.spaces import Box, Specification
from cebm.studio import (
    Desk,
    Progress,
    Subject,
    columns_of,
    compare,
    controls_of,
    formulations,
    landscape,
    log_densities,
    moved,
    open_subject,
    principal,
    rolled,
    search,
    window_of,
    with_values,
    write_view,
)
from cebm.studio.landscape import at_level, energies_of
from cebm.studio.search import certificate_words, standing
from cebm.studio.server import MOST_BYTES, MOST_WAITING, StudioServer
from cebm.tasks import Forks, ParticleTask, PushT
from waiting import PATIENCE, eventually


class Bowls(EnergyModel):
    """Two Gaussian bowls at ±(0.5, 0.5) whose first moves with the observation: an energy whose minima are known."""

    def __init__(self, deviation: float = 0.15, act_dim: int = 2) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.width = 2, act_dim, deviation

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return obs

    def energies(self, context: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        middles = torch.stack([0.5 + 0.2 * context, -0.5 + 0 * context], 1)[..., : self.act_dim]
        away = (actions.unsqueeze(2) - middles.unsqueeze(1)).square().sum(-1)
        return -torch.logsumexp(-away / (2 * self.width**2), -1)


def bowls(act_dim: int = 2, acting: Any = None, width: float = 0.15) -> EnergyPolicy:
    boxes = Box.from_bounds([-2.0, -2.0], [2.0, 2.0]), Box.from_bounds([0.0] * act_dim, [10.0] * act_dim)
    acting = Search(Langevin("ibc", steps=5, noise=0.01), candidates=32) if acting is None else acting
    return EnergyPolicy(Bowls(width, act_dim), *boxes, acting)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of the particle task, with its checkpoints."""
    where = tmp_path_factory.mktemp("studio") / "run"
    job = Job("uniform", TRIALS["uniform"], ParticleTask(), steps=12, episodes=6, log_every=2, evaluate_every=12)
    train(replace(job, checkpoint_every=4, evaluation_episodes=1, evaluation_candidates=4), where)
    return where


def unpack(array: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["f32"]), "<f4").reshape(array["shape"])


# ---------------------------------------------------------------------------------------------- the panels


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0,), (1,)])
def test_a_landscape_is_the_energy_on_its_points(axes: tuple[int, ...]) -> None:
    policy = bowls()
    found = landscape(policy, [0.3, -1.0], axes, points=9)
    chosen = policy.act([0.3, -1.0])
    np.testing.assert_allclose(found.action, chosen, atol=1e-5)
    problem = policy.problem([0.3, -1.0])
    for index in np.ndindex(found.energies.shape):
        place = found.held.copy()
        for axis, i in zip(axes, index[::-1], strict=True):
            place[axis] = found.places[i]
        expected = float(problem.energies(torch.tensor(place, dtype=torch.float32)[None, None]))
        assert found.energies[index] == pytest.approx(expected, abs=1e-5)
    assert float(found.density.sum() * found.cell) == pytest.approx(1)


def test_a_landscape_holds_the_other_coordinates_where_it_is_told() -> None:
    policy = bowls()
    low, high = (landscape(policy, [0.0, 0.0], (0,), 8, held=[0.0, up]).energies for up in (-0.5, 0.5))
    assert low.argmin() < 4 <= high.argmin()


class Slanted(Bowls):
    """(y₀ + y₁ + y₂)²/2 + |y|²/2."""

    def energies(self, context: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return 0.5 * actions.sum(-1).square() + 0.5 * actions.square().sum(-1)


def test_a_landscape_is_minimised_over_the_other_coordinates() -> None:
    """E(a, y₁, y₂) is lowest at y₁ = y₂ = t with 3t + a = 0, where it is (a + 2t)²/2 + (a² + 2t²)/2."""
    boxes = Box.from_bounds([-2.0, -2.0], [2.0, 2.0]), Box.from_bounds([-1.0] * 3, [1.0] * 3)
    policy = EnergyPolicy(Slanted(act_dim=3), *boxes, Search(Langevin("ibc", steps=5, noise=0.01), candidates=32))
    held = landscape(policy, [0.0, 0.0], (0,), 20, held=[0.0, 0.9, -0.3])
    found = landscape(policy, [0.0, 0.0], (0,), 20, held=[0.0, 0.9, -0.3], minimised=True)
    a = found.places
    exact = 0.5 * (a / 3) ** 2 + 0.5 * (a**2 + 2 * (a / 3) ** 2)
    assert (found.energies >= exact - 1e-5).all() and (found.energies <= held.energies + 1e-6).all()
    np.testing.assert_allclose(found.energies, exact, atol=0.01)
    assert np.abs(held.energies - exact).min() > 0.1


class Counting(Slanted):
    """Counts the actions whose energies were asked for; a gradient is two."""

    asked = 0

    def energies(self, context: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        Counting.asked += actions.shape[:-1].numel() * (2 if torch.is_grad_enabled() else 1)
        return super().energies(context, actions)


def test_a_minimised_picture_costs_a_few_energies_per_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts on few points and spreads, so 12 coordinates cost no more than a handful of energies at each of 96 × 96
    points, and still end at the minimum: with (a, b) shown and s = a + b the others are at t = −s/11 each, where
    E = (s + 10t)²/2 + (a² + b² + 10t²)/2."""
    boxes = Box.from_bounds([-2.0, -2.0], [2.0, 2.0]), Box.from_bounds([-1.0] * 12, [1.0] * 12)
    policy = EnergyPolicy(Counting(act_dim=12), *boxes, Search(Langevin("ibc", steps=2, noise=0.01), candidates=8))
    held = np.linspace(-0.9, 0.9, 12)
    monkeypatch.setattr(Counting, "asked", 0)
    found = landscape(policy, [0.0, 0.0], points=96, held=held, minimised=True)
    assert 96**2 < Counting.asked < 6 * 96**2
    a, b = np.meshgrid(found.places, found.places)
    t = -(a + b) / 11
    exact = 0.5 * (a + b + 10 * t) ** 2 + 0.5 * (a**2 + b**2 + 10 * t**2)
    excess = found.energies - exact
    assert excess.min() > -1e-5 and excess.mean() < 0.02 and excess.max() < 0.1
    assert (found.energies <= landscape(policy, [0.0, 0.0], points=96, held=held).energies + 1e-5).all()


def test_principal_directions_are_those_of_the_data(generator: torch.Generator) -> None:
    """Three columns that vary along (1, 1, −1) and, less, along (1, −1, 0)."""
    energy = MLP().build(Specification.flat(2, 3), generator)
    box = Box.from_bounds([-1.0] * 3, [1.0] * 3)
    policy = EnergyPolicy(energy, Box.from_bounds([0.0] * 2, [1.0] * 2), box, Search(candidates=4))
    draws = torch.randn(400, 2, generator=generator).numpy() * [0.3, 0.1]
    actions = draws @ np.array([[1, 1, -1], [1, -1, 0]]) / 3
    data = cebm.Demonstrations.from_arrays(np.zeros((400, 2)), actions, [400])
    weights = principal(Subject("three", policy, demonstrations=data))
    cosines = np.abs(weights @ np.array([[1, 1, -1], [1, -1, 0]]).T) / np.linalg.norm(weights, axis=1)[:, None]
    np.testing.assert_allclose(cosines / np.sqrt([3, 2]), np.eye(2), atol=0.2)
    np.testing.assert_allclose(np.abs(weights).sum(1), 1)
    found = landscape(policy, [0.5, 0.5], points=5, directions=weights)
    problem = policy.problem([0.5, 0.5])
    for index in np.ndindex(5, 5):
        place = found.held + 0
        for row, i in zip(weights, index[::-1], strict=True):
            place = place + (found.places[i] - place @ row) * row / (row @ row)
        np.testing.assert_allclose(found.shown(place), found.places[list(index[::-1])], atol=1e-9)
        expected = float(problem.energies(torch.tensor(place, dtype=torch.float32)[None, None]))
        assert found.energies[index] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="orthogonal"):
        landscape(policy, [0.5, 0.5], directions=[[1, 0, 0], [1, 1, 0]])
    with pytest.raises(ValueError, match="needs no principal"):
        principal(Subject("two", bowls()))


def test_levels_change_the_landscape_of_an_energy_that_has_them(generator: torch.Generator) -> None:
    energy = NoiseConditional().build(Specification.flat(2, 2), generator)
    box = Box.from_bounds([-1.0, -1.0], [1.0, 1.0])
    policy = EnergyPolicy(energy, box, box, AnnealedSearch(candidates=4))
    level = energy.levels[0]
    found = landscape(policy, [0.0, 0.0], points=6, level=level, held=[0.0, 0.0])
    with pytest.raises(ValueError, match="have no noise level"):
        standing(search(policy, [0.0, 0.0]), found)
    problem = at_level(policy.problem([0.0, 0.0]), level)
    corner = torch.full((1, 2), float(found.places[0]))
    assert found.energies[0, 0] == pytest.approx(float(energies_of(problem, corner)[0]), abs=1e-5)
    assert not np.allclose(found.energies, landscape(policy, [0.0, 0.0], points=6, held=[0.0, 0.0]).energies)
    with pytest.raises(ValueError, match="Bowls has no noise levels"):
        landscape(bowls(), [0.0, 0.0], level=0.1)


@pytest.mark.parametrize("axes", [(0, 0), (), (0, 1, 2), (2,), (-1, 0)])
def test_axes_that_are_not_there_are_refused(axes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="axes must be"):
        landscape(bowls(), [0.0, 0.0], axes)


def test_the_search_shown_is_the_one_that_acts() -> None:
    policy = bowls()
    moves = search(policy, [0.3, -1.0])
    assert moves.steps == [0, 1, 2, 3, 4, 5] and moves.states.shape == (6, 32, 2)
    np.testing.assert_allclose(moves.action, policy.act([0.3, -1.0]), atol=1e-5)
    end = torch.tensor(moves.states[-1], dtype=torch.float32)
    energies = policy.problem([0.3, -1.0]).energies(end[None])[0].numpy()
    np.testing.assert_allclose(moves.energies[-1], energies, atol=1e-5)
    assert moves.chosen == energies.argmin()
    assert moves.gradients[-1] < moves.gradients[0] and np.isnan(moves.changed[0]) and moves.changed[1] == 1


def test_a_way_to_act_without_states_shows_its_end(generator: torch.Generator) -> None:
    energy = cebm.MixtureDensity().build(Specification.flat(2, 2), generator)
    box = Box.from_bounds([-1.0, -1.0], [1.0, 1.0])
    moves = search(EnergyPolicy(energy, box, box, Direct()), [0.0, 0.0])
    assert moves.steps == [0] and moves.states.shape == (1, 1, 2)


def test_ibc_collapses_and_the_correct_formulation_fills_the_density() -> None:
    """The paper's point by one switch. Draws of a two-dimensional Gaussian bowl lie 1 above its minimum, with a
    standard deviation of 1; of 256 draws the mean is within 4.5/16 of that. The chains' own bias, τ/2σ² = 4 %, and
    the noise that IBC has left, add less than a fifth. Limits of ±0.5 hold both."""
    policy = bowls()
    ground = landscape(policy, [0.0, 0.0], points=96)
    ways = {name: standing(search(policy, [0.0, 0.0], way, seed=1), ground) for name, way in formulations().items()}
    assert ways["correct"].exact_excess == pytest.approx(1, abs=0.02)
    assert ways["ibc"].excess < 0.5 and "collapsed onto minima" in ways["ibc"].words
    for name in ("correct", "mala"):
        assert ways[name].excess == pytest.approx(1, abs=0.5) and "as high as draws" in ways[name].words
    width = np.diff(ways["ibc"].edges)
    for each in ways.values():
        for shares, exact in zip(each.shares, each.exact, strict=True):
            assert (shares * width).sum() == pytest.approx(1) and (exact * width).sum() == pytest.approx(1)


def test_the_density_of_a_slice_is_not_taken_for_that_of_the_action(generator: torch.Generator) -> None:
    energy = MLP().build(Specification.flat(2, 3), generator)
    policy = EnergyPolicy(energy, Box.from_bounds([0.0] * 2, [1.0] * 2), Box.from_bounds([0.0] * 3, [1.0] * 3))
    moves = search(policy, [0.5, 0.5], formulations(steps=2, candidates=4)["correct"])
    found = standing(moves, landscape(policy, [0.5, 0.5], points=8))
    assert found.exact == [] and np.isnan(found.exact_excess) and "more coordinates" in found.words


def test_the_certificate_tells_the_formulations_apart() -> None:
    assert "does not sample" in certificate_words(formulations()["ibc"])
    assert "gaussian: samples the target" in certificate_words(formulations()["correct"])
    assert certificate_words(Direct()) == "Direct has no sampler to certify."


def test_controls_read_and_set_every_plain_setting() -> None:
    acting = formulations()["ibc"]
    controls = {control.path: control for control in controls_of(acting)}
    assert controls["sampler.formulation"].choices == ("correct", "ibc") and controls["candidates"].kind == "int"
    assert controls["sampler.step_clip"].optional and "range" in controls["sampler.margin"].about
    changed = with_values(acting, {"sampler.steps": 7, "sampler.schedule.value": 1, "sampler.step_clip": None})
    found = {control.path: control.value for control in controls_of(changed)}
    assert found == {**{path: c.value for path, c in controls.items()}, "sampler.steps": 7,
                     "sampler.schedule.value": 1.0, "sampler.step_clip": None}  # fmt: skip
    for path, value, words in (
        ("sampler.nothing", 1, "no setting"),
        ("candidates", 1.5, "a value of int"),
        ("candidates", True, "a value of int"),
        ("candidates", 0, "at least 1"),
        ("choice", "best", "one of minimum, draw"),
        ("sampler.noise", None, "a value of float"),
        ("sampler.formulation", "correct", "leave it at 1"),
    ):
        with pytest.raises(ValueError, match=words):
            with_values(acting, {path: value})


def test_two_policies_are_compared_at_the_same_actions() -> None:
    """The second policy has other units and the same energy in data units: nothing differs."""
    first = bowls()
    same = compare(first, bowls(), [0.0, 0.0], points=16)
    assert same.distance == pytest.approx(0, abs=1e-6) and np.abs(same.difference).max() < 1e-4
    np.testing.assert_allclose(same.other, same.first.shown(same.first.held), atol=1e-5)
    narrow = compare(first, bowls(width=0.05), [0.0, 0.0], points=16)
    assert narrow.distance > 0.2
    p, q = narrow.first.density, narrow.second.density
    i = np.unravel_index(p.argmax(), p.shape)
    assert narrow.difference[i] == pytest.approx(np.log(p[i] / q[i]), abs=1e-5)
    with pytest.raises(ValueError, match="different columns"):
        compare(first, bowls(act_dim=1), [0.0, 0.0])


def test_log_densities_of_both_choices() -> None:
    """Two bowls of unit mass: 2π w² each, so log p at a minimum is −log(2 · 2π w²), per unit of data 5 times 5."""
    wide, narrow = bowls(), bowls(width=0.05)
    obs = [0.0, 0.0]
    action = wide.act_box.denormalise(torch.tensor([[0.5, 0.5]]))[0].numpy()
    found = log_densities([wide, narrow], obs, action)
    for each, width in zip(found, (0.15, 0.05), strict=True):
        assert each is not None
        exact = -np.log(2 * 2 * np.pi * width**2) - float(wide.act_box.scale.log().sum())
        assert each[0] == pytest.approx(exact, abs=max(0.02, 5 * each[1]))


def test_moving_a_column_moves_all_frames(generator: torch.Generator) -> None:
    energy = MLP().build(Specification.flat(2, 1, history=2), generator)
    policy = EnergyPolicy(
        energy, Box.from_bounds([0.0] * 4, [1.0] * 4), Box.from_bounds([0.0], [1.0]),
        spec=Specification.flat(2, 1, history=2),
    )  # fmt: skip
    np.testing.assert_allclose(moved(policy, np.array([0.1, 0.2, 0.3, 0.4]), 1, 1.4), [0.1, 1.2, 0.3, 1.4])
    for column, value in ((2, 0.0), (-1, 0.0), (0, float("nan"))):
        with pytest.raises(ValueError, match="must be"):
            moved(policy, np.zeros(4), column, value)


@pytest.mark.parametrize("hide", [False, True])
def test_the_sketch_of_the_particle_finds_goals_and_agent(hide: bool) -> None:
    from cebm.tasks import BatchedParticle

    task = ParticleTask(dim=3, hide_velocity=hide)
    env = BatchedParticle(task)
    obs = env.reset(0, 1)[0]
    sketch = task.sketch
    assert sketch is not None
    places = {handle.name: obs[list(handle.columns[0])] for handle in sketch.handles}
    np.testing.assert_allclose(places["agent"], env.position[0, :2], atol=1e-6)
    np.testing.assert_allclose(places["goal 1"], env.first_goal[0, :2], atol=1e-6)
    np.testing.assert_allclose(places["goal 2"], env.second_goal[0, :2], atol=1e-6)
    assert ParticleTask(dim=1).sketch is None


def test_the_sketches_of_the_other_tasks_stay_inside_their_observations() -> None:
    assert PushT("pixels").sketch is None
    for task in (Forks(), PushT("state"), PushT("keypoints")):
        sketch = task.sketch
        assert sketch is not None and sketch.handles
        assert max(c for h in sketch.handles for pair in h.columns for c in pair) < task.sizes[0]
    assert len(Forks().sketch.walls) == len(Forks().obstacles())


# ---------------------------------------------------------------------------------------------- a run


def test_a_run_brings_its_task_and_observations(run: Path) -> None:
    subject = open_subject(run)
    assert subject.task == ParticleTask() and subject.progress is not None and subject.demonstrations is not None
    obs, action = window_of(subject, 1, 3)
    start = int(subject.demonstrations.episode_starts[1])
    np.testing.assert_array_equal(obs, subject.demonstrations.obs[start + 3])
    np.testing.assert_array_equal(action, subject.demonstrations.actions[start + 3])
    assert [column.name for column in columns_of(subject)][:2] == ["agent x", "agent y"]
    for episode, step in ((99, 0), (0, 99), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="must be between"):
            window_of(subject, episode, step)


def test_a_fresh_roll_out_is_what_the_policy_sees_and_does(run: Path) -> None:
    subject = open_subject(run)
    data, row = rolled(subject, 5)
    assert data.episodes == 1 and data.steps == ParticleTask().steps and "success" in row
    again, _ = rolled(subject, 5)
    np.testing.assert_array_equal(data.obs, again.obs)
    assert not np.allclose(data.obs[0], rolled(subject, 6)[0].obs[0])
    # The agent moves towards what was done: the particle follows its set-point.
    obs, action = window_of(subject, 0, 0, data)
    assert ((data.obs[1, :2] - obs[:2]) * (action - obs[:2]) > 0).all()
    with pytest.raises(ValueError, match="has no task"):
        rolled(Subject("bowls", bowls()), 0)


def test_a_view_stands_alone(run: Path, tmp_path: Path) -> None:
    subject = open_subject(run)
    obs = window_of(subject, 0, 0)[0]
    html = write_view(subject, obs, tmp_path / "view.html", seed=1, points=12, python="print(1)").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])  # type: ignore[index]
    mine, moves = landscape(subject.policy, obs, points=12), search(subject.policy, obs, seed=1)
    np.testing.assert_allclose(unpack(data["landscape"]["energies"]), mine.energies, rtol=1e-5)
    np.testing.assert_allclose(unpack(data["moves"]["states"]), moves.states[:, :500], atol=1e-6)
    assert [mark["kind"] for mark in data["landscape"]["marks"]] == ["goal 1", "goal 2", "agent"]
    assert "http" not in html and "import {" not in html and "print(1)" in html and "agent x" in html


def test_progress_follows_the_files_of_a_run(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    progress = Progress(copy)
    assert progress.steps() == (12, 12) and len(progress.curves()["loss"]) == 6
    assert progress.checkpoints() == [12, 8]
    obs = open_subject(run).policy.units.middle
    np.testing.assert_allclose(progress.policy_at(12).act(obs), cebm.load(run / "policy").act(obs), atol=1e-6)
    older, newer = (landscape(progress.policy_at(step), obs, points=8).energies for step in (8, 12))
    assert not np.allclose(older, newer)
    shutil.rmtree(copy / "best")  # a run that was not evaluated yet: its newest checkpoint
    np.testing.assert_allclose(open_subject(copy).policy.act(obs), progress.policy_at(12).act(obs), atol=1e-6)
    shutil.rmtree(copy)
    with pytest.raises(ValueError, match="is gone"):
        progress.checkpoints()
    with pytest.raises((ValueError, OSError), match="copy"):
        progress.steps()


# ---------------------------------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[StudioServer]:
    with StudioServer(Desk([open_subject(run), Subject("bowls", bowls())])) as server:
        yield server


def ask(server: StudioServer, question: str, message: Any = None, **changes: Any) -> tuple[int, Any]:
    """Status and answer; `changes` replace parts of the request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = changes.get("body", json.dumps({} if message is None else message))
    headers = {"Content-Type": "application/json", **changes.get("headers", {})}
    path = changes.get("path", f"/{server.token}/api/{question}")
    connection.request(changes.get("method", "POST"), path, body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    kind = answer.headers["Content-Type"]
    return answer.status, json.loads(text) if kind == "application/json" else text


def test_the_numbers_on_the_page_are_those_of_the_library(server: StudioServer, run: Path) -> None:
    policy = cebm.load(run)
    obs = ask(server, "observation", {"episode": 2, "step": 5})[1]["obs"]
    status, found = ask(server, "landscape", {"obs": obs, "axes": [1, 0], "points": 24})
    mine = landscape(policy, obs, (1, 0), 24)
    assert status == 200
    np.testing.assert_allclose(unpack(found["energies"]), mine.energies, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["action"], policy.act(obs), atol=1e-5)
    assert found["energy"] == pytest.approx(mine.energy, abs=1e-5)
    values = {"candidates": 16, "sampler.steps": 6}
    status, found = ask(server, "search", {"obs": obs, "way": "correct", "values": values, "seed": 3})
    moves = search(policy, obs, with_values(formulations()["correct"], values), seed=3)
    assert status == 200 and found["steps"] == moves.steps and found["chosen"] == moves.chosen
    np.testing.assert_allclose(unpack(found["states"]), moves.states, atol=1e-5)
    np.testing.assert_allclose(unpack(found["energies"]), moves.energies, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["mean"], moves.energies.mean(1), rtol=1e-5)
    status, found = ask(server, "moment", {"obs": obs, "step": 8, "points": 8})
    older = landscape(Progress(run).policy_at(8), obs, points=8)
    np.testing.assert_allclose(unpack(found["energies"]), older.energies, rtol=1e-5, atol=1e-5)
    status, found = ask(server, "training", {"curve": "evaluation: success"})
    assert found["checkpoints"] == [12, 8] and "loss" in found["curves"] and 'class="curve"' in found["chart"]
    assert found["curve"] == "loss"  # one evaluation makes no curve
    played, _ = rolled(open_subject(run), 7)
    assert ask(server, "roll", {"episode": 7})[1]["steps"] == played.steps
    status, found = ask(server, "observation", {"source": "rolled", "episode": 7, "step": 3})
    np.testing.assert_array_equal(found["obs"], played.obs[3])
    rows = ask(server, "densities", {"obs": obs, "other": 0})[1]["rows"]
    value = policy.log_prob(np.array([obs]), policy.act(obs)[None])
    assert rows[0] == rows[1] and rows[0][0][0] == pytest.approx(float(value.value[0]), abs=1e-5)
    html = ask(server, "leaf", {"obs": obs, "points": 16, "palette": "cividis"})[1]["html"]
    assert "picture = landscape(policy" in html and "moves = search(policy" in html


def test_the_lines_that_are_taken_away_give_the_same_picture(server: StudioServer) -> None:
    obs = ask(server, "observation", {"episode": 0, "step": 1})[1]["obs"]
    for question, message in (("landscape", {"points": 6}), ("search", {"way": "ibc", "values": {"candidates": 3}})):
        found = ask(server, question, {"obs": obs, "seed": 1, **message})[1]
        names: dict[str, Any] = {"print": lambda *values: None}
        exec(found["python"], names)
        mine = names["picture"].energies if question == "landscape" else names["moves"].energies
        np.testing.assert_allclose(unpack(found["energies"]), mine, rtol=1e-5, atol=1e-5)


def test_the_page_and_its_files_are_served_with_strict_headers(server: StudioServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    for name, kind in (("", "text/html"), ("main.js", "text/javascript"), ("studio.css", "text/css")):
        connection.request("GET", f"/{server.token}/{name}")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.headers["Content-Type"].startswith(kind) and answer.read()
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Referrer-Policy"] == "no-referrer"
    connection.close()
    for content in server.page.values():
        assert b"http://" not in content[1] and b"https://" not in content[1]


@pytest.mark.parametrize(
    "path",
    ["/", "/api/hello", "/wrong/", "/{token}x/", "/{token}/../../etc/passwd", "/{token}/%2e%2e/%2e%2e/etc/passwd",
     "/{token}//etc/passwd", "/{token}/page/index.html", "/{token}/../server.py", "/{token}/..%5cserver.py", "/Ж/"],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(server: StudioServer, path: str) -> None:
    raw = path.format(token=server.token).encode()
    request = b"GET " + raw + f" HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
    assert _exchange(server, request).startswith(b"HTTP/1.1 404")


def _exchange(server: StudioServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        return connection.recv(65536)


def test_other_names_and_other_pages_are_refused(server: StudioServer) -> None:
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", f"127.0.0.1:{server.port + 1}"):
        assert ask(server, "hello", headers={"Host": host})[0] == 421
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{server.port}"):
        assert ask(server, "hello", headers={"Origin": origin})[0] == 403
    assert ask(server, "hello", headers={"Origin": f"http://127.0.0.1:{server.port}"})[0] == 200
    assert ask(server, "hello", headers={"Content-Type": "text/plain"})[0] == 415
    assert ask(server, "hello", method="GET")[0] == 404
    assert ask(server, "hello", method="PUT")[0] == 501
    two = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nHost: evil.example\r\n\r\n"
    assert _exchange(server, two.encode()).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize(
    ("question", "body", "words"),
    [
        ("nothing", "{}", "no question 'nothing'"),
        ("landscape", "", "no JSON"),
        ("landscape", "\xff", "no JSON"),
        ("landscape", "[1, 2]", "a message is an object"),
        ("landscape", '{"obs": [NaN]}', "NaN is no number"),
        ("landscape", "[" * 100_000, "nested too deeply"),
        ("landscape", "{}", "obs must be a list of numbers"),
        ("landscape", '{"obs": [1, 2]}', "obs must be"),
        ("landscape", '{"obs": ["a"]}', "obs must be a list of numbers"),
        ("landscape", '{"obs": [1e999, 0, 0, 0, 0, 0, 0, 0]}', "NaN or infinite"),
        ("landscape", '{"obs": [1' + "0" * 400 + "]}", "too large"),
        ("landscape", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "points": 100000}', "points must be between"),
        ("landscape", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "axes": [0, 7]}', "axes must be below 2"),
        ("landscape", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "level": 1}', "no noise levels"),
        ("landscape", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "held": [1]}', "held must be 2"),
        ("landscape", '{"subject": 5}', "subject must be between"),
        ("landscape", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "minimised": 1}', "minimised must be"),
        ("landscape", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "principal": true}', "needs no principal"),
        ("landscape", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "demonstrated": ["x"]}', "demonstrated must be"),
        ("leaf", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "palette": "<script>"}', "palette must be"),
        ("roll", '{"episode": -1}', "episode must be between"),
        ("roll", '{"subject": 1, "episode": 0}', "no task to act in"),
        ("densities", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "other": 1}', "cannot be compared"),
        ("search", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "way": "os.system"}', "way must be"),
        ("search", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "values": {"candidates": 100000000}}', "too many"),
        ("search", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "values": {"__class__": 1}}', "no setting"),
        ("search", '{"obs": [0, 0, 0, 0, 0, 0, 0, 0], "seed": -1}', "seed must be"),
        ("observation", '{"episode": 1.5, "step": 0}', "episode must be a whole number"),
        ("moment", '{"step": -1, "obs": [0, 0, 0, 0, 0, 0, 0, 0]}', "step--0000001"),
        ("moment", '{"subject": 1, "step": 4, "obs": [0, 0]}', "no run directory"),
    ],
)
def test_messages_that_make_no_sense_get_their_reason(
    server: StudioServer, question: str, body: str, words: str
) -> None:
    status, found = ask(server, question, body=body.encode("latin-1"))
    assert status == 400 and words in found["error"], found
    assert ask(server, "hello")[0] == 200


def test_large_and_unsized_messages_are_refused_before_they_are_read(server: StudioServer) -> None:
    head = f"POST /{server.token}/api/hello HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    head += "Content-Type: application/json\r\n"
    for length, status in ((str(MOST_BYTES + 1), 413), ("9" * 30, 411), ("-1", 411), ("x", 411), ("²", 411)):
        request = f"{head}Content-Length: {length}\r\n\r\n".encode()
        assert _exchange(server, request).startswith(f"HTTP/1.1 {status}".encode()), length
    assert _exchange(server, f"{head}\r\n".encode()).startswith(b"HTTP/1.1 411")
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n"
    assert _exchange(server, chunked.encode()).startswith(b"HTTP/1.1 411")


def test_too_many_questions_at_a_time_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, go = Desk([Subject("bowls", bowls())]), threading.Event()
    monkeypatch.setitem(desk.questions, "hello", lambda message: {"waited": go.wait(PATIENCE)})
    with StudioServer(desk) as server:
        found: list[int] = []
        askers = [threading.Thread(target=lambda: found.append(ask(server, "hello")[0])) for _ in range(MOST_WAITING)]
        for asker in askers:
            asker.start()
        eventually(lambda: not server._waiting._value)  # all of them wait
        assert ask(server, "hello")[0] == 503
        go.set()
        for asker in askers:
            asker.join(PATIENCE)
    assert found == [200] * MOST_WAITING


def test_a_question_that_still_waits_when_the_studio_ends_gets_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk, asked, go = Desk([Subject("bowls", bowls())]), threading.Event(), threading.Event()
    monkeypatch.setitem(desk.questions, "hello", lambda message: {"waited": asked.set() or go.wait(PATIENCE)})
    server = StudioServer(desk)
    found: list[Any] = []
    with server:
        first = threading.Thread(target=lambda: server.answer("hello", b"{}"))
        first.start()
        assert asked.wait(PATIENCE)
        second = threading.Thread(target=lambda: found.append(server.answer("hello", b"{}")))
        second.start()
        eventually(lambda: server._quick._work_queue.qsize() > 0)

        def release() -> None:
            """The first one ends when the second one has its answer."""
            second.join(PATIENCE)
            go.set()

        threading.Thread(target=release).start()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert found == [(503, {"error": "the studio has ended"})] and capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which Linux has")
def test_memory_is_flat_over_ten_thousand_questions(run: Path) -> None:
    """Landscapes, searches, observations and comparisons, 10,000 in all, on small grids: what a question leaves behind
    does not depend on the grid. 3 MB are 600 bytes per question after the first half; an answer has more."""
    subject = open_subject(run)
    generator = np.random.default_rng(0)

    def held() -> float:
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3  # type: ignore[index]

    with StudioServer(Desk([subject, Subject("again", subject.policy)])) as server:
        obs = np.array(ask(server, "hello")[1]["subjects"][0]["obs"])
        after = []
        for k in range(10_000):
            seen = (obs + 0.1 * generator.standard_normal(len(obs))).tolist()
            question, message = (
                ("landscape", {"points": 8}),
                ("landscape", {"points": 8, "axes": [k % 2]}),
                ("observation", {"episode": k % 6, "step": k % 7}),
                ("search", {"way": "ibc", "values": {"sampler.steps": 2, "candidates": 8}, "seed": k}),
                ("compare", {"other": 1, "points": 8}),
            )[k % 5]
            status, told = ask(server, question, {"obs": seen, **message})
            assert status == 200, told
            if k % 1000 == 999:
                after.append(held())
    assert after[-1] - after[4] < 3, after


def test_a_run_that_is_deleted_meanwhile_is_a_message(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    subject = open_subject(copy)
    with StudioServer(Desk([subject])) as server:
        obs = ask(server, "hello")[1]["subjects"][0]["obs"]
        shutil.rmtree(copy)
        for question, message in (("training", {}), ("moment", {"step": 8, "obs": obs})):
            status, found = ask(server, question, message)
            assert status == 400 and "copy" in found["error"]
        assert ask(server, "landscape", {"obs": obs, "points": 4})[0] == 200


def test_a_mistake_in_a_users_energy_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk([Subject("bowls", bowls())])
    monkeypatch.setitem(desk.questions, "hello", lambda message: {}[1])
    with StudioServer(desk) as server:
        assert ask(server, "hello") == (500, {"error": "KeyError: 1"})
        assert ask(server, "landscape", {"obs": [0, 0], "points": 4})[0] == 200
    assert "KeyError" in capsys.readouterr().err


def test_the_code_of_the_page_about_the_studio_runs() -> None:
    text = (Path(__file__).parent.parent / "docs/studio.md").read_text()
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2 and names["picture"].energies.shape == (96, 96)
    assert names["moves"].states.shape[2] == 2 and names["sketch"].places


def test_the_command_refuses_what_it_cannot_show(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.npz"
    cebm.Demonstrations.from_arrays(np.zeros((4, 3)), np.zeros((4, 2)), [4]).save(data)
    for words, told in (
        ((), "name at least one"),
        ((str(tmp_path),), str(tmp_path)),
        ((str(run), "--data", str(data)), "3 observation and 2 action columns"),
        ((str(run), "--task", "forks"), "forks"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["studio", *words, "--no-open"])
        assert ended.value.code == 2 and told in capsys.readouterr().err.lower()
