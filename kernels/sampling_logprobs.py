"""Log-probabilities of the raw distribution: of a chosen token, its rank, and of the likeliest.

Two launches: every chunk of a row (as in ``sampling``) reports its largest logit, the sum of
exponentials relative to that, how many logits exceed the chosen one, and its own best ids; then one
program a row puts them together. They read logits as the model made them: a step that adjusts rows
which report must adjust into a copy. What is impossible, or not a number, is -9999.0, as in
``zlm.worker.logprobs``; among equals the lowest id comes first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.launch import direct, power_of_two
from zlm.kernels.sampling_columns import CHUNK, num_chunks

IMPOSSIBLE = tl.constexpr(-9999.0)
INFINITY = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(2147483647)
MOST = 32  # alternatives; requests for more go the way of torch.topk


@dataclass(frozen=True, slots=True)
class Scratch:
    """Working memory for up to R reporting rows of C chunks, N alternatives (a power of two)."""

    peak: Tensor  # float32 [R, C]
    total: Tensor  # float32 [R, C]
    above: Tensor  # int32 [R, C]
    values: Tensor  # float32 [R, C, N]
    ids: Tensor  # int32 [R, C, N]


def allocate(num_rows: int, vocab_size: int, most: int, device: torch.device | str) -> Scratch:
    """Return scratch for up to *most* alternatives (at most ``MOST``)."""
    assert most <= MOST
    chunks, size = num_chunks(vocab_size), power_of_two(max(most, 1))
    return Scratch(
        peak=torch.zeros(num_rows, chunks, device=device),
        total=torch.zeros(num_rows, chunks, device=device),
        above=torch.zeros(num_rows, chunks, dtype=torch.int32, device=device),
        values=torch.zeros(num_rows, chunks, size, device=device),
        ids=torch.zeros(num_rows, chunks, size, dtype=torch.int32, device=device),
    )


def reference(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return own log-probability [R], rank [R], the likeliest ids and values [R, most]."""
    raw = torch.log_softmax(logits.double(), -1)
    raw = raw.nan_to_num(nan=-9999.0, posinf=-9999.0, neginf=-9999.0).clamp(min=-9999.0)
    own = raw.gather(1, chosen.long()[:, None])
    values, ids = raw.sort(dim=-1, descending=True, stable=True)
    return own.squeeze(1), (raw > own).sum(-1) + 1, ids[:, :most], values[:, :most]


@direct
@triton.jit
def _chunk_kernel(
    p_logits, p_rows, p_chosen, p_peak, p_total, p_above, p_values, p_ids, stride, vocab, chunks,
    SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    i_entry, i_chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(p_rows + i_entry).to(tl.int64)
    if row >= 0:
        b_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
        b_in = b_id < vocab
        p_row = p_logits + row * stride
        b_logit = tl.load(p_row + b_id, mask=b_in, other=-INFINITY).to(tl.float32)
        own = tl.load(p_row + tl.load(p_chosen + row)).to(tl.float32)
        broken = tl.max((b_logit != b_logit).to(tl.int32)) != 0
        peak = tl.max(tl.where(b_logit == b_logit, b_logit, -INFINITY))
        b_weight = tl.exp(b_logit - tl.where(peak > -INFINITY, peak, 0.0))
        i_out = i_entry * chunks + i_chunk
        tl.store(p_peak + i_out, tl.where(broken, float("nan"), peak))
        tl.store(p_total + i_out, tl.sum(tl.where(b_in, b_weight, 0.0)))
        tl.store(p_above + i_out, tl.sum((b_in & (b_logit > own)).to(tl.int32)))
        # Ids are struck out one by one, so that equals, and -inf, come in their order.
        b_left = b_in
        for i in range(SIZE):
            b_value = tl.where(b_left & (b_logit == b_logit), b_logit, -INFINITY)
            best = tl.max(b_value)
            best_id = tl.min(tl.where(b_left & (b_value == best), b_id, NO_ID))
            tl.store(p_values + i_out * SIZE + i, best)
            tl.store(p_ids + i_out * SIZE + i, best_id)
            b_left = b_left & (b_id != best_id)


@direct
@triton.jit(do_not_specialize=["most", "out_stride"])
def _merge_kernel(
    p_logits, p_rows, p_chosen, p_peak, p_total, p_above, p_values, p_ids,
    p_own, p_rank, p_top_ids, p_top_values, stride, chunks, most, out_stride,
    SIZE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    i_entry = tl.program_id(0)
    row = tl.load(p_rows + i_entry).to(tl.int64)
    if row >= 0:
        b_chunk = tl.arange(0, CHUNKS)
        b_in = b_chunk < chunks
        p_at = i_entry * chunks + b_chunk
        b_peak = tl.load(p_peak + p_at, mask=b_in, other=-INFINITY)
        b_total = tl.load(p_total + p_at, mask=b_in, other=0.0)
        broken = tl.max((b_peak != b_peak).to(tl.int32)) != 0
        peak = tl.max(tl.where(b_peak == b_peak, b_peak, -INFINITY))
        broken = broken | (peak == INFINITY) | (peak == -INFINITY)
        total = tl.sum(tl.where(b_peak > -INFINITY, b_total * tl.exp(b_peak - peak), 0.0))
        norm = peak + tl.log(total)
        own = tl.load(p_logits + row * stride + tl.load(p_chosen + row)).to(tl.float32) - norm
        own = tl.where(broken | (own != own), IMPOSSIBLE, tl.maximum(own, IMPOSSIBLE))
        above = tl.sum(tl.load(p_above + p_at, mask=b_in, other=0))
        tl.store(p_own + i_entry, own)
        tl.store(p_rank + i_entry, tl.where(broken, 0, above) + 1)
        b_place = tl.arange(0, SIZE)
        p_all = (i_entry * chunks + b_chunk[:, None]) * SIZE + b_place[None, :]
        b_given = b_in[:, None] & (b_place < most)[None, :]
        b_value = tl.load(p_values + p_all, mask=b_given, other=-INFINITY)
        b_id = tl.load(p_ids + p_all, mask=b_given, other=NO_ID)
        b_left = b_given & (b_id != NO_ID)
        for i in range(SIZE):
            best = tl.max(tl.where(b_left, b_value, -INFINITY))
            b_best = b_left & (b_value == best)
            best_id = tl.min(tl.where(b_best, b_id, NO_ID))
            value = tl.where(broken, IMPOSSIBLE, tl.maximum(best - norm, IMPOSSIBLE))
            tl.store(p_top_values + i_entry * out_stride + i, value, mask=i < most)
            tl.store(p_top_ids + i_entry * out_stride + i, tl.where(broken, i, best_id), i < most)
            b_left = b_left & (b_id != best_id)


def top_logprobs(
    logits: Tensor,
    rows: Tensor,
    chosen: Tensor,
    *,
    own: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_values: Tensor,
    scratch: Scratch,
) -> None:
    """Describe the tokens ``chosen`` (integers [R]) of *logits* [R, V] under the raw distribution.

    ``rows`` int32 [E] are the rows that report, -1: an empty entry, which is left alone. ``own``
    float32 [E], ``ranks`` int32 [E] (from 1) and, with n <= min(MOST, V) alternatives, ``top_ids``
    int32 [E, n], ``top_values`` float32 [E, n], falling, are written.
    """
    vocab_size, entries, most = logits.shape[1], rows.shape[0], top_ids.shape[1]
    chunks, size = num_chunks(vocab_size), scratch.values.shape[2]
    assert logits.stride(1) == 1 and top_ids.stride() == top_values.stride()
    assert most <= min(size, vocab_size) and scratch.peak.shape[0] >= entries
    partial = (scratch.peak, scratch.total, scratch.above, scratch.values, scratch.ids)
    _chunk_kernel[(entries, chunks)](
        logits, rows, chosen, *partial, logits.stride(0), vocab_size, chunks,
        SIZE=size, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _merge_kernel[(entries,)](
        logits, rows, chosen, *partial, own, ranks, top_ids, top_values,
        logits.stride(0), chunks, most, top_ids.stride(0),
        SIZE=size, CHUNKS=power_of_two(chunks), num_warps=4,
    )  # fmt: skip
