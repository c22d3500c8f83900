"""Writes encoders as GGUF files, as llama.cpp's converter does; for tests.

    file = encoder_gguf(tmp_path / "m.gguf", tiny_embedder(tmp_path / "m", "bert"))

The names of tensors come from the ``gguf`` package's own table.
"""

import base64
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tiny import finish_gguf

ARCHITECTURES = {
    "modernbert": "modern-bert",
    "nomic_bert": "nomic-bert",
    "gemma3_text": "gemma-embedding",
}
KEYS = {  # transformers' names of DistilBERT's keys
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
}
PREFIXES = ("bert.", "roberta.", "distilbert.", "nomic_bert.")
ROBERTA = ("roberta", "xlm-roberta", "camembert")
SPM_TYPES = {"<s>": 3, "<pad>": 3, "</s>": 3, "<mask>": 3, "<unk>": 2}


def encoder_gguf(
    path: Path, folder: Path, *, quant: str = "F32", pooling: str = "mean", dense: bool = True
) -> Path:
    """Write the checkpoint in *folder* as a GGUF file and return it.

    quant: F32 or Q8_0 (matrices whose rows are whole blocks of 32). pooling: a PoolingType's name.
    dense: dense modules of sentence-transformers are part of the file (of EmbeddingGemma).
    """
    raw = json.loads((folder / "config.json").read_text())
    config = {KEYS.get(key, key): value for key, value in raw.items()}
    architecture = ARCHITECTURES.get(config["model_type"], "bert")
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_metadata(writer, config, architecture)
    writer.add_pooling_type(gguf.PoolingType[pooling.upper()])
    if pooling == "rank" and "id2label" in config:
        writer.add_classifier_output_labels(list(config["id2label"].values()))
    if (folder / "tokenizer.json").is_file():
        _write_vocabulary(writer, folder, config)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 99)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in _converted(tensors, config).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        _add(writer, target, tensor, quant)
    if dense and architecture == "gemma-embedding":
        for number in (2, 3):
            module = load_file(folder / f"{number}_Dense" / "model.safetensors")
            _add(writer, f"dense_{number}.weight", module["linear.weight"], quant)
    finish_gguf(writer)
    return path


def _add(writer: Any, name: str, tensor: np.ndarray, quant: str) -> None:
    array = tensor.astype(np.float32)
    kind = gguf.GGMLQuantizationType.F32
    if quant == "Q8_0" and array.ndim == 2 and array.shape[1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)


def _write_metadata(writer: Any, config: dict[str, Any], architecture: str) -> None:
    position = config["max_position_embeddings"]
    if config["model_type"] in ROBERTA:
        position -= config["pad_token_id"] + 1
    writer.add_context_length(position)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_causal_attention(False)
    if architecture == "gemma-embedding":
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_sliding_window(config["sliding_window"])
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(slides)
        writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
        return
    eps = config.get("layer_norm_eps", config.get("norm_eps", 1e-12))
    writer.add_layer_norm_eps(eps)
    if architecture == "modern-bert":
        writer.add_sliding_window(config["local_attention"])
        writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _converted(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors that a file holds, by Hugging Face's names, as the converter has them."""
    found = {}
    for name, tensor in tensors.items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        if name.startswith("pooler.") or name == "embeddings.position_ids":
            continue
        if config["model_type"] == "modernbert":
            name = name.removeprefix("model.").replace("classifier.", "classifier.out_proj.")
        if name == "embeddings.position_embeddings.weight" and config["model_type"] in ROBERTA:
            tensor = tensor[config["pad_token_id"] + 1 :]
        if config["model_type"] == "gemma3_text":
            name = name if name.startswith("model.") else f"model.{name}"
            tensor = tensor + 1.0 if name.endswith("norm.weight") else tensor
        found[name] = tensor
    return found


# -------------------------------------------------------------------------------------- vocabulary


def _write_vocabulary(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    described = json.loads((folder / "tokenizer.json").read_text())
    write = {"WordPiece": _write_word_piece, "Unigram": _write_unigram, "BPE": _write_bpe}
    write[described["model"]["type"]](writer, described)
    if config.get("type_vocab_size"):
        writer.add_token_type_count(config["type_vocab_size"])


def _write_word_piece(writer: Any, described: dict[str, Any]) -> None:
    special = {token["content"] for token in described["added_tokens"] if token["special"]}
    tokens, types = [], []
    vocabulary = described["model"]["vocab"]
    for token in sorted(vocabulary, key=lambda each: vocabulary[each]):
        types.append(3 if token in special else 1)
        if token not in special:
            token = token[2:] if token.startswith("##") else f"▁{token}"
        tokens.append(token)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_unk_token_id(vocabulary["[UNK]"])
    writer.add_sep_token_id(vocabulary["[SEP]"])
    writer.add_bos_token_id(vocabulary["[CLS]"])


def _write_unigram(writer: Any, described: dict[str, Any]) -> None:
    vocabulary = described["model"]["vocab"]
    tokens = [token for token, _ in vocabulary]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, "[PAD999]"])  # files are padded to the model's rows
    writer.add_token_scores([*(score for _, score in vocabulary), -10000.0])
    writer.add_token_types([*(SPM_TYPES.get(token, 1) for token in tokens), 5])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    normalizer = described["normalizer"]
    if normalizer is not None:
        writer.add_precompiled_charsmap(base64.b64decode(normalizer["precompiled_charsmap"]))
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_unk_token_id(tokens.index("<unk>"))


def _write_bpe(writer: Any, described: dict[str, Any]) -> None:
    architecture = writer.arch
    vocabulary = described["model"]["vocab"]
    special = {token["content"] for token in described["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=lambda each: vocabulary[each])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("modern-bert" if "modern" in architecture else "roberta-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
