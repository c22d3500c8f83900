"""Encoders as they are published: other names of tensors and keys, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled_engine import PooledEngine
from safetensors.torch import load_file, save_file
from tiny_embedders import tiny_embedder
from torch import Tensor

from zlm.errors import ModelError
from zlm.models.config import load_spec

PROMPTS = [[5, 6, 7], list(range(10, 40))]
NOMIC_NAMES = {
    "emb_ln": "embeddings.LayerNorm",
    "encoder.layers": "layers",
    "attn.out_proj": "self_attn.o_proj",
    "fc11": "up_proj",
    "fc12": "gate_proj",
    "fc2": "down_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}
NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
PUBLISHED = {  # keys that nomic-embed-text's own config.json has beside
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "max_trained_positions": 2048,
    "prenorm": False,
    "causal": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
}


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def same(one: Path, other: Path) -> bool:
    ours, expected = PooledEngine(one).pool(PROMPTS), PooledEngine(other).pool(PROMPTS)
    return all(np.abs(a - b).max() < 1e-6 for a, b in zip(ours, expected, strict=True))


def test_nomic_by_transformers_names(tmp_path: Path) -> None:
    """What the golden tests read is stored as it was published, with q, k and v in one."""
    published, renamed = (tiny_embedder(tmp_path / name, "nomic") for name in "ab")
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(renamed / "model.safetensors").items():
        for theirs, ours in NOMIC_NAMES.items():
            name = name.replace(theirs, ours)
        if "attn.Wqkv" not in name:
            tensors[name] = tensor
            continue
        for part, each in zip("qkv", tensor.chunk(3), strict=True):
            tensors[name.replace("attn.Wqkv", f"self_attn.{part}_proj")] = each.clone()
    save_file(tensors, renamed / "model.safetensors")
    assert load_spec(published).fused_products and not load_spec(renamed).fused_products
    assert same(renamed, published)


def test_nomic_by_its_published_keys(tmp_path: Path) -> None:
    plain, published = (tiny_embedder(tmp_path / name, "nomic") for name in "ab")
    path = published / "config.json"
    config = json.loads(path.read_text())
    kept = {NOMIC_KEYS.get(key, key): value for key, value in config.items()}
    for key in ("hidden_act", "head_dim", "rope_parameters"):
        del kept[key]
    path.write_text(json.dumps(kept | PUBLISHED))
    assert load_spec(published) == load_spec(plain)
    change(published, rotary_scaling_factor=2, max_trained_positions=64)
    assert load_spec(published).max_position == 64


REFUSED: list[tuple[str, str, Any, str]] = [
    ("nomic", "moe_every_n_layers", 2, "moe_every_n_layers 2 is not supported"),
    ("nomic", "prenorm", True, "prenorm True is not supported"),
    ("nomic", "rotary_emb_interleaved", True, "rotary_emb_interleaved True is not supported"),
    ("nomic", "activation_function", "gelu", "activation_function must be swiglu"),
    ("nomic", "hidden_act", "mish", "activation mish is not supported"),
    ("modernbert", "hidden_activation", "mish", "activation mish is not supported"),
    ("modernbert", "layer_types", ["full_attention"], "layer_types must be 5 times"),
    ("modernbert-classifier", "classifier_pooling", "max", "classifier_pooling must be cls or"),
    ("modernbert-classifier", "classifier_activation", "mish", "must be gelu, relu or tanh"),
    ("distilbert", "dim", 47, "hidden_size 47 is no multiple"),
    ("distilbert", "activation", "mish", "activation mish is not supported"),
]


@pytest.mark.parametrize("family", sorted({family for family, *_ in REFUSED}))
def test_what_is_refused_is_named(tmp_path: Path, family: str) -> None:
    folder = tiny_embedder(tmp_path / "m", family)
    good = (folder / "config.json").read_text()
    for _, key, value, words in (each for each in REFUSED if each[0] == family):
        change(folder, **{key: value})
        with pytest.raises(ModelError, match=words):
            load_spec(folder)
        (folder / "config.json").write_text(good)


def test_bert_of_old(tmp_path: Path) -> None:
    """A prefix, norms called gamma and beta, and heads and buffers that nobody needs."""
    plain, old = (tiny_embedder(tmp_path / name, "bert", modules=("mean",)) for name in "ab")
    tensors = {}
    for name, tensor in load_file(old / "model.safetensors").items():
        if "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        tensors[f"bert.{name}"] = tensor
    tensors["cls.predictions.bias"] = tensors["bert.embeddings.LayerNorm.gamma"].clone()
    tensors["bert.embeddings.position_ids"] = tensors["cls.predictions.bias"].clone()
    save_file(tensors, old / "model.safetensors")
    assert same(old, plain)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "modernbert")
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.attn.Wo.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the tensor layers.1.self_attn.o_proj.weight"):
        PooledEngine(folder)
