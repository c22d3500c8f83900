"""What the engine counts."""

import numpy as np
import pytest
from driver import Engine

from zlm.engine.stats import Statistics, clear_gauges
from zlm.metrics import EngineStats, engine_stats, histogram_buckets
from zlm.process.counts import CountPage


def prompt(length: int) -> list[int]:
    return [number % 20 + 4 for number in range(length)]


def count(stats: EngineStats, name: str) -> int:
    return sum(stats.histograms[name][0])


def test_counters_of_a_mixed_life() -> None:
    engine = Engine(99, run_ahead=1, max_num_batched_tokens=64)
    engine.submit(prompt(10), 5, n=2, ignore_eos=True)
    engine.submit(prompt(10), 5, ignore_eos=True)
    aborted = engine.submit(prompt(12), 5, ignore_eos=True)
    engine.submit(prompt(100), 5)  # refused
    engine.send()
    engine.deliver()
    assert engine.core.stats().num_running == 3 and engine.core.stats().num_waiting == 1
    assert engine.core.stats().kv_usage > 0
    engine.abort(aborted)
    engine.run()
    stats = engine.core.stats()
    generated = sum(len(told.tokens) for told in engine.told.values())
    assert stats.generation_tokens == generated == 5 + 5 + 5 + 1
    assert stats.prompt_tokens == 10 + 10 + 12
    assert stats.success == {"stop": 0, "length": 3, "abort": 1, "error": 1}
    assert stats.num_running == stats.num_waiting == 0 and stats.kv_usage == 0.0
    assert stats.num_blocks == 98 and stats.block_size_tokens == 4
    assert count(stats, "time_to_first_token_seconds") == 4
    assert count(stats, "inter_token_latency_seconds") == generated - 4
    assert count(stats, "iteration_tokens_total") == stats.steps
    assert count(stats, "e2e_request_latency_seconds") == 4
    assert count(stats, "request_params_n") == 3
    assert count(stats, "request_prompt_tokens") == 3
    assert count(stats, "request_queue_time_seconds") == 4
    assert stats.histograms["iteration_tokens_total"][1] == engine.worker.num_computed
    assert stats.histograms["request_generation_tokens"][1] == generated


def test_latencies_are_differences_of_the_times_given() -> None:
    engine = Engine(99, run_ahead=1)
    engine.submit(prompt(4), 3, ignore_eos=True)  # arrives at 1, sent at 2
    engine.run()  # tokens at 3, 5, 7
    stats = engine.core.stats()
    sums = {name: total for name, (_, total) in stats.histograms.items()}
    assert sums["request_queue_time_seconds"] == pytest.approx(1.0)
    assert sums["time_to_first_token_seconds"] == pytest.approx(2.0)
    assert sums["request_prefill_time_seconds"] == pytest.approx(1.0)
    assert sums["inter_token_latency_seconds"] == pytest.approx(4.0)
    assert sums["request_decode_time_seconds"] == pytest.approx(4.0)
    assert sums["request_time_per_output_token_seconds"] == pytest.approx(2.0)
    assert sums["e2e_request_latency_seconds"] == pytest.approx(6.0)


def test_every_gap_is_counted_though_a_sequence_is_preempted() -> None:
    engine = Engine(11, block_size=4)
    for _ in range(4):
        engine.submit(prompt(8), 24, ignore_eos=True)
    engine.run()
    stats = engine.core.stats()
    assert stats.preemptions > 0
    assert count(stats, "inter_token_latency_seconds") == 4 * 23
    assert count(stats, "time_to_first_token_seconds") == 4


def test_there_is_a_histogram_for_every_bucket_table() -> None:
    engine = Engine(99, max_model_len=64)
    engine.submit(prompt(4), 3)
    engine.run()
    stats = engine.core.stats()
    buckets = histogram_buckets(64)
    assert stats.histograms.keys() == buckets.keys()
    for name, bounds in buckets.items():
        assert len(stats.histograms[name][0]) == len(bounds) + 1


def test_steps_and_their_time_are_counted_and_when_the_worker_ran_dry() -> None:
    engine = Engine(99, run_ahead=1)
    engine.submit(prompt(4), 3, ignore_eos=True)
    engine.run()
    stats = engine.core.stats()
    assert stats.steps == 3 == count(stats, "zlm:engine_step_seconds")
    assert stats.run_ahead_stalls == 2  # not after the last step: nothing was left to do
    ahead = Engine(99, run_ahead=2)
    ahead.submit(prompt(4), 3, ignore_eos=True)
    ahead.run()
    assert ahead.core.stats().run_ahead_stalls == 0


def test_gauges_that_a_killed_engine_core_left_are_cleared_and_counts_stay() -> None:
    page = CountPage()
    killed = Statistics(64, page)
    killed.show(num_running=5, num_waiting=2, kv_usage=0.5)
    killed.preemptions += 3
    clear_gauges(page)
    stats = engine_stats(page.values())
    assert stats.num_running == stats.num_waiting == 0 and stats.kv_usage == 0.0
    assert stats.preemptions == 3


class Timed(Engine):
    """Keeps what is told of first tokens: sequence → (when it got room, the token's time)."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.times: dict[int, tuple[float, float]] = {}

    def _hear(self, outputs) -> None:
        for _, output in outputs:
            seq_ids = np.frombuffer(output.seq_ids, np.int64)
            for row, *at in output.times:
                assert int(seq_ids[row]) not in self.times, "told twice"
                self.times[int(seq_ids[row])] = tuple(at)
        super()._hear(outputs)


def test_each_sequence_tells_once_when_it_got_room_and_had_its_first_token() -> None:
    engine = Timed(11, block_size=4, max_num_batched_tokens=4, run_ahead=1)
    ids = [engine.submit(prompt(8), 20, owner=owner, ignore_eos=True) for owner in (0, 1, 0, 1)]
    engine.run()
    assert engine.core.stats().preemptions > 0
    assert set(engine.times) == set(ids)
    sums = {name: total for name, (_, total) in engine.core.stats().histograms.items()}
    prefill = sum(first - started for started, first in engine.times.values())
    assert prefill == pytest.approx(sums["request_prefill_time_seconds"]) and prefill > 4
