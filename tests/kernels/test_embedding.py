"""Rows of the embedding in Triton's interpreter, against the float64 reference."""

import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from zlm.kernels import embedding  # noqa: E402


@pytest.mark.parametrize("scale", [1.0, 24.0])
@pytest.mark.parametrize("width", [48, 1100])
def test_embedding(width: int, scale: float) -> None:
    weight = torch.randn(30, width, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([29, 0, 7, 7, 12])
    out = torch.full((5, width + 4), float("nan"))
    embedding.embedding(ids, weight, scale, out=out[:, :width])
    wanted = embedding.reference(ids, weight, scale)
    torch.testing.assert_close(out[:, :width].double(), wanted, rtol=1e-6, atol=0.0)
    assert bool(out[:, width:].isnan().all())


def test_a_wide_result_of_narrow_weights() -> None:
    """Not rounded on the way: float16 would overflow."""
    weight = torch.full((3, 8), 6e4, dtype=torch.float16)
    out = torch.empty(2, 8)
    embedding.embedding(torch.tensor([2, 1], dtype=torch.int32), weight, 16.0, out=out)
    assert torch.equal(out, embedding.reference(torch.tensor([2, 1]), weight, 16.0).float())


def test_no_tokens() -> None:
    embedding.embedding(torch.empty(0).long(), torch.ones(3, 8), 1.0, out=torch.empty(0, 8))
