"""Gemma 3 (text): norms before and after attention and MLP, two rotary bases, scaled embeddings.

A layer is  h += norm(attention(norm(h)));  h += norm(mlp(norm(h))).  Sliding and full layers
alternate, each with its own rotary table; norms multiply by 1 + weight.
"""

from torch import Tensor

from zlm.config import ModelSpec, RopeSpec
from zlm.layers.attention import Attention
from zlm.layers.embedding import Embedding, LMHead
from zlm.layers.mlp import GatedMLP
from zlm.layers.norm import rms_norm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import rotary_table
from zlm.models.step import GroupStep, StepPlanner
from zlm.ops.batch import StepBatch


class Gemma3:
    """The model: parameters and tables; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        self.planner = StepPlanner(spec, parameters.dtype, parameters.device)
        windows = spec.layer_windows or (0,) * spec.num_layers
        self.sliding = [window > 0 for window in windows]
        ropes = {False: spec.rope, True: spec.rope_sliding or spec.rope}
        self.rotary_tables = {
            sliding: rotary_table(ropes[sliding], spec.head_dim, max_model_len, parameters.device)
            for sliding in set(self.sliding)
        }
        model = parameters.under("model")
        self.embedding = Embedding(model["embed_tokens.weight"], spec.embedding_scale)
        self.layers = [
            DecoderLayer(model.under(f"layers.{i}"), spec, ropes[sliding])
            for i, sliding in enumerate(self.sliding)
        ]
        self.norm = rms_norm(model["norm.weight"], spec.rms_norm_eps, plus_one=spec.norm_plus_one)
        head = self.embedding.weight if spec.tie_embeddings else parameters["lm_head.weight"]
        self.head = LMHead(head, spec.final_softcap)

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``."""
        groups = self.planner.layers(batch, caches)
        hidden = self.embedding(self.planner.token_ids(batch))
        rotations = {
            sliding: self.layers[0].attention.rotation(table, batch.positions, hidden.shape[0])
            for sliding, table in self.rotary_tables.items()
        }
        for layer, cache, group, sliding in zip(
            self.layers, caches, groups, self.sliding, strict=True
        ):
            hidden = layer(hidden, rotations[sliding], cache, group)
        return self.planner.finish(batch, caches, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32; see ``zlm.models.registry.Model``."""
        return self.head(hidden)


class DecoderLayer:
    """Attention and MLP, each between two norms and added to the residual."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec) -> None:
        (
            self.attention_norm,
            self.attention_out_norm,
            self.mlp_norm,
            self.mlp_out_norm,
        ) = (
            rms_norm(parameters[f"{name}.weight"], spec.rms_norm_eps, plus_one=spec.norm_plus_one)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        )
        self.attention = Attention(parameters.under("self_attn"), spec, rope)
        self.mlp = GatedMLP(parameters.under("mlp"), spec.activation)

    def __call__(self, hidden: Tensor, rotation: Tensor, cache: Tensor, group: GroupStep) -> Tensor:
        """Return the residual after this layer, [T', H]."""
        x = self.attention(self.attention_norm(hidden), rotation, cache, group.slots, group.work)
        hidden = self.attention_out_norm(x).add_(hidden)
        x = self.mlp(self.mlp_norm(hidden))
        return self.mlp_out_norm(x).add_(hidden)
