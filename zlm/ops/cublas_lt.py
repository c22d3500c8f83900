"""Products by a candidate of cuBLASLt that it does not rank first.

cuBLAS ranks its kernels by how long each should take at the clock it expects. Products of thousands
of rows run at the card's power limit instead, where others are ahead: 28672 x 4096 with 8192 rows
on an H200 691 against 663 TFLOP/s (bench/LOG.md, "cuBLASLt's other candidates"). So for the
products of ``CHOICES`` its candidates are listed, and the one that was measured to be fastest is
launched.

Functions, structures and numbers are those of cublasLt.h, CUDA 12 and 13. Where the library or the
candidate is not there, torch's way stays.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("zlm.worker")

BFLOAT16, FLOAT32, COMPUTE_FLOAT32 = 14, 0, 68  # cudaDataType_t, cublasComputeType_t
TRANSPOSE_A, MAX_WORKSPACE = 3, 1  # attributes of a product, of a preference
TILE, CUSTOM, CLUSTER = (1, 4), (5, 4), (8, 2)  # attributes of a candidate, and their bytes
CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """What tells one candidate from the others: values of its attributes."""

    tile: int
    custom: int
    cluster: int


# For bfloat16 weights of N rows and K columns: for which numbers of rows of x, and which candidate.
CHOICES: dict[str, dict[tuple[int, int], tuple[tuple[range, Choice], ...]]] = {
    "NVIDIA H200": {
        (6144, 4096): (
            (range(3073, 6145), Choice(197, 2, 5)),
            (range(6145, 16385), Choice(201, 2, 5)),
        ),
        (28672, 4096): (
            (range(41, 49), Choice(397, 1, 3)),
            (range(49, 65), Choice(220, 0, 3)),
            (range(113, 129), Choice(165, 0, 3)),
            (range(193, 257), Choice(165, 0, 3)),
            (range(1537, 3073), Choice(23, 4, 3)),
            (range(3073, 6145), Choice(201, 2, 5)),
            (range(6145, 16385), Choice(197, 2, 5)),
        ),
        (4096, 14336): (
            (range(25, 33), Choice(312, 3, 5)),
            (range(41, 49), Choice(313, 3, 5)),
            (range(49, 65), Choice(92, 0, 4)),
            (range(65, 81), Choice(314, 3, 5)),
            (range(81, 97), Choice(315, 3, 5)),
            (range(209, 225), Choice(321, 1, 3)),
            (range(225, 257), Choice(18, 3, 5)),
        ),
        (14336, 4096): ((range(1537, 16385), Choice(201, 2, 5)),),
    },
}


class _Candidate(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Tuned:
    """Finds the products of one weight [N, K] that are not left to torch."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._choices: tuple[tuple[range, Choice], ...] = ()
        if weight.device.type == "cuda" and weight.dtype == torch.bfloat16:
            shape = (weight.shape[0], weight.shape[1])
            self._choices = CHOICES.get(torch.cuda.get_device_name(weight.device), {}).get(
                shape, ()
            )

    def find(self, x: Tensor) -> "Launch | None":
        """Return what multiplies *x* [M, K]; None: that is torch's to do."""
        rows = x.shape[0]
        choice = next((choice for covered, choice in self._choices if rows in covered), None)
        if choice is None or x.dtype != self._weight.dtype or not x.is_contiguous():
            return None
        return _prepared(rows, self._weight.shape[0], self._weight.shape[1], choice)


@dataclass(frozen=True, slots=True)
class Launch:
    """A product of one shape by one candidate, which needs no workspace."""

    library: Any
    handle: ctypes.c_void_p
    product: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]  # weight, x, out
    algorithm: ctypes.Array

    def __call__(self, weight: Tensor, x: Tensor, out: Tensor, *, adds: bool = False) -> None:
        """Write x [M, K] times the transposed weight [N, K] to *out* [M, N], or add it there.

        All are bfloat16 and contiguous.
        """
        one, factor = ctypes.c_float(1.0), ctypes.c_float(1.0 if adds else 0.0)
        of_weight, of_x, of_out = self.layouts
        _check(
            self.library.cublasLtMatmul(
                self.handle,
                self.product,
                ctypes.byref(one),
                ctypes.c_void_p(weight.data_ptr()),
                of_weight,
                ctypes.c_void_p(x.data_ptr()),
                of_x,
                ctypes.byref(factor),
                ctypes.c_void_p(out.data_ptr()),
                of_out,
                ctypes.c_void_p(out.data_ptr()),
                of_out,
                self.algorithm,
                None,
                ctypes.c_size_t(0),
                ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )
        )


@functools.lru_cache(maxsize=256)
def _prepared(rows: int, outputs: int, columns: int, choice: Choice) -> Launch | None:
    """Return the product of [rows, columns] with [outputs, columns] by *choice*; None: not there.

    The library's matrices are column by column: the weight [K, N], transposed, times x [K, M].
    """
    library = _library()
    if library is None:
        return None
    product = _made(library.cublasLtMatmulDescCreate, COMPUTE_FLOAT32, FLOAT32)
    transposed = ctypes.c_int(1)
    _check(
        library.cublasLtMatmulDescSetAttribute(
            product, TRANSPOSE_A, ctypes.byref(transposed), ctypes.c_size_t(4)
        )
    )
    layouts = (
        _layout(library, columns, outputs),
        _layout(library, columns, rows),
        _layout(library, outputs, rows),
    )
    for candidate in _candidates(library, product, layouts):
        if _choice(library, candidate) == choice and candidate.workspace_bytes == 0:
            return Launch(library, _handle(), product, layouts, candidate.algorithm)
    log.debug(
        "cuBLASLt has no tile %d for %d x %d with %d rows: its own choice is taken",
        choice.tile,
        outputs,
        columns,
        rows,
    )
    return None


def _candidates(
    library: Any, product: ctypes.c_void_p, layouts: tuple[ctypes.c_void_p, ...]
) -> list[_Candidate]:
    """Return what the library would take for a product without a workspace, best first."""
    preference = _made(library.cublasLtMatmulPreferenceCreate)
    workspace = ctypes.c_size_t(0)
    _check(
        library.cublasLtMatmulPreferenceSetAttribute(
            preference, MAX_WORKSPACE, ctypes.byref(workspace), ctypes.c_size_t(8)
        )
    )
    found, count = (_Candidate * CANDIDATES)(), ctypes.c_int()
    of_weight, of_x, of_out = layouts
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(),
        product,
        of_weight,
        of_x,
        of_out,
        of_out,
        preference,
        CANDIDATES,
        found,
        ctypes.byref(count),
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    return [] if status else [each for each in found[: count.value] if each.state == 0]


def _choice(library: Any, candidate: _Candidate) -> Choice:
    values = []
    for attribute, size in (TILE, CUSTOM, CLUSTER):
        value, written = ctypes.c_int64(0), ctypes.c_size_t()
        status = library.cublasLtMatmulAlgoConfigGetAttribute(
            candidate.algorithm,
            attribute,
            ctypes.byref(value),
            ctypes.c_size_t(size),
            ctypes.byref(written),
        )
        values.append(-1 if status else value.value)
    return Choice(*values)


def _layout(library: Any, rows: int, columns: int) -> ctypes.c_void_p:
    """Return the description of a matrix whose columns lie one after another."""
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    return _made(library.cublasLtMatrixLayoutCreate, BFLOAT16, *sizes)


@functools.cache
def _library() -> Any:
    """Return the library that torch has loaded; None, and a line in the log, if there is none."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        log.info("products are torch's: %s", error)
        return None


@functools.cache
def _handle() -> ctypes.c_void_p:
    """Return the handle of this process, which has one GPU."""
    return _made(_library().cublasLtCreate)


def _made(create: Any, *arguments: Any) -> ctypes.c_void_p:
    """Return what *create* writes through its first argument."""
    made = ctypes.c_void_p()
    _check(create(ctypes.byref(made), *arguments))
    return made


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
