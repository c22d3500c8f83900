"""Products with quantized weights in Triton's interpreter, against the float64 reference."""

import pytest
import torch
import triton_interpreter
from kernel_cases_gemm import relative_error

triton_interpreter.enable()

from kernel_cases_quantized import SMALL, QuantizedCase, operands  # noqa: E402
from zlm.kernels import quantized_codes, quantized_linear  # noqa: E402


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.wide_programs(monkeypatch)


def computed(case: QuantizedCase, dtype: torch.dtype, *, fixed: bool = False) -> tuple[float, dict]:
    """Return the error of a case, and its operands."""
    arguments = operands(case, dtype, "cpu")
    values = quantized_linear.scratch_values(
        case.rows, arguments["weight"], activation=case.activation, fixed=fixed
    )
    scratch = torch.full((values,), float("nan"))
    out = torch.full((case.rows, case.N), float("nan"))
    quantized_linear.linear(**arguments, out=out, scratch=scratch, fixed=fixed)
    return relative_error(out, quantized_linear.reference(**arguments)), arguments


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("fixed", [False, True], ids=["", "fixed"])
def test_product(case: QuantizedCase, fixed: bool) -> None:
    error, _ = computed(case, torch.float32, fixed=fixed)
    assert error < (1e-4 if case.kind.startswith("w4") else 2e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_undone(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 96), dtype=torch.uint8)
    packed = quantized_codes.pack(codes, bits)
    assert torch.equal(quantized_codes.unpack(packed), codes)
    assert not torch.equal(packed.view(torch.uint8).flatten()[:96], codes[0])
