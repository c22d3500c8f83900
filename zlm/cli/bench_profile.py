"""``zlm bench profile MODEL``: where the time of a step goes, kernel by kernel.

Starts the engine offline, as ``LLM`` does, and measures a decode step of a full batch and the
prefill of that batch: first with nothing but clocks, then under torch's profiler. Owns the order of
measurements and the tables; the worker measures (``zlm.worker.profiler``), and the engine core's
time is read from its process's CPU clock.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zlm.cli.failures import told
from zlm.cli.parse import parse
from zlm.errors import ConfigError, Internal
from zlm.process.logs import start_logging

if TYPE_CHECKING:  # importing the offline engine would slow --help down
    from zlm.messages import Profiled
    from zlm.offline import OfflineEngine

NAME_WIDTH = 72
MOST_ROWS = 40  # kernels that a table shows
ALL_STEPS = 2**31
SETTLING_STEPS = 8  # decode steps that precede a measurement
FIRST_ID = 10  # prompts are random ids from here on: the special ones come before

EPILOG = """\
All flags of zlm serve that concern the model, the KV cache, the scheduler and the device are taken
too, --load-format dummy among them; a tokenizer is never loaded.
"""


def main(words: Sequence[str], name: str = "profile") -> int:
    """Run ``zlm bench profile`` with its arguments *words*; return the exit status."""
    options, flags = _parser(name).parse_known_args(list(words))

    def work() -> int:
        if options.batch < 1 or options.input_tokens < 1 or options.steps < 1:
            raise ConfigError("numbers must be at least 1")
        config, _ = parse([options.model, "--skip-tokenizer-init", *flags])
        start_logging("bench")
        from zlm.offline import OfflineEngine

        engine = OfflineEngine(config)
        try:
            result = Profiling(engine, options).run()
        finally:
            engine.close()
        print(json.dumps(result))
        return 0

    return told(f"bench {name}", work)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"zlm bench {name}",
        description="Measure where the time of a step goes.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument("--input-tokens", type=int, default=512, help="each has (default: 512)")
    parser.add_argument("--steps", type=int, default=32, help="measured (default: 32)")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write Chrome traces (default: .)"
    )
    return parser


class Profiling:
    """The measurements of one engine, in their order."""

    def __init__(self, engine: "OfflineEngine", options: argparse.Namespace) -> None:
        self._engine = engine
        self._batch: int = options.batch
        self._input_tokens: int = options.input_tokens
        self._steps: int = options.steps
        self._folder: Path = (options.output or Path()).absolute()
        self._random = random.Random(0)
        self._next_id = 0

    def run(self) -> dict[str, Any]:
        """Measure, print the tables and return all figures."""
        self._folder.mkdir(parents=True, exist_ok=True)
        prefill_steps = self._steps_of(1)  # a warm-up, too
        skip = prefill_steps + SETTLING_STEPS
        # While late prompts are computed, early sequences decode already: none ends in the window.
        output_tokens = skip + self._steps + SETTLING_STEPS
        self._generate(output_tokens)  # what is made on demand for these steps is made now
        plain, engine_seconds = self._measure(skip, self._steps, output_tokens, "")
        decode, _ = self._measure(skip, self._steps, output_tokens, "decode")
        prefill, _ = self._measure(0, ALL_STEPS, 1, "prefill")
        host = {
            "wall_us": _micros(plain.wall_seconds, plain.steps),
            "worker_in_calls_us": _micros(plain.in_calls_seconds, plain.steps),
            "worker_cpu_us": _micros(plain.cpu_seconds, plain.steps),
            "engine_cpu_us": _micros(engine_seconds, 1),
        }
        self._show(f"prefill, {self._batch} x {self._input_tokens} tokens", prefill)
        self._show(f"decode, batch {self._batch}", decode)
        print(
            f"\nHost, µs a decode step without the profiler: {host['wall_us']} from step to step; "
            f"worker {host['worker_in_calls_us']} launching and collecting, "
            f"{host['worker_cpu_us']} of CPU; engine core {host['engine_cpu_us']} of CPU\n"
            f"Traces for ui.perfetto.dev: {self._trace('prefill')}, {self._trace('decode')}"
        )
        return {
            "bench": "profile",
            "model": self._engine.resolved.config.model.model,
            "batch": self._batch,
            "input_tokens": self._input_tokens,
            "host": host,
            "decode": _figures(decode),
            "prefill": _figures(prefill),
        }

    def _steps_of(self, output_tokens: int) -> int:
        before = self._engine.stats().steps
        self._generate(output_tokens)
        return self._engine.stats().steps - before

    def _measure(
        self, skip: int, steps: int, output_tokens: int, trace: str
    ) -> tuple["Profiled", float]:
        """Return the worker's figures and the engine core's CPU seconds a step of decode."""
        from zlm.messages import Profile

        path = str(self._trace(trace)) if trace else ""
        self._engine.profile(Profile(steps=steps, skip=skip, path=path))
        engine_seconds = self._generate(output_tokens)
        profiled = self._engine.profile(Profile(steps=0))
        if profiled.steps == 0:
            raise Internal("no step was measured")
        return profiled, engine_seconds

    def _generate(self, output_tokens: int) -> float:
        """Run the batch; return the engine core's CPU seconds a step, over steps that decode."""
        from zlm.messages import Generate
        from zlm.sampling_params import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        vocab = self._engine.resolved.spec.vocab_size
        requests = []
        for _ in range(self._batch):
            prompt = [self._random.randrange(FIRST_ID, vocab) for _ in range(self._input_tokens)]
            self._next_id += 1
            requests.append(Generate(self._next_id, time.monotonic(), [prompt], params))
        clock = DecodeClock(self._engine.pid("engine"), self._batch)
        self._engine.run(requests, clock.advance)
        return clock.seconds_a_step

    def _trace(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _show(self, title: str, profiled: "Profiled") -> None:
        figures = _figures(profiled)
        on_gpu = f", GPU busy {figures['device_us']} µs, host waiting {figures['waiting_us']} µs"
        print(
            f"\n{title}: {profiled.steps} steps of {figures['wall_us']} µs under the profiler"
            f"{on_gpu if profiled.device_seconds else ''}, {figures['launches']} launches"
        )
        print(f"{'kernel':{NAME_WIDTH}}{'launches/step':>14}{'µs/step':>11}{'share':>8}")
        for kernel in figures["kernels"]:
            name = kernel["name"]
            name = name if len(name) < NAME_WIDTH else name[: NAME_WIDTH - 4] + "..."
            print(
                f"{name:{NAME_WIDTH}}{kernel['launches']:>14}{kernel['us']:>11}"
                f"{kernel['share']:>8.1%}"
            )


class DecodeClock:
    """CPU time of a process while a whole batch decodes, told of tokens as they come.

    Such a step gives every sequence one token. What comes of several steps at once counts too.
    """

    def __init__(self, pid: int, batch: int) -> None:
        self._pid = pid
        self._batch = batch
        self._began: float | None = None  # the clock after the first such step
        self._steps = 0  # since then
        self._seconds = 0.0

    def advance(self, _: int, tokens: int) -> None:
        """Take note of *tokens* more."""
        if not tokens or tokens % self._batch:
            return
        now = _cpu_seconds(self._pid)
        if self._began is None:
            self._began = now
            return
        self._steps += tokens // self._batch
        self._seconds = now - self._began

    @property
    def seconds_a_step(self) -> float:
        """CPU seconds a step; 0 if there were no two steps to measure between."""
        return self._seconds / self._steps if self._steps else 0.0


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that all threads of a process have used."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux: the id of the process's CPU clock
    except OSError:  # a sandbox without such clocks: user and system time in ticks of 10 ms
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _figures(profiled: "Profiled") -> dict[str, Any]:
    """Return *profiled* by step: µs, launches, and the kernels, the least of them together."""
    from zlm.messages import KernelTime

    steps = profiled.steps
    shown, rest = profiled.kernels[:MOST_ROWS], profiled.kernels[MOST_ROWS:]
    if rest:
        launches = sum(kernel.launches for kernel in rest)
        seconds = sum(kernel.seconds for kernel in rest)
        shown = [*shown, KernelTime(f"{len(rest)} others", launches, seconds)]
    total = sum(kernel.seconds for kernel in shown) or 1.0
    return {
        "steps": steps,
        "wall_us": _micros(profiled.wall_seconds, steps),
        "in_calls_us": _micros(profiled.in_calls_seconds, steps),
        "waiting_us": _micros(profiled.waiting_seconds, steps),
        "device_us": _micros(profiled.device_seconds, steps),
        "launches": round(sum(kernel.launches for kernel in shown) / steps, 1),
        "kernels": [
            {
                "name": kernel.name,
                "launches": round(kernel.launches / steps, 2),
                "us": _micros(kernel.seconds, steps),
                "share": round(kernel.seconds / total, 4),
            }
            for kernel in shown
        ],
    }


def _micros(seconds: float, steps: int) -> float:
    return round(seconds / steps * 1e6, 1)
