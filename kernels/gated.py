"""act(gate) * up over the halves of a merged product's rows, in one launch.

    x    [ gate 0 ... gate I-1 | up 0 ... up I-1 ]      a row
    out  act(gate) * up,  act silu or gelu_tanh

Products of few rows do this in their epilogue (``linear_small``); this is for the many rows that a
library multiplies. Arithmetic is float32, and only the result is rounded.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two
from zlm.kernels.linear_epilogue import ACTIVATIONS, activate

# Columns of a program and its warps: 8 columns a thread, a 16-byte load of 2-byte elements. It is
# bound by memory, and columns of one row rarely are too few programs.
BLOCK, WARPS = 1024, 4


def reference(x: Tensor, activation: str) -> Tensor:
    """Return [T, I] in float64 for x [T, 2 I]."""
    gate, up = x.double().chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@direct
@triton.jit
def _gated_kernel(
    p_x, p_out, x_stride, out_stride, N,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    b_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_i < N
    p_row = p_x + i_row * x_stride
    b_gate = tl.load(p_row + b_i, mask=b_in, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + N + b_i, mask=b_in, other=0.0).to(tl.float32)
    b_out = activate(b_gate, KIND) * b_up
    tl.store(p_out + i_row * out_stride + b_i, b_out.to(p_out.dtype.element_ty), mask=b_in)


def gated(x: Tensor, activation: str, *, out: Tensor, pdl: bool = False) -> None:
    """Write act(gate) * up to *out* [T, I] for x [T, 2 I].

    *activation*: silu or gelu_tanh. Elements of a row are adjacent, rows apart by any stride.
    *pdl*: see ``zlm.kernels.chain``.
    """
    rows, width = out.shape
    assert x.shape == (rows, 2 * width) and x.stride(1) == 1 and out.stride(1) == 1
    if not rows:
        return
    block = min(BLOCK, power_of_two(width))
    _gated_kernel[(rows, cdiv(width, block))](
        x, out, x.stride(0), out.stride(0), width,
        BLOCK=block, KIND=ACTIVATIONS[activation], PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
