"""Weights as small codes on the GPU: how they lie in memory, and what turns them into numbers.

    w[n, k] = (code[n, k] - zero[n, k // C]) * scale[n, k // C]        or, with offsets,
    w[n, k] =  code[n, k] * scale[n, k // C] + offset[n, k // C]

C columns are a group; C = K: one scale a row. Zeros are whole numbers, the same everywhere or one a
group; offsets are any. Codes of 8 bits are int8 or float8 (e4m3), those of 4 bits whole numbers, 0
to 15, or floats (e2m1: sign, two bits of exponent, one of fraction). A thread loads 16 bytes at
once, a span: 16 or 32 columns, as eight int16 elements e = 0 .. 7 of

    | 8 + e | e |                        two bytes, or
    | 24 + e | 16 + e | 8 + e | e |      four codes, lowest bits last,

so that one shift and one mask give two neighbouring columns in one register, and 8 of the columns
that belong to a load of 16 bytes of x. A matrix can be cut at any row, and at any whole span that
is a whole number of groups.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SPAN = 32  # 4-bit codes in 16 bytes
WORD_CODES = 8  # of an int32
FOUR, INT, FLOAT, FLOAT4 = 0, 1, 2, 3  # kinds of codes: those of 4 bits are multiples of 3
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and, from 8 on, their negatives
NO_ZEROS, ZEROS, OFFSETS = 0, 1, 2  # what is beside the scales


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [N, K]: int32 [N, K/8] of 4-bit codes, or int8 or float8_e4m3fn [N, K]."""

    data: Tensor
    scales: Tensor  # float16 or float32 [N, K/C]
    group: int  # C, a multiple of 32 or, of 8-bit codes, of 16
    zero: int = 0  # of all groups, without zeros and offsets
    zeros: Tensor | None = None  # int8 [N, K/C]
    offsets: Tensor | None = None  # of the scales' type [N, K/C]
    floats: bool = False  # codes of 4 bits are e2m1

    @property
    def kind(self) -> int:
        """FOUR, INT, FLOAT or FLOAT4."""
        if self.data.dtype == torch.int32:
            return FLOAT4 if self.floats else FOUR
        return INT if self.data.dtype == torch.int8 else FLOAT

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, width = self.data.shape
        return rows, width * (WORD_CODES if self.is_packed else 1)

    @property
    def is_packed(self) -> bool:
        """Whether codes have 4 bits."""
        return self.data.dtype == torch.int32

    @property
    def beside(self) -> tuple[int, Tensor | None]:
        """NO_ZEROS, ZEROS or OFFSETS, and their tensor."""
        if self.offsets is not None:
            return OFFSETS, self.offsets
        return (NO_ZEROS, None) if self.zeros is None else (ZEROS, self.zeros)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and what is beside them."""
        beside = self.beside[1]
        return self.data.nbytes + self.scales.nbytes + (0 if beside is None else beside.nbytes)

    @property
    def words(self) -> Tensor:
        """The codes as int32."""
        return self.data.view(torch.int32)

    @property
    def halves(self) -> Tensor:
        """The codes as int16 elements."""
        return self.data.view(torch.int16)

    def rows(self, start: int, end: int) -> "Codes":
        """Return the rows from *start* to *end*, the same memory."""
        part = slice(start, end)
        zeros = None if self.zeros is None else self.zeros[part]
        offsets = None if self.offsets is None else self.offsets[part]
        return replace(
            self, data=self.data[part], scales=self.scales[part], zeros=zeros, offsets=offsets
        )


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return *codes*, [N, K] of whole spans and one byte each, in the order above.

    Of 4 *bits*: int32 [N, K/8] of codes up to 15. Of 8: the same type and shape.
    """
    rows, columns = codes.shape
    parts = 16 // bits
    spans = codes.view(torch.uint8).view(rows, columns // (8 * parts), parts, 8)
    if bits == 8:
        return spans.transpose(2, 3).contiguous().view(rows, columns).view(codes.dtype)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=codes.device).view(1, 1, 4, 1)
    halves = (spans.to(torch.int32) << shifts).sum(2, dtype=torch.int32)  # [N, spans, 8], 16 bits
    words = halves[..., 0::2] | (halves[..., 1::2] << 16)
    return words.view(rows, columns // WORD_CODES)


def unpack(data: Tensor) -> Tensor:
    """Return the codes [N, K] of what ``pack`` gave, those of 4 bits as uint8."""
    rows = len(data)
    if data.dtype != torch.int32:
        spans = data.view(torch.uint8).view(rows, -1, 8, 2).transpose(2, 3)
        return spans.contiguous().view(rows, -1).view(data.dtype)
    halves = torch.stack((data & 0xFFFF, (data >> 16) & 0xFFFF), -1).view(rows, -1, 1, 8)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=data.device).view(1, 1, 4, 1)
    return ((halves >> shifts) & 15).to(torch.uint8).view(rows, -1)


def spread(weight: Codes) -> Tensor:
    """Return the weight in float64, [N, K]: the meaning of the codes, in plain torch."""
    values = unpack(weight.data).double()
    if weight.kind == FLOAT4:
        known = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
        values = known.to(values.device)[values.long()]
    kind, beside = weight.beside
    wide = [weight.scales] if beside is None else [weight.scales, beside]
    scales, *others = (t.double().repeat_interleave(weight.group, 1) for t in wide)
    if kind == OFFSETS:
        return values * scales + others[0]
    return (values - (others[0] if kind == ZEROS else weight.zero)) * scales
