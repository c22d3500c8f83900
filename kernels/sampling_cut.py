"""Where a row is cut by min_p, top_k and top_p, without sorting it: a search over thresholds.

The cut of a row is a distance from its largest logit: ids no farther than it may be drawn, all
equals of the last one too. A distance is a float32 of at least 0, and the bits of such a number,
read as an integer, keep its order; so the search runs over integers and ends at the exact value.

    base   min_p: all within -temperature * log(min_p); without it, every finite logit
    top_k  the smallest n so that at least k ids are within n           (of those within base)
    top_p  the smallest n so that their mass is at least top_p * total  (of those left by top_k)

Both searches keep a bracket (lo, hi]: not enough within lo, enough within hi. A pass tries PIVOTS
thresholds that split the bracket evenly: every chunk of the row (one program each) reports count
and mass within each, and the next pass begins by adding up the reports and narrowing the bracket,
each program for itself and all alike. 31 bits at 4 bits a pass are 8 passes; a row whose bracket
holds a single id (its cut anywhere in there means the same) is done, usually after 3 or 4, and
costs nothing more. Passes alternate between two halves of the scratch, as programs of one pass read
what the pass before wrote.

    state[half, row] = lo, hi, count within lo, 1 while searching
"""

import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import direct, power_of_two
from zlm.kernels.sampling_columns import CHUNK, PIVOTS, Columns, Scratch, num_chunks

PASSES = 8  # ceil(31 bits / log2(PIVOTS)), with the rounding up of every step counted in
GREEDY_BELOW = tl.constexpr(1e-5)
FARTHEST = tl.constexpr(0x7F7FFFFF)  # bits of the largest finite float32


@direct
@triton.jit
def _base_kernel(
    p_slots, p_temperature, p_min_p, p_peak, p_row_peak, p_cut, chunks,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find a row's largest logit from its chunks', and the cut that min_p makes."""
    i_row = tl.program_id(0)
    begin(PDL)
    b_chunk = tl.arange(0, CHUNKS)
    p_at = p_peak + i_row * chunks + b_chunk
    b_peak = tl.load(p_at, mask=b_chunk < chunks, other=float("-inf"))
    tl.store(p_row_peak + i_row, tl.max(tl.where(b_peak == b_peak, b_peak, float("-inf"))))
    slot = tl.load(p_slots + i_row).to(tl.int64)
    min_p = tl.load(p_min_p + slot)
    cut = tl.full([], 0x7F7FFFFF, tl.int32)
    if min_p > 0.0:
        # Rounding must not lose the best token (min_p 1: -log is 0, or just below it).
        distance = tl.maximum(-tl.log(min_p) * tl.load(p_temperature + slot), 0.0) + 0.0
        cut = tl.minimum(distance.to(tl.int32, bitcast=True), FARTHEST)
    tl.store(p_cut + i_row, cut)


@triton.jit
def _pivots(lo, hi, PIVOTS: tl.constexpr):
    """Return PIVOTS thresholds in (lo, hi], rising, the last of them hi."""
    step = (hi - lo - 1) // PIVOTS + 1
    return tl.minimum(hi - lo, step * (tl.arange(0, PIVOTS) + 1)) + lo


@triton.jit
def _at(b_values, index, PIVOTS: tl.constexpr):
    """Return element *index* of a block, 0 for -1."""
    return tl.sum(tl.where(tl.arange(0, PIVOTS) == index, b_values, 0))


@triton.jit
def _narrow(
    i_row, lo, hi, below, wanted, share, target, p_counts, p_masses, chunks,
    MASS: tl.constexpr, FIRST: tl.constexpr, PIVOTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add up the reports on a bracket; return the narrower one, its target, and 1 if unsettled."""
    b_chunk, b_pivot = tl.arange(0, CHUNKS), tl.arange(0, PIVOTS)
    p_at = (i_row * chunks + b_chunk[:, None]) * PIVOTS + b_pivot[None, :]
    b_in = (b_chunk < chunks)[:, None] & (b_pivot >= 0)[None, :]
    b_count = tl.sum(tl.load(p_counts + p_at, mask=b_in, other=0), axis=0)
    b_threshold = _pivots(lo, hi, PIVOTS)
    if MASS:
        b_mass = tl.sum(tl.load(p_masses + p_at, mask=b_in, other=0.0), axis=0)
        if FIRST:
            target = share * _at(b_mass, PIVOTS - 1, PIVOTS)
        b_enough = b_mass >= target
    else:
        b_enough = b_count >= wanted
    first = tl.min(tl.where(b_enough, b_pivot, PIVOTS - 1))  # hi is enough by definition
    below = tl.where(first > 0, _at(b_count, first - 1, PIVOTS), below)
    lo = tl.where(first > 0, _at(b_threshold, first - 1, PIVOTS), lo)
    hi = _at(b_threshold, first, PIVOTS)
    within = _at(b_count, first, PIVOTS)
    return lo, hi, below, target, ((hi - lo > 1) & (within - below > 1)).to(tl.int32)


@direct
@triton.jit
def _pass_kernel(
    p_logits, p_slots, p_temperature, p_limit, p_row_peak, p_cut,
    p_state, p_target, p_counts, p_masses, p_next_state, p_next_target, p_next_counts,
    p_next_masses, stride, vocab, chunks,
    MASS: tl.constexpr, PASS: tl.constexpr, PIVOTS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Narrow by the last pass's reports (PASS > 0), then report on new thresholds.

    ``p_limit``: top_k (int32) or, with MASS, top_p (float32), by slot. PASS is 0, 1, or 2 for all
    later ones.
    """
    i_row, i_chunk = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    temperature = tl.load(p_temperature + slot)
    limit = tl.load(p_limit + slot)
    p_next = p_next_state + i_row * 4
    target = tl.full([], 0.0, tl.float32)
    if PASS == 0:
        lo, hi = tl.full([], -1, tl.int32), tl.load(p_cut + i_row)
        below = tl.full([], 0, tl.int32)
        active = ((limit < 1.0) if MASS else (limit > 0)) & (temperature >= GREEDY_BELOW)
        active = active.to(tl.int32)
    else:
        p_last = p_state + i_row * 4
        lo, hi, below = tl.load(p_last), tl.load(p_last + 1), tl.load(p_last + 2)
        active = tl.load(p_last + 3)
        if PASS > 1:
            target = tl.load(p_target + i_row)
        if active != 0:
            lo, hi, below, target, active = _narrow(
                i_row, lo, hi, below, limit, limit, target, p_counts, p_masses, chunks,
                MASS, PASS == 1, PIVOTS, CHUNKS,
            )  # fmt: skip
    if i_chunk == 0:
        tl.store(p_next, lo)
        tl.store(p_next + 1, hi)
        tl.store(p_next + 2, below)
        tl.store(p_next + 3, active)
        tl.store(p_next_target + i_row, target)
    if active != 0:
        b_threshold = _pivots(lo, hi, PIVOTS)
        peak = tl.load(p_row_peak + i_row)
        scale = -1.0 / temperature
        p_row = p_logits + i_row.to(tl.int64) * stride
        b_count = tl.zeros([PIVOTS], tl.int32)
        b_mass = tl.zeros([PIVOTS], tl.float32)
        for start in range(0, CHUNK, PART):
            b_id = i_chunk * CHUNK + start + tl.arange(0, PART)
            b_logit = tl.load(p_row + b_id, mask=b_id < vocab, other=float("-inf")).to(tl.float32)
            b_far = peak - b_logit
            b_within = b_far.to(tl.int32, bitcast=True)[None, :] <= b_threshold[:, None]
            b_count += tl.sum(b_within.to(tl.int32), axis=1)
            if MASS:
                b_weight = tl.exp(b_far * scale)
                b_mass += tl.sum(tl.where(b_within, b_weight[None, :], 0.0), axis=1)
        p_at = (i_row * chunks + i_chunk) * PIVOTS + tl.arange(0, PIVOTS)
        tl.store(p_next_counts + p_at, b_count)
        if MASS:
            tl.store(p_next_masses + p_at, b_mass)


@direct
@triton.jit
def _finish_kernel(
    p_slots, p_limit, p_cut, p_state, p_target, p_counts, p_masses, chunks,
    MASS: tl.constexpr, PIVOTS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Narrow for the last time and write the cut."""
    i_row = tl.program_id(0)
    begin(PDL)
    p_last = p_state + i_row * 4
    lo, hi, below = tl.load(p_last), tl.load(p_last + 1), tl.load(p_last + 2)
    if tl.load(p_last + 3) != 0:
        limit = tl.load(p_limit + tl.load(p_slots + i_row).to(tl.int64))
        target = tl.load(p_target + i_row)
        lo, hi, below, target, _ = _narrow(
            i_row, lo, hi, below, limit, limit, target, p_counts, p_masses, chunks,
            MASS, False, PIVOTS, CHUNKS,
        )  # fmt: skip
    tl.store(p_cut + i_row, hi)


def cut(
    logits: Tensor,
    columns: Columns,
    slots: Tensor,
    scratch: Scratch,
    *,
    top_k: bool,
    top_p: bool,
    pdl: bool = False,
) -> None:
    """Write ``scratch.row_peak`` and ``scratch.cut`` of every row, from ``scratch.peak``.

    Arguments are those of ``sampling.sample``; the flags say which limits some row has. A row of
    temperature 0 keeps all that min_p leaves: it does not race. *pdl*: see ``zlm.kernels.chain``.
    """
    num_rows, vocab_size = logits.shape
    chunks = num_chunks(vocab_size)
    padded = power_of_two(chunks)
    _base_kernel[(num_rows,)](
        slots, columns.temperature, columns.min_p, scratch.peak, scratch.row_peak, scratch.cut,
        chunks, CHUNKS=padded, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    for wanted, mass, limit in ((top_k, False, columns.top_k), (top_p, True, columns.top_p)):
        if not wanted:
            continue
        for number in range(PASSES):
            last, following = (number + 1) % 2, number % 2
            _pass_kernel[(num_rows, chunks)](
                logits, slots, columns.temperature, limit, scratch.row_peak, scratch.cut,
                scratch.state[last], scratch.target[last],
                scratch.counts[last], scratch.masses[last],
                scratch.state[following], scratch.target[following],
                scratch.counts[following], scratch.masses[following],
                logits.stride(0), vocab_size, chunks,
                MASS=mass, PASS=min(number, 2), PIVOTS=PIVOTS, CHUNKS=padded,
                CHUNK=CHUNK, PART=min(512, CHUNK), PDL=pdl, num_warps=4, launch_pdl=pdl,
            )  # fmt: skip
        last = (PASSES - 1) % 2
        _finish_kernel[(num_rows,)](
            slots, limit, scratch.cut, scratch.state[last], scratch.target[last],
            scratch.counts[last], scratch.masses[last], chunks,
            MASS=mass, PIVOTS=PIVOTS, CHUNKS=padded, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
