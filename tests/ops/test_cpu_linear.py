"""Packed products against plain ones, and the bits of a row whatever its company."""

import pytest
import torch
import torch.nn.functional as F

from zlm.ops import cpu_linear, onednn

FORMS = {
    "packed": cpu_linear.pack,
    "dense": cpu_linear.DenseProduct,
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> type[cpu_linear.DenseProduct]:
    return FORMS[request.param]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(form: type[cpu_linear.DenseProduct], rows: int, with_bias: bool) -> None:
    weight, x = torch.randn(96, 40), torch.randn(rows, 40)
    bias = torch.randn(96) if with_bias else None
    product = form(weight, bias)
    residual = torch.randn(rows, 96)
    kept = residual.clone()
    close(product(x), F.linear(x, weight, bias))
    close(product.add(x, residual), F.linear(x, weight, bias) + residual)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(
    form: type[cpu_linear.DenseProduct], activation: str, rows: int, with_bias: bool
) -> None:
    gate, up, x = torch.randn(96, 40), torch.randn(96, 40), torch.randn(rows, 40)
    bias = torch.randn(2, 96) if with_bias else (None, None)
    wide = F.linear(x, gate, bias[0])
    activated = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")
    actual = form(gate, bias[0]).gate(x, form(up, bias[1]), activation)
    close(actual, activated * F.linear(x, up, bias[1]))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bfloat16(form: type[cpu_linear.DenseProduct]) -> None:
    weight, x = torch.randn(96, 40).bfloat16(), torch.randn(5, 40).bfloat16()
    product = form(weight, None)
    actual = product.gate(x, product, "silu")
    wide = F.linear(x.float(), weight.float())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), F.silu(wide) * wide, rtol=3e-2, atol=3e-2)


@pytest.mark.skipif(not onednn.can_pack(torch.float32), reason="no packed products here")
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (100, 36)])
def test_a_row_has_the_same_bits_in_any_company(outputs: int, inputs: int) -> None:
    product = cpu_linear.pack(torch.randn(outputs, inputs))
    x = torch.randn(100, inputs)
    expected = product(x)
    for rows in (1, 2, 3, 4, 5, 8, 17, 32, 64, 99):
        assert torch.equal(product(x[:rows]), expected[:rows]), rows
        shifted = product(x[-rows:].contiguous())
        assert torch.equal(shifted, expected[-rows:]), rows


def test_without_the_operators_products_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(onednn.OneDnnProduct, "__init__", refuse)
    onednn.can_pack.cache_clear()
    try:
        assert not onednn.can_pack(torch.float32)
        assert isinstance(cpu_linear.pack(torch.randn(4, 4)), cpu_linear.DenseProduct)
        assert cpu_linear.min_rows(torch.float32) == 1
    finally:
        onednn.can_pack.cache_clear()
