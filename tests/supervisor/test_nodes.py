"""What the head makes of what comes from other machines; over the loopback interface."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from running_server import free_port
from specs import small_spec

from zlm.config import Config, ModelOptions, ParallelOptions, ServerOptions, resolve
from zlm.ipc.sockets import Outbox
from zlm.messages import NodeState
from zlm.process import cluster
from zlm.supervisor.keeper import Keeper
from zlm.supervisor.nodes import SpreadGroup

KEY = bytes(32)
SAME, OTHER = {"zlm": "1"}, {"zlm": "2"}


@dataclass
class Tree:
    """What a group and a keeper need of a tree that has not served yet."""

    group: SpreadGroup
    has_served: bool = False
    is_ending: bool = False
    fault: str | None = None
    faults: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        self.faults.append(text)

    def wake(self) -> None:
        """Nobody waits."""

    def note_end(self, task: "asyncio.Task[None]") -> None:
        """Its end is the test's."""


class Head:
    """The head of two nodes, and the ways to it."""

    def __init__(self, runtime: Path) -> None:
        self.context = zmq.Context()
        port = free_port() - 1  # the supervisor's is the one after it
        self.parallel = ParallelOptions(
            tensor_parallel_size=2, nnodes=2, master_addr="127.0.0.1", master_port=port
        )
        self.group = SpreadGroup(
            runtime, self.context, self.parallel, KEY, dict(SAME), silence_seconds=60.0
        )
        tree: Any = Tree(self.group)
        self.tree = tree
        self.keeper = tree.keeper = Keeper(tree, ServerOptions(), None, 2)  # type: ignore[arg-type]
        self.group.open(tree)
        config = Config(model=ModelOptions(model="m"), parallel=self.parallel)
        paths = {"model_path": "m", "tokenizer_path": "m"}
        self.keeper.launch(resolve(config, small_spec(num_heads=2), device="cpu", **paths))

    def way(self, key: bytes = KEY) -> Outbox:
        at = cluster.supervisor_at("127.0.0.1", self.parallel)
        return Outbox(self.context, at, keys=cluster.supervisor_keys(key))


def state(session: int, facts: dict[str, str]) -> NodeState:
    return NodeState(1, session, 0, "tcp://127.0.0.1:9", facts)


def with_head(runtime: Path, body: Callable[[Head], Any]) -> None:
    async def run() -> None:
        head = Head(runtime)
        try:
            async with asyncio.timeout(20):
                await body(head)
        finally:
            head.group.kill()
            head.context.destroy(linger=0)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_node_that_comes_is_news_of_the_start(tmp_path: Path) -> None:
    """Else its workers, which the start waits for, have what is left of a time begun long ago."""

    async def body(head: Head) -> None:
        awaited = ("worker", 1)
        news = [head.keeper.news()[awaited]]
        way = head.way()
        for facts in (SAME, {**SAME, cluster.CHECKPOINT: "read"}):
            way.send(state(7, facts))
            await until(lambda: head.keeper.news()[awaited] > news[-1])
            news.append(head.keeper.news()[awaited])
        way.send(state(7, {**SAME, cluster.CHECKPOINT: "read"}))
        way.send(state(8, SAME))  # refused, when the one before it has been taken in
        await until(lambda: 8 in head.group._refused)
        assert head.keeper.news()[awaited] == news[-1], "a word a second is none"

    with_head(tmp_path, body)


@pytest.mark.parametrize("has_served", [False, True], ids=["loading", "serving"])
def test_a_refusal_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_served: bool
) -> None:
    async def body(head: Head) -> None:
        head.tree.has_served = has_served
        way = head.way()
        for _ in range(2):
            way.send(state(7, OTHER))
        way.send(state(8, SAME))
        way.send(state(9, SAME))
        way.send(state(9, SAME))
        way.send(state(10, SAME))
        await until(lambda: 10 in head.group._refused)
        told = [*head.tree.faults[:1], *caplog.messages]
        assert sum("the same zlm" in text for text in told) == 1
        assert sum("node 1 is there already" in text for text in told) == 2

    with_head(tmp_path, body)


def test_another_secret_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(head: Head) -> None:
        way = head.way(bytes(31) + b"1")
        way.send(state(7, SAME))
        words = "refused: who makes it has another secret (--cluster-key or $ZLM_CLUSTER_KEY)"
        await until(lambda: any(words in text for text in caplog.messages))

    with_head(tmp_path, body)
