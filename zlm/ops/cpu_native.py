"""The library of ``kernels/cpu_*.c``: decode attention and RMSNorm as functions on tensors.

Why C: a decode step of a small model is some ten small operations a layer, each over a few
kilobytes. In torch each is a call of several microseconds, and keys and values are copied out of
their blocks first; here a layer's are two calls, and keys and values are read where they lie.

``zlm.worker.native_build`` compiles it; ``zlm.ops.cpu_codes`` has its products. Structures are
those of ``kernels/cpu_decode.c``.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zlm.ops.backend import Geometry
from zlm.ops.batch import GroupBatch
from zlm.ops.scores import Scores

LANES = 16  # numbers of the widest vector: head and row sizes are multiples of it
MAX_DIM = 512  # of a head
PART_KEYS = 1024  # keys that a thread goes over for a row; longer sequences are cut
FOUND_BYTES = (2 + MAX_DIM) * 4  # of ``struct found``
TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "sinks")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "dim", "stores", "type")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "eps")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "table", "parts", "found")),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("block_size", "num_parts")),
    ]


class _Rotation(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("is_factor", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure for the kernels, and the tensors whose addresses are in it."""

    address: int
    structure: ctypes.Structure
    tensors: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, structure: ctypes.Structure, *tensors: Tensor | None) -> "Structure":
        return cls(ctypes.addressof(structure), structure, tensors)


class NativeKernels:
    """The compiled library. Raises OSError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._rms_norm: Any = library.zlm_rms_norm
        self._rms_norm.restype = None
        self._rms_norm.argtypes = [
            pointer, pointer, ctypes.c_float, pointer, ctypes.c_int64, integer, integer, integer,
        ]  # fmt: skip
        self._decode: Any = library.zlm_decode_attention
        self._decode.restype = None
        self._decode.argtypes = [pointer] * 6
        # Structures and types of zlm.ops.cpu_codes, whose products these are.
        self.product: Any = library.zlm_product
        self.product.restype = None
        self.product.argtypes = [pointer] * 5 + [integer] * 2
        assert library.zlm_found_bytes() == FOUND_BYTES
        self.has_products = bool(library.zlm_has_products())
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def scratch(self, size: int) -> int:
        """Return the address of *size* bytes, which are the caller's until the next call.

        So products are for one thread at a time, as a worker is.
        """
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Return x / sqrt(mean(x²) + eps) * weight in *dtype*, computed in float32.

        x is contiguous, [rows, D] of a key of TYPES, as *dtype* is; weight: float32 [D], D a
        multiple of LANES.
        """
        out = torch.empty_like(x, dtype=dtype)
        rows, size = x.shape
        self._rms_norm(
            x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), rows, size,
            TYPES[x.dtype], TYPES[dtype],
        )  # fmt: skip
        return out

    def decode_attention(
        self,
        layer: Structure,
        step: Structure,
        rotation: Structure,
        qkv: Tensor,
        cache: Tensor,
        out: Tensor,
    ) -> None:
        """Write the attention of *step*'s rows, the first of *qkv*, to the first rows of *out*.

        qkv is contiguous, [T', (Hq + 2 Hkv) * D], before norms and rotation (or [T', Hq * D], if
        the layer stores no keys and values); out [T', Hq * D]; all are of one type, as *cache* is,
        in which the rows' keys and values are stored.
        """
        assert qkv.is_contiguous() and qkv.dtype == cache.dtype == out.dtype
        self._decode(
            layer.address, step.address, rotation.address,
            qkv.data_ptr(), cache.data_ptr(), out.data_ptr(),
        )  # fmt: skip


def takes(geometry: Geometry, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether heads of this form in *dtype*, and keys and values in *cache_dtype*, can be taken."""
    fits = geometry.head_dim % LANES == 0 and geometry.head_dim <= MAX_DIM
    return fits and dtype == cache_dtype and dtype in TYPES


def layer_of(
    geometry: Geometry,
    scores: Scores,
    dtype: torch.dtype,
    *,
    norms: tuple[Tensor, Tensor | None] | None = None,
    eps: float = 0.0,
    stores: bool = True,
) -> Structure:
    """Describe a layer to ``decode_attention``. norms: of each head of q and of k, float32 [D]."""
    q_norm, k_norm, sinks = (
        None if each is None else each.float().contiguous()
        for each in (*(norms or (None, None)), scores.sinks)
    )
    pointers = (_pointer(q_norm), _pointer(k_norm), _pointer(sinks))
    heads = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    structure = _Layer(*pointers, *heads, stores, TYPES[dtype], scores.scale, scores.softcap, eps)
    return Structure.of(structure, q_norm, k_norm, sinks)


def step_of(
    group: GroupBatch,
    positions: Tensor,
    keys: Iterable[tuple[int, int]],
    geometry: Geometry,
    block_size: int,
) -> Structure:
    """Describe a step to ``decode_attention``: its first rows, of one token each.

    positions: int64 [R], of these rows' tokens; *keys*: those that each sees, (first, end).
    """
    parts: list[int] = []
    for row, (first, end) in enumerate(keys):
        for begin in range(first, end, PART_KEYS):
            parts += (row, begin, min(begin + PART_KEYS, end))
    num_parts, found = len(parts) // 3, None
    if num_parts > positions.shape[0]:
        found = torch.empty(num_parts * geometry.num_heads * FOUND_BYTES, dtype=torch.uint8)
    table, slots = group.block_table, group.slot_mapping
    assert table.dtype == torch.int32 and table.stride(1) == 1
    assert slots.is_contiguous() and positions.is_contiguous()
    listed = torch.tensor(parts, dtype=torch.int32)
    structure = _Step(
        positions.data_ptr(), slots.data_ptr(), table.data_ptr(), listed.data_ptr(),
        _pointer(found), table.stride(0), block_size, num_parts,
    )  # fmt: skip
    return Structure.of(structure, positions, slots, table, listed, found)


def rotation_of(table: Tensor) -> Structure:
    """Describe to ``decode_attention`` how positions turn heads; see ``zlm.layers.rotary``."""
    is_factor = not table.is_complex()
    stride = table.stride(0) * (1 if is_factor else 2)
    return Structure.of(_Rotation(table.data_ptr(), stride, is_factor), table)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
