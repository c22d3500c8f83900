"""Gemma 4 (text): wider heads in full layers, shared keys, an embedding for each layer.

A layer is, with a norm before and after each part, as in Gemma 3 (but norms multiply by the weight
itself),

    h += norm(attention(norm(h)));  h += norm(mlp(norm(h)));
    h += norm((act(h @ gate) * e) @ projection);  h *= scalar

where e [P] is the layer's part of a second embedding of the token, joined with a projection of its
first. The last layers compute queries alone: they see the keys and values of the last layer before
them of their own kind, sliding or full.

In float16 the residual h, and what is added to it, are float32, as in Gemma 3; and the products
that read it, or what its gate gives, without a norm before them get a fraction of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.config import Gemma4Spec, ModelSpec, RopeSpec, layer_heads, shared_from
from zlm.layers.attention import LayerStep, geometry, head_norm, merged
from zlm.layers.mlp import GatedMLP
from zlm.layers.norm import rms_norm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import interleave, layer_ropes
from zlm.models.step import StepPlanner
from zlm.ops.backend import LMHead, Norm, Product
from zlm.ops.batch import StepBatch
from zlm.ops.block_matrix import Weight

SHRINK = 2.0**-6  # the fraction: room for 64 times float16's largest number


class Gemma4:
    """The model: parameters and tables; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        ops, model = parameters.ops, parameters.under("model")
        own = spec.gemma4
        assert own is not None
        self.ops = ops
        self.planner = StepPlanner(spec, ops, max_model_len)
        weight = model["embed_tokens.weight"]
        residual_type = torch.float32 if ops.dtype == torch.float16 else ops.dtype
        own_rows = ops.embedding(weight, spec.embedding_scale, residual_type)
        self.embedding = parameters.parallel.embedding(own_rows, weight.shape[0])
        self.per_layer: PerLayerEmbedding | None = None
        if own.per_layer_size:
            self.per_layer = PerLayerEmbedding(model, spec, own)
        self.layers = [
            DecoderLayer(model.under(f"layers.{i}"), spec, own, rope, i)
            for i, rope in enumerate(layer_ropes(spec))
        ]
        self.norm = rms_norm(model, "norm", spec)
        self.head: LMHead | None = None
        if spec.pooling is None:
            head = weight if spec.tie_embeddings else parameters["lm_head.weight"]
            own_logits = ops.lm_head(head, spec.final_softcap)
            self.head = parameters.parallel.head(own_logits, spec.vocab_size)

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``."""
        steps = self.planner.layers(batch, caches)
        token_ids = self.ops.token_ids(batch)
        hidden = self.embedding(token_ids)
        inputs: list[Tensor | None] = [None] * len(self.layers)
        if self.per_layer is not None:
            inputs = list(self.per_layer(token_ids, hidden).unbind(1))
        for layer, step, extra in zip(self.layers, steps, inputs, strict=True):
            hidden = layer(hidden, step, extra)
        return self.planner.finish(batch, caches, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32; see ``zlm.models.registry.Model``."""
        assert self.head is not None, "a pooled model has no logits"
        return self.head(hidden)


class PerLayerEmbedding:
    """(norm(h @ projection / sqrt(H)) + embedding * sqrt(P)) / sqrt(2), for all layers at once."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, own: Gemma4Spec) -> None:
        ops = parameters.ops
        self.size = own.per_layer_size
        self.dtype = ops.dtype
        weight = parameters["embed_tokens_per_layer.weight"]
        own_rows = ops.embedding(weight, self.size**0.5, ops.dtype)
        self.embedding = parameters.parallel.embedding(own_rows, weight.shape[0])
        self.projection = ops.linear(parameters["per_layer_model_projection.weight"])
        self.scale = spec.hidden_size**-0.5
        self.norm = rms_norm(parameters, "per_layer_projection_norm", spec)

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return [T', layers, P] for the tokens' ids [T'] and their embeddings [T', H]."""
        projected = self.projection(hidden.to(self.dtype)).mul(self.scale)
        rows = self.norm(projected.view(-1, self.size)).view_as(projected)
        return (rows + self.embedding(token_ids)).mul_(2**-0.5).unflatten(1, (-1, self.size))


class DecoderLayer:
    """Attention, MLP and the layer's own embedding, each added to the residual."""

    def __init__(
        self,
        parameters: Parameters,
        spec: ModelSpec,
        own: Gemma4Spec,
        rope: RopeSpec,
        index: int,
    ) -> None:
        ops = parameters.ops
        self.dtype = ops.dtype
        self.sandwich = ops.sandwich
        self.attention_norm = rms_norm(parameters, "input_layernorm", spec)
        self.attention_out_norm = rms_norm(parameters, "post_attention_layernorm", spec)
        self.mlp_norm = rms_norm(parameters, "pre_feedforward_layernorm", spec)
        self.mlp_out_norm = rms_norm(parameters, "post_feedforward_layernorm", spec)
        wide = ops.dtype == torch.float16
        self.attention = Attention(parameters.under("self_attn"), spec, own, rope, index, wide=wide)
        self.mlp = GatedMLP(parameters.under("mlp"), spec.activation, wide=wide)
        self.scalar = float(parameters["layer_scalar"])
        self.out_norm: Norm | None = None
        if own.per_layer_size:
            self.gate = ops.linear(parameters["per_layer_input_gate.weight"], wide=wide)
            self.projection = ops.linear(parameters["per_layer_projection.weight"], wide=wide)
            self.out_norm = rms_norm(parameters, "post_per_layer_input_norm", spec)

    def __call__(self, hidden: Tensor, step: LayerStep, extra: Tensor | None) -> Tensor:
        """Return the residual after this layer, [T', H]; *hidden* is used up.

        extra: [T', P], of ``PerLayerEmbedding``.
        """
        x = self.attention(self.attention_norm(hidden), step)
        hidden, x = self.sandwich(x, step.kept(hidden), self.attention_out_norm, self.mlp_norm)
        # The norm after what is added is not needed here: a norm at hand stands in its place.
        hidden, _ = self.sandwich(self.mlp(x), hidden, self.mlp_out_norm, self.mlp_norm)
        if extra is not None and self.out_norm is not None:
            own = self._per_layer(hidden, step.kept(extra))
            hidden, _ = self.sandwich(own, hidden, self.out_norm, self.mlp_norm)
        return hidden.mul_(self.scalar) if self.scalar != 1.0 else hidden

    def _per_layer(self, hidden: Tensor, extra: Tensor) -> Tensor:
        """Return (act(hidden @ gate) * extra) @ projection, [T', H]."""
        shrink = SHRINK if self.dtype == torch.float16 else 1.0
        gate = self._product(self.gate, hidden, shrink)
        gated = F.gelu(gate, approximate="tanh").mul_(extra)
        return self._product(self.projection, gated, shrink)

    def _product(self, product: Product, x: Tensor, shrink: float) -> Tensor:
        if shrink == 1.0:
            return product(x)
        return product(x.mul(shrink).to(self.dtype)).div_(shrink)


class Attention:
    """See ``zlm.layers.attention.Attention``: heads of the layer's kind, values normed too.

    Of a layer that shares others' keys and values there are ``q_proj``, ``q_norm``, ``o_proj``.
    """

    def __init__(
        self,
        parameters: Parameters,
        spec: ModelSpec,
        own: Gemma4Spec,
        rope: RopeSpec,
        index: int,
        *,
        wide: bool,
    ) -> None:
        """*wide*: the result is float32."""
        ops = parameters.ops
        _, head_dim = layer_heads(spec, index)
        shares = index >= shared_from(spec)
        weight: Weight
        if shares:
            weight = interleave(parameters["q_proj.weight"], head_dim, rope)
        else:
            is_full = not spec.layer_windows[index]
            values = "k_proj" if own.keys_are_values and is_full else "v_proj"
            q, k, v = (parameters[f"{name}.weight"] for name in ("q_proj", "k_proj", values))
            weight = merged(q, k, v, head_dim, rope, parameters.ops.dtype)
        self.qkv = ops.linear(weight)
        self.out = parameters.parallel.summed(ops.linear(parameters["o_proj.weight"], wide=wide))
        self.attention = ops.attention(
            geometry(spec, index),
            scale=spec.attention_scale,
            softcap=0.0,
            q_norm=head_norm(parameters, "q_norm", spec, head_dim, rope),
            k_norm=None if shares else head_norm(parameters, "k_norm", spec, head_dim, rope),
            eps=spec.rms_norm_eps,
            value_norm=not shares,
            reads_only=shares,
        )

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return [T', H] for normed x [T', H]."""
        heads = self.attention(self.qkv(x), step.rotation, step.cache, step.work)
        return self.out(step.kept(heads))
