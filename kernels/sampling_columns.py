"""What the sampling kernels are given: parameters by slot, and working memory.

Plain records; whoever allocates them (the worker's slot tables, its graph runner) owns them. A row
of V logits is split into C chunks of ``CHUNK`` ids, always the same ones, whatever the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 4096  # ids a program
PIVOTS = 16  # thresholds that a pass of the cut search tries


@dataclass(frozen=True, slots=True)
class Columns:
    """Sampling parameters by slot, all [slots] and contiguous.

    The caller writes temperature 0 for rows that top_k 1 or top_p 0 make greedy.
    """

    seeds: Tensor  # int64, the bits of an unsigned 64-bit number
    temperature: Tensor  # float32; below 1e-5: greedy
    min_p: Tensor  # float32; 0: off
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float32; 1: off


@dataclass(frozen=True, slots=True)
class Scratch:
    """Working memory for up to R rows. Nothing of it outlives a call.

    About 17 kB a row at a vocabulary of 262,144.
    """

    peak: Tensor  # float32 [R, C]: largest logit of a chunk, NaN if it holds one
    peak_id: Tensor  # int32 [R, C]
    key: Tensor  # float32 [R, C]: the race's best key, relative to the chunk's peak
    key_id: Tensor  # int32 [R, C]
    row_peak: Tensor  # float32 [R]
    cut: Tensor  # int32 [R]: float32 bits of the largest distance from the peak that stays
    state: Tensor  # int32 [2, R, 4], see sampling_cut
    target: Tensor  # float32 [2, R]
    counts: Tensor  # int32 [2, R, C, PIVOTS]
    masses: Tensor  # float32 [2, R, C, PIVOTS]


def num_chunks(vocab_size: int) -> int:
    """Return C of a vocabulary."""
    return -(-vocab_size // CHUNK)


def allocate(num_rows: int, vocab_size: int, device: torch.device | str) -> Scratch:
    """Return scratch for batches of up to *num_rows* rows."""
    chunks = num_chunks(vocab_size)

    def real(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float32, device=device)

    def whole(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    return Scratch(
        peak=real(num_rows, chunks),
        peak_id=whole(num_rows, chunks),
        key=real(num_rows, chunks),
        key_id=whole(num_rows, chunks),
        row_peak=real(num_rows),
        cut=whole(num_rows),
        state=whole(2, num_rows, 4),
        target=real(2, num_rows),
        counts=whole(2, num_rows, chunks, PIVOTS),
        masses=real(2, num_rows, chunks, PIVOTS),
    )
