"""A server of a model of text says clearly that it gives no vectors."""

import pytest
from running_server import Server

BODIES = {
    "/v1/embeddings": {"input": "x"},
    "/pooling": {"input": "x"},
    "/classify": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_embeddings_of_a_model_of_text(server: Server, path: str) -> None:
    answer = server.request("POST", path, BODIES[path])
    error = answer.json["error"]
    assert answer.status == 400 and error["code"] == "model_not_supported"
    assert "--runner pooling" in error["message"]
    server.assert_good()
