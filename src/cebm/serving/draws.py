"""Random numbers of several clients in one batch: each client's rows are drawn from a generator of its own, so that a
client gets the same numbers alone and among others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CannotSplit(ValueError):
    """A piece draws random numbers in a shape that does not tell which row they are for."""


@contextmanager
def drawing_by_client(seeds: Sequence[int], rows: Sequence[int], device: torch.device) -> Iterator[torch.Generator]:
    """A generator for `policy.act` inside the block: what is drawn with it for all rows is drawn for each client's
    `rows` in turn, from a generator with the client's seed. Of one client it is that client's generator itself.

    It works by torch's function mode, for every `torch.rand…`, `multinomial` and `tensor.normal_` whose first axis is
    the batch, in pieces of the user's own too; a draw of another shape raises `CannotSplit`.
    """
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    if len(generators) == 1:
        yield generators[0]
        return
    shared = torch.Generator(device)
    with _Split(shared, generators, rows):
        yield shared


class _Split(TorchFunctionMode):
    def __init__(self, shared: torch.Generator, generators: list[torch.Generator], rows: Sequence[int]) -> None:
        super().__init__()
        self.shared, self.generators, self.rows = shared, generators, list(rows)

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not self.shared:
            return function(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if args and isinstance(args[0], Tensor):
            return self._of_tensor(function, args[0], args[1:], kwargs)
        before, size = _size(args, kwargs)
        drawn = [
            function(*before, (count, *size[1:]), generator=generator, **kwargs)
            for count, generator in zip(self._counts(size), self.generators, strict=True)
        ]
        return torch.cat(drawn)

    def _of_tensor(self, function: Callable, values: Tensor, others: tuple, kwargs: dict[str, Any]) -> Tensor:
        """A draw that depends on a tensor of the batch (`torch.multinomial`), or fills it (`tensor.normal_`)."""
        parts = values.split(self._counts(tuple(values.shape)))
        drawn = [
            function(part, *others, generator=generator, **kwargs)
            for part, generator in zip(parts, self.generators, strict=True)
        ]
        return values if drawn[0] is parts[0] else torch.cat(drawn)

    def _counts(self, size: Sequence[int]) -> list[int]:
        """How much of the first axis belongs to each client."""
        times, left = divmod(size[0] if size else 0, sum(self.rows))
        if left or not times:
            raise CannotSplit(f"a draw of shape {tuple(size)} is not for each of {sum(self.rows)} rows")
        return [times * count for count in self.rows]


def _size(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, Sequence[int]]:
    """The arguments before the size of what is made, and the size; it may be written as several numbers."""
    if "size" in kwargs:
        return args, kwargs.pop("size")
    if args and not isinstance(args[-1], int):
        return args[:-1], args[-1]
    return (), args
