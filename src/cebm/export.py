"""From a policy to one file that acts without cebm: the computation of `policy.act` with its effort fixed, for any
number of observations. Random numbers are inputs of it.

What is exported is `act` itself, traced with a generator that hands out those inputs; no piece is known by name. A
piece that draws by `cebm.randomness`, and decides nothing in Python by the values of tensors, can be exported.
"""

import importlib
import json
import logging
import os
import re
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from cebm import __version__
from cebm.parts import Part
from cebm.policy import EnergyPolicy
from cebm.randomness import Noise, Recorder, Slices
from cebm.settings import to_json
from cebm.spaces import tracing
from cebm.storage import write_atomically

Format = Literal["onnx", "torch", "aoti"]
FORMAT, VERSION, OPSET = "cebm.exported", 1, 20


class ExportError(ValueError):
    """This policy cannot be exported; the message names the piece and the line."""


@dataclass(frozen=True)
class Draw:
    """Random numbers that one call takes, per observation."""

    kind: Literal["normal", "uniform"]
    """'normal': N(0, 1). 'uniform': in [0, 1)."""
    shape: tuple[int, ...]
    """For one observation; they follow each other in a row of the input `kind`, the last axis fastest."""
    per_row: bool
    """Whether every observation has its own; otherwise the first row's serve all."""
    shared: bool
    """Whether `act` without a generator takes the same numbers for every observation."""


@dataclass(frozen=True)
class Contract:
    """What an exported file computes, kept inside it as JSON. Inputs are `obs` [batch, history · frame], the oldest
    observation first, `normal` [batch, normals] and `uniform` [batch, uniforms], where those counts are not 0; the one
    output is `action` [batch, horizon · action], NaN where no candidate has a finite energy."""

    frame: int
    """Columns of one observation."""
    action: int
    """Columns of one action."""
    history: int
    """Observations that one input holds, oldest first."""
    horizon: int
    """Actions that one output holds, the current one first."""
    candidates: int | None
    """The effort that was asked for; None: the policy's own."""
    steps: int | None
    """Sampler steps that were asked for; None: the policy's own."""
    dtypes: tuple[str, str, str]
    """Of `obs`, of the random numbers and of `action`."""
    draws: tuple[Draw, ...]
    """The random numbers, in the order in which they are drawn."""
    parts: tuple[Part, ...] = ()
    """The named parts of one observation, in the order of their columns."""

    def count(self, kind: str) -> int:
        """Columns of the input `normal` or `uniform`."""
        return sum(prod(draw.shape) for draw in self.draws if draw.kind == kind)

    def inputs(self) -> list[str]:
        """Names of the inputs, in their order."""
        return ["obs", *(kind for kind in ("normal", "uniform") if self.count(kind))]

    def to_json(self) -> str:
        """The contract as text."""
        return json.dumps({"format": FORMAT, "version": VERSION, "cebm": __version__, "contract": to_json(self)})


def export(
    policy: EnergyPolicy,
    path: str | Path,
    format: Format = "onnx",
    candidates: int | None = None,
    steps: int | None = None,
) -> Contract:
    """Writes one file that acts like `policy.act` with this effort. 'onnx' runs wherever onnxruntime does; 'torch' is a
    program of torch.export; 'aoti' is compiled for this machine and runs in C++ without Python. All run on the CPU."""
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    if not isinstance(policy, EnergyPolicy):
        raise ExportError(
            f"a {type(policy).__name__} cannot be exported: what it searches depends on what it finds, and a file has "
            "a fixed effort. Export the policy inside it and test its actions, or serve this one (cebm.serve)"
        )
    if policy.device.type != "cpu":
        raise ValueError(f"the policy is on {policy.device}: load it with device='cpu' to export it")
    where = Path(path)
    if where.suffix not in (wanted := {"onnx": (".onnx",)}.get(format, (".pt2",))):
        raise ValueError(f"path must end in {wanted[0]} for the format {format!r}, got {where.name!r}")
    if not where.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {where.parent} to write {where.name} to")
    _check_extra(format)
    contract = contract_of(policy, candidates, steps)
    write_atomically(where, _WRITERS[format](trace(policy, contract), contract))
    return contract


def contract_of(policy: EnergyPolicy, candidates: int | None = None, steps: int | None = None) -> Contract:
    """What an exported `act` will take and give: it acts on a few observations and looks at what is drawn."""
    lists = [_drawn(policy, rows, True, candidates, steps) for rows in (2, 3)]
    quiet = _drawn(policy, 2, False, candidates, steps)
    if not len(lists[0]) == len(lists[1]) == len(quiet):
        raise ExportError("the number of random draws depends on the batch: it must be the same for every call")
    draws = []
    for place, ((kind, two), (_, three), (_, shared)) in enumerate(zip(*lists, quiet, strict=True)):
        times = two.shape[0] // 2  # a sampler may have several chains of rows, those of an observation side by side
        per_row = (two.shape[0], three.shape[0]) == (2 * times, 3 * times) and two.shape[1:] == three.shape[1:]
        if not per_row and two.shape != three.shape:
            raise ExportError(
                f"draw {place} has the shape {tuple(two.shape)} for 2 observations and {tuple(three.shape)} for 3: "
                "only the first axis may follow the batch"
            )
        shape = tuple(two.shape) if not per_row else tuple(two.shape[1:]) if times == 1 else (times, *two.shape[1:])
        draws.append(Draw(kind, shape, per_row, per_row and shared.shape[0] == 1))
    numbers = lists[0][0][1].dtype if draws else torch.float32
    action = policy.act(_middle(policy, 1), candidates=candidates, steps=steps)
    frame, columns = policy.columns
    dtypes = _name(_middle(policy, 1).dtype), _name(numbers), _name(action.dtype)
    history, horizon, parts = policy.history, policy.horizon, policy.parts
    return Contract(frame, columns, history, horizon, candidates, steps, dtypes, tuple(draws), parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Acting(nn.Module):
    """`policy.act` as a module of tensors in, tensors out: what is traced."""

    def __init__(self, policy: EnergyPolicy, contract: Contract) -> None:
        super().__init__()
        self.energy, self._policy, self._contract = policy.energy, policy, contract

    def forward(self, obs: Tensor, *noise: Tensor) -> Tensor:
        """The actions; `noise` as `Contract.inputs` names it."""
        given = dict(zip(self._contract.inputs()[1:], noise, strict=True))
        nothing = obs.new_empty(obs.shape[0], 0)
        numbers = given.get("normal", nothing), given.get("uniform", nothing)
        generator = Slices(*numbers, [draw.per_row for draw in self._contract.draws])
        return self._policy.act(
            obs, candidates=self._contract.candidates, steps=self._contract.steps, generator=generator
        )


def trace(policy: EnergyPolicy, contract: Contract) -> torch.export.ExportedProgram:
    """The computation as a graph, for any number of observations."""
    batch = torch.export.Dim("batch", min=1)
    obs = _middle(policy, 3)
    numbers = getattr(torch, contract.dtypes[1])
    noise = [torch.full((3, contract.count(name)), 0.5, dtype=numbers) for name in contract.inputs()[1:]]
    dynamic: tuple[Any, ...] = ({0: batch}, *([tuple({0: batch} for _ in noise)] if noise else []))
    try:
        with torch.no_grad(), _quiet():
            module: nn.Module = Acting(policy, contract)
            if not policy.energy.closed_form:
                module, dynamic = _without_autograd(module, (obs, *noise)), tuple({0: batch} for _ in (obs, *noise))
            program = torch.export.export(module, (obs, *noise), dynamic_shapes=dynamic, strict=False)
    except ExportError:
        raise
    except Exception as error:  # whatever a piece does that cannot be traced
        raise ExportError(f"this policy cannot be exported: {_blame(error)}") from error
    return program


def _without_autograd(module: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    """The module as a graph whose gradients are operations as any other: torch.export does not trace autograd."""
    with tracing():
        return make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)


# ---------------------------------------------------------------------------------------------- the formats


def _onnx(program: torch.export.ExportedProgram, contract: Contract) -> bytes:
    names = contract.inputs()
    try:
        with _quiet():
            made: Any = torch.onnx.export(
                program, (), dynamo=True, opset_version=OPSET, input_names=names, output_names=["action"], verbose=False
            )
    except Exception as error:
        raise ExportError(f"this policy cannot be written as ONNX: {_blame(error)}") from error
    made.model.metadata_props["cebm"] = contract.to_json()
    return made.model_proto.SerializeToString()


def _torch(program: torch.export.ExportedProgram, contract: Contract) -> bytes:
    with _temporary("program.pt2") as path, _quiet():
        torch.export.save(program, path, extra_files={"cebm.json": contract.to_json()})
        return path.read_bytes()


def _aoti(program: torch.export.ExportedProgram, contract: Contract) -> bytes:
    # The numbers of columns by themselves too, for a program that reads no JSON.
    columns = {kind: str(contract.count(kind)) for kind in ("normal", "uniform")}
    about = {"cebm": contract.to_json(), "obs": str(contract.history * contract.frame), **columns}
    settings = {"aot_inductor.metadata": about}
    from torch._inductor.utils import fresh_cache

    try:
        # A cache of its own: another process that compiles the same kernel at this time would leave half a file in it.
        with _temporary("program.pt2") as path, _quiet(), fresh_cache():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)
            torch._inductor.aoti_load_package(str(path))
            return path.read_bytes()
    except Exception as error:
        raise ExportError(f"this policy cannot be compiled (a C++ compiler is needed): {_blame(error)}") from error


_WRITERS: dict[str, Callable[[torch.export.ExportedProgram, Contract], bytes]] = {
    "onnx": _onnx,
    "torch": _torch,
    "aoti": _aoti,
}


def _check_extra(format: Format) -> None:
    """ONNX is written by packages that come with the extra."""
    if format == "onnx":
        for name in ("onnx", "onnxscript"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ImportError(f"the format 'onnx' needs {name}: pip install 'cebm[onnx]'") from error


@contextmanager
def _temporary(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / name


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's words on packages that are not there and on its own deprecated calls."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# ---------------------------------------------------------------------------------------------- what is drawn


def _drawn(
    policy: EnergyPolicy, rows: int, own: bool, candidates: int | None, steps: int | None
) -> list[tuple[str, Tensor]]:
    """The draws of one call, each with its first axis; `own`: as with a generator, otherwise as without one."""
    recorder, before = Recorder(torch.Generator().manual_seed(0)), torch.random.get_rng_state()
    obs = _middle(policy, rows)
    with _Watch(), torch.no_grad():
        problem = policy.problem(obs, candidates=candidates, steps=steps, generator=recorder)
        policy.acting.search(replace(problem, shared=not own))
    if not torch.equal(before, torch.random.get_rng_state()):
        torch.random.set_rng_state(before)
        raise ExportError("a piece of this policy draws from torch's global generator: it must use the one it is given")
    return recorder.drawn


class _Watch(TorchFunctionMode):
    """Finds a piece that draws from the generator by torch's own functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, Noise) for value in (*args, *(kwargs or {}).values())):
            place = _place([(frame, frame.f_lineno) for frame, _ in traceback.walk_stack(None)])
            raise ExportError(
                f"{place or 'a piece'} draws with torch.{getattr(func, '__name__', func)}, and an exported policy gets "
                "its random numbers from outside: draw with cebm.randomness.draw_normal or draw_uniform, or act by "
                "another sampler"
            )
        return func(*args, **(kwargs or {}))


def _middle(policy: EnergyPolicy, rows: int) -> Float[Tensor, "rows obs"]:
    """Observations in the middle of what was seen."""
    return policy.units.middle.expand(rows, -1).clone()


# ---------------------------------------------------------------------------------------------- whose fault


def _blame(error: BaseException) -> str:
    """The piece and line where it went wrong, and the first line of what torch says about it."""
    place, seen, each = None, set(), error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        place = _place(_frames(each.__traceback__)) or place
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    said = next((line for line in lines if "No ONNX function" in line), next(filter(None, lines), type(error).__name__))
    if "specialized it to be a constant" in str(error):
        said = "its code fixes the number of observations, as len(tensor) and int(tensor.shape[0]) do"
    return f"{place}: {said}" if place else said


def _frames(trace: TracebackType | None) -> list[tuple[Any, int]]:
    """From the innermost outwards."""
    return list(traceback.walk_tb(trace))[::-1]


def _place(frames: list[tuple[Any, int]]) -> str | None:
    """The innermost frame that is neither torch's nor Python's nor this module's: Class.method (file, line)."""
    skipped = (*(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")), __file__)
    upper = {str(Path(__file__).with_name(f"{name}.py")) for name in ("policy", "randomness")}
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith((*skipped, "<")) or file in upper:
            continue
        owner = frame.f_locals.get("self")
        name = frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"
        return f"{name} ({os.path.basename(file)}, line {line})"
    return None
