"""One ``zlm serve`` on SmolLM2 for the clients that people bring, and what all of them are asked.

No client may reach for the network: those that fetch things at import are told not to.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import MODEL, Server

# Read when the packages are first imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else fetched from a public repository
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # else traces go to OpenAI

MAX_MODEL_LEN = 2048  # room for the tool definitions that agents send


@pytest.fixture(scope="session")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("clients") / "log"
    names = ["--served-model-name", MODEL, "--max-model-len", str(MAX_MODEL_LEN)]
    flags = [*names, "--cpu-threads", "1"]  # clients compute too: no thread waits for another
    with Server(smollm2_path, log, flags) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


@pytest.fixture(scope="session")
def question() -> list[dict[str, str]]:
    return [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="session")
def raw(server: Server, question: list[dict[str, str]]) -> Any:
    """The greedy answer to ``question`` as plain HTTP gives it: the body of 200."""
    answer = server.chat(question[0]["content"], max_tokens=24)
    assert answer.status == 200, answer.body
    assert "Paris" in answer.text
    return answer.json
