"""Scores of models that give a vector for each token (ColBERT's kind), and who has no scores."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pooled_engine import PooledEngine
from tiny_embedders import tiny_embedder

from zlm.config import PoolingSpec
from zlm.errors import BadRequest
from zlm.frontend.openai.scoring import RerankForm, RerankRequest, ScoreForm, pool, rerank_pairs
from zlm.messages import Failed, Pooled
from zlm.scores import Pairs, pooled_texts, scores

PAIRS = Pairs(["a dog"], ["quick foxes jump", "the dog", "Paris"])
LONG = "word " * 60


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Pooled:
    """What a model without pooling says of PAIRS."""
    folder = tiny_embedder(tmp_path_factory.mktemp("m") / "m", "bert", modules=("dense",))
    engine = PooledEngine(folder, max_model_len=128)
    assert engine.resolved.spec.pooling is not None
    texts = pooled_texts(PAIRS, engine.resolved.spec.pooling)
    assert texts.seconds == []
    vectors = engine.pool(texts.prompts)
    encode = engine.tokenizer.vocabulary.encode
    ids = [encode(text, add_special_tokens=True) for text in [*PAIRS.firsts, *PAIRS.seconds]]
    return Pooled(1, [vector.tobytes() for vector in vectors], ids, per_token=True)


def expected(pooled: Pooled) -> list[float]:
    """Return the scores by the definition, a token at a time, in float64."""
    query, *documents = [
        np.frombuffer(vector, "<f4").reshape(len(ids), -1).astype(np.float64)
        for vector, ids in zip(pooled.vectors, pooled.prompts, strict=True)
    ]

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    return [sum(max(cosine(q, d) for d in document) for q in query) for document in documents]


def test_a_score_is_the_sum_over_the_nearest_tokens(pooled: Pooled) -> None:
    data = ScoreForm(PAIRS, "m", is_cross_encoder=False)(pooled)["data"]
    assert [each["score"] for each in data] == pytest.approx(expected(pooled), abs=1e-5)
    request = RerankRequest(query=PAIRS.firsts[0], documents=list(PAIRS.seconds))
    ranked = RerankForm(request, PAIRS, "m", is_cross_encoder=False)(pooled)["results"]
    order = np.argsort(-np.array(expected(pooled))).tolist()
    assert [each["index"] for each in ranked] == order


def test_as_many_firsts_as_seconds() -> None:
    rows = [np.eye(3, 4, dtype="<f4") * scale for scale in (1, 2, 3, 4)]
    vectors = [each.tobytes() for each in rows]
    found = scores(vectors, 2, is_cross_encoder=False, lengths=[3] * 4)
    assert found == pytest.approx([3.0, 3.0])


@pytest.mark.parametrize("family", ["bert-classifier", "qwen3"])
def test_errors_name_the_text_that_they_are_about(tmp_path: Path, family: str) -> None:
    is_pair = family == "bert-classifier"
    options: dict[str, Any] = {"num_labels": 1} if is_pair else {"modules": ("lasttoken",)}
    engine = PooledEngine(tiny_embedder(tmp_path / "m", family, **options), max_model_len=40)
    for query, documents, name in (
        (LONG, ["a"], "query"),
        ("a", ["b", LONG], "documents[1]"),
        *([] if is_pair else [("", ["a"], "query")]),
    ):
        request = RerankRequest(query=query, documents=documents)
        pairs = rerank_pairs(request, most=8)
        command = pool(request, pairs, engine.resolved, request_id=900, arrival=0.0)
        engine.tokenizer.handle(msgspec.structs.replace(command, add_special_tokens=False))
        failed = engine._answers.pop(900)
        assert isinstance(failed, Failed) and failed.param == name
        words = "must not be empty" if not query else "with its pair has" if is_pair else "has"
        assert failed.message.startswith(f"{name} {words}")


def test_labels_of_tokens_are_no_scores() -> None:
    with pytest.raises(BadRequest, match="labels for each token, and no score"):
        pooled_texts(PAIRS, PoolingSpec(kind="tokens", num_labels=3))
