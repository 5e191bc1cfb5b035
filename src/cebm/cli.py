"""The command line: arguments and calls, no logic. Torch and the rest are imported by the command that needs them,
so that `cebm --help` is quick.
"""

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
    """How fast? `chain` is the paper's Langevin chain beside plain torch.mm, counting its two hidden products."""

    what: tyro.conf.Positional[Literal["chain"]]
    """What to measure."""
    json: bool = False
    """Print one JSON object per line, one line per thread count."""
    threads: tuple[int, ...] = (1, 2)
    """Thread counts to measure."""
    repeats: int = 25
    """Measurements per thread count."""

    def __call__(self) -> None:
        from cebm.bench import bench_chain

        for row in bench_chain(self.threads, self.repeats):
            print(row.to_json() if self.json else row, flush=True)


COMMANDS: dict[str, Callable[..., Any]] = {"certify": Certify, "bench": Bench}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. A user's mistake (a bad value, a folder that cannot be written, a missing extra) ends in one
    line on stderr and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"cebm {cebm.__version__}")
        return
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="cebm",
        description="Conditional energy-based models for implicit policies. `cebm --version` prints the version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        command()
    except BrokenPipeError:  # the reader has enough, as in `cebm certify --json | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        print(f"cebm: {error}", file=sys.stderr)
        sys.exit(2)
