"""Who is taken for stuck: plain calls with made-up records and times."""

from dataclasses import replace

import pytest

from zlm.process.heartbeat import Beat
from zlm.process.watch import LOOK_SECONDS, PATIENCE_STEPS, Silence, Watch

SECOND = 10**9


def beat(role: str, **fields: object) -> Beat:
    given: dict = {"index": 0, "pid": 7, "last_loop_ns": 1, "steps": 0, "work_pending": False}
    return Beat(role=role, **(given | {"last_alive_ns": 1} | fields))


def look(watch: Watch, start: Beat, seconds: int, **per_second: int) -> Beat:
    """Look once a second for *seconds*, while the named fields grow by so much a second."""
    for second in range(seconds + 1):
        grown = {name: getattr(start, name) + second * by for name, by in per_second.items()}
        shown = replace(start, **grown)
        watch.look([shown], 100.0 + second)
    return shown


@pytest.mark.parametrize("role", ["frontend", "tokenizer", "engine", "worker"])
def test_a_process_that_does_not_run_has_stalled_whatever_its_role(role: str) -> None:
    watch = Watch()
    look(watch, beat(role), 6)
    [stall] = watch.stalls(5.0)
    assert (stall.role, stall.seconds, stall.is_stopped) == (role, 6.0, True)
    assert stall.describe() == f"{role} 0 has not run for 6 s"
    assert watch.stalls(6.0) == []


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_an_idle_engine_that_runs_has_not_stalled(role: str) -> None:
    watch = Watch()
    look(watch, beat(role), 1000, last_alive_ns=SECOND)
    assert watch.stalls(5.0) == []


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_work_without_steps_is_a_stall_even_if_the_loop_goes_round(role: str) -> None:
    watch = Watch()
    start = beat(role, work_pending=True)
    look(watch, start, 6, last_alive_ns=SECOND, last_loop_ns=SECOND)
    [stall] = watch.stalls(5.0)
    assert not stall.is_stopped
    assert stall.describe() == f"{role} 0 has made no progress for 6 s"
    look(watch, start, 60, last_alive_ns=SECOND, steps=1)
    assert watch.stalls(5.0) == []


@pytest.mark.parametrize("role", ["frontend", "tokenizer"])
def test_a_loop_that_stands_still_is_a_stall_whether_there_is_work_or_not(role: str) -> None:
    watch = Watch()
    look(watch, beat(role), 6, last_alive_ns=SECOND)
    assert [stall.is_stopped for stall in watch.stalls(5.0)] == [False]
    look(watch, beat(role), 60, last_alive_ns=SECOND, last_loop_ns=SECOND)
    assert watch.stalls(5.0) == []


def test_steps_that_take_long_are_given_time_but_a_stopped_process_is_not() -> None:
    watch = Watch()
    start = beat("worker", work_pending=True, longest_step_ns=10 * SECOND)
    last = look(watch, start, 10 * PATIENCE_STEPS, last_alive_ns=SECOND)
    assert watch.stalls(5.0) == []
    for second in range(1, 3):
        watch.look([replace(last, last_alive_ns=-second)], 100.0 + 10 * PATIENCE_STEPS + second)
    assert [stall.is_stopped for stall in watch.stalls(5.0)] == [False]
    watch = Watch()
    look(watch, start, 6)
    assert [stall.is_stopped for stall in watch.stalls(5.0)] == [True]


def test_an_engine_core_that_waits_for_a_worker_is_not_to_blame() -> None:
    watch = Watch()
    for second in range(8):
        engine = beat("engine", work_pending=True, last_alive_ns=second)
        worker = beat("worker", work_pending=second > 1, last_alive_ns=second)
        watch.look([engine, worker], 100.0 + second)
        assert [stall.role for stall in watch.stalls(4.0)] == ["worker"] * (second > 6)


def test_nobody_is_blamed_for_a_pause_of_the_machine_or_of_the_onlooker() -> None:
    watch = Watch()
    here = [beat("engine", work_pending=True), beat("tokenizer")]
    watch.look(here, 100.0)
    watch.look(here, 5000.0)
    assert watch.stalls(LOOK_SECONDS) == []


def test_a_successor_starts_anew_and_who_is_gone_is_forgotten() -> None:
    watch = Watch()
    look(watch, beat("tokenizer"), 6)
    watch.look([beat("tokenizer", pid=8)], 107.0)
    assert watch.stalls(0.5) == []
    look(watch, beat("tokenizer"), 6)
    watch.look([], 107.0)
    assert watch.stalls(0.5) == []


def test_silence_of_those_who_load_is_counted_from_their_last_news() -> None:
    silence = Silence()
    for second in range(12):
        news = {("worker", 0): second // 5, ("tokenizer", 0): 3}
        seconds = silence.look(news, 100.0 + second)
    assert seconds == {("worker", 0): 1.0, ("tokenizer", 0): 11.0}
    assert silence.look({("worker", 0): 2}, 5000.0) == {("worker", 0): 1.0 + LOOK_SECONDS}
    assert silence.look({("tokenizer", 0): 3}, 5001.0) == {("tokenizer", 0): 0.0}


def test_only_those_asked_for_are_told_and_the_stopped_come_first() -> None:
    watch = Watch()
    for second in range(8):
        alive = beat("tokenizer", last_alive_ns=second, last_loop_ns=1)
        watch.look([alive, beat("worker", index=1)], 100.0 + second)
    assert [stall.role for stall in watch.stalls(5.0)] == ["worker", "tokenizer"]
    assert [stall.role for stall in watch.stalls(5.0, [("tokenizer", 0), ("x", 0)])] == [
        "tokenizer"
    ]
