"""Small-M products in Triton's interpreter, against the float64 reference."""

import pytest
import torch
import triton_interpreter
from kernel_cases_gemm import SMALL, GemmCase, operands, relative_error

triton_interpreter.enable()

from zlm.kernels import linear_small  # noqa: E402


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_product(case: GemmCase) -> None:
    arguments = operands(case, torch.float32, "cpu")
    out = torch.full((case.rows, case.N), float("nan"))
    linear_small.linear(**arguments, out=out)
    assert relative_error(out, linear_small.reference(**arguments)) < 1e-6


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
    assert linear_small.vector_setting("NVIDIA H200", 28672, 4096, gated=False) == (1, 4096, 8)
    assert linear_small.vector_setting("NVIDIA H200", 1536, 576, gated=True) == (4, 1024, 4)
