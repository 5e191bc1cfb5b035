"""The server and its client, over real sockets on this machine."""

import asyncio
import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cebm
from cebm import Direct, Langevin, Limits, MixtureDensity, Proposal, Regression, Runner, Search, Specification
from cebm.energies import MLP
from cebm.policy import EnergyPolicy
from cebm.samplers import MALA, DerivativeFree
from cebm.spaces import Box
from cebm.tasks import ParticleTask

websockets = pytest.importorskip("websockets", reason="the extra `serve` is not installed")
pytest.importorskip("msgpack", reason="the extra `serve` is not installed")

from websockets.asyncio.client import connect as connect_async  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402
from websockets.sync.client import connect as connect_raw  # noqa: E402

from cebm.serving.client import RemotePolicy, ServerError  # noqa: E402
from cebm.serving.draws import CannotSplit, DrawnDirectly, drawing_by_client  # noqa: E402
from cebm.serving.effort import Effort  # noqa: E402
from cebm.serving.protocol import KINDS, pack, unpack  # noqa: E402
from cebm.serving.server import Server  # noqa: E402
from waiting import PATIENCE, eventually  # noqa: E402

ROOT = Path(__file__).parent.parent
SPEC = Specification.flat(3, 2, history=2, horizon=4)
TOKEN = "a-token-of-some-length"


SMALL = MLP(16)


def policy(settings: Any = SMALL, acting: Any = None, spec: Specification = SPEC, seed: int = 0) -> EnergyPolicy:
    """A small network with random weights."""
    energy = settings.build(spec, torch.Generator().manual_seed(seed))
    boxes = [Box.from_bounds([-2.0] * dim, [1.0] * dim) for dim in (spec.obs_dim, spec.act_dim)]
    search = Search(Langevin("ibc", steps=3, noise=0.1), candidates=8)
    return EnergyPolicy(energy, boxes[0], boxes[1], acting or search, spec, settings)


def inputs(count: int, generator: torch.Generator) -> np.ndarray:
    return (3 * torch.rand(count, SPEC.obs_dim, generator=generator) - 2).numpy()


@pytest.fixture(scope="module")
def served() -> EnergyPolicy:
    return policy()


@pytest.fixture(scope="module")
def server(served: EnergyPolicy) -> Iterator[Server]:
    with serving(served) as running:
        yield running


@pytest.fixture
def remote(server: Server) -> Iterator[RemotePolicy]:
    with cebm.connect(server.url) as connected:
        yield connected


@contextlib.contextmanager
def serving(served: Any, **options: Any) -> Iterator[Server]:
    """A server that nothing is too late for on a busy machine, unless the options say so."""
    patient = dict.fromkeys(("open_s", "send_s", "hang_s", "grace_s"), PATIENCE)
    limits = Limits(**(patient | {name: options.pop(name) for name in list(options) if hasattr(Limits, name)}))
    with cebm.serve(served, limits=limits, **options) as running:
        yield running


def refusal(call: Callable[[], Any]) -> ServerError:
    with pytest.raises(ServerError) as error:
        call()
    return error.value


class Wrapped:
    """A policy of somebody else's: it does what `before` does with the observations, then acts."""

    def __init__(self, inner: EnergyPolicy, before: Callable[[np.ndarray, dict], Any]) -> None:
        self.inner, self.before, self.specification, self.acting = inner, before, inner.specification, inner.acting

    def act(self, obs: np.ndarray, **wishes: Any) -> Any:
        replaced = self.before(obs, wishes)
        return self.inner.act(obs, **wishes) if replaced is None else replaced

    def reset(self) -> None: ...


# -------------------------------------------------------------------------------------------- the same policy


def test_a_remote_policy_acts_like_the_policy(
    remote: RemotePolicy, served: EnergyPolicy, generator: torch.Generator
) -> None:
    obs = inputs(5, generator)
    assert (remote.history, remote.horizon, remote.specification) == (2, 4, SPEC)
    for values in (obs, obs[0], obs.astype(np.float32), torch.from_numpy(obs), obs[0].tolist()):
        got, expected = remote.act(values), served.act(values)
        assert type(got) is type(expected) and np.array_equal(got, expected)
    last = served.act(obs)
    assert np.array_equal(
        remote.act(obs, previous=last, candidates=5, steps=2), served.act(obs, previous=last, candidates=5, steps=2)
    )
    seed = generator.initial_seed()
    drawn = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed)))
    expected = served.act(obs, generator=torch.Generator().manual_seed(drawn))
    assert np.array_equal(remote.act(obs, generator=torch.Generator().manual_seed(seed)), expected)
    assert not np.array_equal(remote.act(obs, generator=torch.Generator().manual_seed(seed + 1)), expected)


def test_a_remote_policy_proposes_and_resets(
    remote: RemotePolicy, served: EnergyPolicy, generator: torch.Generator
) -> None:
    obs = inputs(3, generator)
    for values in (obs, obs[0]):
        got, expected = remote.propose(values), served.propose(values)
        assert isinstance(got, Proposal)
        for name in ("action", "candidates", "energies"):
            assert torch.equal(getattr(got, name), getattr(expected, name))
        assert got.score.isnan().all()
    assert remote.reset() is None and remote.timing["total_ms"] > 0


def test_evaluate_and_runner_take_it(generator: torch.Generator) -> None:
    task = ParticleTask(dim=1, steps=6)
    spec = Specification.flat(task.sizes[0], 1, history=2, horizon=3)
    local = policy(spec=spec)
    with serving(local) as running, cebm.connect(running.url) as far:
        found = cebm.evaluate(far, task, episodes=4, latency_calls=2)
        assert found.episodes == 4 and found.action_ms_p50 > 0
        near, distant = Runner(local), Runner(far)
        for _ in range(5):
            obs = torch.rand(2, task.sizes[0], generator=generator).numpy()
            assert np.array_equal(near.act(obs), distant.act(obs))


def test_raw_observations_and_named_parts_go_over_the_wire(generator: torch.Generator) -> None:
    """A policy that converts its units: relative actions, an angle that its energy sees as two columns."""
    from cebm.units import Angle, Relative

    obs, actions = torch.rand(60, 3, generator=generator).numpy(), torch.rand(60, 2, generator=generator).numpy()
    settings = {"relative": Relative((0, 1), (0, 1), 1.0), "obs_kinds": (Angle(2),), "history": 2, "horizon": 2}
    local = cebm.fit(obs, actions, [30, 60], steps=2, **settings)
    assert local.columns == (3, 2) and local.specification.frame != 3
    with serving(local) as running, cebm.connect(running.url) as remote:
        assert remote.columns == (3, 2) and remote.parts == local.parts
        windows = np.concatenate([obs[:5], obs[1:6]], 1)
        for values in (windows, windows[0]):
            assert np.allclose(remote.act(values), local.act(values), atol=1e-5)
        assert remote.infer({"obs": obs[0]}).shape == (2, 2)


PIECES = {
    "ibc": (MLP(16), Search(Langevin("ibc", steps=4, noise=0.1), 16)),
    "correct": (MLP(16), Search(Langevin(steps=4), 16)),
    "derivative-free": (MLP(16), Search(DerivativeFree(), 16)),
    "mala": (MLP(16), Search(MALA(steps=4), 16)),
    "drawn and pruned": (MLP(16), Search(Langevin("ibc", steps=2, noise=0.1), 16, "draw", keep=4)),
    "steady": (cebm.Tilted(MLP(16), MixtureDensity(16)), cebm.TRIALS["steady"].acting),
    "mixture": (MixtureDensity(16), Direct()),
    "regression": (Regression(16), Direct()),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_client_gets_the_same_numbers_alone_and_among_others(name: str, generator: torch.Generator) -> None:
    """Same numbers, and actions that differ by rounding at most: unless rounding swaps two candidates of the same
    energy, which happens to few of 97 clients if any."""
    served = policy(*PIECES[name])
    rows = [1, 3, 1, 2, *[1] * 93]
    obs = inputs(sum(rows), generator)
    seeds = torch.randint(2**62, (len(rows),), generator=generator).tolist()
    with drawing_by_client(seeds, rows, torch.device("cpu")) as shared:
        together = served.act(obs, generator=shared)
    with drawing_by_client(seeds, rows, torch.device("cpu"), direct=False) as shared:
        assert np.array_equal(served.act(obs, generator=shared), together)
    alone = np.concatenate(
        [
            served.act(part, generator=torch.Generator().manual_seed(seed))
            for part, seed in zip(np.split(obs, np.cumsum(rows)[:-1]), seeds, strict=True)
        ]
    )
    far = np.abs(together - alone).max(1) > 1e-4
    assert far.sum() <= 4
    # The planted fault: one generator for all of them gives others' numbers.
    if name not in ("mixture", "regression"):
        one = served.act(obs, generator=torch.Generator().manual_seed(seeds[0]))
        assert (np.abs(one - alone).max(1) > 1e-4).sum() > 50


def test_a_draw_that_tells_no_rows_is_no_batch() -> None:
    """A piece that draws for the whole batch at once is found out; the server then asks for each client by itself."""
    with drawing_by_client([1, 2], [1, 2], torch.device("cpu")) as shared:
        weights = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
        assert torch.multinomial(weights, 1, generator=shared)[:, 0].tolist() == [1, 0, 1]
        filled = torch.zeros(3, 2).normal_(generator=shared)
        assert torch.equal(filled[:1], torch.randn(1, 2, generator=torch.Generator().manual_seed(1)) * 0 + filled[:1])
        assert torch.rand(6, 2, generator=shared).shape == (6, 2) == torch.rand(size=(6, 2), generator=shared).shape
        assert (
            torch.randint(5, (3,), generator=shared).shape == (3,) == torch.randint(2, 5, (3,), generator=shared).shape
        )
        with pytest.raises(CannotSplit, match="is not for each of 3 rows"):
            torch.rand(4, 2, generator=shared)
    with (
        pytest.raises(DrawnDirectly),
        drawing_by_client([1, 2], [1, 2], torch.device("cpu"), direct=False) as shared,
    ):
        torch.rand(3, 2, generator=shared)

    def draws_once(obs: np.ndarray, wishes: dict) -> Any:
        return torch.rand(1, 8, generator=wishes["generator"]).expand(len(obs), 8) if "generator" in wishes else None

    with serving(Wrapped(policy(), draws_once)) as running, ThreadPoolExecutor(8) as pool:
        clients = [cebm.connect(running.url) for _ in range(8)]
        got = list(pool.map(lambda i: clients[i].infer(np.zeros(3), seed=i), range(8)))
        for seed, actions in enumerate(got):
            expected = torch.rand(1, 8, generator=torch.Generator().manual_seed(seed))
            assert np.allclose(actions.ravel(), expected[0])
        for client in clients:
            client.close()


def test_many_clients_in_batches_get_their_own_answers(generator: torch.Generator) -> None:
    """64 at once, three requests each: every answer is the one that the policy gives to that client alone."""
    sizes: list[int] = []
    served, first = policy(), threading.Event()
    obs, seeds = inputs(64 * 3, generator).reshape(64, 3, 6), np.arange(64 * 3).reshape(64, 3)

    def noted(obs: np.ndarray, wishes: dict) -> None:
        if first.is_set():  # the first request waits until others are there, however slow they are
            first.clear()
            eventually(lambda: running._engine.waiting > 4)
        sizes.append(len(obs))

    async def all_of(url: str) -> list[list[np.ndarray]]:
        async def one(i: int) -> list[np.ndarray]:
            options = {"open_timeout": PATIENCE, "ping_timeout": PATIENCE}
            async with connect_async(url, compression=None, proxy=None, **options) as connection:
                await connection.recv()
                found = []
                for k in range(3):
                    await connection.send(pack({"obs": obs[i, k], "cebm": {"seed": int(seeds[i, k])}}))
                    found.append(unpack(await connection.recv())["actions"])
                return found

        return await asyncio.gather(*(one(i) for i in range(64)))

    with serving(Wrapped(served, noted)) as running:
        tried = len(sizes)  # by the server, to learn how long the policy takes
        first.set()
        answers = asyncio.run(all_of(running.url))
        text = metrics(running)
    assert max(sizes[tried:]) > 4 and f"cebm_batch_rows_sum {sum(sizes[tried:]):g}" in text
    far = 0
    for i in range(64):
        for k in range(3):
            expected = served.act(obs[i, k], generator=torch.Generator().manual_seed(int(seeds[i, k])))
            far += np.abs(answers[i][k].ravel() - expected).max() > 1e-3
    assert far <= 4  # where rounding swaps two candidates of the same energy


# -------------------------------------------------------------------------------------------- sessions


def test_the_server_keeps_the_history_and_a_new_connection_is_told(
    server: Server, served: EnergyPolicy, generator: torch.Generator
) -> None:
    """`infer` sends single frames; the connection is cut in between, as where the server was killed."""
    frames = inputs(6, generator)[:, :3]
    with cebm.connect(server.url) as remote:
        for k, frame in enumerate(frames):
            if k == 3:
                remote._socket.socket.shutdown(socket.SHUT_RDWR)
            before = frames[max(0, k - 1)]
            expected = served.act(np.concatenate([before, frame]), generator=torch.Generator().manual_seed(k))
            assert np.array_equal(remote.infer(frame, seed=k).ravel(), expected)
        assert remote._session == 2
        remote.reset()
        alone = served.act(np.concatenate([frames[5], frames[5]]), generator=torch.Generator().manual_seed(9))
        assert np.array_equal(remote.infer(frames[5], seed=9).ravel(), alone)
        with pytest.raises(ValueError, match="reset first"):
            remote.infer(frames[:2])


def test_the_rest_of_a_chunk_starts_the_next_search(
    server: Server, served: EnergyPolicy, generator: torch.Generator
) -> None:
    """On the same connection the server remembers the chunk, on a new one the client sends it."""
    frame = inputs(1, generator)[0, :3]
    with cebm.connect(server.url) as remote:
        for cut in (False, True):
            remote.reset()
            chunk = remote.infer(frame, seed=1)
            if cut:
                remote.close()
            again = remote.infer(frame, seed=2, played=3)
            rest = np.concatenate([chunk[3:], chunk[-1:], chunk[-1:], chunk[-1:]]).ravel()
            window, numbers = np.concatenate([frame, frame]), torch.Generator().manual_seed(2)
            assert np.array_equal(again.ravel(), served.act(window, previous=rest, generator=numbers))


def test_a_policy_under_constraints_is_served(generator: torch.Generator) -> None:
    """Its plan and last action come from the session, from the client or from a Runner; it asks by an error of its own.
    Beside others it acts as alone, though it searches longer where an observation needs it."""
    from cebm.constraints import MaxStep, NearPlan

    free = policy()
    near = free.with_constraint(MaxStep(0.05)).with_constraint(NearPlan(), weight=5.0)
    frames = inputs(3, generator)[:, :3]
    with serving(near) as running, cebm.connect(running.url) as remote:
        assert remote.metadata["takes"] == ["last", "plan"]
        chunk = remote.infer(frames[0], seed=1)
        for cut in (False, True):
            if cut:
                remote.close()
            again = remote.infer(frames[0], seed=2, played=2)
            told = {"last": chunk[1:2].ravel(), "plan": np.concatenate([chunk[2:], chunk[-1:], chunk[-1:]]).ravel()}
            expected = near.act(np.tile(frames[0], 2), **told, generator=torch.Generator().manual_seed(2))
            np.testing.assert_allclose(again.ravel(), expected, atol=1e-6)
            assert np.abs(again[0] - chunk[1]).max() <= 0.05 + 1e-6
            chunk = again
        local, distant = Runner(near, execute=2), Runner(remote, execute=2)
        for frame in frames:
            for _ in range(2):
                np.testing.assert_allclose(local.act(frame), distant.act(frame), atol=1e-6)
    # No action is allowed where the first column of the observation is −1.5.
    asks = free.with_constraint(lambda scene: (scene.obs[:, :1] > -1.4).expand(scene.actions.shape[:2]))
    with serving(asks) as running, ThreadPoolExecutor(8) as pool:
        clients = [cebm.connect(running.url) for _ in range(8)]

        def ask(i: int) -> Any:
            obs = np.full(6, -1.5) if i % 2 else np.zeros(6)
            return refusal(lambda: clients[i].act(obs)) if i % 2 else clients[i].act(obs)

        for i, found in enumerate(pool.map(ask, range(8))):
            if i % 2:
                assert found.kind == "abstained" and "no candidate satisfies the constraints" in str(found)
            else:
                np.testing.assert_allclose(found, free.act(np.zeros(6)), atol=1e-5)  # a batch rounds otherwise
        for client in clients:
            client.close()


# -------------------------------------------------------------------------------------------- time


def test_a_late_answer_is_an_error_at_its_deadline() -> None:
    """The error comes while the policy is still at work: it returns only after that."""
    free = threading.Event()
    slow = Wrapped(policy(), lambda obs, wishes: free.wait(PATIENCE) and None if obs[0, 0] == -1.5 else None)
    with serving(slow) as running, cebm.connect(running.url) as remote:
        assert refusal(lambda: remote.act(np.full(6, -1.5), deadline_ms=60.0)).kind == "deadline"
        assert not free.is_set() and running._engine._worker.batch
        free.set()
        assert remote.act(np.zeros(6), deadline_ms=1e3 * PATIENCE).shape == (8,)
        assert refusal(lambda: remote.act(np.zeros(6), deadline_ms=1e-3)).kind == "deadline"


def test_the_effort_is_fitted_to_the_time_that_is_left() -> None:
    """A policy whose time is known: 1 ms and 0.1 ms per candidate, 400 of them."""
    seen: list[int] = []

    def timed(obs: np.ndarray, wishes: dict) -> None:
        seen.append(wishes.get("candidates", 400))
        time.sleep(0.001 + 1e-4 * seen[-1] * len(obs))

    recipe = policy(acting=Search(Langevin("ibc", steps=1), candidates=400))
    with serving(Wrapped(recipe, timed)) as running, cebm.connect(running.url) as remote:
        remote.act(np.zeros(6))
        remote.act(np.zeros(6), deadline_ms=1e3 * PATIENCE)
        assert seen[-2:] == [400, 400]
        before = len(seen)
        with contextlib.suppress(ServerError):  # on a busy machine it may be late after all
            remote.act(np.zeros(6), deadline_ms=30.0)
        assert all(count < 300 for count in seen[before:])
        remote.act(np.zeros(6), budget_ms=10.0)
        assert seen[-1] < 200


def test_the_line_of_effort() -> None:
    """t = 2 + 0.5·rows·candidates, exactly; then everything takes twice as long."""
    effort = Effort(10, 5, lambda rows, count: 2.0 + 0.5 * rows * (count or 10))
    assert effort.expected(4) == pytest.approx(22) and effort.expected(1, 3) == pytest.approx(3.5)
    assert effort.expected(1, 3, steps=10) == pytest.approx(7)
    assert effort.fitting(10.0, 1) == 12 and effort.fitting(10.0, 2) == 6 and effort.fitting(2.4, 1) == 0
    for _ in range(40):
        effort.measured(44.0, 4)
    assert effort.expected(4) == pytest.approx(44, rel=1e-2) and effort.fitting(10.0, 1) == 4
    without = Effort(None, None, lambda rows, count: 2.0)
    assert without.fitting(10.0, 1) is None and without.fitting(1.0, 1) == 0


# -------------------------------------------------------------------------------------------- policies that fail


def test_a_policy_that_raises_fails_only_who_asked_for_it(caplog: pytest.LogCaptureFixture) -> None:
    def moody(obs: np.ndarray, wishes: dict) -> Any:
        if (obs[:, 0] == 0.5).any():
            raise RuntimeError("secret path /home/someone")
        if (obs[:, 0] == 0.25).any():
            raise ValueError("the gripper is closed")
        return np.full((len(obs), 8), np.nan) if (obs[:, 0] == 0.75).any() else time.sleep(0.01)

    with serving(Wrapped(policy(), moody)) as running, ThreadPoolExecutor(12) as pool:
        clients = [cebm.connect(running.url) for _ in range(12)]
        firsts = [0.5, 0.25, 0.75, *[0.0] * 9]

        def ask(i: int) -> Any:
            try:
                return clients[i].act(np.array([firsts[i], 0, 0, 0, 0, 0])).shape
            except ServerError as error:
                return error

        for _ in range(3):
            raised, refused, silly, *good = pool.map(ask, range(12))
            assert all(shape == (8,) for shape in good)
            assert raised.kind == "policy-failed" and "secret" not in str(raised) and "RuntimeError" in str(raised)
            assert refused.kind == "policy-refused" and "the gripper is closed" in str(refused)
            assert silly.kind == "policy-failed"
        records = [record for record in caplog.records if getattr(record, "with_", {}).get("id") == raised.id]
        assert records and records[0].exc_info and "secret path" in str(records[0].exc_info[1])
        for client in clients:
            client.close()


def test_a_hung_policy_is_answered_for_and_replaced() -> None:
    """The second worker acts; when too many hang, requests are refused until one returns."""
    free = threading.Event()
    stuck = Wrapped(policy(), lambda obs, wishes: free.wait(PATIENCE) and None if obs[0, 0] == -1.5 else None)
    with serving(stuck, hung=2) as running, cebm.connect(running.url) as remote:

        def hangs() -> bool:
            """With a short limit for this request alone: the others may take as long as a busy machine needs."""
            patient = running._engine.limits
            running._engine.limits = replace(patient, hang_s=0.2)
            kind = refusal(lambda: remote.act(np.full(6, -1.5))).kind
            running._engine.limits = patient
            return kind == "policy-hung" and not free.is_set()

        assert hangs()
        assert remote.act(np.zeros(6)).shape == (8,) and healthz(running) == 200
        assert hangs()
        eventually(lambda: healthz(running) == 503)
        assert refusal(lambda: remote.act(np.zeros(6))).kind == "no-worker"
        free.set()
        eventually(lambda: healthz(running) == 200)
        assert remote.act(np.zeros(6)).shape == (8,)
        assert 'cebm_events_total{event="worker_replaced"} 2' in metrics(running)


# -------------------------------------------------------------------------------------------- the door


def ask_http(server: Server, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def healthz(server: Server) -> int:
    return ask_http(server, "/healthz")[0]


def metrics(server: Server) -> str:
    return ask_http(server, "/metrics")[1]


def errors(server: Server) -> dict[str, int]:
    """Refusals so far, by their kind."""
    return {kind: int(n) for kind, n in re.findall(r'cebm_errors_total\{kind="([a-z-]+)"\} (\d+)', metrics(server))}


def test_http(server: Server, remote: RemotePolicy) -> None:
    assert ask_http(server, "/healthz") == (200, "OK\n")
    status, body = ask_http(server, "/secret")
    assert status == 404 and json.loads(body)["error"] == "not-found"
    status, body = ask_http(server, "/", Origin="https://example.org")
    assert status == 403 and json.loads(body)["error"] == "foreign-origin"
    remote.act(np.zeros(6))
    status, text = ask_http(server, "/metrics")
    assert status == 200 and 'cebm_errors_total{kind="not-found"}' in text and "cebm_clients 1" in text
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"\})? [\d.e+-]+', line), line
    counts = [int(n) for n in re.findall(r"cebm_request_seconds_bucket\S+ (\d+)", text)]
    assert counts == sorted(counts) and counts[-1] == int(re.findall(r"cebm_request_seconds_count (\d+)", text)[0])


def test_a_token_is_needed_off_loopback_and_checked() -> None:
    served = policy()
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ValueError, match="a token is needed"):
            cebm.serve(served, host=host)
    with pytest.raises(ValueError, match="at least 16"):
        cebm.serve(served, token="short")
    with serving(served, host="0.0.0.0", token=TOKEN) as running:
        url = f"ws://127.0.0.1:{running.port}"
        for wrong in (None, "x" * 22, TOKEN + "x", TOKEN[:-1], "Ä" * 16):
            headers = {} if wrong is None else {"Authorization": f"Api-Key {wrong}".encode().decode("latin-1")}
            with pytest.raises(InvalidStatus) as error:
                connect_raw(url, additional_headers=headers, proxy=None)
            assert error.value.response.status_code == 401
        assert refusal(lambda: cebm.connect(url, token="y" * 20)).kind == "unauthorised"
        assert ask_http(running, "/metrics")[0] == 401 and healthz(running) == 200
        assert ask_http(running, "/metrics", Authorization=f"Api-Key {TOKEN}")[0] == 200
        with cebm.connect(url, token=TOKEN) as remote:
            assert remote.act(np.zeros(6)).shape == (8,)


def test_tls_by_files(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    made = [tmp_path / "key.pem", tmp_path / "certificate.pem"]
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", str(made[0]), "-out", str(made[1]), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*words, "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
    with serving(policy(), tls_certificate=made[1], tls_key=made[0]) as running:
        assert running.url.startswith("wss://")
        with cebm.connect(running.url, tls_ca=made[1]) as remote:
            assert remote.act(np.zeros(6)).shape == (8,)
        with pytest.raises(ssl.SSLError, match="certificate"):
            cebm.connect(running.url)
    with pytest.raises(ValueError, match="cannot be loaded"):
        cebm.serve(policy(), tls_certificate=made[0], tls_key=made[0])
    with pytest.raises(ValueError, match="tls_certificate"):
        cebm.serve(policy(), tls_key=made[0])


# -------------------------------------------------------------------------------------------- limits


def raw(server: Server, **options: Any) -> Any:
    connection = connect_raw(server.url, compression=None, proxy=None, open_timeout=PATIENCE, **options).__enter__()
    connection.recv()
    return connection


def test_bad_frames_get_an_error_and_the_connection_lives(server: Server) -> None:
    good = pack({"obs": np.zeros(6), "cebm": {"id": 7}})
    with raw(server) as connection:
        for frame, kind in (
            ("text", "text-frame"),
            (good[:-2], "not-msgpack"),
            (pack([1]), "bad-request"),
            (pack({"obs": np.zeros(5), "cebm": {"id": 7}}), "bad-observation"),
            (pack({"obs": np.full(6, np.inf)}), "not-finite"),
        ):
            connection.send(frame)
            reply = json.loads(connection.recv())
            assert reply["error"] == kind and re.fullmatch(r"[0-9a-f]{8}", reply["id"])
            connection.send(good)
            assert unpack(connection.recv())["id"] == 7


def test_too_many_bad_frames_end_the_connection() -> None:
    with serving(policy(), strikes=3) as running:
        with raw(running) as connection:
            for _ in range(3):
                connection.send(b"\xc1")
                connection.recv()
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv()
        assert closed.value.rcvd is not None and (closed.value.rcvd.code, closed.value.rcvd.reason) == (
            1008,
            "too-many-errors",
        )
        assert errors(running) == {"not-msgpack": 3, "too-many-errors": 1}


def test_large_frames_fast_clients_and_many_connections_are_refused() -> None:
    with serving(policy(), frame=4096, rate=0.001, connections=3) as running:
        with raw(running) as connection, pytest.raises(ConnectionClosed) as closed:
            connection.send(bytes(5000))
            connection.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        eventually(lambda: errors(running).get("frame-too-large") == 1)
        with cebm.connect(running.url, reconnect_s=0.0) as large:
            assert refusal(lambda: large.act(np.zeros((100, 6)))).kind == "frame-too-large"
        with raw(running) as fast:
            replies = []
            for _ in range(12):
                fast.send(pack({"obs": np.zeros(6)}))
                replies.append(fast.recv())
            kinds = [json.loads(reply)["error"] for reply in replies if isinstance(reply, str)]
            assert len(kinds) == 11 and {*kinds} == {"too-fast"} and not isinstance(replies[0], str)
        with contextlib.ExitStack() as stack:
            eventually(lambda: "cebm_clients 0" in metrics(running))
            for _ in range(3):
                stack.enter_context(raw(running))
            assert refusal(lambda: cebm.connect(running.url, reconnect_s=0.0)).kind == "too-many-connections"


def test_silent_and_deaf_clients_are_dropped() -> None:
    """One asks nothing. One asks for large answers and does not read them."""
    with serving(policy(), idle_s=0.3) as running:
        with raw(running) as silent, pytest.raises(ConnectionClosed) as closed:
            silent.recv(timeout=PATIENCE)
        assert closed.value.rcvd is not None and closed.value.rcvd.reason == "idle"
    with serving(policy(), send_s=0.3, rows=20_000, effort=200) as running:
        greeting = "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        greeting += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        deaf = socket.create_connection(("127.0.0.1", running.port))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(greeting.encode())
        payload = pack({"obs": np.zeros((100, 6)), "cebm": {"call": "propose", "candidates": 1000, "steps": 1}})
        frame = b"\x82\xfe" + len(payload).to_bytes(2, "big") + bytes(4) + payload  # masked with zeros
        deaf.sendall(frame * 3)
        eventually(lambda: errors(running).get("slow-reader") == 1)
        eventually(lambda: "cebm_clients 0" in metrics(running))
        deaf.close()


def test_a_full_queue_refuses() -> None:
    free = threading.Event()
    slow = Wrapped(policy(), lambda obs, wishes: free.wait(PATIENCE) and None if obs[0, 0] == -1.5 else None)
    with serving(slow, queue=2) as running, ThreadPoolExecutor(4) as pool:
        clients = [cebm.connect(running.url) for _ in range(4)]
        blocked = pool.submit(clients[0].act, np.full(6, -1.5))
        eventually(lambda: running._engine.under_way == 1 and not running._engine.waiting)
        waiting = [pool.submit(client.act, np.zeros(6)) for client in clients[1:3]]
        eventually(lambda: running._engine.waiting == 2)
        assert refusal(lambda: clients[3].act(np.zeros(6))).kind == "busy"
        free.set()
        assert all(future.result().shape == (8,) for future in (blocked, *waiting))
        for client in clients:
            client.close()


# -------------------------------------------------------------------------------------------- coming and going


def test_a_reload_drops_no_request() -> None:
    """Two policies that are told apart by their answers; four clients ask on while ten reloads happen."""
    obs, both = np.zeros(6), [policy(seed=1), policy(seed=2)]
    answers = [served.act(obs) for served in both]
    done, counts, farthest = threading.Event(), [0, 0], [0.0]
    with serving(both[0]) as running, ThreadPoolExecutor(4) as pool:

        def ask() -> None:
            with cebm.connect(running.url, reconnect_s=0.0) as remote:
                while not done.is_set():
                    got = remote.act(obs)
                    distances = [np.abs(got - answer).max() for answer in answers]
                    farthest.append(min(distances))
                    counts[int(np.argmin(distances))] += 1
                assert remote._session == 1

        tasks = [pool.submit(ask) for _ in range(4)]
        for k in range(10):
            answered = counts[k % 2]
            eventually(lambda answered=answered, k=k: counts[k % 2] > answered)
            running.reload(both[(k + 1) % 2])
        done.set()
        for task in tasks:
            task.result()
        with pytest.raises(ValueError, match="other observations or actions"):
            running.reload(policy(spec=Specification.flat(3, 2)))
        assert running.policy is both[0] and errors(running) == {} and min(counts) > 0
        assert max(farthest) < 1e-3 < np.abs(answers[0] - answers[1]).max()


def test_closing_finishes_what_is_under_way() -> None:
    free = threading.Event()
    slow = Wrapped(policy(), lambda obs, wishes: free.wait(PATIENCE) and None if obs[0, 0] == -1.5 else None)
    with ThreadPoolExecutor(4) as pool:
        running = cebm.serve(slow, limits=Limits(hang_s=PATIENCE, grace_s=PATIENCE))
        clients = [cebm.connect(running.url, reconnect_s=0.0) for _ in range(4)]
        futures = [pool.submit(client.act, np.full(6, -1.5)) for client in clients]
        eventually(lambda: running._engine.under_way == 4)
        threading.Timer(0.3, free.set).start()  # while it closes
        running.close()
        running.close()
        assert all(future.result().shape == (8,) for future in futures)
        assert running.wait(0.0)
        with pytest.raises(ConnectionError, match="stopping"):
            clients[0].act(np.zeros(6))
        with pytest.raises(ConnectionRefusedError, match="does not answer"):
            clients[0].act(np.zeros(6))


def test_the_client_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="must begin with ws"):
        cebm.connect("http://localhost")
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        cebm.connect("ws://localhost", timeout_s=0.0)
    free = threading.Event()
    slow = Wrapped(policy(), lambda obs, wishes: free.wait(PATIENCE) and None if obs[0, 0] == -1.5 else None)
    with serving(slow) as running, cebm.connect(running.url, timeout_s=PATIENCE) as remote:
        remote.timeout_s = 0.1
        with pytest.raises(TimeoutError, match="no answer within"):
            remote.act(np.full(6, -1.5))
        free.set()
        remote.timeout_s = PATIENCE
        assert np.array_equal(remote.act(np.zeros(6)), policy().act(np.zeros(6)))  # not the late answer
        with pytest.raises(ValueError, match="must be numbers"):
            remote.act(["a"])


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="has no act"):
        cebm.serve(object())
    with pytest.raises(ValueError, match="has no `specification`"):
        cebm.serve(Runner(policy()))
    with pytest.raises(ValueError, match="hang_s must be positive"):
        Limits(hang_s=0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError):
        cebm.serve(policy(), port=taken.getsockname()[1])


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """It serves a folder with a token, reloads by SIGHUP, survives a broken folder, and ends by SIGTERM."""
    first, second = policy(seed=1), policy(seed=2)
    first.save(tmp_path / "policy")
    (tmp_path / "token").write_text(TOKEN + "\n")
    words = [sys.executable, "-m", "cebm", "serve", str(tmp_path / "policy"), "--port", "0", "--threads", "1"]
    log = tmp_path / "log"
    with open(log, "w") as errors:
        process = subprocess.Popen(
            [*words, "--token-file", str(tmp_path / "token")], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        url = process.stdout.readline().strip()
        with cebm.connect(url, token=TOKEN) as remote:
            assert np.array_equal(remote.act(np.zeros(6)), first.act(np.zeros(6)))
            shutil.rmtree(tmp_path / "policy")
            process.send_signal(signal.SIGHUP)
            eventually(lambda: "not reloaded" in log.read_text())
            assert np.array_equal(remote.act(np.zeros(6)), first.act(np.zeros(6)))
            second.save(tmp_path / "policy")
            process.send_signal(signal.SIGHUP)
            eventually(lambda: np.array_equal(remote.act(np.zeros(6)), second.act(np.zeros(6))))
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events == ["listening", "the policy was not reloaded", "reloaded", "stopping", "stopped"]


def test_every_error_kind_is_documented() -> None:
    table = dict(re.findall(r"^\| `([a-z-]+)` \| (.+?) \|$", (ROOT / "docs/serving.md").read_text(), re.M))
    assert {kind: table.get(kind) for kind in KINDS} == KINDS
