"""The engine process's loop over real sockets, on a thread, with a fake worker at the other end."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from driver import VOCAB, make_resolved
from fake_worker import FakeWorker, generate_alone

from zlm.engine import process
from zlm.ipc.sockets import Inbox, Outbox, address
from zlm.messages import (
    FINISH_ABORT,
    Abort,
    EngineReady,
    Execute,
    Launch,
    Ready,
    SamplingSpec,
    Stop,
    Submit,
    ToSupervisor,
    ToTokenizer,
    ToWorker,
    WorkerReady,
)
from zlm.metrics import EngineStats, engine_stats
from zlm.process.counts import path_of, read

TIMEOUT_MS = 10_000


class Heartbeat:
    """Keeps the beats of the engine's loop."""

    def __init__(self) -> None:
        self.beats: list[tuple[bool, int]] = []

    def beat(self, work_pending: bool, steps: int) -> None:
        self.beats.append((work_pending, steps))


class Tree:
    """The peers of an engine process, which itself runs on a thread."""

    def __init__(self, runtime: Path, num_blocks: int) -> None:
        self.role, self.index, self.runtime = "engine", 0, runtime
        self.incarnation = 0
        self.context = zmq.Context()
        self.resolved = make_resolved(max_model_len=64)
        self.num_blocks = num_blocks
        self.heartbeat = Heartbeat()
        self.inboxes = {
            role: Inbox(self.context, address(runtime, role), accepts)
            for role, accepts in (
                ("supervisor", ToSupervisor),
                ("tokenizer", ToTokenizer),
                ("worker", ToWorker),
            )
        }
        self.supervisor = self.outbox("supervisor")
        self.engine = self.outbox("engine")
        self.thread = threading.Thread(target=process.body, args=(self,), daemon=True)

    def outbox(self, role: str, index: int = 0, incarnation: int = 0) -> Outbox:
        return Outbox(self.context, address(self.runtime, role, index, incarnation))

    def say_ready(self, detail: str) -> None:
        self.supervisor.send(Ready(self.role, self.index, detail))

    def inbox(self, accepts: object) -> Inbox:
        return Inbox(self.context, address(self.runtime, self.role), accepts)

    def receive(self, role: str) -> list:
        messages = self.inboxes[role].receive(TIMEOUT_MS)
        assert messages, f"nothing came to the {role}"
        return messages

    def start(self) -> EngineReady:
        self.thread.start()
        self.engine.send(WorkerReady(0, [self.num_blocks], "cpu", "float32"))
        self.engine.send(Launch(self.resolved))
        [ready] = self.receive("tokenizer")
        return ready

    def stats(self) -> EngineStats:
        return engine_stats(read(path_of(self.runtime, "engine", 0)))

    def stop(self) -> None:
        self.engine.send(Stop())
        self.thread.join(TIMEOUT_MS / 1000)
        assert not self.thread.is_alive()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path, 33)
    yield tree
    if tree.thread.is_alive():
        tree.stop()
    tree.context.destroy(linger=0)


def submit(seq_id: int, max_tokens: int) -> Submit:
    return Submit(
        seq_id=seq_id,
        arrival=0.0,
        token_ids=np.array([5, 6, 7, 8, 9], np.int32).tobytes(),
        max_tokens=max_tokens,
        sampling=SamplingSpec(seed=seq_id),
        ignore_eos=True,
    )


def test_a_sequence_goes_round_and_the_page_tells_of_it_before_the_tokenizer_does(
    tree: Tree,
) -> None:
    ready = tree.start()
    assert ready == EngineReady([32], 64, "cpu", "float32")
    [told] = tree.receive("supervisor")
    assert isinstance(told, Ready) and told.role == "engine"
    worker = FakeWorker(
        windows=(0,),
        num_blocks=(33,),
        block_size=4,
        num_slots=4,
        max_model_len=64,
        vocab_size=VOCAB,
        max_num_batched_tokens=16,
    )
    message = submit(1, 12)
    tree.engine.send(message)
    tokens: list[int] = []
    while len(tokens) < 12:
        if worker.num_steps < 12:
            for step in tree.receive("worker"):
                assert isinstance(step, Execute)
                tree.engine.send(worker.execute(step))
        for output in tree.inboxes["tokenizer"].receive(0 if worker.num_steps < 12 else None):
            tokens += np.frombuffer(output.token_ids, np.int32).tolist()
    assert tokens == generate_alone(message, 0, VOCAB, ())[0]
    stats = tree.stats()
    assert stats.num_blocks == 32 and stats.generation_tokens == stats.steps == 12
    assert stats.num_running == stats.steps_in_flight == 0 and stats.kv_usage == 0.0
    assert stats.success["length"] == 1
    tree.stop()
    assert any(work_pending for work_pending, _ in tree.heartbeat.beats)
    assert (False, 12) in tree.heartbeat.beats


def test_counts_go_on_where_another_engine_core_stopped(tmp_path: Path) -> None:
    for life in (1, 2):
        tree = Tree(tmp_path, 33)
        tree.start()
        tree.engine.send(submit(7, 20))
        tree.receive("worker")
        tree.engine.send(Abort([7]))
        tree.receive("tokenizer")
        stats = tree.stats()
        assert stats.success["abort"] == life and stats.prompt_tokens == 5 * life
        assert sum(stats.histograms["request_params_n"][0]) == life
        tree.stop()
        tree.context.destroy(linger=0)
    assert read(path_of(tmp_path, "engine", 0))["starts"] == [2.0]


def test_an_abort_is_answered_while_a_step_is_in_flight(tree: Tree) -> None:
    tree.start()
    tree.engine.send(submit(7, 20))
    tree.receive("worker")
    tree.engine.send(Abort([7]))
    [output] = tree.receive("tokenizer")
    assert list(output.finish) == [FINISH_ABORT]
    tree.stop()


def test_stop_ends_it_at_once_in_any_phase(tree: Tree) -> None:
    tree.thread.start()
    tree.engine.send(Launch(tree.resolved))
    tree.stop()


def test_a_cache_shorter_than_the_context_is_warned_of(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    tree.num_blocks = 9
    assert tree.start().max_sequence_tokens == 32
    assert "32 tokens" in caplog.text and "--max-model-len" in caplog.text
    assert "--kv-cache-memory-bytes" in caplog.text


def test_the_engine_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import zlm.engine.process, zlm.engine.core\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
