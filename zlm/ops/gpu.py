"""The GPU backend: Triton kernels (``zlm.kernels``) and cuBLAS through torch.

Importing this needs Triton. All launches go to the current stream, nothing waits for the device and
no grid depends on a value there, so that a step can be captured in a CUDA graph; the exception is
attention "sdpa", whose steps with rows of many tokens need ``query_lens`` and ``context_lens``.

On a CPU (``torch.device("cpu")``) it runs in Triton's interpreter, which is how it is tested.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from zlm.errors import ConfigError, ModelError
from zlm.kernels import embedding, rms_norm
from zlm.kernels.attention_decode_plan import DecodeWorkspace
from zlm.kernels.quantized_codes import Codes
from zlm.ops import gpu_attention, gpu_gathered, gpu_packing, gpu_quantized, kv_cache
from zlm.ops.backend import (
    Embedding,
    ExpertWeights,
    GatedProduct,
    Geometry,
    LMHead,
    Mixture,
    Norm,
    Product,
)
from zlm.ops.batch import StepBatch
from zlm.ops.block_matrix import BlockMatrix, Rows, Weight, plain, stack
from zlm.ops.gpu_attention import GpuPagedAttention, GpuPlan, Prefill
from zlm.ops.gpu_experts import GpuExperts
from zlm.ops.gpu_fixed import FixedGatedProduct, FixedProduct
from zlm.ops.gpu_linear import GpuGatedProduct, GpuLMHead, GpuNorm, GpuProduct
from zlm.ops.gpu_quantized import Means, QuantizedEmbedding, QuantizedGated, QuantizedProduct

ATTENTIONS = ("triton", "sdpa")
MOST_HEAD_DIM = 512  # of attention's kernels: their settings end there


class GpuOps:
    """See ``zlm.ops.backend.Ops``. Owns the scratch of decode attention, one for each geometry.

    kv_dtype: of keys and values in the cache: *dtype* (None), or e4m3. attention: "triton", or
    "sdpa" for cards before sm80, where Triton has no matrix products: no kernel then uses them.
    deterministic: a token's results have the same bits whatever else is in the step and however its
    prompt was cut in chunks; slower. spread: weights that are codes are kept in *dtype* too, for
    many rows. widened_bytes: of memory for keys and values of e4m3 that prompts read in 16 bits;
    a row's bits then depend on how many there are, so not if deterministic. pdl: kernels start
    before the one before them has ended (``zlm.kernels.chain``; sm90 on).
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kv_dtype: torch.dtype | None = None,
        attention: str = "triton",
        deterministic: bool = False,
        spread: bool = False,
        widened_bytes: int = 0,
        pdl: bool = False,
    ) -> None:
        assert attention in ATTENTIONS
        if deterministic and attention == "sdpa":
            raise ConfigError("--deterministic needs --attention-backend triton, not sdpa")
        self.device = device
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.needs_lengths = attention == "sdpa"
        self._gathers = attention == "sdpa"
        self._fixed = deterministic
        self._spread = spread
        self.pdl = pdl
        self._embedded: tuple[weakref.ref[Tensor], Codes] | None = None
        self._workspaces: dict[Geometry, DecodeWorkspace] = {}
        self._widened_bytes = 0 if deterministic or self._gathers else widened_bytes
        self._widened: Tensor | None = None
        if dtype == torch.float16:
            # Partial sums of a product may pass 65,504 where the product does not.
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def norm(self, weight: Tensor, eps: float) -> GpuNorm:
        return GpuNorm(weight, eps, self.dtype, pdl=self.pdl)

    def linear(self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False) -> Product:
        dtype = torch.float32 if wide else self.dtype
        codes, order = self._packed(weight)
        if codes is not None:
            return QuantizedProduct(codes, order, bias, self._means(dtype, weight))
        kind = FixedProduct if self._fixed else GpuProduct
        return kind(plain(weight, self.dtype), bias, dtype, pdl=self.pdl)

    def gated(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
    ) -> GatedProduct:
        bias = None
        if gate_bias is not None and up_bias is not None:
            bias = torch.cat((gate_bias, up_bias))
        both = stack([gate, up], self.dtype)
        codes, order = self._packed(both)
        if codes is not None:
            return QuantizedGated(codes, order, bias, activation, self._means(self.dtype, both))
        kind = FixedGatedProduct if self._fixed else GpuGatedProduct
        return kind(plain(both, self.dtype), bias, activation, pdl=self.pdl)

    def join(self, gated: GatedProduct, down: Product) -> None:
        gpu_quantized.join(gated, down)

    def experts(self, mixture: Mixture, read: Callable[[int], ExpertWeights]) -> GpuExperts:
        return GpuExperts(mixture, read, self.device, self.dtype, fixed=self._fixed, pdl=self.pdl)

    def embedding(self, weight: Weight | Rows, scale: float, dtype: torch.dtype) -> Embedding:
        assert isinstance(weight, Tensor | BlockMatrix), "a GPU has all rows"
        codes, order = self._packed(weight)
        if codes is not None and order is None:
            assert isinstance(weight, BlockMatrix)
            self._embedded = weakref.ref(weight.codes), codes
            return QuantizedEmbedding(codes, scale, dtype, self.dtype, pdl=self.pdl)
        return GpuEmbedding(plain(weight, self.dtype), scale, dtype, pdl=self.pdl)

    def lm_head(self, weight: Weight, softcap: float) -> LMHead:
        return GpuLMHead(self.linear(weight, wide=True), softcap)

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
    ) -> GpuPagedAttention:
        if geometry.head_dim > MOST_HEAD_DIM:
            raise ModelError(
                f"the model has attention heads of {geometry.head_dim} values: on a GPU they may "
                f"have {MOST_HEAD_DIM} at most; --device cpu has no such limit"
            )
        return GpuPagedAttention(
            geometry,
            self._workspace(geometry),
            scale=scale,
            softcap=softcap,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            sinks=sinks,
            value_norm=value_norm,
            reads_only=reads_only,
            kv_scales=kv_scales,
            pdl=self.pdl,
        )

    def sandwich(
        self, x: Tensor, hidden: Tensor, inner: Norm, outer: Norm
    ) -> tuple[Tensor, Tensor]:
        assert inner.eps == outer.eps, "the kernel has one epsilon"
        out = torch.empty(hidden.shape, dtype=self.dtype, device=hidden.device)
        rms_norm.rms_norm(
            x,
            outer.weight,
            outer.eps,
            out=out,
            residual=hidden,
            residual_out=hidden,
            inner_weight=inner.weight,
            pdl=self.pdl,
        )
        return hidden, out

    def token_ids(self, batch: StepBatch) -> Tensor:
        return batch.token_ids

    def rotation(self, table: Tensor, batch: StepBatch, geometry: Geometry) -> Tensor:
        return table

    def plan(
        self, batch: StepBatch, group_index: int, cache: Tensor, geometry: Geometry
    ) -> GpuPlan:
        group, decodes = batch.groups[group_index], batch.num_decodes
        first = 0 if self._fixed else decodes  # rows from here on are tiles
        decode: Tensor | None = None
        prefill: Prefill | None = None
        if first:
            decode = gpu_attention.plan_decodes(
                batch, group, geometry, self._workspace(geometry), pdl=self.pdl
            )
        if batch.num_rows > first:
            if self._gathers:
                prefill = gpu_gathered.plan(batch, group, cache.shape[3])
            else:
                prefill = gpu_attention.plan_tiles(
                    batch,
                    group,
                    geometry,
                    self.dtype,
                    first,
                    fixed=self._fixed,
                    pdl=self.pdl,
                    storage=self._widened,
                    block_size=cache.shape[3],
                )
        return GpuPlan(
            positions=batch.positions,
            slots=group.slot_mapping,
            window=group.window,
            block_table=group.block_table[:first],
            seq_lens=batch.seq_lens[:first],
            decode=decode,
            prefill=prefill,
        )

    def finish(
        self, batch: StepBatch, caches: list[Tensor], layer_groups: list[int], hidden: Tensor
    ) -> Tensor:
        return hidden  # no padding was added, and nothing but finite numbers has been stored

    def allocate_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Tensor:
        if dtype not in (self.dtype, kv_cache.FP8):
            name, own = (str(kind).removeprefix("torch.") for kind in (dtype, self.dtype))
            raise ConfigError(
                f"--kv-cache-dtype {name}: on a GPU the cache is of the compute type, {own}, or fp8"
            )
        if dtype == kv_cache.FP8 and self._widened_bytes and self._widened is None:
            numbers = self._widened_bytes // 2
            self._widened = torch.zeros(numbers, dtype=torch.float16, device=self.device)
        shape = (num_blocks, num_kv_heads, 2, block_size, head_dim)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def block_bytes(
        self, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return kv_cache.block_bytes(block_size, num_kv_heads, head_dim, dtype)

    def copy_blocks(self, caches: list[Tensor], sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        places = torch.tensor((sources, targets))
        if self.device.type == "cuda":  # from memory that is not pinned the host would wait
            places = places.pin_memory()
        source, target = places.to(self.device, non_blocking=True)
        for cache in map(kv_cache.raw, caches):
            cache.index_copy_(0, target, cache.index_select(0, source))

    def _packed(self, weight: Weight) -> tuple[Codes | None, Tensor | None]:
        """Return *weight* as kernels of quantized weights read it, if they can, and its order."""
        if not isinstance(weight, BlockMatrix):
            return None, None
        order = None if weight.order is None else weight.order.to(self.device)
        embedded = self._embedded
        if embedded is not None and embedded[0]() is weight.codes:  # a tied head
            return embedded[1], order
        return gpu_packing.pack(weight, self.device), order

    def _means(self, dtype: torch.dtype, weight: Weight) -> Means:
        scale = weight.input_scale if isinstance(weight, BlockMatrix) else 0.0
        return Means(
            dtype, self.dtype, self._fixed, not self._gathers, self.pdl, scale, self._spread
        )

    def _workspace(self, geometry: Geometry) -> DecodeWorkspace:
        if geometry not in self._workspaces:
            self._workspaces[geometry] = gpu_attention.workspace(
                geometry, self.dtype, self.kv_dtype, self.device, use_dot=not self._gathers
            )
        return self._workspaces[geometry]


class GpuEmbedding:
    """See ``zlm.ops.backend.Embedding``. A tied head multiplies with the same tensor."""

    def __init__(self, weight: Tensor, scale: float, dtype: torch.dtype, *, pdl: bool) -> None:
        self.weight = weight
        # The factor is rounded to the weights' type, as the models were trained with.
        self.scale = torch.tensor(scale, dtype=weight.dtype).item()
        self.dtype = dtype
        self.pdl = pdl

    def __call__(self, token_ids: Tensor) -> Tensor:
        shape = token_ids.shape[0], self.weight.shape[1]
        out = torch.empty(shape, dtype=self.dtype, device=self.weight.device)
        embedding.embedding(token_ids, self.weight, self.scale, out=out, pdl=self.pdl)
        return out
