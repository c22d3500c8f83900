"""The sampler against a plain implementation of each rule, one row at a time."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from worker_steps import CPU, entries_of, floats, ids, join

from zlm.messages import ROW_ALL_MASKED, ROW_NAN, Join
from zlm.worker import sampler
from zlm.worker.sampling_table import SamplingTable

VOCAB = 64
WIDTH = 40


@dataclass
class Row:
    """One sequence: its tokens, how many of them are prompt, its parameters and its logits."""

    tokens: list[int]
    num_prompt: int
    params: dict
    logits: np.ndarray  # float32 [vocab]


def run(rows: list[Row], slots: list[int] | None = None, vocab: int = VOCAB) -> sampler.Sampled:
    slots = slots or list(range(len(rows)))
    table = SamplingTable(max(slots) + 1, vocab, CPU)
    tokens = torch.full((max(slots) + 1, WIDTH), vocab - 1, dtype=torch.int32)
    joins: list[Join] = []
    for slot, row in zip(slots, rows, strict=True):
        joins.append(join(slot, row.tokens, row.num_prompt, **row.params))
        tokens[slot, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
    table.join(joins)
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    lengths = torch.tensor([len(row.tokens) for row in rows])
    return sampler.sample(logits, table.rows(np.array(slots)), lengths, tokens)


def drawn(rows: list[Row], **keywords) -> list[int]:
    return run(rows, **keywords).tokens.tolist()


# --------------------------------------------------------------------------- the rules, plainly


def adjusted(row: Row) -> np.ndarray:
    """Penalties, bias and masks, as the rules say them."""
    p, output = row.params, row.tokens[row.num_prompt :]
    logits = row.logits.astype(np.float64).copy()
    factor = p.get("repetition_penalty", 1.0)
    for token in set(row.tokens):
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(output):
        logits[token] -= p.get("presence_penalty", 0.0)
        logits[token] -= p.get("frequency_penalty", 0.0) * output.count(token)
    bias = np.frombuffer(p.get("bias_values", b""), np.float32)
    for token, value in zip(column(p, "bias_ids"), bias, strict=True):
        logits[token] += value
    if allowed := column(p, "allowed_ids"):
        for token in set(range(VOCAB)) - set(allowed):
            logits[token] = -math.inf
    for word in p.get("bad_words", []):
        *before, last = np.frombuffer(word, np.int32).tolist()
        if not before or output[-len(before) :] == before:
            logits[last] = -math.inf
    if len(output) < p.get("min_tokens", 0):
        logits[column(p, "banned_until_min")] = -math.inf
    return logits


def column(params: dict, name: str) -> list[int]:
    return np.frombuffer(params.get(name, b""), np.int32).tolist()


def kept(row: Row, slack: float) -> set[int]:
    """Tokens that may be drawn, with top_p wider (or, if negative, narrower) by *slack*."""
    p, logits = row.params, adjusted(row)
    scaled = (logits - logits.max()) / p["temperature"]
    weights = np.exp(scaled)
    alive = weights >= p.get("min_p", 0.0) * (1 - np.sign(slack) * 1e-5)
    top_k = p.get("top_k", 0)
    if top_k > 0:
        alive &= weights >= np.sort(weights)[::-1][min(top_k, VOCAB) - 1]
    probability = np.where(alive, weights, 0) / weights[alive].sum()
    order = np.argsort(-probability, kind="stable")
    before = np.cumsum(probability[order]) - probability[order]
    if p.get("top_p", 1.0) < 1.0:
        inside = order[before < p["top_p"] + slack]
        floor = probability[inside].min() if inside.size else probability.max()
        alive &= probability >= floor
    return {int(t) for t in np.flatnonzero(alive & (weights > 0))}


def given_only(params: dict) -> dict:
    return {name: value for name, value in params.items() if value is not None}


token = st.integers(0, VOCAB - 1)
token_list = st.lists(token, max_size=6)
optional = lambda strategy: st.none() | strategy  # noqa: E731
adjustments = st.fixed_dictionaries(
    {
        "repetition_penalty": optional(st.floats(0.3, 3.0)),
        "presence_penalty": optional(st.floats(-2, 2)),
        "frequency_penalty": optional(st.floats(-2, 2)),
        "allowed_ids": optional(st.lists(token, min_size=8, max_size=40).map(ids)),
        "bad_words": optional(st.lists(st.lists(token, min_size=1, max_size=3).map(ids))),
        "bias": optional(st.dictionaries(token, st.floats(-100, 100, width=32), max_size=6)),
        "min_tokens": optional(st.integers(0, 8)),
        "banned_until_min": optional(token_list.map(ids)),
    }
)
cuts = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 2.0),
        "top_k": optional(st.integers(0, VOCAB + 5)),
        "top_p": optional(st.floats(0.01, 1.0)),
        "min_p": optional(st.floats(0.0, 0.5)),
    }
)


@st.composite
def sequences(draw, params) -> Row:
    chosen = given_only(draw(params))
    if (bias := chosen.pop("bias", None)) is not None:
        chosen |= {"bias_ids": ids(list(bias)), "bias_values": floats(list(bias.values()))}
    prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    output = draw(st.lists(st.integers(0, 9), max_size=12))
    seed = draw(st.integers(0, 2**32))
    logits = np.random.default_rng(seed).normal(0, draw(st.floats(0.5, 8)), VOCAB)
    return Row(prompt + output, len(prompt), chosen | {"seed": seed}, logits.astype(np.float32))


@settings(deadline=None, max_examples=150)
@given(st.lists(sequences(adjustments), min_size=1, max_size=6))
def test_adjusted_logits_equal_the_rules(rows: list[Row]) -> None:
    """Greedy takes the best of the adjusted logits, in rows with any mixture of features."""
    for row, chosen in zip(rows, drawn(rows), strict=True):
        logits = adjusted(row)
        if logits.max() > -math.inf:
            assert logits[chosen] == pytest.approx(logits.max(), rel=1e-4, abs=1e-3)


@settings(deadline=None, max_examples=150)
@given(st.lists(sequences(cuts), min_size=1, max_size=6))
def test_drawn_tokens_survive_the_cuts(rows: list[Row]) -> None:
    for row, chosen in zip(rows, drawn(rows), strict=True):
        assert chosen in kept(row, 1e-4)


@settings(deadline=None, max_examples=60)
@given(st.lists(sequences(cuts), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_company(rows: list[Row], random) -> None:
    """Cases 20 and 29: any slot, any order, any neighbours, alone: the same token."""
    alone = [drawn([row])[0] for row in rows]
    order = list(range(len(rows)))
    random.shuffle(order)
    slots = random.sample(range(50), len(rows))
    together = drawn([rows[i] for i in order], slots=slots)
    assert together == [alone[i] for i in order]


# --------------------------------------------------------------------------- distribution


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """The 0.1 % point, after Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "cut",
    [{}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05},
     {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01}],
    ids=lambda cut: "-".join(cut) or "plain",
)  # fmt: skip
def test_draws_follow_the_distribution(cut: dict) -> None:
    draws = 20_000
    logits = np.random.default_rng(5).normal(0, 2, VOCAB).astype(np.float32)
    params = {"temperature": 1.0, **cut}
    row = Row([1], 1, params, logits)
    alive = sorted(kept(row, 1e-6))
    weights = np.exp(adjusted(row)[alive] / params["temperature"])
    rows = [Row([1], 1, params | {"seed": seed}, logits) for seed in range(draws)]
    counts = np.bincount(drawn(rows), minlength=VOCAB)
    assert counts[alive].sum() == draws
    expected = draws * weights / weights.sum()
    common = expected >= 5
    assert chi_square(counts[alive][common], expected[common]) < chi_square_limit(common.sum() - 1)


def test_positions_draw_afresh() -> None:
    """One seed at 4,000 positions is as random as 4,000 seeds at one."""
    logits = np.zeros(VOCAB, np.float32)
    rows = [Row([1], 1, {"temperature": 1.0, "seed": 9}, logits)] * 4000
    table = SamplingTable(1, VOCAB, CPU)
    table.join([join(0, [1], **rows[0].params)])
    selected = table.rows(np.zeros(4000, np.int64))
    lengths = torch.arange(1, 4001)
    many = torch.from_numpy(np.zeros((4000, VOCAB), np.float32))
    tokens = torch.zeros(1, WIDTH, dtype=torch.int32)
    counts = np.bincount(sampler.sample(many, selected, lengths, tokens).tokens, minlength=VOCAB)
    assert chi_square(counts, np.full(VOCAB, 4000 / VOCAB)) < chi_square_limit(VOCAB - 1)


def test_wide_nuclei_need_more_candidates() -> None:
    """A flat distribution over a vocabulary far larger than the first round of candidates."""
    vocab = 6000
    logits = np.random.default_rng(1).normal(0, 0.1, vocab).astype(np.float32)
    weights = np.exp(logits.astype(np.float64))
    order = np.argsort(-weights)
    inside = np.cumsum(weights[order]) / weights.sum() < 0.5
    params = {"temperature": 1.0, "top_p": 0.5}
    rows = [Row([1], 1, params | {"seed": seed}, logits) for seed in range(1500)]
    chosen = set(drawn(rows, vocab=vocab))
    assert chosen <= set(order[: inside.sum() + 2].tolist())
    assert len(chosen) > 1000  # not only of the first candidates


def test_ties_at_the_cut_all_stay() -> None:
    logits = np.zeros(VOCAB, np.float32)
    params = {"temperature": 1.0, "top_k": 3}
    rows = [Row([1], 1, params | {"seed": seed}, logits) for seed in range(3000)]
    assert set(drawn(rows)) == set(range(VOCAB))


# --------------------------------------------------------------------------- cases


def one(logits: np.ndarray, tokens=(1, 2), num_prompt=None, **params) -> sampler.Sampled:
    row = Row(list(tokens), num_prompt or len(tokens), params, logits.astype(np.float32))
    return run([row])


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(8).normal(0, 3, VOCAB).astype(np.float32)


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-30, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "top_k": 50}])
def test_temperatures_near_zero_are_greedy(logits, temperature, scale, cut) -> None:
    """Case 23: no overflow whatever the logits are, with a bias and with cuts too."""
    bias = {"bias_ids": ids([0]), "bias_values": floats([-100])}
    logits[0] = logits.max() + 1
    result = one(logits * scale, temperature=temperature, **cut, **bias)
    expected = logits * scale
    expected[0] -= 100
    assert result.status is None
    assert result.tokens.tolist() == [int(expected.argmax())]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 30, 41]] = 5
    assert one(logits).tokens.tolist() == [7]
    assert one(logits, temperature=1.0, top_p=0.0).tokens.tolist() == [7]
    assert one(logits, temperature=1.0, top_k=1).tokens.tolist() == [7]


def test_top_p_edges(logits) -> None:
    """Case 26: 0 keeps the best token; 1 is off."""
    best = int(logits.argmax())
    many = [Row([1], 1, {"temperature": 2.0, "seed": s, "top_p": 0.0}, logits) for s in range(50)]
    assert set(drawn(many)) == {best}
    for seed in range(20):
        plain = one(logits, temperature=1.0, seed=seed).tokens
        assert torch.equal(one(logits, temperature=1.0, seed=seed, top_p=1.0).tokens, plain)


def test_penalties_count_the_right_tokens(logits) -> None:
    """Case 27: repetition over prompt and output, the others over the output only."""
    best = int(logits.argmax())
    order = np.argsort(-logits)
    second = int(order[1])
    assert one(logits, [best], presence_penalty=2.0, frequency_penalty=2.0).tokens.item() == best
    close = logits.copy()
    close[second] = close[best] - 0.5
    first_step = one(close, [best, best], repetition_penalty=3.0)
    assert first_step.tokens.item() == second
    assert one(close, [3, best], 1, presence_penalty=0.6).tokens.item() == second
    assert one(close, [3, best], 1, presence_penalty=0.4).tokens.item() == best
    assert one(close, [3, best, best], 1, frequency_penalty=0.3).tokens.item() == second
    assert one(close, [3, best, 4], 1, frequency_penalty=0.3).tokens.item() == best


def test_ends_are_banned_before_min_tokens(logits) -> None:
    """Case 15: EOS and stop ids cannot be drawn before min_tokens, and can be after."""
    best = int(logits.argmax())
    ends = {"min_tokens": 2, "banned_until_min": ids([best])}
    assert one(logits, [1, 2], 2, **ends).tokens.item() != best
    assert one(logits, [1, 2, 3], 2, **ends).tokens.item() != best
    assert one(logits, [1, 2, 3, 4], 2, **ends).tokens.item() == best


def test_nothing_is_banned_without_min_tokens(logits) -> None:
    """Case 17: with ignore_eos the row carries no ban, and its ids are drawn as any other."""
    best = int(logits.argmax())
    assert one(logits, banned_until_min=ids([best])).tokens.item() == best


def test_bad_words_of_several_tokens(logits) -> None:
    best = int(logits.argmax())
    word = {"bad_words": [ids([5, 6, best])]}
    assert one(logits, [1, 5, 6], 1, **word).tokens.item() != best
    assert one(logits, [1, 6, 5], 1, **word).tokens.item() == best
    assert one(logits, [1, 5, 6], 3, **word).tokens.item() == best  # of the prompt: no output yet
    assert one(logits, [1, 5, 6], 2, **word).tokens.item() == best  # begins in the prompt
    assert one(logits, [1], 1, bad_words=[ids([best])]).tokens.item() != best


def test_a_broken_row_does_not_hurt_its_neighbours(logits) -> None:
    """NaN and infinite logits, and a row with all candidates masked away: only those fail."""
    broken, infinite = logits.copy(), logits.copy()
    broken[9], infinite[9] = math.nan, math.inf
    masked = {"allowed_ids": ids([3]), "bad_words": [ids([3])]}
    hidden = {"allowed_ids": ids([3, 4])}
    for sampling in ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}):
        rows = [
            Row([1], 1, {"seed": 4, **sampling, **extra}, values)
            for extra, values in [
                ({}, logits), ({}, broken), (masked, logits), ({}, infinite), (hidden, broken),
            ]
        ]  # fmt: skip
        result = run([*rows, rows[0]])
        assert result.status is not None
        wanted = [0, ROW_NAN, ROW_ALL_MASKED, ROW_NAN, ROW_NAN, 0]
        assert result.status.tolist() == wanted
        alone = drawn([rows[0]])[0]
        assert result.tokens.tolist() == [alone, 0, 0, 0, 0, alone]


def test_ids_outside_the_vocabulary_are_dropped(logits, caplog) -> None:
    """Case 34: they are refused long before; here they must not reach another row's logits."""
    outside = [VOCAB, -1, 2**31 - 1]
    params = {
        "bias_ids": ids([*outside, 2]), "bias_values": floats([100, 100, 100, 50]),
        "min_tokens": 5, "banned_until_min": ids(outside), "bad_words": [ids([1, VOCAB])],
    }  # fmt: skip
    rows = [Row([1], 1, params, logits), Row([1], 1, {}, logits)]
    assert drawn(rows) == [2, int(logits.argmax())]
    assert "logit_bias" in caplog.text
    result = run([Row([1], 1, {"allowed_ids": ids(outside)}, logits), rows[1]])
    assert result.status is not None and result.status.tolist() == [ROW_ALL_MASKED, 0]


def test_unseeded_rows_of_equal_seed_agree_and_others_differ(logits) -> None:
    """Case 22: what makes two rows differ is their seed alone; all 64 bits of it count."""
    flat = np.zeros(VOCAB, np.float32)
    seeds = [5, 5, 6, 2**63 + 5, 2**64 - 1, 5 + 2**32]
    lengths = range(1, 25)
    runs = [
        [one(flat, [1] * n, temperature=1.0, seed=seed).tokens.item() for n in lengths]
        for seed in seeds
    ]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs}) == len(seeds) - 1


# --------------------------------------------------------------------------- log-probabilities


def test_logprobs_describe_the_raw_distribution(logits) -> None:
    """Case 57: the same for every sampling setting; the drawn token first, with its rank."""
    settings_ = [
        {}, {"temperature": 0.2}, {"temperature": 1.0, "top_p": 1e-4},
        {"repetition_penalty": 2.0, "bias_ids": ids([4]), "bias_values": floats([100])},
    ]  # fmt: skip
    raw = torch.from_numpy(logits).double().log_softmax(-1)
    order = raw.argsort(descending=True)
    rows = [Row([1, 4], 1, {**s, "logprobs": n}, logits) for n, s in enumerate(settings_)]
    result = run([Row([1], 1, {}, logits), *rows])
    reported = entries_of(result.logprobs)
    assert [entry[0] for entry in reported] == [1, 2, 3, 4]  # row 0 did not ask
    for n, (row, rank, token_ids, values) in enumerate(reported):
        assert token_ids[0] == result.tokens[row]
        assert rank == 1 + int((raw > raw[token_ids[0]]).sum())
        assert token_ids[1:] == order[:n].tolist()
        assert values == pytest.approx(raw[token_ids].tolist(), abs=1e-4)


def test_impossible_logprobs_are_finite() -> None:
    """Case 56: tokens that the model rules out, and a row of NaN, report -9999."""
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 4]] = 0.0
    broken = np.full(VOCAB, np.nan, np.float32)
    rows = [Row([1], 1, {"logprobs": 4}, values) for values in (logits, broken)]
    (_, _, _, first), (_, _, _, second) = entries_of(run(rows).logprobs)
    assert first == pytest.approx([-math.log(2)] * 3 + [-9999.0] * 2)
    assert second == [-9999.0] * 5


def test_more_alternatives_than_tokens(logits) -> None:
    ((_, _, token_ids, _),) = entries_of(one(logits, logprobs=VOCAB + 9).logprobs)
    assert len(token_ids) == VOCAB + 1
