"""Units: maps between data and normalised coordinates, margins and clipping. No other module knows units.

Samplers work in normalised coordinates, where the data fill [-1, 1] (a range of 2).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.parts import Part as Part
from cebm.parts import Specification as Specification
from cebm.randomness import draw_uniform

NORMALISED_RANGE = 2.0
Scaling = Literal["min-max", "standardise"]
StepConvention = Literal["range", "half-range"]


def margin_limit(margin: float) -> float:
    """Half-width of the box [-1, 1] grown by `margin` (a fraction of the range) on both ends: 0.05 gives 1.1."""
    if not 0 <= margin < inf:
        raise ValueError(f"margin must be at least 0 and finite, got {margin}")
    return 1.0 + NORMALISED_RANGE * margin


def step_limit(fraction: float, convention: StepConvention = "range") -> float:
    """Largest move of a coordinate in one step. `fraction` of the range (the paper: 25 % of 2 is 0.5), or of
    half the range (the reference code's convention: 25 % is 0.25; where its box has a margin, it counts that in)."""
    if not fraction > 0:
        raise ValueError(f"step_clip must be positive, got {fraction}")
    if convention not in ("range", "half-range"):
        raise ValueError(f"clip_convention must be 'range' or 'half-range', got {convention!r}")
    return fraction * (NORMALISED_RANGE if convention == "range" else NORMALISED_RANGE / 2)


def usable_device(name: torch.device | str) -> torch.device:
    """The device `name`; a ValueError where this machine cannot use it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(name)!r} cannot be used on this machine: {reason}") from error
    return device


class Checks:
    """Checks that are made now and looked at later, all at once: a look waits for the accelerator to finish."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Callable[[], None]]] = []

    def add(self, bad: Tensor, explain: Callable[[], None]) -> None:
        """`explain` raises the error of this check, if `bad` (one boolean) turns out to be true."""
        try:
            bad.data_ptr()
        except RuntimeError:  # under torch.func.vmap a tensor has no value of its own
            return
        self._made.append((bad, explain))

    def look(self) -> None:
        """Reads all checks with one conversion; the first that failed raises its error."""
        made, self._made = self._made, []
        if made and bool(torch.stack([bad.to(made[0][0].device) for bad, _ in made]).any()):
            for bad, explain in made:
                if bool(bad):
                    explain()


_PENDING: ContextVar[Checks | None] = ContextVar("pending checks", default=None)


@contextmanager
def looking_later() -> Iterator[Checks]:
    """Inside the block checks of finite values only add to the result, and the caller looks at it. A block that fails
    is looked at here: its error may follow from a value that is not finite."""
    checks = Checks()
    token = _PENDING.set(checks)
    try:
        yield checks
    except Exception:
        checks.look()
        raise
    finally:
        _PENDING.reset(token)


def pending_checks() -> Checks | None:
    """The checks of the block that looks later; None outside of one, where a check looks at once."""
    return _PENDING.get()


_TRACED: ContextVar[bool] = ContextVar("traced", default=False)


def traced() -> bool:
    """Whether this is compiled or exported: then nothing may depend on a tensor's values, or raise because of it."""
    return torch.compiler.is_compiling() or _TRACED.get()


@contextmanager
def tracing() -> Iterator[None]:
    """Inside the block `traced()` is true."""
    token = _TRACED.set(True)
    try:
        yield
    finally:
        _TRACED.reset(token)


def check_finite(values: Tensor, name: str) -> None:
    """ValueError that names the dimensions (last axis) of `values` that hold NaN or infinity."""
    if traced() or (_PENDING.get() is None and isfinite(values.sum().item())):  # as below, with nothing to add up
        return
    check_all_finite([(name, values)])


def check_all_finite(named: Sequence[tuple[str, Tensor]]) -> None:
    """The same of several tensors with one look. What is compiled or exported has no exceptions: nothing is checked."""
    if traced():
        return
    total, later = named[0][1].sum(), pending_checks()  # quick: a finite sum has no NaN or infinity in it
    for _, values in named[1:]:
        total = total + values.sum()
    if later is not None:
        later.add(~torch.isfinite(total), lambda: _refuse_infinite(named))
    elif not isfinite(total.item()):
        _refuse_infinite(named)


def _refuse_infinite(named: Sequence[tuple[str, Tensor]]) -> None:
    for name, values in named:
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            bad = (~finite).reshape(-1, values.shape[-1]).any(0).nonzero().flatten().tolist()
            raise ValueError(f"{name} has NaN or infinite values in dimension {', '.join(map(str, bad))}")


@dataclass(frozen=True)
class Box:
    """An affine map per dimension, normalised = (value - centre) / scale, and the margin around [-1, 1].

    A dimension without extent (the goals, when one episode is overfitted) maps to 0, with scale 1 (or one unit of
    rounding, where values are so large that this is more).
    """

    centre: Float[Tensor, " dim"]
    """The value that maps to 0."""
    scale: Float[Tensor, " dim"]
    """The distance that maps to 1."""
    margin: float = 0.05
    """Room beyond [-1, 1] on both ends, as a fraction of the range; the box of the samplers is [-1.1, 1.1]."""

    def __post_init__(self) -> None:
        if self.centre.ndim != 1 or self.centre.shape != self.scale.shape:
            shapes = f"{tuple(self.centre.shape)} and {tuple(self.scale.shape)}"
            raise ValueError(f"centre and scale must be vectors of one length, got {shapes}")
        check_finite(self.centre, "centre")
        check_finite(self.scale, "scale")
        if not bool((self.scale > 0).all()):
            raise ValueError(f"scale must be positive, got {self.scale.tolist()}")
        margin_limit(self.margin)

    @classmethod
    def from_bounds(cls, low: Any, high: Any, margin: float = 0.05) -> "Box":
        """The box whose `low` and `high` (one number per dimension) map to -1 and 1."""
        low, high = _float_tensor(low), _float_tensor(high)
        if low.ndim != 1 or low.shape != high.shape or not low.numel():
            raise ValueError(
                f"low and high must be vectors of one length, got {tuple(low.shape)} and {tuple(high.shape)}"
            )
        check_finite(low, "low")
        check_finite(high, "high")
        if bool((high < low).any()):
            dims = (high < low).nonzero().flatten().tolist()
            raise ValueError(f"high must not be below low, but is in dimension {', '.join(map(str, dims))}")
        # Halves first: the difference of two huge bounds would overflow.
        return cls(low / 2 + high / 2, _usable(high / 2 - low / 2, low), margin)

    @classmethod
    def fit(cls, data: Any, scaling: Scaling = "min-max", margin: float = 0.05) -> "Box":
        """Fits `data` [..., dim]: 'min-max' maps the extremes to ±1 (the paper), 'standardise' maps to zero mean
        and unit variance (the reference code's observations)."""
        values = _float_tensor(data)
        if values.ndim < 2 or not values.numel():
            raise ValueError(f"data must be a non-empty [..., dim] array, got shape {tuple(values.shape)}")
        check_finite(values, "data")
        values = values.reshape(-1, values.shape[-1])
        if scaling == "min-max":
            return cls.from_bounds(values.amin(0), values.amax(0), margin)
        if scaling != "standardise":
            raise ValueError(f"scaling must be 'min-max' or 'standardise', got {scaling!r}")
        # In float64 and from min-max units: squares cannot overflow, and a constant column is exactly 0 there.
        exact = values.double()
        units = cls.from_bounds(exact.amin(0), exact.amax(0), margin)
        exact = units.normalise(exact)
        centre, spread = units.denormalise(exact.mean(0)), exact.std(0, correction=0) * units.scale
        return cls(centre.to(values.dtype), _usable(spread.to(values.dtype), values[0]), margin)

    @property
    def dim(self) -> int:
        return self.centre.shape[0]

    @property
    def low(self) -> Float[Tensor, " dim"]:
        """The value that maps to -1."""
        return self.centre - self.scale

    @property
    def high(self) -> Float[Tensor, " dim"]:
        """The value that maps to 1."""
        return self.centre + self.scale

    @property
    def limit(self) -> float:
        """Normalised half-width of the box with its margin: 1.1."""
        return margin_limit(self.margin)

    def normalise(self, values: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Data units to normalised ones; a ValueError names the dimensions that hold NaN or infinity."""
        self._check_dim(values)
        check_finite(values, "values")
        return self.scaled(values)

    def scaled(self, values: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """As `normalise`, but NaN and infinity pass: for infinite limits and for values that are checked later."""
        return (values - self.centre) / self.scale

    def denormalise(self, values: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Normalised units to data units."""
        self._check_dim(values)
        return values * self.scale + self.centre

    def sample(
        self, *shape: int, generator: torch.Generator, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "*shape dim"]:
        """Uniform in the box with its margin, normalised: [-1.1, 1.1] per dimension; by default in the box's dtype."""
        dtype = self.centre.dtype if dtype is None else dtype
        unit = draw_uniform(generator, (*shape, self.dim), self.centre.new_empty(0, dtype=dtype))
        return (2 * unit - 1) * self.limit

    def clip(self, normalised: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Global clipping: into the box with its margin."""
        return normalised.clamp(-self.limit, self.limit)

    def clip_step(
        self,
        step: Float[Tensor, "*rows dim"],
        fraction: float = 0.25,
        convention: StepConvention = "range",
    ) -> Float[Tensor, "*rows dim"]:
        """Per-iteration clipping: no coordinate moves further than `fraction` of the range."""
        limit = step_limit(fraction, convention)
        return step.clamp(-limit, limit)

    def to(self, *args: Any, **kwargs: Any) -> "Box":
        """The same box on another device or in another dtype; takes the arguments of `Tensor.to`."""
        return Box(self.centre.to(*args, **kwargs), self.scale.to(*args, **kwargs), self.margin)

    def tiled(self, times: int) -> "Box":
        """The same units for each of several observations or actions in a row."""
        return Box(self.centre.repeat(times), self.scale.repeat(times), self.margin)

    def _check_dim(self, values: Tensor) -> None:
        if values.ndim < 1 or values.shape[-1] != self.centre.shape[0]:
            raise ValueError(f"values must be [..., {self.dim}], got shape {tuple(values.shape)}")


def _float_tensor(values: Any) -> Tensor:
    # A copy of what is not a tensor: memory-mapped arrays are read-only, which torch does not know.
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _usable(scale: Tensor, reference: Tensor) -> Tensor:
    """The scale, but 1 where it is 0 or below the rounding error of the values, which is too small to divide by. Where
    that rounding error exceeds 1, it is the scale instead: division by 1 would give huge coordinates."""
    smallest = torch.finfo(scale.dtype).eps * reference.abs() + torch.finfo(scale.dtype).tiny
    return torch.where(scale > smallest, scale, smallest.clamp(min=1))
