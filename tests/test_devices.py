"""A training step on each device that this machine has, and how often it waits for one: at most once."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cebm.arithmetic import reducing, why_not_half
from cebm.energies import (
    MLP,
    MixtureDensity,
    Nearest,
    NoiseConditional,
    NoiseConditionalTilt,
    Regression,
    Residual,
    Tilted,
    TwoStep,
)
from cebm.recipes import TRIALS
from cebm.spaces import Specification, check_finite, looking_later
from cebm.trainer import Trainer
from test_trainer import make_trainer, particle, small

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CONVERSIONS = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")


@contextmanager
def conversions() -> Iterator[list[str]]:
    """Names of the conversions of tensors to numbers inside the block, by the function that asked. Adam's own do not
    count: its step counters are on the CPU, whatever the device."""
    seen: list[str] = []
    real = {name: getattr(Tensor, name) for name in CONVERSIONS}

    def counting(name: str) -> Any:
        def convert(self: Tensor, *arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            if not caller.f_globals["__name__"].startswith("torch.optim"):
                seen.append(f"{name} in {caller.f_code.co_name}")
            return real[name](self, *arguments, **options)

        return convert

    with pytest.MonkeyPatch.context() as patch:
        for name in CONVERSIONS:
            patch.setattr(Tensor, name, counting(name))
        yield seen


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize(("resident", "precision"), [(True, "float32"), (False, "float32"), (True, "bf16")])
def test_a_step_waits_for_the_device_once(name: str, resident: bool, precision: str) -> None:
    trainer = make_trainer(small(TRIALS[name], precision=precision), steps=20)
    if not resident:
        trainer._resident = None
    trainer.step()
    with conversions() as seen:
        for _ in range(3):
            trainer.step()
    assert seen == ["__bool__ in look"] * 3


def test_the_count_of_conversions_would_notice() -> None:
    with conversions() as seen:
        check_finite(torch.ones(2), "values")
        float(torch.ones(()))
        if torch.ones(()):
            torch.ones(2).tolist()
    assert seen == [
        "item in check_finite",
        *(f"{name} in test_the_count_of_conversions_would_notice" for name in ("__float__", "__bool__", "tolist")),
    ]


def test_a_later_look_raises_the_error_of_the_first_check_that_failed() -> None:
    with looking_later() as checks:
        check_finite(torch.ones(2, 3), "fine")
        check_finite(torch.full((2,), 3e38), "large, but finite")
        check_finite(torch.tensor([[0.0, torch.nan]]), "first")
        check_finite(torch.tensor([torch.inf]), "second")
    with pytest.raises(ValueError, match="first has NaN or infinite values in dimension 1"):
        checks.look()
    checks.look()  # what was looked at is done with
    with pytest.raises(ValueError, match="actions has NaN"), looking_later():
        check_finite(torch.tensor([torch.nan]), "actions")
        raise RuntimeError("what follows from the NaN")
    with pytest.raises(RuntimeError, match="has another cause"), looking_later():
        check_finite(torch.ones(1), "actions")
        raise RuntimeError("has another cause")


@pytest.mark.parametrize("name", ["ibc", "correct-mas-maxent"])
def test_weights_that_are_not_finite_are_named_by_the_energies(name: str) -> None:
    trainer = make_trainer(small(TRIALS[name]))
    with torch.no_grad():
        next(iter(trainer.learner.energy.parameters()))[0, 0] = torch.nan
    before = {key: value.clone() for key, value in trainer.learner.state_dict().items()}
    with pytest.raises(ValueError, match="NaN"):
        trainer.step()
    after = trainer.learner.state_dict()
    assert all(torch.equal(before[key].nan_to_num(7), after[key].nan_to_num(7)) for key in before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", [name for name in TRIALS if name != "nearest"])  # which has no weights
def test_a_step_changes_weights_on_every_device(name: str, precision: str, device: str) -> None:
    data = particle()
    if reason := why_not_half(torch.device(device)) if precision == "bf16" else "":
        pytest.skip(reason)
    trial = small(TRIALS[name], precision=precision)
    trainer = Trainer(trial, data, data, device=device, limits=(0.0, 1.0), steps=10)
    before = [weight.detach().clone() for weight in trainer.learner.parameters()]
    for _ in range(2):
        log = trainer.step()
    assert all(value.device.type == device and bool(torch.isfinite(value)) for value in log.values())
    after = list(trainer.learner.parameters())
    assert all(weight.device.type == device for weight in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


ENERGIES = [
    MLP(),
    MLP(spectral_norm=True),
    Residual(),
    MixtureDensity(),
    Regression(),
    TwoStep(),
    Nearest(9),
    Tilted(),
    NoiseConditional(),
    NoiseConditionalTilt(),
]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("settings", ENERGIES, ids=lambda settings: type(settings).__name__)
def test_energies_know_their_shapes_without_numbers(settings: Any, half: bool) -> None:
    """On the device `meta` there are shapes and no memory: what asks for a number fails, and so does what makes a
    tensor on another device. As whole losses do, energies and slopes come in float32, whatever layers multiply in."""
    with torch.device("meta"):
        energy = settings.build(Specification.flat(5, 3))
        obs, actions = torch.empty(4, 5), torch.empty(4, 7, 3)
    assert all(weight.is_meta for weight in energy.parameters())
    with reducing(half):
        energies, gradients = energy.energies_and_gradients(energy.encode(obs), actions)
        alone = energy(obs, actions)
    assert energies.is_meta and energies.shape == alone.shape == (4, 7)
    assert gradients.is_meta and gradients.shape == (4, 7, 3)
    assert energies.dtype == alone.dtype == gradients.dtype == torch.float32
