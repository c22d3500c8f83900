"""Products with quantized weights on the CPU: their codes for few rows, bfloat16 or int8 for many.

What a step of few rows waits for is memory, so it reads the codes as they are, by a kernel of ours
(``zlm.ops.cpu_codes``), or, where that cannot be had, those of 4 bits by torch's
``_weight_int4pack_mm_for_cpu``, bfloat16 activations, a bfloat16 scale and zero for each group of
columns. With more rows the arithmetic counts: oneDNN's int8 product (VNNI), for which each row of
the weight is rounded once more, to int8 with one scale, and each row of activations as it comes.

Rounding activations once more costs accuracy, little over a text (bench/RESULTS.md), but enough to
turn a near tie; and bfloat16 is hardly slower. So many rows have bfloat16 weights, 16 bits more,
and int8 (``narrow``) is for models whose weights would take too much memory so. Where the
checkpoint has a scale for activations (``BlockMatrix.input_scale``) they are rounded as it says.

Times of SmolLM2's products, ms, 2 threads of a shared AVX512-VNNI host, weights not in cache
(2026-11; int8 with the rounding of activations to 8 or 16 bits):

    rows                  1      4      5      8     32
    N=3072   K=576     .052   .090   .174   .181   .682     4-bit codes
                       .140   .125   .131   .155   .335     bfloat16 (oneDNN)
                       .121   .137          .164   .324     int8
    N=49152  K=576     1.47   1.52          1.93   4.87     bfloat16
                        .86   1.14          1.71   6.01     int8, 16 bits
"""

import functools
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from zlm.ops import cpu_codes, cpu_linear
from zlm.ops.backend import Norm
from zlm.ops.block_matrix import PIECE_VALUES, BlockMatrix, Weight, plain, take_rows
from zlm.ops.cpu_codes import Codes
from zlm.ops.cpu_linear import activate
from zlm.ops.cpu_native import NativeKernels

HEAD_ROWS = 32  # rows that a large head multiplies at a time: their logits are large, too
LARGE_HEAD_BYTES = 128 << 20  # in bfloat16
# Up to which a step is faster with the 4-bit codes, and a head's 8 bits with activations of 16. A
# product alone is not, from 5 rows on; but a step of 8 rows takes 25 ms, and 28 in bfloat16.
FEW_ROWS = 8
GROUPS = (32, 64, 128, 256)  # columns of a group that torch's 4-bit product has
ROW_MULTIPLE = 16  # of a weight's rows, for the same
ROTATIONS = (64, 32, 16, 8, 4, 2, 1)  # columns that are rotated together, best first
E4M3_MAX = 448.0
TINY = 1e-30  # the least scale: rows of zeros have one too
MIDDLE = 128  # the zero point of activations: oneDNN wants them unsigned


class QuantizedProduct:
    """See ``zlm.ops.backend.Product``. *narrow*: many rows are multiplied in int8.

    *native*: few rows are multiplied by its kernel, if it takes the matrix; all of them, if this is
    *narrow* or codes have 8 bits. Bfloat16's product is a fifth faster for many rows, but takes two
    bytes a weight more.
    """

    def __init__(
        self,
        matrix: BlockMatrix,
        bias: Tensor | None = None,
        *,
        narrow: bool = False,
        native: NativeKernels | None = None,
    ) -> None:
        self._own = Codes.of(matrix, bias, native)
        self._own_rows = cpu_codes.MOST_ROWS
        self._codes: FourBits | None = None
        self._bias = bias
        if self._own is not None:
            if narrow or self._own.bits == 8:
                self._own_rows = sys.maxsize
        elif FourBits.takes(matrix):
            self._codes = FourBits(matrix)
        self._many: Callable[[Tensor], Tensor] | None = None
        if self._own_rows < sys.maxsize:
            self._many = EightBits(matrix) if narrow else _in_bfloat16(matrix)
        self._input_scale = matrix.input_scale
        self._type = matrix.codes.dtype

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        if (own := self.own(x)) is not None:
            return own(x, norm)
        rows = x if norm is None else norm(x)
        if self._input_scale:
            codes = rounded(rows, self._input_scale, self._type)
            product = self.multiply(codes.bfloat16()).mul_(self._input_scale)
        else:
            product = self.multiply(rows)
        return product if self._bias is None else product.add_(self._bias)

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        if (own := self.own(x)) is not None:
            return own.add(x, residual, norm)
        return residual.add_(self(x, norm))

    def own(self, x: Tensor) -> Codes | None:
        """Return the codes, if they are to multiply x [T', K]."""
        return self._own if x.shape[0] <= self._own_rows else None

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ W.T, bfloat16 [T', N], for bfloat16 x [T', K]."""
        if self._codes is not None and x.shape[0] <= FEW_ROWS:
            return self._codes(x)
        assert self._many is not None
        return self._many(x)


def _in_bfloat16(matrix: BlockMatrix) -> Callable[[Tensor], Tensor]:
    return cpu_linear.pack(matrix.dequantize(torch.bfloat16))


def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return x over *scale* in *dtype*, float8_e4m3fn or int8; what it cannot hold is its end."""
    values = x.float() / scale
    if dtype.is_floating_point:
        return values.clamp_(-E4M3_MAX, E4M3_MAX).to(dtype)
    return values.round_().clamp_(-128, 127).to(torch.int8)


class QuantizedGated:
    """See ``zlm.ops.backend.GatedProduct``: gate and up are one weight, one on top of the other."""

    def __init__(
        self,
        matrix: BlockMatrix,
        bias: Tensor | None,
        activation: str,
        *,
        narrow: bool = False,
        native: NativeKernels | None = None,
    ) -> None:
        self._both = QuantizedProduct(matrix, bias, narrow=narrow, native=native)
        self._activation = activation

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        own = self._both.own(x)
        if own is not None and own.can_gate:
            return own.gated(x, norm, self._activation)
        gate, up = self._both(x, norm).chunk(2, dim=1)
        return activate(gate, self._activation).mul_(up)


class FourBits:
    """Codes of 4 bits with a scale and a zero for each group of columns."""

    def __init__(self, matrix: BlockMatrix) -> None:
        codes = matrix.codes.to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        zeros = matrix.scales * 8  # torch's codes are less 8
        if matrix.offsets is not None:
            zeros = zeros + matrix.offsets
        both = torch.stack((matrix.scales, zeros), dim=-1)  # [N, G, 2]
        self._scales = both.transpose(0, 1).contiguous().bfloat16()
        self._group = matrix.block[1]
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    @staticmethod
    def takes(matrix: BlockMatrix) -> bool:
        """Tell whether *matrix* is of this form, and this torch has the product."""
        rows, columns = matrix.shape
        fits = rows % ROW_MULTIPLE == 0 and matrix.block[1] in GROUPS and matrix.block[0] == 1
        whole = columns % matrix.block[1] == 0 and matrix.order is None
        has = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        if not (fits and whole and has) or matrix.codes.is_floating_point():
            return False
        return int(matrix.codes.max()) < 16 and int(matrix.codes.min()) >= 0

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self._packed, self._group, self._scales)
        return product


class HeadProduct:
    """The product with a head, float32, of weights of 8 bits; of bfloat16 for many rows.

    Few rows of activations have 16 bits: each is rounded to 8, and what is left over to 8 more, as
    a row of its own. That costs little while the weights' bytes are what takes the time. For many
    rows a large head, or one that is to be *narrow*, rounds them to 8: it has no other weights.
    Gemma 3 270M over a text, mean KL divergence from float32 (2026-11): 0.0043 with 16 bits, 0.0051
    with 8, and 0.0043 with a head of bfloat16, 168 MB more.
    """

    def __init__(self, matrix: BlockMatrix, *, narrow: bool = False) -> None:
        self._bits = EightBits(matrix)
        self._many: Callable[[Tensor], Tensor] = self._in_parts
        if not narrow and 2 * matrix.codes.numel() < LARGE_HEAD_BYTES:
            self._many = _in_bfloat16(matrix)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [S, V], float32 or bfloat16, for x [S, H]."""
        return self._bits.finely(x) if x.shape[0] <= FEW_ROWS else self._many(x)

    def _in_parts(self, x: Tensor) -> Tensor:
        parts = [self._bits.coarsely(part) for part in x.split(HEAD_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class EightBits:
    """A weight rounded to int8 by rows, in oneDNN's layout.

    Weight and activations are rotated first, by a Hadamard matrix for each 64 columns (Ashkboos et
    al., QuaRot, arXiv:2404.00456): their product stays the same, but what a few columns of the
    activations have in excess is spread over 64 of them, and no longer takes the others' bits.
    SmolLM2 in Q4_1 over a text, mean KL divergence from float32 (2026-11): 0.039 without, 0.006
    with it, 0.001 of bfloat16.
    """

    def __init__(self, weight: Weight) -> None:
        """Round *weight* [N, K], float32 or quantized, some rows at a time."""
        rows, columns = weight.shape
        size = next(size for size in ROTATIONS if columns % size == 0)
        self._rotation = hadamard(size)
        scales, codes = torch.empty(rows), torch.empty(rows, columns, dtype=torch.int8)
        for index in torch.arange(rows).split(max(1, PIECE_VALUES // columns)):
            part = self._rotate(plain(take_rows(weight, index), torch.float32))
            scales[index] = part.abs().amax(1).clamp_(min=TINY).div_(127)
            codes[index] = part.div_(scales[index, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)
        self._scales = scales
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self.coarsely(x).bfloat16()

    def coarsely(self, x: Tensor) -> Tensor:
        """Return the product, float32, with x rounded to 8 bits."""
        x = self._rotate(x.float())
        # Of 8 ways to round in torch's operations the fastest: 84 us for [32, 576], and 112 with
        # vector_norm and round_. A positive number's conversion to uint8 is its floor.
        scales = x.abs().amax(1, keepdim=True).clamp_(min=TINY).div_(127)
        codes = x.div_(scales).add_(MIDDLE + 0.5).to(torch.uint8)
        return self._product(codes).mul_(scales)

    def finely(self, x: Tensor) -> Tensor:
        """Return the product, float32, with x rounded to 16 bits."""
        x = self._rotate(x.float())
        scales = x.abs().amax(1, keepdim=True).clamp_(min=TINY).div_(127)
        coarse = x.div_(scales).round()
        rest = x.sub_(coarse).mul_(2 * 127)
        codes = torch.cat((coarse, rest)).add_(MIDDLE + 0.5).to(torch.uint8)
        high, low = self._product(codes).chunk(2)
        return high.add_(low, alpha=1 / (2 * 127)).mul_(scales)

    def _product(self, codes: Tensor) -> Tensor:
        product: Tensor = self._multiply(
            codes, 1.0, MIDDLE, self._packed, self._scales, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return product

    def _rotate(self, rows: Tensor) -> Tensor:
        rotated = rows.reshape(-1, self._rotation.shape[0]) @ self._rotation
        return rotated.view(rows.shape)


@functools.cache
def hadamard(size: int) -> Tensor:
    """Return the orthogonal Hadamard matrix of *size*, a power of two; Sylvester's construction."""
    if size == 1:
        return torch.ones(1, 1)
    half = hadamard(size // 2) / math.sqrt(2)
    return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))


@functools.cache
def is_usable() -> bool:
    """Tell whether this torch and this machine have the int8 product, and it is right."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    x = torch.randn(5, 64, generator=generator).bfloat16()
    try:
        product = EightBits(weight)(x)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    expected = x.float() @ weight.t()
    return torch.allclose(product.float(), expected, rtol=0.05, atol=0.3)
