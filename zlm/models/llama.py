"""Llama and its relatives (Mistral, Qwen2, Qwen3, SmolLM): one decoder, told apart by the spec.

A layer is  h += attention(norm(h));  h += mlp(norm(h)),  and h is the residual of the whole step.
Biases, norms of q and k, windows and rope scaling are the spec's; no family is named here.
"""

from torch import Tensor

from zlm.config import ModelSpec
from zlm.layers.attention import Attention
from zlm.layers.embedding import Embedding, LMHead
from zlm.layers.mlp import GatedMLP
from zlm.layers.norm import rms_norm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import rotary_table
from zlm.models.step import GroupStep, StepPlanner
from zlm.ops.batch import StepBatch


class Llama:
    """The model: parameters and tables; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        self.planner = StepPlanner(spec, parameters.dtype, parameters.device)
        self.rotary_table = rotary_table(spec.rope, spec.head_dim, max_model_len, parameters.device)
        model = parameters.under("model")
        self.embedding = Embedding(model["embed_tokens.weight"], spec.embedding_scale)
        self.layers = [
            DecoderLayer(model.under(f"layers.{i}"), spec) for i in range(spec.num_layers)
        ]
        self.norm = rms_norm(model["norm.weight"], spec.rms_norm_eps, plus_one=spec.norm_plus_one)
        head = self.embedding.weight if spec.tie_embeddings else parameters["lm_head.weight"]
        self.head = LMHead(head, spec.final_softcap)

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``."""
        groups = self.planner.layers(batch, caches)
        hidden = self.embedding(self.planner.token_ids(batch))
        rotation = self.layers[0].attention.rotation(
            self.rotary_table, batch.positions, hidden.shape[0]
        )
        for layer, cache, group in zip(self.layers, caches, groups, strict=True):
            hidden = layer(hidden, rotation, cache, group)
        return self.planner.finish(batch, caches, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32; see ``zlm.models.registry.Model``."""
        return self.head(hidden)


class DecoderLayer:
    """Attention and MLP, each after a norm and added to the residual."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        self.attention_norm, self.mlp_norm = (
            rms_norm(parameters[f"{name}.weight"], spec.rms_norm_eps, plus_one=spec.norm_plus_one)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.attention = Attention(parameters.under("self_attn"), spec, spec.rope)
        self.mlp = GatedMLP(parameters.under("mlp"), spec.activation)

    def __call__(self, hidden: Tensor, rotation: Tensor, cache: Tensor, group: GroupStep) -> Tensor:
        """Return the residual after this layer, [T', H]."""
        x = self.attention_norm(hidden)
        hidden = self.attention.add(x, hidden, rotation, cache, group.slots, group.work)
        return self.mlp.add(self.mlp_norm(hidden), hidden)
