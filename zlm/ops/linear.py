"""Matrix products with weights: packed once at load, in the form the device computes best.

``pack`` chooses the form, layers keep what it returns and know nothing of it. Every form gives

    product(x)                      x @ W.T + b
    product.add(x, residual)        residual + x @ W.T + b
    product.gate(x, up, act)        act(x @ W.T + b) * up(x)

with x [T, K] and W [N, K]. There is one copy of a weight: the caller drops its own after packing.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops import onednn


class Product(Protocol):
    """A weight, ready to be multiplied with."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor: ...

    def gate(self, x: Tensor, up: "Product", activation: str) -> Tensor: ...


class DenseProduct:
    """The weight as it came, multiplied by torch's own linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(residual)

    def gate(self, x: Tensor, up: Product, activation: str) -> Tensor:
        return activate(self(x), activation).mul_(up(x))


def activate(x: Tensor, activation: str) -> Tensor:
    """Return silu or gelu_tanh of *x*."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh")


def pack(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Pack *weight* [N, K] and *bias* [N] for products on the device they are on."""
    if weight.device.type == "cpu" and onednn.can_pack(weight.dtype):
        return onednn.OneDnnProduct(weight, bias)
    return DenseProduct(weight, bias)


def min_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Return the fewest rows worth multiplying: models pad shorter steps to this, once."""
    if device.type == "cpu" and onednn.can_pack(dtype):
        return onednn.min_rows()
    return 1
