"""ModernBERT (also GTE-ModernBERT, Granite Embedding R2): an encoder with rotary positions.

A layer is  h += attention(norm(h));  h += mlp(norm(h)),  the first without its first norm. Every
third layer sees the whole sequence, the others a window on either side, each kind with its own
rotary table. The MLP is gated. A step's rows are whole sequences, and nothing is kept of them.
"""

import torch
from torch import Tensor

from zlm.config import ModelSpec, RopeSpec
from zlm.layers.activation import ACTIVATIONS
from zlm.layers.attention import Attention, LayerStep
from zlm.layers.layer_norm import LayerNorm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import rotary_table
from zlm.ops import segments
from zlm.ops.batch import StepBatch


class ModernBert:
    """The model: parameters and tables; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        device = parameters.ops.device
        embeddings = parameters.under("embeddings")
        self.tokens = embeddings["tok_embeddings.weight"]
        self.embedding_norm = LayerNorm(embeddings.under("norm"), spec.rms_norm_eps)
        self.windows = spec.layer_windows
        ropes = {window: _rope(spec, window) for window in sorted(set(self.windows))}
        self.tables = {
            window: rotary_table(rope, spec.head_dim, max_model_len, device)
            for window, rope in ropes.items()
        }
        self.layers = [
            EncoderLayer(parameters.under(f"layers.{i}"), spec, ropes[window], first=i == 0)
            for i, window in enumerate(self.windows)
        ]
        self.norm = LayerNorm(parameters.under("final_norm"), spec.rms_norm_eps)

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``. *caches* is empty."""
        del caches
        hidden = self.embedding_norm(self.tokens[batch.token_ids])
        nothing = torch.empty(0, device=hidden.device)
        steps = {
            window: LayerStep(
                segments.rotation(table, batch.positions, hidden.shape[0]),
                nothing,
                segments.plan(batch.query_lens, window, hidden.device),
            )
            for window, table in self.tables.items()
        }
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden = layer(hidden, steps[window])
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raise: an encoder continues no text."""
        raise TypeError("an encoder has no head over the vocabulary")


class EncoderLayer:
    """Attention and gated MLP, each of a norm of the residual, and added to it."""

    def __init__(
        self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec, *, first: bool
    ) -> None:
        eps = spec.rms_norm_eps
        self.attention_norm = None if first else LayerNorm(parameters.under("attn_norm"), eps)
        self.attention = Attention(parameters.under("self_attn"), spec, rope)
        self.mlp_norm = LayerNorm(parameters.under("mlp_norm"), eps)
        mlp = parameters.under("mlp")
        self.inner = parameters.ops.linear(mlp["Wi.weight"], mlp.optional("Wi.bias"))
        outer = parameters.ops.linear(mlp["Wo.weight"], mlp.optional("Wo.bias"))
        self.outer = parameters.parallel.summed(outer)
        self.activation = ACTIVATIONS[spec.activation]

    def __call__(self, hidden: Tensor, step: LayerStep) -> Tensor:
        """Return the residual [T, H] after this layer."""
        x = hidden if self.attention_norm is None else self.attention_norm(hidden)
        hidden = hidden + self.attention(x, step)
        gate, up = self.inner(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.outer(self.activation(gate) * up)


def _rope(spec: ModelSpec, window: int) -> RopeSpec:
    return (spec.rope_sliding or spec.rope) if window else spec.rope
