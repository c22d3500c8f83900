"""From logits to tokens: every sampling parameter, in one order, batched over the rows of a step.

Order (each step only for the rows that ask for it): log-probabilities are taken of the raw logits;
then penalties (repetition, presence and frequency), bias, allowed ids, bad words, ends that come
too early, masks of grammars; then greedy rows take the best token (the lowest id of equals) and the
others divide by their temperature, cut by min_p, top_k and top_p, and race (see
``zlm.worker.rng``).

A row that cannot be sampled is reported by its status and gets token 0; its neighbours go on. The
sampler owns nothing: the token table and the selection of parameters belong to the slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zlm.messages import ROW_ALL_MASKED, ROW_NAN, ROW_OK, LogprobColumns
from zlm.worker import logprobs, nucleus, penalties, rng
from zlm.worker.sampling_table import RandomRows, SamplingRows
from zlm.worker.token_masks import MaskedRows

BLOCK_ELEMENTS = 2**21  # logits handled at once when drawing: 8 MB, so that scratch is reused


@dataclass(frozen=True, slots=True)
class Sampled:
    """Outcome of n rows: ``tokens`` int64 [n]; ``status`` uint8 [n] or None when all are fine."""

    tokens: Tensor
    status: Tensor | None
    logprobs: LogprobColumns | None


def sample(
    logits: Tensor,
    rows: SamplingRows,
    lengths: Tensor,
    tokens: Tensor,
    masked: MaskedRows | None = None,
) -> Sampled:
    """Draw one token a row. Uses up *logits*, float32 [n, V].

    ``lengths`` int64 [n] is how many tokens each row has, which is the position of the drawn one;
    ``tokens`` int32 [slots, length] is the table with row r's tokens at ``rows.slots[r]``. Rows in
    *masked* follow a grammar.
    """
    reported = rows.reported
    raw = None
    if reported is not None:
        raw = torch.log_softmax(logits.index_select(0, reported.rows), dim=-1)
    broken = None if rows.untouched else _adjust(logits, rows, lengths, tokens)
    if masked is not None:
        broken = _keep(logits, masked.rows, masked.allowed, broken)
    chosen, values = _choose(logits, rows.random, lengths)
    fine = values.isfinite()
    if broken is not None:
        fine &= ~broken
    status = None
    if not fine.all():
        empty = (values == -torch.inf) if broken is None else (values == -torch.inf) & ~broken
        status = torch.full_like(chosen, ROW_NAN, dtype=torch.uint8)
        status[empty] = ROW_ALL_MASKED
        status[fine] = ROW_OK
        chosen = chosen.masked_fill(~fine, 0)
    columns = None
    if raw is not None and reported is not None:
        columns = logprobs.columns(
            raw, chosen[reported.rows], reported.rows, reported.counts, reported.most
        )
    return Sampled(chosen, status, columns)


def _adjust(logits: Tensor, rows: SamplingRows, lengths: Tensor, tokens: Tensor) -> Tensor | None:
    """Apply everything that changes logits; return the rows it would hide NaN of, bool [n]."""
    broken = None
    if rows.repetition is not None:
        penalties.repetition(logits, rows.repetition, tokens, rows.slots, lengths)
    if rows.output_penalty is not None:
        penalties.output_penalties(logits, rows.output_penalty, tokens, rows.slots, lengths)
    if rows.bias is not None:
        penalties.bias(logits, rows.bias)
    if rows.allowed is not None:
        broken = _keep(logits, rows.allowed.rows, rows.allowed.mask, broken)
    if rows.bad_words is not None:
        penalties.ban_words(logits, rows.bad_words, tokens, rows.slots, lengths)
    if rows.early_ends is not None:
        penalties.ban_early_ends(logits, rows.early_ends, lengths)
    return broken


def _keep(logits: Tensor, rows: Tensor, allowed: Tensor, broken: Tensor | None) -> Tensor:
    """Mask what is not *allowed*, bool [k, V], in *rows*; add those it hides NaN of to *broken*."""
    own = logits.index_select(0, rows)
    if broken is None:
        broken = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    broken[rows] |= own.amax(-1).isnan()
    logits[rows] = own.masked_fill_(~allowed, -torch.inf)
    return broken


def _choose(logits: Tensor, random: RandomRows | None, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's token, int64 [n], and its largest logit, float32 [n] (NaN if any is)."""
    if random is None:
        return best(logits)
    keys = rng.row_keys(random.seeds, lengths if random.rows is None else lengths[random.rows])
    if random.rows is None:
        return _draw(logits, random, keys)
    chosen, values = best(logits)
    drawn, _ = _draw(logits.index_select(0, random.rows), random, keys)
    chosen[random.rows] = drawn
    return chosen, values


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id (lowest of equals), int64 [n], and value of each row's largest logit.

    A NaN counts as the largest. On a CPU numpy finds it 10 times faster than torch 2.13 does.
    """
    if logits.device.type == "cpu":
        ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
    else:
        ids = logits.argmax(-1)
    return ids, logits.gather(1, ids[:, None]).squeeze(1)


def _draw(logits: Tensor, random: RandomRows, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Draw for all rows of *logits* [k, V], which it uses up; also return their largest logits."""
    peaks = logits.amax(-1)
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    every_id = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    rows_a_block = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for which in random.plain.split(rows_a_block) if random.plain.numel() else ():
        weights = _scaled(logits, peaks, random, which).exp_()
        if random.any_min_p:
            weights.masked_fill_(weights < random.min_p[which, None], 0.0)
        weights /= rng.exponentials(keys[which], every_id)
        drawn[which] = best(weights)[0]
    for which in random.cut.split(rows_a_block) if random.cut.numel() else ():
        scaled = _scaled(logits, peaks, random, which)
        drawn[which] = nucleus.draw(scaled, keys[which], random, which)
    return drawn, peaks


def _scaled(logits: Tensor, peaks: Tensor, random: RandomRows, which: Tensor) -> Tensor:
    """Return (logits - largest) / temperature of rows *which*: at most 0, so no overflow."""
    scaled = logits.index_select(0, which)
    scaled -= peaks[which, None]
    scaled /= random.temperature[which, None]
    return scaled
