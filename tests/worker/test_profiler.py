"""Measuring steps: which ones count, what is told, and what is read from a trace."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from zlm.messages import Execute, Profile, Profiled, StepResult
from zlm.worker import profiler
from zlm.worker.profiler import StepProfiler


class FakeRunner:
    """Multiplies matrices; results wait until they are collected."""

    def __init__(self) -> None:
        self.results: deque[StepResult] = deque()

    @property
    def in_flight(self) -> bool:
        return bool(self.results)

    def launch(self, message: Execute) -> None:
        torch.ones(4, 4) @ torch.ones(4, 4)
        self.results.append(StepResult(message.step, b""))

    def done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        return self.results.popleft()

    def use_idle_time(self) -> bool:
        return False


class Bench:
    def __init__(self) -> None:
        self.told: list[Profiled] = []
        self.runner = StepProfiler(FakeRunner(), 0, on_gpu=False, tell=self.told.append)
        self.step = 0

    def launch(self) -> None:
        self.step += 1
        self.runner.launch(Execute(self.step, b"", b"", b"", b""))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.launch()
            assert self.runner.in_flight and self.runner.done()
            assert self.runner.collect().step == self.step

    def ask(self, **task: Any) -> Profiled:
        """Send a Profile and return its one answer."""
        self.told.clear()
        self.runner.take(Profile(**task))
        (told,) = self.told
        return told


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nothing_is_measured_unless_asked(bench: Bench) -> None:
    bench.run(3)
    assert bench.told == []
    assert bench.ask(steps=0) == Profiled(0)


def test_steps_after_those_to_skip_are_measured(bench: Bench) -> None:
    assert bench.ask(steps=3, skip=2) == Profiled(0)
    bench.run(9)
    told = bench.ask(steps=0)
    assert told.steps == 3 and told.kernels == []
    assert 0 < told.in_calls_seconds <= told.wall_seconds
    assert bench.ask(steps=0) == told


def test_steps_that_have_come_are_measured_when_fewer_come(bench: Bench) -> None:
    bench.ask(steps=100, skip=1)
    bench.run(1)
    assert bench.ask(steps=0).steps == 0
    bench.ask(steps=100, skip=1)
    bench.run(5)
    told = bench.ask(steps=0)
    assert told.steps == 4
    assert told.in_calls_seconds <= told.wall_seconds


def test_with_steps_in_flight_the_next_launch_ends_it(bench: Bench) -> None:
    bench.ask(steps=2)
    for _ in range(4):
        bench.launch()
    assert bench.ask(steps=0).steps == 2


def test_a_trace_and_a_count_of_operators(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    bench.ask(steps=4, skip=1, path=str(path))
    bench.run(6)
    counts = {kernel.name: kernel.launches for kernel in bench.ask(steps=0).kernels}
    assert counts["aten::mm"] == 4
    assert json.loads(path.read_text())["traceEvents"]


def test_a_new_task_starts_over(bench: Bench) -> None:
    bench.ask(steps=10)
    bench.run(2)
    assert bench.ask(steps=1) == Profiled(0)
    bench.run(2)
    assert bench.ask(steps=0).steps == 1


def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


TRACE: list[dict[str, Any]] = [
    event("kernel", "a", 0, 10),
    event("kernel", "b", 5, 10),  # begins before a has ended
    event("kernel", "a", 20, 1),
    event("gpu_memcpy", "copy", 22, 2),
    event("cpu_op", "aten::mm", 0, 100),
    event("cuda_runtime", "cudaEventSynchronize", 0, 7),
    event("cuda_runtime", "cudaGraphLaunch", 7, 3),
    {"ph": "M", "name": "process_name"},
]


def test_kernels_of_a_trace() -> None:
    found = [(k.name, k.launches, round(k.seconds * 1e6)) for k in profiler.device_kernels(TRACE)]
    assert found == [("a", 2, 11), ("b", 1, 10), ("copy", 1, 2)]


def test_overlapping_kernels_count_once() -> None:
    assert profiler.device_seconds(TRACE) == pytest.approx(18e-6)


def test_only_waiting_calls_count_as_waiting() -> None:
    assert profiler.waiting_seconds(TRACE) == pytest.approx(7e-6)
