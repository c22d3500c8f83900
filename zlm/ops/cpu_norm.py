"""RMS normalisation over the last dimension on the CPU, prepared once for a weight.

``RMSNorm`` is one norm; ``HeadNorms`` those of q and k in the rows of a merged product.
"""

import math

import torch
from torch import Tensor

from zlm.ops.backend import Geometry
from zlm.ops.cpu_native import LANES, TYPES, NativeKernels


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight, computed in float32, returned in *dtype* (or x's).

    *weight* has a shape that x [..., D] ends with: [D], or [heads, D] for one weight a head.
    """

    def __init__(
        self,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype | None = None,
        native: NativeKernels | None = None,
    ) -> None:
        """*native*: computes rows of what it takes."""
        size = weight.shape[-1]
        self._native = native if size % LANES == 0 and weight.dim() == 1 else None
        self.eps = eps
        self.weight = weight.float().contiguous()
        self.dtype = dtype
        # torch's rms_norm is six passes. Here the root is a norm and a hypot, sqrt(sum x² + D eps),
        # whose factor sqrt(D) moves to the weight: 6 against 11 us for 4 rows of 576.
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)
        self._scaled_weight = self.weight * math.sqrt(size)

    def __call__(self, x: Tensor) -> Tensor:
        return self.to(x, self.dtype or x.dtype)

    def to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of x in *dtype*."""
        if self._native is not None and x.dim() == 2 and x.dtype in TYPES and dtype in TYPES:
            return self._native.rms_norm(x.contiguous(), self.weight, self.eps, dtype)
        wide = x if x.dtype == torch.float32 else x.float()
        root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        out = (wide / torch.hypot(root, self._floor)).mul_(self._scaled_weight)
        return out if dtype == torch.float32 else out.to(dtype)

    def apply_(self, x: Tensor) -> None:
        """Normalise x in place."""
        if x.dtype == torch.float32:
            root = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            x.div_(torch.hypot(root, self._floor)).mul_(self._scaled_weight)
        else:
            x.copy_(self(x))


class HeadNorms:
    """Norms of q and k, in place in the rows of a merged QKV product."""

    def __init__(
        self,
        geometry: Geometry,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        *,
        values: bool = False,
    ) -> None:
        """The weights are [D], of each head, or of all heads together. *values*: heads of v too."""
        self.eps = eps
        # Final weights of the norm of each head of q and of k, if that is all there is.
        self.of_each_head: tuple[Tensor, Tensor] | None = None
        if q_weight.shape[0] == geometry.head_dim and not values:
            self.of_each_head = q_weight.float(), k_weight.float()
        num_q, num_k = geometry.num_heads, geometry.num_kv_heads
        end_q, end_k = geometry.q_row, geometry.q_row + num_k * geometry.head_dim
        if q_weight.shape[0] == geometry.head_dim:
            weights = [q_weight.expand(num_q, -1), k_weight.expand(num_k, -1)]
            self.parts = [(slice(end_k), RMSNorm(torch.cat(weights), eps))]
        else:
            self.parts = [
                (slice(end_q), RMSNorm(q_weight, eps)),
                (slice(end_q, end_k), RMSNorm(k_weight, eps)),
            ]
        if values:
            ones = torch.ones(num_k, geometry.head_dim)
            self.parts.append((slice(end_k, None), RMSNorm(ones, eps)))

    def apply_(self, qkv: Tensor) -> None:
        """Normalise q and k of *qkv* [T', (Hq + 2 Hkv) D]."""
        for places, norm in self.parts:
            norm.apply_(qkv[:, places].unflatten(1, norm.weight.shape))
