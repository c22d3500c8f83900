"""A server of two ranks loses one: the engine comes down and up again as a whole."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import survives
from running_server import Server

from zlm import LLM, SamplingParams
from zlm.errors import Internal

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


def test_a_lost_rank_offline(checkpoint: Callable[[str], Path]) -> None:
    """Its own end is told, not the broken connection that another rank saw of it."""
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    with LLM(checkpoint("llama"), tensor_parallel_size=2, device="cpu", max_model_len=512) as llm:
        stream = llm.stream("The quick brown fox", endless)
        next(stream)
        os.kill(llm._engine._group.pid("worker", 1), signal.SIGKILL)
        with pytest.raises(Internal, match=r"^worker 1 died: killed by signal 9 \(SIGKILL\)$"):
            list(stream)
        with pytest.raises(Internal, match="worker 1 died: killed"):
            llm.generate("again", endless, use_tqdm=False)
