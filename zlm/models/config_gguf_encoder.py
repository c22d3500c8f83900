"""ModelSpec of embedding and scoring models from GGUF files: encoders, and what is pooled.

Files come from llama.cpp's converter. They say how to pool (``pooling_type``), but not whether
vectors are brought to length 1: they are, as everywhere with such files. RoBERTa's position table
begins with its first position here.
"""

import logging
from typing import Any

import msgspec

from zlm.config import DenseSpec, ModelSpec, PoolingSpec, RopeSpec
from zlm.errors import ModelError
from zlm.models.config_bert import ACTIVATIONS, head_dim
from zlm.models.config_fields import Fields
from zlm.models.config_pooling import trained_dimensions
from zlm.models.config_rope import check_rope
from zlm.weights.gguf import GGUFFile

log = logging.getLogger(__name__)

FAMILIES = {  # GGUF's architecture: our family
    "bert": "bert",
    "modern-bert": "modernbert",
    "nomic-bert": "nomic_bert",
}
EMBEDDING_GEMMA = "gemma-embedding"
REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_epsilon",
)
NO_POOLING = 0
POOLINGS = {NO_POOLING: "tokens", 1: "mean", 2: "cls", 3: "last"}  # pooling_type
RANK = 4
GLOBAL_THETA, LOCAL_THETA = 160000.0, 10000.0  # ModernBERT's
NOMIC_THETA = 1000.0
MODERN_CYCLE = 3  # every third layer, from the first on, sees everything
DENSE = ("dense_2", "dense_3")  # EmbeddingGemma's, where a file has them


def encoder_spec(file: GGUFFile, keys: Fields) -> ModelSpec:
    """Return the facts of an encoder, without tokens and pooling; *keys* are its architecture's.

    Raises ModelError, naming the key, for what is missing.
    """
    keys.require(REQUIRED)
    tensors = file.tensors
    hidden, heads = keys.integer("embedding_length", 1), keys.integer("attention.head_count", 1)
    first, types = "blk.0.", tensors.get("token_types.weight")
    spec = ModelSpec(
        architecture=FAMILIES[file.architecture],
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length", 1),
        num_layers=keys.integer("block_count", 1),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim(keys, hidden, heads),
        max_position=keys.integer("context_length", 1),
        rms_norm_eps=keys.number("attention.layer_norm_epsilon", 1e-12),
        activation="gelu",
        qkv_bias=f"{first}attn_qkv.bias" in tensors,
        o_bias=f"{first}attn_output.bias" in tensors,
        mlp_bias=f"{first}ffn_up.bias" in tensors,
        fused_products=f"{first}attn_qkv.weight" in tensors,
        norm_bias="token_embd_norm.bias" in tensors,
        token_types=0 if types is None else types.shape[0],
        bidirectional=True,
        can_generate=False,
        weights_format="gguf",
    )
    if spec.architecture != "bert":
        spec = msgspec.structs.replace(spec, **_rotary(keys, spec))
        check_rope(spec.rope, spec.head_dim, file.path)
    return spec


def _rotary(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    """Return what encoders with rotary positions have beside."""
    if spec.architecture == "nomic_bert":
        theta = keys.number("rope.freq_base", NOMIC_THETA)
        return {"activation": "silu", "rope": RopeSpec(theta=theta)}
    named = keys.text("hidden_activation", keys.text("hidden_act", "gelu"))
    if named not in ACTIVATIONS:
        raise ModelError(f"{keys.source}: activation {named} is not supported")
    window = keys.integer("attention.sliding_window", 128) // 2 + 1
    window = 0 if window >= spec.max_position else window
    cycle = keys.integer("attention.sliding_window_pattern", MODERN_CYCLE)
    return {
        "activation": ACTIVATIONS[named],
        "layer_windows": tuple(window if i % cycle else 0 for i in range(spec.num_layers)),
        "rope": RopeSpec(theta=keys.number("rope.freq_base", GLOBAL_THETA)),
        "rope_sliding": RopeSpec(theta=keys.number("rope.freq_base_swa", LOCAL_THETA)),
    }


def embedding_gemma(keys: Fields, spec: ModelSpec) -> dict[str, Any]:
    """Return what EmbeddingGemma has beside Gemma 3, whose facts *spec* holds.

    The window is told as that of both sides together, or (an odd number) as transformers makes it:
    of one side, with the token itself.
    """
    told = keys.integer("attention.sliding_window", 0, least=0)
    window = told if told % 2 else told // 2 + 1
    window = 0 if not told or window >= spec.max_position else window
    windows = tuple(window if each else 0 for each in spec.layer_windows)
    return {"bidirectional": True, "can_generate": False, "layer_windows": windows}


def pooling(file: GGUFFile, keys: Fields, spec: ModelSpec) -> PoolingSpec | None:
    """Return how *file* says that hidden states are pooled; None: it is a model of text."""
    if not keys.has("pooling_type"):
        return PoolingSpec(kind="mean") if spec.bidirectional else None
    kind = keys.integer("pooling_type", 0, least=0)
    if kind == NO_POOLING and not spec.bidirectional:
        return None
    if kind == RANK:
        return _classifier(file, keys, spec)
    if kind not in POOLINGS:
        raise keys.wrong("pooling_type", f"one of {', '.join(map(str, POOLINGS))} and {RANK}")
    dense = _dense(file)
    if file.architecture == EMBEDDING_GEMMA and not dense:
        log.warning(
            "%s holds no dense layers (%s): its vectors are not those of the original model",
            file.path,
            ", ".join(DENSE),
        )
    width = dense[-1].out_features if dense else spec.hidden_size
    sizes, least = trained_dimensions(spec, width)
    return PoolingSpec(kind=POOLINGS[kind], dense=dense, dimensions=sizes, least_dimensions=least)


def _dense(file: GGUFFile) -> tuple[DenseSpec, ...]:
    layers = []
    for name in DENSE:
        info = file.tensors.get(f"{name}.weight")
        if info is not None:
            rows, columns = info.shape
            bias = f"{name}.bias" in file.tensors
            layers.append(DenseSpec(name=name, in_features=columns, out_features=rows, bias=bias))
    return tuple(layers)


def _classifier(file: GGUFFile, keys: Fields, spec: ModelSpec) -> PoolingSpec:
    """Return the pooling of a cross-encoder; files of BERT itself lack a part of its head."""
    heads = {"bert": ("cls", "cls.output"), "modernbert": ("cls", "cls.norm", "cls.output")}
    needed = heads.get(spec.architecture)
    if needed is None:
        raise ModelError(f"{keys.source}: pooling_type {RANK} is not supported for this family")
    missing = [name for name in needed if f"{name}.weight" not in file.tensors]
    if missing:
        raise ModelError(
            f"{file.path} is to score texts, but lacks {', '.join(missing)}: its head is not "
            "whole; use the original checkpoint"
        )
    hidden = spec.hidden_size
    first = DenseSpec(
        name="classifier.dense",
        in_features=hidden,
        out_features=hidden,
        bias="cls.bias" in file.tensors,
        activation="tanh",
    )
    outer = "classifier.out_proj"
    if spec.architecture == "modernbert":
        outer = "classifier"
        first = msgspec.structs.replace(
            first,
            name="head.dense",
            activation="gelu",
            norm="head.norm",
            norm_bias="cls.norm.bias" in file.tensors,
            norm_eps=spec.rms_norm_eps,
        )
    count = file.tensors["cls.output.weight"].shape[0]
    last = DenseSpec(
        name=outer,
        in_features=hidden,
        out_features=count,
        bias="cls.output.bias" in file.tensors,
    )
    named = keys.names("classifier.output_labels")
    labels = named if len(named) == count else [f"LABEL_{i}" for i in range(count)]
    return PoolingSpec(
        kind="cls",
        normalize=False,
        dense=(first, last),
        num_labels=count,
        labels=tuple(labels),
        activation="softmax" if count > 1 else "sigmoid",
    )
