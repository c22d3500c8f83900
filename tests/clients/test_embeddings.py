"""Embeddings and rerank as clients ask for them, from MiniLM: the same vectors by every way."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running_server import Server

TEXTS = ["A dog runs in the park.", "A puppy plays outside 🐕.", "The stock market fell today."]
MODEL = "minilm"
SAME = 1e-5


@pytest.fixture(scope="module")
def url(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("embedder") / "log"
    with Server(minilm_path, log, ["--served-model-name", MODEL]) as running:
        yield f"http://127.0.0.1:{running.port}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def vectors(client: openai.OpenAI) -> list[list[float]]:
    """openai-python's own way: base64, decoded by the client."""
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
    return [each.embedding for each in answer.data]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))  # both have length 1


def test_openai_python(client: openai.OpenAI, vectors: list[list[float]]) -> None:
    """CASES 110: base64 is what floats are, four bytes a number."""
    assert {len(vector) for vector in vectors} == {384}
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])
    assert cosine(vectors[0], vectors[0]) == pytest.approx(1, abs=SAME)
    floats = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(vectors[0], abs=SAME)
    raw: Any = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="base64")
    data = base64.b64decode(raw.data[0].embedding)
    assert struct.unpack("<384f", data) == pytest.approx(vectors[0], abs=SAME)


def test_langchain(url: str, vectors: list[list[float]]) -> None:
    package = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    embeddings = package.OpenAIEmbeddings(
        model=MODEL, base_url=url, api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    for mine, expected in zip(embeddings.embed_documents(TEXTS), vectors, strict=True):
        assert mine == pytest.approx(expected, abs=SAME)
    assert embeddings.embed_query(TEXTS[1]) == pytest.approx(vectors[1], abs=SAME)


@pytest.mark.parametrize("route", ["openai", "hosted_vllm"])
def test_litellm(route: str, url: str, vectors: list[list[float]]) -> None:
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    answer = litellm.embedding(
        model=f"{route}/{MODEL}", input=TEXTS, api_base=url, api_key="none", encoding_format="float"
    )
    for each, expected in zip(answer.data, vectors, strict=True):
        assert each["embedding"] == pytest.approx(expected, abs=SAME)


def test_litellm_rerank(url: str, vectors: list[list[float]]) -> None:
    """Cohere's shape: the best document first."""
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}",
        query=TEXTS[0],
        documents=TEXTS[1:],
        top_n=2,
        api_base=url.removesuffix("/v1"),
        api_key="none",
    )
    assert [each["index"] for each in answer.results] == [0, 1]
    scores = [each["relevance_score"] for each in answer.results]
    assert scores == pytest.approx([cosine(vectors[0], v) for v in vectors[1:]], abs=1e-4)
