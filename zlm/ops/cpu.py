"""The CPU backend: torch's own operations, oneDNN's packed products, packed flash attention.

It is also the reference that the GPU backend is tested against.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops import cpu_attention, cpu_linear, cpu_rotary, kv_cache
from zlm.ops.backend import Geometry, Norm
from zlm.ops.batch import StepBatch
from zlm.ops.cpu_attention import CpuPlan
from zlm.ops.cpu_linear import CpuGatedProduct, CpuProduct, WideProduct
from zlm.ops.cpu_norm import RMSNorm


class CpuOps:
    """See ``zlm.ops.backend.Ops``. Computes in *dtype*: float32, or bfloat16 where that is fast."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.needs_lengths = True
        self.pdl = False
        self._min_rows = cpu_linear.min_rows(dtype)

    def norm(self, weight: Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps, self.dtype)

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False
    ) -> CpuProduct | WideProduct:
        if wide and weight.dtype != torch.float32:
            return WideProduct(weight, bias)
        return CpuProduct(cpu_linear.pack(weight, bias))

    def gated(
        self,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
    ) -> CpuGatedProduct:
        packed = cpu_linear.pack(gate, gate_bias), cpu_linear.pack(up, up_bias)
        return CpuGatedProduct(*packed, activation)

    def embedding(self, weight: Tensor, scale: float, dtype: torch.dtype) -> "CpuEmbedding":
        return CpuEmbedding(weight, scale, dtype)

    def lm_head(self, weight: Tensor, softcap: float) -> "CpuLMHead":
        return CpuLMHead(weight, softcap)

    def attention(
        self,
        geometry: Geometry,
        *,
        scale: float,
        softcap: float,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> "CpuPagedAttention":
        norm = None
        if q_norm is not None and k_norm is not None:
            weights = (q_norm, geometry.num_heads), (k_norm, geometry.num_kv_heads)
            norm = RMSNorm(torch.cat([w.expand(heads, -1) for w, heads in weights]), eps)
        return CpuPagedAttention(geometry, scale, softcap, norm)

    def sandwich(
        self, x: Tensor, hidden: Tensor, inner: Norm, outer: Norm
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(inner, RMSNorm)
        hidden = inner.to(x, hidden.dtype).add_(hidden)
        return hidden, outer(hidden)

    def token_ids(self, batch: StepBatch) -> Tensor:
        short = self._num_rows(batch) - batch.num_tokens
        return F.pad(batch.token_ids, (0, short)) if short else batch.token_ids

    def rotation(self, table: Tensor, batch: StepBatch, geometry: Geometry) -> Tensor:
        """Return what QKV rows are multiplied with."""
        num_rotated = geometry.num_heads + geometry.num_kv_heads
        num_rows, num_values = self._num_rows(batch), geometry.num_kv_heads
        return cpu_rotary.factors(table, batch.positions, num_rows, num_rotated, num_values)

    def plan(
        self, batch: StepBatch, group_index: int, cache: Tensor, geometry: Geometry
    ) -> CpuPlan:
        group, num_rows = batch.groups[group_index], self._num_rows(batch)
        return cpu_attention.plan(batch, group, cache, geometry, num_rows, self.dtype)

    def finish(
        self, batch: StepBatch, caches: list[Tensor], layer_groups: list[int], hidden: Tensor
    ) -> Tensor:
        hidden = hidden[: batch.num_tokens]
        kv_cache.scrub(caches, layer_groups, batch, hidden)
        return hidden

    def allocate_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Tensor:
        return kv_cache.allocate(num_blocks, block_size, num_kv_heads, head_dim, dtype, self.device)

    def block_bytes(
        self, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return kv_cache.block_bytes(block_size, num_kv_heads, head_dim, dtype)

    def copy_blocks(self, caches: list[Tensor], sources: list[int], targets: list[int]) -> None:
        kv_cache.copy_blocks(caches, sources, targets)

    def _num_rows(self, batch: StepBatch) -> int:
        """Return T': the step's tokens, padded to the fewest rows worth computing."""
        return max(batch.num_tokens, self._min_rows)


class CpuEmbedding:
    """The weight is read by rows, the head's is multiplied with: each is kept in its best form.

    So the head's packed copy of a tied embedding costs the vocabulary once more in memory, and
    makes the product, the largest of a step, two to five times faster.
    """

    def __init__(self, weight: Tensor, scale: float, dtype: torch.dtype) -> None:
        self.weight = weight
        # The factor is rounded to the weights' type, as the models were trained with.
        self.scale = torch.tensor(scale, dtype=weight.dtype).item()
        self.dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.weight).to(self.dtype)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


class CpuLMHead:
    """See ``zlm.ops.backend.LMHead``."""

    def __init__(self, weight: Tensor, softcap: float) -> None:
        self.packed = cpu_linear.pack(weight)
        self.softcap = softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.packed(hidden).float()
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class CpuPagedAttention:
    """See ``zlm.ops.backend.PagedAttention``.

    Norm and rotation take q and k as one tensor of heads, and keys with values go to the cache in
    one write: nothing of the QKV rows is copied on the way.
    """

    def __init__(
        self, geometry: Geometry, scale: float, softcap: float, norm: RMSNorm | None
    ) -> None:
        self.geometry = geometry
        self.scale = scale
        self.softcap = softcap
        self.norm = norm  # of all heads of q and k, [Hq + Hkv, D]

    def __call__(self, qkv: Tensor, rotation: Tensor, cache: Tensor, work: CpuPlan) -> Tensor:
        geometry = self.geometry
        if self.norm is not None:
            heads = qkv.view(qkv.shape[0], -1, geometry.head_dim)
            self.norm.apply_(heads[:, : geometry.num_heads + geometry.num_kv_heads])
        qkv = cpu_rotary.rotate(qkv, rotation)
        kv_cache.write(cache, qkv[:, geometry.q_row :], work.slots)
        return work.run(qkv, cache, scale=self.scale, softcap=self.softcap)
