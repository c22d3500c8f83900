"""The ends of a decode step: its inputs out of the slots' tables, its tokens back into them.

    slots [R] → gather → token_ids, positions, seq_lens, slot_mapping → model → sample
              → scatter → tokens, lengths (and counts of penalised rows)

With both in its CUDA graph a step needs nothing from the host but which slots run: the next step
finds its tokens where this one put them.

    tokens int32 [slots, L]     prompt and output ids of a slot, ``lengths`` of them known
    lengths int32 [slots]       the newest known token stands at lengths - 1: a decode computes it
    blocks int32 [slots, B]     one table a KV group: block of tokens i * block_size and on

Padding rows have the *dummy slot*: one more slot, whose length stays 1 and whose blocks are the
null block. They compute on its token 0 and write nothing back. Several KV groups are several calls
of ``map_slots``. ``gather_ragged`` is the same for steps with prefill, whose rows the host gives.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def reference(
    slots: Tensor, tokens: Tensor, lengths: Tensor, blocks: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token_ids, positions, seq_lens and slot_mapping of a decode step, int64 [R]."""
    slots = slots.long()
    seq_lens = lengths[slots].long()
    positions = seq_lens - 1
    block = blocks[slots, positions // block_size].long()
    return (
        tokens[slots, positions].long(),
        positions,
        seq_lens,
        block * block_size + positions % block_size,
    )


@triton.jit
def _gather_kernel(
    p_slots, p_tokens, p_lengths, p_ids, p_positions, p_seq_lens, token_stride, rows, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_row < rows
    b_slot = tl.load(p_slots + b_row, mask=b_in, other=0).to(tl.int64)
    b_length = tl.load(p_lengths + b_slot, mask=b_in, other=1)
    b_position = tl.minimum(tl.maximum(b_length - 1, 0), width - 1)
    b_token = tl.load(p_tokens + b_slot * token_stride + b_position, mask=b_in, other=0)
    tl.store(p_ids + b_row, b_token, mask=b_in)
    tl.store(p_positions + b_row, b_position, mask=b_in)
    tl.store(p_seq_lens + b_row, b_position + 1, mask=b_in)


@triton.jit
def _map_kernel(
    p_slots, p_positions, p_blocks, p_mapping, block_stride, count, block_size, BLOCK: tl.constexpr
):
    b_at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_at < count
    b_slot = tl.load(p_slots + b_at, mask=b_in, other=0).to(tl.int64)
    b_position = tl.load(p_positions + b_at, mask=b_in, other=0).to(tl.int32)
    p_block = p_blocks + b_slot * block_stride + b_position // block_size
    b_block = tl.load(p_block, mask=b_in, other=0).to(tl.int64)
    tl.store(p_mapping + b_at, b_block * block_size + b_position % block_size, mask=b_in)


@triton.jit
def _table_kernel(
    p_slots, p_seq_lens, p_blocks, p_out, block_stride, out_stride, width, block_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    needed = (tl.load(p_seq_lens + i_row).to(tl.int32) + block_size - 1) // block_size
    b_at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_in = (b_at < needed) & (b_at < width)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    b_block = tl.load(p_blocks + slot * block_stride + b_at, mask=b_in, other=0)
    tl.store(p_out + i_row.to(tl.int64) * out_stride + b_at, b_block, mask=b_at < width)


@triton.jit
def _ragged_kernel(
    p_slots, p_starts, p_query_starts, p_tokens, p_ids, p_positions, p_token_slots, p_seq_lens,
    token_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    first = tl.load(p_query_starts + i_row).to(tl.int32)
    count = tl.load(p_query_starts + i_row + 1).to(tl.int32) - first
    start = tl.load(p_starts + i_row).to(tl.int32)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    b_at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_at < count
    b_token = tl.load(p_tokens + slot * token_stride + start + b_at, mask=b_in, other=0)
    tl.store(p_ids + first + b_at, b_token, mask=b_in)
    tl.store(p_positions + first + b_at, start + b_at, mask=b_in)
    tl.store(p_token_slots + first + b_at, tl.zeros([BLOCK], tl.int32) + slot, mask=b_in)
    if tl.program_id(1) == 0:
        tl.store(p_seq_lens + i_row, start + count)


@triton.jit
def _scatter_kernel(
    p_slots, p_sampled, p_lengths, p_tokens, p_count_rows, p_counts, token_stride, count_stride,
    rows, width, dummy_slot, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_slot = tl.load(p_slots + b_row, mask=b_row < rows, other=0).to(tl.int64)
    b_in = (b_row < rows) & (b_slot != dummy_slot)
    b_length = tl.load(p_lengths + b_slot, mask=b_in, other=0)
    b_in = b_in & (b_length < width)
    b_token = tl.load(p_sampled + b_row, mask=b_in, other=0).to(tl.int32)
    tl.store(p_tokens + b_slot * token_stride + b_length, b_token, mask=b_in)
    tl.store(p_lengths + b_slot, b_length + 1, mask=b_in)
    if COUNT:
        b_count_row = tl.load(p_count_rows + b_slot, mask=b_in, other=-1).to(tl.int64)
        b_in = b_in & (b_count_row >= 0)
        p_count = p_counts + b_count_row * count_stride + b_token
        tl.store(p_count, tl.load(p_count, mask=b_in, other=0) + 1, mask=b_in)


def gather(
    slots: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> None:
    """Write the inputs of a decode step of R rows, in *slots* (integers [R]).

    ``token_ids``, ``positions`` and ``seq_lens`` are int32 or int64 [R]. A length of 0 reads as 1.
    """
    rows = slots.shape[0]
    _gather_kernel[(triton.cdiv(rows, BLOCK),)](
        slots, tokens, lengths, token_ids, positions, seq_lens,
        tokens.stride(0), rows, tokens.shape[1], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def map_slots(
    slots: Tensor, positions: Tensor, blocks: Tensor, block_size: int, *, slot_mapping: Tensor
) -> None:
    """Write where T tokens' keys and values go in one KV group: int32 or int64 [T].

    ``slots`` and ``positions`` integers [T], a token each; ``blocks`` int32 [slots, B].
    """
    count = slots.shape[0]
    _map_kernel[(triton.cdiv(count, BLOCK),)](
        slots, positions, blocks, slot_mapping, blocks.stride(0), count, block_size,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def gather_blocks(
    slots: Tensor, seq_lens: Tensor, blocks: Tensor, block_size: int, *, out: Tensor
) -> None:
    """Copy the rows *slots* of *blocks* to ``out`` int32 [R, B'], for attention by row of the step.

    Entries past a row's ``seq_lens`` (integers [R]) become the null block. B' may be less than B.
    """
    rows, width = out.shape
    assert width <= blocks.shape[1]
    _table_kernel[(rows, triton.cdiv(width, BLOCK))](
        slots, seq_lens, blocks, out, blocks.stride(0), out.stride(0), width, block_size,
        BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip


def gather_ragged(
    slots: Tensor,
    starts: Tensor,
    query_starts: Tensor,
    tokens: Tensor,
    *,
    most: int,
    token_ids: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    seq_lens: Tensor,
) -> None:
    """Write the inputs of a step with prefill: R rows, T tokens in all, *most* in the longest.

    ``slots``, ``starts`` (first position) integers [R], ``query_starts`` integers [R + 1].
    ``token_ids``, ``positions``, ``token_slots`` (each token's slot, for ``map_slots``) are
    integers [T], ``seq_lens`` integers [R].
    """
    rows = slots.shape[0]
    _ragged_kernel[(rows, triton.cdiv(most, BLOCK))](
        slots, starts, query_starts, tokens, token_ids, positions, token_slots, seq_lens,
        tokens.stride(0), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def scatter(
    slots: Tensor,
    sampled: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    dummy_slot: int,
    count_rows: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Append the tokens *sampled* (integers [R]) to their slots, which must differ but for dummies.

    A full row of ``tokens`` takes no more. With *counts* (see sampling_adjust) penalised slots
    count their token.
    """
    rows = slots.shape[0]
    _scatter_kernel[(triton.cdiv(rows, BLOCK),)](
        slots, sampled, lengths, tokens, count_rows, counts, tokens.stride(0),
        0 if counts is None else counts.stride(0), rows, tokens.shape[1], dummy_slot,
        COUNT=counts is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
