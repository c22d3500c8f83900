"""Norms and products on the GPU: few rows by our own products, more by cuBLAS.

Up to the reach of our kernels (``zlm.kernels.linear_small``) a product is one launch with its norm
before it and activation, gate or residual after it. More rows are a norm, cuBLAS through torch, and
for a gated product a third launch; a residual is added by cuBLAS itself. Of some shapes cuBLAS is
told which kernel to take (``cublas_lt``). There is one copy of a weight, [N, K] as checkpoints have
it; gate and up are merged to [2 I, K].

*pdl*: our kernels start before the one before them has ended (``zlm.kernels.chain``).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.kernels import gated, linear_small, rms_norm
from zlm.kernels.linear_epilogue import SMALL_BYTES
from zlm.kernels.linear_small import VECTOR_ROWS, device_name
from zlm.ops import cublas_lt
from zlm.ops.backend import Norm, Product

# Rows of x up to which products shared out among warps (``linear_slices``) beat cuBLAS in a chain
# of overlapping launches, by the rows of a weight (gate and up together) and its columns. Without
# an entry: vector products alone. 576 x 1536 takes 3.2 us at 8 rows and 3.8 at 32, by tiles 3.7
# and 4.7, by cuBLAS 4.7 and 4.8; 1024 x 3072 4.4 at 8 rows, 7.4 and 6.9.
OWN_ROWS: dict[str, dict[tuple[int, int], int]] = {
    "NVIDIA H200": {
        (576, 1536): 32,
        (640, 1024): 16,
        (640, 2048): 32,
        (1024, 2048): 16,
        (1024, 3072): 16,
    },
}
# From how many rows of x, and up to how many, tiles after a norm of its own beat cuBLAS in such a
# chain: a step of SmolLM2 took 573, 631, 709 and 725 us with tiles at 8, 16, 32 and 64 rows and
# 754, 815, 836 and 888 with cuBLAS; 6144 x 4096 takes 14.9 us at 8 rows and 15.9.
TILE_ROWS: dict[str, dict[tuple[int, int], tuple[int, int]]] = {
    "NVIDIA H200": {
        (960, 576): (5, 64),
        (576, 576): (5, 64),
        (3072, 576): (5, 64),
        (576, 1536): (33, 64),
        (1536, 640): (5, 64),
        (640, 1024): (17, 64),
        (4096, 640): (5, 64),
        (640, 2048): (33, 64),
        (4096, 1024): (5, 64),
        (6144, 1024): (5, 64),
        (6144, 4096): (2, 16),
        (4096, 4096): (2, 16),
        (28672, 4096): (2, 16),
        (4096, 14336): (2, 8),
    },
}


@dataclass(frozen=True, slots=True)
class Reach:
    """Up to how many rows our own kernels multiply with a weight, and how they are launched."""

    rows: int
    overlaps: bool  # while the kernel before still runs
    norms: bool  # with the norm in the product's launch
    tiles: range = range(0)  # numbers of rows beyond, for which tiles are ours too, without it

    def covers(self, rows: int) -> bool:
        return rows <= self.rows or rows in self.tiles


def reach(weight: Tensor, *, pdl: bool) -> Reach:
    """Return the reach of our kernels for *weight*; *pdl*: whether kernels of a step overlap.

    With a large weight every row beyond the first costs its product, and thousands of programs that
    each compute the norm read as much again as the weight: 69 us against 55 for 28672 x 4096.
    """
    rows, tiles = 0, range(0)
    if pdl and weight.dtype != torch.float32:  # which the matrix units do not multiply exactly
        size = (weight.shape[0], weight.shape[1])
        card = device_name(weight.device)
        rows = OWN_ROWS.get(card, {}).get(size, 0)
        first, last = TILE_ROWS.get(card, {}).get(size, (0, -1))
        tiles = range(first, last + 1)
    if weight.nbytes > SMALL_BYTES:
        return Reach(1, overlaps=pdl, norms=False, tiles=tiles)
    return Reach(max(rows, VECTOR_ROWS), overlaps=pdl, norms=True, tiles=tiles)


class GpuNorm:
    """See ``zlm.ops.backend.Norm``."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype, *, pdl: bool) -> None:
        self.weight = weight
        self.eps = eps
        self.dtype = dtype
        self.pdl = pdl

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        rms_norm.rms_norm(x, self.weight, self.eps, out=out, pdl=self.pdl)
        return out


class GpuProduct:
    """See ``zlm.ops.backend.Product``; results are of *dtype* (``add``'s: the residual's)."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, pdl: bool
    ) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.dtype = dtype
        self.reach = reach(self.weight, pdl=pdl)
        self.tuned = cublas_lt.Tuned(self.weight)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        if not self.reach.covers(x.shape[0]):
            return self._many_rows(x if norm is None else norm(x))
        out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=self.dtype, device=x.device)
        _few_rows(x, self.weight, self.bias, norm, out, reach=self.reach)
        return out

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        if self.reach.covers(x.shape[0]):
            reach = self.reach
            _few_rows(x, self.weight, self.bias, norm, residual, residual=residual, reach=reach)
            return residual
        rows = x if norm is None else norm(x)
        if residual.dtype != self.weight.dtype:
            return residual.add_(self._many_rows(rows))
        if self.bias is not None:
            residual.add_(self.bias)
        launch = self.tuned.find(rows) if residual.is_contiguous() else None
        if launch is None:
            return residual.addmm_(rows, self.weight.t())
        launch(self.weight, rows, residual, adds=True)
        return residual

    def _many_rows(self, x: Tensor) -> Tensor:
        if self.dtype == self.weight.dtype:
            return _linear(x, self.weight, self.bias, self.tuned)
        out = wide_product(x, self.weight)
        return out if self.bias is None else out.add_(self.bias)


class GpuGatedProduct:
    """See ``zlm.ops.backend.GatedProduct``."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, *, pdl: bool) -> None:
        """*weight* [2 I, K] and *bias* [2 I]: the gate's, then the other's."""
        self.weight = weight
        self.bias = bias
        self.activation = activation
        self.pdl = pdl
        self.reach = reach(weight, pdl=pdl)
        self.tuned = cublas_lt.Tuned(weight)
        self.gate, self.up = weight.chunk(2)
        self.gate_bias: Tensor | None = None
        self.up_bias: Tensor | None = None
        if bias is not None:
            self.gate_bias, self.up_bias = bias.chunk(2)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        shape = x.shape[0], self.gate.shape[0]
        out = torch.empty(shape, dtype=self.weight.dtype, device=x.device)
        if self.reach.covers(x.shape[0]):
            _few_rows(
                x,
                self.gate,
                self.gate_bias,
                norm,
                out,
                up=self.up,
                up_bias=self.up_bias,
                activation=self.activation,
                reach=self.reach,
            )
            return out
        both = _linear(x if norm is None else norm(x), self.weight, self.bias, self.tuned)
        gated.gated(both, self.activation, out=out, pdl=self.pdl)
        return out


class GpuLMHead:
    """See ``zlm.ops.backend.LMHead``."""

    def __init__(self, product: Product, softcap: float) -> None:
        """*product*: with the vocabulary; its result is float32."""
        self.product = product
        self.softcap = softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.product(hidden)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def _few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str = "",
    reach: Reach,
) -> None:
    """Write the fused product to *out*; see ``zlm.kernels.linear_small.linear``."""
    tiled = x.shape[0] > reach.rows
    if norm is not None and (tiled or not reach.norms):
        x, norm = norm(x), None
    linear_small.linear(
        x,
        weight,
        bias,
        out=out,
        norm=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        residual=residual,
        up=up,
        up_bias=up_bias,
        activation=activation,
        tiled=tiled,
        pdl=reach.overlaps,
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, tuned: cublas_lt.Tuned) -> Tensor:
    """Return x @ weight.T + bias, of the weight's type."""
    launch = tuned.find(x) if bias is None else None
    if launch is None:
        return F.linear(x, weight, bias)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=weight.dtype, device=x.device)
    launch(weight, x, out)
    return out


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32, of operands of a narrower type."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()
