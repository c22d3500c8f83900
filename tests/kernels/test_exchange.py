"""Sums and gathers over ranks in Triton's interpreter: a process each, buffers in shared files."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from zlm.kernels import exchange  # noqa: E402

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


@pytest.mark.parametrize("past", [0, 2**31 - 2])
def test_a_rank_that_is_an_exchange_ahead(past: int) -> None:
    """It has what it waits for, and sends the next tile before the other has looked for the last.

    *past*: exchanges that went before; their numbers wrap around.
    """
    size = exchange.TILE_BYTES
    memory = [torch.zeros(exchange.large_bytes(size), dtype=torch.uint8) for _ in range(2)]
    pointers = [each.data_ptr() for each in memory]
    own = exchange.LargeBuffers(pointers, 0, size, torch.device("cpu"))
    own.epochs.fill_(past)
    x, others = torch.randn(100), torch.randn(2, 100)
    epochs = torch.tensor([past + 1, past + 2]).to(torch.int32)
    for epoch, other in zip(epochs.tolist(), others, strict=True):
        half = memory[0][(epoch & 1) * size :]
        half[: other.nbytes] = other.view(torch.uint8)
    memory[0][2 * size :].view(torch.int32).fill_(int(epochs[1]))
    for other in others:
        out = torch.empty_like(x)
        exchange.sum_two_ranks(x, own, out=out)
        assert torch.equal(out, x + other)
