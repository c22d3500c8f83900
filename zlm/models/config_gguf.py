"""ModelSpec from a GGUF file's metadata and tensor table.

The table, not the metadata, says what is there: rows of the embedding, biases, a separate output
matrix. Weights come under Hugging Face's names and in its form (``zlm.weights.load`` undoes what
converters change), so the spec is that of the Hugging Face checkpoint: Gemma's norms multiply by
1 + weight here too.
"""

import difflib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from zlm.config import ExpertsSpec, ModelSpec, RopeSpec
from zlm.errors import ModelError
from zlm.models import config_gguf_encoder
from zlm.models.config_fields import Fields
from zlm.models.config_generation import (
    OFF,
    find_generation_config,
    generation_defaults,
    gguf_generation,
)
from zlm.models.config_rope import check_rope, gguf_rope, longest_context
from zlm.models.config_tokens import gguf_tokens
from zlm.weights.gguf import READABLE, GGUFFile

FAMILIES = {  # GGUF's architecture: our family. Mistral's and Mixtral's files say llama
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",  # OLMo 3, too
    "smollm3": "smollm3",
    config_gguf_encoder.EMBEDDING_GEMMA: "gemma3",
    **config_gguf_encoder.FAMILIES,
}
# Layers of the Gemma of 27B, the one whose attention scale is not head_dim ** -0.5.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Every so many layers one sees everything. Most files do not say so.
CYCLES = {"gemma2": 2, "gemma3": 6, "olmo2": 4}
STILL_CYCLE = 4  # every fourth layer of SmolLM3 turns nothing; files do not say so
REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
FREQUENCY_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


def gguf_spec(path: Path, generation_config: str) -> ModelSpec:
    """Return the facts of the GGUF file *path*; see ``zlm.models.config.load_spec``."""
    file = GGUFFile(path)
    family = _family(file)
    _check_types(file)
    prefix = f"{file.architecture}."
    keys = Fields(
        {
            key.removeprefix(prefix): value
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        },
        f"{file.path}, {file.architecture}",
    )
    if file.architecture in config_gguf_encoder.FAMILIES:
        spec = config_gguf_encoder.encoder_spec(file, keys)
    else:
        spec = _decoder_spec(file, keys, family)
    bos, eos = gguf_tokens(file.metadata, spec.vocab_size)
    return msgspec.structs.replace(
        spec,
        bos_token_id=bos,
        eos_token_ids=eos,
        pooling=config_gguf_encoder.pooling(file, keys, spec),
        checkpoint_dtype=_dtype(file),
        generation=generation_defaults(_generation(file, generation_config)),
    )


def _decoder_spec(file: GGUFFile, keys: Fields, family: str) -> ModelSpec:
    keys.require(REQUIRED)
    spec = _geometry(file, keys, family)
    if family in FACTS:
        spec = msgspec.structs.replace(spec, **FACTS[family](keys, spec))
    if file.architecture == config_gguf_encoder.EMBEDDING_GEMMA:
        facts = config_gguf_encoder.embedding_gemma(keys, spec)
        spec = msgspec.structs.replace(spec, **facts)
    check_rope(spec.rope, spec.head_dim, file.path)
    return spec


def _check_types(file: GGUFFile) -> None:
    for name, info in file.tensors.items():
        if info.type not in READABLE:
            raise ModelError(
                f"{file.path}: tensor {name} is quantized as {info.type}, which is not supported. "
                f"Supported: {', '.join(READABLE)}"
            )


def _family(file: GGUFFile) -> str:
    named = file.architecture
    parts = file.metadata.get("split.count", 0)
    if parts > 1:
        raise ModelError(
            f"{file.path} is one of {parts} parts of a model; split GGUF files are not supported: "
            "merge the parts into one file"
        )
    if named not in FAMILIES:
        nearest = difflib.get_close_matches(named, FAMILIES, 1, 0.0)[0]
        raise ModelError(
            f"{file.path}: architecture {named or '(none)'} is not supported. Supported: "
            f"{', '.join(FAMILIES)} (nearest: {nearest})"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight")
    is_mixtral = named == "llama" and file.key("expert_count", 0) > 0
    return "mixtral" if is_mixtral else FAMILIES[named]


def _geometry(file: GGUFFile, keys: Fields, family: str) -> ModelSpec:
    tensors = file.tensors
    heads = keys.integer("attention.head_count", 1)
    hidden = keys.integer("embedding_length", 1)
    num_layers = keys.integer("block_count", 1)
    head_dim = keys.integer("attention.key_length", hidden // heads)
    position = keys.integer("context_length", 1)
    rope = gguf_rope(
        keys,
        head_dim=head_dim,
        position=position,
        theta=keys.number("rope.freq_base", 1e6 if family == "gemma3" else 10000.0),
        factors=_frequency_factors(file),
    )
    return ModelSpec(
        architecture=family,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length", 1),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=longest_context(rope, position),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        fused_products="blk.0.attn_qkv.weight" in tensors,
        layer_windows=(0,) * num_layers,
        rope=rope,
        weights_format="gguf",
    )


# --------------------------------------------------------------------- what single families have


def _gemma2(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    scaled_by = spec.head_dim
    if spec.num_layers == GEMMA_27B_LAYERS[spec.architecture]:
        scaled_by = spec.hidden_size // spec.num_heads
    return {
        "activation": "gelu_tanh",
        "norm_plus_one": True,
        "sandwich_norms": True,
        "embedding_scale": spec.hidden_size**0.5,
        "attention_scale": scaled_by**-0.5,
        "attention_softcap": keys.optional_number("attn_logit_softcapping") or 0.0,
        "final_softcap": keys.optional_number("final_logit_softcapping") or 0.0,
        "layer_windows": _cycle(keys, spec),
    }


def _gemma3(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    sliding = RopeSpec(theta=keys.number("rope.freq_base_swa", 10000.0))
    return _gemma2(keys, spec) | {"rope_sliding": sliding}


def _olmo2(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    facts: dict[str, Any] = {"qk_norm_whole": True, "post_norms": True}
    if keys.has("attention.sliding_window"):
        facts["architecture"] = "olmo3"
        facts["layer_windows"] = _cycle(keys, spec)
        facts["rope_sliding"] = RopeSpec(theta=spec.rope.theta)
    return facts


def _phi3(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"layer_windows": (_window(keys, spec),) * spec.num_layers}


def _smollm3(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    turns = tuple((i + 1) % STILL_CYCLE != 0 for i in range(spec.num_layers))
    return {"rope_layers": () if all(turns) else turns}


def _mixtral(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"experts": _experts(keys, spec.intermediate_size, normalize=True)}


def _qwen2_moe(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    experts = _experts(keys, 0, normalize=False)
    shared = keys.integer("expert_shared_feed_forward_length", spec.intermediate_size)
    return {"experts": msgspec.structs.replace(experts, shared_size=shared)}


def _qwen3_moe(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    return {"experts": _experts(keys, 0, normalize=True)}


def _experts(keys: Fields, size: int, *, normalize: bool) -> ExpertsSpec:
    """Read a mixture of experts. Files do not say whether shares are normalized."""
    keys.require(["expert_count", "expert_used_count"])
    keys.require([] if size else ["expert_feed_forward_length"])
    count = keys.integer("expert_count", 1)
    chosen = keys.integer("expert_used_count", 1)
    if chosen > count:
        raise keys.wrong("expert_used_count", f"at most {count}, the experts there are")
    return ExpertsSpec(
        count=count,
        chosen=chosen,
        size=keys.integer("expert_feed_forward_length", size),
        normalize=normalize,
        layout="stacked",
    )


FACTS = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}


def _window(keys: Fields, spec: ModelSpec) -> int:
    window = keys.integer("attention.sliding_window", 0, least=0)
    return 0 if window >= spec.max_position else window


def _cycle(keys: Fields, spec: ModelSpec) -> tuple[int, ...]:
    """Return the windows of layers of which every so many sees everything."""
    window, cycle = _window(keys, spec), CYCLES[spec.architecture]
    pattern = keys.values.get("attention.sliding_window_pattern", cycle)
    if isinstance(pattern, list) and len(pattern) == spec.num_layers:  # true: a sliding layer
        return tuple(window if slides else 0 for slides in pattern)
    if isinstance(pattern, int) and pattern > 0:
        return tuple(0 if (i + 1) % pattern == 0 else window for i in range(spec.num_layers))
    raise keys.wrong("attention.sliding_window_pattern", "a period or one entry a layer")


def _frequency_factors(file: GGUFFile) -> dict[str, tuple[float, ...]]:
    """Return the divisors of the rotary frequencies that the file carries as tensors."""
    found = {}
    for name in FREQUENCY_TENSORS:
        info = file.tensors.get(f"{name}.weight")
        if info is None:
            continue
        if info.type != "F32" or len(info.shape) != 1:
            raise ModelError(f"{file.path}: tensor {info.name} must be a list of F32 values")
        values = np.fromfile(file.path, "<f4", info.shape[0], offset=info.offset)
        found[name] = tuple(values.tolist())
    return found


def _dtype(file: GGUFFile) -> str:
    """Return the type of most weights; quantized ones count as bfloat16, which has their range."""
    sizes: dict[str, int] = {}
    for info in file.tensors.values():
        sizes[info.type] = sizes.get(info.type, 0) + info.num_bytes
    plain = {"F32": "float32", "F16": "float16"}
    return plain.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def _generation(file: GGUFFile, choice: str) -> Fields:
    if choice in OFF:
        return Fields({}, file.path)
    if choice == "auto":
        return gguf_generation(file.metadata, file.path)
    return find_generation_config(choice, None)
