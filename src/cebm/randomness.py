"""Random numbers, all from the `torch.Generator` that is passed in. Pieces draw through these functions, so that an
exported policy can take the same numbers as an input: then the generator is a `Noise`, which has them already.
"""

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Noise(torch.Generator):
    """A generator that decides for itself where its numbers come from. It is handed to pieces as any other one."""

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers from N(0, 1)."""
        raise NotImplementedError

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers uniform in [0, 1)."""
        raise NotImplementedError

    def index(self, weights: Float[Tensor, "rows k"], n: int) -> Int[Tensor, "rows n"]:
        """`n` indices per row with probability ∝ weights, by inversion: uᵢ falls between two cumulated weights."""
        return inverted(weights, self.uniform((weights.shape[0], n), weights))


def draw_normal(generator: torch.Generator, shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers from N(0, 1), in the dtype and on the device of `like`. The first axis is that of the observations."""
    # The type first: torch answers `isinstance` for its generators in Python, which takes as long as a few numbers.
    if type(generator) is not torch.Generator and isinstance(generator, Noise):
        return generator.normal(shape, like)
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def draw_uniform(generator: torch.Generator, shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers uniform in [0, 1), in the dtype and on the device of `like`."""
    if type(generator) is not torch.Generator and isinstance(generator, Noise):
        return generator.uniform(shape, like)
    return torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)


def draw_index(generator: torch.Generator, weights: Float[Tensor, "rows k"], n: int) -> Int[Tensor, "rows n"]:
    """`n` indices per row, drawn with replacement and with probability ∝ weights."""
    if type(generator) is not torch.Generator and isinstance(generator, Noise):
        return generator.index(weights, n)
    return torch.multinomial(weights, n, replacement=True, generator=generator)


def inverted(weights: Float[Tensor, "rows k"], uniform: Float[Tensor, "rows n"]) -> Int[Tensor, "rows n"]:
    """The index at which the cumulated weights, relative to their sum, first exceed each number: the number of those
    that do not. A comparison and a sum, which every format of export knows; a search would be one operation more."""
    steps = weights.cumsum(1)
    reached = steps.unsqueeze(1) <= uniform.unsqueeze(2) * steps[:, -1:].unsqueeze(2)
    return reached.sum(2).clamp_max(weights.shape[1] - 1)


class Recorder(Noise):
    """Draws from another generator and keeps what it drew, in order: (kind, numbers), 'normal' or 'uniform'."""

    def __new__(cls, source: torch.Generator) -> "Recorder":
        return torch.Generator.__new__(cls, source.device)  # type: ignore[call-arg]

    def __init__(self, source: torch.Generator) -> None:
        self.source = source
        self.drawn: list[tuple[str, Tensor]] = []

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._kept("normal", draw_normal(self.source, shape, like))

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._kept("uniform", draw_uniform(self.source, shape, like))

    def index(self, weights: Float[Tensor, "rows k"], n: int) -> Int[Tensor, "rows n"]:
        """As the source draws it. What is kept lies in the middle between the two cumulated weights."""
        index = draw_index(self.source, weights, n)
        steps = weights.cumsum(1)
        middle = steps - weights / 2
        self._kept("uniform", (middle / steps[:, -1:]).gather(1, index))
        return index

    def _kept(self, kind: str, numbers: Tensor) -> Tensor:
        self.drawn.append((kind, numbers))
        return numbers


class Slices(Noise):
    """Hands out the columns of two matrices, [rows, normals] and [rows, uniforms], in the order in which they are asked
    for. `per_row` says of each draw whether its first axis is that of the rows; of any other the first row's serve."""

    def __new__(cls, normals: Tensor, uniforms: Tensor, per_row: Sequence[bool]) -> "Slices":
        return torch.Generator.__new__(cls, normals.device)  # type: ignore[call-arg]

    def __init__(self, normals: Tensor, uniforms: Tensor, per_row: Sequence[bool]) -> None:
        self._left = {"normal": normals, "uniform": uniforms}
        self._per_row = iter(per_row)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._next("normal", shape, like)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._next("uniform", shape, like)

    def _next(self, kind: str, shape: Sequence[int], like: Tensor) -> Tensor:
        numbers = self._left[kind]
        if not next(self._per_row):
            numbers, inner = numbers[:1], prod(shape)
        else:
            inner = prod(shape) // numbers.shape[0]
        mine, self._left[kind] = numbers[:, :inner], self._left[kind][:, inner:]
        return mine.reshape(tuple(shape)).to(like.dtype)
