"""Host time of the engine core for one step of steady decode: plan + encode, and decode + apply.

No worker and no sockets: results are made up at once, as many tokens as rows sample. What is timed
is everything the engine process does for a step but the system calls, in three parts:

    plan    EngineCore.next_steps, and encoding the Execute message
    apply   decoding the StepResult, EngineCore.apply
    tell    encoding the StepOutput

    python bench/scheduler.py [--running 256] [--steps 400] [--prompt 512]

Prints a table, and as its last line one JSON document.
"""

import argparse
import gc
import json
import time

import msgspec
import numpy as np

from zlm.config import CacheOptions, Config, KVGroup, ModelOptions, ModelSpec, Resolved
from zlm.engine.core import EngineCore
from zlm.messages import Execute, SamplingSpec, StepOutput, StepResult, Submit, ToEngine

VOCAB = 128_256
BUDGET = 8192


def resolved(windows: tuple[int, ...], running: int, prefix_caching: bool) -> Resolved:
    """Return a configuration with one KV group a window."""
    spec = ModelSpec(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=1,
        intermediate_size=1,
        num_layers=len(windows),
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_position=16_384,
        rms_norm_eps=1e-6,
        eos_token_ids=(1, 2),
    )
    return Resolved(
        config=Config(
            model=ModelOptions(model="none"),
            cache=CacheOptions(enable_prefix_caching=prefix_caching),
        ),
        spec=spec,
        model_path="",
        tokenizer_path="",
        served_names=("none",),
        device="cpu",
        max_model_len=16_384,
        max_num_seqs=running,
        max_num_batched_tokens=BUDGET,
        kv_groups=tuple(
            KVGroup(layers=(layer,), window_tokens=window, num_kv_heads=1, head_dim=1)
            for layer, window in enumerate(windows)
        ),
    )


class Measured:
    """An engine core, the coders of its process, and the microseconds each part took."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.micros: dict[str, list[float]] = {"plan": [], "apply": [], "tell": []}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._random = np.random.default_rng(0)
        self._in_flight: list[Execute] = []

    def step(self) -> None:
        """Fill the run-ahead, then take in one result."""
        clock = time.perf_counter
        began = clock()
        steps = list(self.core.next_steps(clock()))
        for step in steps:
            self._encoder.encode(step)
        planned = clock()
        self._in_flight += steps
        frame = self._encoder.encode(self._result(self._in_flight.pop(0)))
        came = clock()
        outputs = self.core.apply(self._decoder.decode(frame), clock())
        applied = clock()
        for _, output in outputs:
            assert isinstance(output, StepOutput)
            self._encoder.encode(output)
        told = clock()
        for part, seconds in (
            ("plan", planned - began),
            ("apply", applied - came),
            ("tell", told - applied),
        ):
            self.micros[part].append(seconds * 1e6)

    def _result(self, step: Execute) -> StepResult:
        count = step.sample.count(1)
        tokens = self._random.integers(3, VOCAB, count).astype(np.int32)
        return StepResult(step=step.step, token_ids=tokens.tobytes(), seconds=0.001)


def measure(
    windows: tuple[int, ...], prefix_caching: bool, running: int, steps: int, prompt: int
) -> dict[str, float]:
    """Return mean microseconds a step of each part, and the median and 99th percentile of all."""
    per_sequence = -(-(prompt + 16 + 4 * steps) // 16) + 1
    core = EngineCore(
        resolved(windows, running, prefix_caching), [running * per_sequence + 1] * len(windows)
    )
    measured = Measured(core)
    random = np.random.default_rng(1)
    for number in range(running):
        length = prompt + number % 16  # block boundaries are spread over the steps
        submit = Submit(
            seq_id=number,
            arrival=0.0,
            token_ids=random.integers(3, VOCAB, length).astype(np.int32).tobytes(),
            max_tokens=4 * steps,
            sampling=SamplingSpec(seed=number),
        )
        core.submit(submit)
    while core.scheduler.num_waiting:
        measured.step()
    for _ in range(20):
        measured.step()
    gc.collect()
    gc.freeze()
    measured.micros = {part: [] for part in measured.micros}
    for _ in range(steps):
        measured.step()
    assert core.scheduler.num_running == running
    total = np.sum(list(measured.micros.values()), axis=0)
    return {
        **{part: float(np.mean(values)) for part, values in measured.micros.items()},
        "mean": float(total.mean()),
        "p50": float(np.percentile(total, 50)),
        "p99": float(np.percentile(total, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="host time of a steady decode step")
    parser.add_argument("--running", type=int, default=256, help="sequences decoding")
    parser.add_argument("--steps", type=int, default=400, help="steps measured")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens of a sequence")
    options = parser.parse_args()
    cases = {
        "one group, no prefix cache": ((0,), False),
        "one group": ((0,), True),
        "full + sliding 512": ((0, 512), True),
    }
    columns = ("plan", "apply", "tell", "mean", "p50", "p99")
    print(f"{options.running} running, microseconds a step")
    print(f"{'case':30}" + "".join(f"{column:>9}" for column in columns))
    results = {}
    for name, (windows, caching) in cases.items():
        figures = measure(windows, caching, options.running, options.steps, options.prompt)
        results[name] = {column: round(figures[column], 1) for column in columns}
        print(f"{name:30}" + "".join(f"{figures[column]:9.1f}" for column in columns))
    print(json.dumps({"bench": "scheduler", "running": options.running, "micros": results}))


if __name__ == "__main__":
    main()
