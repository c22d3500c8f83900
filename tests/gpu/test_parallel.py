"""Two ranks on two GPUs answer like one: exchanges, tiny models of several families, a crash."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import answers, survives
from running_server import Server
from tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

BENCH = Path(__file__).parents[2] / "bench" / "exchange.py"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "olmo2"])
def test_two_gpus_answer_like_one(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", family)
    assert answers(path, 2, device="cuda") == answers(path, 1, device="cuda")


def test_a_killed_rank_is_recovered_from(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "llama")
    flags = ["--device", "cuda", "-tp", "2", "--max-model-len", "512", "--max-restarts", "100"]
    flags += ["--kv-cache-memory-bytes", str(64 * 2**20), "--served-model-name", "smol"]
    with Server(path, tmp_path / "log", flags) as server:
        survives(server, signal.SIGKILL)


def test_sums_and_gathers_are_right() -> None:
    command = [sys.executable, str(BENCH), "--sizes", "1,8,1024,4096"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(*lines, sep="\n")
    assert [line["bytes"] for line in lines] == [1 << 10, 8 << 10, 1 << 20, 4 << 20]


def test_eager_steps_answer_like_captured_ones(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "llama")
    captured = answers(path, 2, device="cuda")
    assert answers(path, 2, device="cuda", enforce_eager=True) == captured


def test_two_stages_answer_like_one(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "llama")
    piped = answers(path, 1, device="cuda", pipeline_parallel_size=2)
    assert piped == answers(path, 1, device="cuda")
