"""act(gate) * up in Triton's interpreter, against the float64 reference."""

import pytest
import torch
import triton_interpreter
from kernel_cases_gemm import GATED, gated_operand, relative_error

triton_interpreter.enable()

from zlm.kernels import gated  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [shape for shape in GATED if shape[0] <= 5])
def test_gated(rows: int, width: int, activation: str) -> None:
    x = gated_operand(rows, width, torch.float32, "cpu")
    out = torch.full((rows, width), float("nan"))
    gated.gated(x, activation, out=out)
    assert relative_error(out, gated.reference(x, activation)) < 1e-6


def test_large_values_stay_finite() -> None:
    x = torch.tensor([[-1e4, -90.0, 0.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    for activation in ("silu", "gelu_tanh"):
        out = torch.empty(1, 4)
        gated.gated(x, activation, out=out)
        torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 2e4]]))
