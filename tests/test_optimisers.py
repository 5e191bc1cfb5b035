"""Optimisers: learning rates against their formulas, and an optimiser of one's own."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cebm.demonstrations import Demonstrations
from cebm.energies import MLP
from cebm.negatives import Uniform
from cebm.objectives import InfoNCE
from cebm.optimisers import Adam, Cosine, Decay, Optimiser, RateSchedule, Trapezoid
from cebm.recipes import Trial
from cebm.trainer import Trainer

rates = st.floats(1e-6, 1.0)


@given(rates, st.integers(0, 10**6), st.integers(1, 1000), st.integers(1, 100), st.floats(0.01, 1.0))
def test_decay_multiplies_once_every_so_many_epochs(
    peak: float, step: int, per_epoch: int, epochs: int, factor: float
) -> None:
    rate = Decay(factor, epochs).rate(peak, step, None, per_epoch)
    times = 0
    while (times + 1) * per_epoch * epochs <= step and times < 400:  # by then the rate is far below its start
        times += 1
    if times < 400:
        assert rate == pytest.approx(peak * factor**times, rel=1e-9, abs=1e-300)
    assert 0 <= rate <= peak


def test_the_papers_decay() -> None:
    """0.99 every 100 epochs, here of 7 steps: constant in between."""
    rate = Decay().rate
    assert [rate(1e-3, step, None, 7) for step in (0, 699)] == [1e-3, 1e-3]
    assert [rate(1e-3, step, None, 7) for step in (700, 1399)] == pytest.approx([0.99e-3] * 2)
    assert rate(1e-3, 1400, None, 7) == pytest.approx(1e-3 * 0.99**2)


@given(rates, st.integers(1, 500), st.integers(1, 10_000), st.data())
def test_the_cosine_rises_then_falls(peak: float, warm_up: int, steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, steps))
    rate = Cosine(warm_up).rate(peak, step, steps, 3)
    rise = (step + 1) / warm_up if step + 1 < warm_up else 1.0
    assert rate == pytest.approx(peak * rise * math.cos(math.pi * step / (2 * steps)) ** 2, rel=1e-9, abs=1e-16 * peak)
    assert 0 <= rate <= peak


def test_the_cosine_by_numbers() -> None:
    rate = Cosine(10).rate
    assert [rate(1.0, step, 1000, 3) for step in (0, 4, 500, 750)] == pytest.approx(
        [0.1, 0.5 * 0.5 * (1 + math.cos(0.004 * math.pi)), 0.5, 0.5 * (1 - math.sqrt(0.5))]
    )
    assert rate(1.0, 1000, 1000, 3) == rate(1.0, 2000, 1000, 3) == 0.0, "a run that goes on after its end stands still"
    with pytest.raises(ValueError, match="steps must be given"):
        rate(1.0, 0, None, 3)


def test_adam_is_torchs_with_the_schedule_of_its_settings() -> None:
    settings = Adam(2e-3, Cosine(5), batch_size=7, average=0.5)
    made = settings.make([nn.Parameter(torch.zeros(2))])
    plain = torch.optim.Adam([nn.Parameter(torch.zeros(2))], 2e-3)
    assert isinstance(made, torch.optim.Adam) and made.defaults == plain.defaults
    assert settings.rate(3, 100, 1) == Cosine(5).rate(2e-3, 3, 100, 1)
    assert isinstance(settings, Optimiser) and isinstance(Decay(), RateSchedule) and isinstance(Cosine(), RateSchedule)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Decay(0.0), r"factor must be in \(0, 1\], got 0.0"),
        (lambda: Decay(1.1), "factor must be in"),
        (lambda: Decay(math.nan), "factor must be in"),
        (lambda: Decay(epochs=0), "epochs must be at least 1, got 0"),
        (lambda: Cosine(0), "warm_up must be at least 1, got 0"),
        (lambda: Adam(0.0), "learning_rate must be positive and finite, got 0.0"),
        (lambda: Adam(math.nan), "learning_rate must be positive and finite, got nan"),
        (lambda: Adam(math.inf), "learning_rate must be positive and finite, got inf"),
        (lambda: Adam(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: Adam(average=1.0), r"average must be in \[0, 1\), got 1.0"),
        (lambda: Adam(average=-0.1), "average must be in"),
        (lambda: Adam(schedule="cosine"), "schedule must be an object with a method `rate`, got 'cosine'"),
        (lambda: Adam(schedule=Cosine), "schedule must be an object with a method `rate`, got Cosine"),
    ],
)
def test_bad_settings_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------------------- of one's own


@dataclass(frozen=True)
class Stairs:
    """A user's schedule: the peak in even epochs, a tenth of it in odd ones."""

    def rate(self, peak: float, step: int, steps: int | None, steps_per_epoch: int) -> float:
        return peak if (step // steps_per_epoch) % 2 == 0 else peak / 10


@dataclass(frozen=True)
class Momentum:
    """A user's optimiser: SGD with momentum, at 1/(1 + step)."""

    batch_size: int = 10
    average: float = 0.0
    momentum: float = 0.9
    asked: list[tuple[int, int | None, int]] = field(default_factory=list, compare=False)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 1.0, momentum=self.momentum)

    def rate(self, step: int, steps: int | None, steps_per_epoch: int) -> float:
        self.asked.append((step, steps, steps_per_epoch))
        return 0.05 / (1 + step)


def data(generator: torch.Generator) -> Demonstrations:
    rng = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
    return Demonstrations.from_arrays(rng.uniform(-1, 1, (35, 2)), rng.uniform(-1, 1, (35, 1)), [35])


def test_an_optimiser_of_ones_own_trains(generator: torch.Generator) -> None:
    """It is asked for the rate of every step; the weights move by its rule: v ← μv + g, w ← w − rate·v."""
    mine = Momentum()
    assert isinstance(mine, Optimiser)
    trial = Trial(MLP(8, init="torch"), InfoNCE(Uniform(), 4), optimiser=mine)
    demonstrations = data(generator)
    trainer = Trainer(trial, demonstrations, demonstrations, seed=3, steps=9)
    assert trainer.steps_per_epoch == 3
    weight = trainer.learner.energy.last.weight
    velocity = torch.zeros_like(weight)
    mine.asked.clear()
    for step in range(5):
        before = weight.detach().clone()
        trainer.step()
        velocity = 0.9 * velocity + weight.grad
        torch.testing.assert_close(weight.detach(), before - 0.05 / (1 + step) * velocity)
    assert {asked[0] for asked in mine.asked} == set(range(5))
    assert {asked[1:] for asked in mine.asked} == {(9, 3)}


def test_its_state_is_saved_and_taken_up_again(generator: torch.Generator) -> None:
    trial = Trial(MLP(8, init="torch"), InfoNCE(Uniform(), 4), optimiser=Momentum(average=0.5))
    demonstrations = data(generator)
    whole, half, rest = (Trainer(trial, demonstrations, demonstrations, seed=3, steps=9) for _ in range(3))
    for _ in range(6):
        whole.step()
    for _ in range(3):
        half.step()
    rest.load_state(half.state(), 3)
    for _ in range(3):
        rest.step()
    for name, value in whole.state().items():
        assert torch.equal(value, rest.state()[name]), name


def test_a_schedule_of_ones_own_is_followed(generator: torch.Generator) -> None:
    trial = Trial(MLP(8), InfoNCE(Uniform(), 4), optimiser=Adam(0.01, Stairs(), batch_size=10))
    demonstrations = data(generator)
    trainer = Trainer(trial, demonstrations, demonstrations)
    found = []
    for _ in range(7):
        trainer.step()
        found.append(trainer.optimiser.param_groups[0]["lr"])
    assert found == pytest.approx([0.01] * 3 + [0.001] * 3 + [0.01])


def test_a_cosine_without_the_length_of_the_run_says_so_at_once(generator: torch.Generator) -> None:
    trial = Trial(MLP(8), InfoNCE(Uniform(), 4), optimiser=Adam(schedule=Cosine(), batch_size=10))
    demonstrations = data(generator)
    with pytest.raises(ValueError, match="steps must be given"):
        Trainer(trial, demonstrations, demonstrations)


def test_the_trapezoid_by_numbers() -> None:
    rate = Trapezoid(10, 0.25).rate
    found = [rate(2.0, step, 1000, 3) for step in (0, 4, 9, 500, 750, 875, 1000, 2000)]
    assert found == pytest.approx([0.2, 1.0, 2.0, 2.0, 2.0, 1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="steps must be given"):
        rate(1.0, 0, None, 3)
    for wrong, message in (({"warm_up": 0}, "warm_up"), ({"fall": 0.0}, "fall"), ({"fall": 1.5}, "fall")):
        with pytest.raises(ValueError, match=message):
            Trapezoid(**wrong)


def test_weights_decay_apart_from_the_gradient() -> None:
    """AdamW (Loshchilov & Hutter 2019): without a gradient, w ← (1 − rate · decay) w."""
    weight = nn.Parameter(torch.tensor([2.0, -1.0]))
    optimiser = Adam(0.1, weight_decay=0.5).make([weight])
    weight.grad = torch.zeros(2)
    optimiser.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([1.9, -0.95]))
    with pytest.raises(ValueError, match="weight_decay"):
        Adam(weight_decay=-1.0)
