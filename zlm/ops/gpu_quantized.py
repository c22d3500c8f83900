"""Products with quantized weights on the GPU, from their codes.

Few rows read the codes as they are (``zlm.kernels.quantized_linear``), one launch with its epilogue
or two. More rows are the library's: of float8 with a scale a row on cards that multiply it, x is
rounded to float8 too, row by row or with the checkpoint's own scale for it; else the weight is
spread out to the compute type: once, where there is memory for both forms (``Means.spread``), or
for each product, some of its rows at a time, in scratch of a bounded size. With *fixed* all rows go
through tiles of one size.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from zlm.kernels import (
    gated,
    quantized_linear,
    quantized_matmul,
    quantized_rows,
    quantized_spread,
)
from zlm.kernels.quantized_codes import FLOAT, Codes
from zlm.ops.backend import GatedProduct, Norm, Product
from zlm.ops.gpu_linear import GpuGatedProduct, GpuProduct, wide_product

PIECE_VALUES = 1 << 26  # of a weight spread out at a time: 128 MiB of two bytes each
FLOAT8_UNITS = (9, 0)  # compute capability from which the library multiplies float8 by rows
FLOAT8_ROWS = 16  # up to which the codes of float8 are read without rounding x
LONG = 8192  # columns from which the library, which does not split them, leaves the card idle
# Up to which codes are read where there is the compute type's form as well: a layer of an 8B model
# takes 75 us at 8 rows from 4 bits and 121 from bfloat16, at 64 rows 252 and 130.
SPREAD_ROWS = 16
VECTOR_ROWS = 4  # up to which rows go one by one where there are no tiles


@dataclass(frozen=True, slots=True)
class Means:
    """How a product is computed. dtype: of its results; compute: of x and of spread weights."""

    dtype: torch.dtype
    compute: torch.dtype
    fixed: bool
    tiles: bool  # whether the card's kernels have matrix products
    pdl: bool
    input_scale: float = 0.0  # ``BlockMatrix.input_scale``, of rows that are rounded
    spread: bool = False  # whether the compute type's form is kept beside the codes, for many rows


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows [M, K] as a float8 product takes them, in the place of a tensor."""

    q: Tensor  # float8_e4m3fn [M, K]
    scales: Tensor  # float32 [M, 1], or [M, K / 128]

    @property
    def shape(self) -> torch.Size:
        return self.q.shape


class QuantizedCore:
    """What plain and gated products share. Owns the codes."""

    def __init__(
        self, weight: Codes, order: Tensor | None, bias: Tensor | None, activation: str, how: Means
    ) -> None:
        """order: the columns of x, in the codes' order; None: as they are."""
        self.weight = weight
        self.order = order
        self.bias = bias
        self.activation = activation
        self.how = how
        self.width = weight.shape[0] // (2 if activation else 1)
        device = weight.data.device
        self.groups = quantized_matmul.GROUP if quantized_matmul.takes_groups(weight) else 0
        self.rounds = (
            weight.kind == FLOAT
            and (self.groups > 0 or weight.group == weight.shape[1])
            and how.dtype == how.compute == torch.bfloat16
            and not how.fixed
            and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= FLOAT8_UNITS)
        )
        self.most = self._most_rows()
        self.spread = self._spread_out() if self._keeps_both() else None
        self.hands_on = 0  # rounded rows, of groups of so many: what they are given to takes them
        self.hands_scale = 0.0  # by its scale, if it has one

    def _most_rows(self) -> int:
        """Return up to how many rows read the codes."""
        if not self.how.tiles:
            return VECTOR_ROWS if quantized_linear.takes_rows(self.weight) else 0
        if self.how.compute == torch.float32:  # no matrix unit multiplies it exactly
            return 1
        if self.rounds:
            return FLOAT8_ROWS
        most = quantized_linear.MOST_ROWS
        return min(most, SPREAD_ROWS) if self._keeps_both() else most

    def _keeps_both(self) -> bool:
        how = self.how
        return how.spread and how.compute != torch.float32 and not (self.rounds or how.fixed)

    def _spread_out(self) -> GpuProduct | GpuGatedProduct:
        """Return the product with the weight in the compute type."""
        how = self.how
        shape, device = self.weight.shape, self.weight.data.device
        weight = torch.empty(shape, dtype=how.compute, device=device)
        quantized_spread.spread(self.weight, out=weight)
        if self.activation:
            return GpuGatedProduct(weight, self.bias, self.activation, pdl=how.pdl)
        return GpuProduct(weight, self.bias, how.dtype, pdl=how.pdl)

    def rounded(self, rows: int) -> bool:
        """Tell whether *rows* rows are rounded for the product."""
        return self.rounds and rows > self.most

    def __call__(
        self, x: Tensor | RoundedRows, norm: Norm | None, residual: Tensor | None
    ) -> Tensor:
        """Return the product, added to *residual* in its place if there is one."""
        rows = x.shape[0]
        if isinstance(x, RoundedRows):
            assert self.rounded(rows) and norm is None
            return self._of_rounded(x, residual)
        if self.how.fixed or rows <= self.most:
            return self._few(self._input(x, norm), residual)
        if self.rounds:
            rounded = self._round(x, norm, "", self.groups or x.shape[1], self.how.input_scale)
            return self._of_rounded(rounded, residual)
        rows_in = self._input(x, norm)
        if self.spread is None:
            return self._by_pieces(rows_in, residual)
        if residual is None:
            return self.spread(rows_in)
        assert isinstance(self.spread, GpuProduct)
        return self.spread.add(rows_in, residual)

    def _input(self, x: Tensor, norm: Norm | None) -> Tensor:
        rows = x if norm is None else norm(x)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        return rows

    def _few(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows, out = x.shape[0], residual
        if out is None:
            out = torch.empty((rows, self.width), dtype=self.how.dtype, device=x.device)
        fixed, by_rows = self.how.fixed, not self.how.tiles
        values = quantized_linear.scratch_values(
            rows, self.weight, activation=self.activation, fixed=fixed, by_rows=by_rows
        )
        scratch = x.new_empty(values, dtype=torch.float32) if values else None
        quantized_linear.linear(
            x,
            self.weight,
            self.bias,
            out=out,
            residual=residual,
            activation=self.activation,
            scratch=scratch,
            fixed=fixed,
            by_rows=by_rows,
            pdl=self.how.pdl,
        )
        return out

    def _round(
        self, x: Tensor, norm: Norm | None, activation: str, group: int, static: float
    ) -> RoundedRows:
        """Return x, its norm, or what *activation* makes of its halves; a scale a *group*."""
        shape = x.shape[0], self.width if activation else x.shape[1]
        q = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = x.new_empty((x.shape[0], shape[1] // group), dtype=torch.float32)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        quantized_rows.quantize(
            x,
            out=q,
            scales=scales,
            norm=weight,
            eps=eps,
            activation=activation,
            group=group,
            static=static,
            pdl=self.how.pdl,
        )
        return RoundedRows(q, scales)

    def _of_rounded(self, x: RoundedRows, residual: Tensor | None) -> Tensor:
        """Return the product, added to *residual* in its place if there is one.

        Ours does it in groups, and of a long K with too few tiles for the card: it is split then.
        """
        rows, weight = x.shape[0], self.weight
        values = quantized_matmul.scratch_values(rows, weight)
        if not self.groups and (not values or weight.shape[1] < LONG):
            return self._finished(scaled_product(x.q, x.scales, weight, self.bias), residual)
        added = None if self.activation else residual
        out = added
        if out is None:
            shape = rows, weight.shape[0]
            out = torch.empty(shape, dtype=self.how.dtype, device=x.q.device)
        scratch = x.scales.new_empty(values) if values else None
        quantized_matmul.matmul(
            x.q,
            x.scales,
            weight,
            self.bias,
            out=out,
            residual=added,
            scratch=scratch,
            pdl=self.how.pdl,
        )
        return out if added is not None else self._finished(out, residual)

    def _by_pieces(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the product with the weight spread out, some of its rows after others."""
        total, columns = self.weight.shape
        compute, is_wide = self.how.compute, self.how.dtype != self.how.compute
        adds = residual is not None and residual.dtype == compute and not self.activation
        out = residual if adds else x.new_empty((x.shape[0], total), dtype=self.how.dtype)
        assert out is not None
        step = max(1, PIECE_VALUES // columns)
        for start in range(0, total, step):
            part = self.weight.rows(start, min(start + step, total))
            tensor = torch.empty(part.shape, dtype=compute, device=x.device)
            quantized_spread.spread(part, out=tensor, pdl=self.how.pdl)
            columns_out = out[:, start : start + step]
            if adds:
                columns_out.addmm_(x, tensor.t())
            elif is_wide:
                columns_out.copy_(wide_product(x, tensor))
            else:
                torch.mm(x, tensor.t(), out=columns_out)
        if self.bias is not None:
            out = out.add_(self.bias)
        return out if adds else self._finished(out, residual)

    def _finished(self, product: Tensor, residual: Tensor | None) -> Tensor:
        """Return what the activation makes of the product, added to *residual*."""
        if self.activation and self.hands_on and self.rounds:
            # The next product's input, which no other operation looks at.
            rounded = self._round(product, None, self.activation, self.hands_on, self.hands_scale)
            return cast(Tensor, rounded)
        if self.activation:
            shape = product.shape[0], self.width
            out = torch.empty(shape, dtype=self.how.dtype, device=product.device)
            gated.gated(product, self.activation, out=out, pdl=self.how.pdl)
            product = out
        return product if residual is None else residual.add_(product)


class QuantizedProduct:
    """See ``zlm.ops.backend.Product``; results are of the means' type, ``add``'s the residual's."""

    def __init__(
        self, weight: Codes, order: Tensor | None, bias: Tensor | None, how: Means
    ) -> None:
        self.core = QuantizedCore(weight, order, bias, "", how)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        return self.core(x, norm, None)

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        return self.core(x, norm, residual)


class QuantizedGated:
    """See ``zlm.ops.backend.GatedProduct``."""

    def __init__(
        self, weight: Codes, order: Tensor | None, bias: Tensor | None, activation: str, how: Means
    ) -> None:
        """*weight* [2 I, K] and *bias* [2 I]: the gate's, then the other's."""
        self.core = QuantizedCore(weight, order, bias, activation, how)

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        return self.core(x, norm, None)


class QuantizedEmbedding:
    """See ``zlm.ops.backend.Embedding``; *compute*: the type that a row is rounded to first."""

    def __init__(
        self, weight: Codes, scale: float, dtype: torch.dtype, compute: torch.dtype, *, pdl: bool
    ) -> None:
        self.weight = weight
        self.scale = torch.tensor(scale, dtype=compute).item()
        self.dtype = dtype
        self.pdl = pdl

    def __call__(self, token_ids: Tensor) -> Tensor:
        shape = token_ids.shape[0], self.weight.shape[1]
        out = torch.empty(shape, dtype=self.dtype, device=token_ids.device)
        quantized_spread.embedding(token_ids, self.weight, self.scale, out=out, pdl=self.pdl)
        return out


def join(gated: GatedProduct, down: Product) -> None:
    """Have *gated* hand *down* rounded rows, if both are made of such: *down* alone gets them."""
    if not (isinstance(gated, QuantizedGated) and isinstance(down, QuantizedProduct)):
        return
    first, second = gated.core, down.core
    if first.rounds and second.rounds and first.most == second.most:
        first.hands_on = second.groups or second.weight.shape[1]
        first.hands_scale = second.how.input_scale


def scaled_product(q: Tensor, scales: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
    """Return q @ W.T times the scales of both, bfloat16, for float8 q [M, K] and scales [M, 1]."""
    if q.device.type == "cpu":
        product = (q.float() * scales) @ (weight.data.float() * weight.scales).t()
        out = product.to(torch.bfloat16)
    else:
        out = torch._scaled_mm(
            q,
            weight.data.t(),
            scales,
            weight.scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    return out if bias is None else out.add_(bias)
