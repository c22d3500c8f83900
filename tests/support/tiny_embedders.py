"""Tiny random embedding checkpoints, made by transformers' own classes, with module files.

    folder = tiny_embedder(tmp_path / "m", "gemma3", modules=["mean", "dense", "normalize"])
    vectors = reference(folder, [[5, 6, 7]], "mean")        # by transformers, float64

Families are the keys of CLASSES: encoders, forms of them that classify texts or tokens, and
decoders (of which gemma3 attends in both directions).
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tiny import CONTEXT, GEMMA, tiny_tokenizer, write_tokenizer
from tokenizers import processors

ENCODER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "vocab_size": 320,
}
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 320,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
DISTILBERT = {
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 130,
    "vocab_size": 320,
}
MODERNBERT = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "local_attention": 16,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
NOMIC = ENCODER
MPNET = ENCODER | {"relative_attention_num_buckets": 32}  # transformers computes with no other
BIDIRECTIONAL = GEMMA | {"use_bidirectional_attention": True}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", ENCODER),
    "roberta": ("RobertaModel", ENCODER | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaModel", ENCODER | {"type_vocab_size": 1}),
    "bert-classifier": ("BertForSequenceClassification", ENCODER),
    "roberta-classifier": ("RobertaForSequenceClassification", ENCODER | {"type_vocab_size": 1}),
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 24, "tie_word_embeddings": False}),
    "qwen3-bare": ("Qwen3Model", DECODER | {"head_dim": 24}),
    "gemma3": ("Gemma3TextModel", DECODER | BIDIRECTIONAL),
    "distilbert": ("DistilBertModel", DISTILBERT),
    "distilbert-classifier": ("DistilBertForSequenceClassification", DISTILBERT),
    "mpnet": ("MPNetModel", MPNET),
    "mpnet-classifier": ("MPNetForSequenceClassification", MPNET),
    "modernbert": ("ModernBertModel", MODERNBERT),
    "modernbert-classifier": ("ModernBertForSequenceClassification", MODERNBERT),
    "nomic": ("NomicBertModel", NOMIC),
    "nomic-classifier": ("NomicBertForSequenceClassification", NOMIC),
    "camembert": ("CamembertModel", ENCODER | {"type_vocab_size": 1}),
    "bert-tokens": ("BertForTokenClassification", ENCODER),
    "modernbert-tokens": ("ModernBertForTokenClassification", MODERNBERT),
    "llama-classifier": ("LlamaForSequenceClassification", DECODER),
    "qwen3-classifier": ("Qwen3ForSequenceClassification", DECODER | {"head_dim": 24}),
}


def tiny_embedder(
    folder: Path, family: str, *, modules: tuple[str, ...] = (), seed: int = 0, **overrides: Any
) -> Path:
    """Write a checkpoint into *folder* and return it.

    modules: of the sentence-transformers pipeline after the transformer: a pooling (a key of
    _MODES), dense, normalize; none: no module files. overrides: keys of the configuration.
    """
    folder.mkdir(parents=True)
    name, values = CLASSES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**{**values, **overrides})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name.lower() and parameter_name.endswith("weight"):
                parameter.copy_(0.2 * noise + (0.0 if family == "gemma3" else 1.0))
            elif parameter.dim() == 1 or "embed" in parameter_name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    _write_pair_tokenizer(folder)
    if modules:
        _write_modules(folder, model.config.hidden_size, modules)
    return folder


def _write_pair_tokenizer(folder: Path) -> None:
    """Write a tokenizer that frames texts as BERT's does: BOS a EOS, and pairs BOS a EOS b EOS."""
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    write_tokenizer(folder, tokenizer)


def _write_modules(folder: Path, width: int, names: tuple[str, ...]) -> None:
    first = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    entries: list[Any] = [first]
    for index, name in enumerate(names, 1):
        kind = {"dense": "Dense", "normalize": "Normalize"}.get(name, "Pooling")
        path = f"{index}_{kind}"
        (folder / path).mkdir()
        kind_name = f"sentence_transformers.models.{kind}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": kind_name})
        if kind == "Pooling":
            flags = {f"pooling_mode_{mode}": mode == _MODES[name] for mode in _MODES.values()}
            _write(folder / path / "config.json", {"word_embedding_dimension": width, **flags})
        elif kind == "Dense":
            width = _write_dense(folder / path, width)
    _write(folder / "modules.json", entries)


_MODES = {  # of a module's name: the flag that sentence-transformers has for it
    "cls": "cls_token",
    "mean": "mean_tokens",
    "lasttoken": "lasttoken",
    "max": "max_tokens",
    "sqrt": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
}


def _write_dense(folder: Path, width: int) -> int:
    """Write a dense layer that widens by a half, without bias; return its width."""
    wider = width * 3 // 2
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn((wider, width), generator=generator) * width**-0.5
    save_file({"linear.weight": weight}, folder / "model.safetensors")
    activation = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": width, "out_features": wider, "bias": False}
    _write(folder / "config.json", sizes | {"activation_function": activation})
    return wider


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@lru_cache(maxsize=4)
def _model(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder, config=config).eval()


@torch.no_grad()
def hidden_states(folder: Path, ids: list[int]) -> np.ndarray:
    """Return the last hidden states [T, H] that transformers computes for one sequence alone."""
    return _model(folder)(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()


def reference(folder: Path, ids: list[int], kind: str) -> np.ndarray:
    """Return the pooled vector of *ids*, before dense layers and normalization."""
    states = hidden_states(folder, ids)
    return {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[kind]
