"""How long does a single action take, by each way to deploy a policy? `policy.act`, its exported formats, and the bare
computation of the policy's graph are timed in turns, so that a busy machine slows all of them; in an order that is
drawn for each round, so that no way always finds its weights in the cache because another one has just used them.
"""

import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import cebm
from benchmarks.bench import Row, machine, make_trainer, quartiles
from cebm.export import Format
from cebm.policy import EnergyPolicy
from cebm.recipes import TRIALS

_CASES: tuple[tuple[str, dict[str, Any]], ...] = (("steady", {}), ("ibc", {"candidates": 64, "steps": 10}))
_FORMATS: tuple[tuple[Format, str], ...] = (("onnx", "policy.onnx"), ("torch", "torch.pt2"), ("aoti", "aoti.pt2"))


@dataclass(frozen=True, kw_only=True)
class DeployBench(Row):
    """Time of a single action. Weights are untrained, which does not change the time."""

    bench: str = "deploy"
    trial: str
    way: str
    """'act': policy.act. 'onnx', 'torch', 'aoti': an exported file by `load_exported`, its random numbers drawn anew.
    'onnx session', …: the file alone, given its numbers. 'bare': the same arithmetic by hand, in plain torch."""
    effort: str
    ms_min: float
    ms_p50: float
    ms_p99: float
    ratio: float
    """Median over the rounds of this way's processor time over that of policy.act in the same round: what else the
    machine does changes the milliseconds much, and this little."""
    ratio_q25: float
    ratio_q75: float

    def sentence(self) -> str:
        return (
            f"{self.trial}{self.effort and f' ({self.effort})'}, {self.way}: p50 {self.ms_p50:.2f} ms, "
            f"p99 {self.ms_p99:.2f} ms, smallest {self.ms_min:.2f} ms of {self.repeats} calls, {self.ratio:.2f} of the "
            f"processor's time of policy.act (quartiles {self.ratio_q25:.2f} to {self.ratio_q75:.2f})"
        )


def bench_deploy(threads: int, repeats: int) -> Iterator[DeployBench]:
    """A row per policy and way. A format whose packages or compiler are missing is left out, and its row says so."""
    for name, effort in _CASES:
        trainer = make_trainer(TRIALS[name])
        policy, obs = trainer.policy(), torch.as_tensor(trainer.training[np.arange(1)][0])[0]
        around = machine(threads)
        with tempfile.TemporaryDirectory() as folder:
            ways: dict[str, Callable[[], object]] = {"act": partial(policy.act, obs, **effort)}
            if name == "steady":
                ways["bare"] = partial(bare_steady(policy), obs)
            for kind, file in _FORMATS:
                try:
                    policy.export(Path(folder) / file, kind, **effort)
                except (ImportError, cebm.ExportError):  # an extra or a compiler is missing
                    continue
                exported = cebm.load_exported(Path(folder) / file)
                given = exported.numbers(1)
                ways[kind] = partial(exported.act, obs)
                ways[f"{kind} session"] = partial(exported.act_with, obs.unsqueeze(0), given)
            times = _in_turns(ways, 12 * repeats)
        words = ", ".join(f"{key} {value}" for key, value in effort.items())
        for way, (taken, busy) in times.items():
            q25, ratio, q75 = quartiles(busy / times["act"][1])
            p50, p99 = np.percentile(taken, [50, 99]).tolist()
            yield DeployBench(
                trial=name,
                way=way,
                effort=words,
                ms_min=float(taken.min()),
                ms_p50=p50,
                ms_p99=p99,
                ratio=ratio,
                ratio_q25=q25,
                ratio_q75=q75,
                repeats=len(taken),
                **around,
            )


def _in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Milliseconds of each way in each round, by the clock and of the processor, after some rounds that warm up."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    order, source = list(ways), random.Random(0)
    for count in range(rounds + 10):
        source.shuffle(order)
        for way in order:
            began, busy = perf_counter(), process_time()
            ways[way]()
            if count >= 10:
                times[way].append((1e3 * (perf_counter() - began), 1e3 * (process_time() - busy)))
    return {way: (np.array(values)[:, 0], np.array(values)[:, 1]) for way, values in times.items()}


def bare_steady(policy: EnergyPolicy) -> Callable[[Tensor], Tensor]:
    """`policy.act` of `steady` by hand: the same numbers in the same order, every weight at hand, nothing checked, and
    nothing computed that the action does not need. No library that knows more than one energy can be as quick."""
    energy: Any = policy.energy
    tilt, base, draws, keep = energy.tilt, energy.base, policy.acting.candidates, policy.acting.keep  # type: ignore
    first, k, d = tilt.first.weight, base.components, base.act_dim
    seen, moved, bias = first[:, : tilt.obs_dim], first[:, tilt.obs_dim :], tilt.first.bias
    (w2, b2), (w3, b3) = ((layer.weight, layer.bias) for layer in (tilt.hidden[0], tilt.last))
    trunks = [[(layer.weight, layer.bias) for layer in trunk.layers] for trunk in (base.placing, base.weighing)]
    slope, offset, floor = base.linear.weight, base.linear.bias, base.floor
    units = policy.obs_box.centre, policy.obs_box.scale, policy.act_box.centre, policy.act_box.scale
    low, high = ((limit - units[2]) / units[3] for limit in policy.limits)
    size = policy.acting.sampler.schedule(0, 1)  # type: ignore[attr-defined]

    def through(layers: list[tuple[Tensor, Tensor]], hidden: Tensor) -> Tensor:
        for weight, shift in layers[:-1]:
            hidden = F.relu(F.linear(hidden, weight, shift))
        return F.linear(hidden, *layers[-1])

    def tilted(context: Tensor, y: Tensor) -> Tensor:
        hidden = F.relu(F.linear(F.relu(context.unsqueeze(1) + F.linear(y, moved)), w2, b2))
        return F.linear(hidden, w3, b3).squeeze(-1)

    def without_nan(energies: Tensor, y: Tensor) -> Tensor:
        return torch.add(energies, y.sum(-1), alpha=0).nan_to_num(torch.inf, torch.inf, torch.inf)

    @torch.inference_mode()
    def act(obs: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x = (obs.unsqueeze(0) - units[0]) / units[1]
        context = F.linear(x, seen, bias)
        means, logs = through(trunks[0], x).chunk(2, 1)
        logs = 0.5 * (2 * (4.5 * torch.tanh(logs / 4.5) - 2.5)).exp().add(floor**2).log()
        weights = through(trunks[1], x).log_softmax(1)
        means, logs = (means + F.linear(x, slope, offset)).view(-1, k, d), logs.view(-1, k, d)
        heights, precisions = weights - logs.sum(-1) - 0.5 * d * math.log(2 * math.pi), (-2 * logs).exp()
        uniform = torch.rand((1, draws), generator=generator)
        normal = torch.randn((1, draws, d), generator=generator)
        place = torch.searchsorted(weights.exp().cumsum(1), uniform, right=True).clamp_max(k - 1)
        place = place.unsqueeze(-1).expand(-1, -1, d)
        y = means.gather(1, place) + logs.exp().gather(1, place) * normal
        looks = -without_nan(tilted(context, y), y)
        gumbel = torch.rand((1, draws), generator=generator).clamp_min(1e-30).log()
        order = (looks - (-gumbel).log()).topk(keep, 1).indices
        y = y.gather(1, order.unsqueeze(-1).expand(-1, -1, d))
        one = F.relu((context.unsqueeze(1) + F.linear(y, moved)).flatten(0, 1))
        two = F.relu(torch.addmm(b2, one, w2.t()))
        back = torch.ops.aten.threshold_backward(w3[0].expand_as(two), two, 0) @ w2
        slopes = (torch.ops.aten.threshold_backward(back, one, 0) @ moved).view_as(y)
        away = y.unsqueeze(2) - means.unsqueeze(1)
        pull = away * precisions.unsqueeze(1)
        parts = heights.unsqueeze(1) - 0.5 * (away * pull).sum(-1)
        slopes = slopes + (parts.softmax(-1).unsqueeze(-1) * pull).sum(2)
        y = (y + (slopes * (-0.5 * size)).clamp(-0.5, 0.5)).clamp(-1.1, 1.1).clamp(low, high)
        away = y.unsqueeze(2) - means.unsqueeze(1)
        parts = heights.unsqueeze(1) - 0.5 * (away * away * precisions.unsqueeze(1)).sum(-1)
        energies = without_nan(tilted(context, y) - parts.logsumexp(-1), y)
        index = torch.where(energies[:, 0] < torch.inf, 0, energies.argmin(1))
        return (y[torch.arange(1), index] * units[3] + units[2]).clamp(*policy.limits)[0]

    return act
