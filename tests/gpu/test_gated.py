"""act(gate) * up at real shapes on the GPU, against the float64 reference."""

import pytest
import torch
from kernel_cases_gemm import GATED, gated_operand, relative_error

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), GATED)
def test_gated(rows: int, width: int, activation: str, dtype: torch.dtype) -> None:
    from zlm.kernels import gated

    x = gated_operand(rows, width, dtype, "cuda")
    out = torch.full((rows, width), float("nan"), dtype=dtype, device="cuda")
    gated.gated(x, activation, out=out)
    assert relative_error(out, gated.reference(x, activation)) < TOLERANCE[dtype]
