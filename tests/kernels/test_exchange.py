"""Sums and gathers over ranks in Triton's interpreter: a process each, buffers in shared files."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton_interpreter

triton_interpreter.enable()

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_sum_of_all(ranks: int, tmp_path: Path) -> None:
    """Three ranks sum small tensors, two sum large ones."""
    for rank in range(ranks):
        np.zeros(2 * ranks * 2048, np.int64).tofile(tmp_path / str(rank))
    command = [sys.executable, str(SUPPORT / "exchange_process.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
    finally:
        for process in processes:  # the others wait for one that has failed
            process.kill()
            process.wait()
