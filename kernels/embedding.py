"""Rows of the embedding by token id, scaled and in the type of the residual, in one launch."""

import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two

BLOCK, WARPS = 1024, 4  # columns of a program: 8 a thread, one 16-byte load of 2-byte elements


def reference(token_ids: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return [T, H] in float64 for integers [T] and weight [V, H]."""
    return weight[token_ids.long()].double() * scale


@direct
@triton.jit
def _embedding_kernel(
    p_ids, p_weight, p_out, stride, out_stride, scale,
    H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    b_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = b_h < H
    begin(PDL)
    i_id = tl.load(p_ids + i_token).to(tl.int64)
    b_row = tl.load(p_weight + i_id * stride + b_h, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(p_out + i_token * out_stride + b_h, b_row.to(p_out.dtype.element_ty), mask=mask)


def embedding(
    token_ids: Tensor, weight: Tensor, scale: float, *, out: Tensor, pdl: bool = False
) -> None:
    """Write the rows *token_ids* (integers [T], all in the vocabulary) of *weight* [V, H], times
    *scale*, to *out* [T, H], of any type.

    Elements of a row are adjacent, rows apart by any stride. *pdl*: see ``zlm.kernels.chain``.
    """
    tokens, width = out.shape
    assert weight.shape[1] == width and token_ids.shape == (tokens,)
    assert weight.stride(1) == 1 and out.stride(1) == 1 and token_ids.stride(0) == 1
    if not tokens:
        return
    block = min(BLOCK, power_of_two(width))
    _embedding_kernel[(tokens, cdiv(width, block))](
        token_ids, weight, out, weight.stride(0), out.stride(0), float(scale),
        H=width, BLOCK=block, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
