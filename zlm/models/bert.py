"""BERT and its relatives (MiniLM, BGE, E5, RoBERTa, XLM-RoBERTa, DistilBERT, MPNet): an encoder.

Embeddings of token, position and segment are added and normed; a layer is
h = norm(h + attention(h));  h = norm(h + mlp(h)).  MPNet's attention has a bias by distance, too.
Tokens see the whole sequence, so a step's rows are whole sequences and nothing is kept of them.
"""

import dataclasses

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.layers.activation import ACTIVATIONS
from zlm.layers.layer_norm import LayerNorm
from zlm.layers.parameters import Parameters
from zlm.layers.relative_bias import RelativeBias
from zlm.ops import segments
from zlm.ops.batch import StepBatch
from zlm.ops.segments import Segments


class Bert:
    """The model: parameters; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        embeddings = parameters.under("embeddings")
        self.offset = spec.position_offset
        self.tokens = embeddings["word_embeddings.weight"]
        self.positions = embeddings["position_embeddings.weight"]
        self.types = embeddings.optional("token_type_embeddings.weight")
        self.norm = LayerNorm(embeddings.under("LayerNorm"), spec.rms_norm_eps)
        self.bias: RelativeBias | None = None
        if spec.relative_buckets:
            weight = parameters["encoder.relative_attention_bias.weight"]
            self.bias = RelativeBias(weight, max_model_len)
        self.layers = [
            EncoderLayer(parameters.under(f"encoder.layer.{i}"), spec)
            for i in range(spec.num_layers)
        ]

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``. *caches* is empty."""
        del caches
        hidden = self.tokens[batch.token_ids] + self.positions[batch.positions + self.offset]
        if self.types is not None:
            types = batch.token_types
            hidden = hidden + (self.types[0] if types is None else self.types[types])
        hidden = self.norm(hidden)
        work = segments.plan(batch.query_lens, 0, hidden.device)
        if self.bias is not None:
            biases = {length: self.bias(length) for length, _ in work.by_length}
            work = dataclasses.replace(work, biases=biases)
        for layer in self.layers:
            hidden = layer(hidden, work)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Raise: an encoder continues no text."""
        raise TypeError("an encoder has no head over the vocabulary")


class EncoderLayer:
    """Attention and MLP, each added to what it reads and then normed."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        ops = parameters.ops
        attention, out = parameters.under("attention.self"), parameters.under("attention.output")
        names = ("query", "key", "value")
        self.heads = (spec.num_heads, spec.head_dim)
        self.qkv = ops.linear(
            torch.cat([attention[f"{name}.weight"] for name in names]),
            torch.cat([attention[f"{name}.bias"] for name in names]),
        )
        parallel = parameters.parallel
        self.out = parallel.summed(ops.linear(out["dense.weight"], out["dense.bias"]))
        self.attention_norm = LayerNorm(out.under("LayerNorm"), spec.rms_norm_eps)
        inner, outer = parameters.under("intermediate.dense"), parameters.under("output")
        self.inner = ops.linear(inner["weight"], inner["bias"])
        self.outer = parallel.summed(ops.linear(outer["dense.weight"], outer["dense.bias"]))
        self.norm = LayerNorm(outer.under("LayerNorm"), spec.rms_norm_eps)
        self.activation = ACTIVATIONS[spec.activation]

    def __call__(self, hidden: Tensor, work: Segments) -> Tensor:
        """Return the hidden states [T, H] after this layer."""
        qkv = self.qkv(hidden).unflatten(1, (3, *self.heads))
        q, k, v = qkv.unbind(1)
        found = segments.attention(q, k, v, work, scale=self.heads[1] ** -0.5)
        hidden = self.attention_norm(self.out(found.flatten(1)) + hidden)
        return self.norm(self.outer(self.activation(self.inner(hidden))) + hidden)
