"""Llama and its relatives (Mistral, Qwen2, Qwen3, SmolLM): one decoder, told apart by the spec.

A layer is  h += attention(norm(h));  h += mlp(norm(h)),  and h is the residual of the whole step.
Biases, norms of q and k, windows and rope scaling are the spec's; no family is named here.
"""

from torch import Tensor

from zlm.config import ModelSpec
from zlm.layers.attention import Attention, LayerStep
from zlm.layers.mlp import GatedMLP
from zlm.layers.norm import rms_norm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import rotary_table
from zlm.models.step import StepPlanner
from zlm.ops.backend import LMHead
from zlm.ops.batch import StepBatch


class Llama:
    """The model: parameters and tables; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        ops, model = parameters.ops, parameters.under("model")
        self.ops = ops
        table = rotary_table(spec.rope, spec.head_dim, max_model_len, ops.device)
        self.planner = StepPlanner(spec, ops, [table] * spec.num_layers)
        weight = model["embed_tokens.weight"]
        self.embedding = ops.embedding(weight, spec.embedding_scale, ops.dtype)
        self.layers = [
            DecoderLayer(model.under(f"layers.{i}"), spec) for i in range(spec.num_layers)
        ]
        self.norm = rms_norm(model, "norm", spec)
        self.head: LMHead | None = None
        if spec.pooling is None:
            head = weight if spec.tie_embeddings else parameters["lm_head.weight"]
            self.head = ops.lm_head(head, spec.final_softcap)

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``."""
        steps = self.planner.layers(batch, caches)
        hidden = self.embedding(self.ops.token_ids(batch))
        for layer, step in zip(self.layers, steps, strict=True):
            hidden = layer(hidden, step)
        return self.planner.finish(batch, caches, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, V] float32; see ``zlm.models.registry.Model``."""
        assert self.head is not None, "a pooled model has no logits"
        return self.head(hidden)


class DecoderLayer:
    """Attention and MLP, each after a norm and added to the residual."""

    def __init__(self, parameters: Parameters, spec: ModelSpec) -> None:
        self.attention_norm = rms_norm(parameters, "input_layernorm", spec)
        self.attention = Attention(parameters.under("self_attn"), spec, spec.rope)
        self.mlp_norm = rms_norm(parameters, "post_attention_layernorm", spec)
        self.mlp = GatedMLP(parameters.under("mlp"), spec.activation)

    def __call__(self, hidden: Tensor, step: LayerStep) -> Tensor:
        """Return the residual after this layer, [T', H]; *hidden* is used up."""
        hidden = self.attention.add(hidden, hidden, self.attention_norm, step)
        return self.mlp.add(hidden, hidden, self.mlp_norm)
