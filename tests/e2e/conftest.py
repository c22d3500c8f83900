"""A real ``zlm serve`` on SmolLM2 in float32, started once, and what tests do with one.

Fixtures: ``server`` (shared by all tests), ``start_server`` (one of the test's own, ended with it),
``eventually`` (wait for a condition, up to a deadline). The shared ones compute with one thread:
others run tests beside them, and two threads of which one has to wait cost twice the time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from running_server import MAX_MODEL_LEN, MODEL, Server, alive, eventually_true


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool], float], bool]:
    return eventually_true


@pytest.fixture(scope="session")
def still_alive() -> Callable[[dict[int, str]], list[str]]:
    return alive


@pytest.fixture(scope="session")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    names = ["--served-model-name", MODEL, "smollm2"]
    limits = ["--max-model-len", str(MAX_MODEL_LEN), "--cpu-threads", "1"]
    with Server(smollm2_path, log, [*names, *limits]) as running:
        yield running


@pytest.fixture(scope="session")
def small_pool(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose KV cache holds some 190 tokens, less than its context length of 512."""
    log = tmp_path_factory.mktemp("small-pool") / "log"
    flags = ["--served-model-name", MODEL, "--max-model-len", "512", "--cpu-threads", "1"]
    with Server(smollm2_path, log, [*flags, "--num-gpu-blocks-override", "12"]) as running:
        yield running


@pytest.fixture
def start_server(smollm2_path: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server of the test's own: start_server(*flags, port=None); not waited for."""
    started: list[Server] = []

    def start(*flags: str, port: int | None = None) -> Server:
        log = tmp_path / f"log-{len(started)}"
        names = ["--served-model-name", MODEL, "--max-model-len", str(MAX_MODEL_LEN)]
        started.append(Server(smollm2_path, log, [*names, *flags], port))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
