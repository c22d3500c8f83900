"""``zlm serve`` of a real embedding model: all-MiniLM-L6-v2, against sentence-transformers.

CASES 33, 43, 110 and 112 for embeddings.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import transformers
from running_server import Server
from sentence_transformers import SentenceTransformer

TEXTS = [
    "hello world",
    "The capital of France is Paris, a city on the Seine.",
    "",
    "naïve façade – 東京 🙂 " * 9,
    "x",
]
WINDOW = 256  # what sentence_bert_config.json says


@pytest.fixture(scope="module")
def embedder(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("embedder") / "log"
    flags = ["--served-model-name", "minilm", "--task", "embedding"]
    with Server(minilm_path, log, flags) as running:
        yield running


@pytest.fixture(scope="module")
def expected(minilm_path: Path) -> np.ndarray:
    return SentenceTransformer(str(minilm_path), device="cpu").encode(TEXTS)


def post(server: Server, path: str, **body: Any) -> Any:
    answer = server.request("POST", path, body)
    assert answer.status == 200, answer.body
    return answer.json


def refused(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """Return the error of a request that is answered with 400; a good one follows it."""
    answer = server.request("POST", path, body)
    assert answer.status == 400, answer.body
    assert len(post(server, "/v1/embeddings", input="good")["data"][0]["embedding"]) == 384
    return answer.json["error"]


def vectors(answer: Any) -> np.ndarray:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]])


def test_equal_to_sentence_transformers(
    embedder: Server, minilm_path: Path, expected: np.ndarray
) -> None:
    answer = post(embedder, "/v1/embeddings", model="minilm", input=TEXTS)
    assert answer["object"] == "list" and answer["model"] == "minilm"
    assert np.abs(vectors(answer) - expected).max() < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_path)
    count = sum(len(tokenizer(text).input_ids) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_every_form_of_input(embedder: Server, expected: np.ndarray) -> None:
    ids = post(embedder, "/tokenize", prompt=TEXTS[0])["tokens"]
    assert ids == [101, 7592, 2088, 102]
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        found = vectors(post(embedder, "/v1/embeddings", input=given))
        assert np.abs(found - expected[:1]).max() < 1e-5
    for wrong in (None, [], [[]], ["a", 1], [[101], "a"], {"text": "a"}, 7, [True]):
        assert refused(embedder, "/v1/embeddings", input=wrong)["param"] == "input"


def test_base64_equals_floats(embedder: Server) -> None:
    """CASES 110: little-endian float32, 4 bytes an element, bit for bit the floats."""
    floats = vectors(post(embedder, "/v1/embeddings", input=TEXTS, encoding_format="float"))
    coded = post(embedder, "/v1/embeddings", input=TEXTS, encoding_format="base64")
    for item, row in zip(coded["data"], floats, strict=True):
        raw = base64.b64decode(item["embedding"], validate=True)
        assert len(raw) == 4 * 384
        assert np.array_equal(np.frombuffer(raw, "<f4"), row.astype(np.float32))
    error = refused(embedder, "/v1/embeddings", input="x", encoding_format="int8")
    assert error["param"] == "encoding_format"


def test_the_official_client(embedder: Server, expected: np.ndarray) -> None:
    """It asks for base64 by itself."""
    url = f"http://127.0.0.1:{embedder.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    found = np.array([item.embedding for item in answer.data])
    assert np.abs(found - expected).max() < 1e-5
    with pytest.raises(openai.BadRequestError, match="dimensions must be 384"):
        client.embeddings.create(model="minilm", input="x", dimensions=128)
    full = client.embeddings.create(model="minilm", input="x", dimensions=384)
    assert len(full.data[0].embedding) == 384


def test_at_the_window_and_over_it(embedder: Server) -> None:
    """CASES 43 and 112."""
    words = ["paris"] * (WINDOW - 2)
    at, other = " ".join(words), " ".join([*words[:-1], "rome"])
    found = post(embedder, "/v1/embeddings", input=[at, other])
    assert found["usage"]["prompt_tokens"] == 2 * WINDOW
    one, two = vectors(found)
    assert np.abs(one - two).max() > 1e-5
    error = refused(embedder, "/v1/embeddings", input=at + " rome")
    assert error["code"] == "context_length_exceeded"
    assert "257" in error["message"] and "256" in error["message"]
    cut = post(embedder, "/v1/embeddings", input=at + " rome", truncate_prompt_tokens=WINDOW)
    assert cut["usage"]["prompt_tokens"] == WINDOW
    assert np.abs(vectors(cut)[0] - one).max() < 1e-6


def test_ids_of_another_tokenizer(embedder: Server) -> None:
    """CASES 33."""
    for wrong in ([-1], [[30522]], [2**62], [[5], [2**31]], [[5], [2**70]]):
        error = refused(embedder, "/v1/embeddings", input=wrong)
        assert error["param"] == "input" and "vocabulary" in error["message"]
    for wrong_type in ([1.5], [[True]], [["a"]]):
        refused(embedder, "/v1/embeddings", input=wrong_type)


def test_generation_is_refused(embedder: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        error = refused(embedder, path, **body)
        assert error["code"] == "model_not_supported" and "/v1/embeddings" in error["message"]


def test_score_and_rerank(embedder: Server) -> None:
    query = "What is the capital of France?"
    texts = ["Cats eat fish.", "Paris is the capital of France.", "France is in Europe."]
    one, *others = vectors(post(embedder, "/v1/embeddings", input=[query, *texts]))
    cosines = [float(one @ other) for other in others]
    for path in ("/score", "/v1/score"):
        scored = post(embedder, path, text_1=query, text_2=texts)
        found = [item["score"] for item in scored["data"]]
        assert np.abs(np.array(found) - cosines).max() < 1e-5
    pairs = post(embedder, "/score", queries=texts, documents=texts)
    assert all(abs(item["score"] - 1.0) < 1e-5 for item in pairs["data"])
    assert refused(embedder, "/score", text_1=["a", "b"], text_2=texts)["param"] == "text_1"
    documents = [{"text": texts[0]}, *texts[1:]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = post(embedder, path, model="minilm", query=query, documents=documents, top_n=2)
        assert [result["index"] for result in ranked["results"]] == [1, 2]
        assert ranked["results"][0]["document"] == {"text": texts[1]}
        assert abs(ranked["results"][0]["relevance_score"] - cosines[1]) < 1e-5
    long = "word " * 600
    for fields, name in (
        ({"text_1": long, "text_2": "a"}, "text_1"),
        ({"queries": ["a", long], "documents": ["a", "a"]}, "queries[1]"),
        ({"text_1": "a", "text_2": ["a", long]}, "text_2[1]"),
    ):
        error = refused(embedder, "/score", **fields)
        assert error["param"] == name and error["message"].startswith(f"{name} has")
    assert refused(embedder, "/rerank", query=long, documents=["a"])["param"] == "query"
    error = refused(embedder, "/rerank", query="a", documents=["a", {"text": long}])
    assert error["param"] == "documents[1]"
    assert refused(embedder, "/rerank", query=query)["param"] == "documents"
    assert refused(embedder, "/rerank", documents=texts)["param"] == "query"
    assert refused(embedder, "/rerank", query="q", documents=["a"], topn=1)["param"] == "topn"


def test_pooling_gives_the_raw_vector(embedder: Server, expected: np.ndarray) -> None:
    [item] = post(embedder, "/pooling", input=TEXTS[0])["data"]
    raw = np.array(item["data"])
    assert item["object"] == "pooling" and abs(np.linalg.norm(raw) - 1.0) > 0.1
    assert np.abs(raw / np.linalg.norm(raw) - expected[0]).max() < 1e-5
    [item] = post(embedder, "/pooling", input=TEXTS[0], normalize=True)["data"]
    assert np.abs(np.array(item["data"]) - expected[0]).max() < 1e-5


def test_a_large_request_and_what_metrics_count(embedder: Server) -> None:
    before = embedder.metrics()["vllm:request_success_total"]
    texts = [f"text number {i}" for i in range(300)]
    found = vectors(post(embedder, "/v1/embeddings", input=texts))
    assert len({row.tobytes() for row in found}) == 300
    assert embedder.metrics()["vllm:request_success_total"] - before >= 300
    error = refused(embedder, "/v1/embeddings", input=["a"] * 1025)
    assert error["param"] == "input" and "1024" in error["message"]
