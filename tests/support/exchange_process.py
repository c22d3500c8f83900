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
HALF_BYTES = 2 * exchange.TILE_BYTES
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
    if ranks == 2:
        check_large_sums(rank, pointers)
        return
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


def check_large_sums(rank: int, pointers: list[int]) -> None:
    """Sums of a tile, of less, of a half and of more than one, in turn, in both halves."""
    buffers = exchange.LargeBuffers(pointers, rank, HALF_BYTES, torch.device("cpu"))
    shapes = [(2, 4096), (1, 100), (3, 4096), (1, 4097), (2, 4096), (5, 3001)]
    for seed, shape in enumerate(shapes * 2):
        dtype = (torch.bfloat16, torch.float32, torch.float16)[seed % 3]
        parts = [part(each, shape, dtype, seed) for each in range(2)]
        residual = part(2, shape, dtype, seed) if seed % 2 else None
        expected = exchange.reference(parts, residual)
        out = torch.full(shape, float("nan"), dtype=dtype) if residual is None else residual
        exchange.sum_two_ranks(parts[rank], buffers, out=out, residual=residual)
        error = (out.double() - expected).abs().max().item()
        assert error < TOLERANCE[dtype], (seed, error)


if __name__ == "__main__":
    main()
