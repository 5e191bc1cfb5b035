"""Chunks that play while the next one is computed."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import cebm
from cebm import AsynchronousRunner, Runner
from cebm.asynchronous import remaining
from waiting import PATIENCE


class Counting:
    """A policy whose chunk k of n actions is k, k + 0.01, k + 0.02, …; it remembers what it was told."""

    history, horizon = 2, 5

    def __init__(self) -> None:
        self.asked: list[tuple[np.ndarray, Any]] = []
        self.free = threading.Event()
        self.free.set()
        self.fails = False

    def act(self, obs: np.ndarray, *, previous: Any = None) -> np.ndarray:
        self.asked.append((obs, previous))
        call = len(self.asked)
        assert self.free.wait(PATIENCE)
        if self.fails:
            raise RuntimeError("lost")
        return np.tile(call + np.arange(5) / 100, (len(obs), 1)).repeat(2, 1)

    def reset(self) -> None: ...


def played(runner: AsynchronousRunner, ticks: int, rows: int = 1) -> list[float]:
    return [round(float(runner.act(np.full((rows, 1), float(t)))[0, 0]), 2) for t in range(ticks)]


def test_a_late_answer_begins_with_the_action_of_its_own_tick() -> None:
    """Asked at tick 2, answered at tick 4: actions 0 and 1 of the new chunk are for ticks that are over."""
    policy = Counting()
    with AsynchronousRunner(policy, ask_after=2, late_by=2) as runner:
        assert played(runner, 9) == [1.0, 1.01, 1.02, 1.03, 2.02, 2.03, 2.04, 2.04, 3.02]
        assert runner.played.fresh == [4, 8] and runner.played.held == 1 and runner.played.ticks == 9
        assert runner.played.seams == pytest.approx([0.99, 0.98]) and max(runner.played.within) < 0.02
        # The window that was asked for ends with the observation of its own tick.
        assert [window.ravel().tolist() for window, _ in policy.asked] == [[0, 0], [1, 2], [5, 6]]
        runner.reset()
        assert played(runner, 1) == [4.0]


def test_at_once_is_what_a_runner_plays(generator: torch.Generator) -> None:
    policy = cebm.fit(
        np.random.default_rng(0).random((40, 3)), np.random.default_rng(1).random((40, 2)), [20, 40],
        trial="mdn", steps=2, horizon=4, history=2,
    )  # fmt: skip
    frames = torch.rand(9, 2, 3, generator=generator).numpy()
    with AsynchronousRunner(policy, ask_after=3, late_by=0) as one:
        other = Runner(policy, execute=3)
        for frame in frames:
            np.testing.assert_array_equal(one.act(frame), other.act(frame))


def test_the_loop_never_waits_and_survives_errors() -> None:
    """The policy is stopped by a lock: the chunk plays on and is held. Then it fails, and is asked again."""
    policy = Counting()
    with AsynchronousRunner(policy, ask_after=1) as runner:
        runner.act(np.zeros(1))
        policy.free.clear()
        assert [float(runner.act(np.zeros(1))[0]) for _ in range(6)] == [1.01, 1.02, 1.03, 1.04, 1.04, 1.04]
        assert not policy.free.is_set() and runner.played.held == 2
        policy.fails = True
        policy.free.set()
        until = time.monotonic() + PATIENCE
        while not runner.played.failed and time.monotonic() < until:
            assert runner.act(np.zeros(1))[0] == 1.04
        policy.fails = False
        while not runner.played.fresh and time.monotonic() < until:
            runner.act(np.zeros(1))
        assert runner.played.failed and runner.played.fresh
    policy.fails = True
    with AsynchronousRunner(policy) as runner, pytest.raises(RuntimeError, match="lost"):
        runner.act(np.zeros(1))  # there is nothing to play


def test_joined_tells_the_policy_what_will_be_left() -> None:
    policy = Counting()
    with AsynchronousRunner(policy, ask_after=3, joined=True, late_by=1) as runner:
        played(runner, 5, rows=2)
    assert policy.asked[0][1] is None
    left = np.array([1.03, 1.04, 1.04, 1.04, 1.04]).repeat(2)
    np.testing.assert_allclose(policy.asked[1][1], np.tile(left, (2, 1)), atol=1e-9)
    chunks = np.arange(6.0).reshape(1, 3, 2)
    assert remaining(chunks, 2, ("previous",))["previous"].tolist() == [[4, 5, 4, 5, 4, 5]]
    told = remaining(chunks, 9, ("last", "plan"))
    assert told["plan"].tolist() == [[4, 5, 4, 5, 4, 5]] and told["last"].tolist() == [[4, 5]]


def test_wrong_settings_are_named() -> None:
    for settings, message in (
        ({"ask_after": 6}, "ask_after must be between 1 and the policy's horizon 5"),
        ({"late_by": -1}, "late_by must be at least 0"),
        ({"steps": 3}, r"Counting\.act does not take steps"),
    ):
        with pytest.raises(ValueError, match=message):
            AsynchronousRunner(Counting(), **settings)

    class Plain:
        def act(self, obs: Any) -> Any:
            return obs

        def reset(self) -> None: ...

    with pytest.raises(ValueError, match=r"joined: Plain\.act takes none of"):
        AsynchronousRunner(Plain(), joined=True)
    with AsynchronousRunner(Plain()) as runner:
        runner.act(np.zeros((2, 3)))
        with pytest.raises(ValueError, match="reset first"):
            runner.act(np.zeros((3, 3)))
