"""Gemma 2 and 3 (text): norms before and after attention and MLP, scaled embeddings.

A layer is  h += norm(attention(norm(h)));  h += norm(mlp(norm(h))).  Sliding and full layers
alternate, in Gemma 3 each with its own rotary table; norms multiply by 1 + weight. The norm of what
is added, the addition and the next norm, which may be the next layer's, are one operation
(``sandwich``).

In float16 the residual h, and what is added to it, are float32: they exceed 65,504.
"""

import torch
from torch import Tensor

from zlm.config import ModelSpec, RopeSpec
from zlm.layers.attention import Attention, LayerStep
from zlm.layers.ends import Ends
from zlm.layers.mlp import GatedMLP
from zlm.layers.norm import rms_norm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import layer_ropes
from zlm.models.step import StepPlanner
from zlm.ops.backend import Norm
from zlm.ops.batch import StepBatch


class Gemma:
    """The model: parameters and tables; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        ops, model = parameters.ops, parameters.under("model")
        self.ops = ops
        self.planner = StepPlanner(spec, ops, max_model_len)
        residual_type = torch.float32 if ops.dtype == torch.float16 else ops.dtype
        self.ends = Ends(parameters, spec, residual_type)
        self.layers = [
            DecoderLayer(model.under(f"layers.{i}"), spec, rope)
            for i, rope in enumerate(layer_ropes(spec))
        ]
        self.logits = self.ends.logits  # see ``zlm.models.registry.Model``

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``."""
        steps = self.planner.layers(batch, caches)
        hidden = self.ends.enter(self.ops.token_ids(batch))
        norms = [layer.attention_norm for layer in self.layers]
        # What a stage before the last norms at its end is not needed: any norm will do.
        norms.append(self.ends.norm or norms[0])
        x = norms[0](hidden)
        for layer, step, next_norm in zip(self.layers, steps, norms[1:], strict=True):
            hidden, x = layer(hidden, x, step, next_norm)
        last = x if self.ends.norm is not None else self.ends.send(hidden)
        return self.planner.finish(batch, caches, last)


class DecoderLayer:
    """Attention and MLP, each between two norms and added to the residual."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec) -> None:
        self.sandwich = parameters.ops.sandwich
        (
            self.attention_norm,
            self.attention_out_norm,
            self.mlp_norm,
            self.mlp_out_norm,
        ) = (
            rms_norm(parameters, name, spec)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        )
        wide = parameters.ops.dtype == torch.float16
        self.attention = Attention(parameters.under("self_attn"), spec, rope, wide=wide)
        self.mlp = GatedMLP(parameters.under("mlp"), spec.activation, wide=wide)

    def __call__(
        self, hidden: Tensor, x: Tensor, step: LayerStep, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """Return the residual after this layer and its *next_norm*, both [T', H].

        hidden: the residual before, which is used up; x: its ``attention_norm``.
        """
        x = self.attention(x, step)
        hidden, x = self.sandwich(x, step.kept(hidden), self.attention_out_norm, self.mlp_norm)
        return self.sandwich(self.mlp(x), hidden, self.mlp_out_norm, next_norm)
