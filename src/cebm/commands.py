"""The commands whose arguments or work need torch; `cli.py` imports this when one of them is called."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro

from cebm.envs.particle import ParticleTask
from cebm.evaluation import TEST_SEED, Evaluation, evaluate
from cebm.policy import load
from cebm.progress import ProgressBar, TensorBoard
from cebm.training import Job, Listener, Outcome, load_job, resume, task_of, train
from cebm.trials import TRIALS, Trial, find_trial

if TYPE_CHECKING:
    from cebm.cli import Eval

DEFAULT_TRIAL = "steady"


@dataclass(frozen=True)
class TrainArguments:
    """Trains a policy and writes a run directory: settings, metrics, checkpoints, the best and the last policy."""

    recipe: Annotated[Trial, tyro.conf.arg(name="")]
    out: Path | None = None
    """The run directory; by default runs/TRIAL-SEED."""
    data: Path | None = None
    """Demonstrations, as `cebm demos` or `Demonstrations.save` wrote them; by default the expert's are generated."""
    dim: int = 2
    """Dimensions of the particle task."""
    random_order: bool = False
    """The particle task's expert visits the goals in a random order."""
    episodes: int = 300
    """Demonstrations to generate, or the most to take of `data`."""
    steps: int = 3000
    """Training steps."""
    seed: int = 0
    """Decides weights, noise, order and generated demonstrations."""
    log_every: int = 20
    """Steps between two rows of training metrics."""
    evaluate_every: int = 500
    """Steps between two evaluations."""
    checkpoint_every: int = 250
    """Steps between two checkpoints."""
    evaluation_episodes: int = 100
    """Episodes per evaluation along the way."""
    evaluation_candidates: int = 64
    """Candidates of the acting search in these evaluations, at most."""
    device: str = "cpu"
    """Where to train."""
    threads: int | None = None
    """Threads for torch."""
    tensorboard: bool = False
    """Log to TensorBoard too (needs the extra `tensorboard`)."""

    def job(self, name: str) -> Job:
        return Job(
            name,
            self.recipe,
            None if self.data is not None else ParticleTask(dim=self.dim, random_order=self.random_order),
            None if self.data is None else str(self.data.absolute()),
            self.episodes,
            self.steps,
            self.seed,
            self.log_every,
            self.evaluate_every,
            self.checkpoint_every,
            self.evaluation_episodes,
            self.evaluation_candidates,
            self.device,
        )


@dataclass(frozen=True)
class ResumeArguments:
    """Continues a run from its last good checkpoint, bit for bit."""

    resume: Path
    """The run directory."""
    steps: int | None = None
    """Train up to this many steps instead of the run's own number; a cosine learning rate then rises again."""
    threads: int | None = None
    """Threads for torch; as many as before, or the numbers differ in the last digits."""
    tensorboard: bool = False
    """Log to TensorBoard too (needs the extra `tensorboard`)."""


def train_command(arguments: list[str]) -> Callable[[], None]:
    """Parses what follows `cebm train`: a trial's name first, if any, then settings."""
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
    if any(word == "--resume" or word.startswith("--resume=") for word in arguments):
        again = tyro.cli(ResumeArguments, args=arguments, prog="cebm train", config=config)

        def continue_run() -> None:
            set_threads(again.threads)
            job = load_job(again.resume)
            _run(
                job.name,
                again.steps or job.steps,
                again.resume,
                again.tensorboard,
                lambda listen: resume(again.resume, listen, again.steps),
            )

        return continue_run
    named = bool(arguments) and not arguments[0].startswith("-")
    name = arguments[0] if named else DEFAULT_TRIAL
    about = f"Trials: {', '.join(TRIALS)}. Without one: {DEFAULT_TRIAL}. --resume RUN continues a run."
    parsed = tyro.cli(
        TrainArguments,
        default=TrainArguments(find_trial(name)),
        args=arguments[1:] if named else arguments,
        prog=f"cebm train {name}" if named else "cebm train [TRIAL]",
        description=None if named else about,
        config=config,
    )

    def start_run() -> None:
        set_threads(parsed.threads)
        out = parsed.out or Path("runs") / f"{name}-{parsed.seed}"
        job = parsed.job(name)
        _run(name, job.steps, out, parsed.tensorboard, lambda listen: train(job, out, listen))

    return start_run


def _run(name: str, steps: int, out: Path, tensorboard: bool, start: Callable[[Listener], Outcome]) -> None:
    with ExitStack() as stack:
        listeners: list[Listener] = [stack.enter_context(ProgressBar(name, steps))]
        if tensorboard:
            listeners.append(TensorBoard(out / "tensorboard"))

        def listen(row: dict) -> None:
            for listener in listeners:
                listener(row)

        outcome = start(listen)
    best = [row for row in outcome.metrics if row["kind"] == "evaluation" and row["step"] == outcome.best_step][-1]
    result = f"success {best['success']:.0%}" if "success" in best else f"error {best['validation_action_error']:.4g}"
    print(f"best at step {outcome.best_step}: {result} (validation)  {out}")


def evaluate_run(arguments: "Eval") -> None:
    """`cebm eval`: the summary is printed and, for a run, kept beside its metrics with a row per episode."""
    set_threads(arguments.threads)
    where = arguments.run
    is_run = (where / "run.json").exists()
    policy = load(where / ("policy" if arguments.last else "best") if is_run else where, arguments.device)
    env: ParticleTask | str | None = arguments.env
    if env is None and is_run:
        env = task_of(load_job(where))
    if env is None:
        raise ValueError("env must be given: this policy does not come with a task of its own")
    effort: dict[str, Any] = {"candidates": arguments.candidates, "budget_ms": arguments.budget_ms}
    result = evaluate(
        policy,
        env,
        episodes=arguments.episodes,
        seed=TEST_SEED if arguments.seed is None else arguments.seed,
        warm_start=arguments.warm_start,
        **{name: value for name, value in effort.items() if value is not None},
    )
    summary = result.summary()
    if is_run:
        (where / "evaluation.json").write_text(json.dumps(summary, indent=1) + "\n")
        result.write_csv(where / "evaluation.csv")
    print(json.dumps(summary) if arguments.json else sentence(result))


def report_runs(runs: list[Path], out: Path) -> None:
    """`cebm report`: writes the page and ends with what each evaluated run reached."""
    from cebm.report import write_report

    write_report(runs, out)
    for run in runs:
        path = run / "evaluation.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        if "success" in summary:
            rate = f"{100 * summary['success']:.0f} %"
            print(f"success {rate} ({summary['successes']}/{summary['episodes']})  {out}")
        else:
            print(out)


def sentence(result: Evaluation) -> str:
    """The summary for people."""
    summary = result.summary()
    words = []
    if result.successes is not None:
        low, high = summary["success_low"], summary["success_high"]
        words.append(
            f"success {summary['success']:.0%} ({result.successes}/{result.episodes}, 95 % {low:.0%}–{high:.0%})"
        )
    for name in ("return", "min_distance_first", "min_distance_second", "final_distance"):
        if name in summary:
            words.append(f"{name.replace('_', ' ')} {summary[name]:.3f}")
    words.append(f"action {summary['action_ms_p50']:.1f} ms (p99 {summary['action_ms_p99']:.1f})")
    return "  ".join(words)


def set_threads(threads: int | None) -> None:
    """As many threads as asked for; the machine's default otherwise."""
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
