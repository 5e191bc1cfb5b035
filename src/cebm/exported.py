"""A policy that was exported to one file, as a policy again: `load_exported(path)` gives an object with `act` and
`reset`, whatever the format, so that `evaluate` and `Runner` take it. It brings the random numbers.
"""

import json
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cebm.export import FORMAT, VERSION, Contract
from cebm.named import flat_observation
from cebm.parts import Part
from cebm.settings import StorageError, from_json
from cebm.spaces import check_finite
from cebm.storage import take

Compute = Callable[[dict[str, Tensor]], Tensor]
"""Inputs by name to the actions."""


@dataclass(frozen=True, eq=False)
class ExportedPolicy:
    """Acts by an exported file. As an `EnergyPolicy` it keeps no state between calls, and the same call gives the same
    action unless a generator is given; with one it draws the numbers that `EnergyPolicy.act` draws."""

    contract: Contract
    """What the file takes and gives."""
    compute: Compute
    """Runs it."""

    @property
    def history(self) -> int:
        """Observations that one input holds, oldest first."""
        return self.contract.history

    @property
    def horizon(self) -> int:
        """Actions that one output holds, the current one first."""
        return self.contract.horizon

    @property
    def parts(self) -> tuple[Part, ...]:
        """The named parts of one observation."""
        return self.contract.parts

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of one observation and of one action."""
        return self.contract.frame, self.contract.action

    @property
    def device(self) -> torch.device:
        """Exported policies run on the CPU."""
        return torch.device("cpu")

    def reset(self) -> None:
        """Nothing to forget: the file keeps no state."""

    def act(self, obs: Any, *, generator: torch.Generator | None = None) -> Any:
        """The action for one observation [history · frame], a batch [batch, history · frame] or a dictionary of named
        parts, as `EnergyPolicy.act` gives it. A tensor in gives a tensor out, anything else a numpy array."""
        obs = flat_observation(obs, self.parts, self.history)
        rows = self._rows(obs)
        count = rows.shape[0]
        action = self.act_with(rows, self._same(count) if generator is None else self.numbers(count, generator))
        if not isfinite(action.sum().item()):  # NaN stays in a sum
            for row in (~torch.isfinite(action)).any(1).nonzero().flatten().tolist():
                raise ValueError(f"the energy is NaN or infinite at every candidate for observation {row}")
        if np.ndim(obs) == 1:
            action = action[0]
        return action.to(obs.device) if isinstance(obs, Tensor) else action.numpy()

    def act_with(self, obs: Tensor, numbers: dict[str, Tensor]) -> Tensor:
        """The actions for these random numbers: `normal` [batch, normals] and `uniform` [batch, uniforms]."""
        given = {"obs": obs, **numbers}
        return self.compute({name: given[name] for name in self._inputs})

    @cached_property
    def _inputs(self) -> list[str]:
        return self.contract.inputs()

    @cached_property
    def _same(self) -> Callable[[int], dict[str, Tensor]]:
        """The random numbers of a call without a generator, which are always the same: kept for four sizes."""
        return lru_cache(4)(self.numbers)

    def check(self, obs: Any) -> None:
        """ValueError where `act` would refuse these observations."""
        self._rows(flat_observation(obs, self.parts, self.history))

    def numbers(self, batch: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Random numbers for so many observations, by input; without a generator always the same."""
        source = torch.Generator().manual_seed(0) if generator is None else generator
        dtype = getattr(torch, self.contract.dtypes[1])
        parts: dict[str, list[Tensor]] = {"normal": [], "uniform": []}
        for draw in self.contract.draws:
            one = not draw.per_row or (draw.shared and generator is None)
            make = torch.randn if draw.kind == "normal" else torch.rand
            numbers = make((1 if one else batch, *draw.shape), generator=source, dtype=dtype)
            parts[draw.kind].append(numbers.flatten(1).expand(batch, -1))
        return {kind: torch.cat(each, 1) for kind, each in parts.items() if each}

    def _rows(self, obs: Any) -> Tensor:
        columns = self.contract.history * self.contract.frame
        try:
            rows = obs if isinstance(obs, Tensor) else torch.from_numpy(np.array(obs, np.float64, order="C"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"obs must be numbers, got {type(obs).__name__}: {error}") from error
        rows = rows.detach().to("cpu", getattr(torch, self.contract.dtypes[0])).contiguous()
        rows = rows.unsqueeze(0) if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[1] != columns or not rows.shape[0]:
            raise ValueError(f"obs must be [{columns}] or [batch, {columns}], got {tuple(np.shape(obs))}")
        check_finite(rows, "obs")
        return rows


def load_exported(path: str | Path) -> ExportedPolicy:
    """Reads a file that `policy.export` wrote, in any of its formats. An ONNX file is data; the other two hold programs
    (and 'aoti' machine code), so load them only from people you trust."""
    where = Path(path)
    with open(where, "rb") as file:
        beginning = file.read(4)
    try:
        if beginning != b"PK\x03\x04":
            text, compute = _onnx(where)
        elif any("aotinductor" in name for name in zipfile.ZipFile(where).namelist()):
            text, compute = _aoti(where)
        else:
            text, compute = _torch(where)
    except (StorageError, ImportError):
        raise
    except Exception as error:  # each format has errors of its own for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise StorageError(f"{where}: not an exported policy, or a damaged one: {reason}") from error
    return ExportedPolicy(_contract(text, str(where)), compute)


def _contract(text: str | None, where: str) -> Contract:
    if not text:
        raise StorageError(f"{where}: there is no contract of cebm in it: it was not written by policy.export")
    data = json.loads(text)
    version = take(data, "version", where)
    if take(data, "format", where) != FORMAT or version != VERSION:
        raise StorageError(f"{where}: an exported policy of version {version}, this cebm knows {VERSION}")
    return from_json(take(data, "contract", where), Contract, where)


def _onnx(where: Path) -> tuple[str | None, Compute]:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f"{where} needs onnxruntime: pip install 'cebm[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(where.read_bytes(), options, providers=["CPUExecutionProvider"])

    def compute(inputs: dict[str, Tensor]) -> Tensor:
        (action,) = session.run(["action"], {name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(action)

    return session.get_modelmeta().custom_metadata_map.get("cebm"), compute


def _torch(where: Path) -> tuple[str | None, Compute]:
    extra = {"cebm.json": ""}
    module = torch.export.load(where, extra_files=extra).module()

    def compute(inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return module(*inputs.values())

    return extra["cebm.json"], compute


def _aoti(where: Path) -> tuple[str | None, Compute]:
    model = torch._inductor.aoti_load_package(str(where))
    lock = threading.Lock()  # one compiled model runs one call at a time

    def compute(inputs: dict[str, Tensor]) -> Tensor:
        with lock, torch.no_grad():
            return model(*inputs.values())

    return model.get_metadata().get("cebm"), compute
