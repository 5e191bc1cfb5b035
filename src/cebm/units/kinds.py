"""Kinds of columns: how raw values become numbers that a network takes, and come back. A plain column has no kind.

A kind of your own is a frozen dataclass with the methods of `Kind`, in tensor functions whose control flow does not
depend on the values: policies are exported through them.
"""

from dataclasses import dataclass, replace
from math import inf, pi
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.units.columns import Columns, as_columns

EDGE = 1.1
"""Half-width of the samplers' box: where features that have units already are clipped."""
MOST_CLASSES = 256
"""Classes that a category may have."""

Values = Float[Tensor, "*rows columns"]
Features = Float[Tensor, "*rows features"]


@runtime_checkable
class Kind(Protocol):
    """The contract. Values are raw, of the kind's own columns in their order; features are what is inside."""

    @property
    def columns(self) -> Columns:
        """The columns of this kind."""
        ...

    fixed: ClassVar[bool]
    """Whether features lie in [-1, 1] as they are; otherwise they are scaled like plain columns."""
    subtracts: ClassVar[bool]
    """Whether the difference of two values is a value too, so that actions can be relative."""

    def fitted(self, values: Float[Tensor, "rows columns"], name: str) -> "Kind":
        """The kind with what it takes from the training data; a ValueError (which begins with `name`) where they do
        not fit."""
        ...

    def inside(self, values: Values) -> Features:
        """Features of raw values."""
        ...

    def outside(self, features: Features) -> Values:
        """Raw values of any features."""
        ...

    def bounds(self, low: Values, high: Values) -> tuple[Features, Features]:
        """Smallest and largest features of values between `low` and `high`."""
        ...

    def settled(self, values: Values) -> Values:
        """Values in their usual form: an angle in its period."""
        ...

    def difference(self, one: Values, other: Values) -> Values:
        """one − other, the short way."""
        ...


def _fixed_bounds(features: Features) -> tuple[Features, Features]:
    edge = torch.full_like(features, EDGE)
    return -edge, edge


@dataclass(frozen=True)
class Angle:
    """An angle: sine and cosine inside, in [start, start + period) outside."""

    columns: Columns
    """The columns of this kind."""
    period: float = 2 * pi
    """A full turn: 2π, or 360 for degrees."""
    start: float | None = None
    """Where the period begins; None: at 0 where no angle of the data is negative or beyond the period, else at
    −period/2."""
    fixed: ClassVar[bool] = True
    subtracts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_columns(self.columns, "Angle.columns"))
        if not 0 < self.period < inf:
            raise ValueError(f"period must be positive and finite, got {self.period}")

    def fitted(self, values: Float[Tensor, "rows columns"], name: str) -> "Angle":
        if self.start is not None:
            return self
        positive = bool(values.min() >= 0) and bool(values.max() <= self.period)
        return replace(self, start=0.0 if positive else -self.period / 2)

    def inside(self, values: Values) -> Features:
        turns = values * (2 * pi / self.period)
        return torch.cat([turns.sin(), turns.cos()], -1)

    def outside(self, features: Features) -> Values:
        sine, cosine = features.chunk(2, -1)
        return self.settled(torch.atan2(sine, cosine) * (self.period / (2 * pi)))

    def bounds(self, low: Values, high: Values) -> tuple[Features, Features]:
        return _fixed_bounds(self.inside(torch.zeros_like(low)))

    def settled(self, values: Values) -> Values:
        start = self.start or 0.0
        wrapped = torch.remainder(values - start, self.period) + start
        return torch.where(wrapped < start + self.period, wrapped, start)  # rounding may reach the end of the period

    def difference(self, one: Values, other: Values) -> Values:
        half = self.period / 2
        return torch.remainder(one - other + half, self.period) - half


@dataclass(frozen=True)
class Quaternion:
    """A unit quaternion: of the two that mean one rotation the one with a scalar part of at least 0, and of length one
    on the way out."""

    columns: Columns
    """Its four columns."""
    scalar: Literal["last", "first"] = "last"
    """Where the scalar part stands: x, y, z, w or w, x, y, z."""
    fixed: ClassVar[bool] = True
    subtracts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_columns(self.columns, "Quaternion.columns"))
        if self.scalar not in ("last", "first"):
            raise ValueError(f"scalar must be 'last' or 'first', got {self.scalar!r}")

    def fitted(self, values: Float[Tensor, "rows columns"], name: str) -> "Quaternion":
        if values.shape[-1] != 4:
            raise ValueError(f"{name}: a quaternion has 4 columns, got {values.shape[-1]}")
        away = (values.double().norm(dim=-1) - 1).abs().max()
        if not float(away) < 0.05:
            raise ValueError(f"{name}: these are no unit quaternions, a length is {float(away):.3g} from 1")
        return self

    def inside(self, values: Values) -> Features:
        return self.settled(values)

    def outside(self, features: Features) -> Values:
        return self.settled(features)

    def bounds(self, low: Values, high: Values) -> tuple[Features, Features]:
        return _fixed_bounds(low)

    def settled(self, values: Values) -> Values:
        place = 3 if self.scalar == "last" else 0
        length = values.norm(dim=-1, keepdim=True)
        nothing = torch.zeros_like(values)
        nothing[..., place] = 1.0
        unit = torch.where(length > 1e-12, values / length.clamp_min(1e-12), nothing)
        return torch.where(unit[..., place : place + 1] < 0, -unit, unit)

    def difference(self, one: Values, other: Values) -> Values:
        """The shorter of the two ways that differ by a sign."""
        first, second = self.settled(one), self.settled(other)
        opposite = (first * second).sum(-1, keepdim=True) < 0
        return first - torch.where(opposite, -second, second)


@dataclass(frozen=True)
class Category:
    """One of a few numbers, such as an integer or a class: one number per class inside (1 for it, −1 for the others),
    the likeliest class outside. A value that is none of them counts as the nearest."""

    columns: Columns
    """The columns of this kind; all have the same classes."""
    classes: tuple[float, ...] = ()
    """The values; empty: those that the training data have."""
    fixed: ClassVar[bool] = True
    subtracts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_columns(self.columns, "Category.columns"))
        object.__setattr__(self, "classes", tuple(float(each) for each in self.classes))
        if len(set(self.classes)) != len(self.classes) or len(self.classes) > MOST_CLASSES:
            raise ValueError(f"classes must be at most {MOST_CLASSES} different numbers, got {self.classes[:9]}…")

    def fitted(self, values: Float[Tensor, "rows columns"], name: str) -> "Category":
        found = values.unique().tolist()
        if self.classes:
            strange = [each for each in found if min(abs(each - one) for one in self.classes) > 1e-6 * (1 + abs(each))]
            if strange:
                raise ValueError(f"{name}: {strange[0]:g} is none of the classes {_listed(self.classes)}")
            return self
        if len(found) > MOST_CLASSES:
            raise ValueError(f"{name}: {len(found)} different values are too many for a category ({MOST_CLASSES})")
        return replace(self, classes=tuple(found))

    def inside(self, values: Values) -> Features:
        classes = values.new_tensor(self.classes)
        nearest = (values.unsqueeze(-1) - classes).abs().argmin(-1)
        one_hot = nearest.unsqueeze(-1) == torch.arange(len(self.classes), device=values.device)
        return torch.where(one_hot, 1.0, -1.0).to(values.dtype).flatten(-2)

    def outside(self, features: Features) -> Values:
        classes = features.new_tensor(self.classes)
        return classes[features.unflatten(-1, (-1, len(self.classes))).argmax(-1)]

    def bounds(self, low: Values, high: Values) -> tuple[Features, Features]:
        return _fixed_bounds(self.inside(torch.zeros_like(low)))

    def settled(self, values: Values) -> Values:
        return values

    def difference(self, one: Values, other: Values) -> Values:
        return one - other


@dataclass(frozen=True)
class Constant:
    """A column that never changes: not there inside, exactly its value outside."""

    columns: Columns
    """The columns of this kind."""
    values: tuple[float, ...] = ()
    """Their values; empty: those of the training data, which must be one and the same."""
    keep: bool = False
    """Whether it is a feature all the same, always 0: an action must have one."""
    fixed: ClassVar[bool] = True
    subtracts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_columns(self.columns, "Constant.columns"))
        object.__setattr__(self, "values", tuple(float(each) for each in self.values))

    def fitted(self, values: Float[Tensor, "rows columns"], name: str) -> "Constant":
        low, high = values.amin(0), values.amax(0)
        wanted = low if not self.values else low.new_tensor(self.values)
        if wanted.shape != low.shape:
            raise ValueError(f"{name}: there are {len(low)} columns and {len(self.values)} values")
        if not bool(((low == wanted) & (high == wanted)).all()):
            raise ValueError(f"{name}: it is not constant, it goes from {low.tolist()} to {high.tolist()}")
        return replace(self, values=tuple(wanted.tolist()))

    def inside(self, values: Values) -> Features:
        return torch.zeros_like(values) if self.keep else values[..., :0]

    def outside(self, features: Features) -> Values:
        return features.new_tensor(self.values).expand(*features.shape[:-1], len(self.values))

    def bounds(self, low: Values, high: Values) -> tuple[Features, Features]:
        return _fixed_bounds(self.inside(low))

    def settled(self, values: Values) -> Values:
        return values

    def difference(self, one: Values, other: Values) -> Values:
        return one - other


@dataclass(frozen=True)
class Robust:
    """Heavy tails: asinh((x − median) / s) inside, with s the interquartile range over 1.349, which is the deviation of
    a Gaussian. Linear near the median and logarithmic far from it, so that no outlier squeezes the rest."""

    columns: Columns
    """The columns of this kind."""
    centre: tuple[float, ...] = ()
    """Medians; empty: those of the training data."""
    scale: tuple[float, ...] = ()
    """The scales s; empty: those of the training data."""
    fixed: ClassVar[bool] = False
    subtracts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_columns(self.columns, "Robust.columns"))
        if not all(0 < each < inf for each in self.scale):
            raise ValueError(f"scale must be positive and finite, got {self.scale}")

    def fitted(self, values: Float[Tensor, "rows columns"], name: str) -> "Robust":
        exact = values.double()
        centre = exact.quantile(0.5, 0) if not self.centre else exact.new_tensor(self.centre)
        scale = exact.quantile(0.75, 0) - exact.quantile(0.25, 0)
        for share in (0.05, 0.01, 0.0):  # of a column that is mostly one value
            scale = torch.where(scale > 0, scale, exact.quantile(1 - share, 0) - exact.quantile(share, 0))
        scale = torch.where(scale > 0, scale / 1.349, 1.0) if not self.scale else exact.new_tensor(self.scale)
        if not len(centre) == len(scale) == values.shape[-1]:
            raise ValueError(f"{name}: {values.shape[-1]} columns need as many centres and scales")
        return replace(self, centre=tuple(centre.tolist()), scale=tuple(scale.tolist()))

    def inside(self, values: Values) -> Features:
        return torch.asinh((values - values.new_tensor(self.centre)) / values.new_tensor(self.scale))

    def outside(self, features: Features) -> Values:
        return torch.sinh(features) * features.new_tensor(self.scale) + features.new_tensor(self.centre)

    def bounds(self, low: Values, high: Values) -> tuple[Features, Features]:
        return self.inside(low), self.inside(high)

    def settled(self, values: Values) -> Values:
        return values

    def difference(self, one: Values, other: Values) -> Values:
        return one - other


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{each:g}" for each in values[:12]) + ("…" if len(values) > 12 else "")
