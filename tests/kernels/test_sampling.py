"""The sampling kernels in Triton's interpreter, against the worker's sampler."""

import math

import pytest
import torch
import triton_interpreter
from kernel_cases_sampling import MIXED, Batch, kept, make, pack_bits
from worker_steps import floats, ids

triton_interpreter.enable()

from zlm.kernels import (  # noqa: E402
    sampling,
    sampling_adjust,
    sampling_columns,
    sampling_cut,
    sampling_edit,
    sampling_logprobs,
)

from zlm.messages import ROW_ALL_MASKED, ROW_NAN, ROW_OK  # noqa: E402
from zlm.worker import penalties, rng  # noqa: E402

CHUNK = 512  # smaller than the kernels' own, so that the interpreter is quick
VOCAB = CHUNK + 176  # two chunks, the second one part
EVERYTHING = {"min_p": True, "top_k": True, "top_p": True}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling, sampling_columns, sampling_cut, sampling_logprobs):
        monkeypatch.setattr(module, "CHUNK", CHUNK)


def draw(batch: Batch, logits: torch.Tensor | None = None, **flags):
    """Return tokens, status and the scratch of a call."""
    logits = batch.logits if logits is None else logits
    rows = len(logits)
    scratch = sampling_columns.allocate(rows + 1, logits.shape[1], "cpu")
    out = torch.full((rows,), -1, dtype=torch.int32)
    status = torch.full((rows,), 9, dtype=torch.uint8)
    columns = sampling_columns.Columns(**batch.columns)
    sampling.sample(
        logits,
        columns,
        batch.slots,
        batch.lengths,
        out=out,
        status=status,
        scratch=scratch,
        **flags,
    )
    return out, status, scratch


# ------------------------------------------------------------------------------------ drawing


def test_rows_draw_what_the_worker_draws() -> None:
    batch = make(MIXED, VOCAB)
    untouched = batch.logits.clone()
    tokens, status = batch.worker()
    got, got_status, _ = draw(batch, **EVERYTHING)
    assert got.tolist() == tokens.tolist()
    assert got_status.tolist() == status.tolist() == [ROW_OK] * len(MIXED)
    assert torch.equal(batch.logits, untouched)


def test_the_reference_draws_what_the_worker_draws() -> None:
    batch = make(MIXED, VOCAB, seed=3)
    by_row = {name: values[batch.slots.long()] for name, values in batch.columns.items()}
    every = torch.arange(VOCAB, dtype=torch.int32)[None]
    variates = rng.exponentials(rng.row_keys(by_row.pop("seeds"), batch.lengths), every)
    tokens, status = sampling.reference(batch.logits, **by_row, exponentials=variates)
    assert tokens.tolist() == batch.worker()[0].tolist()
    assert not status.any()


def test_variates_are_the_workers() -> None:
    """Over equal logits the race is the variates' alone; small vocabularies are padded."""
    batch = make([{"temperature": 1.0}] * 40, 50, spread=0.0)
    got, _, scratch = draw(batch)
    keys = rng.row_keys(batch.columns["seeds"][batch.slots.long()], batch.lengths)
    variates = rng.exponentials(keys, torch.arange(50, dtype=torch.int32)[None])
    assert got.tolist() == variates.argmin(-1).tolist()
    best = -variates.amin(-1).log()
    torch.testing.assert_close(scratch.key[:40, 0], best, rtol=1e-5, atol=1e-6)


def test_greedy_takes_the_lowest_of_equals() -> None:
    batch = make([{}] * 4, VOCAB)
    batch.logits[0, [7, 600, 640]] = 50.0
    batch.logits[1, [513, 515]] = 50.0
    batch.logits[2] = 1.0
    batch.logits[3, VOCAB - 1] = 50.0
    assert draw(batch)[0].tolist() == [7, 513, 0, VOCAB - 1]
    assert draw(batch, **EVERYTHING)[0].tolist() == [7, 513, 0, VOCAB - 1]


def test_a_row_does_not_depend_on_its_company() -> None:
    batch = make(MIXED[1:4], VOCAB)
    _, _, together = draw(batch, **EVERYTHING)
    for row in range(3):
        lengths, slots = batch.lengths[row : row + 1], batch.slots[row : row + 1]
        one = Batch(
            batch.logits[row : row + 1], slots, lengths, batch.tokens, batch.num_prompt,
            batch.columns, batch.penalties, batch.rows,
        )  # fmt: skip
        _, _, alone = draw(one, **EVERYTHING)
        assert torch.equal(alone.key[0], together.key[row])
        assert alone.cut[0] == together.cut[row]


@pytest.mark.parametrize(
    "spec",
    [
        {"temperature": 1.0, "top_k": 3}, {"temperature": 0.3, "top_k": VOCAB - 1},
        {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.5, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.99999}, {"temperature": 2.0, "min_p": 0.1, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.5, "top_k": 500},
        {"temperature": 1.0, "top_k": 100, "top_p": 0.7},
    ],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()),
)  # fmt: skip
def test_cuts_are_those_of_a_sort(spec: dict) -> None:
    """Also with ties on the cut, a nearly flat row, and all but three ids masked."""
    batch = make([spec] * 3, VOCAB)
    batch.logits[0] = batch.logits[0].round()
    batch.logits[1] *= 1e-3
    batch.logits[2, 3:] = -math.inf
    _, _, scratch = draw(batch, **EVERYTHING)
    limits = {"min_p": 0.0, "top_k": 0, "top_p": 1.0, **spec}
    for row, logits in enumerate(batch.logits):
        far = (logits.max() - logits).view(torch.int32)
        got, wanted = far <= scratch.cut[row], kept(logits, **limits)
        differ = int((got != wanted).sum())
        ties = int((logits == logits[wanted].min()).sum())
        assert differ <= (ties if limits["top_p"] < 1.0 else 0), (row, differ)
        if limits["top_p"] < 1.0 and differ:  # sums of float32: at most a value beside the cut
            mass = torch.softmax(logits.double() / spec["temperature"], -1)
            assert float(mass[got != wanted].sum()) < 1e-3


def test_broken_rows_are_told_apart() -> None:
    specs = [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}]
    batch = make([spec for spec in specs for _ in range(4)], VOCAB)
    for first in range(0, 12, 4):
        batch.logits[first, 600] = math.nan
        batch.logits[first + 1, 3] = math.inf
        batch.logits[first + 2] = -math.inf
    tokens, status = batch.worker()
    got, got_status, _ = draw(batch, **EVERYTHING)
    assert got_status.tolist() == status.tolist() == [ROW_NAN, ROW_NAN, ROW_ALL_MASKED, ROW_OK] * 3
    assert got.tolist() == tokens.tolist()


def test_a_lone_candidate_is_drawn_whatever_its_variate() -> None:
    """Seed 49,257,534 gives id 299 the largest variate there is at position 20."""
    batch = make([{"temperature": 1.0}] * 2, 300)
    batch.logits[:] = -math.inf
    batch.logits[:, 299] = -5.0
    batch.columns["seeds"][:] = 49_257_534
    batch.lengths[:] = torch.tensor([20, 21])
    keys = rng.row_keys(batch.columns["seeds"], batch.lengths)
    variates = rng.exponentials(keys, torch.tensor([[299]], dtype=torch.int32))
    assert variates[0] > 16.6 > variates[1]
    assert draw(batch)[0].tolist() == [299, 299]


# --------------------------------------------------------------------- penalties, masks, edits

PENALISED = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 0.5},
    {"frequency_penalty": 0.8},
    {},
    {"presence_penalty": -1.0, "frequency_penalty": -0.25},
]


def counted(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return count_rows and counts with a row for every slot but row 3's."""
    slots = batch.slots.long()
    count_rows = torch.arange(len(slots), dtype=torch.int32)
    count_rows[slots[3]] = -1
    counts = torch.full((len(slots), batch.logits.shape[1]), 3, dtype=torch.int32)
    rows = count_rows[slots].contiguous()
    sampling_adjust.recount(
        counts, rows, batch.slots, batch.num_prompt[slots], batch.lengths, batch.tokens
    )
    return count_rows, counts


def test_penalties_are_the_workers() -> None:
    batch = make(PENALISED, 60)
    wanted, slots = batch.logits.clone(), batch.rows.slots
    assert batch.rows.repetition is not None and batch.rows.output_penalty is not None
    penalties.repetition(wanted, batch.rows.repetition, batch.tokens, slots, batch.lengths)
    penalties.output_penalties(
        wanted, batch.rows.output_penalty, batch.tokens, slots, batch.lengths
    )
    count_rows, counts = counted(batch)
    out = torch.full_like(wanted, math.nan)
    sampling_adjust.adjust(
        batch.logits, out=out, slots=batch.slots, **batch.penalties,
        count_rows=count_rows, counts=counts,
    )  # fmt: skip
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(out[0], batch.logits[0]) and torch.equal(out[3], batch.logits[3])
    by_row = [values[slots] for values in batch.penalties.values()]
    own = counts[count_rows[slots].long()] * (count_rows[slots] >= 0)[:, None]
    spec = sampling_adjust.reference(batch.logits, own, *by_row, None)
    torch.testing.assert_close(out.double(), spec, rtol=1e-5, atol=1e-5)


def test_a_mask_and_nan_in_place() -> None:
    batch = make([{}] * 3, 70)
    allowed = torch.rand(2, 70) < 0.3
    allowed[:, [31, 32, 69]] = True
    batch.logits[0, 5] = math.nan
    wanted = sampling_adjust.reference(
        batch.logits, None, *batch.penalties.values(), allowed[[1, 1, 0]]
    )
    wanted[1] = batch.logits[1].double()
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    sampling_adjust.adjust(
        batch.logits, out=batch.logits, slots=batch.slots, mask_rows=rows, mask=pack_bits(allowed)
    )
    torch.testing.assert_close(batch.logits.double(), wanted, equal_nan=True)


def test_edits_are_the_workers() -> None:
    """Bias, early ends and bad words, with empty entries among them."""
    empty = torch.tensor([-1, -1])
    specs = [
        {"bias_ids": ids([3, 9]), "bias_values": floats([2.5, -100.0])},
        {"min_tokens": 60, "banned_until_min": ids([7, 8])},
        {"min_tokens": 1, "banned_until_min": ids([7])},
        {"bad_words": [ids([11])]},
    ]
    batch = make(specs, 64)
    newest = [
        int(batch.tokens[s, n - 1]) for s, n in zip(batch.rows.slots, batch.lengths, strict=True)
    ]
    specs[0]["bad_words"] = [ids([newest[0], 20]), ids([newest[0] ^ 1, 21])]
    specs[3]["bad_words"] = [ids([11]), ids([*batch.tokens[0, : batch.lengths[3]].tolist(), 12])]
    batch = make(specs, 64)
    rows, wanted = batch.rows, batch.logits.clone()
    assert rows.bias is not None and rows.early_ends is not None and rows.bad_words is not None
    penalties.bias(wanted, rows.bias)
    penalties.ban_early_ends(wanted, rows.early_ends, batch.lengths)
    penalties.ban_words(wanted, rows.bad_words, batch.tokens, rows.slots, batch.lengths)

    def padded(column: torch.Tensor, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.cat((column, empty)).to(kind)

    got, spec = batch.logits.clone(), batch.logits
    entries = padded(rows.bias.rows), padded(rows.bias.ids), padded(rows.bias.values, torch.float32)
    sampling_edit.add_bias(got, *entries)
    torch.testing.assert_close(got.double(), sampling_edit.reference(spec, *entries))
    early = rows.early_ends
    sampling_edit.ban_early_ends(
        got, padded(early.rows), padded(early.ids), padded(early.values), batch.lengths
    )
    words = [
        (r, list(word)) for r, s in enumerate(specs) for word in map(read, s.get("bad_words", []))
    ]
    flat = torch.tensor([token for _, word in words for token in word], dtype=torch.int32)
    starts = torch.tensor([0, *[len(word) for _, word in words], 1], dtype=torch.int32).cumsum(0)
    sampling_edit.ban_words(
        got, torch.tensor([*[r for r, _ in words], -1], dtype=torch.int32), starts.int(), flat,
        batch.slots, batch.num_prompt, batch.lengths, batch.tokens,
    )  # fmt: skip
    torch.testing.assert_close(got, wanted)
    assert got[0, 20] == -math.inf and got[0, 21] > -math.inf and got[3, 11] == -math.inf
    assert got[1, 7] == -math.inf and got[2, 7] > -math.inf and got[3, 12] > -math.inf


def read(word: bytes) -> list[int]:
    return torch.frombuffer(bytearray(word), dtype=torch.int32).tolist()


# --------------------------------------------------------------------------- log-probabilities


def report(logits: torch.Tensor, rows: list[int], chosen: torch.Tensor, most: int):
    entries = torch.tensor(rows, dtype=torch.int32)
    scratch = sampling_logprobs.allocate(len(rows), logits.shape[1], most, "cpu")
    own, ranks = torch.full((len(rows),), 7.0), torch.full((len(rows),), -7, dtype=torch.int32)
    top_ids = torch.full((len(rows), most), -7, dtype=torch.int32)
    top_values = torch.full((len(rows), most), 7.0)
    sampling_logprobs.top_logprobs(
        logits, entries, chosen, own=own, ranks=ranks, top_ids=top_ids, top_values=top_values,
        scratch=scratch,
    )  # fmt: skip
    return own, ranks, top_ids, top_values


@pytest.mark.parametrize("most", [0, 1, 5])
def test_logprobs_of_the_raw_distribution(most: int) -> None:
    """Equals come lowest id first; an impossible token and a row of NaN report -9999."""
    logits = make([{}] * 4, VOCAB).logits
    logits[0, [5, 600, 640]] = 40.0
    logits[1, 3:] = -math.inf
    logits[3, 9] = math.nan
    chosen = torch.tensor([600, 17, 670, 2])
    rows = [2, -1, 0, 1, 3]
    got = report(logits, rows, chosen, most)
    real = [0, 2, 3, 4]
    which = torch.tensor(rows)[real]
    own, ranks, top_ids, top_values = sampling_logprobs.reference(
        logits[which], chosen[which], most
    )
    torch.testing.assert_close(got[0][real].double(), own, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got[3][real].double(), top_values, rtol=1e-5, atol=1e-4)
    assert got[1][real].tolist() == ranks.tolist()
    assert got[2][real].tolist() == top_ids.tolist()
    assert got[0][1] == 7.0 and got[1][1] == -7  # the empty entry


def test_as_many_alternatives_as_tokens() -> None:
    logits = make([{}], 5).logits
    _, _, top_ids, _ = report(logits, [0], torch.tensor([1]), 5)
    assert top_ids[0].tolist() == logits[0].argsort(descending=True).tolist()
