"""A server of two ranks loses one: the engine comes down and up again as a whole."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import survives
from running_server import Server

FLAGS = ["--device", "cpu", "-tp", "2", "--served-model-name", "smol", "--max-model-len", "512",
    "--max-restarts", "100", "--hang-timeout", "3"]  # fmt: skip


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank(checkpoint: Callable[[str], Path], tmp_path: Path, number: int) -> None:
    with Server(checkpoint("llama"), tmp_path / "log", FLAGS) as server:
        survives(server, number)
