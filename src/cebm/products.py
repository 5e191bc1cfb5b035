"""Products of rows with a matrix, by the quicker of the two libraries that torch has on board.

torch multiplies float32 matrices by MKL, which gives AMD processors its AVX2 code even where they have AVX-512. oneDNN,
which torch uses for bfloat16 and for compiled graphs, asks the processor and not its maker, and is twice as fast there.
The choice depends on the processor alone, never on a measurement, so that a resumed run goes on bit for bit.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cebm.spaces import traced

_SMALLEST = 32
"""Products with fewer rows, inputs or outputs are as quick as they are."""


def maker() -> str:
    """Who made the processor, as it says itself: "AuthenticAMD", "GenuineIntel"; empty where nothing says so."""
    try:
        told = Path("/proc/cpuinfo").read_text(errors="replace").split("vendor_id", 1)[1]
        return told.split("\n", 1)[0].strip(" \t:")
    except (OSError, IndexError):
        return platform.processor()


def onednn_is_quicker() -> bool:
    """Whether this is a processor with AVX-512 for which MKL has only AVX2, and torch has oneDNN's product."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AMD" in maker()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


_ONEDNN = onednn_is_quicker()


def linear(
    rows: Float[Tensor, "*rows inputs"], matrix: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*rows outputs"]:
    """W x + b for every row x, as `F.linear`; it can be differentiated as often."""
    if not _ONEDNN or not _fits(rows, matrix):
        return F.linear(rows, matrix, bias)
    if torch.is_grad_enabled() and (rows.requires_grad or matrix.requires_grad):
        return cast(Tensor, _Linear.apply(rows, matrix, bias))
    return _product(rows, matrix, bias)


def linear_for(rows: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """`linear`, or where the rows are few whatever the matrix `F.linear` itself: to look at each takes time."""
    size = rows.numel()
    return F.linear if type(size) is int and size < _SMALLEST * rows.shape[-1] else linear


def linear_into(out: Tensor | None, rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for two axes; it may write into `out`, where there is one (autograd is off then)."""
    if _ONEDNN and _fits(rows, matrix):
        return linear(rows, matrix, bias)
    if bias is None:
        return torch.mm(rows, matrix.t(), out=out)
    return torch.addmm(bias, rows, matrix.t(), out=out)


def _fits(rows: Tensor, matrix: Tensor) -> bool:
    outputs, inputs = matrix.shape
    size = rows.numel()
    return (
        type(size) is int  # what a tracer has in its place must not be compared
        and size >= _SMALLEST * inputs
        and min(outputs, inputs) >= _SMALLEST
        and rows.dtype is torch.float32
        and matrix.dtype is torch.float32
        and rows.device.type == "cpu"
        and matrix.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not traced()
        and not torch._C._functorch.is_functorch_wrapped_tensor(rows)
        and not torch._C._functorch.is_functorch_wrapped_tensor(matrix)
    )


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], ""))


class _Linear(torch.autograd.Function):
    """The derivatives of y = W x + b: those of x and W are such products themselves, and so differentiable again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        return _product(rows, matrix, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, matrix = ctx.saved_tensors
        flat = outer[0].reshape(-1, outer[0].shape[-1])
        to_rows = linear(outer[0], matrix.t()) if ctx.needs_input_grad[0] else None
        to_matrix = linear(flat.t(), rows.reshape(-1, rows.shape[-1]).t()) if ctx.needs_input_grad[1] else None
        return to_rows, to_matrix, flat.sum(0) if ctx.needs_input_grad[2] else None
