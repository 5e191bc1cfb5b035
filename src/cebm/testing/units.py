"""Contract tests of what changes raw numbers: kinds of columns, jitter, symmetries, on a few values of your own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cebm.testing.checks import (
    Check,
    equal,
    generator_of,
    is_saved_and_read,
    named,
    run_checks,
    say,
    without_global_randomness,
)

ROUNDING = 1e-3
"""The largest relative error of a round trip in float32."""


def kind_checks(kind: Any, values: Any) -> list[Check]:
    """The promises of a kind of columns: see `cebm.units.Kind`. `values` [rows, columns]: raw values of its columns."""
    raw = torch.as_tensor(np.array(values, np.float32))

    def fitted(piece: Any) -> Any:
        return piece.fitted(raw.clone(), "the columns")

    def comes_back_from_inside(piece: Any) -> None:
        made = fitted(piece)
        back = made.outside(made.inside(raw.clone()))
        say(back.shape == raw.shape, f"values have shape {tuple(raw.shape)}, they come back as {tuple(back.shape)}")
        error = float((made.difference(back, raw).abs() / (1 + raw.abs())).max())
        say(error <= ROUNDING, f"outside(inside(values)) is up to {error:.3g} from the values")

    def knows_when_it_is_fitted(piece: Any) -> None:
        made = fitted(piece)
        say(made.fitted(raw.clone(), "the columns") == made, "fitted a second time it changes")

    def takes_any_axes_and_any_features(piece: Any) -> None:
        made = fitted(piece)
        features = made.inside(raw.repeat(2, 1, 1)).shape
        say(features[:2] == (2, len(raw)), f"features of {(2, *raw.shape)} have shape {tuple(features)}")
        out = made.outside(2 * torch.randn(features, generator=generator_of(1)))
        say(out.shape == (2, *raw.shape), f"values have shape {tuple(out.shape)}, expected {(2, *raw.shape)}")
        say(bool(torch.isfinite(out).all()), "some features give NaN or infinity: a search may visit any")

    def keeps_the_dtype(piece: Any) -> None:
        inside = fitted(piece).inside(raw.double())
        found = (inside.dtype, fitted(piece).outside(inside).dtype)
        say(found == (torch.float64, torch.float64), f"float64 becomes {found}")

    def bounds_hold_the_features(piece: Any) -> None:
        made = fitted(piece)
        inside, (low, high) = made.inside(raw.clone()), made.bounds(raw - 1, raw + 1)
        say(bool(((low <= inside) & (inside <= high)).all()), "features lie beyond the bounds of their values")
        if made.fixed:
            say(bool((inside.abs() <= 1 + ROUNDING).all()), "fixed features must lie in [-1, 1]")

    def leaves_values_as_they_are(piece: Any) -> None:
        passed = raw.clone()
        made = piece.fitted(passed, "the columns")
        made.inside(passed)
        made.settled(passed)
        equal(passed, raw, "values were changed in place")

    functions = [
        comes_back_from_inside,
        knows_when_it_is_fitted,
        takes_any_axes_and_any_features,
        keeps_the_dtype,
        bounds_hold_the_features,
        leaves_values_as_they_are,
        is_saved_and_read,
    ]
    return named(kind, functions)


def check_kind(kind: Any, values: Any, expected_failures: Mapping[str, str] | None = None) -> None:
    """Raises a ContractError unless the kind of columns keeps its contract."""
    run_checks(kind_checks(kind, values), expected_failures)


def perturbation_checks(jitter: Any, obs: Any) -> list[Check]:
    """The promises of a jitter: see `cebm.units.Perturbation`. `obs` [batch, history, frame]: raw observations."""
    raw = torch.as_tensor(np.array(obs, np.float32))

    def keeps_the_shape(piece: Any) -> None:
        moved = piece.perturb(raw.clone(), generator_of(1))
        say(moved.shape == raw.shape, f"observations {tuple(raw.shape)} become {tuple(moved.shape)}")
        say(bool(torch.isfinite(moved).all()), "observations become NaN or infinite")

    def same_generator_same_result(piece: Any) -> None:
        first, second = (piece.perturb(raw.clone(), generator_of(1)) for _ in range(2))
        equal(first, second, "the same generator moves otherwise")

    def moves_all_frames_alike(piece: Any) -> None:
        frames = raw[:, :1].expand(-1, 3, -1).clone()  # of a state that stands still
        moved = piece.perturb(frames, generator_of(1))
        close = torch.allclose(moved, moved[:, :1].expand_as(moved), rtol=ROUNDING, atol=ROUNDING)
        say(close, "three equal frames of one example do not stay equal")

    def leaves_observations_as_they_are(piece: Any) -> None:
        passed = raw.clone()
        piece.perturb(passed, generator_of(1))
        equal(passed, raw, "observations were changed in place")

    def leaves_global_randomness_alone(piece: Any) -> None:
        without_global_randomness(lambda: piece.perturb(raw.clone(), generator_of(1)))

    functions = [
        keeps_the_shape,
        same_generator_same_result,
        moves_all_frames_alike,
        leaves_observations_as_they_are,
        leaves_global_randomness_alone,
        is_saved_and_read,
    ]
    return named(jitter, functions)


def check_perturbation(jitter: Any, obs: Any, expected_failures: Mapping[str, str] | None = None) -> None:
    """Raises a ContractError unless the jitter keeps its contract."""
    run_checks(perturbation_checks(jitter, obs), expected_failures)


def symmetry_checks(symmetry: Any, obs: Any, actions: Any) -> list[Check]:
    """The promises of a symmetry: see `cebm.units.Symmetry`. `obs` [steps, obs], `actions` [steps, act]: an episode."""
    seen, done = np.array(obs), np.array(actions)

    def gives_an_episode_of_the_same_shape(piece: Any) -> None:
        found = piece.transform(seen.copy(), done.copy())
        for name, values, like in (("obs", found[0], seen), ("actions", found[1], done)):
            say(np.shape(values) == like.shape, f"{name} {like.shape} become {np.shape(values)}")
            say(bool(np.isfinite(values).all()), f"{name} become NaN or infinite")

    def repeats_itself(piece: Any) -> None:
        first, second = (piece.transform(seen.copy(), done.copy()) for _ in range(2))
        say(all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)), "the same episode has two images")

    def changes_the_episode(piece: Any) -> None:
        found = piece.transform(seen.copy(), done.copy())
        same = np.array_equal(found[0], seen) and np.array_equal(found[1], done)
        say(not same, "the image is the episode itself: nothing is gained by it")

    def leaves_the_episode_as_it_is(piece: Any) -> None:
        passed = seen.copy(), done.copy()
        piece.transform(*passed)
        say(np.array_equal(passed[0], seen) and np.array_equal(passed[1], done), "the episode was changed in place")

    functions = [
        gives_an_episode_of_the_same_shape,
        repeats_itself,
        changes_the_episode,
        leaves_the_episode_as_it_is,
        is_saved_and_read,
    ]
    return named(symmetry, functions)


def check_symmetry(symmetry: Any, obs: Any, actions: Any, expected_failures: Mapping[str, str] | None = None) -> None:
    """Raises a ContractError unless the symmetry keeps its contract."""
    run_checks(symmetry_checks(symmetry, obs, actions), expected_failures)
