"""Drawing one token a row: greedy, or by temperature and an exponential race, cut or not.

    logits → (adjust, edit: sampling_adjust, sampling_edit) → [peaks → cut: sampling_cut]
           → race over chunks of the vocabulary → settle a row → token, status

A row is split into fixed chunks of ``CHUNK`` ids, one program each, whatever the batch: so a batch
of one keeps many SMs busy, and what a row draws does not depend, bit for bit, on its neighbours.
Every chunk reports its largest logit (lowest id of equals) and the winner of its race,

    key = (logit - chunk's largest) / temperature - log(E),      E of (seed, position, id)

and ``settle`` brings the keys of a row to one scale and takes the best. Relative to the chunk's
largest no precision is lost at small temperatures, and no earlier pass has to find the row's. It
also puts the token where the next step finds it: into the slot's row of the token table, and into
the counts that penalties read.

Owns nothing: parameters are columns by slot, scratch is the caller's (see sampling_columns).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels import sampling_cut
from zlm.kernels.chain import begin
from zlm.kernels.launch import direct, power_of_two
from zlm.kernels.sampling_columns import CHUNK, Columns, Scratch, num_chunks
from zlm.kernels.sampling_rng import exponential, row_key

GREEDY_BELOW = tl.constexpr(1e-5)  # as in zlm.sampling_params
ROW_OK = tl.constexpr(0)  # the statuses are those of zlm.messages
ROW_NAN = tl.constexpr(1)
ROW_ALL_MASKED = tl.constexpr(2)
NO_ID = tl.constexpr(2147483647)
INFINITY = tl.constexpr(float("inf"))


def reference(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    exponentials: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [R] and status uint8 [R]: the meaning of ``sample``, in float64.

    Parameters are given by row, [R]; ``exponentials`` [R, V] are the variates of the race.
    """
    wide = logits.double()
    peak = wide.amax(-1)
    scaled = (wide - peak[:, None]) / temperature.double().clamp(min=1e-5)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    weights = ordered.exp()
    stays = weights >= min_p.double()[:, None]
    kth = ordered.gather(1, (top_k.long() - 1).clamp(min=0, max=wide.shape[1] - 1)[:, None])
    stays &= (top_k[:, None] <= 0) | (ordered >= kth)
    weights = weights * stays
    before = weights.cumsum(-1) - weights
    inside = stays & (before < top_p.double()[:, None] * weights.sum(-1, keepdim=True))
    last = ordered.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
    weights = weights * ((top_p[:, None] >= 1.0) | (ordered >= last))
    raced = torch.zeros_like(wide).scatter_(1, order, weights) / exponentials.double()
    first = (wide == peak[:, None]).int().argmax(-1)
    tokens = torch.where(temperature < GREEDY_BELOW.value, first, raced.argmax(-1))
    status = torch.where(peak == -torch.inf, ROW_ALL_MASKED.value, ROW_OK.value)
    status = torch.where(peak.isnan() | (peak == torch.inf), ROW_NAN.value, status)
    return tokens.masked_fill(status != ROW_OK.value, 0), status.to(torch.uint8)


@direct
@triton.jit
def _race_kernel(
    p_logits, p_slots, p_positions, p_seeds, p_temperature, p_row_peak, p_cut,
    p_peak, p_peak_id, p_key, p_key_id, stride, vocab, chunks,
    RACE: tl.constexpr, CUT: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row, i_chunk = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    b_id = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_in = b_id < vocab
    p_row = p_logits + i_row.to(tl.int64) * stride
    b_logit = tl.load(p_row + b_id, mask=b_in, other=-INFINITY).to(tl.float32)
    peak = tl.max(b_logit)
    peak_id = tl.min(tl.where(b_in & (b_logit == peak), b_id, NO_ID))
    broken = tl.max((b_logit != b_logit).to(tl.int32))
    i_out = i_row * chunks + i_chunk
    tl.store(p_peak + i_out, tl.where(broken != 0, float("nan"), peak))
    tl.store(p_peak_id + i_out, peak_id)
    if RACE:
        slot = tl.load(p_slots + i_row).to(tl.int64)
        temperature = tl.load(p_temperature + slot)
        key = tl.full([], float("-inf"), tl.float32)
        key_id = tl.full([], 2147483647, tl.int32)
        if temperature >= GREEDY_BELOW:
            low, high = row_key(tl.load(p_seeds + slot), tl.load(p_positions + i_row))
            b_stay = b_in & (b_logit > -INFINITY)
            if CUT:
                b_far = (tl.load(p_row_peak + i_row) - b_logit).to(tl.int32, bitcast=True)
                b_stay = b_stay & (b_far <= tl.load(p_cut + i_row))
            scale = 1.0 / temperature
            b_key = (b_logit - peak) * scale - tl.log(exponential(b_id, low, high))
            b_key = tl.where(b_stay & (b_key == b_key), b_key, -INFINITY)
            key = tl.max(b_key)
            key_id = tl.min(tl.where(b_stay & (b_key == key), b_id, NO_ID))
        tl.store(p_key + i_out, key)
        tl.store(p_key_id + i_out, key_id)


@direct
@triton.jit
def _settle_kernel(
    p_slots, p_positions, p_temperature, p_peak, p_peak_id, p_key, p_key_id, p_token, p_status,
    p_table, p_count_rows, p_counts, chunks, table_stride, width, dummy_slot, count_stride,
    STORE: tl.constexpr, COUNT: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    begin(PDL)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    b_chunk = tl.arange(0, CHUNKS)
    b_in = b_chunk < chunks
    p_at = i_row * chunks + b_chunk
    b_peak = tl.load(p_peak + p_at, mask=b_in, other=-INFINITY)
    broken = tl.max((b_peak != b_peak).to(tl.int32))
    peak = tl.max(tl.where(b_peak == b_peak, b_peak, -INFINITY))
    b_peak_id = tl.load(p_peak_id + p_at, mask=b_in, other=NO_ID)
    token = tl.min(tl.where(b_peak == peak, b_peak_id, NO_ID))
    temperature = tl.load(p_temperature + slot)
    if temperature >= GREEDY_BELOW:
        b_key = tl.load(p_key + p_at, mask=b_in, other=-INFINITY)
        b_key_id = tl.load(p_key_id + p_at, mask=b_in, other=NO_ID)
        b_key = b_key + (b_peak - peak) * (1.0 / temperature)
        b_key = tl.where(b_key == b_key, b_key, -INFINITY)
        key = tl.max(b_key)
        token = tl.min(tl.where(b_key == key, b_key_id, NO_ID))
    bad = (broken != 0) | (peak == INFINITY)
    status = tl.where(bad, ROW_NAN, tl.where(peak == -INFINITY, ROW_ALL_MASKED, ROW_OK))
    token = tl.where(status == ROW_OK, token, 0)
    tl.store(p_token + i_row, token)
    tl.store(p_status + i_row, status.to(tl.uint8))
    if STORE:
        position = tl.load(p_positions + i_row).to(tl.int64)
        fits = (slot != dummy_slot) & (position >= 0) & (position < width)
        tl.store(p_table + slot * table_stride + position, token, mask=fits)
    if COUNT:
        count_row = tl.load(p_count_rows + slot).to(tl.int64)
        if count_row >= 0:
            p_count = p_counts + count_row * count_stride + token
            tl.store(p_count, tl.load(p_count) + 1)


def sample(
    logits: Tensor,
    columns: Columns,
    slots: Tensor,
    positions: Tensor,
    *,
    out: Tensor,
    status: Tensor,
    scratch: Scratch,
    tokens: Tensor | None = None,
    count_rows: Tensor | None = None,
    counts: Tensor | None = None,
    min_p: bool = False,
    top_k: bool = False,
    top_p: bool = False,
    pdl: bool = False,
) -> None:
    """Draw one token for each of the R rows of *logits* [R, V] (any float type; left alone).

    ``slots`` and ``positions`` integers [R]: whose parameters a row has, and the position of the
    token it draws. ``out`` int32 or int64 [R] and ``status`` uint8 [R] are written for every row:
    ROW_NAN where a logit is NaN or +inf, ROW_ALL_MASKED where all are -inf (token 0 for both).
    *min_p*, *top_k*, *top_p* say whether a row may use them: a launch without them does not look.

    *tokens* int32 [slots, L] is the token table: each token is also put at its slot and position,
    if that is inside. The last slot is the dummy of padding rows, to which nothing is written.
    *counts* (see sampling_adjust): slots with a row of it, by ``count_rows``, count their token.
    *pdl*: see ``zlm.kernels.chain``.
    """
    num_rows, vocab_size = logits.shape
    chunks = num_chunks(vocab_size)
    assert logits.stride(1) == 1 and num_rows <= scratch.peak.shape[0]
    assert chunks == scratch.peak.shape[1], "scratch is of another vocabulary"
    cut = min_p or top_k or top_p
    grid = (num_rows, chunks)
    arguments = (
        logits, slots, positions, columns.seeds, columns.temperature, scratch.row_peak, scratch.cut,
        scratch.peak, scratch.peak_id, scratch.key, scratch.key_id,
        logits.stride(0), vocab_size, chunks,
    )  # fmt: skip
    options = {"CHUNK": CHUNK, "PDL": pdl, "num_warps": 8, "launch_pdl": pdl}
    if cut:
        _race_kernel[grid](*arguments, RACE=False, CUT=False, **options)
        sampling_cut.cut(logits, columns, slots, scratch, top_k=top_k, top_p=top_p, pdl=pdl)
    _race_kernel[grid](*arguments, RACE=True, CUT=cut, **options)
    _settle_kernel[(num_rows,)](
        slots, positions, columns.temperature, scratch.peak, scratch.peak_id, scratch.key,
        scratch.key_id, out, status, tokens, count_rows, counts, chunks,
        0 if tokens is None else tokens.stride(0), 0 if tokens is None else tokens.shape[1],
        0 if tokens is None else tokens.shape[0] - 1, 0 if counts is None else counts.stride(0),
        STORE=tokens is not None, COUNT=counts is not None,
        CHUNKS=power_of_two(chunks), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
