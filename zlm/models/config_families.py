"""The families whose Hugging Face checkpoints are known, and what their config.json leaves out.

Keys that a config.json leaves out mean what transformers' configuration classes mean by that: a
family's row in ``FAMILIES`` holds those defaults.
"""

from typing import Literal

import msgspec

from zlm.models import config_encoder

HEAD = "ForSequenceClassification"
WITH_HEAD = {  # decoders that classify texts by their last token
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Gemma3Text": "gemma3",
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3TextModel": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "SmolLM3ForCausalLM": "smollm3",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    **{f"{name}{HEAD}": family for name, family in WITH_HEAD.items()},
    **config_encoder.ARCHITECTURES,
}
BARE = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")  # decoders without a head
MODEL_TYPES = {  # for a config.json without ``architectures``
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "smollm3": "smollm3",
    "gpt_oss": "gpt_oss",
    "llama4": "llama4",
    "llama4_text": "llama4",
    **config_encoder.MODEL_TYPES,
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Which layers have the sliding window, where no ``layer_types`` say it:
#   none   no layer has one          all    every layer
#   cycle  all but each n-th         late   those from ``max_window_layers`` on
#   early  every other one before ``max_window_layers``
#   still  those that do not turn q and k
#   chunks those that do, and in place of windows they have chunks
Windows = Literal["none", "all", "cycle", "late", "early", "still", "chunks"]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's config.json means by an absent key. 0: derived from other keys."""

    vocab_size: int = 0  # 0: must be given
    num_heads: int = 0  # 0: must be given
    num_kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden_size / heads
    max_position: int
    eps: float = 1e-6
    windows: Windows = "none"
    window: int = 0  # sliding_window, or attention_chunk_size
    window_switch: bool = False  # only with use_sliding_window
    cycle: int = 1  # of windows "cycle": n
    attention_bias: bool | None = None  # None: the family has no such key
    mlp_bias: bool = False  # whether there is such a key
    tie: bool = False
    theta: float = 10000.0
    activation: str = "silu"
    activation_key: str = "hidden_act"
    bos: int | None = None
    eos: int | None = None


_GEMMA = Family(
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    max_position=8192,
    windows="cycle",
    window=4096,
    attention_bias=False,
    tie=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    bos=2,
    eos=1,
)
_replaced = msgspec.structs.replace
FAMILIES = {
    **dict.fromkeys(("bert", "modernbert", "nomic_bert"), Family(max_position=512)),
    "llama": Family(max_position=2048, attention_bias=False, mlp_bias=True, bos=1, eos=2),
    "mistral": Family(
        num_kv_heads=8, max_position=131072, windows="all", window=4096, bos=1, eos=2
    ),
    "mixtral": Family(
        num_kv_heads=8, max_position=131072, eps=1e-5, windows="all", theta=1e6, bos=1, eos=2
    ),
    "qwen2": Family(
        num_kv_heads=32, max_position=32768, windows="late", window=4096, window_switch=True
    ),
    "qwen2_moe": Family(
        num_kv_heads=16, max_position=32768, windows="early", window=4096, window_switch=True
    ),
    "qwen3": Family(
        num_kv_heads=32,
        head_dim=128,
        max_position=32768,
        windows="late",
        window=4096,
        window_switch=True,
        attention_bias=False,
    ),
    "qwen3_moe": Family(
        num_kv_heads=4,
        max_position=32768,
        windows="all",
        window=4096,
        window_switch=True,
        attention_bias=False,
    ),
    "gemma2": _replaced(_GEMMA, vocab_size=256000, cycle=2),
    "gemma3": _replaced(_GEMMA, vocab_size=262208, max_position=131072, cycle=6, theta=1e6),
    "gemma4": _replaced(
        _GEMMA, vocab_size=262144, max_position=131072, window=512, cycle=6, theta=1e6
    ),
    "phi3": Family(vocab_size=32064, max_position=4096, eps=1e-5, windows="all", bos=1, eos=32000),
    "gpt_oss": Family(
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=201088,
        max_position=131072,
        eps=1e-5,
        windows="cycle",
        window=128,
        cycle=2,
        attention_bias=True,
        theta=150000.0,
    ),
    "llama4": Family(
        vocab_size=202048,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        max_position=131072,
        eps=1e-5,
        windows="chunks",
        window=8192,
        attention_bias=False,
        theta=500000.0,
        bos=1,
        eos=2,
    ),
    "olmo2": Family(max_position=2048, eps=1e-5, attention_bias=False, eos=50279),
    "olmo3": Family(
        max_position=2048,
        eps=1e-5,
        windows="cycle",
        window=4096,
        cycle=4,
        attention_bias=False,
        eos=50279,
    ),
    "smollm3": Family(
        vocab_size=128256,
        num_kv_heads=4,
        max_position=32768,
        windows="still",
        window_switch=True,
        attention_bias=False,
        mlp_bias=True,
        tie=True,
        theta=2e6,
        bos=128000,
        eos=128001,
    ),
}
