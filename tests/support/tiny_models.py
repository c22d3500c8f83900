"""Specs of tiny models of every family with random float32 weights: no transformers, no files.

    spec = SPECS["gemma3"]
    model = registry.build(spec, RandomWeights(spec), ops=ops, max_model_len=64)

All parameters are random, norms and biases too: a model is only right if it uses every one of them.
"""

from collections.abc import Iterable

import torch
from msgspec.structs import replace
from torch import Tensor

from zlm.config import ExpertsSpec, Gemma4Spec, ModelSpec, RopeSpec
from zlm.models.tensors import expected_tensors

LLAMA = ModelSpec(
    architecture="llama",
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    rms_norm_eps=1e-5,
)
QWEN3 = replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=24, rms_norm_eps=1e-6)
GEMMA3 = replace(
    LLAMA,
    architecture="gemma3",
    num_kv_heads=1,
    activation="gelu_tanh",
    tie_embeddings=True,
    qk_norm=True,
    norm_plus_one=True,
    sandwich_norms=True,
    embedding_scale=32**0.5,
    attention_scale=0.2,
    layer_windows=(6, 0),
    rope=RopeSpec(theta=1e6, scaling="linear", factor=4.0),
    rope_sliding=RopeSpec(theta=1e4),
)
GEMMA2 = replace(
    GEMMA3,
    architecture="gemma2",
    qk_norm=False,
    num_kv_heads=2,
    attention_softcap=4.0,
    final_softcap=3.0,
    rope=RopeSpec(),
    rope_sliding=None,
)
GEMMA4 = replace(
    LLAMA,
    architecture="gemma4",
    num_layers=3,
    num_kv_heads=1,
    activation="gelu_tanh",
    tie_embeddings=True,
    qk_norm=True,
    sandwich_norms=True,
    embedding_scale=32**0.5,
    attention_scale=0.2,
    final_softcap=3.0,
    layer_windows=(6, 0, 0),
    rope=RopeSpec(theta=1e6, scaling="proportional", partial_factor=0.25),
    rope_sliding=RopeSpec(),
    gemma4=Gemma4Spec(
        full_head_dim=32, full_kv_heads=2, shared_layers=1, wide_shared_mlp=True, per_layer_size=32
    ),
)
OLMO2 = replace(LLAMA, architecture="olmo2", post_norms=True, qk_norm=True, qk_norm_whole=True)
EXPERTS = ExpertsSpec(count=5, chosen=2, size=24)
LLAMA3_ROPE = RopeSpec(scaling="llama3", factor=8.0, original_max_position=64)
YARN_ROPE = RopeSpec(scaling="yarn", factor=4.0, original_max_position=32)
SPECS = {
    "llama": LLAMA,
    "llama-biases": replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True, num_kv_heads=4),
    "mistral": replace(LLAMA, architecture="mistral", layer_windows=(6, 6), num_kv_heads=1),
    "qwen2": replace(LLAMA, architecture="qwen2", qkv_bias=True, tie_embeddings=True),
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "gemma3-softcaps": replace(GEMMA3, attention_softcap=4.0, final_softcap=3.0, num_kv_heads=2),
    "gemma2": GEMMA2,
    "gemma4": GEMMA4,
    "mixtral": replace(LLAMA, architecture="mixtral", experts=EXPERTS, num_layers=1),
    "qwen2-moe": replace(
        LLAMA,
        architecture="qwen2_moe",
        qkv_bias=True,
        experts=replace(
            EXPERTS,
            chosen=3,
            normalize=False,
            layers=(True, False),
            shared_size=20,
            layout="stacked",
        ),
    ),
    "gpt-oss": replace(
        LLAMA,
        architecture="gpt_oss",
        qkv_bias=True,
        o_bias=True,
        attention_sinks=True,
        layer_windows=(6, 0),
        experts=replace(
            EXPERTS, layers=(True, False), layout="fused", biases=True, limit=1.0, alpha=1.702
        ),
    ),
    "llama4": replace(
        LLAMA,
        architecture="llama4",
        qk_norm_plain=True,
        layer_windows=(-8, 0),
        rope=RopeSpec(neighbours=True),
        rope_layers=(True, False),
        rope_still=RopeSpec(
            partial_factor=0.0, scaling="temperature", factor=0.5, original_max_position=7
        ),
        experts=replace(
            EXPERTS,
            chosen=1,
            layers=(True, False),
            shared_size=24,
            shared_gate=False,
            sigmoid=True,
            layout="halves",
        ),
    ),
    "olmo3": replace(OLMO2, architecture="olmo3", layer_windows=(6, 0), rope_sliding=YARN_ROPE),
    "smollm3": replace(LLAMA, architecture="smollm3", rope_layers=(True, False)),
    "phi3": replace(
        LLAMA,
        architecture="phi3",
        fused_products=True,
        layer_windows=(6, 6),
        rope=RopeSpec(partial_factor=0.75),
        head_dim=32,
    ),
    "rope-llama3": replace(LLAMA, rope=LLAMA3_ROPE),
    "rope-yarn": replace(LLAMA, rope=YARN_ROPE),
}


class RandomWeights:
    """A checkpoint in memory; see ``zlm.models.registry.Weights``."""

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: self._values(name, torch.randn(shape, generator=generator), spec)
            for name, shape in expected_tensors(spec).items()
        }

    def names(self) -> Iterable[str]:
        return self.tensors

    def get(self, name: str) -> Tensor:
        return self.tensors[name].clone()

    @staticmethod
    def _values(name: str, noise: Tensor, spec: ModelSpec) -> Tensor:
        if name.endswith("norm.weight"):
            return 0.2 * noise + (0.0 if spec.norm_plus_one else 1.0)
        if "embed_tokens" in name or "lm_head" in name:
            return 0.3 * noise
        return 0.2 * noise if name.endswith(("bias", "sinks")) else noise * noise.shape[-1] ** -0.5
