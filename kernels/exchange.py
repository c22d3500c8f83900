"""Sums and rows over the ranks of one machine, through memory that all of their GPUs can write to.

Each rank writes its words into the others' buffers and waits until theirs have come into its own:
one trip over the link, where a library's all-reduce takes several. A word of 32 bits (a float32, or
two 16-bit numbers) travels in 64, beside the number of the exchange, so that it tells itself when
it is there: no flag is raised, and nothing is fenced. (NCCL's protocol LL does the same.) It costs
twice the bytes, and so is for small tensors.

    buffer of a rank    int64 [2, RANKS, CAPACITY]: words from each rank, by turns in either half
    epochs of a rank    int32 [CAPACITY / BLOCK]: exchanges that each block of words has seen

Word w is always block w // BLOCK's, and every rank makes the same exchanges in the same order. So
when a rank writes its words of exchange e + 2 over those of e, it has seen the other's words of
e + 1, which that one sent after it had read those of e.

The sum is made in float32 in the order of the ranks: the same bits on all of them.

A large sum over two ranks sends plain bytes instead, a tile a program, and then says so:

    buffer of a rank    [2, LARGE_BYTES]: the other rank's tiles, by turns in either half
    flags of a rank     int32 [LARGE_BYTES / TILE_BYTES]: the last exchange whose tile is there

A program writes its tile into the other's buffer, lets all its threads come so far, and releases
the flag to the whole system; then it waits for its own flag and adds what has come. It waits for
nothing before it has sent, and programs start in one order on both cards, so none waits for what
cannot come. Tiles cross the link both ways while others are added. Halves change as above, and a
flag may tell already of the next exchange, whose tile lies in the half that is not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct

BLOCK, WARPS = 512, 4  # words of a program
TILE_BYTES = 8192  # of a large sum, a program
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def reference(parts: list[Tensor], residual: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' *parts*, and of *residual*, in float64."""
    whole = sum(part.double() for part in parts)
    assert isinstance(whole, Tensor)
    return whole if residual is None else whole + residual.double()


@triton.jit
def _send(p_buffers, b_words, b_i, b_in, epoch, CAPACITY, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write words *b_i* into the buffers of all other ranks."""
    b_tagged = (epoch.to(tl.int64) << 32) | (b_words.to(tl.int64) & 0xFFFFFFFF)
    at = ((epoch & 1) * RANKS + RANK).to(tl.int64) * CAPACITY
    for i in tl.static_range(1, RANKS):
        p_peer = tl.load(p_buffers + (RANK + i) % RANKS).to(tl.pointer_type(tl.int64))
        tl.store(p_peer + at + b_i, b_tagged, mask=b_in)


@triton.jit
def _receive(p_own, b_i, b_in, epoch, CAPACITY, SENDER: tl.constexpr, RANKS: tl.constexpr):
    """Return words *b_i* of rank SENDER, once they are all there."""
    p_words = p_own + ((epoch & 1) * RANKS + SENDER).to(tl.int64) * CAPACITY + b_i
    b_got = tl.load(p_words, mask=b_in, other=0, volatile=True)
    while tl.max((((b_got >> 32).to(tl.int32) != epoch) & b_in).to(tl.int32), 0) != 0:
        b_got = tl.load(p_words, mask=b_in, other=0, volatile=True)
    return b_got.to(tl.int32)


@triton.jit
def _low(b_words, KIND: tl.constexpr):
    """Return the (first) number of each word, float32."""
    if KIND == 0:
        b_low = b_words.to(tl.float32, bitcast=True)
    elif KIND == 1:
        b_low = (b_words << 16).to(tl.float32, bitcast=True)
    else:
        b_low = b_words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b_low


@triton.jit
def _high(b_words, KIND: tl.constexpr):
    """Return the second number of each word of two, float32."""
    if KIND == 1:
        b_high = (b_words & -65536).to(tl.float32, bitcast=True)
    else:
        b_high = (b_words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b_high


@direct
@triton.jit
def _sum_kernel(
    p_x, p_residual, p_out, p_buffers, p_epochs, NUM_WORDS, CAPACITY,
    RANK: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    p_own = tl.load(p_buffers + RANK).to(tl.pointer_type(tl.int64))
    begin(PDL)
    i_block = tl.program_id(0)
    b_i = i_block * BLOCK + tl.arange(0, BLOCK)
    b_in = b_i < NUM_WORDS
    epoch = tl.load(p_epochs + i_block) + 1
    b_own = tl.load(p_x.to(tl.pointer_type(tl.int32)) + b_i, mask=b_in, other=0)
    _send(p_buffers, b_own, b_i, b_in, epoch, CAPACITY, RANK, RANKS)
    b_low = tl.zeros((BLOCK,), tl.float32)
    b_high = tl.zeros((BLOCK,), tl.float32)
    if p_residual is not None:
        p_words = p_residual.to(tl.pointer_type(tl.int32))
        b_words = tl.load(p_words + b_i, mask=b_in, other=0)
        b_low = _low(b_words, KIND)
        if KIND != 0:
            b_high = _high(b_words, KIND)
    for i in tl.static_range(RANKS):
        if i == RANK:
            b_words = b_own
        else:
            b_words = _receive(p_own, b_i, b_in, epoch, CAPACITY, i, RANKS)
        b_low += _low(b_words, KIND)
        if KIND != 0:
            b_high += _high(b_words, KIND)
    if KIND == 0:
        tl.store(p_out + b_i, b_low, mask=b_in)
    else:
        b_pair = tl.interleave(b_low, b_high)
        b_j = i_block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        tl.store(p_out + b_j, b_pair.to(p_out.dtype.element_ty), mask=b_j < 2 * NUM_WORDS)
    tl.store(p_epochs + i_block, epoch)


@direct
@triton.jit
def _gather_kernel(
    p_x, p_out, p_buffers, p_epochs, NUM_WORDS, WIDTH, COLUMNS, CAPACITY,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    p_own = tl.load(p_buffers + RANK).to(tl.pointer_type(tl.int64))
    begin(PDL)
    i_block = tl.program_id(0)
    b_i = i_block * BLOCK + tl.arange(0, BLOCK)
    b_in = b_i < NUM_WORDS
    epoch = tl.load(p_epochs + i_block) + 1
    b_own = tl.load(p_x.to(tl.pointer_type(tl.int32)) + b_i, mask=b_in, other=0)
    _send(p_buffers, b_own, b_i, b_in, epoch, CAPACITY, RANK, RANKS)
    b_row, b_column = b_i // WIDTH, b_i % WIDTH
    p_row = p_out + b_row.to(tl.int64) * COLUMNS
    for i in tl.static_range(RANKS):
        if i == RANK:
            b_words = b_own
        else:
            b_words = _receive(p_own, b_i, b_in, epoch, CAPACITY, i, RANKS)
        b_to = b_column + i * WIDTH
        b_value = b_words.to(tl.float32, bitcast=True)
        tl.store(p_row + b_to, b_value, mask=b_in & (b_to < COLUMNS))
    tl.store(p_epochs + i_block, epoch)


@direct
@triton.jit
def _large_sum_kernel(
    p_x, p_residual, p_out, p_buffers, p_epochs, NUM, HALF_BYTES,
    RANK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = p_x.dtype.element_ty
    p_own = tl.load(p_buffers + RANK)
    p_other = tl.load(p_buffers + 1 - RANK)
    begin(PDL)
    i_tile = tl.program_id(0)
    b_i = i_tile * TILE + tl.arange(0, TILE)
    b_in = b_i < NUM
    epoch = tl.load(p_epochs + i_tile) + 1
    half = (epoch & 1).to(tl.int64) * HALF_BYTES
    b_own = tl.load(p_x + b_i, mask=b_in, other=0.0)
    # Told to be aligned, else every element crosses the link alone.
    p_to = tl.multiple_of((p_other + half).to(tl.pointer_type(TYPE)), 16)
    tl.store(p_to + b_i, b_own, mask=b_in)
    tl.debug_barrier()
    p_flags = (p_other + 2 * HALF_BYTES).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(p_flags + i_tile, epoch, sem="release", scope="sys")
    b_sum = tl.zeros((TILE,), tl.float32)
    if p_residual is not None:
        b_sum = tl.load(p_residual + b_i, mask=b_in, other=0.0).to(tl.float32)
    p_flags = (p_own + 2 * HALF_BYTES).to(tl.pointer_type(tl.int32))
    there = tl.atomic_add(p_flags + i_tile, 0, sem="acquire", scope="sys")
    while there - epoch < 0:  # a difference, since numbers wrap around
        there = tl.atomic_add(p_flags + i_tile, 0, sem="acquire", scope="sys")
    # Past the first-level cache, which may hold what was there two exchanges ago.
    p_from = tl.multiple_of((p_own + half).to(tl.pointer_type(TYPE)), 16)
    b_got = tl.load(p_from + b_i, mask=b_in, other=0.0, cache_modifier=".cg")
    if RANK == 0:
        b_sum = b_sum + b_own.to(tl.float32) + b_got.to(tl.float32)
    else:
        b_sum = b_sum + b_got.to(tl.float32) + b_own.to(tl.float32)
    tl.store(p_out + b_i, b_sum.to(TYPE), mask=b_in)
    tl.store(p_epochs + i_tile, epoch)


class LargeBuffers:
    """One of two ranks' side of the memory that large sums go through."""

    def __init__(
        self, pointers: list[int], rank: int, half_bytes: int, device: torch.device
    ) -> None:
        """*pointers*: addresses of both ranks' buffers of ``large_bytes(half_bytes)``, zeroed."""
        assert len(pointers) == 2 and half_bytes % TILE_BYTES == 0
        self.rank = rank
        self.half_bytes = half_bytes
        self.pointers = torch.tensor(pointers, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(half_bytes // TILE_BYTES, dtype=torch.int32, device=device)


def large_bytes(half_bytes: int) -> int:
    """Return the bytes of a rank's buffer for large sums: two halves and their flags."""
    return 2 * half_bytes + half_bytes // TILE_BYTES * 4


class Buffers:
    """One rank's side of the memory that exchanges go through."""

    def __init__(self, pointers: list[int], rank: int, capacity: int, device: torch.device) -> None:
        """*pointers*: addresses of all ranks' buffers, zeroed; *capacity*: of each, in words."""
        assert capacity % BLOCK == 0
        self.rank = rank
        self.size = len(pointers)
        self.capacity = capacity
        self.pointers = torch.tensor(pointers, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(capacity // BLOCK, dtype=torch.int32, device=device)


def words(x: Tensor) -> int:
    """Return the words that *x* takes; it has an even number of 16-bit elements."""
    return x.numel() * x.element_size() // 4


def sum_ranks(
    x: Tensor, buffers: Buffers, *, out: Tensor, residual: Tensor | None = None, pdl: bool = False
) -> None:
    """Write the sum of all ranks' *x*, and of *residual*, to *out*, which may be one of the two.

    All are contiguous, of one shape and type (a key of KINDS). *pdl*: see ``zlm.kernels.chain``.
    """
    count = words(x)
    assert x.is_contiguous() and out.is_contiguous() and count <= buffers.capacity
    assert x.dtype == out.dtype and x.numel() * x.element_size() % 4 == 0
    assert residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)
    if not count:
        return
    _sum_kernel[(cdiv(count, BLOCK),)](
        x, residual, out, buffers.pointers, buffers.epochs, count, buffers.capacity,
        RANK=buffers.rank, RANKS=buffers.size, KIND=KINDS[x.dtype], BLOCK=BLOCK, PDL=pdl,
        num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip


def sum_two_ranks(
    x: Tensor,
    buffers: LargeBuffers,
    *,
    out: Tensor,
    residual: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Do as ``sum_ranks`` for tensors of any size, in pieces of what a buffer's half holds."""
    assert x.is_contiguous() and out.is_contiguous() and x.dtype == out.dtype
    assert residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)
    tile, most = TILE_BYTES // x.element_size(), buffers.half_bytes // x.element_size()
    for first in range(0, x.numel(), most):
        count = min(most, x.numel() - first)
        own, more, to = (
            None if each is None else each.view(-1)[first : first + count]
            for each in (x, residual, out)
        )
        _large_sum_kernel[(cdiv(count, tile),)](
            own, more, to, buffers.pointers, buffers.epochs, count, buffers.half_bytes,
            RANK=buffers.rank, TILE=tile, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
        )  # fmt: skip


def gather_ranks(x: Tensor, buffers: Buffers, *, out: Tensor, pdl: bool = False) -> None:
    """Write all ranks' *x* float32 [n, k] side by side to *out* [n, columns], as far as it goes."""
    rows, width = x.shape
    count, columns = words(x), out.shape[1]
    assert x.is_contiguous() and out.is_contiguous() and count <= buffers.capacity
    assert x.dtype == out.dtype == torch.float32 and out.shape[0] == rows
    assert columns <= width * buffers.size
    if not count:
        return
    _gather_kernel[(cdiv(count, BLOCK),)](
        x, out, buffers.pointers, buffers.epochs, count, width, columns, buffers.capacity,
        RANK=buffers.rank, RANKS=buffers.size, BLOCK=BLOCK, PDL=pdl,
        num_warps=WARPS, launch_pdl=pdl,
    )  # fmt: skip
