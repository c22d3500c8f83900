"""Quantized weights as the GPU's kernels read them (``zlm.kernels.quantized_codes``), made once.

Codes of up to 4 bits are packed, others are a byte each. Scales become float16 where that holds
them to its full precision, and what stands for an offset becomes a zero point where it is one: the
kernels then take it off the code, which is exact.
"""

import torch
from torch import Tensor

from zlm.kernels.quantized_codes import SPAN, Codes, pack as pack_codes
from zlm.ops.block_matrix import BlockMatrix

PIECE_VALUES = 1 << 24  # codes packed at a time: 64 MiB of int32
HALF_ROUNDING = 2.0**-10  # of a float16 that is not subnormal
INT8 = (-128, 127)


def pack(matrix: BlockMatrix, device: torch.device) -> Codes | None:
    """Return *matrix*, whose order is not looked at, for the kernels; None if they cannot read it.

    They read whole spans: K and the columns of a block are multiples of 32, with bytes of 16.
    """
    matrix = matrix.by_rows()
    columns = matrix.shape[1]
    group = min(matrix.block[1], columns)
    if columns % 16 or group % 16 or columns % group:
        return None
    if matrix.codes.dtype == torch.float8_e4m3fn:
        if matrix.offsets is not None:
            return None
        data = pack_codes(matrix.codes.to(device), 8)
        return Codes(data, matrix.scales.to(device).contiguous(), group)
    if matrix.codes.is_floating_point():
        return None
    codes, scales = matrix.codes.to(device), matrix.scales.to(device)
    if matrix.floats:
        narrow = _halved(scales)
        return Codes(_packed(codes), narrow, group, floats=True) if columns % SPAN == 0 else None
    offsets = torch.zeros_like(scales) if matrix.offsets is None else matrix.offsets.to(device)
    low, high = (int(bound) for bound in codes.aminmax())
    if low >= 0 and high < 16 and columns % SPAN == 0 and group % SPAN == 0:
        data = _packed(codes)
    elif codes.dtype == torch.uint8 and high > INT8[1]:
        data = pack_codes(codes.bitwise_xor(128).view(torch.int8), 8)
        offsets = offsets + scales * 128
    else:
        data = pack_codes(codes.to(torch.int8), 8)
    return _with_scales(data, scales, offsets, group)


def _packed(codes: Tensor) -> Tensor:
    step = max(1, PIECE_VALUES // codes.shape[1])
    return torch.cat([pack_codes(piece.to(torch.uint8), 4) for piece in codes.split(step)])


def _with_scales(data: Tensor, scales: Tensor, offsets: Tensor, group: int) -> Codes:
    """Return the codes with scales and zeros or offsets in the narrowest form."""
    zeros = torch.where(scales == 0, 0.0, -offsets / scales.where(scales != 0, 1.0)).round_()
    is_whole = ((zeros * scales + offsets).abs() <= scales.abs() * 1e-3).all()
    in_range = (zeros >= INT8[0]).logical_and_(zeros <= INT8[1]).all()
    if bool(is_whole & in_range):
        narrow = _halved(scales)
        first = int(zeros[0, 0])
        if bool((zeros == first).all()):
            return Codes(data, narrow, group, first)
        return Codes(data, narrow, group, zeros=zeros.to(torch.int8).contiguous())
    narrow, beside = _halved(scales), _halved(offsets)
    if narrow.dtype != beside.dtype:
        narrow, beside = narrow.float(), beside.float()
    return Codes(data, narrow, group, offsets=beside)


def _halved(values: Tensor) -> Tensor:
    """Return *values* as float16, or as float32 where that would lose more than its rounding."""
    half = values.half()
    lost = (half.float() - values).abs() > values.abs() * HALF_ROUNDING
    return values.float().contiguous() if bool(lost.any()) else half.contiguous()
