"""The short form of the soak: a mixed load on a tiny model while its processes are killed.

CASES 94, 95 and 97: nothing is lost, what was held is given back, the server recovers by itself.
"""

import json
import subprocess
import sys
from pathlib import Path

from tiny import tiny_checkpoint

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"
OPTIONS = [
    "--minutes", "0.1", "--clients", "6", "--most-input", "100", "--most-output", "16",
    "--last-id", "300", "--kill", "tokenizer,frontend,worker", "--kill-every", "1.5",
]  # fmt: skip
# The KV cache holds half of what the clients ask for at once.
FLAGS = [
    "--dtype", "float32", "--cpu-threads", "1", "--api-server-count", "2", "--max-num-seqs", "8",
    "--max-model-len", "256", "--num-gpu-blocks-override", "24",
]  # fmt: skip


def test_no_request_is_lost_while_processes_are_killed(tmp_path: Path) -> None:
    model, log = tiny_checkpoint(tmp_path / "model", "llama"), tmp_path / "log"
    command = [sys.executable, str(SOAK), str(model), *OPTIONS, "--log", str(log), "--", *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True)
    told = log.read_text() if log.exists() else ""
    assert done.stdout, done.stderr[-2000:] + told[-2000:]
    result = json.loads(done.stdout)
    assert result["wrong"] == [] and done.returncode == 0, f"{result}\n{told[-4000:]}"
    assert result["lost"] == 0 and result["answered"] > 20 and result["refused"] > 2
    assert {role: len(times) for role, times in result["recovery_s"].items()} == {
        "tokenizer": 1, "frontend": 1, "worker": 1,
    }  # fmt: skip
    assert result["engine_restarts"] == 1
    assert "Traceback" not in told
