"""Vectors and scores equal those of sentence-transformers itself, pipeline by pipeline."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled_engine import PooledEngine
from sentence_transformers import CrossEncoder, SentenceTransformer
from tiny_embedders import tiny_embedder

TOLERANCE = 1e-5
TEXTS = ["the capital of France is Paris", "a dog", "", "quick foxes jump " * 7, "naïve 東京 🙂"]
PROMPTS = {"query": "search: ", "document": "title: none | text: "}


def pipeline(folder: Path, family: str, *modules: str, **keys: Any) -> Path:
    """Write an embedder that has prompts, as sentence-transformers reads it."""
    tiny_embedder(folder, family, modules=modules, **keys)
    settings = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def set_tokenizer(folder: Path, **values: Any) -> None:
    """Change tokenizer_config.json; None takes a key away."""
    path = folder / "tokenizer_config.json"
    merged = json.loads(path.read_text()) | values
    kept = {key: value for key, value in merged.items() if value is not None}
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("bert", ("mean", "normalize")),
        ("roberta", ("cls", "dense", "normalize")),
        ("distilbert", ("max",)),
        ("bert", ("sqrt", "dense")),
        ("bert", ("weightedmean",)),
        ("modernbert", ("cls", "normalize")),
        ("gemma3", ("mean", "dense", "dense", "normalize")),
        ("qwen3-bare", ("lasttoken", "normalize")),
    ],
)
def test_vectors(tmp_path: Path, family: str, modules: tuple[str, ...]) -> None:
    folder = pipeline(tmp_path / "m", family, *modules)
    theirs = SentenceTransformer(str(folder), device="cpu")
    engine = PooledEngine(folder, max_model_len=128)
    for name in (None, "query", "document"):
        expected = theirs.encode(TEXTS, prompt_name=name)
        found = np.stack(engine.pool(TEXTS, prompt_name=name))
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_vectors_of_tokens(tmp_path: Path, family: str) -> None:
    folder = pipeline(tmp_path / "m", family, "mean", "dense", "normalize")
    theirs = SentenceTransformer(str(folder), device="cpu")
    expected = theirs.encode(TEXTS, output_value="token_embeddings")
    found = PooledEngine(folder, max_model_len=128).pool(TEXTS, task="token_embed", normalize=False)
    for ours, each in zip(found, expected, strict=True):
        assert np.abs(ours.reshape(each.shape) - each.numpy()).max() < TOLERANCE * 10


def test_lengths_to_cut_to(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "m", "bert", "mean", "normalize", matryoshka_dimensions=[16, 48])
    theirs = SentenceTransformer(str(folder), device="cpu", truncate_dim=16)
    expected = theirs.encode(TEXTS, normalize_embeddings=True)
    found = np.stack(PooledEngine(folder, max_model_len=128).pool(TEXTS, dimensions=16))
    assert found.shape == (5, 16) and np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", ["bert-classifier", "modernbert-classifier"])
@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoder(tmp_path: Path, family: str, labels: int) -> None:
    folder = tiny_embedder(tmp_path / "m", family, num_labels=labels)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if family[0] == "b" else [])]
    set_tokenizer(folder, model_input_names=names, chat_template=None)
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[3]), (TEXTS[3], TEXTS[4])]
    theirs = CrossEncoder(str(folder), device="cpu")
    expected = theirs.predict(pairs, apply_softmax=labels > 1).reshape(3, labels)
    engine = PooledEngine(folder, max_model_len=128)
    firsts, seconds = [first for first, _ in pairs], [second for _, second in pairs]
    assert np.abs(np.stack(engine.pool(firsts, seconds)) - expected).max() < TOLERANCE
