"""Embedders in GGUF files: the vectors and ids of the folders they were made from."""

from pathlib import Path

import numpy as np
import pytest
import transformers
from encoder_gguf import encoder_gguf
from pooled_engine import PooledEngine, resolved_for
from tiny import tiny_gguf
from tiny_embedders import tiny_embedder
from tokenizers import Tokenizer, models

from zlm.errors import ModelError
from zlm.models.config import load_spec
from zlm.tokenizer.load import load_vocabulary

PROMPTS = [[5, 6, 7], [9], list(range(10, 75)), [3, 3, 8, 9, 200, 201, 202]]
TEXTS = [
    "hello world",
    "The capital of France is Paris!",
    "",
    "naïve façade – 東京 🙂, don't  stop\tnow\n",
    "Łódź ÀÉÎ unaffable [MASK] x" * 3,
    "a" * 150 + " b",
]


def near(found: list[np.ndarray], expected: list[np.ndarray], most: float = 1e-5) -> bool:
    return all(np.abs(a - b).max() < most for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        ("bert", "mean"),
        ("bert", "cls"),
        ("roberta", "mean"),
        ("distilbert", "mean"),
        ("modernbert", "cls"),
        ("nomic", "mean"),
        ("gemma3", "mean"),
    ],
)
def test_a_file_gives_what_its_folder_gives(tmp_path: Path, family: str, pooling: str) -> None:
    dense, keys = (), {}
    if family == "gemma3":  # a file does not tell the scale of attention
        dense, keys = ("dense", "dense"), {"query_pre_attn_scalar": 32}
    modules = (pooling, *dense, "normalize")
    folder = tiny_embedder(tmp_path / "m", family, modules=modules, **keys)
    file = encoder_gguf(tmp_path / "m.gguf", folder, pooling=pooling)
    ours, expected = PooledEngine(file), PooledEngine(folder)
    assert ours.resolved.spec.layer_windows == expected.resolved.spec.layer_windows
    assert near(ours.pool(PROMPTS), expected.pool(PROMPTS))
    text = "the quick brown fox"
    assert near(ours.pool([text]), expected.pool([text]))
    assert ours.resolved.max_model_len == expected.resolved.max_model_len


def test_a_quantized_file(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "nomic", hidden_size=64, modules=("mean", "normalize"))
    file = encoder_gguf(tmp_path / "m.gguf", folder, quant="Q8_0")
    ours, expected = PooledEngine(file).pool(PROMPTS), PooledEngine(folder).pool(PROMPTS)
    assert min(float(a @ b) for a, b in zip(ours, expected, strict=True)) > 0.999


def test_minilm_as_a_file(minilm_path: Path, tmp_path: Path) -> None:
    """A real vocabulary of WordPiece: the ids of every text are those of the folder's tokenizer."""
    file = encoder_gguf(tmp_path / "minilm.gguf", minilm_path)
    vocabulary, expected = load_vocabulary(str(file)), load_vocabulary(str(minilm_path))
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=True)
        assert vocabulary.encode(text, add_special_tokens=True) == ids
        assert vocabulary.encode_pair(text, "b c") == expected.encode_pair(text, "b c")
    assert vocabulary.decode([101, 7592, 2088, 102], skip_special_tokens=True) == "hello world"
    options = {"max_model_len": 256}
    ours, theirs = PooledEngine(file, **options), PooledEngine(minilm_path, **options)
    assert near(ours.pool(TEXTS), theirs.pool(TEXTS), 1e-6)


def test_a_cased_vocabulary_is_not_lowercased(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "The", "##re", "re"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(pieces[:4])
    folder = tiny_embedder(tmp_path / "m", "bert")
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = load_vocabulary(str(encoder_gguf(tmp_path / "m.gguf", folder)))
    assert vocabulary.encode("There the re", add_special_tokens=True) == [2, 5, 6, 4, 7, 3]


def test_unigram(tmp_path: Path) -> None:
    """XLM-RoBERTa's kind, built by transformers: with its own way to join pairs."""
    words = ["▁the", "▁", "t", "h", "e", "q", "u", "i", "c", "k", "▁qu", "ick", "fox", "▁fox", "é"]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(word, -1.0 - i / 3) for i, word in enumerate(words)] + [("<mask>", 0.0)]
    theirs = transformers.XLMRobertaTokenizer(vocab=vocab)
    folder = tiny_embedder(tmp_path / "m", "xlm-roberta")
    theirs._tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = load_vocabulary(str(encoder_gguf(tmp_path / "m.gguf", folder)))
    for text in ("the quick fox", " the  fox ", "théé ☃ fox", ""):
        assert vocabulary.encode(text, add_special_tokens=True) == theirs(text).input_ids
        assert vocabulary.encode_pair(text, "fox")[0] == theirs(text, "fox").input_ids
        assert set(vocabulary.encode_pair(text, "fox")[1]) == {0}


def test_a_reranker(tmp_path: Path) -> None:
    """XLM-RoBERTa's head, as BGE's rerankers have it, and ModernBERT's."""
    for family in ("roberta-classifier", "modernbert-classifier"):
        folder = tiny_embedder(tmp_path / family, family, num_labels=1)
        file = encoder_gguf(tmp_path / f"{family}.gguf", folder, pooling="rank")
        firsts, seconds = ["the capital", "a dog"], ["of France is Paris", "and a quick fox"]
        assert near(PooledEngine(file).pool(PROMPTS), PooledEngine(folder).pool(PROMPTS))
        scores = PooledEngine(file).pool(firsts, seconds)
        assert [score.shape for score in scores] == [(1,), (1,)]


def test_a_head_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Of BERT's own cross-encoders the converter leaves out the pooler."""
    folder = tiny_embedder(tmp_path / "m", "bert-classifier", num_labels=1)
    file = encoder_gguf(tmp_path / "m.gguf", folder, pooling="rank")
    with pytest.raises(ModelError, match=r"lacks cls.output: its head is not whole"):
        load_spec(file)


def test_embedding_gemma_without_its_dense_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_embedder(tmp_path / "m", "gemma3", modules=("mean", "dense", "dense"))
    file = encoder_gguf(tmp_path / "m.gguf", folder, dense=False)
    spec = load_spec(file)
    assert spec.bidirectional and not spec.can_generate and spec.output_size == spec.hidden_size
    assert "holds no dense layers" in caplog.text
    assert resolved_for(file, {}, task="embedding").kv_groups == ()


def test_pooling_of_a_decoder(tmp_path: Path) -> None:
    """Qwen3-Embedding as a file: the last token's vector, cut to any length from 32 on."""
    folder = tiny_embedder(tmp_path / "m", "qwen3", modules=("lasttoken", "normalize"))
    file = tiny_gguf(tmp_path / "m.gguf", folder, pooling="LAST")
    assert load_spec(file).pooling is not None
    assert near(PooledEngine(file).pool(PROMPTS), PooledEngine(folder).pool(PROMPTS))
    assert resolved_for(file, {}, task="generate").spec.pooling is None
    assert load_spec(tiny_gguf(tmp_path / "text.gguf", folder, pooling="NONE")).pooling is None


def test_modernbert_normalizes_its_text(tmp_path: Path) -> None:
    folder = tiny_embedder(tmp_path / "m", "modernbert")
    vocabulary = load_vocabulary(str(encoder_gguf(tmp_path / "m.gguf", folder)))
    composed, apart = "caf\u00e9", "cafe\u0301"
    ids = vocabulary.encode(composed, add_special_tokens=True)
    assert vocabulary.encode(apart, add_special_tokens=True) == ids
    assert (ids[0], ids[-1]) == (1, 2)
