"""Llama and its kin (Mistral, Qwen, Phi-3, OLMo, SmolLM): one decoder, told apart by the spec.

A layer is  h += attention(norm(h));  h += mlp(norm(h)),  and h is the residual of the whole step;
in OLMo 2 and 3 it is  h += norm(attention(h));  h += norm(mlp(h)).  In Mixtral and the mixtures of
Qwen the MLP is one of experts. Biases, norms of q and k, windows and rotation are the spec's; no
family is named here.
"""

from torch import Tensor

from zlm.config import ModelSpec, RopeSpec
from zlm.layers.attention import Attention, LayerStep
from zlm.layers.ends import Ends
from zlm.layers.mlp import GatedMLP
from zlm.layers.moe import MixtureMLP
from zlm.layers.norm import rms_norm
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import layer_ropes
from zlm.models.step import StepPlanner
from zlm.models.tensors import has_experts
from zlm.ops.batch import StepBatch


class Llama:
    """The model: parameters and tables; nothing of it changes after it is built."""

    def __init__(self, spec: ModelSpec, parameters: Parameters, max_model_len: int) -> None:
        ops, model = parameters.ops, parameters.under("model")
        self.ops = ops
        self.planner = StepPlanner(spec, ops, max_model_len)
        self.ends = Ends(parameters, spec, ops.dtype)
        kind = PostNormLayer if spec.post_norms else DecoderLayer
        self.layers = [
            kind(model.under(f"layers.{i}"), spec, rope, i)
            for i, rope in enumerate(layer_ropes(spec))
        ]
        self.logits = self.ends.logits  # see ``zlm.models.registry.Model``

    def forward(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Return hidden states [T, H]; see ``zlm.models.registry.Model``."""
        steps = self.planner.layers(batch, caches)
        hidden = self.ends.enter(self.ops.token_ids(batch))
        for layer, step in zip(self.layers, steps, strict=True):
            hidden = layer(hidden, step)
        return self.planner.finish(batch, caches, self.ends.leave(hidden))


class DecoderLayer:
    """Attention and MLP, each after a norm and added to the residual."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec, index: int) -> None:
        self.attention_norm = rms_norm(parameters, "input_layernorm", spec)
        self.attention = Attention(parameters.under("self_attn"), spec, rope)
        self.mlp_norm = rms_norm(parameters, "post_attention_layernorm", spec)
        self.mlp: GatedMLP | MixtureMLP
        if has_experts(spec, index):
            self.mlp = MixtureMLP(parameters.under("mlp"), spec)
        else:
            self.mlp = GatedMLP(parameters.under("mlp"), spec.activation)

    def __call__(self, hidden: Tensor, step: LayerStep) -> Tensor:
        """Return the residual after this layer, [T', H]; *hidden* is used up."""
        hidden = self.attention.add(hidden, hidden, self.attention_norm, step)
        return self.mlp.add(hidden, hidden, self.mlp_norm)


class PostNormLayer:
    """Attention and MLP, whose results are normed and added to the residual (OLMo 2)."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec, index: int) -> None:
        self.attention = Attention(parameters.under("self_attn"), spec, rope)
        self.attention_norm = rms_norm(parameters, "post_attention_layernorm", spec)
        self.mlp = GatedMLP(parameters.under("mlp"), spec.activation)
        self.mlp_norm = rms_norm(parameters, "post_feedforward_layernorm", spec)

    def __call__(self, hidden: Tensor, step: LayerStep) -> Tensor:
        """Return the residual after this layer, [T', H]; *hidden* is used up."""
        hidden = step.kept(hidden).add_(self.attention_norm(self.attention(hidden, step)))
        return hidden.add_(self.mlp_norm(self.mlp(hidden)))
