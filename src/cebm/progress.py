"""Listeners of a training run: each is called with every row of metrics as it is written."""

from pathlib import Path
from types import TracebackType
from typing import Any


class ProgressBar:
    """A bar with loss, energies, success and the time left; plain lines where the output is not a terminal."""

    def __init__(self, name: str, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(name, total=steps, numbers="")
        self._train = self._evaluation = ""

    def __call__(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self._train = f"loss {row['loss']:.3f}"
            if "negative_energy" in row:
                self._train += f"  E+ {row['positive_energy']:.1f}  E- {row['negative_energy']:.1f}"
        else:
            self._evaluation = f"error {row['validation_action_error']:.4f}"
            if "success" in row:
                low, high = row["success_low"], row["success_high"]
                self._evaluation = f"success {row['success']:.0%} [{low:.0%}, {high:.0%}]"
            if not self._console.is_terminal:
                done = f"step {row['step']:>6}  {self._train}  {self._evaluation}  {row['seconds']:.0f} s"
                self._console.print(done, highlight=False, markup=False)
        self._bar.update(self._task, completed=row["step"], numbers=f"{self._train}  {self._evaluation}")

    def __enter__(self) -> "ProgressBar":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()


class TensorBoard:
    """Writes every number of every row as a scalar. Needs the extra `cebm[tensorboard]`."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is missing: pip install 'cebm[tensorboard]'") from error
        self._writer = SummaryWriter(str(directory))

    def __call__(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        self._writer.flush()
