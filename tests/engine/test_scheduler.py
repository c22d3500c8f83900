"""What the scheduler puts in a step, in which order, and who gives way under pressure."""

import numpy as np
import pytest
from driver import Engine

from zlm.messages import FINISH_ABORT, Execute


def rows(step: Execute) -> list[tuple[int, int, int, bool]]:
    """Return (slot, start, count, samples) of each row."""
    columns = [np.frombuffer(c, np.int32).tolist() for c in (step.slots, step.starts, step.counts)]
    samples = np.frombuffer(step.sample, np.bool_).tolist()
    return list(zip(*columns, samples, strict=True))


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + 5 * number) % 23 + 4 for number in range(length)]


class Recorder(Engine):
    """An engine that keeps the steps it sent."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.steps: list[Execute] = []
        execute = self.worker.execute

        def recorded(step: Execute):
            self.steps.append(step)
            return execute(step)

        self.worker.execute = recorded


def test_a_prompt_is_computed_in_chunks_beside_decodes() -> None:
    engine = Recorder(99, max_num_batched_tokens=8, run_ahead=1)
    engine.submit(prompt(3), 20, ignore_eos=True)
    engine.send()
    engine.deliver()
    engine.submit(prompt(20), 5, ignore_eos=True)
    engine.run()
    assert [rows(step) for step in engine.steps[:5]] == [
        [(0, 0, 3, True)],
        [(0, 3, 1, True), (1, 0, 7, False)],
        [(0, 4, 1, True), (1, 7, 7, False)],
        [(0, 5, 1, True), (1, 14, 6, True)],
        [(0, 6, 1, True), (1, 20, 1, True)],
    ]


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it() -> None:
    engine = Recorder(99, max_num_batched_tokens=64, run_ahead=1, chunked=False)
    for length in (40, 30, 20):
        engine.submit(prompt(length, length), 2, ignore_eos=True)
    engine.run()
    assert [sum(count for _, _, count, _ in rows(step)) for step in engine.steps[:2]] == [40, 51]


def test_steady_decode_sends_only_what_changed() -> None:
    engine = Recorder(99, max_num_seqs=4, block_size=4)
    for first in range(4):
        engine.submit(prompt(4, first), 30, ignore_eos=True)
    engine.run()
    quiet = [step for step in engine.steps[2:25] if not step.table_blocks]
    assert len(quiet) >= 16 and not any(step.joins or step.copies for step in engine.steps[2:25])


def test_waiting_sequences_start_in_order_of_arrival() -> None:
    engine = Recorder(99, max_num_seqs=1)
    first, second, third = (engine.submit(prompt(4), 3) for _ in range(3))
    order = [join.sampling.seed for step in _run(engine).steps for join in step.joins]
    seeds = [engine.told[i].submit.sampling.seed for i in (first, second, third)]
    assert order == seeds


def test_priority_goes_before_arrival_only_under_that_policy() -> None:
    for policy, expected in (("priority", [1, 2, 0]), ("fcfs", [0, 1, 2])):
        engine = Recorder(99, max_num_seqs=1, policy=policy)
        ids = [engine.submit(prompt(4), 3, priority=priority) for priority in (5, -1, 0)]
        order = [join.sampling.seed for step in _run(engine).steps for join in step.joins]
        assert order == [engine.told[ids[i]].submit.sampling.seed for i in expected]


def _run(engine: Recorder) -> Recorder:
    engine.run()
    return engine


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_in_order_is_preempted(policy: str) -> None:
    """CASES 48: cache for about two sequences, several long generations."""
    engine = Engine(11, policy=policy, block_size=4)
    for number in range(4):
        engine.submit(prompt(8, number), 24, ignore_eos=True, priority=-number, logprobs=1)
    preempted = []
    original = engine.scheduler._preempt

    def preempt(sequence) -> None:
        preempted.append(sequence.order)
        others = engine.scheduler._slots.sequences.values()
        assert sequence.order == max(other.order for other in others)
        original(sequence)

    engine.scheduler._preempt = preempt
    engine.run()
    assert preempted and engine.core.stats().preemptions == len(preempted)
    assert all(len(told.tokens) == 24 for told in engine.told.values())


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_steps_are_sent_ahead_of_results(run_ahead: int) -> None:
    engine = Engine(99, run_ahead=run_ahead)
    engine.submit(prompt(6), 12, ignore_eos=True)
    assert engine.send() == run_ahead
    assert engine.send() == 0
    engine.deliver()
    assert engine.send() == 1
    engine.run()


def test_no_row_is_planned_beyond_max_tokens() -> None:
    engine = Recorder(99, run_ahead=3)
    engine.submit(prompt(5), 4, ignore_eos=True)
    engine.run()
    assert [rows(step) for step in engine.steps] == [
        [(0, 0, 5, True)],
        [(0, 5, 1, True)],
        [(0, 6, 1, True)],
        [(0, 7, 1, True)],
    ]


def test_a_slot_that_changes_hands_twice_under_one_step() -> None:
    """The step in flight is the first holder's: the second's departure must not claim its token."""
    engine = Engine(99, max_num_seqs=1, run_ahead=3)
    first = engine.submit(prompt(5), 9, ignore_eos=True)
    engine.send()
    engine.abort(first)
    engine.deliver()
    second = engine.submit(prompt(5, 2), 9, ignore_eos=True)
    engine.send()
    sequence = engine.scheduler._by_id[second]
    engine.scheduler._preempt(sequence)
    assert [plan.departed[0].seq_id for plan in engine.scheduler._in_flight] == [1, 1, 2]
    assert sequence.in_flight == 1
    engine.run()


@pytest.mark.parametrize("state", ["queued", "prefill", "decode", "drained", "preempted", "held"])
def test_an_abort_frees_everything_in_any_state(state: str) -> None:
    """CASES 94."""
    engine = Engine(99, max_num_batched_tokens=8, max_num_seqs=2)
    ids = [engine.submit(prompt(20), 6, ignore_eos=True, n=2 if state == "held" else 1)]
    if state == "held":
        ids.append(ids[0] + 1)
    if state != "queued":
        engine.send()
    if state in ("decode", "drained", "preempted"):
        for _ in range(4 if state != "drained" else 7):
            engine.deliver()
            engine.send()
    if state == "preempted":
        engine.scheduler._preempt(engine.scheduler._by_id[ids[0]])
    engine.abort(*reversed(ids))
    assert [engine.told[i].finish for i in ids] == [FINISH_ABORT] * len(ids)
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    engine.scheduler.kv.check_idle()
    engine.abort(*ids)  # again, and of nobody
    engine.abort(12345)
    engine.submit(prompt(7), 3)
    engine.run()


def test_samples_share_the_prompt() -> None:
    engine = Recorder(99, max_num_seqs=4, max_num_batched_tokens=64)
    engine.submit(prompt(22), 6, n=4, ignore_eos=True)
    engine.run()
    assert engine.worker.num_computed == 22 + 3 + 4 * 5
    copies = [copy for step in engine.steps for copy in step.copies]
    assert len(copies) == 3
    assert len({tuple(told.tokens) for told in engine.told.values()}) == 4
    assert engine.core.stats().prompt_tokens == 22


def test_samples_go_on_when_the_first_is_aborted_before_the_prompt_is_computed() -> None:
    engine = Engine(99, max_num_batched_tokens=8)
    first = engine.submit(prompt(22), 6, n=3)
    engine.send()
    engine.abort(first)
    engine.run()
    assert engine.worker.num_computed < 2 * 22 + 3 * 6  # the heir's prompt is shared again


def test_samples_without_a_slot_start_later_from_the_cache() -> None:
    engine = Engine(99, max_num_seqs=1, block_size=4, max_num_batched_tokens=64)
    first = engine.submit(prompt(22), 3, n=2, ignore_eos=True)
    engine.run()
    assert engine.told[first].cached == 0 and engine.told[first + 1].cached == 20


def test_a_running_sequence_never_starves_behind_a_blocked_queue() -> None:
    engine = Engine(9, block_size=4, max_num_seqs=4)
    for number in range(12):
        engine.submit(prompt(4 + number, number), 16, ignore_eos=True, n=1 + number % 3)
    engine.run()
    assert not engine.errors()
