"""Listeners of a training run: each is called with every row of metrics as it is written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any


def measured(row: dict[str, Any], metric: str | None = None) -> str:
    """What roll-outs found, for people: success with its 95 % interval, the task's metric with its standard error; the
    action error on demonstrations where nothing was rolled out. `metric` is the task's, by default the one column that
    has a standard error."""
    words = []
    if "success" in row:
        words.append(f"success {row['success']:.0%} [{row['success_low']:.0%}, {row['success_high']:.0%}]")
    if metric is None:
        metric = next((name.removesuffix("_se") for name in row if name.endswith("_se")), "success")
    if metric != "success" and metric in row:
        spread = f" ± {row[f'{metric}_se']:.2g}" if f"{metric}_se" in row else ""
        words.append(f"{metric.replace('_', ' ')} {row[metric]:.4g}{spread}")
    if not words and "validation_action_error" in row:
        words.append(f"error {row['validation_action_error']:.4g}")
    return "  ".join(words)


@contextmanager
def share_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar of a share from 0 to 1, on a terminal; nothing elsewhere. It shows after the first second."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    began = monotonic()
    with Progress(console=console, transient=True, disable=not console.is_interactive or console.no_color) as bar:
        task = bar.add_task(name.replace("[", r"\["), total=1.0, visible=False)
        yield lambda share: bar.update(task, completed=share, visible=monotonic() - began > 1)


class ProgressBar:
    """A bar with the loss, the energies, what the last evaluation found and the time left. Plain lines, one per
    evaluation, where the output is not a terminal, or NO_COLOR asks for no escape codes: a bar cannot do without."""

    def __init__(self, name: str, steps: int, metric: str | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._live = self._console.is_interactive and not self._console.no_color
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(name.replace("[", r"\["), total=steps, numbers="")
        self._metric, self._train, self._evaluation = metric, "", ""

    def __call__(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self._train = f"loss {row['loss']:.3f}"
            if "negative_energy" in row:
                self._train += f"  E+ {row['positive_energy']:.1f}  E- {row['negative_energy']:.1f}"
        else:
            self._evaluation = measured(row, self._metric)
            if not self._live:
                words = [f"step {row['step']:>6}", self._train, self._evaluation, f"{row['seconds']:.0f} s"]
                self._console.print("  ".join(filter(None, words)), highlight=False, markup=False, soft_wrap=True)
        self._bar.update(self._task, completed=row["step"], numbers=f"{self._train}  {self._evaluation}")

    def __enter__(self) -> "ProgressBar":
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()


class TensorBoard:
    """Writes every number of every row as a scalar, into a folder that the first row makes: a run begins in an empty
    directory. Needs the extra `cebm[tensorboard]`."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is missing: pip install 'cebm[tensorboard]'") from error
        self._make = lambda: SummaryWriter(str(directory))
        self._writer: Any = None

    def __call__(self, row: dict[str, Any]) -> None:
        self._writer = self._writer or self._make()
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        self._writer.flush()
