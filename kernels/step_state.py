"""The beginning of a step: what the model reads, out of the slots' tables.

    slots, starts, query_starts → prepare → token_ids, positions, seq_lens, slot_mapping
    slots, seq_lens → gather_blocks → block tables by row of the step

A row of the step is a slot and the tokens it computes; the host gives nothing else. The tokens
themselves stand in the table, where the step before put them (``zlm.kernels.sampling`` does), so a
step can be sent before its input is known.

    tokens int32 [slots, L]        prompt and output ids of a slot
    blocks int32 [G, slots, B]     a table a KV group: block of tokens i * block_size and on

Padding rows have the *dummy slot*: one more slot, whose blocks are the null block and whose tokens
are zeros. They compute, and what they would store goes to the null block, where nothing is kept.

A steady decode needs nothing from the host at all: ``prepare`` can *advance* the starts that it
read, so that the next step of the same rows finds its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct

BLOCK = 128


def reference(
    slots: Tensor,
    starts: Tensor,
    query_starts: Tensor,
    tokens: Tensor,
    blocks: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token_ids [T], positions [T], seq_lens [R] and slot_mapping [G, T], all int64."""
    counts = query_starts.diff().long()
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(row)) - query_starts[:-1].long()[row]
    positions = (starts.long()[row] + place).clamp(max=tokens.shape[1] - 1)
    slot = slots.long()[row]
    block = blocks[:, slot, positions // block_size].long()
    mapping = block * block_size + positions % block_size
    return tokens[slot, positions].long(), positions, starts.long() + counts, mapping


@direct
@triton.jit
def _prepare_kernel(
    p_slots, p_starts, p_query_starts, p_tokens, p_blocks, p_ids, p_positions, p_seq_lens,
    p_mapping, token_stride, group_stride, block_stride, mapping_stride, width,
    dummy_slot, ADVANCE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    begin(PDL)
    first = tl.load(p_query_starts + i_row).to(tl.int32)
    count = tl.load(p_query_starts + i_row + 1).to(tl.int32) - first
    start = tl.load(p_starts + i_row).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(p_seq_lens + i_row, start + count)
    if tl.program_id(1) * BLOCK < count:
        slot = tl.load(p_slots + i_row).to(tl.int64)
        b_at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        b_in = b_at < count
        b_position = tl.minimum(start + b_at, width - 1)
        b_token = tl.load(p_tokens + slot * token_stride + b_position, mask=b_in, other=0)
        tl.store(p_ids + first + b_at, b_token, mask=b_in)
        tl.store(p_positions + first + b_at, b_position, mask=b_in)
        for i_group in tl.static_range(GROUPS):
            p_table = p_blocks + i_group * group_stride + slot * block_stride
            b_block = tl.load(p_table + b_position // BLOCK_SIZE, mask=b_in, other=0).to(tl.int64)
            b_place = b_block * BLOCK_SIZE + b_position % BLOCK_SIZE
            tl.store(p_mapping + i_group * mapping_stride + first + b_at, b_place, mask=b_in)
        if ADVANCE:
            tl.store(p_starts + i_row, start + count, mask=slot != dummy_slot)


@direct
@triton.jit
def _gather_blocks_kernel(
    p_slots, p_seq_lens, p_blocks, p_out, group_stride, block_stride, out_group_stride, out_stride,
    width, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_group = tl.program_id(0), tl.program_id(2).to(tl.int64)
    begin(PDL)
    needed = (tl.load(p_seq_lens + i_row).to(tl.int32) + BLOCK_SIZE - 1) // BLOCK_SIZE
    needed = tl.minimum(needed, width)
    # A program's part of the row is written whole: a tile of attention may look past the end.
    if tl.program_id(1) * BLOCK < needed + BLOCK:
        b_at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(p_slots + i_row).to(tl.int64)
        p_table = p_blocks + i_group * group_stride + slot * block_stride
        b_block = tl.load(p_table + b_at, mask=b_at < needed, other=0)
        p_row = p_out + i_group * out_group_stride + i_row.to(tl.int64) * out_stride
        tl.store(p_row + b_at, b_block, mask=b_at < width)


@direct
@triton.jit(do_not_specialize=["count"])
def _write_kernel(p_entries, p_blocks, count, BLOCK: tl.constexpr):
    b_at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_at < count
    b_place = tl.load(p_entries + 2 * b_at, mask=b_in, other=0).to(tl.int64)
    b_block = tl.load(p_entries + 2 * b_at + 1, mask=b_in, other=0)
    tl.store(p_blocks + b_place, b_block, mask=b_in)


def prepare(
    slots: Tensor,
    starts: Tensor,
    query_starts: Tensor,
    tokens: Tensor,
    blocks: Tensor,
    *,
    block_size: int,
    most: int,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    advance: bool = False,
    pdl: bool = False,
) -> None:
    """Write what a model reads of a step of R rows and T tokens, at most *most* in a row.

    ``slots``, ``starts`` (first position): integers [R]; ``query_starts``: integers [R + 1],
    offsets of the rows in T. ``token_ids``, ``positions``: integers [T]; ``seq_lens``: integers
    [R]; ``slot_mapping``: int64 [G, T], block * block_size + offset. Positions past the table's end
    stay at its last place (only padding rows have such). *advance*, for rows of one token: let
    ``starts`` be the next step's, but for rows of the dummy slot, the last one. *pdl*: see
    ``zlm.kernels.chain``.
    """
    rows, groups = slots.shape[0], blocks.shape[0]
    assert slot_mapping.shape[0] == groups and slot_mapping.stride(1) == 1
    assert most == 1 or not advance
    _prepare_kernel[(rows, cdiv(most, BLOCK))](
        slots, starts, query_starts, tokens, blocks, token_ids, positions, seq_lens, slot_mapping,
        tokens.stride(0), blocks.stride(0), blocks.stride(1), slot_mapping.stride(0),
        tokens.shape[1], tokens.shape[0] - 1, ADVANCE=advance, GROUPS=groups,
        BLOCK_SIZE=block_size, BLOCK=BLOCK, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def gather_blocks(
    slots: Tensor,
    seq_lens: Tensor,
    blocks: Tensor,
    block_size: int,
    *,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Copy the rows *slots* of *blocks* to ``out`` int32 [G, R, B], for attention by row.

    Of the entries past a row's ``seq_lens`` (integers [R]) the first ``BLOCK`` become the null
    block; what stands further on is not looked at. *pdl*: see ``zlm.kernels.chain``.
    """
    groups, rows, width = out.shape
    assert blocks.shape[0] == groups and blocks.shape[2] == width
    _gather_blocks_kernel[(rows, cdiv(width, BLOCK), groups)](
        slots, seq_lens, blocks, out, blocks.stride(0), blocks.stride(1),
        out.stride(0), out.stride(1), width, BLOCK_SIZE=block_size, BLOCK=BLOCK, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def write_blocks(entries: Tensor, blocks: Tensor) -> None:
    """Put blocks into their tables: *entries* int32 [n, 2], each (flat place in *blocks*, block).

    No place may come twice. *blocks* is contiguous.
    """
    count = entries.shape[0]
    assert blocks.is_contiguous() and entries.is_contiguous()
    _write_kernel[(cdiv(count, BLOCK),)](entries, blocks, count, BLOCK=BLOCK, num_warps=1)
