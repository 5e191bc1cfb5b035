"""Box: units, margins, clipping; what happens at the ends of the floating-point range."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cebm import Box
from cebm.spaces import Part, Specification, margin_limit, step_limit, usable_device

DTYPES = [torch.float32, torch.float64]
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
quick = settings(max_examples=60, deadline=None)


@st.composite
def tables(draw: st.DrawFn, limit: float | None = None) -> Tensor:
    """Data [rows, dim] of either precision: any finite values, subnormal ones and both zeros included. Without a
    limit, up to a quarter of the largest float: closer, the sum of a rounded centre and scale may overflow."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, dim = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    largest = torch.finfo(dtype).max / 4 if limit is None else limit
    numbers = st.floats(-largest, largest, width=32 if dtype == torch.float32 else 64)
    return torch.tensor(draw(st.lists(numbers, min_size=rows * dim, max_size=rows * dim)), dtype=dtype).view(rows, dim)


def near_constant(data: Tensor) -> Tensor:
    """Dimensions whose extent is lost in the rounding of the values (a box maps them to about 0)."""
    low, high = data.amin(0), data.amax(0)
    info = torch.finfo(data.dtype)
    return high / 2 - low / 2 <= info.eps * low.abs() + info.tiny


def rounding(box: Box, data: Tensor) -> Tensor:
    """A bound on the error of a normalised coordinate of `data`: the difference value − centre is rounded in units
    of the values themselves, which counts for |value|/scale in normalised units."""
    return 8 * torch.finfo(data.dtype).eps * (1 + (data.abs() / box.scale).amax(0))


# -------------------------------------------------------------------------------------------- properties


@quick
@given(tables())
def test_round_trip_up_to_rounding(data: Tensor) -> None:
    box = Box.fit(data)
    back = box.denormalise(box.normalise(data))
    info = torch.finfo(data.dtype)
    assert back.dtype == data.dtype
    size = torch.maximum(data.abs().amax(0), box.centre.abs())
    # A value in a column with one of size s has rounding of s·eps; 1-scaled constants add the rounding of 1.
    error = (back - data).abs()
    assert (error <= 8 * info.eps * size + 8 * info.tiny).all(), (error, size)


@quick
@given(tables())
def test_extremes_map_to_plus_and_minus_one_and_constants_to_zero(data: Tensor) -> None:
    box = Box.fit(data)
    normalised, constant = box.normalise(data), near_constant(data)
    tolerance = rounding(box, data)
    low, high = normalised.amin(0), normalised.amax(0)
    assert torch.isfinite(normalised).all()
    assert ((low + 1).abs() <= tolerance)[~constant].all()
    assert ((high - 1).abs() <= tolerance)[~constant].all()
    # An extent below the rounding stays small, whatever the magnitude; without extent it is 0 (subnormals: nearly).
    assert (normalised.abs().amax(0) <= 2)[constant].all()
    exact = data.amin(0) == data.amax(0)
    assert (normalised.abs().amax(0) <= torch.finfo(data.dtype).tiny)[exact].all()


@quick
@given(tables())
def test_low_and_high_are_the_extremes(data: Tensor) -> None:
    box, constant = Box.fit(data), near_constant(data)
    info = torch.finfo(data.dtype)
    size = data.abs().amax(0)
    assert ((box.low - data.amin(0)).abs() <= 4 * info.eps * size + 4 * info.tiny)[~constant].all()
    assert ((box.high - data.amax(0)).abs() <= 4 * info.eps * size + 4 * info.tiny)[~constant].all()


@quick
@given(tables(limit=1e4), st.floats(0.1, 100), st.floats(-100, 100))
def test_normalised_values_do_not_depend_on_the_units_of_the_data(data: Tensor, factor: float, shift: float) -> None:
    data = data.double()
    moved = data * factor + shift
    assume(not near_constant(data).any() and not near_constant(moved).any())
    here, there = Box.fit(data), Box.fit(moved)
    # Moving the data rounds it once more, so both tolerances count.
    tolerance = rounding(here, data) + rounding(there, moved)
    assume(bool((tolerance < 1e-3).all()))
    assert ((here.normalise(data) - there.normalise(moved)).abs() <= tolerance).all()


@quick
@given(tables(), st.sampled_from(["min-max", "standardise"]))
def test_fit_accepts_anything_finite(data: Tensor, scaling: str) -> None:
    before = data.clone()
    box = Box.fit(data, scaling)
    assert torch.equal(data, before)
    for tensor in (box.centre, box.scale, box.normalise(data)):
        assert tensor.dtype == data.dtype
        assert torch.isfinite(tensor).all()
    assert (box.scale > 0).all()
    # n values of zero mean and unit variance are at most √n; rounding may add to that.
    limit = 2 if scaling == "min-max" else 2 * math.sqrt(len(data)) + 1
    assert (box.normalise(data).abs() <= limit).all()


@quick
@given(tables(limit=1e6))
def test_standardise_gives_zero_mean_and_unit_variance(data: Tensor) -> None:
    box = Box.fit(data, "standardise")
    normalised = box.normalise(data).double()
    info = torch.finfo(data.dtype)
    spread = data.double().std(0, correction=0)
    constant = spread <= 4 * info.eps * data.abs().amax(0) + info.tiny
    tolerance = 16 * info.eps * (1 + data.abs().amax(0) / spread)
    varying = ~constant & (tolerance < 1e-2)
    assert (normalised.mean(0).abs() <= tolerance)[varying].all()
    assert ((normalised.std(0, correction=0) - 1).abs() <= tolerance)[varying].all()
    same = data.amin(0) == data.amax(0)
    assert (normalised.abs().amax(0) <= info.tiny)[same].all()


@quick
@given(st.floats(0, 10), st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(1, 4))
def test_samples_stay_in_the_margin_box(margin: float, seed: int, dtype: torch.dtype, dim: int) -> None:
    box = Box.from_bounds(torch.zeros(dim, dtype=dtype), torch.ones(dim, dtype=dtype), margin)
    samples = box.sample(3, 50, generator=torch.Generator().manual_seed(seed))
    assert samples.shape == (3, 50, dim)
    assert samples.dtype == dtype
    assert (samples.abs() <= 1 + 2 * margin).all()
    assert torch.equal(box.clip(samples), samples)


@quick
@given(tables(limit=1e3), st.floats(0, 1))
def test_clip_goes_to_the_nearest_point_of_the_margin_box(values: Tensor, margin: float) -> None:
    dim = values.shape[1]
    box = Box(torch.zeros(dim, dtype=values.dtype), torch.ones(dim, dtype=values.dtype), margin)
    limit = torch.tensor(1 + 2 * margin, dtype=values.dtype)
    expected = torch.where(values > limit, limit, torch.where(values < -limit, -limit, values))
    assert torch.equal(box.clip(values), expected)


@quick
@given(tables(limit=10), st.floats(0.01, 2), st.sampled_from([("range", 2.0), ("half-range", 1.0)]))
def test_clip_step_is_a_fraction_of_the_range_or_of_half_of_it(
    steps: Tensor, fraction: float, convention: tuple[str, float]
) -> None:
    name, unit = convention
    dim = steps.shape[1]
    box = Box(torch.zeros(dim, dtype=steps.dtype), torch.full((dim,), 7.0, dtype=steps.dtype))
    limit = torch.tensor(fraction * unit, dtype=steps.dtype)
    clipped = box.clip_step(steps, fraction, name)
    inside = steps.abs() <= limit
    assert torch.equal(clipped[inside], steps[inside])
    assert torch.equal(clipped[~inside], limit * steps[~inside].sign())


# -------------------------------------------------------------------------------------------- examples


def test_the_papers_numbers() -> None:
    box = Box.from_bounds([0.0, -2.0], [1.0, 2.0])
    assert box.limit == pytest.approx(1.1)
    assert box.normalise(torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.25, -2.0]])).tolist() == [[-1, 0], [1, 1], [-0.5, -1]]
    assert box.clip_step(torch.tensor([0.7, -0.7])).tolist() == [0.5, -0.5]
    assert box.clip_step(torch.tensor([0.7, -0.7]), convention="half-range").tolist() == [0.25, -0.25]
    assert margin_limit(0.05) == pytest.approx(1.1)
    assert (step_limit(0.25), step_limit(0.25, "half-range")) == (0.5, 0.25)
    assert box.dim == 2


@by_dtype
def test_samples_are_uniform_over_the_margin_box(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Moments of U(-1.1, 1.1) and the coverage of its ends; |z| < 5.5 for each of 6 numbers: 2e-7 false alarms."""
    n, limit = 100_000, 1.1
    box = Box.from_bounds(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype))
    samples = box.sample(n, generator=generator).double()
    variance = limit**2 / 3
    z_mean = samples.mean(0) / math.sqrt(variance / n)
    # Var(y²) = limit⁴(1/5 − 1/9)
    z_variance = (samples.square().mean(0) - variance) / math.sqrt(limit**4 * (1 / 5 - 1 / 9) / n)
    # Beyond ±1, where there are no data, lies 1/11 of the box.
    share = 1 / 11
    z_margin = ((samples.abs() > 1).double().mean(0) - share) / math.sqrt(share * (1 - share) / n)
    z = torch.stack([z_mean, z_variance, z_margin])
    assert (z.abs() < 5.5).all(), z
    # The largest of n is within 2.2·30/n of the end but for exp(-30).
    assert (samples.amax(0) > limit - 66 / n).all() and (samples.amin(0) < -limit + 66 / n).all()


def test_sampling_uses_its_generator_alone() -> None:
    box = Box.from_bounds([0.0], [1.0])
    state = torch.get_rng_state()
    draws = [box.sample(5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), state)


@by_dtype
@pytest.mark.parametrize("scaling", ["min-max", "standardise"])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -3.7e-12, 1e7, -1.7e9, 1e30, 1e-30])
def test_a_constant_dimension_maps_to_exactly_zero(scaling: str, value: float, dtype: torch.dtype) -> None:
    data = torch.full((1001, 2), value, dtype=dtype)
    data[:, 1] = torch.linspace(0, 1, 1001)
    box = Box.fit(data, scaling)
    assert (box.normalise(data)[:, 0] == 0).all()
    assert torch.equal(box.denormalise(torch.zeros(1, 2, dtype=dtype))[0, 0], data[0, 0])


def test_one_rounding_unit_is_not_a_range() -> None:
    """Two neighbouring floats are a constant to rounding: never a coordinate of the size of the values."""
    value = torch.tensor(1.7e9)
    data = torch.stack([value, torch.nextafter(value, torch.tensor(torch.inf))]).view(2, 1)
    assert data[1, 0] - data[0, 0] == 128
    for scaling in ("min-max", "standardise"):
        assert (Box.fit(data, scaling).normalise(data).abs() <= 2).all()
    tiny = torch.tensor([[0.1], [torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))]])
    assert (Box.fit(tiny).normalise(tiny).abs() < 1e-7).all()


@by_dtype
def test_the_whole_floating_point_range(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    data = torch.tensor([[-largest, largest], [largest, largest / 2]], dtype=dtype)
    for scaling in ("min-max", "standardise"):
        normalised = Box.fit(data, scaling).normalise(data)
        assert torch.allclose(normalised, torch.tensor([[-1, 1], [1, -1]], dtype=dtype), atol=1e-5)


def test_a_single_row_is_all_constants() -> None:
    data = torch.tensor([[3.0, -4.0, 1e10]])
    for scaling in ("min-max", "standardise"):
        assert Box.fit(data, scaling).normalise(data).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda x: np.array(x, dtype=np.int32)])
def test_integers_become_floats(make: Callable) -> None:
    box = Box.fit(make([[0, 10], [4, 30]]))
    assert box.centre.dtype == torch.get_default_dtype()
    assert box.normalise(torch.tensor([[2.0, 10.0]])).tolist() == [[0, -1]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_in_any_number_of_dimensions(dtype: type) -> None:
    rng = np.random.default_rng()
    data = rng.normal(size=(4, 6, 3)).astype(dtype)
    box = Box.fit(data)
    flat = data.reshape(-1, 3)
    expected = 2 * (data - flat.min(0)) / (flat.max(0) - flat.min(0)) - 1
    assert box.centre.dtype == torch.from_numpy(data).dtype
    np.testing.assert_allclose(box.normalise(torch.from_numpy(data)).numpy(), expected, atol=1e-5)


def test_fit_does_not_alias_its_data() -> None:
    data = torch.tensor([[0.0], [2.0]])
    low, high = torch.tensor([0.0]), torch.tensor([2.0])
    boxes = [Box.fit(data), Box.fit(data, "standardise"), Box.from_bounds(low, high)]
    for tensor in (data, low, high):
        tensor.fill_(9.0)
    assert [box.centre.item() for box in boxes] == [1, 1, 1]
    assert [box.scale.item() for box in boxes] == [1, 1, 1]


def test_negative_zero_is_zero() -> None:
    box = Box.fit(torch.tensor([[-0.0], [0.0], [-0.0]]))
    assert box.normalise(torch.tensor([[-0.0]])).item() == 0
    assert box.low.item() == -1 and box.high.item() == 1


def test_to_another_dtype_keeps_the_margin() -> None:
    box = Box.from_bounds([0.0], [1.0], margin=0.2).to(torch.float64)
    assert box.centre.dtype == box.scale.dtype == torch.float64
    assert box.limit == 1.4
    assert box.normalise(torch.tensor([[0.5]], dtype=torch.float64)).dtype == torch.float64


def test_maps_are_differentiable() -> None:
    values = torch.tensor([[0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    box = Box.from_bounds([0.0, 0.0], [1.0, 4.0]).to(torch.float64)
    torch.autograd.gradcheck(box.normalise, values)
    torch.autograd.gradcheck(box.denormalise, values)


# -------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scaling", ["min-max", "standardise"])
def test_fit_names_the_dimension_that_is_not_finite(bad: float, scaling: str) -> None:
    data = torch.zeros(4, 2, 3)
    data[3, 1, 1] = bad
    with pytest.raises(ValueError, match=r"data has NaN or infinite values in dimension 1$"):
        Box.fit(data, scaling)
    data[0, 0, 2] = bad
    with pytest.raises(ValueError, match=r"dimension 1, 2$"):
        Box.fit(data, scaling)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_normalise_and_bounds_name_the_dimension_that_is_not_finite(bad: float) -> None:
    box = Box.from_bounds([0.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"values has NaN or infinite values in dimension 1$"):
        box.normalise(torch.tensor([[0.0, 0.0], [0.0, bad]]))
    with pytest.raises(ValueError, match=r"low has NaN or infinite values in dimension 0$"):
        Box.from_bounds([bad, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"high has NaN or infinite values in dimension 1$"):
        Box.from_bounds([0.0, 0.0], [1.0, bad])
    with pytest.raises(ValueError, match="centre has NaN"):
        Box(torch.tensor([bad]), torch.ones(1))
    with pytest.raises(ValueError, match="scale has NaN"):
        Box(torch.zeros(1), torch.tensor([bad]))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Box.fit(torch.zeros(3)), "data must be"),
        (lambda: Box.fit(torch.zeros(0, 3)), "data must be"),
        (lambda: Box.fit(torch.zeros(3, 0)), "data must be"),
        (lambda: Box.fit([]), "data must be"),
        (lambda: Box.fit(torch.zeros(3, 2), "maxmin"), "scaling must be"),
        (lambda: Box.fit(torch.zeros(3, 2), margin=-0.1), "margin must be"),
        (lambda: Box.fit(torch.zeros(3, 2), margin=math.nan), "margin must be"),
        (lambda: Box.fit(torch.zeros(3, 2), margin=math.inf), "margin must be"),
        (lambda: Box.from_bounds(0.0, 1.0), "low and high must be"),
        (lambda: Box.from_bounds([], []), "low and high must be"),
        (lambda: Box.from_bounds([0.0], [1.0, 2.0]), "low and high must be"),
        (lambda: Box.from_bounds([0.0, 2.0, 0.0], [1.0, 1.0, -1.0]), "high must not be below low.* dimension 1, 2"),
        (lambda: Box(torch.zeros(2), torch.zeros(2)), "scale must be positive"),
        (lambda: Box(torch.zeros(2), torch.ones(3)), "centre and scale must be"),
        (lambda: Box(torch.zeros(2, 2), torch.ones(2, 2)), "centre and scale must be"),
        (lambda: Box(torch.zeros(1), -torch.ones(1)), "scale must be positive"),
        (lambda: Box(torch.zeros(2), torch.ones(2)).normalise(torch.zeros(4, 3)), r"values must be \[..., 2\]"),
        (lambda: Box(torch.zeros(2), torch.ones(2)).denormalise(torch.zeros(4, 1)), r"values must be \[..., 2\]"),
        (lambda: Box(torch.zeros(1), torch.ones(1)).normalise(torch.tensor(1.0)), r"values must be \[..., 1\]"),
        (lambda: Box(torch.zeros(1), torch.ones(1)).clip_step(torch.zeros(1), fraction=0.0), "step_clip must be"),
        (lambda: Box(torch.zeros(1), torch.ones(1)).clip_step(torch.zeros(1), convention="whole"), "clip_convention"),
        (lambda: margin_limit(-1e-9), "margin must be"),
        (lambda: step_limit(math.nan), "step_clip must be"),
    ],
)
def test_bad_input_names_the_argument(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -------------------------------------------------------------------------------------------- specifications


ROBOT = Specification(
    (Part("joints", (7,)), Part("camera", (4, 5, 3)), Part("goal", (2,))), action=3, history=2, horizon=4
)


def test_a_specification_counts_columns() -> None:
    assert (ROBOT.frame, ROBOT.obs_dim, ROBOT.act_dim) == (69, 138, 12)
    flat = Specification.flat(5, 2, history=3, horizon=2, smoothing=0.1)
    assert flat == Specification((Part("obs", (5,)),), 2, 3, 2, 0.1)
    assert (flat.obs_dim, flat.act_dim) == (15, 4)
    assert Part("nothing", (0,)).size == 0 and Part("number", ()).size == 1


def test_columns_find_a_part_in_each_frame() -> None:
    """Against frames that are laid out by hand: the oldest first, the parts in their order."""
    frames = [{part.name: torch.randn(part.size) for part in ROBOT.parts} for _ in range(2)]
    row = torch.cat([frame[part.name] for frame in frames for part in ROBOT.parts])
    for index, frame in enumerate(frames):
        for name, values in frame.items():
            assert torch.equal(row[ROBOT.columns(name, index)], values)
            assert torch.equal(row[ROBOT.columns(name, index - 2)], values)
    assert torch.equal(row[ROBOT.columns("goal")], frames[-1]["goal"]), "the newest frame by default"
    with pytest.raises(ValueError, match="there is no part 'gaol'; there are joints, camera, goal"):
        ROBOT.columns("gaol")


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Part("", (3,)), "a part of an observation needs a name"),
        (lambda: Part("joints", (3, -1)), r"part 'joints': sizes must not be negative, got \(3, -1\)"),
        (lambda: Specification.flat(3, 0), "action must be at least 1, got 0"),
        (lambda: Specification.flat(3, 1, history=0), "history must be at least 1, got 0"),
        (lambda: Specification.flat(3, 1, horizon=0), "horizon must be at least 1, got 0"),
        (lambda: Specification.flat(3, 1, smoothing=-0.1), "smoothing must be at least 0 and finite, got -0.1"),
        (lambda: Specification.flat(3, 1, smoothing=math.nan), "smoothing must be at least 0 and finite, got nan"),
        (lambda: Specification((Part("a", (1,)), Part("a", (2,))), 1), r"must have different names, got \['a', 'a'\]"),
    ],
)
def test_bad_specifications_name_the_argument(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@by_dtype
def test_a_tiled_box_has_the_same_units_for_each(dtype: torch.dtype, generator: torch.Generator) -> None:
    box = Box.fit(torch.randn(9, 3, generator=generator, dtype=dtype), margin=0.2)
    tiled = box.tiled(4)
    values = torch.randn(5, 4, 3, generator=generator, dtype=dtype)
    assert torch.equal(tiled.normalise(values.flatten(1)), box.normalise(values).flatten(1))
    assert (tiled.dim, tiled.margin) == (12, 0.2)


def test_scaled_is_normalise_without_the_check() -> None:
    box = Box.from_bounds([0.0, 0.0], [2.0, 4.0])
    values = torch.tensor([[1.0, 3.0], [0.5, -1.0]])
    assert torch.equal(box.scaled(values), box.normalise(values))
    unbounded = box.scaled(torch.tensor([-math.inf, math.nan]))
    assert unbounded[0] == -math.inf and unbounded[1].isnan()


def test_a_device_that_is_not_here_is_named() -> None:
    assert usable_device("cpu") == usable_device(torch.device("cpu")) == torch.device("cpu")
    for name in ("warp", "cuda:99"):
        with pytest.raises(ValueError, match=f"device '{name}' cannot be used on this machine: "):
            usable_device(name)
