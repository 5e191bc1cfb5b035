"""Does an exported file act as its policy? `python -m benchmarks.parity [--kinds …] [--formats …] [--json]`.

Each kind of policy is trained for 300 steps on the particle (columns of every kind on drawn numbers), exported, and fed
1,000 observations with the numbers that `policy.act` drew. Counted are the rows that differ by more than 1e-5, and how
many of them are ties: rounding decides between two candidates whose energies agree within 1e-4. Beside the formats
stands "float64": the same policy in double precision, which tells how exact `policy.act` is itself; and "nudged": that
one beside itself with its observations and random numbers changed by half a unit of float32's last digit. Where this
alone moves an action by more than 1e-5, no computation in float32 can be exact, however it is written.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

import cebm
from cebm import HMC, MALA, MLP, DerivativeFree, EnergyPolicy, Langevin, MixtureDensity, Part, Search, Trial, vary
from cebm.denoising import DenoisingScore
from cebm.energies import NoiseConditional, NoiseConditionalTilt, Residual
from cebm.export import Contract, Format, contract_of
from cebm.exported import ExportedPolicy, load_exported
from cebm.randomness import Recorder, Slices
from cebm.recipes import TRIALS
from cebm.samplers import Tempering
from cebm.tasks import ParticleTask, collect_particle
from cebm.trainer import Trainer
from cebm.units import Angle, Category, Quaternion, Relative

TOLERANCE, OBSERVATIONS, STEPS = 1e-5, 1000, 300
FORMATS = (*get_args(Format), "float64", "nudged")
NUDGE = 2.0**-24
"""Half a unit of float32's last digit, relative."""

SMALL_LEVELS = NoiseConditional(width=32, encoder_width=32)


def trial_of(name: str, **settings: Any) -> Trial:
    """A trial with a small network."""
    trial = TRIALS[name]
    widths = ("tilt.width", "base.width") if hasattr(trial.energy, "tilt") else ("width",)
    return replace(trial, **{"energy": vary(trial.energy, **dict.fromkeys(widths, 32)), **settings})


KINDS: dict[str, Trial] = {
    "steady": trial_of("steady"),
    "steady in chunks": trial_of("steady", inputs=replace(TRIALS["steady"].inputs, history=2, horizon=3)),
    "relative, with an angle": trial_of(
        "steady",
        inputs=replace(TRIALS["steady"].inputs, horizon=2, relative=Relative((0, 1), (0, 1)), obs_kinds=Angle(2)),
    ),
    "ibc": trial_of("ibc", acting=Search(candidates=16)),
    "correct": trial_of("correct", acting=Search(Langevin("correct", noise=1.0), 16)),
    "MALA": trial_of("ibc", acting=Search(MALA(steps=8, adapt=4), 16)),
    "HMC": trial_of("ibc", acting=Search(HMC(steps=4, adapt=0), 8)),
    "HMC that adapts": trial_of("ibc", acting=Search(HMC(steps=6, adapt=4, longest=4, step_size=0.05), 8)),
    "tempering": trial_of("ibc", acting=Search(Tempering(MALA(adapt=3), steps=6, levels=3), 8)),
    "derivative-free": trial_of("dfo", acting=Search(DerivativeFree(), 16)),
    "autoregressive": trial_of("dfo", acting=Search(DerivativeFree(autoregressive=True), 16)),
    "kept": trial_of("ibc", acting=Search(Langevin("ibc", noise=0.01), 16, keep=4)),
    "corrected": trial_of("in-batch-corrected", acting=Search(candidates=16)),
    "joint": trial_of("joint-replay", acting=Search(candidates=16)),
    "annealed": trial_of("annealed"),
    "annealed, with a first look": vary(trial_of("annealed"), look=4, candidates=12),
    "annealed, near the last action": vary(trial_of("annealed"), choice="softmax", closeness=1.0),
    "levels of a density": replace(
        trial_of("annealed"), energy=NoiseConditionalTilt(SMALL_LEVELS, MixtureDensity(32)), objective=DenoisingScore()
    ),
    "residual": replace(trial_of("ibc", acting=Search(candidates=16)), energy=Residual(32)),
    "spectral norm": trial_of("ibc", acting=Search(candidates=16), energy=MLP(32, spectral_norm=True)),
    "columns of every kind": trial_of(
        "steady",
        inputs=replace(
            TRIALS["steady"].inputs,
            history=2,
            horizon=2,
            obs_kinds=(Angle(0), Quaternion("1:5"), Category(5)),
            action_kinds=(Angle(0), Quaternion("1:5"), Category(5)),
            relative=Relative((6,), (6,)),
            obs_scaling="robust",
        ),
    ),
    "nearest": TRIALS["nearest"],
    "two-step": trial_of("two-step"),
    "mdn": trial_of("mdn"),
    "mse": trial_of("mse"),
}


@cache
def material() -> tuple[Any, Any]:
    return collect_particle(ParticleTask(), 30, 0), collect_particle(ParticleTask(), 5, 7)


@cache
def columns_of_every_kind() -> cebm.Demonstrations:
    """An angle, a quaternion, a class, a position and two plain columns; the actions follow them, and one never
    changes. The observation's parts have names."""
    source = torch.Generator().manual_seed(5)
    plain = torch.rand(1000, 4, generator=source)
    turn = torch.randn(1000, 4, generator=source)
    turn = turn / turn.norm(dim=1, keepdim=True)
    obs = torch.cat([6 * plain[:, :1], turn, (3 * plain[:, 1:2]).floor(), 10 * plain[:, 2:]], 1)
    near = obs[:, :7] + torch.tensor([0.1, 0, 0, 0, 0, 0, 0.5])
    actions = torch.cat([near, torch.full((1000, 1), 0.25)], 1)
    parts = [Part("joint", (1,)), Part("pose", (5,)), Part("place", (2,), ("x", "y"))]
    return cebm.Demonstrations.from_arrays(obs.numpy(), actions.numpy(), np.arange(50, 1001, 50), parts=parts)


@cache
def policy_of(kind: str, steps: int = 30) -> EnergyPolicy:
    """A policy of that kind, trained for a moment."""
    if kind == "columns of every kind":
        trainer = Trainer(KINDS[kind], columns_of_every_kind(), columns_of_every_kind(), 3, steps=steps)
    else:
        trainer = Trainer(KINDS[kind], *material(), 3, limits=(0.0, 1.0), steps=steps)
    for _ in range(steps):
        trainer.step()
    return trainer.policy()


def observations(policy: EnergyPolicy, count: int) -> np.ndarray:
    """As the task gives them."""
    obs = columns_of_every_kind().obs if policy.columns[0] == 8 and policy.columns[1] == 8 else material()[0].obs
    return np.tile(obs[:count], (1, policy.history)).astype(str(policy.act_box.centre.dtype).removeprefix("torch."))


def in_double_precision(policy: EnergyPolicy) -> EnergyPolicy:
    """The same weights and units in float64."""
    names = ("obs_box", "act_box", "low", "high", "data_energies", "seen")
    values: dict[str, Any] = {name: getattr(policy, name) for name in names}
    doubled: dict[str, Any] = {name: v if v is None else v.to(torch.float64) for name, v in values.items()}
    return replace(policy, energy=copy.deepcopy(policy.energy).double(), **doubled)


def given(recorder: Recorder, contract: Contract, batch: int) -> dict[str, torch.Tensor]:
    """What was drawn, as inputs of the file."""
    parts: dict[str, list[torch.Tensor]] = {}
    for (kind, numbers), draw in zip(recorder.drawn, contract.draws, strict=True):
        if kind != draw.kind:
            raise RuntimeError(f"the policy drew {kind} numbers where the file takes {draw.kind} ones")
        rows = batch if draw.per_row and len(numbers) > 1 else 1
        parts.setdefault(kind, []).append(numbers.reshape(rows, -1).expand(batch, -1))
    return {kind: torch.cat(each, 1) for kind, each in parts.items()}


def difference(policy: EnergyPolicy, exported: ExportedPolicy, obs: np.ndarray, generator: torch.Generator) -> float:
    """Largest difference of two actions that were made of the same numbers."""
    worst = 0.0
    for part in np.array_split(obs, max(1, len(obs) // 100)):
        recorder = Recorder(generator)
        wanted = policy.act(part, generator=recorder)
        found = exported.act_with(torch.from_numpy(part), given(recorder, exported.contract, len(part)))
        worst = max(worst, float(np.abs(found.numpy() - wanted).max()))
    return worst


def energy_of(policy: EnergyPolicy, obs: np.ndarray, actions: torch.Tensor) -> torch.Tensor:
    """E of actions in the user's units."""
    rows = policy.obs_box.normalise(torch.from_numpy(obs))
    with torch.no_grad():
        return policy.energy(rows, policy.act_box.normalise(actions).unsqueeze(1))[:, 0]


@dataclass(frozen=True)
class Parity:
    """How far a format's actions are from those of `policy.act`, in the units of the actions."""

    kind: str
    format: str
    rows: int
    """Observations."""
    largest: float
    """Largest difference of an action's column."""
    beyond: int
    """Observations with a difference of more than 1e-5."""
    largest_else: float
    """Largest difference of all others."""
    ties: int
    """Of those beyond, the ones whose two actions have the same energy, within 1e-4."""

    def line(self) -> str:
        """In words."""
        return (
            f"{self.kind}, {self.format}: largest difference {self.largest:.1e}, {self.beyond} of {self.rows} rows "
            f"beyond 1e-5 ({self.ties} ties), the others up to {self.largest_else:.1e}"
        )


Again = Callable[[np.ndarray, Recorder], torch.Tensor]
"""Acts once more, by the numbers that were recorded."""


def by_file(policy: EnergyPolicy, format: Format, folder: Path) -> Again:
    """By an exported file."""
    path = folder / f"policy.{'onnx' if format == 'onnx' else 'pt2'}"
    policy.export(path, format)
    exported = load_exported(path)
    return lambda obs, drawn: exported.act_with(torch.from_numpy(obs), given(drawn, exported.contract, len(obs)))


def in_float64(policy: EnergyPolicy, nudge: torch.Generator | None = None) -> Again:
    """By the policy itself, in float64: how exact `policy.act` is. With a generator its inputs are nudged."""
    contract, doubled = contract_of(policy), in_double_precision(policy)

    def nudged(values: torch.Tensor) -> torch.Tensor:
        values = values.double()
        if nudge is None:
            return values
        return values * (1 + NUDGE * (1 - 2 * torch.randint(2, values.shape, generator=nudge)))

    def act(obs: np.ndarray, drawn: Recorder) -> torch.Tensor:
        numbers = given(drawn, contract, len(obs))
        normal, uniform = (nudged(numbers.get(kind, torch.empty(len(obs), 0))) for kind in ("normal", "uniform"))
        again = Slices(normal, uniform, [draw.per_row for draw in contract.draws])
        return torch.from_numpy(doubled.act(nudged(torch.from_numpy(obs)).numpy(), generator=again))

    return act


def measured(
    kind: str, format: Literal[Format, "float64", "nudged"], folder: Path, generator: torch.Generator
) -> Parity:
    """Trains, exports and compares."""
    policy, away, ties = policy_of(kind, STEPS), [], 0
    exact = in_float64(policy)
    if format == "nudged":
        again = in_float64(policy, torch.Generator().manual_seed(1))
    else:
        again = exact if format == "float64" else by_file(policy, format, folder)
    for part in np.array_split(observations(policy, OBSERVATIONS), 10):
        recorder = Recorder(generator)
        wanted = torch.from_numpy(policy.act(part, generator=recorder))
        if format == "nudged":
            wanted = exact(part, recorder).to(wanted.dtype)
        found = again(part, recorder).to(wanted.dtype)
        away.append((found - wanted).abs().amax(1))
        far = away[-1] > TOLERANCE
        if bool(far.any()) and policy.units.conversion.plain:
            one, other = (energy_of(policy, part[far.numpy()], each[far]) for each in (found, wanted))
            ties += int(torch.isclose(one, other, rtol=1e-4, atol=1e-4).sum())
    every = torch.cat(away)
    within = every[every <= TOLERANCE]
    beyond = len(every) - len(within)
    return Parity(kind, format, len(every), float(every.max()), beyond, float(within.max()), ties)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line per kind and format."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parsed = parser.parse_args(arguments)
    for kind in parsed.kinds:
        for format in parsed.formats:
            with tempfile.TemporaryDirectory() as folder:
                row = measured(kind, format, Path(folder), torch.Generator().manual_seed(0))
            print(json.dumps(asdict(row)) if parsed.json else row.line(), flush=True)


if __name__ == "__main__":
    main()
