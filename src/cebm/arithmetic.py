"""Products of matrices in bfloat16, where a training asks for them.

Mixed precision here is a property of a product and of nothing else: the hidden layers of a network, where nearly all
the work is, round what they multiply to bfloat16. Weights, first and last layers, energies, losses, chains and the
optimiser stay in float32. So an energy keeps its digits (bfloat16 has eight bits: of an energy of 30 it could tell no
tenth), the rest of the library never sees another type, and no loss has to be scaled.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from time import perf_counter
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cebm.products import linear

Precision = Literal["float32", "bf16", "measured"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bf16", "measured")
_REDUCED: ContextVar[bool] = ContextVar("reduced", default=False)


def reduced() -> bool:
    """Whether hidden layers multiply in bfloat16 now."""
    return _REDUCED.get()


@contextmanager
def reducing(wanted: bool) -> Iterator[None]:
    """Inside the block `reduced()` is `wanted`, in this thread."""
    token = _REDUCED.set(wanted)
    try:
        yield
    finally:
        _REDUCED.reset(token)


def check_precision(precision: str) -> None:
    """ValueError where it is none."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be 'float32', 'bf16' or 'measured', got {precision!r}")


def product(
    inputs: Tensor,
    matrix: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None,
    half: bool,
) -> Tensor:
    """W x + b; with `half` in bfloat16, summed in float32 and rounded once. Without, inputs that an earlier layer has
    rounded come back to the type of the weights."""
    if half:
        low = torch.bfloat16
        return F.linear(inputs.to(low), matrix.to(low), None if bias is None else bias.to(low))
    return linear(inputs if inputs.dtype == matrix.dtype else inputs.to(matrix.dtype), matrix, bias)


def rounding(device: torch.device) -> AbstractContextManager[object]:
    """Inside the block torch's own rules say which products are in bfloat16 (autocast): for a network of which only the
    network knows what may be rounded. A device without such rules keeps its types."""
    known = torch.amp.autocast_mode.is_autocast_available(device.type)
    return torch.autocast(device.type, torch.bfloat16) if known else nullcontext()


def why_not_half(device: torch.device) -> str:
    """Why this device cannot multiply in bfloat16 to any use; empty where it can."""
    try:
        small = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        torch.mm(small, small)
    except (RuntimeError, TypeError) as error:
        return f"{device} has no bfloat16 ({' '.join(str(error).split())[:80]})"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"{torch.cuda.get_device_name(device)} only imitates bfloat16"
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor only imitates bfloat16, which is many times slower than float32"
    return ""


def half_is_faster(device: torch.device, size: int = 256, repeats: int = 20, least: float = 1.2) -> bool:
    """Whether products of matrices take at most 1/`least` of the time in bfloat16."""
    return speed_of_half(device, size, repeats) > least


def speed_of_half(device: torch.device, size: int = 256, repeats: int = 20) -> float:
    """How many times as fast products of matrices are in bfloat16 as in float32: the fastest of many, a few
    milliseconds in all. Where a processor only imitates bfloat16 it is up to 70 times slower."""
    took = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix, times = torch.ones(size, size, dtype=dtype, device=device), []
        for _ in range(repeats):
            began = perf_counter()
            float(torch.mm(matrix, matrix)[0, 0])  # waits for the result
            times.append(perf_counter() - began)
            if sum(times) > 0.05:
                break
        took.append(min(times))
    return took[0] / took[1]
