"""Products of rows with a matrix: both libraries give the same numbers and the same derivatives."""

import pytest
import torch
import torch.nn.functional as F

from cebm import products

EPS = torch.finfo(torch.float32).eps

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no product of oneDNN's"
)


@pytest.fixture(params=[False, True], ids=["MKL", "oneDNN"])
def library(request, monkeypatch):
    monkeypatch.setattr(products, "_ONEDNN", request.param)


@pytest.fixture
def onednn(monkeypatch):
    """Takes oneDNN's product whatever the processor, and counts how often."""
    calls = []

    def counted(rows, matrix, bias, product=products._product):
        calls.append(rows.shape)
        return product(rows, matrix, bias)

    monkeypatch.setattr(products, "_ONEDNN", True)
    monkeypatch.setattr(products, "_product", counted)
    return calls


def close(found, exact, inputs):
    """Rounding of a sum of `inputs` products of numbers near 1, each way of adding within its bound."""
    return (found.double() - exact).abs().max() < 4 * inputs * EPS


@pytest.mark.parametrize("shape", [(300,), (7, 40), (5,)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_exact_product(library, generator, shape, bias):
    rows, matrix = torch.randn(*shape, 48, generator=generator), torch.randn(80, 48, generator=generator)
    shift = torch.randn(80, generator=generator) if bias else None
    exact = F.linear(rows.double(), matrix.double(), None if shift is None else shift.double())
    assert close(products.linear(rows, matrix, shift), exact, 48 * 10)
    if len(shape) == 1:
        out = torch.empty(*shape, 80)
        assert close(products.linear_into(out, rows, matrix, shift), exact, 48 * 10)
        assert close(products.linear_into(None, rows, matrix, shift), exact, 48 * 10)


def test_a_transposed_matrix_is_a_matrix(library, generator):
    rows, matrix = torch.randn(200, 64, generator=generator), torch.randn(64, 96, generator=generator)
    assert close(products.linear(rows, matrix.t()), rows.double() @ matrix.double(), 64 * 10)


def test_first_and_second_derivatives_are_those_of_torch(onednn, generator):
    """A function of W's gradient, as a penalty on gradients has it: every derivative against float64."""
    values = [torch.randn(*shape, generator=generator) for shape in ((3, 50, 48), (64, 48), (64,))]

    def derivatives(linear, dtype):
        rows, matrix, bias = (value.to(dtype).requires_grad_() for value in values)
        hidden = torch.tanh(linear(rows, matrix, bias))
        first = torch.autograd.grad(hidden.sum(), (rows, matrix, bias), create_graph=True)
        second = torch.autograd.grad(sum(part.square().mean() for part in first), (rows, matrix, bias))
        return [part.double() for part in (*first, *second)]

    found = derivatives(products.linear, torch.float32)
    assert len(onednn) > 3  # forward, backward and the backward of that
    for one, exact in zip(found, derivatives(F.linear, torch.float64), strict=True):
        assert (one - exact).norm() < 1e-5 * exact.norm()


def test_only_what_needs_a_gradient_gets_one(onednn, generator):
    rows = torch.randn(100, 40, generator=generator)
    matrix = torch.randn(40, 40, generator=generator, requires_grad=True)
    products.linear(rows, matrix).sum().backward()
    assert rows.grad is None
    assert torch.allclose(matrix.grad, rows.sum(0).expand(40, -1), rtol=1e-4, atol=1e-4)
    assert len(onednn) == 2


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype"),
    [(8, 64, torch.float32), (500, 8, torch.float32), (500, 64, torch.float64), (0, 64, torch.float32)],
    ids=["few rows", "a thin matrix", "float64", "no rows"],
)
def test_torch_multiplies_what_is_small_or_of_another_type(onednn, generator, rows, outputs, dtype):
    values, matrix = torch.randn(rows, 64, dtype=dtype), torch.randn(outputs, 64, dtype=dtype)
    assert torch.equal(products.linear(values, matrix), F.linear(values, matrix))
    assert not onednn


def test_torch_multiplies_under_autocast_and_vmap(onednn, generator):
    rows, matrix = torch.randn(3, 100, 64, generator=generator), torch.randn(64, 64, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(rows, matrix).dtype is torch.bfloat16
    assert torch.func.vmap(lambda part: products.linear(part, matrix))(rows).shape == (3, 100, 64)
    assert not onednn


def test_a_long_product_takes_onednn_without_a_gradient(onednn, generator):
    with torch.inference_mode():
        products.linear(torch.randn(100, 64), torch.randn(64, 64))
    assert onednn == [(100, 64)]


@pytest.mark.parametrize(
    ("maker", "capability", "quicker"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_the_processor_alone_decides(monkeypatch, maker, capability, quicker):
    monkeypatch.setattr(products, "maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.onednn_is_quicker() is (quicker and torch.backends.mkldnn.is_available())
