"""What a study is: it names runs, given the records of those that are finished."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import product
from typing import Any, Literal, Protocol, runtime_checkable

from cebm.composition import vary
from cebm.recipes import Trial, find_trial
from cebm.runs import Job
from cebm.settings import to_json
from cebm.tasks import ParticleTask, Task

Record = dict[str, Any]
"""What is known of a finished run, as JSON: key, label, seed, settings, result."""


@dataclass(frozen=True)
class Planned:
    """One run of a study."""

    job: Job
    values: Mapping[str, Any] = field(default_factory=dict)
    """The settings that the study varies, by name, for its tables."""

    @property
    def key(self) -> str:
        """The name of its directory and record: name, digest of all settings, seed."""
        name = re.sub(r"[^\w.+=-]+", "-", self.job.name).strip("-") or "run"
        return f"{name}-{digest(self.job)}-{self.job.seed}"


def digest(job: Job) -> str:
    """Of all settings but the name and the seed."""
    settings = json.dumps(unusual(replace(job, name="", seed=0)), sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:10]


def unusual(settings: Any) -> Any:
    """Settings as JSON, without those that have their default value: a digest of them stays the same when a class gains
    a setting."""
    if not is_dataclass(settings):
        return to_json(settings)
    named = {each.name: (getattr(settings, each.name), each.default) for each in fields(settings)}
    return {
        "type": type(settings).__name__,
        **{name: unusual(value) for name, (value, usual) in named.items() if value != usual},
    }


@runtime_checkable
class Study(Protocol):
    """Anything with this method is a study. It is asked again whenever all runs that it named are finished, with the
    records of all so far, and ends when it names nothing new; so it must be determined by them."""

    def plan(self, finished: Sequence[Record]) -> Iterable[Planned]: ...


def runs_of(study: Any, finished: Sequence[Record] = ()) -> dict[str, Planned]:
    """The runs that a study names now, by key: those of its method `plan`, of a function, or of any iterable of runs
    and jobs."""
    if isinstance(study, Study):
        named: Any = study.plan(finished)
    elif callable(study):
        named = study()
    else:
        named = study
    if isinstance(named, str) or not isinstance(named, Iterable):
        raise ValueError(f"a study must give runs, got {named!r}")
    found: dict[str, Planned] = {}
    for each in named:
        if not isinstance(each, Planned | Job):
            raise ValueError(f"a study gives runs or jobs, got {each!r}")
        run = Planned(each) if isinstance(each, Job) else each
        found[run.key] = run
    return found


def changed(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with settings changed: `objective.count` is one of its trial, `steps` one of its own."""
    own = {each.name for each in fields(Job)}
    mine = {name: value for name, value in values.items() if name in own}
    others = {name: value for name, value in values.items() if name not in own}
    trial = mine.pop("trial", job.trial)
    return replace(job, **mine, trial=vary(trial, **others) if others else trial)


# ---------------------------------------------------------------------------------------------- grids


@dataclass(frozen=True)
class Grid:
    """All combinations of some settings, each with several seeds."""

    job: Job
    over: Mapping[str, Any]
    """Lists of values, by setting."""
    seeds: Sequence[int] = (0,)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all runs have, whatever trial they vary."""

    def __post_init__(self) -> None:
        for name, values in self.over.items():
            if isinstance(values, str) or not isinstance(values, Sequence | range) or not values:
                raise ValueError(f"over: {name} must have a list of values, got {values!r}")
        if not self.seeds:
            raise ValueError("seeds must name at least one seed")

    def plan(self, finished: Sequence[Record] = ()) -> list[Planned]:
        combined = [dict(zip(self.over, values, strict=True)) for values in product(*self.over.values())]
        jobs = [(values, changed(self.job, {**self.settings, **values})) for values in combined]
        return [Planned(replace(job, seed=seed), values) for seed in self.seeds for values, job in jobs]


def grid(
    trial: str | Trial,
    *,
    over: Mapping[str, Any] | None = None,
    seeds: Iterable[int] = (0,),
    name: str = "",
    task: Task | None = None,
    data: str | None = None,
    **settings: Any,
) -> Grid:
    """A study of one trial over settings and seeds. Settings are named as on the command line; `trial` and `data` may
    be varied, too. Without data and task it is the particle task."""
    composed = find_trial(trial) if isinstance(trial, str) else trial
    named = name or (trial if isinstance(trial, str) else "run")
    job = Job(named, composed, ParticleTask() if task is None and data is None else task, data)
    return Grid(job, dict(over or {}), tuple(seeds), settings)


# ---------------------------------------------------------------------------------------------- searches


@dataclass(frozen=True)
class Tuning:
    """A search for the best settings by Optuna's TPE, in rounds: `together` settings are tried at a time, each with all
    seeds, so that the same study gives the same runs on every engine. Needs the extra `optuna`.

    `space` has, by setting, a list of choices or a pair (low, high), of whole numbers or not; a third word "log" makes
    steps in its logarithm equal: `{"optimiser.learning_rate": (1e-4, 1e-2, "log"), "objective.count": [4, 8, 16]}`.
    """

    job: Job
    space: Mapping[str, Sequence[Any]]
    metric: str
    """Which number of a record's result: `test.success`, `validation.validation_action_error`."""
    trials: int = 20
    seeds: Sequence[int] = (0,)
    together: int = 4
    direction: Literal["maximise", "minimise"] = "maximise"
    seed: int = 0
    """Of the search itself."""
    pruner: Any = None
    """A pruner of Optuna, such as `optuna.pruners.MedianPruner(n_startup_trials=4)`: settings run with one seed after
    the other, and are given up when the pruner says so by the mean over the seeds so far. None: all run with all."""

    def __post_init__(self) -> None:
        if self.trials < 1 or self.together < 1:
            raise ValueError("trials and together must be at least 1")
        if not self.space:
            raise ValueError("space must have at least one setting")

    def plan(self, finished: Sequence[Record] = ()) -> list[Planned]:
        try:
            import optuna
        except ImportError as error:
            raise ImportError("a search needs an extra: pip install 'cebm[optuna]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=2 * self.together)
        direction: Any = {"maximise": "maximize", "minimise": "minimize"}[self.direction]
        pruner = self.pruner if self.pruner is not None else optuna.pruners.NopPruner()
        study = optuna.create_study(direction=direction, sampler=sampler, pruner=pruner)
        known = {record["key"]: record for record in finished}
        planned: list[Planned] = []
        while len(study.trials) < self.trials:
            asked = [study.ask() for _ in range(min(self.together, self.trials - len(study.trials)))]
            named, over = self._round(study, asked, known)
            planned += named
            if not over:
                break  # this round is not finished
        return planned

    def _round(self, study: Any, asked: Sequence[Any], known: Mapping[str, Record]) -> tuple[list[Planned], bool]:
        """The runs of some settings as far as their records go, and whether all of them are over. With a pruner a seed
        of all settings comes before the next seed of any."""
        from optuna.trial import TrialState

        rows = [self._runs(trial) for trial in asked]
        stages = [[run] for run in range(len(self.seeds))] if self.pruner is not None else [[*range(len(self.seeds))]]
        planned: list[Planned] = []
        ended: dict[int, Any] = {}  # settings that were given up, with Optuna's word for it
        for stage in stages:
            now = [i for i in range(len(rows)) if i not in ended]
            planned += [rows[i][run] for i in now for run in stage]
            if any(rows[i][run].key not in known for i in now for run in stage):
                return planned, False
            for i in now if self.pruner is not None else ():
                value = self._value([known[run.key] for run in rows[i][: stage[-1] + 1]])
                if value is None:
                    ended[i] = TrialState.FAIL
                    continue
                asked[i].report(value, stage[-1])
                if asked[i].should_prune():
                    ended[i] = TrialState.PRUNED
        for i, (trial, row) in enumerate(zip(asked, rows, strict=True)):
            value = None if i in ended else self._value([known[run.key] for run in row])
            study.tell(trial, value, state=ended.get(i, TrialState.FAIL if value is None else TrialState.COMPLETE))
        return planned, True

    def _runs(self, trial: Any) -> list[Planned]:
        values = {name: _suggested(trial, name, given) for name, given in self.space.items()}
        job = changed(self.job, values)
        return [Planned(replace(job, seed=seed), values) for seed in self.seeds]

    def _value(self, rows: Sequence[Record]) -> float | None:
        found = [row["result"].get(self.metric) for row in rows]
        if any(value is None for value in found):
            if all("diverged" not in row["result"] for row in rows):
                names = ", ".join(rows[0]["result"])
                raise ValueError(f"metric: there is no {self.metric!r} in the results; there are {names}")
            return None
        return float(sum(found) / len(found))


def _suggested(trial: Any, name: str, given: Sequence[Any]) -> Any:
    bounded = isinstance(given, tuple) and len(given) in (2, 3) and all(isinstance(v, int | float) for v in given[:2])
    if not bounded:
        return trial.suggest_categorical(name, list(given))
    log = len(given) == 3 and given[2] == "log"
    if len(given) == 3 and not log:
        raise ValueError(f"space: {name} must be (low, high) or (low, high, 'log'), got {given!r}")
    whole = all(isinstance(value, int) for value in given[:2])
    return (trial.suggest_int if whole else trial.suggest_float)(name, given[0], given[1], log=log)
