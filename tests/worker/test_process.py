"""The worker process: its loop on real sockets, and a whole one started as a child."""

import threading
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq
from worker_steps import execute, ids, join, tokens_of

from zlm.config import (
    CacheOptions,
    Config,
    ModelOptions,
    ModelSpec,
    ParallelOptions,
    Resolved,
    SchedulerOptions,
    resolve,
)
from zlm.errors import ConfigError
from zlm.ipc.sockets import Inbox, Outbox, address
from zlm.messages import (
    Execute,
    Fatal,
    Launch,
    Profile,
    Progress,
    Ready,
    StepResult,
    Stop,
    ToEngine,
    ToSupervisor,
    ToWorker,
    WorkerReady,
)
from zlm.process.launch import Death, ProcessGroup
from zlm.worker.process import work
from zlm.worker.startup import start

PATIENCE_MS = 60_000
SPEC = ModelSpec(
    architecture="llama", vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=4,
    num_heads=4, num_kv_heads=2, head_dim=8, max_position=256, rms_norm_eps=1e-5,
    layer_windows=(0, 24, 24, 0),
)  # fmt: skip


def resolved(*, dtype: str = "float32", cache: CacheOptions | None = None, **scheduler) -> Resolved:
    config = Config(
        model=ModelOptions(model="dummy", dtype=dtype, load_format="dummy", seed=3),
        cache=cache or CacheOptions(),
        scheduler=SchedulerOptions(**scheduler),
        parallel=ParallelOptions(cpu_threads=1),
    )
    return resolve(config, SPEC, model_path="none", tokenizer_path="none", device="cpu")


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def receive(inbox: Inbox, kind: type) -> object:
    """Wait for a message of *kind*; fail on Fatal."""
    while messages := inbox.receive(PATIENCE_MS):
        for message in messages:
            assert not isinstance(message, Fatal), message
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} came")


class AheadRunner:
    """A device that has one step ended whenever two are in flight."""

    awaits_masks = False

    def __init__(self) -> None:
        self.running: deque[int] = deque()
        self.spare = 3

    @property
    def in_flight(self) -> bool:
        return bool(self.running)

    def launch(self, message: Execute) -> None:
        self.running.append(message.step)

    def done(self) -> bool:
        return len(self.running) > 1

    def collect(self) -> StepResult:
        step = self.running.popleft()
        return StepResult(step, ids([step * 10]))

    def use_idle_time(self) -> bool:
        self.spare -= 1
        return self.spare > 0


def test_steps_are_executed_in_order_until_stop(tmp_path: Path, context: zmq.Context) -> None:
    inbox = Inbox(context, address(tmp_path, "worker"), ToWorker)
    results = Inbox(context, address(tmp_path, "engine"), ToEngine)
    engine = Outbox(context, address(tmp_path, "engine"), linger_ms=1000)
    sender = Outbox(context, address(tmp_path, "worker"), linger_ms=1000)
    beats: list[tuple[bool, int]] = []

    profiled: list[Profile] = []
    for step in range(1, 6):
        sender.send(execute(step, [(0, step, 1, 1)]))
    sender.send(Profile(3))
    sender.send(Stop())
    beat = lambda pending, n: beats.append((pending, n))  # noqa: E731
    heartbeat = SimpleNamespace(beat=beat, took=lambda seconds: None)
    arguments = (inbox, engine, AheadRunner(), heartbeat, profiled.append)
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join(timeout=PATIENCE_MS / 1000)
    assert not thread.is_alive()
    got: list = []
    while len(got) < 4:
        got += results.receive(PATIENCE_MS)
    assert [(r.step, tokens_of(r)) for r in got] == [(n, [n * 10]) for n in range(1, 5)]
    done = [steps for pending, steps in beats if pending]
    assert done == sorted(done) and {0, 1, 2, 3} <= set(done)
    assert beats[0] == (False, 0) and len(profiled) == 1


def test_a_whole_worker_as_a_child(tmp_path: Path, context: zmq.Context) -> None:
    """Launch → WorkerReady and Ready → run-ahead steps → Stop → exit status 0."""
    supervisor = Inbox(context, address(tmp_path, "supervisor"), ToSupervisor)
    engine = Inbox(context, address(tmp_path, "engine"), ToEngine)
    group = ProcessGroup(tmp_path, context)
    try:
        group.spawn("worker", 0)
        send = partial(group.send, "worker", 0)
        send(Launch(resolved(max_num_seqs=4, max_num_batched_tokens=64)))
        assert isinstance(receive(supervisor, Progress), Progress)
        ready = receive(supervisor, Ready)
        assert (ready.role, ready.index) == ("worker", 0) and "float32" in ready.detail
        told = receive(engine, WorkerReady)
        assert (told.device, told.dtype) == ("cpu", "float32")
        assert len(told.num_blocks) == 2 and min(told.num_blocks) > 16
        entries = [(group_, 0, 0, 1) for group_ in range(2)]
        send(execute(1, [(0, 0, 5, 1)], [join(0, [1, 2, 3, 4, 5])], entries))
        for step in range(2, 6):
            send(execute(step, [(0, 3 + step, 1, 1)]))
        results: list = []
        while len(results) < 5:
            results += engine.receive(PATIENCE_MS)
        assert [result.step for result in results] == [1, 2, 3, 4, 5]
        assert all(0 <= tokens_of(result)[0] < SPEC.vocab_size for result in results)
        assert all(result.seconds > 0 for result in results)
        assert group.stop(timeout=20) == [Death("worker", 0, 0)]
    finally:
        group.kill()


def test_start_leaves_no_trace_of_the_warm_up() -> None:
    phases: list[str] = []
    started = start(resolved(max_num_seqs=4, max_num_batched_tokens=64), 0, phases.append)
    runner = started.runner
    assert all(int(cache.count_nonzero()) == 0 for cache in runner._caches)
    assert int(runner._tables.tokens.count_nonzero()) == 0
    assert phases[-1] == "warming up"
    sizes = [cache.shape[0] for cache in runner._caches]
    full, sliding = started.ready.num_blocks
    assert sizes == [full, sliding, sliding, full]


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("length", [2, 16, 17])
def test_start_with_hardly_any_room(blocks: int, length: int) -> None:
    """The warm-up fits itself into tiny pools and contexts."""
    options = resolved(cache=CacheOptions(num_blocks_override=blocks), max_num_seqs=2)
    tiny = msgspec.structs.replace(options, max_model_len=length)
    assert start(tiny, 0, lambda text: None).ready.num_blocks == [blocks] * 2


def test_bfloat16_cache_and_compute() -> None:
    cache = CacheOptions(kv_cache_dtype="bfloat16")
    started = start(resolved(cache=cache, max_num_seqs=2), 0, lambda text: None)
    assert {str(c.dtype) for c in started.runner._caches} == {"torch.bfloat16"}
    assert started.ready.dtype == "float32"
    started = start(resolved(dtype="bfloat16", max_num_seqs=2), 0, lambda text: None)
    assert started.ready.dtype == "bfloat16"
    entries = [(g, 0, 0, 1) for g in range(2)]
    result = started.runner.execute(execute(1, [(0, 0, 3, 1)], [join(0, [7, 8, 9])], entries))
    assert np.frombuffer(result.token_ids, np.int32).size == 1 and result.status == b""


def test_a_cache_too_small_names_the_flag() -> None:
    options = resolved(cache=CacheOptions(kv_cache_memory_bytes=10))
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 10 .*--max-model-len 256"):
        start(options, 0, lambda text: None)
