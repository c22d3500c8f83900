"""The step protocol against a fake model whose logits depend on every token of the context."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from worker_steps import BLOCK, VOCAB, Harness, entries_of, execute, floats, ids, join, tokens_of

from zlm.messages import ROW_NAN
from zlm.worker import prompt_logprobs

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
WINDOWS = [[0], [0, 6]]


def generate(harness: Harness, slot: int, prompt: list[int], steps: int, **sampling) -> list[int]:
    """Prefill *prompt* at once and decode alone."""
    result = harness.step([(slot, 0, len(prompt), 1)], [join(slot, prompt, **sampling)])
    tokens = tokens_of(result)
    for n in range(steps - 1):
        tokens += tokens_of(harness.step([(slot, len(prompt) + n, 1, 1)]))
    return tokens


def test_the_fake_model_tells_contexts_apart() -> None:
    """What the tests below rest on: one changed token anywhere changes what follows."""
    outputs = {tuple(generate(Harness(), 0, PROMPT, 6))}
    for place in range(len(PROMPT)):
        changed = [*PROMPT]
        changed[place] = (changed[place] + 1) % VOCAB
        outputs.add(tuple(generate(Harness(), 0, changed, 6)))
    assert len(outputs) == len(PROMPT) + 1


@pytest.mark.parametrize("windows", WINDOWS, ids=["full", "full-sliding"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 12])
def test_chunked_prefill_equals_whole(windows: list[int], chunk: int) -> None:
    expected = generate(Harness(windows), 0, PROMPT, 4)
    harness = Harness(windows)
    joins = [join(0, PROMPT)]
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        last = start + count == len(PROMPT)
        result = harness.step([(0, start, count, last)], joins)
        assert last or result.token_ids == b""
        joins = []
    tokens = tokens_of(result)
    for n in range(3):
        tokens += tokens_of(harness.step([(0, len(PROMPT) + n, 1, 1)]))
    assert tokens == expected


def test_rows_may_come_in_any_order() -> None:
    """Decodes and prefills mixed: results stand in the message's order, inputs in the batch's."""
    alone = [generate(Harness(), 0, PROMPT[n:], 3) for n in range(4)]
    harness = Harness()
    prompts = [PROMPT[n:] for n in range(4)]
    first = harness.step(
        [(5, 0, len(prompts[0]), 1), (2, 0, len(prompts[1]), 1)],
        [join(5, prompts[0]), join(2, prompts[1])],
    )
    assert tokens_of(first) == [alone[0][0], alone[1][0]]
    mixed = harness.step(
        [(7, 0, 4, 0), (2, len(prompts[1]), 1, 1), (1, 0, len(prompts[3]), 1),
         (5, len(prompts[0]), 1, 1)],
        [join(7, prompts[2]), join(1, prompts[3])],
    )  # fmt: skip
    assert tokens_of(mixed) == [alone[1][1], alone[3][0], alone[0][1]]
    batch = harness.model.batches[-1]
    assert batch.num_decodes == 2 and batch.query_lens == [1, 1, 4, len(prompts[3])]
    last = harness.step([(7, 4, len(prompts[2]) - 4, 1), (5, len(prompts[0]) + 1, 1, 1)])
    assert tokens_of(last) == [alone[2][0], alone[0][2]]


def test_decodes_feed_on_tokens_nobody_has_seen() -> None:
    """Run-ahead: steps are sent in a row; inputs come from the table, whatever it held before."""
    expected = generate(Harness(), 0, PROMPT, 6, temperature=0.9, seed=3)
    harness = Harness()
    generate(harness, 4, PROMPT[::-1], 9)  # leaves stale tokens in the slot
    tokens = generate(harness, 4, PROMPT, 6, temperature=0.9, seed=3)
    assert tokens == expected
    stored = harness.tables.tokens[4, len(PROMPT) : len(PROMPT) + 6].tolist()
    assert stored == tokens
    inputs = [batch.token_ids.tolist() for batch in harness.model.batches[-5:]]
    assert inputs == [[token] for token in tokens[:-1]]


def test_a_slot_is_reused_without_a_trace() -> None:
    """Sampling parameters and blocks of the sequence before are gone."""
    harness = Harness()
    heavy = {
        "temperature": 1.5, "repetition_penalty": 2.0, "allowed_ids": ids([1, 2]), "logprobs": 3,
        "bias_ids": ids([1]), "bias_values": floats([50]), "prompt_logprobs": 2,
    }  # fmt: skip
    assert set(generate(harness, 0, PROMPT, 4, **heavy)) <= {1, 2}
    assert generate(harness, 0, PROMPT[:5], 4) == generate(Harness(), 3, PROMPT[:5], 4)
    assert harness.step([(0, 9, 1, 1)]).logprobs is None
    harness.tables.apply(execute(0, [], [join(0, [1])]))
    assert int(harness.tables.blocks[0][0].abs().sum()) == 0


@pytest.mark.parametrize("length", [8, 9, 11, 13])
def test_fork_shares_full_blocks_and_copies_the_partial_one(length: int) -> None:
    """n > 1: the fork recomputes the last prompt token on a copy; both write on, apart."""
    prompt = PROMPT[:length]
    alone = [generate(Harness(), 0, prompt, 6, temperature=1.2, seed=s) for s in (7, 8)]
    harness = Harness()
    first = harness.step([(0, 0, length, 1)], [join(0, prompt, temperature=1.2, seed=7)])
    shared, inside = (length - 1) // BLOCK, (length - 1) % BLOCK
    entries = [(0, 1, index, index + 1) for index in range(shared)]
    copies = []
    if inside:
        entries.append((0, 1, shared, 100))
        copies.append((0, shared + 1, 100))
    rows = [(1, length - 1, 1, 1), (0, length, 1, 1)]
    forked = harness.step(rows, [join(1, prompt, temperature=1.2, seed=8)], entries, copies)
    outputs = [[*tokens_of(first), tokens_of(forked)[1]], [tokens_of(forked)[0]]]
    for n in range(4):
        result = harness.step([(1, length + n, 1, 1), (0, length + 1 + n, 1, 1)])
        outputs[1].append(tokens_of(result)[0])
        outputs[0].append(tokens_of(result)[1])
    assert outputs[0] == alone[0]
    assert outputs[1] == alone[1][:5]


def test_copies_touch_only_their_group() -> None:
    harness = Harness([0, 6])
    for cache in harness.caches:
        cache.copy_(torch.arange(cache.shape[0]).view(-1, 1, 1, 1, 1).expand_as(cache))
    harness.step([(0, 0, 1, 0)], [join(0, [1])], copies=[(1, 50, 60), (1, 51, 61), (0, 70, 80)])
    full, sliding = harness.caches
    assert [int(full[b].max()) for b in (60, 61, 80)] == [60, 61, 70]
    assert [int(sliding[b].max()) for b in (60, 61, 80)] == [50, 51, 80]


def test_blocks_behind_a_window_may_be_null() -> None:
    """The engine points entries behind the window at block 0; nothing of them is read."""
    expected = generate(Harness([0, 6]), 0, PROMPT, 4)
    harness = Harness([0, 6])
    tokens = tokens_of(harness.step([(0, 0, len(PROMPT), 1)], [join(0, PROMPT)]))
    for n in range(3):
        behind = (len(PROMPT) + n - 6) // BLOCK
        gone = [(1, 0, index, 0) for index in range(behind)]
        tokens += tokens_of(harness.step([(0, len(PROMPT) + n, 1, 1)], entries=gone))
    assert tokens == expected


def test_resuming_after_preemption_gives_the_same_tokens() -> None:
    """A resumed sequence joins with prompt and output so far, in another slot: same draws."""
    sampling = {"temperature": 1.1, "seed": 5, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    expected = generate(Harness(), 0, PROMPT, 8, **sampling)
    harness = Harness()
    tokens = generate(harness, 0, PROMPT, 4, **sampling)
    known = PROMPT + tokens
    result = harness.step([(6, 0, len(known), 1)], [join(6, known, len(PROMPT), **sampling)])
    tokens += tokens_of(result)
    for n in range(3):
        tokens += tokens_of(harness.step([(6, len(known) + n, 1, 1)]))
    assert tokens == expected


@pytest.mark.parametrize("chunk", [1, 4, 7, 13])
def test_prompt_logprobs_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 52: positions 1.. in order, whatever the chunks and the pieces of logits."""
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 3 * 4 * VOCAB)
    harness = Harness()
    other = [5, 6, 7, 8, 9, 10]
    joins = [join(0, PROMPT, prompt_logprobs=2), join(1, other)]
    found, alone = [], Harness()
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        rows = [(0, start, count, start + count == len(PROMPT))]
        if not start:
            rows.insert(0, (1, 0, len(other), 1))  # a neighbour that asks for nothing
        result = harness.step(rows, joins)
        if result.prompt_logprobs is not None:
            entries = entries_of(result.prompt_logprobs)
            assert {entry[0] for entry in entries} <= {len(rows) - 1}
            found += entries
        joins = []
    assert len(found) == len(PROMPT) - 1
    alone.step([(0, 0, len(PROMPT), 1)], [join(0, PROMPT)])
    hidden = alone.model.forward(alone.model.batches[-1], alone.caches)
    raw = alone.model.logits(hidden).double().log_softmax(-1)
    for place, (_, rank, token_ids, values) in enumerate(found):
        assert token_ids[0] == PROMPT[place + 1]
        assert rank == 1 + int((raw[place] > raw[place, token_ids[0]]).sum())
        assert token_ids[1:] == raw[place].topk(2).indices.tolist()
        assert values == pytest.approx(raw[place, token_ids].tolist(), abs=1e-4)


def test_prompt_logprobs_stop_at_the_prompt() -> None:
    """A resumed sequence's output tokens are no prompt; nor is the token after the prompt."""
    harness = Harness()
    sampling = {"prompt_logprobs": 0}
    result = harness.step([(0, 0, 6, 1)], [join(0, PROMPT[:6], 3, **sampling)])
    assert [entry[2] for entry in entries_of(result.prompt_logprobs)] == [[14], [15]]
    result = harness.step([(0, 6, 1, 1)])
    assert result.prompt_logprobs is None or not entries_of(result.prompt_logprobs)


def test_a_poisoned_row_fails_alone_and_the_runner_goes_on() -> None:
    harness = Harness()
    harness.model.poison = {50}
    joins = [join(0, [1, 2, 50]), join(1, PROMPT), join(2, [50], temperature=1.0)]
    result = harness.step([(0, 0, 3, 1), (1, 0, len(PROMPT), 1), (2, 0, 1, 1)], joins)
    assert list(result.status) == [ROW_NAN, 0, ROW_NAN]
    after = harness.step([(0, 3, 1, 1), (1, len(PROMPT), 1, 1)])
    assert after.status == b""
    assert [tokens_of(result)[1], tokens_of(after)[1]] == generate(Harness(), 0, PROMPT, 2)


def test_a_step_without_rows_applies_its_changes() -> None:
    harness = Harness()
    result = harness.step([], [join(3, PROMPT)])
    assert (result.token_ids, result.status) == (b"", b"")
    harness.step([(3, 0, len(PROMPT), 1)])
    assert harness.model.batches[-1].token_ids.tolist() == PROMPT


def test_a_sequence_fills_its_context() -> None:
    """The last place of the context can be computed and what follows it sampled, safely."""
    harness = Harness(max_model_len=len(PROMPT) + 3)
    assert len(generate(harness, 7, PROMPT, 4)) == 4


def test_token_ids_outside_the_vocabulary_never_index(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.step([(0, 0, 3, 1)], [join(0, [1, VOCAB + 5, -7])])
    assert harness.model.batches[-1].token_ids.tolist() == [1, VOCAB - 1, 0]
    assert "clipped" in caplog.text


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_random_schedules_equal_solo_runs(data: st.DataObject) -> None:
    """Case 29: sequences join, advance in chunks of any size and decode in any company."""
    harness = Harness([0, 6], num_blocks=400)
    count = data.draw(st.integers(2, 6))
    greedy = {"temperature": 0.0}
    kinds = [greedy, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9},
             {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3}]  # fmt: skip
    sequences = []
    for slot in range(count):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14))
        sampling = {**data.draw(st.sampled_from(kinds)), "seed": slot + 10}
        sequences.append({"slot": slot, "prompt": prompt, "sampling": sampling, "at": 0, "out": []})
    while active := [s for s in sequences if len(s["out"]) < 5]:
        chosen = data.draw(st.lists(st.sampled_from(active), min_size=1, unique_by=id))
        rows, joins, sampled = [], [], []
        for s in chosen:
            if s["at"] == 0:
                joins.append(join(s["slot"], s["prompt"], **s["sampling"]))
            left = len(s["prompt"]) + len(s["out"]) - s["at"]
            step = data.draw(st.integers(1, left))
            rows.append((s["slot"], s["at"], step, step == left))
            s["at"] += step
            sampled += [s] if step == left else []
        for s, token in zip(sampled, tokens_of(harness.step(rows, joins)), strict=True):
            s["out"].append(token)
    for s in sequences:
        assert s["out"] == generate(Harness([0, 6]), 1, s["prompt"], 5, **s["sampling"])


def test_entries_written_twice_take_the_last() -> None:
    harness = Harness()
    entries = [(0, 2, 0, 9), (0, 2, 1, 8), (0, 2, 0, 7)]
    harness.tables.apply(execute(0, [], [join(2, [1])], entries))
    assert harness.tables.blocks[0][2, :2].tolist() == [7, 8]
    assert np.flatnonzero(harness.tables.blocks[0].sum(1)).tolist() == [2]
