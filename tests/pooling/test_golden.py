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


FAMILIES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "distilbert",
    "mpnet",
    "modernbert",
    "nomic",
    "llama",
    "qwen3",
    "gemma3",
)
KINDS = ("bert", "qwen3", "gemma3")  # encoders, causal decoders, decoders that see both ways


@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        *((family, "mean") for family in FAMILIES),
        *((family, pooling) for family in KINDS for pooling in ("cls", "lasttoken")),
    ],
)
def test_families_and_poolings(tmp_path: Path, family: str, pooling: str) -> None:
    """Causal prompts come in chunks of 24 tokens; encoders are computed at once."""
    folder = tiny_embedder(tmp_path / "m", family, modules=(pooling,))
    budget = {"max_num_batched_tokens": 24, "max_num_seqs": 4} if family[0] in "lq" else {}
    engine = PooledEngine(folder, max_model_len=128, **budget)
    kind = pooling.removesuffix("token")
    assert_near(engine.pool(PROMPTS), [reference(folder, ids, kind) for ids in PROMPTS])
    assert not budget or max(engine.steps) <= 24 < len(PROMPTS[2])


@pytest.mark.parametrize("pooling", ["max", "sqrt", "weightedmean"])
def test_poolings_of_chunks(tmp_path: Path, pooling: str) -> None:
    """A causal prompt that comes in chunks of 24 tokens is pooled as a whole."""
    folder = tiny_embedder(tmp_path / "m", "qwen3", modules=(pooling,))
    engine = PooledEngine(folder, max_model_len=128, max_num_batched_tokens=24, max_num_seqs=4)
    expected = []
    for ids in PROMPTS:
        states, weights = hidden_states(folder, ids), np.arange(1, len(ids) + 1)[:, None]
        kinds = {
            "max": states.max(0),
            "sqrt": states.sum(0) / len(ids) ** 0.5,
            "weightedmean": (states * weights).sum(0) / weights.sum(),
        }
        expected.append(kinds[pooling])
    assert_near(engine.pool(PROMPTS), expected)


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


WITH_SEGMENTS = ("bert-classifier", "nomic-classifier")


def logits_of(folder: Path, ids: list[int], types: list[int] | None = None) -> np.ndarray:
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder).eval()
    given: dict[str, Any] = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), **given).logits[0].double().numpy()


@pytest.mark.parametrize(
    "family",
    [
        "bert-classifier",
        "roberta-classifier",
        "distilbert-classifier",
        "modernbert-classifier",
        "nomic-classifier",
        "llama-classifier",
        "qwen3-classifier",
    ],
)
def test_cross_encoder(tmp_path: Path, family: str) -> None:
    """The two texts of a pair are told apart by their segments, where the model has them."""
    folder = tiny_embedder(tmp_path / "m", family, num_labels=1)
    engine = PooledEngine(folder, max_model_len=128)
    firsts, seconds = ["the capital", "a dog"], ["of France is Paris", "and a quick fox"]
    vocabulary = engine.tokenizer.vocabulary
    expected, flat = [], []
    for first, second in zip(firsts, seconds, strict=True):
        ids, types = vocabulary.encode_pair(first, second)
        logits = logits_of(folder, ids, types if family in WITH_SEGMENTS else None)
        expected.append(1 / (1 + np.exp(-logits)))
        flat.append(1 / (1 + np.exp(-logits_of(folder, ids))))
    assert_near(engine.pool(firsts, seconds), expected)
    if family in WITH_SEGMENTS:
        assert np.abs(np.array(expected) - np.array(flat)).max() > 1e-3, "segments do not count"


@pytest.mark.parametrize("family", ["bert-classifier", "mpnet-classifier"])
def test_classifier(tmp_path: Path, family: str) -> None:
    """MPNet takes id 1 for padding, which begins every text of the tiny tokenizer: ids only."""
    labels = {0: "sad", 1: "glad", 2: "mad"}
    folder = tiny_embedder(tmp_path / "m", family, id2label=labels)
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


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernbert_head_of_either_pooling(tmp_path: Path, pooling: str) -> None:
    options = {"classifier_pooling": pooling, "num_labels": 3, "norm_bias": True}
    options |= {"classifier_bias": True, "attention_bias": True, "mlp_bias": True}
    folder = tiny_embedder(tmp_path / "m", "modernbert-classifier", **options)
    engine = PooledEngine(folder, max_model_len=128)
    assert_near(engine.pool(PROMPTS, activation=False), [logits_of(folder, ids) for ids in PROMPTS])


def test_modernbert_windows_count(tmp_path: Path) -> None:
    """The long prompt is longer than the windows: with others the vector differs."""
    ids = PROMPTS[2]
    narrow = tiny_embedder(tmp_path / "a", "modernbert")
    wide = tiny_embedder(tmp_path / "b", "modernbert", local_attention=128)
    assert np.abs(reference(narrow, ids, "mean") - reference(wide, ids, "mean")).max() > 1e-3


@pytest.mark.parametrize("family", ["bert", "gemma3", "qwen3", "modernbert"])
def test_vectors_of_tokens(tmp_path: Path, family: str) -> None:
    """One a token: the hidden states, in chunks or not, beside vectors of whole inputs."""
    folder = tiny_embedder(tmp_path / "m", family, modules=("mean", "dense", "normalize"))
    budget = {"max_num_batched_tokens": 24, "max_num_seqs": 4} if family == "qwen3" else {}
    engine = PooledEngine(folder, max_model_len=128, **budget)
    expected = [hidden_states(folder, ids) for ids in PROMPTS]
    asked = (PROMPTS, [], {"task": "token_embed", "normalize": False})
    whole = (PROMPTS, [], {})
    tokens, vectors, again = engine.pool_all([asked, whole, asked])
    for found in (tokens, again):
        assert_near([each.reshape(-1, expected[0].shape[1]) for each in found], expected)
    assert_near(vectors, [each.astype(float) for each in engine.pool(PROMPTS)])
    [units] = engine.pool(PROMPTS[:1], task="token_embed", normalize=True)
    lengths = np.linalg.norm(units.reshape(len(PROMPTS[0]), -1), axis=1)
    assert np.abs(lengths - 1.0).max() < 1e-6


@pytest.mark.parametrize("family", ["bert-tokens", "modernbert-tokens"])
def test_labels_of_tokens(tmp_path: Path, family: str) -> None:
    labels = {0: "O", 1: "PER", 2: "LOC"}
    folder = tiny_embedder(tmp_path / "m", family, id2label=labels)
    engine = PooledEngine(folder, max_model_len=128)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [
            model(input_ids=torch.tensor([ids])).logits[0].double().numpy() for ids in PROMPTS
        ]
    found = engine.pool(PROMPTS, activation=False)
    assert_near([each.reshape(-1, 3) for each in found], expected)
    shares = engine.pool(PROMPTS, task="token_classify")
    assert_near([each.reshape(-1, 3) for each in shares], [softmax(each) for each in expected])


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_late_interaction(tmp_path: Path) -> None:
    """ColBERT's pipeline has a dense layer and no pooling: it is applied to each token."""
    from safetensors.torch import load_file

    folder = tiny_embedder(tmp_path / "m", "modernbert", modules=("dense", "normalize"))
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"].double().numpy()
    engine = PooledEngine(folder, max_model_len=128)
    found = engine.pool(PROMPTS)
    expected = [hidden_states(folder, ids) @ weight.T for ids in PROMPTS]
    expected = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in expected]
    assert_near([each.reshape(-1, 72) for each in found], expected)
