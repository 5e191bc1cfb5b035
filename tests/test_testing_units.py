"""The contract tests of kinds, jitter and symmetries pass ours and catch faults."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from cebm import testing
from cebm.units import Angle, Category, Constant, Gaussian, Layout, Mirror, PlanarMirror, PlanarPose, Quaternion, Robust

ANGLES = np.linspace(-3, 3, 12).reshape(6, 2)
TURNS = np.array([[0.0, 0, 0, 1], [0.6, 0, 0, 0.8], [0, -0.6, 0.8, 0]])
OBS = np.arange(2 * 3 * 4).reshape(2, 3, 4) / 7
LAYOUTS = Layout.of("obs", 4), Layout.of("action", 2)
EPISODE = OBS.reshape(6, 4), OBS.reshape(6, 4)[:, :2]


@testing.contract(
    [
        *testing.kind_checks(Angle((0, 1)), ANGLES),
        *testing.kind_checks(Angle((0, 1), 360.0), 50 * ANGLES),
        *testing.kind_checks(Quaternion("0:4"), TURNS),
        *testing.kind_checks(Category((0, 1)), ANGLES.round()),
        *testing.kind_checks(Constant((0, 1)), np.ones((3, 2))),
        *testing.kind_checks(Robust((0, 1)), ANGLES**3),
        *testing.perturbation_checks(Gaussian((0, 2), 0.5), OBS),
        *testing.perturbation_checks(PlanarPose((0, 1, 2, 3), 0.5, 0.1), OBS),
        *testing.symmetry_checks(Mirror((0, 1), 0).located(*LAYOUTS), *EPISODE),
        *testing.symmetry_checks(PlanarMirror((0, 1, 2, 3), (0, 1)).located(*LAYOUTS), *EPISODE),
    ]
)
def test_ours_keep_their_contracts(check):
    check()


def failing(checks, name):
    """Only the check of that name fails."""
    failed = []
    for check in checks:
        try:
            check()
        except testing.ContractError:
            failed.append(check.name)
    assert failed == [name]


@dataclass(frozen=True)
class FaultyKind:
    """A plain column with one fault."""

    columns: int = 0
    fault: str = ""
    fits: int = 0
    fixed: ClassVar[bool] = False
    subtracts: ClassVar[bool] = True

    def fitted(self, values, name):
        return replace(self, fits=self.fits + (self.fault == "refits"))

    def inside(self, values):
        if self.fault == "in place":
            values += 0
            values[0] = 5.0
        return values.float() if self.fault == "dtype" else values

    def outside(self, features):
        if self.fault == "sign":
            return -features
        return features.clamp_min(0).sqrt() ** 2 / (features > -1) if self.fault == "nan" else features

    def bounds(self, low, high):
        return (high, low) if self.fault == "bounds" else (low, high)

    def settled(self, values):
        return values

    def difference(self, one, other):
        return one - other


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("sign", "comes_back_from_inside"),
        ("refits", "knows_when_it_is_fitted"),
        ("nan", "takes_any_axes_and_any_features"),
        ("dtype", "keeps_the_dtype"),
        ("bounds", "bounds_hold_the_features"),
    ],
)
def test_a_faulty_kind_is_caught(fault, name):
    failing(testing.kind_checks(FaultyKind(fault=fault), np.linspace(0.1, 2, 9)[:, None]), name)


def test_a_kind_that_writes_into_its_values_is_caught():
    with pytest.raises(testing.ContractError, match="values were changed in place"):
        testing.check_kind(FaultyKind(fault="in place"), np.linspace(0.1, 2, 9)[:, None])
    testing.check_kind(FaultyKind(), np.linspace(0.1, 2, 9)[:, None])


@dataclass(frozen=True)
class FaultyJitter:
    """A shift with one fault."""

    fault: str = ""

    def perturb(self, obs, generator):
        frames = obs.shape[1] if self.fault == "frames" else 1
        source = torch.Generator() if self.fault == "random" else generator
        if self.fault == "random":
            source.seed()
        if self.fault == "global":
            torch.rand(())
        shift = torch.randn(len(obs), frames, 1, generator=source)
        if self.fault == "in place":
            obs += shift
        return (obs + shift)[:, :, : 1 if self.fault == "shape" else None]


@dataclass(frozen=True)
class FaultySymmetry:
    """A sign with one fault."""

    fault: str = ""

    def transform(self, obs, actions):
        if self.fault == "in place":
            obs *= -1
            return obs.copy(), actions
        if self.fault == "same":
            return obs, actions
        if self.fault == "random":
            return -obs * np.random.default_rng().random(), actions
        return -obs[1 if self.fault == "shape" else 0 :], actions


@pytest.mark.parametrize(
    ("checks", "name"),
    [
        (testing.perturbation_checks(FaultyJitter("frames"), OBS), "moves_all_frames_alike"),
        (testing.perturbation_checks(FaultyJitter("random"), OBS), "same_generator_same_result"),
        (testing.perturbation_checks(FaultyJitter("global"), OBS), "leaves_global_randomness_alone"),
        (testing.perturbation_checks(FaultyJitter("in place"), OBS), "leaves_observations_as_they_are"),
        (testing.perturbation_checks(FaultyJitter("shape"), OBS), "keeps_the_shape"),
        (testing.symmetry_checks(FaultySymmetry("in place"), *EPISODE), "leaves_the_episode_as_it_is"),
        (testing.symmetry_checks(FaultySymmetry("same"), *EPISODE), "changes_the_episode"),
        (testing.symmetry_checks(FaultySymmetry("random"), *EPISODE), "repeats_itself"),
        (testing.symmetry_checks(FaultySymmetry("shape"), *EPISODE), "gives_an_episode_of_the_same_shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_faulty_piece_is_caught(checks, name):
    failing(checks, name)


def test_pieces_without_a_fault_pass():
    testing.check_perturbation(FaultyJitter(), OBS)
    testing.check_symmetry(FaultySymmetry(), *EPISODE)
