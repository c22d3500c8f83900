"""A mixture of experts on the CPU: expert by expert, each over the tokens that chose it.

A token's results are added in the order of the experts' numbers, and a row of a product has the
same bits in any company (``zlm.ops.onednn``): so has a token's mixture.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from zlm.ops import cpu_linear
from zlm.ops.backend import Mixture, PlainExpert
from zlm.ops.cpu_linear import CpuGatedProduct, Packed
from zlm.ops.routing import route


class CpuExperts:
    """See ``zlm.ops.backend.Experts``."""

    def __init__(self, mixture: Mixture, read: Callable[[int], PlainExpert]) -> None:
        self.mixture = mixture
        self.experts = [_pack(read(i), mixture) for i in range(mixture.count)]

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        shares, experts = route(logits, self.mixture)
        order = experts.flatten().argsort(stable=True)  # of token, expert pairs: by expert
        tokens, weights = order // self.mixture.chosen, shares.flatten()[order].unsqueeze(1)
        counts = torch.bincount(experts.flatten(), minlength=self.mixture.count).tolist()
        total = torch.zeros(x.shape, dtype=torch.float32)
        first = 0
        for (gated, down), count in zip(self.experts, counts, strict=True):
            if not count:
                continue
            rows = tokens[first : first + count]
            read, factors = x.index_select(0, rows), weights[first : first + count]
            if self.mixture.sigmoid:
                total.index_add_(0, rows, down(gated((read * factors).to(x.dtype))).float())
            else:
                total.index_add_(0, rows, down(gated(read)).float().mul_(factors))
            first += count
        return residual.add_(total)


class ClampedProduct:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped."""

    def __init__(self, gate: Packed, up: Packed, limit: float, alpha: float) -> None:
        self.gate = gate
        self.up = up
        self.limit = limit
        self.alpha = alpha

    def __call__(self, x: Tensor) -> Tensor:
        gate = self.gate(x).clamp_(max=self.limit)
        up = self.up(x).clamp_(-self.limit, self.limit)
        return up.add_(1.0).mul_(gate * torch.sigmoid(gate * self.alpha))


def _pack(
    weights: PlainExpert, mixture: Mixture
) -> tuple[CpuGatedProduct | ClampedProduct, Packed]:
    gate = cpu_linear.pack(weights.gate, weights.gate_bias)
    up = cpu_linear.pack(weights.up, weights.up_bias)
    down = cpu_linear.pack(weights.down, weights.down_bias)
    if mixture.activation == "clamped":
        return ClampedProduct(gate, up, mixture.limit, mixture.alpha), down
    return CpuGatedProduct(gate, up, mixture.activation), down
