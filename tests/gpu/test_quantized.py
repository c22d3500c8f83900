"""Quantized weights on the GPU: kernels against float64, products as the backend makes them."""

import pytest
import torch
from kernel_cases_gemm import relative_error
from kernel_cases_quantized import KINDS, QuantizedCase, operands

GROUPS = {"w4": 128, "w4z": 128, "w4o": 32, "int8": 0, "int8z": 16, "fp8": 0}
CASES = [
    case
    for kind in KINDS
    for rows in (1, 2, 16, 33, 64)
    for case in (
        QuantizedCase(kind, rows, 6144, 4096, GROUPS[kind], bias=True),
        QuantizedCase(kind, rows, 576, 1536, GROUPS[kind], residual=True),
        QuantizedCase(kind, rows, 4096, 14336, GROUPS[kind], residual=True),
        QuantizedCase(kind, rows, 1536, 576, 64 if GROUPS[kind] == 128 else GROUPS[kind],
                      activation="silu"),
    )
]  # fmt: skip
BLOCKS = [
    QuantizedCase("fp8", rows, 4096, 4096, 128, activation=activation)
    for rows in (1, 8)
    for activation in ("", "gelu_tanh")
]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
TYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[1])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile what the cases launch, many kernels at a time."""
    from zlm.worker.kernel_farm import compile_all
    from zlm.worker.kernel_variants import Recorder

    with Recorder() as recorder:
        for case in CASES + BLOCKS:
            for dtype in TOLERANCE:
                launch(operands(case, dtype, "cuda"), case, dtype)
    compile_all(recorder.variants)


def launch(arguments: dict, case: QuantizedCase, dtype: torch.dtype, **how: bool) -> torch.Tensor:
    from zlm.kernels import quantized_linear

    values = quantized_linear.scratch_values(
        case.rows, arguments["weight"], activation=case.activation, **how
    )
    scratch = torch.full((values,), float("nan"), device="cuda")
    out = torch.full((case.rows, case.N), float("nan"), dtype=dtype, device="cuda")
    quantized_linear.linear(**arguments, out=out, scratch=scratch, **how)
    return out


def check(case: QuantizedCase, dtype: torch.dtype, **how: bool) -> None:
    from zlm.kernels import quantized_linear

    arguments = operands(case, dtype, "cuda")
    out = launch(arguments, case, dtype, **how)
    assert relative_error(out, quantized_linear.reference(**arguments)) < TOLERANCE[dtype]


@TYPES
@pytest.mark.parametrize("case", CASES + BLOCKS, ids=str)
def test_product(case: QuantizedCase, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_by_tiles_and_more_by_vectors(kind: str) -> None:
    check(QuantizedCase(kind, 1, 1024, 1024, GROUPS[kind]), torch.bfloat16, tiles=True)
    check(QuantizedCase(kind, 3, 1024, 1024, GROUPS[kind]), torch.bfloat16, by_rows=True)
    check(QuantizedCase(kind, 200, 1024, 1024, GROUPS[kind]), torch.bfloat16, fixed=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_row_has_the_same_bits_in_any_company(kind: str) -> None:
    from zlm.kernels import quantized_linear

    arguments = operands(QuantizedCase(kind, 150, 768, 1024, GROUPS[kind]), torch.bfloat16, "cuda")
    x, weight = arguments["x"], arguments["weight"]
    whole = torch.empty(150, 768, dtype=torch.bfloat16, device="cuda")
    quantized_linear.linear(x, weight, out=whole, fixed=True)
    for start, stop in ((0, 1), (3, 20), (140, 150)):
        part = torch.empty_like(whole[start:stop])
        quantized_linear.linear(x[start:stop], weight, out=part, fixed=True)
        assert torch.equal(part, whole[start:stop])


@TYPES
@pytest.mark.parametrize("kind", KINDS)
def test_spread(kind: str, dtype: torch.dtype) -> None:
    from zlm.kernels import quantized_codes, quantized_spread

    weight = operands(QuantizedCase(kind, 1, 300, 1536, GROUPS[kind]), dtype, "cuda")["weight"]
    wide = quantized_codes.spread(weight)
    out = torch.full((300, 1536), float("nan"), dtype=dtype, device="cuda")
    quantized_spread.spread(weight, out=out)
    assert relative_error(out, wide) < TOLERANCE[dtype]
    ids = torch.tensor([299, 0, 7], device="cuda")
    quantized_spread.embedding(ids, weight, 3.0, out=out[:3])
    assert relative_error(out[:3], wide[ids] * 3) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [576, 4096, 14336])
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
def test_rows_are_rounded_to_float8(width: int, normed: bool) -> None:
    from zlm.kernels import quantized_codes, quantized_rows

    x = torch.randn(37, width, device="cuda").bfloat16()
    x[3] = 0
    norm = torch.rand(width, device="cuda") if normed else None
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(37, device="cuda")
    quantized_rows.quantize(x, out=q, scales=scales, norm=norm, eps=1e-5)
    wanted, wanted_scales = quantized_rows.reference(x, norm, 1e-5)
    assert relative_error(scales, wanted_scales) < 1e-6
    assert relative_error(quantized_codes.unpack(q).float(), wanted) < 0.03


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_rows_are_rounded_to_float8(activation: str, group: int) -> None:
    from zlm.kernels import quantized_codes, quantized_rows

    x = torch.randn(37, 2 * 14336, device="cuda").bfloat16()
    q = torch.empty(37, 14336, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(37, 14336 // (group or 14336), device="cuda")
    quantized_rows.quantize(x, out=q, scales=scales, activation=activation, group=group)
    wanted, wanted_scales = quantized_rows.reference(x, activation=activation, group=group)
    assert relative_error(scales, wanted_scales.view_as(scales)) < 1e-6
    assert relative_error(quantized_codes.unpack(q).float(), wanted) < 0.03


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(("rows", "N", "K"), [(17, 300, 256), (64, 4096, 4096), (700, 1024, 14336)])
def test_product_of_rounded_rows(rows: int, N: int, K: int, group: int) -> None:
    from zlm.kernels import quantized_codes, quantized_matmul

    weight = operands(QuantizedCase("fp8", 1, N, K, group), torch.bfloat16, "cuda")["weight"]
    codes = torch.randn(rows, K, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(rows, K // (group or K), device="cuda")
    out = torch.randn(rows, N, device="cuda").bfloat16()
    wanted = codes.double() * scales.double().repeat_interleave(group or K, 1)
    wanted = out.double() + wanted @ quantized_codes.spread(weight).t()
    scratch = torch.empty(quantized_matmul.scratch_values(rows, weight), device="cuda")
    quantized_matmul.matmul(
        quantized_codes.pack(codes, 8), scales, weight, out=out, residual=out, scratch=scratch
    )
    assert relative_error(out, wanted) < 6e-3


@pytest.mark.parametrize("rows", [1, 2, 17, 300])
@pytest.mark.parametrize("kind", ["w4", "w4z", "fp8", "blocks"])
@pytest.mark.parametrize("spread", [False, True], ids=["codes", "both"])
def test_products_of_the_backend(kind: str, rows: int, spread: bool) -> None:
    """Each is within its rounding of float32's: x too is rounded to e4m3 with many rows."""
    from zlm.ops.block_matrix import BlockMatrix
    from zlm.ops.gpu import GpuOps
    from zlm.ops.gpu_quantized import QuantizedProduct
    from zlm.weights.online import float8, four_bits

    torch.manual_seed(0)
    weight = torch.randn(1024, 2048, device="cuda") / 45
    matrix = float8(weight) if kind in ("fp8", "blocks") else four_bits(weight)
    assert matrix is not None
    if kind == "blocks":
        scales = torch.rand(8, 16, device="cuda") / 1000
        matrix = BlockMatrix(matrix.codes, scales, None, (128, 128))
    if kind == "w4z":
        zeros = torch.randint(0, 16, matrix.scales.shape, device="cuda")
        matrix = BlockMatrix(matrix.codes, matrix.scales, matrix.scales * -zeros, matrix.block)
    ops = GpuOps(torch.device("cuda"), torch.bfloat16, spread=spread)
    product = ops.linear(matrix)
    assert isinstance(product, QuantizedProduct)
    x, residual = (torch.randn(rows, k, device="cuda").bfloat16() for k in (2048, 1024))
    norm = ops.norm(torch.rand(2048, device="cuda"), 1e-5)
    wide = matrix.dequantize(torch.float32).double().t()
    allowed = 0.05 if product.core.rounds and rows > 1 else 6e-3
    assert relative_error(product(x), x.double() @ wide) < allowed
    assert relative_error(product(x, norm), norm(x).double() @ wide) < allowed
    wanted = residual.double() + x.double() @ wide
    assert relative_error(product.add(x, residual.clone()), wanted) < allowed
    gated = ops.gated(matrix, matrix, None, None, "silu")(x)
    both = x.double() @ wide
    assert relative_error(gated, torch.nn.functional.silu(both) * both) < 2 * allowed
