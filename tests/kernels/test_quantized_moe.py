"""A mixture of experts made of codes, in Triton's interpreter, against references in float64."""

import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from kernel_cases_gemm import relative_error  # noqa: E402
from kernel_cases_moe import CLAMPED, MixtureCase, mixture_both  # noqa: E402
from zlm.kernels.moe import Activation  # noqa: E402


@pytest.mark.parametrize(
    "case",
    [
        MixtureCase(1, 5, 2, 64, 32, "w4z"),
        MixtureCase(23, 5, 2, 64, 32, "fp8", Activation("gelu_tanh")),
        MixtureCase(23, 5, 2, 64, 32, "mxfp4", CLAMPED, biases=True),
        MixtureCase(23, 5, 2, 64, 32, "fp8", biases=True, of_inputs=True),
    ],
    ids=str,
)
def test_mixture(case: MixtureCase) -> None:
    out, expected = mixture_both(case, torch.float32, "cpu")
    assert relative_error(out, expected) < 1e-5
