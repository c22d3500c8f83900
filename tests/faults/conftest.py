"""Real servers of a tiny random model, to be broken."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_server import Server, alive, eventually_true
from tiny import tiny_checkpoint

FLAGS = ["--served-model-name", "smol", "--max-model-len", "512"]


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of a few thousand weights."""
    return tiny_checkpoint(tmp_path_factory.mktemp("faults") / "model", "llama")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server of the test's own: start(*flags, model=...); not waited for."""
    started: list[Server] = []

    def start(*flags: str, model: Path = model) -> Server:
        log = tmp_path / f"log-{len(started)}"
        started.append(Server(model, log, [*FLAGS, *flags]))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture(scope="session")
def nothing_left() -> Callable[[dict[int, str]], bool]:
    """Whether all of these processes are gone, a moment from now at the latest."""
    return lambda pids: eventually_true(lambda: not alive(pids), 10)
