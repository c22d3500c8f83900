"""Norms of q and k over all heads (OLMo 2), which several ranks have: the mean is of all squares.

With one rank they are part of the backend's attention.
"""

import torch
from torch import Tensor

from zlm.ops.backend import Geometry
from zlm.ops.parallel import Parallel


class WholeNorms:
    """RMSNorms of the queries and of the keys in QKV rows."""

    def __init__(
        self,
        geometry: Geometry,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        parallel: Parallel,
    ) -> None:
        """*q_norm*, *k_norm*: float32 final weights of this rank's heads."""
        self._ends = geometry.q_row, geometry.q_row + geometry.num_kv_heads * geometry.head_dim
        self._weights = q_norm, k_norm
        self._eps = eps
        self._parallel = parallel
        # Of a rank's squares in the mean of all. A KV head that several ranks have counts for each
        # of them, in the sum as in the number: all such heads do.
        counts = [weight.numel() * parallel.size for weight in self._weights]
        self._shares = torch.tensor([1 / count for count in counts], device=q_norm.device)

    def apply(self, qkv: Tensor) -> Tensor:
        """Return qkv [T', (Hq + 2 Hkv) D] with q and k normed, in place."""
        q_end, k_end = self._ends
        parts = qkv[:, :q_end], qkv[:, q_end:k_end]
        squares = torch.stack([part.float().square().sum(1) for part in parts], 1)
        means = self._parallel.sum(squares * self._shares)
        factors = torch.rsqrt(means + self._eps)
        for i, (part, weight) in enumerate(zip(parts, self._weights, strict=True)):
            part.copy_(part.float() * factors[:, i, None] * weight)
        return qkv
