"""Products of 4 and 8 bits on the CPU, beside those of the same weights in float32."""

import pytest
import torch

from zlm.ops import cpu_quantized
from zlm.ops.block_matrix import BlockMatrix
from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_quantized import (
    FEW_ROWS,
    HEAD_ROWS,
    EightBits,
    FourBits,
    hadamard,
    is_usable,
)

pytestmark = pytest.mark.skipif(not is_usable(), reason="this CPU or torch lacks the products")

NEAR = 0.012  # relative error (norms): 8 bits a row of activations, 7 and a sign a row of weights
OPS = CpuOps(torch.bfloat16, quantized=True, narrow=True)
WIDE = CpuOps(torch.bfloat16, quantized=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def quantized(rows: int = 96, columns: int = 128, group: int = 32, bits: int = 4) -> BlockMatrix:
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    scales = torch.rand(rows, columns // group) / (1 << bits)
    return BlockMatrix(codes, scales, scales * -(1 << (bits - 1)), (1, group))


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.shape == expected.shape and ours.dtype == torch.bfloat16
    return float((ours.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 70])
def test_products(rows: int, bits: int) -> None:
    matrix = quantized(bits=bits)
    weight, bias = matrix.dequantize(torch.float32), torch.randn(96).bfloat16()
    x, residual = torch.randn(rows, 128).bfloat16(), torch.randn(rows, 96).bfloat16()
    product = OPS.linear(matrix, bias)
    expected = x.float() @ weight.t() + bias.float()
    assert FourBits.takes(matrix) == (bits == 4)
    near = NEAR if bits == 8 or rows > FEW_ROWS else NEAR / 3
    assert error(product(x), expected) < near
    total = product.add(x, residual.clone())
    assert error(total, expected + residual.float()) < near


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_activations_are_rounded_by_the_checkpoints_scale(dtype: torch.dtype) -> None:
    codes, scales = torch.randint(-100, 100, (96, 128)).to(dtype), torch.rand(96, 1) / 50
    matrix = BlockMatrix(codes, scales, None, (1, 128), input_scale=0.02)
    x, most = torch.randn(5, 128).bfloat16(), 127 if dtype == torch.int8 else 448
    x[1, 3] = 1e4
    fine = (x.double() / 0.02).clamp(-most - (most == 127), most)
    rounded = fine.round() if dtype == torch.int8 else fine.float().to(dtype).double()
    expected = (rounded * 0.02) @ matrix.dequantize(torch.float32).double().t()
    assert error(WIDE.linear(matrix)(x), expected.float()) < 0.004


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 70])
def test_products_that_may_take_memory_are_as_exact_as_bfloat16(rows: int) -> None:
    gate, up, x = quantized(), quantized(bits=8), torch.randn(rows, 128).bfloat16()
    for matrix in (gate, up):
        weight = matrix.dequantize(torch.float32)
        assert error(WIDE.linear(matrix)(x), x.float() @ weight.t()) < NEAR / 3
    ours = WIDE.gated(gate, gate, None, None, "silu")(x)
    g = x.float() @ gate.dequantize(torch.float32).t()
    assert error(ours, torch.nn.functional.silu(g) * g) < NEAR


def test_rows_do_not_see_one_another() -> None:
    """Each is rounded by itself: a large one beside it changes nothing."""
    product, x = OPS.linear(quantized()), torch.randn(20, 128).bfloat16()
    alone = product(x)
    x[0] *= 1000
    assert torch.equal(product(x)[1:], alone[1:])


def test_a_few_large_columns_do_not_take_the_others_bits() -> None:
    matrix, x = quantized(), torch.randn(32, 128).bfloat16()
    x[:, 5] *= 60
    matrix.codes[:, 5] = 8  # a weight of zero: nothing of the column is in the result
    expected = x.float() @ matrix.dequantize(torch.float32).t()
    assert error(OPS.linear(matrix)(x), expected) < 6 * NEAR


@pytest.mark.parametrize("size", [1, 2, 64])
def test_hadamard_is_orthogonal(size: int) -> None:
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size))


@pytest.mark.parametrize("columns", [36, 64, 27])
def test_any_width_has_a_rotation(columns: int) -> None:
    weight, x = torch.randn(16, columns), torch.randn(9, columns).bfloat16()
    assert error(EightBits(weight)(x), x.float() @ weight.t()) < NEAR


@pytest.mark.parametrize("rows", [2, 40])
def test_gated(rows: int) -> None:
    gate, up = quantized(), quantized()
    x = torch.randn(rows, 128).bfloat16()
    ours = OPS.gated(gate, up, None, None, "silu")(x)
    g, u = (x.float() @ each.dequantize(torch.float32).t() for each in (gate, up))
    assert error(ours, torch.nn.functional.silu(g) * u) < 3 * NEAR


def test_embedding_and_head() -> None:
    matrix = quantized(rows=64, bits=8)
    weight = matrix.dequantize(torch.float32)
    ids = torch.tensor([3, 63, 3])
    rows = OPS.embedding(matrix, 2.0, torch.bfloat16)(ids)
    assert error(rows, weight[ids] * 2) < 0.005
    hidden = torch.randn(3, 128).bfloat16()
    logits = OPS.lm_head(matrix, 0.0)(hidden)
    expected = hidden.float() @ weight.t()
    assert logits.dtype == torch.float32
    assert error(logits.bfloat16(), expected) < NEAR


def test_what_is_not_quantized_alike_is_computed_all_the_same() -> None:
    x, gate, up = torch.randn(3, 128).bfloat16(), quantized(), torch.randn(96, 128).bfloat16()
    ours = OPS.gated(gate, up, None, None, "silu")(x)
    g, u = x.float() @ gate.dequantize(torch.float32).t(), x.float() @ up.float().t()
    assert error(ours, torch.nn.functional.silu(g) * u) < NEAR


MANY = 2 * HEAD_ROWS + 3  # more than are multiplied at a time


@pytest.mark.parametrize("least_large", [1000, 1 << 30], ids=["large", "small"])
@pytest.mark.parametrize(("rows", "most"), [(FEW_ROWS, 0.01), (MANY, 0.02)])
def test_a_head_of_8_bits(
    monkeypatch: pytest.MonkeyPatch, rows: int, most: float, least_large: int
) -> None:
    """One row of zeros, one with a number that stands out."""
    monkeypatch.setattr(cpu_quantized, "LARGE_HEAD_BYTES", least_large)
    matrix = quantized(96, 64, bits=8)
    x = torch.randn(rows, 64).bfloat16()
    x[0], x[1, 3] = 0, 300
    exact = x.double() @ matrix.dequantize(torch.float32).double().t()
    head = WIDE.lm_head(matrix, 0.0)
    assert isinstance(head.packed, cpu_quantized.HeadProduct)
    logits = head(x)
    assert logits.dtype == torch.float32 and not logits[0].any()
    off = (logits - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9)
    assert off.max() < most


def test_a_head_of_4_bits_is_a_product_like_others() -> None:
    assert isinstance(WIDE.lm_head(quantized(96, 64), 0.0).packed, cpu_quantized.QuantizedProduct)
