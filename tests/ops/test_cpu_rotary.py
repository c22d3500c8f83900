"""Rotation of adjacent pairs, against the trigonometric formula."""

import pytest
import torch

from zlm.ops.cpu_rotary import factors, rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate(dtype: torch.dtype) -> None:
    """Five rows of 2 + 1 heads that turn and 1 that does not; the last row is padding."""
    angles = torch.rand(9, 8) * 6
    table = torch.polar(torch.full_like(angles, 1.5), angles)
    positions = torch.tensor([3, 0, 8, 3])
    qkv = torch.randn(5, 4 * 16).to(dtype)
    before = qkv.view(5, 4, 16).clone()
    actual = rotate(qkv, factors(table, positions, 5, 3, 1)).view(5, 4, 16)
    assert actual.dtype == dtype
    even, odd = before[:4, :3, 0::2].float(), before[:4, :3, 1::2].float()
    cos, sin = ((1.5 * f(angles[positions]))[:, None] for f in (torch.cos, torch.sin))
    torch.testing.assert_close(actual[:4, :3, 0::2], (even * cos - odd * sin).to(dtype))
    torch.testing.assert_close(actual[:4, :3, 1::2], (even * sin + odd * cos).to(dtype))
    assert torch.equal(actual[4:], before[4:])
    assert torch.equal(actual[:, 3:], before[:, 3:])
