"""Units of training data: kinds are fitted, constant actions recognised, boxes measured, heavy tails named."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.demonstrations import Demonstrations, Windows
from cebm.demonstrations.large import fitted_rows
from cebm.spaces import Box
from cebm.units.columns import Layout, indices
from cebm.units.conversion import Conversion, Form, Relative, Units
from cebm.units.kinds import Constant, Kind, Robust

MOST_ROWS = 100_000
"""Rows of which quantiles are taken; more are thinned out evenly."""
TAIL = 0.02
"""The middle half of a column should have more than this share of its range, of which a uniform one has 0.5 and a
Gaussian one of a million rows 0.14."""


MARGIN = 0.05
"""The margin of a box that fits its data; a declared scale may need more."""


class HeavyTailWarning(UserWarning):
    """A few outliers stretch the range of a column, so that min-max scaling squeezes all other values."""


@dataclass(frozen=True)
class Measured:
    """The units of a set of training data, and what was found about it."""

    units: Units
    notes: tuple[str, ...]
    """What was recognised or declared, in words."""
    low: Float[Tensor, " act_dim"] | None
    """The range of the data's actions with its margin, raw, where the box does not give it."""
    high: Float[Tensor, " act_dim"] | None
    """The upper end of this range."""


@dataclass(frozen=True)
class _Columns:
    """What units are fitted to: all rows of a set in memory, some of a large one on disk, each array for itself."""

    obs: Float[np.ndarray, "some obs"]
    actions: Float[np.ndarray, "others act"]

    @property
    def obs_dim(self) -> int:
        return self.obs.shape[1]

    @property
    def act_dim(self) -> int:
        return self.actions.shape[1]


def layouts_of(data: Demonstrations) -> tuple[Layout, Layout]:
    """The columns of the observations and of the actions, with their names where they have some."""
    return (
        Layout.of("obs", data.obs_dim, data.parts),
        Layout.of("action", data.act_dim, data.action_parts),
    )


def located(pieces: Any, data: Demonstrations) -> tuple[Any, ...]:
    """The pieces with indices for the names of columns."""
    layouts = layouts_of(data)
    return tuple(each.located(*layouts) if hasattr(each, "located") else each for each in pieces)


def measure(inputs: Any, windows: Windows, rows: Any) -> Measured:
    """Fits what `inputs` (kinds, relative actions, scaling) say to the training windows with these `rows`."""
    whole = windows.demonstrations
    data = _Columns(fitted_rows(whole.obs), fitted_rows(whole.actions))
    layouts, notes = layouts_of(whole), list[str]()
    seen = _placed(inputs.obs_kinds, layouts[0], inputs.obs_scaling, ())
    relative = tuple(each.located(*layouts) for each in inputs.relative)
    origins = tuple(index for each in relative for index in indices(each.actions))
    done = _placed(inputs.action_kinds, layouts[1], inputs.action_scaling, ())
    done += _constants(data, layouts[1], done, origins) if inputs.constants == "exact" else ()
    plain = Form(data.obs_dim, parts=whole.parts), Form(data.act_dim, parts=whole.action_parts)
    Conversion(replace(plain[0], kinds=seen), replace(plain[1], kinds=done), relative).check()
    seen = tuple(_fitted(kind, data.obs, layouts[0]) for kind in seen)
    done = tuple(_fitted(kind, data.actions, layouts[1]) if kind.fixed else kind for kind in done)
    conversion = Conversion(replace(plain[0], kinds=seen), replace(plain[1], kinds=done), relative)
    if any(not kind.fixed for kind in done):  # fitted to the differences, where actions are relative
        steps = _steps(windows, rows, conversion.origins, MOST_ROWS)
        done = tuple(kind if kind.fixed else _fitted(kind, steps, layouts[1]) for kind in done)
        conversion = replace(conversion, action=replace(plain[1], kinds=done))
    notes += [_said(kind, layouts[0]) for kind in seen] + [_said(kind, layouts[1]) for kind in done]
    notes += [_said_relative(each, layouts) for each in relative]
    obs_box = _obs_box(data, conversion.obs, inputs.obs_scaling).tiled(inputs.history)
    act_box = _act_box(windows, data, rows, conversion).tiled(inputs.horizon)
    scaled = tuple(index for each in relative if each.scale is not None for index in indices(each.actions))
    if act_box.margin > MARGIN:
        notes.append(
            f"actions reach {act_box.limit / 1.1:.3g} in these units: samplers that keep chains within ±1.1 cannot "
            "get there (see their margin)"
        )
    if conversion.plain:
        low = high = None
    else:
        low, high = _range(data, conversion.action, inputs.horizon)
    steps = _steps(windows, rows, conversion.origins, MOST_ROWS) if relative else data.actions
    _warn_of_tails(data.obs, conversion.obs, inputs.obs_scaling, layouts[0], "obs_scaling")
    _warn_of_tails(steps, conversion.action, inputs.action_scaling, layouts[1], "action_scaling", scaled)
    units = Units(obs_box, act_box, inputs.history, inputs.horizon, conversion)
    return Measured(units, tuple(notes), low, high)


def _placed(kinds: tuple[Kind, ...], layout: Layout, scaling: str, taken: tuple[int, ...]) -> tuple[Kind, ...]:
    """Kinds with indices for columns; robust scaling makes a kind of all other columns."""
    placed = tuple(_replaced(kind, layout.columns(kind.columns, type(kind).__name__)) for kind in kinds)
    if scaling != "robust":
        return placed
    used = {*taken} | {index for kind in placed for index in indices(kind.columns)}
    rest = tuple(index for index in range(layout.size) if index not in used)
    return (*placed, Robust(rest)) if rest else placed


def _constants(
    data: _Columns, layout: Layout, declared: tuple[Kind, ...], relative: tuple[int, ...]
) -> tuple[Kind, ...]:
    """Actions that never change, apart from those that are declared to be something."""
    same = data.actions.min(0) == data.actions.max(0)
    used = {index for kind in declared for index in indices(kind.columns)} | {*relative}
    found = tuple(index for index in np.flatnonzero(same).tolist() if index not in used)
    if not found:
        return ()
    if len(found) < layout.size:
        return (Constant(found),)
    kept: tuple[Kind, ...] = (Constant(found[:1], keep=True),)  # nothing else is left to learn
    return kept + ((Constant(found[1:]),) if found[1:] else ())


def _fitted(kind: Kind, values: Float[np.ndarray, "rows columns"], layout: Layout) -> Kind:
    columns = indices(kind.columns)
    own = values[:, list(columns)]
    if not kind.fixed:
        own = own[:: -(-len(own) // MOST_ROWS)]
    name = f"{type(kind).__name__} of {layout.listed(columns)}"
    return kind.fitted(torch.from_numpy(np.ascontiguousarray(own)), name)


def _steps(windows: Windows, rows: Any, origins: tuple[int, ...], most: int) -> Float[np.ndarray, "steps act"]:
    """Single actions of the windows minus their origins, not more than about `most`."""
    chosen = rows[:: -(-len(rows) * windows.horizon // most)]
    obs, actions = windows[chosen]
    newest = obs[:, -windows.demonstrations.obs_dim :]
    origin = np.concatenate([newest, np.zeros((len(newest), 1), newest.dtype)], 1)[:, list(origins)]
    return (actions.reshape(len(chosen), windows.horizon, -1) - origin[:, None]).reshape(-1, origin.shape[1])


def _obs_box(data: _Columns, form: Form, scaling: str) -> Box:
    if not form.kinds:
        return Box.fit(data.obs, "min-max" if scaling == "min-max" else "standardise")
    features = form.inside(torch.from_numpy(np.ascontiguousarray(data.obs)))
    box = Box.fit(features, "min-max" if scaling == "min-max" else "standardise")
    return _with_units(box, form)


def _act_box(windows: Windows, data: _Columns, rows: Any, conversion: Conversion) -> Box:
    """One scale for an action at any place of a chunk."""
    form = conversion.action
    if not conversion.relative:
        actions = data.actions
        return _with_units(
            Box.fit(form.inside(torch.from_numpy(np.ascontiguousarray(actions))) if form.kinds else actions), form
        )
    low = high = None
    size = max(1, 2**22 // (windows.act_dim + windows.obs_dim))
    for start in range(0, len(rows), size):
        steps = torch.from_numpy(_steps(windows, rows[start : start + size], conversion.origins, 2**62))
        features = form.inside(steps)
        first, last = features.amin(0), features.amax(0)
        low = first if low is None else torch.minimum(low, first)
        high = last if high is None else torch.maximum(high, last)
    if low is None or high is None:
        raise ValueError("there are no windows to train on")
    box = _with_units(Box.from_bounds(low, high), form)
    return _declared(box, low, high, conversion)


def _with_units(box: Box, form: Form) -> Box:
    """The box, where features that have units already keep them."""
    if not any(form.fixed):
        return box
    fixed = torch.tensor(form.fixed)
    return Box(box.centre.masked_fill(fixed, 0.0), box.scale.masked_fill(fixed, 1.0), box.margin)


def _declared(box: Box, low: Tensor, high: Tensor, conversion: Conversion) -> Box:
    """The box with the declared scales of relative actions; its margin holds all data."""
    scales = {
        index: each.scale for each in conversion.relative if each.scale is not None for index in indices(each.actions)
    }
    if not scales:
        return box
    centre, scale, place = box.centre.clone(), box.scale.clone(), 0
    for width, (own, kind) in zip(conversion.action.widths, conversion.action.pieces, strict=True):
        for offset, index in enumerate(own):
            if kind is None and index in scales:
                centre[place + offset], scale[place + offset] = 0.0, scales[index]
            elif index in scales:
                raise ValueError(f"Relative: a scale does not go with {type(kind).__name__}, which has its own")
        place += width
    reach = float(
        (torch.maximum(low.abs(), high.abs()).sub(centre.abs()).clamp_min(0) / scale)[
            ~torch.tensor(conversion.action.fixed)
        ].max()
    )
    return Box(centre, scale, max(box.margin, (1.1 * reach - 1) / 2))


def _range(data: _Columns, form: Form, horizon: int) -> tuple[Tensor, Tensor]:
    """Raw actions: the demonstrations' range with its margin, where the kind of a column has a range at all."""
    box = Box.fit(data.actions)
    free = torch.tensor(form.unlimited)
    low = (box.centre - box.limit * box.scale).masked_fill(free, -torch.inf)
    high = (box.centre + box.limit * box.scale).masked_fill(free, torch.inf)
    return low.repeat(horizon), high.repeat(horizon)


def _warn_of_tails(
    values: Float[np.ndarray, "rows columns"],
    form: Form,
    scaling: str,
    layout: Layout,
    setting: str,
    scaled: tuple[int, ...] = (),
) -> None:
    """Names plain columns (but those that have a declared scale) which outliers squeeze."""
    if scaling == "robust":
        return
    thin = np.asarray(values[:: -(-len(values) // MOST_ROWS)], np.float64)
    middle = np.quantile(thin, 0.75, 0) - np.quantile(thin, 0.25, 0)
    extent = np.asarray(values.max(0), np.float64) - np.asarray(values.min(0), np.float64)
    plain = {index for own, kind in form.pieces if kind is None for index in own} - {*scaled}
    for index in np.flatnonzero((middle > 0) & (middle < TAIL * extent)).tolist():
        if index in plain:
            warnings.warn(
                f"{layout.name(index)}: outliers stretch its range to {extent[index]:.3g}, while half of its values "
                f"lie within {middle[index]:.3g}; {scaling} scaling squeezes those. {setting}='robust' does not, "
                f"nor does the kind Robust({index})",
                HeavyTailWarning,
                stacklevel=3,
            )


def _said(kind: Kind, layout: Layout) -> str:
    columns = layout.listed(indices(kind.columns))
    settings = {name: value for name, value in vars(kind).items() if name != "columns"}
    shown = ", ".join(f"{name} {_short(value)}" for name, value in settings.items() if value not in ((), None, False))
    return f"{columns}: {type(kind).__name__.lower()}" + (f" ({shown})" if shown else "")


def _said_relative(relative: Relative, layouts: tuple[Layout, Layout]) -> str:
    own, origin = layouts[1].listed(indices(relative.actions)), layouts[0].listed(indices(relative.origin))
    return f"{own}: relative to {origin}" + (f", in units of {relative.scale:g}" if relative.scale is not None else "")


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_short(each) for each in value[:8]) + (", …]" if len(value) > 8 else "]")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _replaced(kind: Kind, columns: tuple[int, ...]) -> Kind:
    return replace(kind, columns=columns)  # type: ignore[type-var]
