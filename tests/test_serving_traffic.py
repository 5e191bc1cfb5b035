"""The server from outside: openpi's own client, a short siege, and the control loop of the examples."""

import importlib
import json
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cebm
from cebm import Part, Specification

pytest.importorskip("websockets", reason="the extra `serve` is not installed")
pytest.importorskip("msgpack", reason="the extra `serve` is not installed")

from benchmarks import serving, soak
from cebm.serving.protocol import Refused, unpack
from cebm.serving.requests import Limits, Reader
from waiting import PATIENCE

ROOT = Path(__file__).parent.parent
ASK = """
import json, sys
import numpy as np
from openpi_client import websocket_client_policy as ours
client = ours.WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key=sys.argv[2])
metadata = client.get_server_metadata()
obs = {"state": np.arange(3, dtype=np.float32) / 4, "image": np.ones((2, 2), np.uint8)}
reply = client.infer(obs)
found = {"metadata": metadata["server"], "keys": sorted(reply), "timing": sorted(reply["server_timing"])}
found |= {"shape": reply["actions"].shape, "dtype": str(reply["actions"].dtype), "numpy": np.__version__}
found["again"] = client.infer(obs)["actions"].tolist()
try:
    client.infer({"state": np.zeros(3)})
except RuntimeError as error:
    found["error"] = str(error)
found["after"] = client.infer(obs)["actions"].shape
client.reset()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def openpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with openpi-client 0.1.2, which needs an older numpy than ours."""
    place = tmp_path_factory.mktemp("openpi")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    needs = ["numpy<2", "typing_extensions", "msgpack", "websockets"]
    for words in (
        ["--no-deps", "openpi-client==0.1.2"],
        needs,
    ):  # it names dm-tree and does not need it
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            pytest.skip(f"openpi-client cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
def test_openpis_client_talks_to_our_server(openpi: Path) -> None:
    spec = Specification((Part("state", (3,)), Part("image", (2, 2))), 2, history=2, horizon=4)
    energy = cebm.MLP(16).build(spec, torch.Generator().manual_seed(0))
    boxes = [cebm.Box.from_bounds([-1.0] * dim, [1.0] * dim) for dim in (spec.obs_dim, spec.act_dim)]
    token = "a-token-of-some-length"
    with cebm.serve(cebm.EnergyPolicy(energy, boxes[0], boxes[1], spec=spec), token=token) as server:
        words = [str(openpi), "-c", ASK, str(server.port), token]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        wrong = subprocess.run([*words[:-1], "x" * 20], capture_output=True, text=True, timeout=PATIENCE)
    assert found["metadata"] == "cebm" and found["keys"] == ["actions", "server_timing"]
    assert found["shape"] == [4, 2] == found["after"] and found["dtype"] == "float32"
    assert found["numpy"].startswith("1.") and found["timing"] == ["batch", "infer_ms", "total_ms"]
    assert np.isfinite(found["again"]).all()
    assert "part image is missing" in found["error"] and "Traceback" not in found["error"]
    assert wrong.returncode != 0 and "401" in wrong.stderr


def test_hostile_frames_are_hostile() -> None:
    """What the siege sends is refused in more than nine of ten cases, for at least eight different reasons."""
    read = Reader(Specification.flat(serving.OBS, 2), Limits(), 16, 1)
    kinds: dict[str, int] = {}
    for i in range(400):
        frame = soak.hostile(soak.random.Random(i))
        try:
            if isinstance(frame, str):
                raise Refused("text-frame", "")
            read.request(unpack(frame))
        except Refused as refusal:
            kinds[refusal.kind] = kinds.get(refusal.kind, 0) + 1
    assert sum(kinds.values()) > 320 and len(kinds) >= 8


@pytest.mark.slow
def test_a_short_siege() -> None:
    """3,000 hostile frames, the crowd, the deaf and SIGKILL. The time of good clients is judged by `make soak`, as
    it depends on what else this machine does."""
    found = soak.soak(3000, 300.0, 2.0)
    assert [fault for fault in found["faults"] if not fault.startswith("p99")] == [], found
    assert len(found["errors"]) >= 10 and found["good_requests"] > 1000


def test_a_siege_in_little() -> None:
    """64 good clients and hostile frames in this process: every answer right, no connection lost, no fault of ours."""
    policy = serving.untrained("steady", history=2)
    obs = np.stack([unpack(soak.good_frame(i))["obs"] for i in range(soak.GOOD)])
    expected = np.stack(
        [policy.act(np.tile(obs[i], 2), generator=torch.Generator().manual_seed(1000 + i)) for i in range(soak.GOOD)]
    )

    async def besieged(url: str, port: int) -> tuple[soak.Seen, soak.Seen]:
        good, bad, done = soak.Seen(), soak.Seen(), soak.asyncio.Event()
        task = soak.asyncio.create_task(soak.good_clients(url, expected, 2.0, done, good))
        await soak.asyncio.gather(*(soak.attack(url, port, 25, 50.0, i, bad) for i in range(8)))
        deadline = time.monotonic() + 30  # the attack may be over before all of them have asked
        while len(good.times) < soak.GOOD and time.monotonic() < deadline:
            await soak.asyncio.sleep(0.05)
        done.set()
        await task
        return good, bad

    with cebm.serve(policy, token=soak.TOKEN) as server:
        good, bad = soak.asyncio.run(besieged(server.url, server.port))
        errors = soak.refusals(server.port)
        assert good.wrong == 0 and good.lost == 0 and len(good.times) >= soak.GOOD
        assert bad.frames.total() == 200 and sum(errors.values()) > 100 and "internal" not in errors
        with cebm.connect(server.url, token=soak.TOKEN) as remote:
            assert remote.infer(obs[0]).shape == (1, 2)


@pytest.mark.slow
def test_the_control_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All latencies, two episodes each: with an answer that comes later than a chunk lasts, the loop holds."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("control_loop")
    lines = example.main((0.0, 0.3), episodes=2, steps=60)
    assert len(lines) == 4 and "held 0/" not in lines[2]


@pytest.mark.slow
def test_the_bench_measures() -> None:
    words = [
        sys.executable,
        "-m",
        "benchmarks.serving",
        "--json",
        "--clients",
        "4",
        "--seconds",
        "0.5",
        "--rounds",
        "1",
    ]
    words += ["--rounds", "1", "--policies", "steady"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["clients"] == 4 and row["served"] > 0 and row["p99_ms"] >= row["p50_ms"] and row["shares"] >= 1
