"""Rows of the embedding at real shapes on the GPU, against the float64 reference."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("width", [576, 640, 4096])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_as_torch_does_it(tokens: int, width: int, dtype: torch.dtype) -> None:
    """To the bit: a product of the types' own rounding."""
    from zlm.kernels import embedding

    weight = torch.randn(5000, width, device="cuda").to(dtype)
    ids = torch.randint(0, 5000, (tokens,), device="cuda")
    out = torch.full((tokens, width), float("nan"), dtype=dtype, device="cuda")
    embedding.embedding(ids, weight, 25.25, out=out)
    assert torch.equal(out, weight[ids] * 25.25)
