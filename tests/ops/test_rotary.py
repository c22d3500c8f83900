"""Rotation of adjacent pairs, against the trigonometric formula."""

import pytest
import torch

from zlm.ops.rotary import rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [4, 16])
def test_rotate_in_place(rotated: int, dtype: torch.dtype) -> None:
    tokens = torch.randn(5, 7, 16).to(dtype)
    heads, before = tokens[:, :3], tokens.clone()
    angles = torch.rand(4, rotated // 2) * 6
    rotate(heads, torch.polar(torch.full_like(angles, 1.5), angles))
    even, odd = before[:4, :3, 0:rotated:2].float(), before[:4, :3, 1:rotated:2].float()
    cos, sin = (1.5 * angles.cos())[:, None], (1.5 * angles.sin())[:, None]
    torch.testing.assert_close(heads[:4, :, 0:rotated:2], (even * cos - odd * sin).to(dtype))
    torch.testing.assert_close(heads[:4, :, 1:rotated:2], (even * sin + odd * cos).to(dtype))
    assert torch.equal(tokens[:4, :3, rotated:], before[:4, :3, rotated:])
    assert torch.equal(tokens[4:], before[4:])  # a padding row
    assert torch.equal(tokens[:, 3:], before[:, 3:])
