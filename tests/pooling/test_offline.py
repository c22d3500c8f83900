"""``LLM.embed``, ``score``, ``classify`` and ``encode``, in processes of their own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_embedders import tiny_embedder

from zlm import LLM, PoolingParams
from zlm.errors import BadRequest, TooLong

QUERY = "What is the capital of France?"
TEXTS = ["Cats eat fish.", "Paris is the capital of France."]


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> Iterator[LLM]:
    with LLM(str(minilm_path)) as llm:
        yield llm


def test_embed(minilm: LLM) -> None:
    outputs = minilm.embed([*TEXTS, {"prompt_token_ids": [101, 102]}], use_tqdm=False)
    assert [len(output.outputs.embedding) for output in outputs] == [384] * 3
    assert outputs[0].prompt_token_ids[0] == 101 and outputs[2].prompt_token_ids == [101, 102]
    lengths = [np.linalg.norm(output.outputs.embedding) for output in outputs]
    assert np.abs(np.array(lengths) - 1.0).max() < 1e-6
    [same] = minilm.embed(TEXTS[0], use_tqdm=False)
    assert np.abs(np.subtract(same.outputs.embedding, outputs[0].outputs.embedding)).max() < 1e-6


def test_score_is_the_cosine(minilm: LLM) -> None:
    one, *others = (o.outputs.embedding for o in minilm.embed([QUERY, *TEXTS], use_tqdm=False))
    outputs = minilm.score(QUERY, TEXTS, use_tqdm=False)
    for output, other in zip(outputs, others, strict=True):
        assert abs(output.outputs.score - float(np.dot(one, other))) < 1e-5
        assert output.prompt_token_ids.count(101) == 2
    assert outputs[1].outputs.score > outputs[0].outputs.score
    pairs = minilm.score(TEXTS, TEXTS, use_tqdm=False)
    assert all(abs(output.outputs.score - 1.0) < 1e-5 for output in pairs)
    with pytest.raises(BadRequest, match="data_1 has 2 texts and data_2 3"):
        minilm.score(TEXTS, ["a", "b", "c"])


def test_encode_is_raw(minilm: LLM) -> None:
    [output] = minilm.encode("hello", use_tqdm=False)
    assert abs(np.linalg.norm(output.outputs.data) - 1.0) > 0.1
    [unit] = minilm.encode("hello", PoolingParams(normalize=True), use_tqdm=False)
    assert abs(np.linalg.norm(unit.outputs.data) - 1.0) < 1e-6


def test_vectors_of_tokens(minilm: LLM) -> None:
    """all-MiniLM pools by the mean: that of the tokens' vectors is the vector of the text."""
    [text] = minilm.encode("hello there", use_tqdm=False)
    [tokens] = minilm.encode("hello there", pooling_task="token_embed", use_tqdm=False)
    assert np.shape(tokens.outputs.data) == (len(tokens.prompt_token_ids), 384)
    assert np.abs(np.mean(tokens.outputs.data, axis=0) - text.outputs.data).max() < 1e-5
    with pytest.raises(BadRequest, match="this model offers embed, token_embed"):
        minilm.encode("a", pooling_task="token_classify", use_tqdm=False)
    with pytest.raises(BadRequest, match="task is token_embed, but embed"):
        minilm.embed("a", pooling_params=PoolingParams(task="token_embed"), use_tqdm=False)


def test_refusals(minilm: LLM) -> None:
    long = "word " * 300
    with pytest.raises(TooLong, match="prompt 1: input has 302 tokens"):
        minilm.embed(["a", long], use_tqdm=False)
    [cut] = minilm.embed(long, truncate_prompt_tokens=5, use_tqdm=False)
    assert len(cut.prompt_token_ids) == 5
    with pytest.raises(BadRequest, match="no text"):
        minilm.generate("a", use_tqdm=False)
    with pytest.raises(BadRequest, match="no classification head"):
        minilm.classify("a")
    with pytest.raises(BadRequest, match="dimensions must be 384"):
        minilm.embed("a", pooling_params=PoolingParams(dimensions=7), use_tqdm=False)


def test_classify_and_cross_encoder_scores(tmp_path: Path) -> None:
    labels = {0: "no", 1: "yes"}
    folder = tiny_embedder(tmp_path / "a", "bert-classifier", id2label=labels)
    with LLM(str(folder)) as llm:
        [output] = llm.classify("a dog", use_tqdm=False)
        assert output.outputs.labels == ["no", "yes"] and output.outputs.num_classes == 2
        assert abs(sum(output.outputs.probs) - 1.0) < 1e-6
        with pytest.raises(BadRequest, match="2 labels"):
            llm.score("a", "b")
        with pytest.raises(BadRequest, match="classify or score"):
            llm.embed("a")
    folder = tiny_embedder(tmp_path / "b", "bert-classifier", num_labels=1)
    with LLM(str(folder)) as llm:
        both = llm.score("the dog", ["is a fox", "jumps"], use_tqdm=False)
        [second] = llm.score("the dog", "jumps", use_tqdm=False)
        assert both[1].outputs.score == pytest.approx(second.outputs.score, abs=1e-6)
        assert 0.0 < both[0].outputs.score < 1.0
        assert both[0].outputs.score != pytest.approx(both[1].outputs.score, abs=1e-6)
