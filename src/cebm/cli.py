"""The command line: arguments and calls, no logic. Torch and the rest are imported by the command that needs them,
so that `cebm --help` is quick.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

import cebm

SamplerName = Literal[
    "langevin-ibc",
    "langevin-correct",
    "langevin-correct-clipped",
    "mala",
    "derivative-free",
    "derivative-free-autoregressive",
]


@dataclass(frozen=True)
class Certify:
    """Does this sampler sample what it claims? Runs samplers on densities that are known exactly and compares."""

    sampler: tyro.conf.UseAppendAction[tuple[tuple[SamplerName, ...], ...]] = ()
    """Samplers to certify, all of them by default."""
    json: bool = False
    """Print one JSON object per line instead of the table."""
    out: Path | None = None
    """Folder for certificate.jsonl and langevin.png, the paper's figure (needs the extra `plot`)."""
    seed: int = 0
    """Of the random numbers: the same seed gives the same table."""

    def __call__(self) -> None:
        from cebm import certificate

        certificate.report(sum(self.sampler, ()), self.seed, self.json, self.out)


@dataclass(frozen=True)
class Bench:
    """How fast? Rates stand beside that of plain torch.mm, measured in turns with it."""

    what: tyro.conf.Positional[Literal["chain", "train", "growth", "act", "env", "all"]] = "all"
    """The paper's Langevin chain, whole training steps, how their time grows, single actions, the particle task."""
    json: bool = False
    """Print one JSON object per line, one line per row."""
    threads: tuple[int, ...] = (1, 2)
    """Thread counts to measure; growth takes the first."""
    repeats: int = 25
    """Measurements per row, fewer where one takes long; of actions 12 times as many."""

    def __call__(self) -> None:
        bench = from_checkout("benchmarks.bench").bench
        for row in bench(self.what, self.threads, self.repeats):
            print(row.to_json() if self.json else row, flush=True)


@dataclass(frozen=True)
class Demos:
    """Writes demonstrations of a scripted expert."""

    task: tyro.conf.Positional[Literal["particle"]]
    """The task: two goals to visit, one after the other."""
    out: Path
    """An `.npz` file, or a folder of memory-mapped arrays."""
    dim: int = 2
    """Dimensions of the space."""
    episodes: int = 300
    """Episodes to demonstrate."""
    seed: int = 0
    """Decides the episodes."""
    steps: int = 50
    """Control steps in an episode."""
    wait: int = 0
    """Control steps that the expert stays at its first goal."""
    random_order: bool = False
    """The expert visits the goals in a random order."""
    hide_velocity: bool = False
    """Leave the velocity out of the observation."""

    def __call__(self) -> None:
        from cebm.envs.particle import ParticleTask, collect_particle

        settings = {name: getattr(self, name) for name in ("dim", "steps", "wait", "random_order", "hide_velocity")}
        demonstrations = collect_particle(ParticleTask(**settings), self.episodes, self.seed)
        demonstrations.save(self.out)
        print(f"{demonstrations.summary()}\n{self.out}")


@dataclass(frozen=True)
class Train:
    """Trains a recipe: `cebm train TRIAL …`, or `cebm train --resume RUN`. `cebm train --help` lists the trials,
    `cebm train TRIAL --help` every setting."""


@dataclass(frozen=True)
class Eval:
    """Rolls a trained policy out: success rate with its interval, distances, time per action."""

    run: tyro.conf.Positional[Path]
    """A run directory (its best policy is taken) or a policy directory."""
    env: str | None = None
    """A registered Gymnasium environment; by default the run's own particle task."""
    episodes: int = 100
    """Episodes to roll out."""
    seed: int | None = None
    """Of the episodes; by default the test seed, which no checkpoint was chosen by."""
    candidates: int | None = None
    """Candidates of the search; by default the policy's own."""
    budget_ms: float | None = None
    """As many candidates as fit this many milliseconds per call."""
    warm_start: bool = False
    """Start each search at the previous action."""
    last: bool = False
    """The last policy of the run instead of the best one."""
    threads: int | None = None
    """Threads for torch."""
    device: str = "cpu"
    """Where to act."""
    json: bool = False
    """Print the summary as one JSON object."""

    def __call__(self) -> None:
        from cebm.commands import evaluate_run

        evaluate_run(self)


@dataclass(frozen=True)
class Report:
    """One self-contained page about one or several runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    out: Path = Path("report.html")
    """The page to write."""

    def __call__(self) -> None:
        from cebm.commands import report_runs

        report_runs(list(self.runs), self.out)


@dataclass(frozen=True)
class Reproduce:
    """Measures the paper's claims and writes a ledger with a verdict for each. Goes on where it was stopped."""

    claims: tyro.conf.Positional[tuple[str, ...]] = ()
    """Claims by number or name; all of them by default."""
    scale: Literal["smoke", "paper"] = "paper"
    """'paper' is the evidence and takes hours; 'smoke' tries the code."""
    seeds: int | None = None
    """Seeds of every claim; by default the claim's own number."""
    workers: int | None = None
    """Processes of one thread each; by default one per core."""
    out: Path = Path("results")
    """Folder of the records and figures; the ledger is written beside it, with the suffix .md."""
    runs: Path = Path("runs/reproduce")
    """Folder of the run directories."""
    reference: Path | None = None
    """Folder of the reference curves that the claim `validation` compares with; by default ../shared/reference, seen
    from the repository, where it exists. Without them that comparison is skipped."""
    report: bool = False
    """Run nothing: write one HTML page beside the folder, from the records that are there."""

    def __call__(self) -> None:
        from_checkout("reproduction.command").reproduce_claims(self)


def from_checkout(name: str) -> Any:
    """Import a module of the packages that stand beside the library in its repository: `reproduction`, `benchmarks`.
    The repository's root stays on `sys.path`, which worker processes inherit."""
    root, package = Path(cebm.__file__).resolve().parents[2], name.partition(".")[0]
    if not (root / package / "__init__.py").is_file():
        raise ImportError(
            f"this command needs a checkout of cebm's repository, installed by `pip install -e .`: "
            f"there is no {package} in {root}"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(name)


COMMANDS: dict[str, Callable[..., Any]] = {
    "demos": Demos,
    "train": Train,
    "eval": Eval,
    "report": Report,
    "reproduce": Reproduce,
    "certify": Certify,
    "bench": Bench,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. A user's mistake (a bad value, a folder that cannot be written, a missing extra) ends in one
    line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"cebm {cebm.__version__}")
        return
    try:
        if arguments[:1] == ["train"]:  # its settings are those of the trials, which need torch
            from cebm.commands import train_command

            command: Callable[[], None] = train_command(arguments[1:])
        else:
            command = tyro.extras.subcommand_cli_from_dict(
                COMMANDS,
                prog="cebm",
                description="Conditional energy-based models for implicit policies. --version prints the version.",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        command()
    except BrokenPipeError:  # the reader has enough, as in `cebm certify --json | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        print(f"cebm: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        from cebm.training import Interrupted, TrainingError

        if not isinstance(error, Interrupted | TrainingError):
            raise
        print(f"cebm: {error}", file=sys.stderr)
        sys.exit(130 if isinstance(error, Interrupted) else 1)
