"""One training on several processes: who is who, and how they agree. `torchrun` starts the processes.

Gradients are averaged in one flat buffer after the backward pass. DistributedDataParallel would wrap `forward`, but our
loss is no forward: chains use the weights many times before it, some weights get no gradient, and the networks are too
small for an overlap of backward and communication to pay. Messages between the processes (flags, errors, states) are on
the CPU, so they never wait for an accelerator.
"""

import importlib
import os
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

TIMEOUT = timedelta(minutes=30)
"""The longest that a process waits for the others. The first one alone evaluates policies, which may take minutes."""
Value = TypeVar("Value")


class GroupError(RuntimeError):
    """A process of the group ended or does not answer, so that the others cannot go on."""


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        minutes = TIMEOUT.total_seconds() / 60
        raise GroupError(f"another process ended, or did not answer within {minutes:.0f} minutes") from error


@dataclass(frozen=True)
class Group:
    """The processes of one training. A group of one process does nothing and changes nothing."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this process on its machine, which is that of its GPU."""

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, batch_size: int) -> slice:
        """The rows of a batch that are this process's; all processes have equally many."""
        if batch_size % self.size:
            raise ValueError(f"batch_size {batch_size} cannot be divided equally among {self.size} processes")
        rows = batch_size // self.size
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def seed(self, seed: int) -> int:
        """The seed of this process's own random numbers, a function of (seed, rank); for one process the seed."""
        if self.size == 1:
            return seed
        return int(np.random.SeedSequence([seed, self.rank]).generate_state(1, np.uint64)[0]) >> 1

    def device(self, name: str) -> str:
        """The device of this process: each gets a GPU of its own."""
        return f"cuda:{self.local_rank}" if self.size > 1 and name == "cuda" else name

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sums over the processes, in float64."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        with _answered():
            dist.all_reduce(sums)
        return sums.tolist()

    def means(self, values: dict[str, float]) -> dict[str, float]:
        """Means over the processes, by name; the names must be the same in all of them."""
        if self.size == 1:
            return values
        return {name: total / self.size for name, total in zip(values, self.totals(list(values.values())), strict=True)}

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag if self.size == 1 else self.totals([flag])[0] > 0

    def gathered(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, in each of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _answered():
            dist.all_gather_object(values, value)
        return values

    def of_first(self, value: Value) -> Value:
        """The first process's value, in all of them."""
        if self.size == 1:
            return value
        values = [value if self.first else None]
        with _answered():
            dist.broadcast_object_list(values, 0)
        return values[0]  # type: ignore[return-value]

    def check_same(self, value: str, what: str) -> None:
        """ValueError where the value is not the same in all processes."""
        if len(set(self.gathered(value))) > 1:
            raise ValueError(f"{what} not the same in all {self.size} processes")

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes leave the block without an error, or all with that of the first process that failed, so nobody
        waits for a process that will not come. The block must not ask the other processes anything."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.settle(error)

    def settle(self, error: Exception | None) -> None:
        """Raises the error of the first process that has one, the same in all of them."""
        if not self.any(error is not None):
            return
        errors = self.gathered(None if error is None else (_portable(error), traceback.format_exception(error)))
        rank, (words, trace) = next((rank, found) for rank, found in enumerate(errors) if found is not None)
        if rank == self.rank and error is not None:
            raise error
        other = _from_words(*words)
        other.add_note(f"In process {rank} of {self.size}:\n{''.join(trace)}")
        raise other from error

    def same_weights(self, module: nn.Module) -> None:
        """Gives the parameters and buffers of the first process to all."""
        if self.size > 1:
            with _answered():
                for value in module.state_dict().values():
                    dist.broadcast(value.detach(), 0)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replaces gradients by their means over the processes. A parameter without a gradient counts as 0; one without
        in all processes stays without."""
        if self.size == 1:
            return
        weights = list(parameters)
        used = self.totals([weight.grad is not None for weight in weights])
        by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for weight, count in zip(weights, used, strict=True):
            if count:
                by_kind.setdefault((weight.device, weight.dtype), []).append(weight)
        for each in by_kind.values():
            gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in each]
            # Divided first: a sum of large gradients could overflow.
            flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(self.size)
            with _answered():
                dist.all_reduce(flat)
            for weight, part in zip(each, flat.split([weight.numel() for weight in each]), strict=True):
                weight.grad = part.view_as(weight)


ALONE = Group()
"""The group of a training in one process."""


def started_by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()


@contextmanager
def group_of_environment(device: str = "cpu") -> Iterator[Group]:
    """The group that torchrun's environment describes, by gloo on CPUs and nccl on GPUs; without torchrun, and with one
    process, that of this process alone. Warnings of all processes but the first are silenced."""
    if not started_by_torchrun() or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    group = Group(rank, size, local)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        if device != "cuda":
            raise ValueError(
                f"device must be 'cuda' where {size} processes train, each on a GPU of its own; got {device}"
            )
        if local >= torch.cuda.device_count():
            raise ValueError(f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}")
        torch.cuda.set_device(local)
    # Default arguments in this module keep the group that exists when it is first imported (building an optimiser does
    # that). The threads of a group that is kept outlive it, and when Python ends they may abort the process.
    importlib.import_module("torch.distributed.nn")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    try:
        with warnings.catch_warnings():
            if not group.first:
                warnings.simplefilter("ignore")
            yield group
    finally:
        dist.destroy_process_group()


def _portable(error: Exception) -> tuple[str, str]:
    """The error in words for another process: its nearest kind among Python's and cebm's own, and its message."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in ("builtins", "cebm"))
    kind = next((each for each in kinds if _takes_a_message(each)), RuntimeError)
    plain = len(error.args) == 1 and isinstance(error.args[0], str)  # a KeyError's text has quotes around it
    message = (error.args[0] if plain else str(error)) if kind is type(error) else f"{type(error).__name__}: {error}"
    return f"{kind.__module__}:{kind.__qualname__}", message


def _takes_a_message(kind: type) -> bool:
    try:
        return isinstance(kind(""), Exception)
    except TypeError:  # it wants more, or less
        return False


def _from_words(kind: str, message: str) -> Exception:
    """The inverse of `_portable`."""
    module, _, name = kind.partition(":")
    found: Exception = getattr(importlib.import_module(module), name)(message)
    return found
