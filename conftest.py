"""Shared fixtures. Two pytest workers share two cores, so each takes one thread."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    """A generator with a fresh seed each run: no test may depend on a chosen one."""
    generator = torch.Generator()
    generator.seed()
    return generator


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Turns jaxtyping's checks off, to see the errors that a user without them gets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
