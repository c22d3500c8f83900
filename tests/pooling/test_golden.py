"""Pooled vectors through the whole ring equal transformers', family by family and way by way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pooled_engine import PooledEngine
from tiny_embedders import hidden_states, reference, tiny_embedder

TOLERANCE = 1e-5
PROMPTS = [[5, 6, 7], [9], list(range(10, 75)), [3, 3, 8, 9, 200, 201, 202]]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def assert_near(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() < TOLERANCE * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "llama", "qwen3", "gemma3"])
def test_families_and_poolings(tmp_path: Path, family: str, pooling: str) -> None:
    """Causal prompts come in chunks of 24 tokens; encoders are computed at once."""
    folder = tiny_embedder(tmp_path / "m", family, modules=(pooling,))
    budget = {"max_num_batched_tokens": 24, "max_num_seqs": 4} if family[0] in "lq" else {}
    engine = PooledEngine(folder, max_model_len=128, **budget)
    kind = pooling.removesuffix("token")
    assert_near(engine.pool(PROMPTS), [reference(folder, ids, kind) for ids in PROMPTS])
    assert not budget or max(engine.steps) <= 24 < len(PROMPTS[2])


@pytest.mark.parametrize("family", ["bert", "qwen3", "gemma3"])
def test_dense_and_normalize(tmp_path: Path, family: str) -> None:
    from safetensors.torch import load_file

    modules = ("mean", "dense", "dense", "normalize")
    folder = tiny_embedder(tmp_path / "m", family, modules=modules)
    expected = []
    for ids in PROMPTS:
        vector = reference(folder, ids, "mean")
        for path in ("2_Dense", "3_Dense"):
            weight = load_file(folder / path / "model.safetensors")["linear.weight"]
            vector = weight.double().numpy() @ vector
        expected.append(unit(vector))
    engine = PooledEngine(folder, max_model_len=128)
    assert_near(engine.pool(PROMPTS), expected)
    lengths = [np.linalg.norm(v) for v in engine.pool(PROMPTS, normalize=False)]
    assert max(abs(length - 1.0) for length in lengths) > 0.1


def test_gemma_windows_count(tmp_path: Path) -> None:
    """The sliding layers' window shows at this length: with full attention the vector differs."""
    sliding = tiny_embedder(tmp_path / "a", "gemma3", modules=("mean",))
    full = tiny_embedder(tmp_path / "b", "gemma3", modules=("mean",), sliding_window=400)
    ids = list(range(10, 75))
    assert np.abs(reference(sliding, ids, "mean") - reference(full, ids, "mean")).max() > 1e-3
    for folder in (sliding, full):
        found = PooledEngine(folder, max_model_len=128).pool([ids])
        assert_near(found, [reference(folder, ids, "mean")])


def test_a_model_of_text_made_into_an_embedder(tmp_path: Path) -> None:
    """--runner pooling, --convert embed, --task embedding: the last token's vector, of length 1."""
    folder = tiny_embedder(tmp_path / "m", "llama")
    expected = [unit(reference(folder, ids, "last")) for ids in PROMPTS]
    for option in ({"runner": "pooling"}, {"convert": "embed"}, {"task": "embedding"}):
        assert_near(PooledEngine(folder, **option).pool(PROMPTS), expected)


def test_a_decoder_without_a_head_is_an_embedder(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "qwen3-bare")
    expected = [unit(reference(folder, ids, "last")) for ids in PROMPTS]
    assert_near(PooledEngine(folder).pool(PROMPTS), expected)


def logits_of(folder: Path, ids: list[int], types: list[int] | None = None) -> np.ndarray:
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder).eval()
    given: dict[str, Any] = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **given).logits[0].double().numpy()


@pytest.mark.parametrize("family", ["bert-classifier", "roberta-classifier"])
def test_cross_encoder(tmp_path: Path, family: str) -> None:
    """The two texts of a pair are told apart by their segments, where the model has them."""
    folder = tiny_embedder(tmp_path / "m", family, num_labels=1)
    engine = PooledEngine(folder, max_model_len=128)
    firsts, seconds = ["the capital", "a dog"], ["of France is Paris", "and a quick fox"]
    vocabulary = engine.tokenizer.vocabulary
    expected, flat = [], []
    for first, second in zip(firsts, seconds, strict=True):
        ids, types = vocabulary.encode_pair(first, second)
        logits = logits_of(folder, ids, types if family[0] == "b" else None)
        expected.append(1 / (1 + np.exp(-logits)))
        flat.append(1 / (1 + np.exp(-logits_of(folder, ids))))
    assert_near(engine.pool(firsts, seconds), expected)
    if family[0] == "b":
        assert np.abs(np.array(expected) - np.array(flat)).max() > 1e-3, "segments do not count"


def test_classifier(tmp_path: Path) -> None:
    labels = {0: "sad", 1: "glad", 2: "mad"}
    folder = tiny_embedder(tmp_path / "m", "bert-classifier", id2label=labels)
    engine = PooledEngine(folder, max_model_len=128)
    spec = engine.resolved.spec
    assert spec.pooling is not None and spec.pooling.labels == ("sad", "glad", "mad")
    logits = [logits_of(folder, ids) for ids in PROMPTS]
    powers = [np.exp(each - each.max()) for each in logits]
    assert_near(engine.pool(PROMPTS), [each / each.sum() for each in powers])
    assert_near(engine.pool(PROMPTS, activation=False), logits)


def test_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "bert", modules=("mean",))
    engine = PooledEngine(folder, max_model_len=128)
    alone = [engine.pool([ids])[0] for ids in PROMPTS]
    assert_near(engine.pool(PROMPTS), [each.astype(float) for each in alone])
    assert hidden_states(folder, PROMPTS[0]).shape == (3, 48)
