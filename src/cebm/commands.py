"""The commands whose arguments or work need torch; `cli.py` imports this when one of them is called."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro

from cebm import certificate
from cebm.demonstrations.files import check_target
from cebm.distributed import Group, group_of_environment
from cebm.engines import Engine, Local, Ray, Submitit
from cebm.evaluation import TEST_SEED, Evaluation, evaluate
from cebm.exported import load_exported
from cebm.films import write_film
from cebm.loading import load
from cebm.options import options_of, with_options
from cebm.policy import EnergyPolicy
from cebm.progress import ProgressBar, TensorBoard, measured, share_bar
from cebm.protocols import PROTOCOLS, measure, to_document, words
from cebm.recipes import TRIALS, Trial, find_trial
from cebm.runs import (
    Job,
    Listener,
    Outcome,
    check_new,
    demonstrations_of,
    load_job,
    material_of,
    read_record,
    resume,
    train,
)
from cebm.samplers import Sampler
from cebm.settings import find_piece, import_piece_module, to_json
from cebm.storage import read_document, write_document
from cebm.tasks import SHIPPED, Gym, ParticleTask, Task, shipped, task_of
from cebm.threads import open_number

if TYPE_CHECKING:
    from cebm.cli import Certify, Demos, Eval, Export, OnEngine, Sweep

DEFAULT_TRIAL = "steady"

# -------------------------------------------------------------------------------------------- what a user names


def import_pieces(references: Sequence[str]) -> None:
    """Imports the files and modules that `--with` names: saved settings may be made of their classes."""
    for reference in references:
        import_piece_module(reference)


def named_trial(text: str) -> Trial:
    """A trial by its name, or the one that FILE.py:NAME or MODULE:NAME names."""
    if ":" not in text and "/" not in text and not text.endswith(".py"):
        return find_trial(text)
    found = find_piece(text)
    if not isinstance(found, Trial):
        raise ValueError(f"{text} is {_described(found)}, expected a cebm.Trial")
    return found


def named_task(text: str, particle: dict[str, Any]) -> Task:
    """`particle` with these settings, another task that ships with cebm, a Gymnasium id, or the task that FILE.py:NAME
    or MODULE:NAME names."""
    if text == "particle":
        return ParticleTask(**particle)
    if particle:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in particle)
        raise ValueError(f"{options}: the particle task has this setting, {text} has not")
    ours = shipped(text)
    if ours is not None:
        return ours
    place, _, name = text.rpartition(":")
    if re.search(r"/|-v\d+$", name) and not name.endswith(".py"):
        return Gym(text)
    if not place:
        raise ValueError(
            f"task is {text!r}, expected particle, {', '.join(SHIPPED)}, the id of a Gymnasium environment such as "
            "Pendulum-v1, FILE.py:NAME or MODULE:NAME"
        )
    found = _made(find_piece(text), text)
    if not isinstance(found, Task):
        raise ValueError(
            f"{text} is {_described(found)}, expected a cebm.Task; an environment becomes one as a "
            "cebm.GymnasiumTask with a method `make`"
        )
    return found


def named_samplers(names: Sequence[str]) -> dict[str, Any]:
    """The user's own samplers among `names`, by FILE.py:NAME or MODULE:NAME; the others must be cebm's."""
    own = {}
    for name in names:
        if name in certificate.SAMPLERS:
            continue
        if ":" not in name:
            known = ", ".join(certificate.SAMPLERS)
            raise ValueError(f"there is no sampler {name!r}; there are {known}; of your own write FILE.py:NAME")
        found = _made(find_piece(name), name)
        if not isinstance(found, Sampler) and not callable(found):
            raise ValueError(f"{name} is {_described(found)}, expected a sampler with steps, init and step")
        own[name] = found
    return own


def _made(found: Any, text: str) -> Any:
    """An object as it is; of a class the object with its default settings."""
    if not isinstance(found, type):
        return found
    try:
        return found()
    except TypeError as error:
        raise ValueError(f"{text} is a class that needs settings ({error}); name an object of it") from error


def _described(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"


def check_seed(seed: int) -> int:
    """A seed that torch and numpy both take."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be at least 0 and below 2^63, got {seed}")
    return seed


def _particle_settings(arguments: Any, names: Sequence[str]) -> dict[str, Any]:
    """The settings of the particle task that were given; a flag counts when it is set."""
    given = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in given.items() if value is not None and value is not False}


# -------------------------------------------------------------------------------------------- train


@dataclass(frozen=True)
class RunArguments:
    """Trains a policy and writes a run directory: settings, metrics, checkpoints, the best and the last policy."""

    out: Path | None = None
    """The run directory; by default runs/TRIAL-SEED."""
    data: Path | None = None
    """Demonstrations: cebm's own, .npz, .npy, CSV, Parquet, HDF5, Zarr, Minari or LeRobot (docs/data.md). By default
    the task's expert gives them."""
    task: str | None = None
    """Where the policy is rolled out: particle, the id of a Gymnasium environment, FILE.py:NAME or MODULE:NAME. By
    default the task that the data name, and particle without data."""
    dim: int | None = None
    """Dimensions of the particle task; by default 2."""
    random_order: bool = False
    """The particle task's expert visits the goals in a random order."""
    threads: int | None = None
    """Threads for torch. By default as many as are fastest when the run starts, by a short measurement."""
    tensorboard: bool = False
    """Log to TensorBoard too (needs the extra `tensorboard`)."""
    with_: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="with")] = ()
    """A file or module of your own pieces to import; may be repeated."""

    def place(self) -> dict[str, Any]:
        """The task and the data of the job."""
        particle = _particle_settings(self, ("dim", "random_order"))
        task: Task | None = None
        if self.task is not None or self.data is None:
            task = named_task(self.task or "particle", particle)
        elif particle:
            raise ValueError(f"{', '.join(particle)}: the data name their task; add --task particle to set it")
        return {"task": task, "data": None if self.data is None else str(self.data.absolute())}


@dataclass(frozen=True)
class ResumeArguments:
    """Continues a run from its last good checkpoint, bit for bit."""

    resume: Path
    """The run directory."""
    steps: int | None = None
    """Train up to this many steps instead of the run's own number; a cosine learning rate then rises again."""
    threads: int | None = None
    """Threads for torch, by default as many as before; with another number the last digits differ."""
    tensorboard: bool = False
    """Log to TensorBoard too (needs the extra `tensorboard`)."""
    with_: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="with")] = ()
    """A file or module of your own pieces that the run is made of; may be repeated."""

    def __call__(self) -> None:
        import_pieces(self.with_)
        job = load_job(self.resume)
        set_threads(_threads_before(self.resume) if self.threads is None and open_number() else self.threads)
        if self.steps is not None:
            job = replace(job, steps=self.steps)
        with group_of_environment(job.device) as group:

            def start(listen: Listener) -> Outcome:
                return resume(self.resume, listen, self.steps, group)

            _run(job, self.resume, self.tensorboard, start, group)


def train_command(arguments: list[str]) -> Callable[[], None]:
    """Parses what follows `cebm train`: a trial first, if any, then settings."""
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
    if any(word == "--resume" or word.startswith("--resume=") for word in arguments):
        return tyro.cli(ResumeArguments, args=arguments, prog="cebm train", config=config)
    named = bool(arguments) and not arguments[0].startswith("-")
    text = arguments[0] if named else DEFAULT_TRIAL
    trial = named_trial(text)
    name = text.rpartition(":")[2]
    template = Job(name, trial, ParticleTask())
    pieces = {"trial": options_of(trial), "job": options_of(template, skip=("name", "trial", "task", "data"))}
    about = (
        f"Trials: {', '.join(TRIALS)}; FILE.py:NAME or MODULE:NAME for your own. Without one: {DEFAULT_TRIAL}. "
        "--resume RUN continues a run."
    )
    parsed: Any = tyro.cli(
        _with_pieces(RunArguments, pieces),
        args=arguments[1:] if named else arguments,
        prog=f"cebm train {text}" if named else "cebm train [TRIAL]",
        description=RunArguments.__doc__ if named else about,
        config=config,
    )

    def start_run() -> None:
        set_threads(parsed.threads)
        import_pieces(parsed.with_)
        check_seed(parsed.job.seed)
        composed = with_options(trial, getattr(parsed, "trial", None))
        job = with_options(replace(template, trial=composed, **parsed.place()), parsed.job)
        try:
            to_json(job)
        except TypeError as error:
            raise ValueError(f"this run could not be saved: {error}") from error
        out = parsed.out or Path("runs") / f"{name}-{job.seed}"
        with group_of_environment(job.device) as group:
            with group.together():
                check_new(out)  # before an expert's long work
                with share_bar("reading") if group.first else nullcontext(lambda share: None) as listen_reading:
                    material = material_of(job, listen_reading)
            origin = parsed.data if job.task is None or parsed.data else job.task.name
            if group.first:
                print(f"{material.summary()} ({origin})", flush=True)

            def start(listen: Listener) -> Outcome:
                return train(job, out, listen, material, group, print, parsed.threads is None and open_number())

            _run(job, out, parsed.tensorboard, start, group)

    return start_run


def _with_pieces(base: type, pieces: dict[str, Any]) -> type:
    """The arguments of a command and, without a prefix of their own, the options of pieces."""
    unprefixed = [
        (name, Annotated[type(options), tyro.conf.arg(name="", help="")], options)
        for name, options in pieces.items()
        if options is not None
    ]
    return make_dataclass(base.__name__, unprefixed, bases=(base,), frozen=True)


def _run(job: Job, out: Path, tensorboard: bool, start: Callable[[Listener], Outcome], group: Group) -> None:
    """Runs with a progress bar; of a group only the first process shows and logs anything."""
    if not group.first:
        start(lambda row: None)
        return
    metric = None if job.task is None else job.task.metric
    with ExitStack() as stack:
        listeners: list[Listener] = [stack.enter_context(ProgressBar(job.name, job.steps, metric))]
        if tensorboard:
            listeners.append(TensorBoard(out / "tensorboard"))

        def listen(row: dict) -> None:
            for listener in listeners:
                listener(row)

        outcome = start(listen)
    best = [row for row in outcome.metrics if row["kind"] == "evaluation" and row["step"] == outcome.best_step][-1]
    print(f"best at step {outcome.best_step}: {measured(best, metric)} (validation)  {out}")


def _threads_before(run: Path) -> int | None:
    """The threads with which a run began, where this machine has as many."""
    before = read_record(run).get("threads")
    return before if isinstance(before, int) and 1 <= before <= torch.get_num_threads() else None


def set_threads(threads: int | None) -> None:
    """As many threads as asked for; the machine's default otherwise."""
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)


# -------------------------------------------------------------------------------------------- the others


def write_demonstrations(arguments: "Demos") -> None:
    """`cebm demos`: the episodes of a task's expert, or those that others recorded."""
    seed = check_seed(arguments.seed)
    particle = _particle_settings(arguments, ("dim", "steps", "wait", "random_order", "hide_velocity"))
    task = named_task(arguments.task, particle)
    check_target(arguments.out)  # before the expert's long work
    if arguments.from_ is not None:
        demonstrations = task.convert(arguments.from_)
    else:
        demonstrations = task.demonstrations(arguments.episodes, seed)
    demonstrations.save(arguments.out)
    print(f"{demonstrations.summary()}\n{arguments.out}")


def evaluate_run(arguments: "Eval") -> None:
    """`cebm eval`: the summary is printed and, for a run, kept beside its metrics with a row per episode."""
    set_threads(arguments.threads)
    import_pieces(arguments.with_)
    if arguments.protocol is not None:
        _follow_protocol(arguments)
        return
    if arguments.seeds:
        raise ValueError("--seeds belong to --protocol; evaluate one run at a time without it")
    where = arguments.run
    is_run = (where / "run.json").exists()
    policy = load(where / "policy" if is_run and arguments.last else where, arguments.device)
    job = load_job(where) if is_run else None
    task = _task_to_play(arguments, policy, job)
    effort: dict[str, Any] = {name: getattr(arguments, name) for name in ("candidates", "budget_ms", "execute")}
    if job is not None and effort["execute"] is None:
        effort["execute"] = job.evaluation_execute
    without = policy.without_energy() if arguments.without_energy else None  # refused before the episodes

    def played(by: EnergyPolicy, film: tuple[int, ...]) -> Evaluation:
        return evaluate(
            by,
            task,
            episodes=arguments.episodes,
            seed=TEST_SEED if arguments.seed is None else check_seed(arguments.seed),
            max_steps=arguments.max_steps,
            warm_start=arguments.warm_start,
            workers=arguments.workers,
            film=film,
            **{name: value for name, value in effort.items() if value is not None},
        )

    filmed = () if arguments.video is None else tuple(i for i in arguments.film if i < arguments.episodes)
    result, bare = played(policy, filmed), None if without is None else played(without, ())
    metric = arguments.metric or task.metric
    summary = {"task": task.name, "metric": metric, **result.summary(), **_interval(result, metric)}
    words = [sentence(result, metric)]
    if bare is not None:
        summary["without_energy"] = {**bare.summary(), **_interval(bare, metric), **_difference(result, bare, metric)}
        words += _compared(result, bare, metric)
    # First of all the result: the disk may be full.
    print(json.dumps(summary) if arguments.json else "\n".join(words), flush=True)
    if arguments.video is not None:
        for index, frames in result.frames.items():
            print(write_film(frames, arguments.video / f"episode-{index}"), file=sys.stderr)
    if arguments.csv is not None:
        result.write_csv(arguments.csv)
    if is_run:
        try:
            result.write_csv(where / "evaluation.csv")
            if bare is None:  # that of an earlier evaluation
                (where / "evaluation-without-energy.csv").unlink(missing_ok=True)
            else:
                bare.write_csv(where / "evaluation-without-energy.csv")
            write_document(where / "evaluation.json", summary)
        except OSError as error:
            raise OSError(f"cannot write the evaluation to {where}: {error.strerror or error}") from error


def _difference(result: Evaluation, bare: Evaluation, metric: str) -> dict[str, Any]:
    """What the energy adds to the metric; none where all episodes have one number together."""
    return {} if metric in result.overall else {"difference": result.minus(bare, metric).to_json()}


def _compared(result: Evaluation, bare: Evaluation, metric: str) -> list[str]:
    """The evaluation with the energy ignored, and the difference, for people."""
    words = [f"with its energy ignored: {sentence(bare, metric)}"]
    if metric not in result.overall:
        found = result.minus(bare, metric)
        told = found.points() if metric == "success" else found.number()
        words.append(f"the energy adds {told}: 95 % interval, paired by episode")
    return words


def _follow_protocol(arguments: "Eval") -> None:
    """`cebm eval --protocol`: the numbers are printed and kept in the first run."""
    protocol, runs = PROTOCOLS[arguments.protocol or ""], [arguments.run, *arguments.seeds]
    for name in ("last", "budget_ms", "max_steps", "csv", "video", "metric", "warm_start", "without_energy"):
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')} does not go with --protocol, which says how to measure")
    settings = {name: getattr(arguments, name) for name in ("candidates", "execute")}
    task = None
    if arguments.task or arguments.env:
        task = _task_to_play(arguments, load(arguments.run, arguments.device), None)
    lines = measure(
        protocol,
        runs,
        task,
        seed=TEST_SEED if arguments.seed is None else check_seed(arguments.seed),
        device=arguments.device,
        listen=lambda line: print(line, file=sys.stderr, flush=True),
        workers=arguments.workers,
        **{name: value for name, value in settings.items() if value is not None},
    )
    document = to_document(protocol, runs, lines)
    print(json.dumps(document) if arguments.json else words(protocol, lines), flush=True)
    write_document(arguments.run / f"protocol-{protocol.name}.json", document)


def _interval(result: Evaluation, metric: str) -> dict[str, Any]:
    """The ends of the metric's 95 % interval; none where all episodes have one number together."""
    if metric in result.overall:
        return {}
    found = result.interval(metric)
    return {f"{metric}_low": found.to_json()[1], f"{metric}_high": found.to_json()[2]}


def _task_to_play(arguments: "Eval", policy: EnergyPolicy, job: Job | None) -> Task:
    if arguments.env is not None and arguments.task is not None:
        raise ValueError("env and task say the same: give one of them")
    if arguments.env is not None:
        return Gym(arguments.env)
    if arguments.task is not None:
        dim = {"dim": policy.columns[1]} if arguments.task == "particle" else {}
        return named_task(arguments.task, dim)
    task = None if job is None else _task_of(job)
    if task is None:
        raise ValueError("task must be given (--task): this policy does not come with a task of its own")
    return task


def _task_of(job: Job) -> Task | None:
    """The job's task, or the one that the header of its data names."""
    if job.task is not None or job.data is None:
        return job.task
    return task_of(demonstrations_of(job, job.data).metadata)


def sentence(result: Evaluation, metric: str = "success") -> str:
    """The summary for people."""
    summary = result.summary()
    words = [measured(summary, metric)] if measured(summary, metric) else []
    if metric != "success" and metric not in result.overall and result.episodes > 1:
        found = result.interval(metric)
        words.append(f"[{found.low:.4g}, {found.high:.4g}]")
    successes = "" if result.successes is None else f"{result.successes}/"
    words.append(f"({successes}{result.episodes} episodes)")
    words.append(f"action {summary['action_ms_p50']:.1f} ms (p99 {summary['action_ms_p99']:.1f})")
    return "  ".join(words)


def export_run(arguments: "Export") -> None:
    """`cebm export`: prints what the file takes and gives."""
    import_pieces(arguments.with_)
    where = arguments.run
    policy = load(where / "policy" if arguments.last and (where / "run.json").exists() else where)
    policy.export(arguments.out, arguments.format, arguments.candidates, arguments.steps)
    contract = load_exported(arguments.out).contract
    inputs = [f"obs [batch, {contract.history * contract.frame}]"]
    inputs += [f"{name} [batch, {contract.count(name)}]" for name in contract.inputs()[1:]]
    print(f"{', '.join(inputs)} → action [batch, {contract.horizon * contract.action}]  {arguments.out}")


def report_runs(runs: list[Path], out: Path, pieces: Sequence[str] = ()) -> None:
    """`cebm report`: writes the page and ends with what each evaluated run reached."""
    from cebm.report import write_report

    import_pieces(pieces)
    write_report(runs, out)
    for run in runs:
        path = run / "evaluation.json"
        summary = read_document(path, "evaluation", old=True) if path.exists() else {}
        result = measured(summary, summary.get("metric", "success"))
        print(f"{result} ({summary['episodes']} episodes)  {out}" if result else out)


def certify_samplers(arguments: "Certify") -> None:
    """`cebm certify`: cebm's samplers by name, the user's own by where they are."""
    names: tuple[str, ...] = sum(arguments.sampler, ())
    certificate.report(names, check_seed(arguments.seed), arguments.json, arguments.out, named_samplers(names))


def sweep_study(arguments: "Sweep") -> None:
    """`cebm sweep`: runs what is missing of a study, then writes its table and page."""
    from cebm.sweep import estimate, sweep, write_results

    pieces = (_module_of(arguments.study), *arguments.with_)
    import_pieces(arguments.with_)
    study = find_piece(arguments.study if _names_a_piece(arguments.study) else f"{arguments.study}:study")
    if arguments.dry_run:
        print(estimate(study, arguments.out, arguments.episodes).words(_workers(arguments)))
        return
    found = sweep(
        study,
        engine_of(arguments, arguments.out / "logs"),
        arguments.out,
        pieces=tuple(map(_absolute, pieces)),
        measure=getattr(study, "measure", None),
        episodes=arguments.episodes,
        retries=arguments.retries,
    )
    for path in write_results(found, arguments.out, arguments.metric):
        print(path)


def _names_a_piece(reference: str) -> bool:
    return ":" in reference


def _module_of(reference: str) -> str:
    return reference.rpartition(":")[0] if _names_a_piece(reference) else reference


def _absolute(reference: str) -> str:
    """Workers may run in another directory: a file is named by its whole path."""
    return str(Path(reference).absolute()) if reference.endswith(".py") else reference


def engine_of(arguments: "OnEngine", logs: Path) -> Engine:
    """The engine that the command line asks for; what the runs print goes to `logs`."""
    for name, value, engine in (
        ("address", arguments.address, "ray"),
        ("cluster", arguments.cluster, "submitit"),
        ("option", arguments.option or None, "submitit"),
    ):
        if value is not None and arguments.engine != engine:
            raise ValueError(f"--{name} belongs to --engine {engine}, not to {arguments.engine}")
    workers = _workers(arguments)
    if arguments.engine == "ray":
        return Ray(workers, arguments.threads, arguments.address)
    if arguments.engine == "submitit":
        options = dict(_option(word) for word in arguments.option)
        return Submitit(logs, workers, arguments.threads, arguments.cluster, options)
    return Local(workers, arguments.threads, logs)


def _workers(arguments: "OnEngine") -> int:
    return (os.cpu_count() or 1) if arguments.workers is None else arguments.workers


def _option(word: str) -> tuple[str, int | str]:
    name, sign, value = word.partition("=")
    if not name or not sign:
        raise ValueError(f"option must be NAME=VALUE, got {word!r}")
    return name, int(value) if value.lstrip("-").isdigit() else value
