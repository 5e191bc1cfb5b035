"""The command line: arguments and calls, no logic. Torch and the rest are imported by the command that needs them,
so that `cebm --help` is quick.
"""

import importlib
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import cebm
from cebm.threads import wait_shortly

SamplerName = Literal[
    "langevin-ibc",
    "langevin-correct",
    "langevin-correct-clipped",
    "mala",
    "hmc",
    "tempering",
    "derivative-free",
    "derivative-free-autoregressive",
]
With = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="with")]


@dataclass(frozen=True)
class Certify:
    """Does this sampler sample what it claims? Runs samplers on densities that are known exactly and compares."""

    sampler: tyro.conf.UseAppendAction[tuple[tuple[SamplerName | str, ...], ...]] = ()
    """Samplers to certify: by name, or your own as FILE.py:NAME or MODULE:NAME. By default all that have a name."""
    json: bool = False
    """Print one JSON object per line instead of the table."""
    out: Path | None = None
    """Folder for certificate.jsonl and langevin.png, the paper's figure (needs the extra `plot`)."""
    seed: int = 0
    """Of the random numbers: the same seed gives the same table."""

    def __call__(self) -> None:
        from cebm.commands import certify_samplers

        certify_samplers(self)


@dataclass(frozen=True)
class Bench:
    """How fast? Rates stand beside that of plain torch.mm, measured in turns with it."""

    what: tyro.conf.Positional[Literal["chain", "train", "growth", "act", "env", "deploy", "all"]] = "all"
    """The paper's Langevin chain, whole training steps, how their time grows, single actions, the particle task; and
    `deploy`, which is not part of `all`: single actions of exported policies."""
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
    """Writes demonstrations of a task's expert, or those that others recorded in it."""

    task: tyro.conf.Positional[str]
    """The task: particle (two goals to visit, one after the other), forks (three rows of obstacles, 24 ways),
    push-t (or push-t:state, push-t:pixels), metaworld:NAME (or metaworld:NAME:mixed, NAME:left, NAME:right), or your
    own as FILE.py:NAME or MODULE:NAME."""
    out: Path
    """An `.npz` file, or a folder of memory-mapped arrays."""
    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Convert recordings of others instead of asking an expert. For push-t: the human demonstrations of Chi et al., a
    Zarr directory or an `.npz` with the same arrays."""
    episodes: int = 300
    """Episodes to demonstrate."""
    seed: int = 0
    """Decides the episodes."""
    dim: int | None = None
    """Particle task: dimensions of the space; by default 2."""
    steps: int | None = None
    """Particle task: control steps in an episode; by default 50."""
    wait: int | None = None
    """Particle task: control steps for which the expert stays at its first goal; by default 0."""
    random_order: bool = False
    """Particle task: the expert visits the goals in a random order."""
    hide_velocity: bool = False
    """Particle task: leave the velocity out of the observation."""

    def __call__(self) -> None:
        from cebm.commands import write_demonstrations

        write_demonstrations(self)


@dataclass(frozen=True)
class Data:
    """Looks into demonstrations of any format (inspect), or writes them in cebm's own (convert). docs/data.md."""

    what: tyro.conf.Positional[Literal["inspect", "convert"]]
    """inspect: episodes, lengths, ranges, and what looks wrong. convert: reads PATH and writes OUT."""
    path: tyro.conf.Positional[Path]
    """A file or folder; its content tells the format."""
    out: tyro.conf.Positional[Path | None] = None
    """Of convert: an `.npz` file, or a folder of memory-mapped arrays."""
    data_obs: tuple[str, ...] = ()
    """Arrays or columns that are observations: names, patterns, or NAME=PATTERN; by default the usual."""
    data_action: tuple[str, ...] = ()
    """Those that are actions."""
    data_episodes: tuple[str, ...] = ()
    """What tells where episodes end: ends, lengths, an id per step, flags of the last step; or `one`, `each`."""
    json: bool = False
    """Print what inspect finds as one JSON object."""

    def __call__(self) -> None:
        from cebm.data_commands import data_command

        data_command(self)


@dataclass(frozen=True)
class Train:
    """Trains a recipe: `cebm train TRIAL …`, `cebm train FILE.py:NAME …`, or `cebm train --resume RUN`. `cebm train
    --help` lists the trials, `cebm train TRIAL --help` every setting."""


@dataclass(frozen=True)
class Eval:
    """Rolls a trained policy out: success rate with its interval, or the task's own metric, and the time per action."""

    run: tyro.conf.Positional[Path]
    """A run directory (its best policy is taken) or a policy directory."""
    seeds: tuple[Path, ...] = ()
    """Run directories of other training seeds, for --protocol; after the option, not before."""
    protocol: Literal["ours", "diffusion-policy", "lerobot"] | None = None
    """Measure as published: 200 episodes of the last checkpoint (ours: 5 training seeds); the best and the mean of the
    last ten checkpoints in 50 episodes (Diffusion Policy: 3 seeds); 500 episodes of one checkpoint (lerobot)."""
    task: str | None = None
    """Where to roll out: particle, the id of a Gymnasium environment, FILE.py:NAME or MODULE:NAME. By default the
    run's own task."""
    env: str | None = None
    """The id of a Gymnasium environment, such as Pendulum-v1 or PACKAGE:ID; the same as --task with an id."""
    metric: str | None = None
    """The column to print with its interval; by default the task's own."""
    episodes: int = 100
    """Episodes to roll out."""
    max_steps: int | None = None
    """Step limit of an episode; by default the task's own."""
    seed: int | None = None
    """Of the episodes; by default the test seed, which no checkpoint was chosen by."""
    candidates: int | None = None
    """Candidates of the search; by default the policy's own."""
    budget_ms: float | None = None
    """As many candidates as fit this many milliseconds per call."""
    execute: int | None = None
    """Actions to play of those that the policy gives at once; by default as in the run's own evaluations, or all."""
    warm_start: bool = False
    """Start each search at the previous action."""
    last: bool = False
    """The last policy of the run instead of the best one."""
    without_energy: bool = False
    """Play the same episodes a second time with the energy ignored, and print and keep the paired difference."""
    workers: int = 1
    """Processes that step the environments, while the policy acts on all episodes at once; the result is the same."""
    csv: Path | None = None
    """A file for a row per episode; that of a run is evaluation.csv beside its metrics, too."""
    video: Path | None = None
    """A folder for films of episodes (MP4 with the package av, else GIF; needs the extra `video`)."""
    film: tuple[int, ...] = (0, 1, 2)
    """The episodes to film, by their numbers; counts with --video."""
    threads: int | None = None
    """Threads for torch."""
    device: str = "cpu"
    """Where to act."""
    json: bool = False
    """Print the summary as one JSON object."""
    with_: With = ()
    """A file or module of your own pieces that the run is made of; may be repeated."""

    def __call__(self) -> None:
        from cebm.commands import evaluate_run

        evaluate_run(self)


@dataclass(frozen=True)
class Export:
    """Writes a trained policy to one file that acts without cebm: its whole search, with a fixed effort."""

    run: tyro.conf.Positional[Path]
    """A run directory (its best policy is taken) or a policy directory."""
    out: Path
    """The file to write: .onnx for ONNX, .pt2 for the others."""
    format: Literal["onnx", "torch", "aoti"] = "onnx"
    """'onnx': for onnxruntime (needs the extra `onnx`). 'torch': a program of torch.export. 'aoti': compiled for this
    machine, for C++ without Python."""
    candidates: int | None = None
    """Candidates of the search; by default the policy's own."""
    steps: int | None = None
    """Steps of the sampler; by default the policy's own."""
    last: bool = False
    """The last policy of the run instead of the best one."""
    with_: With = ()
    """A file or module of your own pieces that the run is made of; may be repeated."""

    def __call__(self) -> None:
        from cebm.commands import export_run

        export_run(self)


@dataclass(frozen=True)
class Serve:
    """Serves a policy to clients over websockets, in openpi's format; docs/serving.md tells how. SIGTERM ends it after
    the requests under way, SIGHUP reads the policy again."""

    policy: tyro.conf.Positional[Path]
    """A run directory (its best policy is taken) or a policy directory."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a token."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    token_file: Path | None = None
    """A file with the token that clients must send."""
    tls_certificate: Path | None = None
    """File of the certificate with its chain, for TLS."""
    tls_key: Path | None = None
    """File of the certificate's key."""
    watch: float = 0.0
    """Look every so many seconds whether the policy on disk has changed, and take the new one. 0: only by SIGHUP."""
    connections: int = 128
    """Clients at a time."""
    rate: float = 2000.0
    """Requests per second and client."""
    hang: float = 10.0
    """Seconds after which a batch counts as hung, and its worker is replaced."""
    threads: int | None = None
    """Threads for torch."""
    device: str = "cpu"
    """Where to act."""
    verbose: bool = False
    """Log every refused request, too."""
    with_: With = ()
    """A file or module of your own pieces that the policy is made of; may be repeated."""

    def __call__(self) -> None:
        from cebm.serving.command import serve_policy

        serve_policy(self)


@dataclass(frozen=True)
class Studio:
    """Opens the studio in the browser: energy landscapes, searches, observations to drag; docs/studio.md. Only this
    machine can reach it, by an address with a token; Ctrl-C ends it."""

    policies: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories (the best policy of each is taken; a run may be under way) or policy directories."""
    data: Path | None = None
    """Demonstrations whose observations to step through; by default the run's own."""
    task: str | None = None
    """The task, which says where things are in an observation: particle, a shipped one, FILE.py:NAME or MODULE:NAME.
    By default the run's own."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    no_open: bool = False
    """Print the address and open no browser."""
    threads: int | None = None
    """Threads for torch."""
    with_: With = ()
    """A file or module of your own pieces that the policies are made of; may be repeated."""

    def __call__(self) -> None:
        from cebm.studio.command import open_studio

        open_studio(self)


@dataclass(frozen=True)
class Report:
    """One self-contained page about one or several runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    out: Path = Path("report.html")
    """The page to write."""
    with_: With = ()
    """A file or module of your own pieces that the runs are made of; may be repeated."""

    def __call__(self) -> None:
        from cebm.commands import report_runs

        report_runs(list(self.runs), self.out, self.with_)


@dataclass(frozen=True, kw_only=True)
class OnEngine:
    """Where many runs run."""

    engine: Literal["local", "submitit", "ray"] = "local"
    """Processes of this machine; submitit, for SLURM; Ray."""
    workers: int | None = None
    """Runs at a time; by default one per core."""
    threads: int = 1
    """Threads of each run."""
    retries: int = 2
    """How often a run that failed is tried again."""
    address: str | None = None
    """Of a Ray cluster."""
    cluster: str | None = None
    """For submitit: slurm, local or debug; by default slurm where there is one."""
    option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """For submitit, as NAME=VALUE: slurm_partition=gpu, timeout_min=600; may be repeated."""


@dataclass(frozen=True, kw_only=True)
class Sweep(OnEngine):
    """Runs a study: many runs, each resumable, on an engine. Finished runs are not repeated."""

    study: tyro.conf.Positional[str]
    """A Python file or module, with the name of the study in it unless that is `study`: FILE.py, FILE.py:NAME."""
    out: Path = Path("runs/study")
    """Folder of the runs, their records, and results.csv, results.parquet and results.html."""
    metric: str | None = None
    """The number that the page is about, such as test.success; by default the task's own."""
    episodes: int = 200
    """Held-out episodes that measure the best policy of each run; 0: none."""
    dry_run: bool = False
    """Run nothing: say how many runs there are, and by a short calibration what they cost."""
    with_: With = ()
    """A file or module of your own pieces that the runs are made of; may be repeated."""

    def __call__(self) -> None:
        from cebm.commands import sweep_study

        sweep_study(self)


@dataclass(frozen=True, kw_only=True)
class Reproduce(OnEngine):
    """Measures the paper's claims and writes a ledger with a verdict for each. Goes on where it was stopped."""

    claims: tyro.conf.Positional[tuple[str, ...]] = ()
    """Claims by number or name; all of them by default."""
    scale: Literal["smoke", "paper"] = "paper"
    """'paper' is the evidence and takes hours; 'smoke' tries the code."""
    seeds: int | None = None
    """Seeds of every claim; by default the claim's own number."""
    out: Path = Path("results")
    """Folder of the records and figures; the ledger is written beside it, with the suffix .md."""
    runs: Path = Path("runs/reproduce")
    """Folder of the run directories."""
    reference: Path | None = None
    """Folder of the reference curves that the claim `validation` compares with; by default ../shared/reference, seen
    from the repository, where it exists. Without them that comparison is skipped."""
    report: bool = False
    """Run nothing: write one HTML page beside the folder, from the records that are there."""
    judge: bool = False
    """Run nothing: judge the claims anew by the records that are there, and write the ledger."""

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
    "data": Data,
    "train": Train,
    "eval": Eval,
    "export": Export,
    "serve": Serve,
    "studio": Studio,
    "report": Report,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "certify": Certify,
    "bench": Bench,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. A user's mistake (a bad value, a folder that cannot be written, a missing extra) ends in one
    line on stderr and exit code 2; a training that cannot go on in exit code 1. Other errors keep their traceback."""
    try:
        _main(arguments)
    except BaseException:
        if _is_helper():  # torchrun ends all processes when one fails: the first may still have to say why
            time.sleep(3)
        raise


def _main(arguments: Sequence[str] | None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"cebm {cebm.__version__}")
        return
    wait_shortly(os.environ)  # before torch is imported
    if os.environ.get("NO_COLOR"):  # rich would still write bold and cursor codes, and tyro everything
        os.environ["TERM"] = "dumb"
    try:
        _parsed(arguments)()
    except BrokenPipeError:  # the reader has enough, as in `cebm certify --json | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:
        code = _exit_code(error)
        if code is None:
            raise
        if not _is_helper():
            print(f"cebm: {_in_one_line(error)}", file=sys.stderr)
        sys.exit(code)


def _is_helper() -> bool:
    """Whether this is a process of torchrun's other than the first, which speaks for all of them."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def _parsed(arguments: list[str]) -> Callable[[], None]:
    """The command; a helper says nothing about a wrong option."""
    if not _is_helper():
        return _command(arguments)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return _command(arguments)


def _command(arguments: list[str]) -> Callable[[], None]:
    if arguments[:1] == ["train"]:  # its settings are those of the trials, which need torch
        from cebm.commands import train_command

        return train_command(arguments[1:])
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="cebm",
        description="Conditional energy-based models for implicit policies. --version prints the version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _exit_code(error: Exception) -> int | None:
    """2 for a user's mistake, 1 and 130 for a training that failed or was interrupted; None where nobody knows."""
    if not isinstance(error, RuntimeError):
        broken = isinstance(error, ImportError) and (error.name or "").startswith("cebm")  # our mistake
        return None if broken else 2
    from cebm.distributed import GroupError
    from cebm.engines import TaskError
    from cebm.runs import Interrupted, TrainingError
    from cebm.storage import LockedError

    codes = {Interrupted: 130, TrainingError: 1, GroupError: 1, TaskError: 1, LockedError: 2}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)


def _in_one_line(error: Exception) -> str:
    """The message; for an error of the user's own code also the place, which the missing traceback would have told."""
    message = " ".join(str(error).split()) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    paths = sysconfig.get_paths()
    here = Path(cebm.__file__).parent
    beside = tuple(str(here.parents[1] / name) for name in ("reproduction", "benchmarks"))  # of a checkout
    ours = (str(here), *beside, *(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")))
    last = frames[-1].filename if frames else "<none>"
    if last.startswith("<") or str(Path(last).resolve()).startswith(ours) or last.startswith(ours):
        return message
    return f"{message} ({last}, line {frames[-1].lineno})"
