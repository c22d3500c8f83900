"""Nomic BERT (nomic-embed-text): BERT with rotary positions and a gated MLP, mostly without biases.

A layer is  h = norm(h + attention(h));  h = norm(h + mlp(h)).  A step's rows are whole sequences,
and nothing is kept of them.
"""

import torch
from torch import Tensor

from zlm.config import ModelSpec
from zlm.layers.activation import ACTIVATIONS
from zlm.layers.attention import Attention, LayerStep
from zlm.layers.layer_norm import LayerNorm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import rotary_table
from zlm.ops import segments
from zlm.ops.batch import StepBatch


class NomicBert:
    """The model: parameters and a table; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        embeddings = parameters.under("embeddings")
        self.tokens = embeddings["word_embeddings.weight"]
        self.types = embeddings.optional("token_type_embeddings.weight")
        self.norm = LayerNorm(embeddings.under("LayerNorm"), spec.rms_norm_eps)
        device = parameters.ops.device
        self.table = rotary_table(spec.rope, spec.head_dim, max_model_len, device)
        self.layers = [
            EncoderLayer(parameters.under(f"layers.{i}"), spec) for i in range(spec.num_layers)
        ]

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``. *caches* is empty."""
        del caches
        hidden = self.tokens[batch.token_ids]
        if self.types is not None:
            types = batch.token_types
            hidden = hidden + (self.types[0] if types is None else self.types[types])
        hidden = self.norm(hidden)
        step = LayerStep(
            segments.rotation(self.table, batch.positions, hidden.shape[0]),
            torch.empty(0, device=hidden.device),
            segments.plan(batch.query_lens, 0, hidden.device),
        )
        for layer in self.layers:
            hidden = layer(hidden, step)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Raise: an encoder continues no text."""
        raise TypeError("an encoder has no head over the vocabulary")


class EncoderLayer:
    """Attention and gated MLP, each added to what it reads and then normed."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        eps, ops, mlp = spec.rms_norm_eps, parameters.ops, parameters.under("mlp")
        self.attention = Attention(parameters.under("self_attn"), spec, spec.rope)
        self.attention_norm = LayerNorm(parameters.under("post_attention_layernorm"), eps)
        self.gate, self.up, down = (
            ops.linear(mlp[f"{name}_proj.weight"], mlp.optional(f"{name}_proj.bias"))
            for name in ("gate", "up", "down")
        )
        self.down = parameters.parallel.summed(down)
        self.norm = LayerNorm(parameters.under("post_mlp_layernorm"), eps)
        self.activation = ACTIVATIONS[spec.activation]

    def __call__(self, hidden: Tensor, step: LayerStep) -> Tensor:
        """Return the hidden states [T, H] after this layer."""
        hidden = self.attention_norm(hidden + self.attention(hidden, step))
        gated = self.activation(self.gate(hidden)) * self.up(hidden)
        return self.norm(hidden + self.down(gated))
