"""Products on the GPU whose every row has the same bits whatever the number of rows.

A library chooses another kernel, with another order of summation, for another number of rows. Here
all products are ``zlm.kernels.linear_tile`` with one setting: a row's sum runs over K in the same
steps, wherever the row stands in its tile and whatever stands beside it.
"""

import torch
from torch import Tensor

from zlm.kernels import linear_small
from zlm.ops.backend import Norm


class FixedProduct:
    """See ``zlm.ops.backend.Product``; results are of *dtype* (``add``'s: the residual's)."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, pdl: bool
    ) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.dtype = dtype
        self.pdl = pdl

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        rows = x if norm is None else norm(x)
        out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=self.dtype, device=x.device)
        linear_small.linear(rows, self.weight, self.bias, out=out, fixed=True, pdl=self.pdl)
        return out

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        rows = x if norm is None else norm(x)
        linear_small.linear(
            rows,
            self.weight,
            self.bias,
            out=residual,
            residual=residual,
            fixed=True,
            pdl=self.pdl,
        )
        return residual


class FixedGatedProduct:
    """See ``zlm.ops.backend.GatedProduct``."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str, *, pdl: bool) -> None:
        """*weight* [2 I, K] and *bias* [2 I]: the gate's, then the other's."""
        self.activation = activation
        self.pdl = pdl
        self.gate, self.up = weight.chunk(2)
        self.gate_bias: Tensor | None = None
        self.up_bias: Tensor | None = None
        if bias is not None:
            self.gate_bias, self.up_bias = bias.chunk(2)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        rows = x if norm is None else norm(x)
        shape = x.shape[0], self.gate.shape[0]
        out = torch.empty(shape, dtype=self.gate.dtype, device=x.device)
        linear_small.linear(
            rows,
            self.gate,
            self.gate_bias,
            out=out,
            up=self.up,
            up_bias=self.up_bias,
            activation=self.activation,
            fixed=True,
            pdl=self.pdl,
        )
        return out
