"""Products of few rows with a weight's own codes of 4 or 8 bits: ``kernels/cpu_product.c``.

Rows of activations have 16 bits there, so that such a product is as exact as one of bfloat16.
"""

import ctypes

import torch
from torch import Tensor

from zlm.ops.backend import Norm
from zlm.ops.block_matrix import PIECE_VALUES, BlockMatrix
from zlm.ops.cpu_native import TYPES, NativeKernels

# Up to which a step is faster with the codes than with bfloat16, in SmolLM2; level from 24 to 32.
MOST_ROWS = 16
PANEL = 16  # rows of a weight that are multiplied together: it has a multiple of them
LEAST_GROUP, LARGEST_GROUP = 16, 256  # columns of a group, a multiple of the former
PLACES = 2  # bytes that a number of the activations takes
GATES = {"": 0, "silu": 1, "gelu_tanh": 2}
FLOAT16_ERROR = 2**-11  # of a factor, relative to the largest of its row


class _Weight(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "factors")),
        *((name, ctypes.c_int32) for name in ("panels", "columns", "group", "bits")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "rounded")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("count", "type")),
    ]


class Codes:
    """A weight's codes as the kernel reads them, with float16 scales and offsets."""

    def __init__(self, matrix: BlockMatrix, bias: Tensor | None, native: NativeKernels) -> None:
        rows, columns = matrix.shape
        group, self.bits = matrix.block[1], _bits(matrix)
        # The kernel's codes are unsigned.
        flip = 128 if matrix.codes.dtype == torch.int8 and self.bits == 8 else 0
        self._codes = torch.empty(rows // PANEL, columns // 8, 16 * self.bits, dtype=torch.uint8)
        size = PANEL * max(1, PIECE_VALUES // (PANEL * columns))
        for first, codes in zip(range(0, rows, size), matrix.codes.split(size), strict=True):
            part = self._codes[first // PANEL :][: len(codes) // PANEL]
            steps = (codes.view(torch.uint8) ^ flip).view(-1, PANEL, columns // 4, 4)
            pairs = steps.transpose(1, 2).reshape(-1, columns // 8, 2, 4 * PANEL)
            if self.bits == 4:
                torch.bitwise_or(pairs[:, :, 0], pairs[:, :, 1] << 4, out=part)
            else:
                part.copy_(pairs.flatten(2))
        factors = torch.stack(_factors(matrix, self.bits), -1)
        factors = factors.view(rows // PANEL, PANEL, columns // group, 2).permute(0, 2, 3, 1)
        self._factors = factors.contiguous().half()
        self._bias = None if bias is None else bias.float().contiguous()
        self._rows, self._columns, self._groups = rows, columns, columns // group
        pointers = self._codes.data_ptr(), self._factors.data_ptr()
        self._weight = _Weight(*pointers, rows // PANEL, columns, group, self.bits)
        self._native = native
        self.can_gate = rows % (2 * PANEL) == 0  # see ``gated``

    @classmethod
    def of(
        cls, matrix: BlockMatrix, bias: Tensor | None, native: NativeKernels | None
    ) -> "Codes | None":
        """Return the codes of *matrix*, if *native* takes them."""
        if native is None or not cls.takes(matrix, native):
            return None
        return cls(matrix, bias, native)

    @staticmethod
    def takes(matrix: BlockMatrix, native: NativeKernels | None) -> bool:
        """Tell whether *matrix* is of this form, and *native* has the product."""
        if native is None or not native.has_products:
            return False
        (rows, columns), (edge, group) = matrix.shape, matrix.block
        fits = rows % PANEL == 0 and edge == 1 and columns % group == 0
        fits &= group % LEAST_GROUP == 0 and group <= LARGEST_GROUP
        if not fits or matrix.order is not None or matrix.floats or matrix.input_scale:
            return False
        if matrix.codes.is_floating_point() or matrix.codes.dtype not in (torch.int8, torch.uint8):
            return False
        return all(_is_float16(each) for each in _factors(matrix, _bits(matrix)))

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Return the product, bfloat16 [T, N], with x [T, K] of a type of TYPES, or its norm."""
        out = x.new_empty(x.shape[0], self._rows, dtype=torch.bfloat16)
        self._run(x, norm, out)
        return out

    def wide(self, x: Tensor) -> Tensor:
        """Return the product in float32."""
        out = x.new_empty(x.shape[0], self._rows, dtype=torch.float32)
        self._run(x, None, out)
        return out

    def gated(self, x: Tensor, norm: Norm | None, activation: str) -> Tensor:
        """Return act(first half) * second half of the product's columns, [T, N / 2]."""
        out = x.new_empty(x.shape[0], self._rows // 2, dtype=torch.bfloat16)
        self._run(x, norm, out, gate=GATES[activation])
        return out

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None) -> Tensor:
        """Return *residual* [T, N], in place, plus the product."""
        self._run(x, norm, residual, residual=residual)
        return residual

    def _run(
        self,
        x: Tensor,
        norm: Norm | None,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        gate: int = 0,
    ) -> None:
        x = x.contiguous()
        count = x.shape[0]
        assert x.shape[1] == self._columns and out.is_contiguous() and out.shape[0] == count
        scratch = self._native.scratch(count * (PLACES * self._columns + 8 * self._groups))
        rows = _Rows(
            x.data_ptr(), None if norm is None else norm.weight.data_ptr(), scratch,
            0.0 if norm is None else norm.eps, count, TYPES[x.dtype],
        )  # fmt: skip
        self._native.product(
            ctypes.addressof(self._weight), ctypes.addressof(rows),
            None if self._bias is None else self._bias.data_ptr(), out.data_ptr(),
            None if residual is None else residual.data_ptr(), gate, TYPES[out.dtype],
        )  # fmt: skip


def _bits(matrix: BlockMatrix) -> int:
    """Return the bits that codes of *matrix* take: signed ones of 8."""
    least, most = torch.aminmax(matrix.codes)
    return 4 if int(least) >= 0 and int(most) < 16 else 8


def _factors(matrix: BlockMatrix, bits: int) -> tuple[Tensor, Tensor]:
    """Return what the kernel has of each group, [N, G] each: scales, and the rest of the offsets.

    That is what they are beyond -8 or -128 scales, which the kernel adds: codes have their zero
    near their middle, so that it is small and float16 holds it well.
    """
    rest = matrix.scales * (1 << (bits - 1))
    if matrix.codes.dtype == torch.int8 and bits == 8:
        rest = torch.zeros_like(rest)  # the kernel's codes are 128 more
    return matrix.scales, rest if matrix.offsets is None else rest + matrix.offsets


def _is_float16(factors: Tensor) -> bool:
    """Whether float16 holds *factors* [N, G], as far as it has bits."""
    error = (factors.half().float() - factors).abs().amax(1)
    return bool((error <= FLOAT16_ERROR * factors.abs().amax(1)).all())
