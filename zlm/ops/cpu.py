"""The CPU backend: torch's own operations, oneDNN's packed products, packed flash attention.

It is also the reference that the GPU backend is tested against.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops import cpu_attention, cpu_linear, cpu_rotary, kv_cache
from zlm.ops.backend import ExpertWeights, GatedProduct, Geometry, Mixture, Norm, Product
from zlm.ops.batch import StepBatch
from zlm.ops.block_matrix import BlockMatrix, Rows, Weight, plain, stack
from zlm.ops.cpu_attention import CpuPlan, HeadScales
from zlm.ops.cpu_experts import CpuExperts
from zlm.ops.cpu_linear import CpuGatedProduct, CpuProduct, WideProduct
from zlm.ops.cpu_norm import HeadNorms, RMSNorm
from zlm.ops.cpu_quantized import FourBits, HeadProduct, QuantizedGated, QuantizedProduct
from zlm.ops.scores import Scores


class CpuOps:
    """See ``zlm.ops.backend.Ops``. Computes in *dtype*: float32, or bfloat16 where that is fast.

    With *quantized*, which needs bfloat16, weights may be quantized, and short steps stay short;
    *narrow* saves the memory of their bfloat16 form (``zlm.ops.cpu_quantized``).
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        kv_dtype: torch.dtype | None = None,
        quantized: bool = False,
        narrow: bool = False,
    ) -> None:
        """*kv_dtype*: of keys and values in the cache; None: *dtype*."""
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.needs_lengths = True
        self.pdl = False
        self._narrow = narrow
        self._min_rows = 1 if quantized else cpu_linear.min_rows(dtype)

    def norm(self, weight: Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps, self.dtype)

    def linear(self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False) -> Product:
        if isinstance(weight, BlockMatrix):
            assert not wide, "products of quantized weights are bfloat16"
            return QuantizedProduct(weight, bias, narrow=self._narrow)
        if wide and weight.dtype != torch.float32:
            return WideProduct(weight, bias)
        return CpuProduct(cpu_linear.pack(weight, bias))

    def gated(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
    ) -> GatedProduct:
        if isinstance(gate, BlockMatrix) and isinstance(up, BlockMatrix):
            both = stack([gate, up], self.dtype)
            if isinstance(both, BlockMatrix):
                biases = [bias for bias in (gate_bias, up_bias) if bias is not None]
                bias = torch.cat(biases) if biases else None
                return QuantizedGated(both, bias, activation, narrow=self._narrow)
        gate, up = plain(gate, self.dtype), plain(up, self.dtype)
        packed = cpu_linear.pack(gate, gate_bias), cpu_linear.pack(up, up_bias)
        return CpuGatedProduct(*packed, activation)

    def join(self, gated: GatedProduct, down: Product) -> None:
        pass  # a tensor is the best form

    def experts(self, mixture: Mixture, read: Callable[[int], ExpertWeights]) -> CpuExperts:
        return CpuExperts(mixture, lambda index: read(index).plain(self.dtype))

    def embedding(self, weight: Weight | Rows, scale: float, dtype: torch.dtype) -> "CpuEmbedding":
        return CpuEmbedding(weight, scale, dtype)

    def lm_head(self, weight: Weight, softcap: float) -> "CpuLMHead":
        if isinstance(weight, BlockMatrix):
            kind = QuantizedProduct if FourBits.takes(weight) else HeadProduct
            return CpuLMHead(kind(weight, narrow=self._narrow), softcap)
        return CpuLMHead(cpu_linear.pack(weight), softcap)

    def attention(
        self,
        geometry: Geometry,
        *,
        scale: float,
        softcap: float,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        sinks: Tensor | None = None,
        value_norm: bool = False,
        reads_only: bool = False,
        kv_scales: Tensor | None = None,
    ) -> "CpuPagedAttention | CpuReadingAttention":
        scores = Scores(scale, softcap, sinks)
        if reads_only:
            norm = None if q_norm is None else RMSNorm(q_norm, eps)
            return CpuReadingAttention(geometry, scores, norm, kv_scales)
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = HeadNorms(geometry, q_norm, k_norm, eps, values=value_norm)
        return CpuPagedAttention(geometry, scores, norms, kv_scales)

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

    def __init__(self, weight: Weight | Rows, scale: float, dtype: torch.dtype) -> None:
        self.weight = weight
        # The factor is rounded to the weights' type, as the models were trained with.
        stored = weight.dtype if isinstance(weight, Tensor) else dtype
        self.scale = torch.tensor(scale, dtype=stored).item()
        self.dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            rows = F.embedding(token_ids, self.weight).to(self.dtype)
        else:
            rows = self.weight.rows(token_ids).dequantize(self.dtype)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


class CpuLMHead:
    """See ``zlm.ops.backend.LMHead``."""

    def __init__(self, product: Callable[[Tensor], Tensor], softcap: float) -> None:
        self.packed = product
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
        self,
        geometry: Geometry,
        scores: Scores,
        norms: HeadNorms | None,
        kv_scales: Tensor | None = None,
    ) -> None:
        self.geometry = geometry
        self.scores = scores
        self.norms = norms  # of q and k
        self.kv_scales = kv_scales
        self.scales = None if kv_scales is None else HeadScales.of(kv_scales, geometry)

    def __call__(self, qkv: Tensor, rotation: Tensor, cache: Tensor, work: CpuPlan) -> Tensor:
        geometry = self.geometry
        if self.norms is not None:
            self.norms.apply_(qkv)
        qkv = cpu_rotary.rotate(qkv, rotation)
        kv_cache.write(cache, qkv[:, geometry.q_row :], work.slots, self.kv_scales)
        return work.run(qkv, cache, self.scores, self.scales)


class CpuReadingAttention:
    """See ``zlm.ops.backend.PagedAttention``: with keys and values that another layer has stored.

    Those of the step's own tokens are read back from the cache, so that rows are like any others.
    """

    def __init__(
        self,
        geometry: Geometry,
        scores: Scores,
        norm: RMSNorm | None,
        kv_scales: Tensor | None = None,
    ) -> None:
        self.geometry = geometry
        self.scores = scores
        self.norm = norm  # of each head of q
        self.scales = None if kv_scales is None else HeadScales.of(kv_scales, geometry)

    def __call__(self, qkv: Tensor, rotation: Tensor, cache: Tensor, work: CpuPlan) -> Tensor:
        """Return [T', Hq * D] for *qkv* [T', Hq * D], queries alone."""
        geometry, num_tokens = self.geometry, work.slots.shape[0]
        if self.norm is not None:
            self.norm.apply_(qkv.view(qkv.shape[0], -1, geometry.head_dim))
        rows = qkv.new_zeros(qkv.shape[0], geometry.row)
        rows[:, : geometry.q_row] = cpu_rotary.rotate(qkv, rotation[:, : geometry.q_row // 2])
        if cache.dtype == rows.dtype:  # else prompts too are read from the cache
            stored = cache.view(-1, geometry.row - geometry.q_row).index_select(0, work.slots)
            rows[:num_tokens, geometry.q_row :] = stored
        return work.run(rows, cache, self.scores, self.scales)
