"""The CPU backend: torch's operations, oneDNN's packed products, flash attention, a few kernels.

Without the kernels it is also the reference that the GPU backend is tested against.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops import cpu_linear, cpu_native, cpu_paged, kv_cache
from zlm.ops.backend import ExpertWeights, GatedProduct, Geometry, Mixture, Norm, Product
from zlm.ops.batch import StepBatch
from zlm.ops.block_matrix import BlockMatrix, Rows, Weight, plain, stack
from zlm.ops.cpu_codes import Codes
from zlm.ops.cpu_experts import CpuExperts
from zlm.ops.cpu_linear import CpuGatedProduct, CpuProduct, WideProduct
from zlm.ops.cpu_native import NativeKernels
from zlm.ops.cpu_norm import HeadNorms, RMSNorm
from zlm.ops.cpu_paged import CpuPagedAttention, CpuReadingAttention, CpuRotation, CpuWork
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
        native: NativeKernels | None = None,
    ) -> None:
        """*kv_dtype*: of keys and values in the cache; None: *dtype*. *native*: the kernels."""
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.needs_lengths = True
        self.pdl = False
        self._native = native
        self._narrow = narrow
        self._min_rows = 1 if quantized else cpu_linear.min_rows(dtype)

    def norm(self, weight: Tensor, eps: float) -> RMSNorm:
        return RMSNorm(weight, eps, self.dtype, self._native)

    def linear(self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False) -> Product:
        if isinstance(weight, BlockMatrix):
            assert not wide, "products of quantized weights are bfloat16"
            return QuantizedProduct(weight, bias, narrow=self._narrow, native=self._native)
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
                narrow, native = self._narrow, self._native
                return QuantizedGated(both, bias, activation, narrow=narrow, native=native)
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
            if (own := Codes.of(weight, None, self._native)) is not None:
                return CpuLMHead(own.wide, softcap)
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
    ) -> CpuPagedAttention | CpuReadingAttention:
        scores, native = Scores(scale, softcap, sinks), self._decoding(geometry)
        if reads_only:
            norm = None if q_norm is None else RMSNorm(q_norm, eps)
            return CpuReadingAttention(geometry, scores, norm, kv_scales, native, self.dtype)
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = HeadNorms(geometry, q_norm, k_norm, eps, values=value_norm)
        return CpuPagedAttention(geometry, scores, norms, kv_scales, native, self.dtype)

    def sandwich(
        self, x: Tensor, hidden: Tensor, inner: Norm, outer: Norm
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(inner, RMSNorm)
        hidden = inner.to(x, hidden.dtype).add_(hidden)
        return hidden, outer(hidden)

    def token_ids(self, batch: StepBatch) -> Tensor:
        short = self._num_rows(batch) - batch.num_tokens
        return F.pad(batch.token_ids, (0, short)) if short else batch.token_ids

    def rotation(self, table: Tensor, batch: StepBatch, geometry: Geometry) -> CpuRotation:
        num_rows, decodes = self._num_rows(batch), self._num_decodes(batch, geometry)
        return cpu_paged.rotation(table, batch, geometry, num_rows, decodes)

    def plan(
        self, batch: StepBatch, group_index: int, cache: Tensor, geometry: Geometry
    ) -> CpuWork:
        num_rows, decodes = self._num_rows(batch), self._num_decodes(batch, geometry)
        return cpu_paged.plan(batch, group_index, cache, geometry, num_rows, decodes, self.dtype)

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

    def _num_decodes(self, batch: StepBatch, geometry: Geometry) -> int:
        """Return how many of the step's first rows are the kernels'."""
        return 0 if self._decoding(geometry) is None else batch.num_decodes

    def _decoding(self, geometry: Geometry) -> NativeKernels | None:
        """Return the kernels, if decode attention of this form is theirs."""
        fits = cpu_native.takes(geometry, self.dtype, self.kv_dtype)
        return self._native if fits else None


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
