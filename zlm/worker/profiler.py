"""Measuring some of a worker's steps: how long they take it, and where the time goes.

A ``StepProfiler`` stands in the runner's place and hands every call on. Armed by a ``Profile`` it
lets ``skip`` steps pass and measures the next ``steps``, or as many of them as come until it is
asked for the figures; with a path it also runs torch's profiler over them, writes its Chrome trace
there and counts the kernels in it. Knows nothing of what a step computes.

    launch   ... | k | k+1 | ... | k+n-1 |  ...        k = skip, n = steps
                 ^ start          finish ^   before the next launch, or when the last is collected
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from zlm.messages import Execute, KernelTime, Masks, Profile, Profiled, StepResult
from zlm.worker.runner import Runner

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
HOST_CALLS = ("cuda_runtime", "cuda_driver")
MICROSECOND = 1e-6


class StepProfiler:
    """A runner around *runner*. Owns the measurement in progress, if there is one."""

    def __init__(
        self, runner: Runner, rank: int, *, on_gpu: bool, tell: Callable[[Profiled], None]
    ) -> None:
        """*tell* sends an answer to who asked."""
        self._runner = runner
        self._rank = rank
        self._on_gpu = on_gpu
        self._tell = tell
        self.done = runner.done  # asked without end while a step runs: not one call more
        self.use_idle_time = runner.use_idle_time
        self._task: Profile | None = None
        self._launched = self._collected = 0  # steps since it was armed
        self._measured = Profiled(rank)  # what was found last
        # Lifetime: a measurement
        self._recorder: profile | None = None
        self._began = self._ended = (0.0, 0.0)  # wall and CPU time, at its start and last collect
        self._in_calls = 0.0

    def take(self, task: Profile) -> None:
        """Start anew with *task*, or with ``steps`` 0 tell what has been measured."""
        measuring, self._task = self._task, None
        if measuring is not None and self._launched > measuring.skip:
            self._finish(measuring)
        if task.steps == 0:
            self._tell(self._measured)
            return
        self._task, self._launched, self._collected = task, 0, 0
        self._measured = Profiled(self._rank)
        self._tell(self._measured)

    @property
    def in_flight(self) -> bool:
        return self._runner.in_flight

    @property
    def awaits_masks(self) -> bool:
        return self._runner.awaits_masks

    def mask(self, masks: Masks) -> None:
        """Let a step sample."""
        began = time.perf_counter()
        self._runner.mask(masks)
        self._in_calls += time.perf_counter() - began

    def launch(self, message: Execute) -> None:
        """Launch a step."""
        task = self._task
        if task is not None:
            if self._launched == task.skip:
                self._start(task)
            elif self._launched == task.skip + task.steps:
                self._finish(task)
            self._launched += 1
        began = time.perf_counter()
        self._runner.launch(message)
        self._in_calls += time.perf_counter() - began

    def collect(self) -> StepResult:
        """Return the result of the oldest step launched."""
        began = time.perf_counter()
        result = self._runner.collect()
        self._in_calls += time.perf_counter() - began
        task = self._task
        if task is not None:
            self._ended = _clocks()
            self._collected += 1
            if self._collected == task.skip + task.steps:
                self._finish(task)
        return result

    def _start(self, task: Profile) -> None:
        if task.path:
            self._wait_for_gpu()
            activities = [ProfilerActivity.CPU]
            if self._on_gpu:
                activities.append(ProfilerActivity.CUDA)
            self._recorder = profile(activities=activities)
            self._recorder.start()
        self._in_calls = 0.0
        self._began = self._ended = _clocks()

    def _finish(self, task: Profile) -> None:
        self._task = None
        if task.path:
            self._wait_for_gpu()
        ended = _clocks() if self.in_flight else self._ended
        recorder, self._recorder = self._recorder, None
        kernels: list[KernelTime] = []
        waiting = device = 0.0
        if recorder is not None:
            recorder.stop()
            recorder.export_chrome_trace(task.path)
            events = json.loads(Path(task.path).read_text())["traceEvents"]
            waiting, device = waiting_seconds(events), device_seconds(events)
            kernels = device_kernels(events) if self._on_gpu else cpu_operators(recorder)
        self._measured = Profiled(
            self._rank,
            steps=min(self._launched - task.skip, task.steps),
            wall_seconds=ended[0] - self._began[0],
            cpu_seconds=ended[1] - self._began[1],
            in_calls_seconds=self._in_calls,
            waiting_seconds=waiting,
            device_seconds=device,
            kernels=kernels,
        )

    def _wait_for_gpu(self) -> None:
        """Let no kernel that was launched before a measurement's edge run beyond it."""
        if self._on_gpu:
            torch.cuda.synchronize()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def device_kernels(events: list[dict[str, Any]]) -> list[KernelTime]:
    """Return launches and time of each kernel, copy and fill in a trace, the longest first."""
    launches: dict[str, int] = defaultdict(int)
    micros: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in DEVICE_WORK:
            launches[event["name"]] += 1
            micros[event["name"]] += event["dur"]
    names = sorted(micros, key=micros.__getitem__, reverse=True)
    return [KernelTime(name, launches[name], micros[name] * MICROSECOND) for name in names]


def device_seconds(events: list[dict[str, Any]]) -> float:
    """Return how long the device of a trace had any work: overlapping kernels count once."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in DEVICE_WORK)
    busy = 0.0
    until = float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy * MICROSECOND


def waiting_seconds(events: list[dict[str, Any]]) -> float:
    """Return how long the host of a trace stood in calls that wait for the device."""
    return MICROSECOND * sum(
        event["dur"]
        for event in events
        if event.get("cat") in HOST_CALLS and "Synchronize" in event["name"]
    )


def cpu_operators(recorder: profile) -> list[KernelTime]:
    """Return calls and own time of each operator on the CPU, the longest first."""
    averages = sorted(recorder.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
    return [KernelTime(e.key, e.count, e.self_cpu_time_total * MICROSECOND) for e in averages]
