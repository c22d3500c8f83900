"""Changes to single logits: biases, ends that come too early, bad words.

Client lists are ragged, so they are flat entries, each with its row of the step. Arrays have a
capacity and a row of -1 is an empty entry, so a launch has the same grid whatever is asked for.
All edits are in place on float32 logits, after ``sampling_adjust``; their meaning is that of
``bias``, ``ban_early_ends`` and ``ban_words`` in ``zlm.worker.penalties``. NaN stays NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.launch import cdiv, direct

BLOCK = 128
INFINITY = tl.constexpr(float("inf"))


def reference(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return logits [R, V] with ``values`` (a ban is -inf) added at entries of rows >= 0."""
    out = logits.double()
    real = rows >= 0
    where = (rows[real].long(), ids[real].long())
    return out.index_put(where, values[real].double(), accumulate=True)


@direct
@triton.jit(do_not_specialize=["entries"])
def _bias_kernel(p_logits, p_rows, p_ids, p_values, stride, entries, BLOCK: tl.constexpr):
    b_entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_entry < entries
    b_row = tl.load(p_rows + b_entry, mask=b_in, other=-1).to(tl.int64)
    b_id = tl.load(p_ids + b_entry, mask=b_in, other=0)
    b_value = tl.load(p_values + b_entry, mask=b_in, other=0.0)
    tl.atomic_add(p_logits + b_row * stride + b_id, b_value, mask=b_row >= 0)


@direct
@triton.jit(do_not_specialize=["entries"])
def _early_kernel(
    p_logits, p_rows, p_ids, p_until, p_lengths, stride, entries, BLOCK: tl.constexpr
):
    b_entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_in = b_entry < entries
    b_row = tl.load(p_rows + b_entry, mask=b_in, other=-1).to(tl.int64)
    b_in = b_in & (b_row >= 0)
    b_until = tl.load(p_until + b_entry, mask=b_in, other=0)
    b_in = b_in & (tl.load(p_lengths + b_row, mask=b_in, other=0) < b_until)
    p_at = p_logits + b_row * stride + tl.load(p_ids + b_entry, mask=b_in, other=0)
    b_old = tl.load(p_at, mask=b_in, other=0.0)
    tl.store(p_at, b_old - INFINITY, mask=b_in & (b_old < INFINITY))


@direct
@triton.jit
def _words_kernel(
    p_logits, p_rows, p_starts, p_ids, p_slots, p_num_prompt, p_lengths, p_tokens, stride,
    token_stride,
):  # fmt: skip
    i_word = tl.program_id(0)
    row = tl.load(p_rows + i_word).to(tl.int64)
    if row >= 0:
        start = tl.load(p_starts + i_word)
        before = tl.load(p_starts + i_word + 1) - start - 1
        slot = tl.load(p_slots + row).to(tl.int64)
        first = tl.load(p_lengths + row).to(tl.int32) - before
        banned = (before >= 0) & (first >= tl.load(p_num_prompt + slot))
        matches = tl.where(banned, 1, 0)
        i = 0
        while i < before:
            inside = first + i >= 0
            token = tl.load(p_tokens + slot * token_stride + first + i, mask=inside, other=-1)
            matches = tl.where(token == tl.load(p_ids + start + i), matches, 0)
            i += 1
        if matches != 0:
            p_at = p_logits + row * stride + tl.load(p_ids + start + before)
            old = tl.load(p_at)
            if old < INFINITY:
                tl.store(p_at, old - INFINITY)


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add ``values`` float32 [E] to the logits of ``ids`` in ``rows`` (int32 [E], -1: empty)."""
    _check(logits)
    entries = rows.shape[0]
    if not entries:
        return
    _bias_kernel[(cdiv(entries, BLOCK),)](
        logits, rows, ids, values, logits.stride(0), entries, BLOCK=BLOCK, num_warps=4
    )


def ban_early_ends(
    logits: Tensor, rows: Tensor, ids: Tensor, until: Tensor, lengths: Tensor
) -> None:
    """Mask entries' ids while their row is shorter than ``until`` tokens (prompt included).

    ``rows``, ``ids``, ``until`` int32 [E], row -1: empty; ``lengths`` integers [R] by row.
    """
    _check(logits)
    entries = rows.shape[0]
    if not entries:
        return
    _early_kernel[(cdiv(entries, BLOCK),)](
        logits, rows, ids, until, lengths, logits.stride(0), entries, BLOCK=BLOCK, num_warps=4
    )


def ban_words(
    logits: Tensor,
    rows: Tensor,
    starts: Tensor,
    ids: Tensor,
    slots: Tensor,
    num_prompt: Tensor,
    lengths: Tensor,
    tokens: Tensor,
) -> None:
    """Mask the last id of each word whose other ids end the output of its row.

    ``rows`` int32 [W] (-1: empty); word w is ``ids[starts[w]:starts[w + 1]]``, int32. ``slots`` and
    ``lengths`` are integers [R] by row; ``num_prompt`` integers [slots]; ``tokens`` int32
    [slots, L].
    """
    _check(logits)
    if not rows.shape[0]:
        return
    _words_kernel[(rows.shape[0],)](
        logits, rows, starts, ids, slots, num_prompt, lengths, tokens,
        logits.stride(0), tokens.stride(0), num_warps=1,
    )  # fmt: skip


def _check(logits: Tensor) -> None:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "edits need float32 rows"
