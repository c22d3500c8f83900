"""Sampling and step state at real sizes on the GPU, against the worker's sampler."""

import math

import pytest
import torch
from kernel_cases_sampling import MIXED, Batch, kept, make, pack_bits
from worker_steps import floats, ids

from zlm.messages import ROW_ALL_MASKED, ROW_NAN, ROW_OK
from zlm.worker import penalties

VOCABS = pytest.mark.parametrize("vocab", [32_001, 49_152, 151_936, 262_144])
EVERYTHING = {"min_p": True, "top_k": True, "top_p": True}


def draw(batch: Batch, rows: int | None = None, **flags):
    """Return tokens, status and scratch of the first *rows* rows."""
    from zlm.kernels import sampling, sampling_columns

    logits = batch.logits[:rows]
    count, vocab = logits.shape
    scratch = sampling_columns.allocate(count, vocab, "cuda")
    out = torch.full((count,), -1, dtype=torch.int32, device="cuda")
    status = torch.full((count,), 9, dtype=torch.uint8, device="cuda")
    sampling.sample(
        logits, sampling_columns.Columns(**batch.columns), batch.slots[:rows],
        batch.lengths[:rows], out=out, status=status, scratch=scratch, **flags,
    )  # fmt: skip
    return out, status, scratch


@VOCABS
def test_rows_draw_what_the_worker_draws(vocab: int) -> None:
    """All but at most one row of 96: two weights may be equal to the last bit of an exponential."""
    batch = make(MIXED * 8, vocab, "cuda", seed=vocab)
    tokens, status = batch.worker()
    got, got_status, _ = draw(batch, **EVERYTHING)
    assert not got_status.any() and not status.any()
    assert int((got != tokens).sum()) <= 1


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_a_row_does_not_depend_on_its_company(rows: int) -> None:
    batch = make(MIXED * 8, 151_936, "cuda")
    together, _, all_scratch = draw(batch, **EVERYTHING)
    alone, _, scratch = draw(batch, rows, **EVERYTHING)
    assert torch.equal(alone, together[:rows])
    assert torch.equal(scratch.cut, all_scratch.cut[:rows])
    assert torch.equal(scratch.key, all_scratch.key[:rows])


@VOCABS
def test_cuts_are_those_of_a_sort(vocab: int) -> None:
    specs = [spec for spec in MIXED if spec.get("temperature", 0.0) > 1e-3]
    specs = [spec for spec in specs if spec.get("top_k") != 1 and spec.get("top_p") != 0.0]
    batch = make(specs, vocab, "cuda", seed=1)
    _, _, scratch = draw(batch, **EVERYTHING)
    for row, spec in enumerate(specs):
        logits = batch.logits[row]
        limits = {"min_p": 0.0, "top_k": 0, "top_p": 1.0, **spec}
        got = (logits.max() - logits).view(torch.int32) <= scratch.cut[row]
        differ = got != kept(logits, **limits)
        mass = torch.softmax(logits.double() / spec["temperature"], -1)
        assert float(mass[differ].sum()) < 1e-5, (spec, int(differ.sum()))
        if limits["top_p"] == 1.0 and limits["min_p"] == 0.0:
            assert not differ.any()


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 40,000 seeds and 20 tokens of one row, cut and not."""
    probability = torch.softmax(torch.linspace(0.0, 3.0, 20, dtype=torch.float64), 0).cuda()
    for spec, alive in (({"temperature": 1.0}, 20), ({"temperature": 1.0, "top_k": 9}, 9)):
        batch = make([spec] * 40_000, 20, "cuda", seed=2)
        batch.logits[:] = probability.log().float()
        tokens, _, _ = draw(batch, **({"top_k": True} if "top_k" in spec else {}))
        seen = torch.bincount(tokens.long(), minlength=20).double()
        expected = probability.clone()
        expected[: 20 - alive] = 0
        expected *= 40_000 / expected.sum()
        assert not seen[: 20 - alive].any()
        part = slice(20 - alive, None)
        chi = float(((seen[part] - expected[part]) ** 2 / expected[part]).sum())
        assert chi < 3 * (alive - 1) + 10  # far beyond the 0.1 % level for 8 and for 19


def test_broken_rows_are_told_apart() -> None:
    specs = [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}]
    batch = make([spec for spec in specs for _ in range(4)], 49_152, "cuda")
    for first in range(0, 12, 4):
        batch.logits[first, 40_000] = math.nan
        batch.logits[first + 1, 3] = math.inf
        batch.logits[first + 2] = -math.inf
    for flags in ({}, EVERYTHING):
        got, status, _ = draw(batch, **flags)
        assert status.tolist() == [ROW_NAN, ROW_NAN, ROW_ALL_MASKED, ROW_OK] * 3
        assert not got.view(3, 4)[:, :3].any()


def test_penalties_mask_and_edits_are_the_workers() -> None:
    from zlm.kernels import sampling_adjust, sampling_edit

    specs = [
        {"repetition_penalty": 1.7, "bias_ids": ids([3, 9]), "bias_values": floats([2.5, -100.0])},
        {"presence_penalty": 0.5, "frequency_penalty": 0.8, "repetition_penalty": 0.7},
        {"min_tokens": 60, "banned_until_min": ids([7, 8])},
        {},
    ] * 16
    batch = make(specs, 49_152, "cuda")
    rows, slots = batch.rows, batch.rows.slots
    assert rows.repetition is not None and rows.output_penalty is not None
    assert rows.bias is not None and rows.early_ends is not None
    wanted = batch.logits.clone()
    penalties.repetition(wanted, rows.repetition, batch.tokens, slots, batch.lengths)
    penalties.output_penalties(wanted, rows.output_penalty, batch.tokens, slots, batch.lengths)
    allowed = torch.rand(64, 49_152, device="cuda") < 0.5
    wanted.masked_fill_(~allowed, -math.inf)
    penalties.bias(wanted, rows.bias)
    penalties.ban_early_ends(wanted, rows.early_ends, batch.lengths)

    count_rows = torch.arange(64, dtype=torch.int32, device="cuda")
    counts = torch.full((64, 49_152), 5, dtype=torch.int32, device="cuda")
    sampling_adjust.recount(
        counts, count_rows[slots], batch.slots, batch.num_prompt[slots], batch.lengths,
        batch.tokens,
    )  # fmt: skip
    got = batch.logits
    sampling_adjust.adjust(
        got, out=got, slots=batch.slots, **batch.penalties, count_rows=count_rows, counts=counts,
        mask_rows=torch.arange(64, dtype=torch.int32, device="cuda"), mask=pack_bits(allowed),
    )  # fmt: skip
    sampling_edit.add_bias(got, rows.bias.rows.int(), rows.bias.ids.int(), rows.bias.values)
    early = rows.early_ends
    sampling_edit.ban_early_ends(
        got, early.rows.int(), early.ids.int(), early.values.int(), batch.lengths
    )
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@VOCABS
@pytest.mark.parametrize("most", [0, 1, 20])
def test_logprobs_of_the_raw_distribution(vocab: int, most: int) -> None:
    from zlm.kernels import sampling_logprobs

    batch = make([{}] * 8, vocab, "cuda", seed=most)
    batch.logits[1, 3:] = -math.inf
    batch.logits[2] = batch.logits[2].round()
    chosen = batch.logits.argsort(descending=True)[:, 17].int()
    rows = torch.arange(8, dtype=torch.int32, device="cuda")
    scratch = sampling_logprobs.allocate(8, vocab, most, "cuda")
    own, ranks = torch.full((8,), 7.0, device="cuda"), torch.zeros_like(rows)
    top_ids = torch.full((8, most), -7, dtype=torch.int32, device="cuda")
    top_values = torch.full((8, most), 7.0, device="cuda")
    sampling_logprobs.top_logprobs(
        batch.logits, rows, chosen, own=own, ranks=ranks, top_ids=top_ids, top_values=top_values,
        scratch=scratch,
    )  # fmt: skip
    wanted = sampling_logprobs.reference(batch.logits, chosen, most)
    torch.testing.assert_close(own.double(), wanted[0], rtol=1e-5, atol=1e-4)
    assert ranks.tolist() == wanted[1].tolist()
    assert top_ids.tolist() == wanted[2].tolist()
    torch.testing.assert_close(top_values.double(), wanted[3], rtol=1e-5, atol=1e-4)
