"""Matrix products with weights on the CPU: packed once at load, in the form it computes best.

``pack`` chooses the form. Every form gives

    packed(x)                      x @ W.T + b
    packed.add(x, residual)        residual + x @ W.T + b
    packed.gate(x, up, act)        act(x @ W.T + b) * up(x)

and ``CpuProduct`` and ``CpuGatedProduct`` are what layers see of it.

with x [T, K] and W [N, K]. There is one copy of a weight: the caller drops its own after packing.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops import onednn
from zlm.ops.backend import Norm


class Packed(Protocol):
    """A weight, ready to be multiplied with."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor: ...

    def gate(self, x: Tensor, up: "Packed", activation: str) -> Tensor: ...


class DenseProduct:
    """The weight as it came, multiplied by torch's own linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(residual)

    def gate(self, x: Tensor, up: Packed, activation: str) -> Tensor:
        return activate(self(x), activation).mul_(up(x))


def activate(x: Tensor, activation: str) -> Tensor:
    """Return silu or gelu_tanh of *x*."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh")


def pack(weight: Tensor, bias: Tensor | None = None) -> Packed:
    """Pack *weight* [N, K] and *bias* [N]."""
    if onednn.can_pack(weight.dtype):
        return onednn.OneDnnProduct(weight, bias)
    return DenseProduct(weight, bias)


def min_rows(dtype: torch.dtype) -> int:
    """Return the fewest rows worth multiplying: models pad shorter steps to this, once."""
    return onednn.min_rows() if onednn.can_pack(dtype) else 1


class CpuProduct:
    """See ``zlm.ops.backend.Product``."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        return self.packed(x if norm is None else norm(x))

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        return self.packed.add(x if norm is None else norm(x), residual)


class WideProduct:
    """A product whose result is float32, of weights of a narrower type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        wide = x if norm is None else norm(x)
        return F.linear(wide.float(), self.weight.float(), self.bias)

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        return self(x, norm).add_(residual).to(residual.dtype)


class CpuGatedProduct:
    """See ``zlm.ops.backend.GatedProduct``."""

    def __init__(self, gate: Packed, up: Packed, activation: str) -> None:
        self.gate = gate
        self.up = up
        self.activation = activation

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        return self.gate.gate(x if norm is None else norm(x), self.up, self.activation)
