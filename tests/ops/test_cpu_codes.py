"""Products of few rows with codes of 4 and 8 bits against the dequantized weight in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zlm.ops.block_matrix import BlockMatrix
from zlm.ops.cpu import CpuOps
from zlm.ops.cpu_codes import MOST_ROWS, Codes
from zlm.ops.cpu_linear import activate
from zlm.ops.cpu_native import NativeKernels
from zlm.ops.cpu_norm import RMSNorm
from zlm.ops.cpu_quantized import QuantizedGated, QuantizedProduct

KINDS = {  # codes' type, least and largest, columns of a group, whether there are offsets
    "q4_1": (torch.uint8, 0, 15, 32, True),
    "q8_0": (torch.int8, -128, 127, 32, False),
    "q6_k": (torch.int8, -32, 31, 16, False),
    "awq": (torch.uint8, 0, 15, 128, True),
    "bytes": (torch.uint8, 0, 255, 64, True),
    "wide": (torch.int8, -127, 127, 256, True),
}


@pytest.fixture(autouse=True)
def native(native_kernels: NativeKernels) -> NativeKernels:
    if not native_kernels.has_products:
        pytest.skip("this processor lacks VNNI")
    return native_kernels


def matrix(kind: str, rows: int = 48, columns: int = 512, seed: int = 0) -> BlockMatrix:
    dtype, least, most, group, has_offsets = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(least, most + 1, (rows, columns), generator=generator).to(dtype)
    scales = (torch.rand(rows, columns // group, generator=generator) + 0.1).half().float()
    offsets = None
    if has_offsets:
        offsets = torch.randn(scales.shape, generator=generator).half().float()
    return BlockMatrix(codes, scales, offsets, (1, group))


def activations(rows: int, columns: int = 512, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[:, 7] *= 50  # as some columns of real ones are
    return x.to(dtype)


def exact(weight: BlockMatrix, x: Tensor) -> Tensor:
    return x.double() @ weight.dequantize(torch.float32).double().t()


def assert_near(actual: Tensor, expected: Tensor, rounding: float = 1e-3) -> None:
    error = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < rounding, error


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_product(native: NativeKernels, kind: str, rows: int) -> None:
    weight, x = matrix(kind), activations(rows)
    assert Codes.takes(weight, native)
    codes = Codes(weight, None, native)
    assert codes.bits == (4 if KINDS[kind][2] == 15 else 8)
    assert_near(codes.wide(x), exact(weight, x))
    assert_near(codes.wide(x.float()), exact(weight, x))
    narrow = codes(x)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow, codes.wide(x).bfloat16())


@pytest.mark.parametrize("kind", ["stacked", "asymmetric", "large"])
def test_offsets_that_are_many_scales(native: NativeKernels, kind: str) -> None:
    """What a group's offset lacks would be the same for all its columns: it shows where x > 0."""
    weight, x = matrix("q8_0"), activations(4).abs()
    codes, scales = weight.codes, weight.scales
    if kind == "stacked":  # rows of 4 bits beside others of 8
        codes = torch.cat((codes[:16], codes[16:] & 15))
        offsets = torch.cat((scales[:16] * 0, scales[16:] * -8.3))
    elif kind == "asymmetric":
        codes = (codes.int() // 6 + 128).to(torch.uint8)
        offsets = scales * -(100 + 55 * torch.rand(scales.shape)).round()
    else:
        scales, offsets = scales * 5e4, None  # 128 of which float16 does not hold
    weight = replace(weight, codes=codes, scales=scales.half().float(), offsets=offsets)
    assert Codes.takes(weight, native)
    assert_near(Codes(weight, None, native).wide(x), exact(weight, x))


@pytest.mark.parametrize("rows", [1, 6])
def test_bias_norm_and_residual(native: NativeKernels, rows: int) -> None:
    weight, bias, x = matrix("q4_1"), torch.randn(48) * 20, activations(rows)
    norm = RMSNorm(torch.rand(512) + 0.5, 1e-5, torch.float32)
    product = QuantizedProduct(weight, bias, native=native)
    expected = exact(weight, norm(x)) + bias
    assert_near(product(x, norm), expected, 4e-3)
    for dtype in (torch.float32, torch.bfloat16):
        residual = (torch.randn(rows, 48) * 50).to(dtype)
        before = residual.double()
        actual = product.add(x, residual, norm)
        assert actual is residual
        rounding = 1e-3 if dtype == torch.float32 else 4e-3
        assert_near(actual, expected + before, rounding)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [64, 80])
def test_gated(native: NativeKernels, activation: str, has_bias: bool, rows: int) -> None:
    """Of 80 rows the halves are no whole panels."""
    weight, x = matrix("q4_1", rows=rows), activations(3)
    weight = replace(weight, scales=weight.scales / 64, offsets=None)
    bias = torch.randn(rows) if has_bias else None
    gated = QuantizedGated(weight, bias, activation, native=native)
    gate, up = (exact(weight, x) + (0.0 if bias is None else bias)).chunk(2, 1)
    actual = gated(x)
    assert actual.shape == (3, rows // 2) and actual.dtype == torch.bfloat16
    assert_near(actual, activate(gate, activation) * up, 4e-3 if rows == 64 else 1e-2)


@pytest.mark.parametrize(("kind", "narrow"), [("q4_1", False), ("q4_1", True), ("q8_0", False)])
def test_many_rows(native: NativeKernels, kind: str, narrow: bool) -> None:
    """Those of 4 bits have bfloat16's product, if there is memory for it: it is as near."""
    weight, x = matrix(kind, rows=64), activations(MOST_ROWS + 1) / 64
    product = QuantizedProduct(weight, narrow=narrow, native=native)
    gated = QuantizedGated(weight, None, "silu", narrow=narrow, native=native)
    parts = x[:MOST_ROWS], x[MOST_ROWS:]
    for operation in (product, gated):
        few, many = torch.cat([operation(part) for part in parts]), operation(x)
        assert_near(many, few.double(), 1e-2)
        assert torch.equal(many, few) == (narrow or kind == "q8_0")


@pytest.mark.parametrize("kind", ["q4_1", "q6_k"])
@pytest.mark.parametrize("rows", [1, 70])
def test_head(native: NativeKernels, kind: str, rows: int) -> None:
    weight, x = matrix(kind), activations(rows)
    head = CpuOps(torch.bfloat16, quantized=True, native=native).lm_head(weight, 0.0)
    assert_near(head(x), exact(weight, x))


def test_a_row_has_the_same_bits_in_any_company(native: NativeKernels) -> None:
    x = activations(11)
    codes = Codes(matrix("q6_k", rows=1600), None, native)
    expected = codes.wide(x)
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(codes.wide(x), expected)
        for row in range(11):
            assert torch.equal(codes.wide(x[row : row + 1])[0], expected[row])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_shows_in_its_own_row_alone(native: NativeKernels, broken: float) -> None:
    weight, x = matrix("q4_1"), activations(3)
    codes = Codes(weight, None, native)
    expected = codes.wide(x)
    x[1, 100] = broken
    actual = codes.wide(x)
    assert not actual[1].isfinite().any()
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-36, 1e-30, 1e30])
def test_rows_of_every_size(native: NativeKernels, size: float) -> None:
    weight, x = matrix("q8_0"), activations(2, dtype=torch.float32) * size
    actual = Codes(weight, None, native).wide(x)
    if size < 1e-35:
        assert actual.abs().max() < 1e-30
    else:
        assert_near(actual, exact(weight, x))


def test_what_it_does_not_take(native: NativeKernels) -> None:
    weight = matrix("q4_1")
    assert Codes.takes(weight, native) and not Codes.takes(weight, None)
    tiny = weight.scales.clone()
    tiny[3] = 1e-9  # which float16 has no number near
    for other in (
        replace(weight, codes=weight.codes[:40], scales=weight.scales[:40]),
        replace(weight, block=(1, 48)),
        replace(weight, block=(2, 32)),
        replace(weight, order=torch.arange(512)),
        replace(weight, floats=True),
        replace(weight, input_scale=0.5),
        replace(weight, codes=weight.codes.to(torch.float8_e4m3fn)),
        replace(weight, scales=weight.scales * 1e5),
        replace(weight, scales=tiny),
    ):
        assert not Codes.takes(other, native)
    small = weight.scales.clone()
    small[:, 3] = 1e-9  # but beside the others that is nothing
    assert Codes.takes(replace(weight, scales=small), native)
