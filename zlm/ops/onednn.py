"""Products on the CPU with oneDNN, from weights reordered once into its blocked layout.

torch's own float32 ``linear`` multiplies a plain [N, K] matrix through BLAS. On 2 cores with
AVX-512 (2026-11, float32, ms, weights not in cache) oneDNN's blocked layout is faster at every
number of rows:

    rows                1      4      8     32    512
    N=3072  K=576    0.61   0.80   0.84   1.48  11.16     linear
                     0.26   0.21   0.27   0.63   8.69     here
    N=49152 K=576    9.53   16.1   15.4   22.8            linear
                     3.53   2.94   3.49   9.39            here

Two more properties are used. With 2 rows or more, a row's result has the same bits whatever the
number of rows (the reduction order is that of the blocked weight), so that an answer does not
depend on its neighbours. And one row alone is *slower* than a few (another kernel, whose reduction
is split over threads): so products of fewer than ``min_rows`` rows are padded.

Activation, product with a gate, and addition of a residual are done in the same pass over the
output. The operators are those torch's own compiler emits for frozen weights; ``can_pack`` tries
them before anything relies on them.
"""

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from zlm.ops.cpu_linear import Packed

PostOp = tuple[str, list[float], str]

ACTIVATIONS: dict[str, PostOp] = {"silu": ("swish", [], ""), "gelu_tanh": ("gelu", [], "tanh")}
PLAIN: PostOp = ("none", [], "")


class OneDnnProduct:
    """A weight [N, K] in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operators = torch.ops.mkldnn
        self.packed = operators._reorder_linear_weight.default(weight.contiguous(), None)
        self.bias = bias
        self._min_rows = min_rows()
        self._linear = operators._linear_pointwise.default  # resolved once: 5 us a call
        self._linear_binary = operators._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, PLAIN)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._combine(x, residual, "add")

    def gate(self, x: Tensor, up: "Packed", activation: str) -> Tensor:
        gate = self._multiply(x, ACTIVATIONS[activation])
        assert isinstance(up, OneDnnProduct)
        return up._combine(x, gate, "mul")

    def _multiply(self, x: Tensor, post: PostOp) -> Tensor:
        rows = x.shape[0]
        if rows >= self._min_rows:
            return self._linear(x, self.packed, self.bias, *post)
        return self._multiply(_pad(x, self._min_rows), post)[:rows]

    def _combine(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        rows = x.shape[0]
        if rows >= self._min_rows:
            return self._linear_binary(x, other, self.packed, self.bias, operation)
        padded = _pad(x, self._min_rows), _pad(other, self._min_rows)
        return self._combine(*padded, operation)[:rows]


def _pad(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[0]))


@functools.cache
def min_rows() -> int:
    """Return the number of rows that fewer rows are padded to."""
    return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Tell whether this torch and this machine multiply packed weights of *dtype* correctly."""
    if not torch.backends.mkldnn.is_available():
        return False
    rows, width = 5, 48
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, width, generator=generator).to(dtype)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    expected = F.silu(F.linear(x, weight)) * F.linear(x, weight)
    try:
        product = OneDnnProduct(weight, None)
        result = product.gate(x, product, "silu")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False  # the operators are missing or refuse the type: dense products serve
    return torch.allclose(result.float(), expected.float(), rtol=2e-2, atol=2e-2)
