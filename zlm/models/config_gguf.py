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

from zlm.config import ModelSpec, RopeSpec
from zlm.errors import ModelError
from zlm.models.config_fields import Fields
from zlm.models.config_generation import (
    OFF,
    find_generation_config,
    generation_defaults,
    gguf_generation,
)
from zlm.models.config_rope import check_rope, gguf_rope, longest_context
from zlm.models.config_tokens import gguf_tokens
from zlm.weights.gguf import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's files say llama
GEMMA_27B_LAYERS = 62  # the one Gemma 3 whose attention scale is not head_dim ** -0.5
GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees everything; most files do not say so
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
    prefix = f"{family}."
    keys = Fields(
        {
            key.removeprefix(prefix): value
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        },
        f"{file.path}, {family}",
    )
    keys.require(REQUIRED)
    spec = _geometry(file, keys, family)
    if family == "gemma3":
        spec = msgspec.structs.replace(spec, **_gemma_facts(keys, spec))
    check_rope(spec.rope, spec.head_dim, file.path)
    bos, eos = gguf_tokens(file.metadata, spec.vocab_size)
    return msgspec.structs.replace(
        spec,
        bos_token_id=bos,
        eos_token_ids=eos,
        checkpoint_dtype=_dtype(file),
        generation=generation_defaults(_generation(file, generation_config)),
    )


def _family(file: GGUFFile) -> str:
    family = file.architecture
    parts = file.metadata.get("split.count", 0)
    if parts > 1:
        raise ModelError(
            f"{file.path} is one of {parts} parts of a model; split GGUF files are not supported: "
            "merge the parts into one file"
        )
    if family not in ARCHITECTURES:
        nearest = difflib.get_close_matches(family, ARCHITECTURES, 1, 0.0)[0]
        raise ModelError(
            f"{file.path}: architecture {family or '(none)'} is not supported. Supported: "
            f"{', '.join(ARCHITECTURES)} (nearest: {nearest})"
        )
    if file.key("expert_count", 0) > 0:
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported yet")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight")
    return family


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
        theta=keys.number("rope.freq_base", 1000000.0 if family == "gemma3" else 10000.0),
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
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        layer_windows=(0,) * num_layers,
        rope=rope,
        weights_format="gguf",
    )


def _gemma_facts(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", 0, least=0)
    if window >= spec.max_position:
        window = 0
    pattern = keys.values.get("attention.sliding_window_pattern", GEMMA_PATTERN)
    if isinstance(pattern, list) and len(pattern) == spec.num_layers:  # true: a sliding layer
        windows = tuple(window if slides else 0 for slides in pattern)
    elif isinstance(pattern, int) and pattern > 0:
        windows = tuple(0 if (i + 1) % pattern == 0 else window for i in range(spec.num_layers))
    else:
        raise keys.wrong("attention.sliding_window_pattern", "a period or one entry a layer")
    scaled_by = spec.head_dim
    if spec.num_layers == GEMMA_27B_LAYERS:
        scaled_by = spec.hidden_size // spec.num_heads
    return {
        "activation": "gelu_tanh",
        "norm_plus_one": True,
        "sandwich_norms": True,
        "embedding_scale": spec.hidden_size**0.5,
        "attention_scale": scaled_by**-0.5,
        "attention_softcap": keys.optional_number("attn_logit_softcapping") or 0.0,
        "final_softcap": keys.optional_number("final_logit_softcapping") or 0.0,
        "layer_windows": windows,
        "rope_sliding": RopeSpec(theta=keys.number("rope.freq_base_swa", 10000.0)),
    }


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
