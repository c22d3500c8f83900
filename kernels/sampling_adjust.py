"""Penalties and masks over whole rows of logits, in one pass, and the counts that they read.

``counts`` int32 [P, V] holds, for the P rows that have a penalty, how often each id stands in the
output (low bits) and whether it stands in the prompt (``IN_PROMPT``). A slot finds its row of it
through ``count_rows`` int32 [slots], -1: no penalty; whoever allocates it deals the rows out.
``recount`` makes a row anew when a sequence joins; ``sampling.sample`` counts the tokens it draws.

Order, as in ``zlm.worker.penalties``: repetition, then presence and frequency, then the mask (bias
comes between in the worker; on finite values a mask commutes with it). A NaN stays a NaN, so that
its row is reported and not hidden, and what is infinite is not made finite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.launch import cdiv, direct

BLOCK = 2048
IN_PROMPT = tl.constexpr(1 << 30)
LARGEST = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


def reference(
    logits: Tensor,
    counts: Tensor | None,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    allowed: Tensor | None,
) -> Tensor:
    """Return adjusted logits [R, V]; counts int32 [R, V], parameters [R], allowed bool [R, V]."""
    wide = logits.double()
    if counts is not None:
        output = (counts & (IN_PROMPT.value - 1)).double()
        factor = repetition.double()[:, None]
        penalised = torch.where(wide > 0, wide / factor, wide * factor)
        penalised = penalised.clamp(-LARGEST.value, LARGEST.value)
        wide = torch.where((counts != 0) & ~wide.isinf(), penalised, wide)
        wide = wide - presence.double()[:, None] * (output > 0)
        wide = wide - frequency.double()[:, None] * output
    if allowed is not None:
        wide = torch.where(allowed | wide.isnan(), wide, -torch.inf)
    return wide


@direct
@triton.jit
def _adjust_kernel(
    p_logits, p_out, p_slots, p_repetition, p_presence, p_frequency, p_count_rows, p_counts,
    p_mask_rows, p_mask, stride, out_stride, count_stride, mask_stride, vocab,
    PENALTIES: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    b_id = i_block * BLOCK + tl.arange(0, BLOCK)
    b_in = b_id < vocab
    i_wide = i_row.to(tl.int64)
    b_logit = tl.load(p_logits + i_wide * stride + b_id, mask=b_in, other=0.0).to(tl.float32)
    b_value = b_logit
    if PENALTIES:
        slot = tl.load(p_slots + i_row).to(tl.int64)
        count_row = tl.load(p_count_rows + slot).to(tl.int64)
        if count_row >= 0:
            p_count = p_counts + count_row * count_stride
            b_count = tl.load(p_count + b_id, mask=b_in, other=0)
            factor = tl.load(p_repetition + slot)
            b_smaller = tl.maximum(b_value * factor, -LARGEST)
            b_larger = tl.minimum(b_value / factor, LARGEST)
            b_penalised = tl.where(b_value > 0.0, b_larger, b_smaller)
            b_value = tl.where((b_count != 0) & (tl.abs(b_value) < INFINITY), b_penalised, b_value)
            b_output = b_count & (IN_PROMPT - 1)
            b_value -= tl.where(b_output > 0, tl.load(p_presence + slot), 0.0)
            b_value -= tl.load(p_frequency + slot) * b_output.to(tl.float32)
    if MASK:
        mask_row = tl.load(p_mask_rows + i_row).to(tl.int64)
        if mask_row >= 0:
            p_word = p_mask + mask_row * mask_stride + b_id // 32
            b_bit = (tl.load(p_word, mask=b_in, other=0) >> (b_id % 32)) & 1
            b_value = tl.where(b_bit != 0, b_value, float("-inf"))
    b_value = tl.where(b_logit == b_logit, b_value, b_logit)
    tl.store(p_out + i_wide * out_stride + b_id, b_value, mask=b_in)


@direct
@triton.jit
def _clear_kernel(p_rows, p_counts, count_stride, vocab, BLOCK: tl.constexpr):
    row = tl.load(p_rows + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        b_id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        b_zero = tl.zeros([BLOCK], tl.int32)
        tl.store(p_counts + row * count_stride + b_id, b_zero, mask=b_id < vocab)


@direct
@triton.jit
def _count_kernel(
    p_rows, p_slots, p_num_prompt, p_lengths, p_tokens, p_counts, token_stride, count_stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    row = tl.load(p_rows + i_row).to(tl.int64)
    b_place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_in = (b_place < tl.load(p_lengths + i_row)) & (row >= 0)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    b_token = tl.load(p_tokens + slot * token_stride + b_place, mask=b_in, other=0)
    b_in = b_in & (b_token >= 0) & (b_token < vocab)
    b_prompt = b_place < tl.load(p_num_prompt + i_row)
    p_count = p_counts + row * count_stride + b_token
    tl.atomic_or(p_count, tl.full([BLOCK], IN_PROMPT, tl.int32), mask=b_in & b_prompt)
    tl.atomic_add(p_count, tl.full([BLOCK], 1, tl.int32), mask=b_in & (b_place >= 0) & ~b_prompt)


def recount(
    counts: Tensor,
    rows: Tensor,
    slots: Tensor,
    num_prompt: Tensor,
    lengths: Tensor,
    tokens: Tensor,
) -> None:
    """Make ``rows`` of *counts* anew from the token table, for J sequences that join.

    All integers [J]: ``rows`` of counts (-1: skip), ``slots``, ``num_prompt`` and ``lengths`` in
    tokens; ``tokens`` int32 [slots, L]. Every place of L is looked at: not for a decode step.
    """
    num_joins, vocab_size = rows.shape[0], counts.shape[1]
    grid = (num_joins, cdiv(vocab_size, BLOCK))
    _clear_kernel[grid](rows, counts, counts.stride(0), vocab_size, BLOCK=BLOCK, num_warps=4)
    _count_kernel[(num_joins, cdiv(tokens.shape[1], BLOCK))](
        rows, slots, num_prompt, lengths, tokens, counts,
        tokens.stride(0), counts.stride(0), vocab_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def adjust(
    logits: Tensor,
    *,
    out: Tensor,
    slots: Tensor,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
    count_rows: Tensor | None = None,
    counts: Tensor | None = None,
    mask_rows: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Write adjusted *logits* [R, V] to *out* float32 [R, V], which may be *logits* itself.

    Penalties are done if *counts* is given: float32 columns by slot, and ``count_rows`` (above).
    The mask is done if *mask* is given: int32 [M, ceil(V / 32)], bit i % 32 of word i // 32 is
    whether id i is allowed; ``mask_rows`` int32 [R] says which of its rows a row has, -1: none.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and out.stride(1) == 1 and out.shape == logits.shape
    assert counts is not None or mask is not None, "nothing to adjust"
    _adjust_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
        logits, out, slots, repetition, presence, frequency, count_rows, counts, mask_rows, mask,
        logits.stride(0), out.stride(0),
        0 if counts is None else counts.stride(0), 0 if mask is None else mask.stride(0),
        vocab_size,
        PENALTIES=counts is not None, MASK=mask is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
