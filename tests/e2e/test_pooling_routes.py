"""Embedders and classifiers over HTTP: the guides' command, conversations, tokens, labels.

The embedder is a tiny model of EmbeddingGemma's kind, asked for by its id from a hub on loopback.
"""

import base64
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_hub import TOKEN, FakeHub
from running_server import Server
from sentence_transformers import SentenceTransformer
from tiny_embedders import hidden_states, tiny_embedder

ID = "google/embeddinggemma-300m"
TEXTS = ["the capital of France", "a dog"]
LABELS = {0: "sad", 1: "glad", 2: "mad"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    return tiny_embedder(path, "gemma3", modules=("mean", "dense", "dense", "normalize"))


@pytest.fixture(scope="module")
def embedder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``zlm serve ID --task embedding --port N --download-dir DIR``, with a token: it is gated."""
    place, hub = tmp_path_factory.mktemp("embedder"), FakeHub()
    files = [path for path in folder.rglob("*") if path.is_file()]
    hub.repositories[ID] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    hub.gated.add(ID)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}.items():
            patch.setenv(name, value)
        patch.setenv("HF_HUB_OFFLINE", "0")
        flags = ["--task", "embedding", "--host", "127.0.0.1"]
        running = Server(ID, place / "log", [*flags, "--download-dir", str(place / "models")])
    with closing(hub), running:
        yield running


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("classifier")
    model = tiny_embedder(place / "m", "bert-classifier", id2label=LABELS)
    flags = ["--task", "classify", "--served-model-name", "moods"]
    with Server(model, place / "log", flags) as running:
        yield running


def post(server: Server, path: str, **body: Any) -> Any:
    answer = server.request("POST", path, body)
    assert answer.status == 200, answer.body
    return answer.json


def refused(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.request("POST", path, body)
    assert answer.status == 400, answer.body
    error: dict[str, Any] = answer.json["error"]
    return error


def ids_of(server: Server, **body: Any) -> list[int]:
    ids: list[int] = post(server, "/tokenize", **body)["tokens"]
    return ids


def test_the_guides_embedder(embedder: Server, folder: Path) -> None:
    """It is served by its id, and gives the vectors of sentence-transformers."""
    found = post(embedder, "/v1/embeddings", model=ID, input=TEXTS)
    assert found["model"] == ID
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    vectors = np.array([item["embedding"] for item in found["data"]])
    assert vectors.shape == expected.shape and np.abs(vectors - expected).max() < 1e-5


def test_a_conversation_is_one_input(embedder: Server) -> None:
    """It is rendered by the chat template; its vector is that of the ids it comes to."""
    chat = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "yes"}]
    for beside in ({}, {"add_generation_prompt": True}):
        asked = {"add_generation_prompt": False} | beside
        ids = ids_of(embedder, messages=chat, **asked)
        for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            [ours] = post(embedder, path, messages=chat, **beside)["data"]
            [same] = post(embedder, path, input=ids)["data"]
            assert np.abs(np.subtract(ours[key], same[key])).max() < 1e-6
        usage = post(embedder, "/v1/embeddings", messages=chat, **beside)["usage"]
        assert usage["prompt_tokens"] == len(ids)
    [cut] = post(embedder, "/pooling", messages=chat, truncate_prompt_tokens=3)["data"]
    [same] = post(embedder, "/pooling", input=ids_of(embedder, messages=chat)[:3])["data"]
    assert np.abs(np.subtract(cut["data"], same["data"])).max() < 1e-6
    for wrong, param in (
        ({"messages": chat, "input": "x"}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": chat, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({}, "input"),
    ):
        assert refused(embedder, "/v1/embeddings", **wrong)["param"] == param


def test_vectors_of_tokens(embedder: Server, folder: Path) -> None:
    """One a token; as base64 all of an input's stand one after another."""
    ids = [ids_of(embedder, prompt=text) for text in TEXTS]
    answer = post(embedder, "/pooling", input=TEXTS, task="token_embed")
    coded = post(embedder, "/pooling", input=TEXTS, task="token_embed", encoding_format="base64")
    for item, code, tokens in zip(answer["data"], coded["data"], ids, strict=True):
        expected = hidden_states(folder, tokens)
        found = np.array(item["data"], np.float32)
        assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-4
        raw = np.frombuffer(base64.b64decode(code["data"]), "<f4").reshape(found.shape)
        assert np.array_equal(raw, found)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    for task, words in (("classify", "this model offers embed, token_embed"), ("x", "one of")):
        error = refused(embedder, "/pooling", input="a", task=task)
        assert error["param"] == "task" and words in error["message"]
    error = refused(embedder, "/pooling", input="a", task="token_embed", dimensions=8)
    assert error["param"] == "dimensions"


def test_an_embedder_classifies_nothing(embedder: Server) -> None:
    error = refused(embedder, "/classify", input="a")
    assert error["code"] == "model_not_supported" and "/v1/embeddings" in error["message"]


def test_classify(classifier: Server) -> None:
    answer = post(classifier, "/classify", model="moods", input=TEXTS)
    assert answer["object"] == "list" and answer["model"] == "moods"
    assert answer["id"].startswith("classify-")
    logits = [item["data"] for item in post(classifier, "/pooling", input=TEXTS)["data"]]
    for index, (item, raw) in enumerate(zip(answer["data"], logits, strict=True)):
        powers = np.exp(np.array(raw) - max(raw))
        assert np.abs(item["probs"] - powers / powers.sum()).max() < 1e-6
        assert item["label"] == LABELS[int(np.argmax(raw))]
        assert (item["index"], item["num_classes"]) == (index, 3)
    bare = post(classifier, "/classify", input=TEXTS[0], use_activation=False)["data"][0]
    assert bare["probs"] == pytest.approx(logits[0], abs=1e-6)
    [active] = post(classifier, "/pooling", input=TEXTS[0], use_activation=True)["data"]
    assert active["data"] == pytest.approx(answer["data"][0]["probs"], abs=1e-6)


def test_what_a_classifier_takes(classifier: Server) -> None:
    chat = [{"role": "user", "content": "a dog"}]
    ids = ids_of(classifier, messages=chat, add_generation_prompt=False)
    [ours] = post(classifier, "/classify", messages=chat)["data"]
    [same] = post(classifier, "/classify", input=[ids])["data"]
    assert ours["probs"] == pytest.approx(same["probs"], abs=1e-6)
    for wrong in ([], [[]], None, {"text": "a"}, [[5], "a"], [-1], [320]):
        assert refused(classifier, "/classify", input=wrong)["param"] == "input"
    assert refused(classifier, "/classify", input="a", inputs="b")["param"] == "inputs"
    error = refused(classifier, "/v1/embeddings", input="a")
    assert error["code"] == "model_not_supported" and "/classify" in error["message"]
    error = refused(classifier, "/score", text_1="a", text_2="b")
    assert "3 labels" in error["message"]
