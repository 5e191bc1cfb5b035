"""Random numbers of several clients in one batch: each client's rows are drawn from a generator of its own, so that a
client gets the same numbers alone and among others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cebm.randomness import Noise, draw_index


class CannotSplit(ValueError):
    """A piece draws random numbers in a shape that does not tell which row they are for."""


class DrawnDirectly(ValueError):
    """A piece draws with torch's own functions, so that clients' numbers were not their own."""


@contextmanager
def drawing_by_client(
    seeds: Sequence[int], rows: Sequence[int], device: torch.device, direct: bool = True
) -> Iterator[torch.Generator]:
    """A generator for `policy.act` inside the block: what is drawn with it for all rows is drawn for each client's
    `rows` in turn, from a generator with the client's seed. Of one client it is that client's generator itself. The
    first axis of a draw must be the batch; another shape raises `CannotSplit`.

    Pieces of ours draw by `cebm.randomness`. With `direct` every `torch.rand…`, `multinomial` and `tensor.normal_` of
    others is found too, by torch's function mode, which all other calls of torch pay for; without it a block in which
    there was such a draw raises `DrawnDirectly`.
    """
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    if len(generators) == 1:
        yield generators[0]
        return
    split = _Split(_Clients(device), generators, rows)
    split.shared.split = split
    if direct:
        with split:
            yield split.shared
        return
    before = split.shared.get_state()
    yield split.shared
    if not torch.equal(before, split.shared.get_state()):
        raise DrawnDirectly("a piece draws with torch's own functions")


class _Clients(Noise):
    """All clients' generators as one."""

    split: "_Split"

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        drawn = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        for part, generator in self.split.parts(drawn):
            part.normal_(generator=generator)  # as torch.randn does
        return drawn

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        drawn = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        for part, generator in self.split.parts(drawn):
            part.uniform_(generator=generator)  # as torch.rand does
        return drawn

    def index(self, weights: Tensor, n: int) -> Tensor:
        """As `draw_index` draws for each client alone."""
        return torch.cat([draw_index(generator, part, n) for part, generator in self.split.parts(weights)])


class _Split(TorchFunctionMode):
    def __init__(self, shared: _Clients, generators: list[torch.Generator], rows: Sequence[int]) -> None:
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
        return self.each(function, before, size, kwargs)

    def each(self, function: Callable, before: tuple, size: Sequence[int], kwargs: dict[str, Any]) -> Tensor:
        """A draw of this size, each client's rows by its own generator."""
        pairs = zip(self.counts(size), self.generators, strict=True)
        return torch.cat([function(*before, (n, *size[1:]), generator=each, **kwargs) for n, each in pairs])

    def _of_tensor(self, function: Callable, values: Tensor, others: tuple, kwargs: dict[str, Any]) -> Tensor:
        """A draw that depends on a tensor of the batch (`torch.multinomial`), or fills it (`tensor.normal_`)."""
        pairs = list(self.parts(values))
        drawn = [function(part, *others, generator=generator, **kwargs) for part, generator in pairs]
        return values if drawn[0] is pairs[0][0] else torch.cat(drawn)

    def parts(self, values: Tensor) -> Iterator[tuple[Tensor, torch.Generator]]:
        """Each client's rows of a tensor, with its generator."""
        return zip(values.split(self.counts(tuple(values.shape))), self.generators, strict=True)

    def counts(self, size: Sequence[int]) -> list[int]:
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
