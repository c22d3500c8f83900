"""What a model computes with: the operations that a device backend offers.

A worker makes one ``Ops`` (``zlm.ops.select``) and gives it to every layer through its parameters;
layers and models know nothing of devices, cache layouts or kernels. Two backends exist: ``CpuOps``
(torch and oneDNN) and ``GpuOps`` (Triton kernels and cuBLAS).

Operations with weights are made once, when a model is built, and own their weights in the form that
their device computes best. Two conventions let a backend do several of them in one launch:

    norm      is given to the product that reads the normed rows:  qkv(x, norm=attention_norm)
    residual  is given to the product that is added to it:         hidden = out.add(x, hidden)

``hidden`` is used up by the latter: the result may be in its place. T is the tokens of a step, T'
the rows that are computed, T and perhaps padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zlm.ops.batch import StepBatch
from zlm.ops.block_matrix import Rows, Weight, plain


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads of a merged QKV row: q, then k, then v. Query head h reads KV head h // (Hq / Hkv)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row(self) -> int:
        """Elements of a row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def q_row(self) -> int:
        """Elements of a row's queries, and of a row of attention's result."""
        return self.num_heads * self.head_dim


class Norm(Protocol):
    """RMSNorm: x / sqrt(mean(x²) + eps) * weight, computed in float32."""

    @property
    def weight(self) -> Tensor:
        """float32 [H]"""

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T', H] of any type, in the compute type."""


class Product(Protocol):
    """x @ W.T + b."""

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Return the product [T', N] with x [T', K], or with its norm."""

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        """Return residual [T', N], which is used up, plus the product, in the residual's type.

        x is another tensor than the residual.
        """


class GatedProduct(Protocol):
    """act(x @ G.T + g) * (x @ U.T + u)."""

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Return [T', I] for x [T', K], or for its norm."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert of a mixture: down(act(gate(x)) * up(x)). All biases or none."""

    gate: Weight  # [I, H]
    up: Weight  # [I, H]
    down: Weight  # [H, I]
    gate_bias: Tensor | None = None  # [I]
    up_bias: Tensor | None = None  # [I]
    down_bias: Tensor | None = None  # [H]

    def plain(self, dtype: torch.dtype) -> "PlainExpert":
        """Return the same with tensors: of what is quantized, in *dtype*."""
        gate, up, down = (plain(weight, dtype) for weight in (self.gate, self.up, self.down))
        return PlainExpert(gate, up, down, self.gate_bias, self.up_bias, self.down_bias)


@dataclass(frozen=True, slots=True)
class PlainExpert:
    """``ExpertWeights`` that are tensors."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Mixture:
    """How experts are chosen and computed.

    A token's experts are the *chosen* ones with the largest logits. Their shares are those of a
    softmax over all logits, and with *normalize* over the chosen ones' alone. With *sigmoid* they
    are sigmoids of their logits, and multiply what an expert reads, not what it gives.
    """

    count: int
    chosen: int
    normalize: bool
    activation: str  # silu, gelu_tanh, or clamped
    limit: float = 0.0  # of clamped:  (up + 1) * gate * sigmoid(alpha * gate)  with gate at most
    alpha: float = 0.0  # the limit, and up within it on either side
    sigmoid: bool = False


class Experts(Protocol):
    """The experts of a layer: for each token the sum of what its experts give, by their shares."""

    def __call__(self, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
        """Return residual [T', H], which is used up, plus the mixture of x [T', H].

        logits: the router's, float32 [T', count].
        """


class Embedding(Protocol):
    """Rows of a weight, times a scale."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [T', H], a new tensor, for int64 [T']."""


class LMHead(Protocol):
    """Logits, with a soft cap where there is one."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32, a new tensor, for normed hidden states [S, H]."""


class PagedAttention(Protocol):
    """What stands between a layer's QKV product and its output product.

    Norms of q and k, rotation, the write of keys and values to the cache, and causal, windowed
    attention over it.
    """

    def __call__(self, qkv: Tensor, rotation: Any, cache: Tensor, work: Any) -> Tensor:
        """Return [T', Hq * D] for qkv [T', (Hq + 2 Hkv) * D], which is used up.

        rotation: of ``Ops.rotation``; work: of ``Ops.plan``, for the layer's KV group. What padding
        rows get means nothing.
        """


class Ops(Protocol):
    """A device backend. Keeps no step."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """The compute type: of weights and products."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values in the cache: the compute type, or another."""

    @property
    def needs_lengths(self) -> bool:
        """Whether steps with rows of many tokens need ``query_lens`` and ``context_lens``."""

    @property
    def pdl(self) -> bool:
        """Whether a step's kernels may start before those before them have ended."""

    # ------------------------------------------------------------------- operations with weights
    # Weights are given in the compute type and on the device; norms' in float32.

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """Make the norm with *weight* float32 [H], which is final (1 + w, if a family does so)."""

    def linear(self, weight: Weight, bias: Tensor | None = None, *, wide: bool = False) -> Product:
        """Make the product with *weight* [N, K] and *bias* [N]; *wide*: its result is float32."""

    def gated(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
    ) -> GatedProduct:
        """Make the product with *gate* and *up* [I, K]; activation: silu or gelu_tanh."""

    def join(self, gated: GatedProduct, down: Product) -> None:
        """Tell that all that *gated* gives goes to *down*: it may have another form then."""

    def experts(self, mixture: Mixture, read: Callable[[int], ExpertWeights]) -> Experts:
        """Make the experts whose weights *read* gives, one after another, once each."""

    def embedding(self, weight: Weight | Rows, scale: float, dtype: torch.dtype) -> Embedding:
        """Make the lookup in *weight* [V, H] whose result is of *dtype*."""

    def lm_head(self, weight: Weight, softcap: float) -> LMHead:
        """Make the head with *weight* [V, H], which may be the embedding's; softcap 0: none."""

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
    ) -> PagedAttention:
        """Make a layer's attention; q_norm, k_norm: float32 final weights, both or neither.

        They are [D], of the norm of each head, or [Hq D] and [Hkv D], of one over all heads. sinks:
        float32 [Hq], a score of each head that takes its share of the softmax and gives nothing.
        value_norm: each head of v is normed too, with no weight. reads_only: rows are [T', Hq * D],
        queries alone, and the step's keys and values are in the cache already (k_norm is None).
        kv_scales: float32 [2, Hkv], by which keys and values are divided in a cache of e4m3.
        """

    # ----------------------------------------------------------------------------------- of a step

    def sandwich(
        self, x: Tensor, hidden: Tensor, inner: Norm, outer: Norm
    ) -> tuple[Tensor, Tensor]:
        """Return (h, outer(h)) for h = hidden + inner(x); *hidden* is used up."""

    def token_ids(self, batch: StepBatch) -> Tensor:
        """Return the ids of the step's tokens and of padding, int64 [T']."""

    def rotation(self, table: Tensor, batch: StepBatch, geometry: Geometry) -> Any:
        """Prepare the rotation of a step for all layers with *table* (``layers.rotary``)."""

    def plan(self, batch: StepBatch, group_index: int, cache: Tensor, geometry: Geometry) -> Any:
        """Plan the attention of a step for all layers of a KV group; *cache* is any of theirs.

        ``last_tokens()`` of a plan, where batches have ``picked`` tokens, need not do any others.
        """

    def finish(
        self, batch: StepBatch, caches: list[Tensor], layer_groups: list[int], hidden: Tensor
    ) -> Tensor:
        """Return the step's rows [T, H] of *hidden* [T', H]; see that the caches stay finite.

        layer_groups: the KV group of each layer.
        """

    # ---------------------------------------------------------------------------------- the caches

    def allocate_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the zeroed cache of one layer; its first dimension is the block."""

    def block_bytes(
        self, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes that one block of one layer takes."""

    def copy_blocks(self, caches: list[Tensor], sources: list[int], targets: list[int]) -> None:
        """Copy blocks *sources* over *targets* in every layer of a group; no block is both."""
