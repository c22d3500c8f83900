"""Small-M products in Triton's interpreter, against the float64 reference."""

import pytest
import torch
import triton_interpreter
from kernel_cases_gemm import SMALL, GemmCase, operands, relative_error

triton_interpreter.enable()

from zlm.kernels import linear_slices, linear_small, linear_tile  # noqa: E402
from zlm.kernels.linear_epilogue import ACTIVATIONS, Product  # noqa: E402

SLICED = [
    GemmCase(5, 20, 40, bias=True, norm=True, residual=True, activation="gelu_tanh"),
    GemmCase(16, 33, 130, activation="silu"),
    GemmCase(17, 20, 576, norm=True),
    GemmCase(64, 18, 100, bias=True, residual=True),
    GemmCase(7, 16, 2500, bias=True),
    GemmCase(33, 5, 3000, residual=True, activation="silu"),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_product(case: GemmCase) -> None:
    arguments = operands(case, torch.float32, "cpu")
    out = torch.full((case.rows, case.N), float("nan"))
    linear_small.linear(**arguments, out=out)
    assert relative_error(out, linear_small.reference(**arguments)) < 1e-6


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_slices(case: GemmCase) -> None:
    """Exact in float32, which is never theirs; in float16 as they are chosen."""
    arguments = operands(case, torch.float32, "cpu")
    out = torch.full((case.rows, case.N), float("nan"))
    named = {**arguments, "activation": ACTIVATIONS[arguments["activation"]]}
    linear_slices.run(Product(out=out, **named), pdl=False)
    assert relative_error(out, linear_small.reference(**arguments)) < 1e-6
    half = operands(case, torch.float16, "cpu")
    linear_small.linear(**half, out=out)
    assert relative_error(out, linear_small.reference(**half)) < 1e-3


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("case", [SLICED[0], SLICED[1], GemmCase(20, 70, 100, bias=True)], ids=str)
def test_tiles_with_the_weight_as_left_factor(case: GemmCase, rows: int) -> None:
    """The matrix units get it so from 64 columns on, and where a tile has fewer than 16 rows."""
    arguments = operands(case, torch.float16, "cpu")
    out = torch.full((case.rows, case.N), float("nan"))
    named = {**arguments, "activation": ACTIVATIONS[arguments["activation"]]}
    linear_tile.run(Product(out=out, **named), rows, 64 if rows == 32 else 16, 32, 3, 4, pdl=False)
    assert relative_error(out, linear_small.reference(**arguments)) < 1e-3


def test_what_slices_take() -> None:
    def taken(K: int, dtype: torch.dtype = torch.bfloat16, **kinds: object) -> bool:
        arguments = operands(GemmCase(8, 16, K, **kinds), dtype, "cpu")
        named = {**arguments, "activation": ACTIVATIONS[arguments["activation"]]}
        return linear_slices.takes(Product(out=torch.empty(8, 16), **named))

    assert taken(2048, norm=True, activation="silu") and taken(4096, residual=True)
    assert not taken(2049, norm=True) and not taken(2049, activation="silu")
    assert not taken(4097) and not taken(64, torch.float32)


@pytest.mark.parametrize("rows", [1, 6])
def test_the_residual_may_be_the_output(rows: int) -> None:
    arguments = operands(GemmCase(rows, 24, 40, residual=True), torch.float32, "cpu")
    wanted = linear_small.reference(**arguments)
    linear_small.linear(**arguments, out=arguments["residual"])
    assert relative_error(arguments["residual"], wanted) < 1e-6


@pytest.mark.parametrize("rows", [1, 6])
def test_a_float32_residual_beside_float16_weights(rows: int) -> None:
    """What is rounded is x, to the weight's type, and nothing else; 1e5 would overflow float16."""
    case = GemmCase(rows, 24, 40, norm=True, residual=True)
    arguments = operands(case, torch.float16, "cpu", residual_dtype=torch.float32)
    arguments["residual"] += 1e5
    out = torch.full((rows, 24), float("nan"))
    linear_small.linear(**arguments, out=out)
    wanted = linear_small.reference(**arguments)
    assert float((out - wanted).abs().max()) < 0.02  # float32 at 1e5 has steps of 0.008


def test_settings_fit_every_shape() -> None:
    """A tile stays in registers, BN and chunk are powers of two, and a tuned shape is its own."""
    for device in ("", "NVIDIA H200"):
        for N in (1, 100, 576, 2048, 4096, 28672, 262144):
            for K in (40, 576, 1536, 4096, 9216, 14336, 28672):
                for gated in (False, True):
                    columns, chunk, warps = linear_small.vector_setting(device, N, K, gated=gated)
                    assert columns & (columns - 1) == 0 and chunk & (chunk - 1) == 0
                    elements = columns * chunk * (2 if gated else 1)
                    assert elements <= linear_small.MOST_TILE_ELEMENTS * 32 * warps
        with pytest.raises(ValueError, match="64 rows"):
            linear_small.tile_setting(device, 65, 100)
    assert linear_small.vector_setting("NVIDIA H200", 4096, 14336, gated=False) == (1, 16384, 8)
    assert linear_small.vector_setting("NVIDIA H200", 1536, 576, gated=True) == (2, 1024, 1)
