"""The head's side of other machines ("nodes"): process groups whose workers may be anywhere.

``SpreadGroup`` is a ProcessGroup to whom the workers of other nodes are children like any other: to
spawn, kill or send to one is an ``Order`` to the supervisor of its node (``zlm.supervisor.node``).
Orders say what is to be, not what to do, and are sent again every second: one that is lost, or that
comes twice, does no harm. What a node tells (``NodeState``) goes to the ``Tree``, as the messages
of local children do.

    absent ─ NodeState ─▶ there ─ connection cut, silence ─▶ absent

A node that is absent has no living workers: its supervisor kills them as soon as it has lost the
head. It comes back as a stranger, and gets its orders anew. One that differs from the head in what
all nodes must have alike (versions, the checkpoint) is told so, and leaves.

Owns the links to the nodes and the inbox for what they tell. Knows nothing of back-off: a node that
is lost is a lost worker to the ``Keeper``.
"""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from zlm.config import ParallelOptions
from zlm.ipc.link import Link
from zlm.ipc.sockets import AsyncInbox, MessageError
from zlm.messages import Launch, Message, NodeState, Order, Stop
from zlm.process import cluster
from zlm.process.launch import Death, ProcessGroup, module_command
from zlm.process.watch import Silence
from zlm.supervisor.tree import Tree
from zlm.supervisor.units import Name

PERIOD_SECONDS = 1.0  # between two orders to a node, and two words from it
GOODBYE_MS = 1000  # how long the last order may take to be sent
NO_WORKERS = -1  # an incarnation

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Node:
    """Another machine, as the head sees it."""

    rank: int
    workers: range
    # Lifetime: the server
    order: Order
    # Lifetime: one supervisor there
    session: int = 0  # 0: it is absent
    link: Link | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    running: int = NO_WORKERS
    num_states: int = 0

    @property
    def may_have_workers(self) -> bool:
        return self.link is not None and max(self.running, self.order.incarnation) != NO_WORKERS


class SpreadGroup(ProcessGroup):
    """The child processes of one server, and the workers that other nodes have of it."""

    def __init__(
        self,
        runtime: Path,
        context: zmq.Context,
        parallel: ParallelOptions,
        key: bytes,
        facts: dict[str, str],
        *,
        silence_seconds: float,
        command: Callable[[str], Sequence[str]] = module_command,
    ) -> None:
        """*key* is the nodes' own; *facts*, which may grow, are what they must have alike.

        A node that tells nothing for *silence_seconds* is lost. Raises ConfigError if --master-addr
        is not known.
        """
        super().__init__(runtime, context, command=command)
        self.facts = facts
        self._key = key
        host = self._host = cluster.await_head_address(parallel)
        self._parallel = parallel
        self._silence_seconds = silence_seconds
        self._session = random.SystemRandom().getrandbits(62) | 1
        self._environment = cluster.worker_environment(host)
        self._nodes = [
            _Node(rank, parallel.workers_of(rank), Order(self._session))
            for rank in range(1, parallel.nnodes)
        ]
        self._of_worker = {index: node for node in self._nodes for index in node.workers}
        self._tree: Tree | None = None
        self._inbox: AsyncInbox | None = None
        self._refused: set[int] = set()  # sessions of nodes that were told so, and the log
        self._watching: asyncio.Task[None] | None = None

    def open(self, tree: Tree) -> None:
        """Take in nodes from now on, and tell *tree* of their workers; needs a running event loop.

        Raises ConfigError if their port cannot be listened on.
        """
        self._tree = tree
        at = cluster.supervisor_at(self._host, self._parallel)
        keys = cluster.supervisor_keys(self._key)
        try:
            self._inbox = AsyncInbox(
                self._context, at, NodeState, self._take, on_error=self._misread, keys=keys
            )
        except zmq.ZMQError as error:
            raise cluster.cannot_listen(at, error) from error
        names = ", ".join(str(node.rank) for node in self._nodes)
        logger.info("node 0 of %d is at %s, waiting for %s", 1 + len(self._nodes), at, names)
        failures = self._inbox.monitor(zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
        self._watching = asyncio.create_task(self._watch(failures))
        self._watching.add_done_callback(tree.note_end)

    # ------------------------------------------------------------------- as a group of processes

    @property
    def alive(self) -> list[Name]:
        away = [node for node in self._nodes if node.may_have_workers]
        return self.children + [("worker", index) for node in away for index in node.workers]

    def place(self, role: str, index: int) -> str:
        node = self._node_of(role, index)
        return "" if node is None else f" on node {node.rank}"

    def absent(self) -> str:
        ranks = [str(node.rank) for node in self._nodes if node.link is None]
        return f" (not there: node {', '.join(ranks)})" if ranks else ""

    def spawn(
        self,
        role: str,
        index: int,
        *,
        incarnation: int = 0,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        node = self._node_of(role, index)
        if node is not None:
            self._order(node, Order(self._session, incarnation))
            return
        if role in ("engine", "worker"):
            key = cluster.engine_key(self._key, self._session, incarnation)
            cluster.write_key(self.runtime, incarnation, key)
            env = {**self._environment, **(env or {})}
        super().spawn(role, index, incarnation=incarnation, pass_fds=pass_fds, env=env)

    def send(self, role: str, index: int, message: Message) -> None:
        node = self._node_of(role, index)
        if node is None:
            super().send(role, index, message)
        elif isinstance(message, Launch):
            self._order(node, msgspec.structs.replace(node.order, launch=message))
        elif isinstance(message, Stop):
            self._order(node, self._goodbye())

    def broadcast(self, message: Message, role: str | None = None) -> None:
        super().broadcast(message, role)
        if role in (None, "worker"):
            for node in self._nodes:
                self.send("worker", node.workers[0], message)

    def signal(self, role: str, index: int, number: int) -> None:
        node = self._node_of(role, index)
        if node is None:
            super().signal(role, index, number)
        elif number == signal.SIGKILL:
            self._order(node, Order(self._session))
        elif number == signal.SIGUSR1:
            self._send_order(node, stacks_of=index)

    def kill(self) -> list[Death]:
        for node in self._nodes:
            if node.link is not None:
                node.link.send(self._goodbye())
                node.link.close(GOODBYE_MS)
                node.link = None
        if self._inbox is not None:
            self._inbox.close()
        if self._watching is not None:
            self._watching.cancel()
        return super().kill()

    def _goodbye(self) -> Order:
        fault = self._tree.fault if self._tree is not None else None
        told = f"node 0 has ended: {fault}" if fault else ""
        return Order(self._session, leave=True, fault=told)

    def _node_of(self, role: str, index: int) -> _Node | None:
        return self._of_worker.get(index) if role == "worker" else None

    def _order(self, node: _Node, order: Order) -> None:
        if order != node.order:
            node.order = order
            self._send_order(node)

    def _send_order(self, node: _Node, stacks_of: int = NO_WORKERS) -> None:
        if node.link is not None:
            known = self.facts.keys() <= node.facts.keys()
            launch = node.order.launch if known else None
            order = msgspec.structs.replace(node.order, launch=launch, stacks_of=stacks_of)
            node.link.send(order)

    # -------------------------------------------------------------------- what the nodes tell

    def _take(self, state: NodeState) -> None:
        """Take in what a node tells; one that cannot be of use is told why, and to leave."""
        assert self._tree is not None
        node = next((node for node in self._nodes if node.rank == state.rank), None)
        if node is None:
            self._refuse(state, f"there is no node {state.rank}: --nnodes {1 + len(self._nodes)}")
        elif node.link is not None and node.session != state.session:
            self._refuse(state, f"node {state.rank} is there already: give another --node-rank")
        elif problem := _difference(state, self.facts):
            # Who is lost, or ends the start, is told of as such.
            has_part = node.order.incarnation != NO_WORKERS
            is_told = has_part if node.link is not None else not self._tree.has_served
            self._refuse(state, problem, node.link, is_told=is_told)
            if node.link is not None:
                self._lose(node, f"cannot be used: {problem}")
            elif not self._tree.has_served:
                self._tree.fail(problem)
        else:
            self._welcome(node, state)

    def _welcome(self, node: _Node, state: NodeState) -> None:
        assert self._tree is not None and self._tree.keeper is not None
        is_news = node.facts.keys() != state.facts.keys()
        node.facts = state.facts
        node.num_states += 1
        if node.link is None:
            logger.info("node %d is there", node.rank)
            node.session = state.session
            node.link = self._link(state.address, lambda: self._look_at(node))
        if state.head == self._session:
            node.running = state.running
            for each in state.news:
                self._tree.take(each)
        if is_news:  # of a start, too, which may have waited for this node alone
            self._tree.keeper.tell_progress("worker", node.workers[0], f"node {node.rank} is there")
            self._send_order(node)
        self._tree.wake()

    def _link(self, address: str, on_change: Callable[[], None]) -> Link:
        keys = cluster.supervisor_keys(self._key)
        seconds = self._silence_seconds
        return Link(self._context, address, keys, on_change, silence_seconds=seconds)

    def _refuse(
        self, state: NodeState, problem: str, link: Link | None = None, *, is_told: bool = False
    ) -> None:
        if not is_told and state.session not in self._refused:
            self._refused.add(state.session)
            logger.error("a node at %s is refused: %s", state.address, problem)
        link = link or self._link(state.address, lambda: None)
        link.send(Order(self._session, leave=True, fault=problem))
        link.close(GOODBYE_MS)

    def _look_at(self, node: _Node) -> None:
        if node.link is not None and node.link.was_cut:
            self._lose(node, "died: the connection to it was cut")

    def _lose(self, node: _Node, reason: str) -> None:
        """Take a node for absent; *reason* follows the name of its first worker."""
        assert self._tree is not None and self._tree.keeper is not None
        assert node.link is not None
        node.link.close()
        node.link, node.facts, node.running = None, {}, NO_WORKERS
        has_left = node.order.leave
        logger.log(logging.INFO if has_left else logging.WARNING, "node %d is away", node.rank)
        incarnation = node.order.incarnation
        if incarnation != NO_WORKERS:
            self._tree.keeper.lost(("worker", node.workers[0]), incarnation, reason)
        self._tree.wake()

    async def _watch(self, failures: zmq.Socket) -> None:
        """Look after the nodes, for ever; *failures* tells of handshakes that failed."""
        silence, is_failing = Silence(), False
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            there = [node for node in self._nodes if node.link is not None]
            counts = {("node", node.rank): node.num_states for node in there}
            seconds = silence.look(counts, time.monotonic())
            for node in there:
                self._send_order(node)
                if seconds["node", node.rank] > self._silence_seconds:
                    self._lose(node, "died: nothing has come from there for a while")
            was_failing, is_failing = is_failing, False
            while failures.poll(0):
                recv_monitor_message(failures)
                is_failing = True
            if is_failing and not was_failing:  # who is refused tries again
                logger.warning(
                    "a connection is refused: who makes it has another secret (--cluster-key or "
                    "$%s), or is no zlm", cluster.VARIABLE,
                )  # fmt: skip

    def _misread(self, error: Exception) -> None:
        if isinstance(error, MessageError):
            logger.error("a node told what is not understood here; has it the same zlm? %s", error)
            return
        assert self._tree is not None
        logger.error("the supervisor has failed", exc_info=error)
        self._tree.fail(f"the supervisor has failed: {type(error).__name__}: {error}")


def _difference(state: NodeState, facts: Mapping[str, str]) -> str:
    """Return what the node of *state* has otherwise than *facts*, in words; empty: nothing."""
    for name, value in facts.items():
        found = state.facts.get(name, value)
        if found != value:
            return (
                f"node {state.rank} and node 0 must have the same {name}: it is {found} on node "
                f"{state.rank}, and {value} on node 0"
            )
    return ""
