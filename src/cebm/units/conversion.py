"""From raw observations and actions to what an energy sees and gives, and back: `Units`.

Pure tensor functions whose control flow depends on no value, so that a policy can be exported through them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.parts import Part, check_parts
from cebm.spaces import Box
from cebm.units.columns import Columns, Layout, as_columns, indices
from cebm.units.kinds import Kind


@dataclass(frozen=True)
class Relative:
    """Actions that are told from where the system is now: action − origin, for all actions of a chunk from the newest
    observation."""

    actions: Columns
    """Columns of an action."""
    origin: Columns
    """Columns of an observation, one for each."""
    scale: float | None = None
    """The distance that maps to 1; None: the differences of the training data fill [-1, 1]."""

    def __post_init__(self) -> None:
        for name in ("actions", "origin"):
            object.__setattr__(self, name, as_columns(getattr(self, name), f"Relative.{name}"))
        if self.scale is not None and not 0 < self.scale < inf:
            raise ValueError(f"scale must be positive and finite, got {self.scale}")

    def located(self, obs: Layout, actions: Layout) -> "Relative":
        """With indices for columns."""
        mine, theirs = actions.columns(self.actions, "Relative"), obs.columns(self.origin, "Relative")
        if len(mine) != len(theirs):
            raise ValueError(f"Relative: {len(mine)} columns of an action have {len(theirs)} columns as their origin")
        return Relative(mine, theirs, self.scale)


@dataclass(frozen=True)
class Form:
    """The columns of one observation or of one action, raw and inside."""

    size: int
    """Raw columns."""
    kinds: tuple[Kind, ...] = ()
    """Kinds, fitted, with indices for columns; all other columns are plain."""
    parts: tuple[Part, ...] = ()
    """The raw columns by name, where they have names."""

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[int, ...], Kind | None], ...]:
        """Columns with their kind in the order of their features: runs of plain columns, and kinds by their first."""
        first = {indices(kind.columns)[0]: kind for kind in self.kinds}
        taken = {index for kind in self.kinds for index in indices(kind.columns)}
        pieces: list[tuple[tuple[int, ...], Kind | None]] = []
        for index in range(self.size):
            if index in first:
                pieces.append((indices(first[index].columns), first[index]))
            elif index not in taken:
                run = pieces.pop()[0] if pieces and pieces[-1][1] is None else ()
                pieces.append(((*run, index), None))
        return tuple(pieces)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Features of each piece."""
        return tuple(
            len(own) if kind is None else kind.inside(torch.zeros(1, len(own))).shape[-1] for own, kind in self.pieces
        )

    @property
    def features(self) -> int:
        """How many there are inside."""
        return sum(self.widths)

    @cached_property
    def inside_parts(self) -> tuple[Part, ...]:
        """The features by the names of the raw parts; a single part where a kind joins columns of several."""
        if not self.kinds and self.parts:
            return self.parts
        owner = [place for place, part in enumerate(self.parts) for _ in range(part.size)]
        sizes = [0] * len(self.parts)
        for width, (own, kind) in zip(self.widths, self.pieces, strict=True):
            if not self.parts or (kind is not None and len({owner[index] for index in own}) > 1):
                return (Part("obs", (self.features,)),)
            for index in own if kind is None else own[:1]:
                sizes[owner[index]] += 1 if kind is None else width
        changed = {owner[index] for kind in self.kinds for index in indices(kind.columns)}
        return tuple(
            Part(part.name, (size,)) if place in changed else part
            for place, (part, size) in enumerate(zip(self.parts, sizes, strict=True))
        )

    @cached_property
    def fixed(self) -> tuple[bool, ...]:
        """Of each feature whether it has units already."""
        pairs = zip(self.widths, self.pieces, strict=True)
        return tuple(kind is not None and kind.fixed for width, (_, kind) in pairs for _ in range(width))

    @cached_property
    def unlimited(self) -> tuple[bool, ...]:
        """Of each raw column whether the range of the data says nothing about it, as of an angle."""
        fixed = {index for own, kind in self.pieces if kind is not None and kind.fixed for index in own}
        return tuple(index in fixed for index in range(self.size))

    def inside(self, values: Float[Tensor, "*rows columns"]) -> Float[Tensor, "*rows features"]:
        """Features of raw values."""
        if not self.kinds:
            return values
        parts = [(_take(values, own), kind) for own, kind in self.pieces]
        return torch.cat([part if kind is None else kind.inside(part) for part, kind in parts], -1)

    def outside(self, features: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows columns"]:
        """Raw values of features."""
        if not self.kinds:
            return features
        parts = zip(features.split(list(self.widths), -1), self.pieces, strict=True)
        return self._ordered([part if kind is None else kind.outside(part) for part, (_, kind) in parts])

    def bounds(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest features of values between `low` and `high`."""
        if not self.kinds:
            return low, high
        pairs = []
        for own, kind in self.pieces:
            here = _take(low, own), _take(high, own)
            pairs.append(here if kind is None else kind.bounds(*here))
        return torch.cat([pair[0] for pair in pairs], -1), torch.cat([pair[1] for pair in pairs], -1)

    def settled(self, values: Float[Tensor, "*rows columns"]) -> Float[Tensor, "*rows columns"]:
        """Raw values in their usual form."""
        if not self.kinds:
            return values
        parts = [(_take(values, own), kind) for own, kind in self.pieces]
        return self._ordered([part if kind is None else kind.settled(part) for part, kind in parts])

    def difference(
        self, one: Float[Tensor, "*rows columns"], other: Float[Tensor, "*rows columns"]
    ) -> Float[Tensor, "*rows columns"]:
        """one − other, of angles the short way round."""
        if not self.kinds:
            return one - other
        parts = []
        for own, kind in self.pieces:
            first, second = _take(one, own), _take(other, own)
            parts.append(first - second if kind is None else kind.difference(first, second))
        return self._ordered(parts)

    def _ordered(self, parts: Sequence[Tensor]) -> Tensor:
        """Pieces side by side, back in the order of the raw columns."""
        order = [index for own, _ in self.pieces for index in own]
        joined = torch.cat(list(parts), -1)
        if order == list(range(self.size)):
            return joined
        return _take(joined, tuple(order.index(index) for index in range(self.size)))


@dataclass(frozen=True)
class Conversion:
    """What lies between raw columns and the boxes: kinds of columns and relative actions. Saved with a policy."""

    obs: Form
    """One observation."""
    action: Form
    """One action."""
    relative: tuple[Relative, ...] = ()
    """Which actions are told from which columns of the newest observation, with indices for columns."""

    @cached_property
    def plain(self) -> bool:
        """Whether there is nothing between the raw columns and the boxes."""
        return not (self.obs.kinds or self.action.kinds or self.relative)

    @cached_property
    def origins(self) -> tuple[int, ...]:
        """The observation's column that each action column is told from; −1: none."""
        origins = [-1] * self.action.size
        for each in self.relative:
            for own, origin in zip(indices(each.actions), indices(each.origin), strict=True):
                origins[own] = origin
        return tuple(origins)

    def check(self) -> None:
        """ValueError where sizes and columns do not fit together; it names both pieces."""
        for what, form in (("obs", self.obs), ("action", self.action)):
            if form.parts:
                check_parts(form.parts, form.size, what)
            owner: dict[int, Kind] = {}
            for kind in form.kinds:
                for index in indices(kind.columns):
                    if not 0 <= index < form.size:
                        raise ValueError(f"{_name(kind)}: {what} has {form.size} columns, there is no column {index}")
                    if index in owner:
                        raise ValueError(f"{what} column {index} is both {_name(owner[index])} and {_name(kind)}")
                    owner[index] = kind
        seen: set[int] = set()
        for each in self.relative:
            mine, theirs = indices(each.actions), indices(each.origin)
            if len(mine) != len(theirs) or not all(0 <= index < self.obs.size for index in theirs):
                raise ValueError(f"Relative: the origin {theirs} does not fit {self.obs.size} observation columns")
            if seen & {*mine} or not all(0 <= index < self.action.size for index in mine):
                raise ValueError(f"Relative: the columns {mine} do not fit {self.action.size} action columns")
            seen |= {*mine}
            for kind in self.action.kinds:
                shared = {*mine} & {*indices(kind.columns)}
                if shared and not kind.subtracts:
                    raise ValueError(
                        f"Relative does not go with {_name(kind)}: action column {min(shared)} has no difference"
                    )


@dataclass(frozen=True, eq=False)
class Units:
    """Turns raw observations and actions into the energy's inputs and outputs, and back."""

    obs_box: Box
    """Scales the features of an input: those of `history` observations, the oldest first."""
    act_box: Box
    """Scales the features of an output: those of `horizon` actions, the current one first."""
    history: int
    """Observations of an input."""
    horizon: int
    """Actions of an output."""
    conversion: Conversion
    """Kinds of columns and relative actions."""

    def __post_init__(self) -> None:
        self.conversion.check()
        for name, box, times, form in (
            ("obs_box", self.obs_box, self.history, self.conversion.obs),
            ("act_box", self.act_box, self.horizon, self.conversion.action),
        ):
            if box.dim != times * form.features:
                raise ValueError(f"{name} has {box.dim} dimensions, the units have {times} × {form.features}")

    @classmethod
    def plain(cls, obs_box: Box, act_box: Box, history: int = 1, horizon: int = 1) -> "Units":
        """Boxes alone: every column is plain."""
        conversion = Conversion(Form(obs_box.dim // history), Form(act_box.dim // horizon))
        return cls(obs_box, act_box, history, horizon, conversion)

    @cached_property
    def obs_dim(self) -> int:
        """Raw columns of an input."""
        return self.history * self.conversion.obs.size

    @cached_property
    def act_dim(self) -> int:
        """Raw columns of an output."""
        return self.horizon * self.conversion.action.size

    @property
    def middle(self) -> Float[Tensor, " obs_dim"]:
        """A raw input in the middle of the data."""
        features = self.obs_box.centre.unflatten(0, (self.history, -1))
        return self.conversion.obs.outside(features).flatten()

    def inputs(self, obs: Float[Tensor, "batch obs_dim"]) -> Float[Tensor, "batch inside"]:
        """What the energy sees of raw observations."""
        if self.conversion.obs.kinds:
            obs = self.conversion.obs.inside(obs.unflatten(-1, (self.history, -1))).flatten(-2)
        return self.obs_box.scaled(obs)

    def targets(
        self, actions: Float[Tensor, "batch act_dim"], obs: Float[Tensor, "batch obs_dim"]
    ) -> Float[Tensor, "batch inside"]:
        """Raw actions as the energy's outputs."""
        return self.act_box.scaled(self.features(actions, obs))

    def features(
        self, actions: Float[Tensor, "batch act_dim"], obs: Float[Tensor, "batch obs_dim"]
    ) -> Float[Tensor, "batch inside"]:
        """Raw actions relative to their origins, by their kinds, not scaled yet."""
        if not (self.conversion.relative or self.conversion.action.kinds):
            return actions
        steps = actions.unflatten(-1, (self.horizon, -1))
        if self.conversion.relative:
            steps = steps - self._origin(obs).unsqueeze(-2)
        return self.conversion.action.inside(steps).flatten(-2)

    def actions(
        self, normalised: Float[Tensor, "batch samples inside"], obs: Float[Tensor, "batch obs_dim"] | None = None
    ) -> Float[Tensor, "batch samples act_dim"]:
        """The energy's outputs as raw actions; `obs` must be there where actions are relative."""
        features = self.act_box.denormalise(normalised)
        if not (self.conversion.relative or self.conversion.action.kinds):
            return features
        form = self.conversion.action
        steps = form.outside(features.unflatten(-1, (self.horizon, -1)))
        if self.conversion.relative:
            if obs is None:
                raise ValueError("obs must be given: these actions are relative to it")
            steps = form.settled(steps + self._origin(obs)[:, None, None])
        return steps.flatten(-2)

    def bounds(
        self, low: Float[Tensor, " act_dim"], high: Float[Tensor, " act_dim"], obs: Float[Tensor, "batch obs_dim"]
    ) -> tuple[Tensor, Tensor]:
        """Limits of raw actions as those of the energy's outputs: vectors, or a row for each observation where actions
        are relative to it. Infinite limits stay so."""
        if self.conversion.relative:
            origin = self._origin(obs).repeat(1, self.horizon)
            low, high = low - origin, high - origin
        if self.conversion.action.kinds:
            pair = self.conversion.action.bounds(*(each.unflatten(-1, (self.horizon, -1)) for each in (low, high)))
            low, high = (each.flatten(-2) for each in pair)
        return self.act_box.scaled(low), self.act_box.scaled(high)

    def difference(
        self, one: Float[Tensor, "batch act_dim"], other: Float[Tensor, "batch act_dim"]
    ) -> Float[Tensor, "batch act_dim"]:
        """one − other of raw actions, of angles the short way round."""
        if not self.conversion.action.kinds:
            return one - other
        pair = (each.unflatten(-1, (self.horizon, -1)) for each in (one, other))
        return self.conversion.action.difference(*pair).flatten(-2)

    def to(self, *args: Any, **kwargs: Any) -> "Units":
        """The same units on another device or in another dtype."""
        obs_box, act_box = self.obs_box.to(*args, **kwargs), self.act_box.to(*args, **kwargs)
        return Units(obs_box, act_box, self.history, self.horizon, self.conversion)

    def _origin(self, obs: Float[Tensor, "batch obs_dim"]) -> Float[Tensor, "batch action"]:
        """What each action column is told from; 0 where it is not relative."""
        newest = obs[..., -self.conversion.obs.size :]
        none = newest.new_zeros(*newest.shape[:-1], 1)
        return _take(torch.cat([newest, none], -1), self.conversion.origins)


def _take(values: Tensor, columns: tuple[int, ...]) -> Tensor:
    """Columns of the last axis; a view where they stand side by side."""
    first = columns[0] if columns else 0
    if first >= 0 and columns == tuple(range(first, first + len(columns))):
        return values[..., first : first + len(columns)]
    return values[..., list(columns)]


def _name(piece: Any) -> str:
    return type(piece).__name__
