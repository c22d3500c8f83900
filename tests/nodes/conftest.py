"""An engine on two machines."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import Machines, Pair, two_machines
from tiny import tiny_checkpoint


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("nodes") / "model", "llama")


@pytest.fixture(scope="package")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch, two_machines() as machines:
        patch.setenv("ZLM_CLUSTER_KEY", "a secret of the tests, of no other use")
        yield machines


@pytest.fixture(scope="module")
def start(
    machines: Machines, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Pair]]:
    """Start a pair of the test's own: start("-tp", "2")."""
    pairs: list[Pair] = []

    def start(*layout: str, node_model: Path | None = None) -> Pair:
        folder = tmp_path_factory.mktemp("pair")
        pairs.append(Pair(machines, model, folder, list(layout), node_model))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.stop()
