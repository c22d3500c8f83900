"""Failures of other servers that the engine core must not have (numbers are of CASES.md)."""

import numpy as np
import pytest
from driver import EOS, Engine

from zlm.messages import (
    FINISH_EOS,
    FINISH_LENGTH,
    FINISH_STOP_ID,
    ROW_ALL_MASKED,
    ROW_NAN,
)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 5 * number) % 23 + 4 for number in range(length)]


def test_39_no_samples_are_refused() -> None:
    engine = Engine()
    engine.submit(prompt(4), 4, n=1)
    message = engine.told[1].submit
    bad = type(message)(
        seq_id=50, arrival=0.0, token_ids=b"\1\0\0\0", max_tokens=1, sampling=message.sampling, n=0
    )
    [(owner, output)] = engine.core.submit(bad)
    assert owner == 0 and output.errors[0].status == 400 and "n must be" in output.errors[0].message
    engine.run()


def test_a_prompt_of_no_tokens_is_refused() -> None:
    engine = Engine()
    engine.submit([], 4, n=2)
    assert [error.status for error in engine.errors()] == [400, 400]
    engine.run()


@pytest.mark.parametrize("length", [63, 64, 65, 640])
def test_43_prompts_around_the_context_length(length: int) -> None:
    engine = Engine(99, max_model_len=64, max_num_batched_tokens=7)
    engine.submit(prompt(length), 1)
    engine.submit(prompt(5), 4)
    engine.run()
    if length < 64:
        assert len(engine.told[1].tokens) == 1
    else:
        [error] = engine.errors()
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert str(length) in error.message and "64" in error.message
    assert engine.told[2].tokens


def test_43_a_prompt_of_exactly_the_context_length_can_be_scored() -> None:
    engine = Engine(99, max_model_len=64, max_num_batched_tokens=7)
    engine.submit(prompt(64), 0, prompt_logprobs=1)
    engine.run()
    assert engine.told[1].finish == FINISH_LENGTH and engine.told[1].tokens == []
    assert len(engine.told[1].prompt_logprobs) == 63


def test_47_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    """16 blocks of 16 tokens, a context of 1024."""
    engine = Engine(17, block_size=16, max_model_len=1024, max_num_batched_tokens=64)
    assert engine.core.ready("cpu", "float32").max_sequence_tokens == 256
    engine.submit(prompt(300), 4)
    engine.submit(prompt(200), 57)  # the prompt fits, its growth does not
    engine.submit(prompt(200), 56, ignore_eos=True)  # just fits
    engine.submit(prompt(20), 4)
    engine.run()
    for number, total in ((1, 304), (2, 257)):
        error = engine.told[number].error
        assert error is not None and error.code == "context_length_exceeded"
        assert error.status == 400 and str(total) in error.message and "256" in error.message
    assert len(engine.told[3].tokens) == 56 and engine.told[4].tokens


def test_47_a_sliding_group_does_not_limit_the_length() -> None:
    engine = Engine((65, 4), windows=(0, 6), block_size=4, max_model_len=256)
    assert engine.scheduler.max_sequence_tokens == 256
    engine.submit(prompt(150), 106, ignore_eos=True)
    engine.run()
    assert len(engine.told[1].tokens) == 106


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [4, 64])
def test_48_preempted_sequences_resume_exactly(run_ahead: int, caching: bool, budget: int) -> None:
    engine = Engine(
        9,
        block_size=4,
        run_ahead=run_ahead,
        prefix_caching=caching,
        max_num_batched_tokens=budget,
        windows=(0, 7),
    )
    for number in range(5):
        engine.submit(prompt(6 + number), 20, ignore_eos=number % 2 == 0, logprobs=2)
    engine.run()
    assert engine.core.stats().preemptions > 0


def test_48_prompt_logprobs_are_told_once_though_the_prompt_is_computed_twice() -> None:
    engine = Engine(99, max_num_batched_tokens=7, run_ahead=2)
    engine.submit(prompt(3), 30, ignore_eos=True)  # so that chunks differ the second time
    engine.submit(prompt(30), 4, prompt_logprobs=1, ignore_eos=True)
    engine.send()
    engine.deliver()
    engine.scheduler._preempt(engine.scheduler._by_id[2])
    engine.run()
    assert engine.worker.num_computed == 3 + 29 + 10 + 30 + 3
    assert len(engine.told[2].prompt_logprobs) == 29


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_49_a_hit_changes_nothing_and_leaves_a_token_to_compute(
    windows: tuple[int, ...], length: int
) -> None:
    engine = Engine(99, block_size=4, windows=windows)
    for _ in range(3):
        engine.submit(prompt(length), 8, ignore_eos=True)
        engine.run()
    engine.submit([*prompt(length), 5, 6, 7], 8)
    engine.run()
    hits = [told.cached for told in engine.told.values()]
    whole = (length - 1) // 4 * 4
    assert hits[:3] == [0, whole, whole] and hits[3] == length // 4 * 4
    stats = engine.core.stats()
    assert stats.prefix_cache_hits == stats.prompt_tokens_cached == sum(hits)
    assert stats.prefix_cache_queries == stats.prompt_tokens == 4 * length + 3


def test_51_salts_share_only_with_themselves() -> None:
    engine = Engine(99, block_size=4)
    for salt in (b"", b"X", b"X", b"Y", b""):
        engine.submit(prompt(10), 2, salt=salt)
        engine.run()
    assert [told.cached for told in engine.told.values()] == [0, 0, 8, 0, 8]


@pytest.mark.parametrize("budget", [1, 7, 16, 64])
def test_52_prompt_logprobs_read_nothing_from_the_cache(budget: int) -> None:
    engine = Engine(99, block_size=4, max_num_batched_tokens=budget, max_num_seqs=1)
    engine.submit(prompt(21), 2)
    engine.run()
    for _ in range(2):
        engine.submit(prompt(21), 2, prompt_logprobs=1)
        engine.run()
    _, second, third = engine.told.values()
    assert second.cached == third.cached == 0
    assert second.prompt_logprobs == third.prompt_logprobs and len(third.prompt_logprobs) == 20
    engine.submit(prompt(21), 2)
    engine.run()
    assert engine.told[4].cached == 20


@pytest.mark.parametrize("steps", [None, 0, 1, 2])
def test_52_samples_of_a_prompt_report_its_logprobs_once(steps: int | None) -> None:
    """Also when the sample that reports them is aborted after some steps."""
    engine = Engine(99, block_size=4, max_num_batched_tokens=6)
    engine.submit(prompt(17), 3, n=3, prompt_logprobs=0)
    if steps is not None:
        for _ in range(steps):
            engine.send()
            engine.deliver()
        engine.abort(1)
    engine.run()
    assert len(engine.told[1].prompt_logprobs) == 16


def test_16_and_17_all_eos_ids_end_a_sequence_unless_ignored() -> None:
    engine = Engine(99, max_num_seqs=8, eos_ids=(EOS, 9, 500))
    ids = [engine.submit(prompt(4, first), 40, ignore_eos=first % 2 == 1) for first in range(8)]
    for _ in range(200):
        engine.send()
        if not engine.deliver():
            break
    for number, seq_id in enumerate(ids):
        told = engine.told[seq_id]
        if number % 2:
            assert told.finish == FINISH_LENGTH and len(told.tokens) == 40
        else:
            assert told.finish == FINISH_EOS and told.tokens[-1] in (EOS, 9)
            assert not {EOS, 9} & set(told.tokens[:-1])


def test_13_an_eos_id_that_the_client_lists_is_a_stop_id() -> None:
    engine = Engine(99)
    engine.submit(prompt(4), 40, stop_ids=(EOS,))
    engine.run()
    assert engine.told[1].finish == FINISH_STOP_ID and engine.told[1].tokens[-1] == EOS


@pytest.mark.parametrize("mask", [True, False])
def test_15_nothing_ends_a_sequence_before_min_tokens(mask: bool) -> None:
    engine = Engine(99, max_num_seqs=8)
    for first in range(8):
        engine.submit(prompt(4, first), 40, min_tokens=30, stop_ids=(5, 6, 7), mask=mask)
    engine.run()
    assert all(len(told.tokens) >= 30 for told in engine.told.values())


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
@pytest.mark.parametrize(
    ("status", "http", "kind"),
    [(ROW_NAN, 500, "model_error"), (ROW_ALL_MASKED, 400, "invalid_request_error")],
)
def test_107_a_row_that_fails_ends_its_sequence_alone(
    run_ahead: int, status: int, http: int, kind: str
) -> None:
    engine = Engine(99, run_ahead=run_ahead, block_size=4)
    bad = engine.submit(prompt(10), 20, ignore_eos=True, owner=1)
    good = engine.submit(prompt(10, 3), 20, ignore_eos=True)
    for _ in range(6):
        engine.send()
        engine.deliver()
    engine.worker.failing[engine.told[bad].submit.sampling.seed] = status
    engine.run()
    [error] = engine.errors()
    assert (error.seq_id, error.status, error.error_type) == (bad, http, kind)
    assert len(engine.told[good].tokens) == 20
    assert engine.core.stats().success == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    engine.submit(prompt(10), 2)  # what the failed one computed is not reused
    engine.run()
    assert engine.told[good + 1].cached == 0


def test_news_goes_to_the_owner_with_the_right_rows() -> None:
    engine = Engine(99, max_num_seqs=6)
    for number in range(6):
        engine.submit(prompt(5, number), 9, owner=number % 3, logprobs=number % 2, n=1)
    engine.submit(prompt(9), 3, owner=2, prompt_logprobs=2)
    engine.run()


def test_samples_have_seeds_of_their_own() -> None:
    engine = Engine(99)
    engine.submit(prompt(5), 2, n=3)
    seed = engine.told[1].submit.sampling.seed
    engine.send()
    seeds = [s.sampling.seed for s in engine.scheduler._by_id.values()]
    assert seeds == [seed, seed + 1, seed + 2]
    engine.run()


def test_output_columns_are_what_messages_says() -> None:
    engine = Engine(99)
    engine.submit(prompt(5), 1, owner=2)
    [step] = engine.core.next_steps(1.0)
    result = engine.worker.execute(step)
    [(owner, output)] = engine.core.apply(result, 2.0)
    assert owner == 2
    assert np.frombuffer(output.seq_ids, np.int64).tolist() == [2 << 48 | 1]
    assert np.frombuffer(output.token_ids, np.int32).size == 1
    assert np.frombuffer(output.finish, np.uint8).tolist() == [FINISH_LENGTH]
