"""One rank of ``tests/kernels/test_exchange.py``: RANK RANKS FOLDER. Buffers are files of FOLDER.

Each process maps them where it likes, as GPUs' memory is mapped by each rank where it likes.
"""

import sys

import numpy as np
import torch
import triton_interpreter

triton_interpreter.enable()

from zlm.kernels import exchange  # noqa: E402

CAPACITY = 2048  # words
CASES = [  # shape, type, whether there is a residual
    ((1, 64), torch.float32, False),
    ((3, 700), torch.bfloat16, True),
    ((2, 30), torch.float16, True),
    ((2, 700), torch.float32, True),
    ((1, 30), torch.bfloat16, False),
]
GATHERS = [(1, 48, 90), (3, 64, 128), (2, 33, 50)]  # rows, columns of a rank, columns in all
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    shape = (2 * ranks * CAPACITY,)
    maps = [
        np.memmap(f"{folder}/{each}", dtype=np.int64, mode="r+", shape=shape)
        for each in range(ranks)
    ]
    pointers = [each.ctypes.data for each in maps]
    buffers = exchange.Buffers(pointers, rank, CAPACITY, torch.device("cpu"))
    for seed, (size, dtype, has_residual) in enumerate(CASES * 2):
        parts = [part(each, size, dtype, seed) for each in range(ranks)]
        residual = part(ranks, size, dtype, seed) if has_residual else None
        expected = exchange.reference(parts, residual)
        out = parts[rank].clone() if residual is None else residual
        exchange.sum_ranks(parts[rank], buffers, out=out, residual=residual)
        error = (out.double() - expected).abs().max().item()
        assert error < TOLERANCE[dtype], (seed, error)
    for seed, (rows, width, columns) in enumerate(GATHERS):
        parts = [part(each, (rows, width), torch.float32, seed) for each in range(ranks)]
        out = torch.full((rows, columns), float("nan"))
        exchange.gather_ranks(parts[rank], buffers, out=out)
        assert torch.equal(out, torch.cat(parts, 1)[:, :columns]), seed


if __name__ == "__main__":
    main()
