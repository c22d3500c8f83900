"""Activations in float8, and their products, in Triton's interpreter."""

import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from kernel_cases_quantized import QuantizedCase, random_codes  # noqa: E402
from zlm.kernels import quantized_codes, quantized_matmul, quantized_rows  # noqa: E402


@pytest.mark.parametrize(
    ("activation", "normed", "group"),
    [("", False, 0), ("", True, 0), ("silu", False, 0), ("", True, 32), ("gelu_tanh", False, 32)],
)
def test_rows(activation: str, normed: bool, group: int) -> None:
    """The interpreter cuts off what the card rounds."""
    torch.manual_seed(0)
    x = torch.randn(5, 192 if activation else 96)
    x[3] = 0
    norm = torch.rand(96) if normed else None
    q = torch.empty(5, 96, dtype=torch.float8_e4m3fn)
    scales = torch.full((5, 96 // (group or 96)), float("nan"))
    quantized_rows.quantize(
        x, out=q, scales=scales, norm=norm, eps=1e-5, activation=activation, group=group
    )
    wanted, wanted_scales = quantized_rows.reference(x, norm, 1e-5, activation, group)
    torch.testing.assert_close(scales.view(wanted_scales.shape).double(), wanted_scales)
    found = quantized_codes.unpack(q).double()
    assert float((found - wanted).norm() / wanted.norm()) < 0.08


@pytest.mark.parametrize(("activation", "group"), [("", 0), ("silu", 0), ("", 32)])
def test_rows_with_a_scale_that_is_given(activation: str, group: int) -> None:
    """What is beyond its range becomes the largest number."""
    torch.manual_seed(0)
    x = torch.randn(5, 192 if activation else 96)
    x[2, 7], x[3, 8] = 300.0, -300.0
    how = {"activation": activation, "group": group, "static": 0.01}
    q, scales = torch.empty(5, 96, dtype=torch.float8_e4m3fn), torch.empty(5, 96 // (group or 96))
    quantized_rows.quantize(x, out=q, scales=scales, **how)
    wanted, wanted_scales = quantized_rows.reference(x, **how)
    assert bool((scales == 0.01).all()) and torch.allclose(
        wanted_scales, torch.tensor(0.01).double()
    )
    found = quantized_codes.unpack(q).double()
    assert float((found - wanted).norm() / wanted.norm()) < 0.08
    if not activation:
        assert found[2, 7] == 448.0 and found[3, 8] == -448.0


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(("with_bias", "K"), [(False, 256), (True, 1280), (True, 1360)])
def test_product(group: int, with_bias: bool, K: int) -> None:
    """The longer ones are split."""
    if group and K % group:
        pytest.skip("no whole groups")
    weight = random_codes(QuantizedCase("fp8", 1, 30, K, group), "cpu")
    codes = torch.randn(7, K).to(torch.float8_e4m3fn)
    scales = torch.rand(7, K // group if group else 1)
    bias, residual = (torch.randn(30), torch.randn(7, 30)) if with_bias else (None, None)
    values = quantized_matmul.scratch_values(7, weight)
    assert (values > 0) == (K > 1000)
    out = torch.full((7, 30), float("nan"))
    quantized_matmul.matmul(
        quantized_codes.pack(codes, 8),
        scales,
        weight,
        bias,
        out=out,
        residual=residual,
        scratch=torch.full((values,), float("nan")),
    )
    wanted = codes.double() * scales.double().repeat_interleave(group or K, 1)
    wanted = wanted @ quantized_codes.spread(weight).t()
    if bias is not None and residual is not None:
        wanted += bias + residual
    assert float((out - wanted).norm() / wanted.norm()) < 1e-5
