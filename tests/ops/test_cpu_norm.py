"""RMS norm against its formula."""

import pytest
import torch

from zlm.ops.cpu_norm import RMSNorm


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e5])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_values_of_every_size(scale: float, eps: float) -> None:
    x, weight = torch.randn(5, 70) * scale, torch.randn(70)
    actual = RMSNorm(weight, eps)(x)
    expected = formula(x, weight, eps).float()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def test_zeros_stay_zeros() -> None:
    assert (RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_of_each_head_in_place(dtype: torch.dtype) -> None:
    tokens = torch.randn(4, 9, 16).to(dtype)
    heads, kept = tokens[:, :5], tokens[:, 5:].clone()
    weight = torch.randn(5, 16)
    norm = RMSNorm(weight, 1e-6)
    expected = formula(heads, weight, 1e-6).to(dtype)
    torch.testing.assert_close(norm(heads), expected)
    norm.apply_(heads)
    torch.testing.assert_close(heads, expected)
    assert torch.equal(tokens[:, 5:], kept)
