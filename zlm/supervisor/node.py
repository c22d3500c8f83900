"""The supervisor of a machine that has workers of an engine, and nothing else of it.

    find the head ─▶ tell it every second how it is here ─▶ do what its orders say
         ▲                                                            │
         └── kill all workers ◀── connection cut, silence ────────────┘

The head (``zlm.supervisor.nodes``) says which incarnation of the workers is to live here. They are
started, watched and killed as on one machine; what they tell their supervisor is passed on to the
head, whose ``Keeper`` decides. A worker alone is of no use: without the head they die at once, and
so do all when one does. A node that hears of no head for --startup-timeout gives up.

Owns the workers of this machine, the link to the head and the inbox for its orders.
"""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from zlm.config import Config
from zlm.errors import ConfigError
from zlm.ipc.link import Link
from zlm.ipc.sockets import AsyncInbox
from zlm.messages import Lost, NodeState, Order, Progress, Ready, Stop, Stuck
from zlm.process import cluster
from zlm.process.launch import ProcessGroup, module_command
from zlm.process.runtime import RuntimeDirectory
from zlm.process.watch import Silence, Stall
from zlm.supervisor.device import find_device
from zlm.supervisor.drain import STOP_SECONDS
from zlm.supervisor.hangs import HangWatch
from zlm.supervisor.nodes import GOODBYE_MS, NO_WORKERS, PERIOD_SECONDS
from zlm.supervisor.notify import Notifier
from zlm.supervisor.resolving import Report, Resolving
from zlm.supervisor.tree import Tree
from zlm.supervisor.units import Backoff, Name, State, Unit

LAST_WORDS_SECONDS = 0.1
REFUSALS = 3  # failed handshakes in a row, after which the key is surely another
NOBODY = 0  # session of a head

logger = logging.getLogger(__name__)


class Node:
    """One machine's part of an engine, from its first to its last moment."""

    def __init__(
        self, config: Config, command: Callable[[str], Sequence[str]] = module_command
    ) -> None:
        self._config = config
        self._parallel = config.parallel
        self._rank = config.parallel.node_rank
        where = cluster.supervisor_at(str(config.parallel.master_addr), config.parallel)
        self._where = where.removeprefix("tcp://")
        self._command = command
        self._notifier = Notifier()
        self._session = random.SystemRandom().getrandbits(62) | 1
        self._resolving: Resolving[tuple[str, str]] | None = None
        names = tuple(("worker", index) for index in config.parallel.workers_of(self._rank))
        self._unit = Unit(names, Backoff(0), State.DOWN, NO_WORKERS)
        self.units = [self._unit]
        self._num_orders = 0
        self._own = self._head = ""  # addresses of this machine and of the head
        self._has_been_ready = False
        # Lifetime: a connection to the head
        self._link: Link | None = None
        self._inbox: AsyncInbox | None = None
        self._order = Order(NOBODY)
        self._is_launched = False
        self._news: list[Ready | Progress | Lost | Stuck] = []
        self._has_changed = True  # there is something to do or to tell

    @property
    def is_resolving(self) -> bool:
        """Whether the thread that looks for the model is still at work."""
        return self._resolving is not None and self._resolving.is_running

    def run(self) -> str | None:
        """Serve the head until the end; return the fault that was its reason, if one was."""
        parallel = self._parallel
        try:
            self._key = cluster.read_secret(parallel)
            device = find_device(parallel.device, parallel.workers_per_node)
            self._facts = cluster.facts(msgspec.structs.replace(parallel, device=device))
            with RuntimeDirectory() as runtime:
                return asyncio.run(self._live(runtime.path))
        except ConfigError as error:
            return error.message
        finally:
            self._notifier.close()

    async def _live(self, runtime: Path) -> str | None:
        self._context = zmq.Context()
        self._group = ProcessGroup(runtime, self._context, command=self._command)
        tree = self._tree = Tree(self._group, self._context, self._notifier.status)
        tree.keeper = self
        limits = self._config.server
        self._hangs = HangWatch(tree, self, self._notifier, limits, self._tell_stuck)
        watching = asyncio.create_task(self._hangs.run())
        watching.add_done_callback(tree.note_end)
        self._resolving = Resolving(tree, self._read_model)
        self._silence = Silence()
        self._looked_at = 0.0
        try:
            while not tree.is_ending and not self._order.leave:
                self._go_on()
                await tree.until(lambda: self._has_changed or tree.is_ending, PERIOD_SECONDS)
            watching.cancel()
            return await self._leave()
        finally:
            watching.cancel()
            self._group.kill()
            self._disconnect()
            tree.close()
            self._context.destroy(linger=0)

    def _read_model(self, report: Report) -> tuple[str, str]:
        """Return the path of this machine's copy of the checkpoint, and its fingerprint."""
        from zlm.weights.fingerprint import fingerprint  # as in ``resolve``
        from zlm.weights.resolve import resolve_model

        options = self._config.model
        path = resolve_model(
            options.model,
            report=report,
            revision=options.revision,
            download_dir=options.download_dir,
        )
        return path, fingerprint(path, options)

    def _go_on(self) -> None:
        """Do what is to be done now, and tell the head how it is here."""
        self._has_changed = False
        now = time.monotonic()
        if now - self._looked_at >= PERIOD_SECONDS:
            self._looked_at = now
            self._look(now)
        self._follow()
        self._report()

    # --------------------------------------------------------------------------- the head

    def _look(self, now: float) -> None:
        """See whether the head is there, and look for it if not."""
        silence = self._silence.look({("head", 0): self._num_orders}, now)["head", 0]
        limits, where = self._config.server, self._where
        if silence > limits.startup_timeout_seconds:
            self._tree.fail(f"nothing has come from node 0 at {where} for {silence:.0f} s")
        elif self._order.session != NOBODY and silence > limits.health_timeout_seconds:
            self._lose_head(f"nothing has come from node 0 for {silence:.0f} s")
        if self._order.session == NOBODY:
            self._connect()

    def _connect(self) -> None:
        """Look for the head where its name leads now."""
        where = self._where
        try:
            head = cluster.head_address(self._parallel)
            self._own = cluster.own_address(head)
        except OSError as error:
            logger.info("waiting for node 0 at %s: %s", where, error)
            return
        if self._link is not None and head == self._head:
            return
        self._disconnect()
        self._head = head
        logger.info("node %d, at %s, looks for node 0 at %s", self._rank, self._own, where)
        keys = cluster.supervisor_keys(self._key)
        self._inbox = AsyncInbox(
            self._context, cluster.endpoint(self._own, "*"), Order, self._take_order,
            on_error=self._misread, keys=keys,
        )  # fmt: skip
        to = cluster.supervisor_at(head, self._parallel)
        seconds = self._config.server.health_timeout_seconds
        self._link = Link(self._context, to, keys, self._change_link, silence_seconds=seconds)

    def _change_link(self) -> None:
        # What a head says last may be read after the end of its connection is seen.
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._judge, self._link)

    def _judge(self, link: Link | None) -> None:
        """Act upon what has become of *link*."""
        if link is None or link is not self._link or self._order.leave:
            return
        if link.num_refused >= REFUSALS:
            self._tree.fail(
                f"node 0 at {self._where} refuses this node: the secret (--cluster-key or "
                f"${cluster.VARIABLE}) is not the same there, or what listens is no zlm"
            )
        elif link.was_cut:
            self._lose_head("the connection to node 0 was cut")
            self._connect()

    def _wake(self) -> None:
        self._has_changed = True
        self._tree.wake()

    def _misread(self, error: Exception) -> None:
        logger.error("an order cannot be followed", exc_info=error)
        self._tree.fail(f"an order of node 0 cannot be followed; has it the same zlm? {error}")

    def _disconnect(self, linger_ms: int = 0) -> None:
        if self._link is not None and self._inbox is not None:
            self._link.close(linger_ms)
            self._inbox.close()
        self._link = self._inbox = None

    def _lose_head(self, reason: str) -> None:
        logger.error("%s; its workers here are killed", reason)
        self._disconnect()
        self._order = Order(NOBODY)
        self._news.clear()
        self._take_down()

    def _take_order(self, order: Order) -> None:
        self._num_orders += 1
        if order.stacks_of != NO_WORKERS:
            self._hangs.write_stacks_of("worker", order.stacks_of)
            return
        if order.session != self._order.session:
            logger.info("node 0 is there")
            self._take_down()
            self._unit.incarnation = NO_WORKERS
        if order != self._order:
            self._order = order
            self._wake()

    def _report(self) -> None:
        if self._link is None or self._inbox is None:
            return
        running = self._unit.incarnation if self._group.alive else NO_WORKERS
        news, self._news = self._news, []
        self._link.send(
            NodeState(
                self._rank, self._session, self._order.session, self._inbox.address,
                self._facts, running, news,
            )
        )  # fmt: skip

    # --------------------------------------------------------------------------- the workers

    def _follow(self) -> None:
        """Bring the workers nearer to what was ordered."""
        unit, wanted, found = self._unit, self._order.incarnation, None
        if self._resolving is not None:
            found = self._resolving.found
        if found is not None:
            self._facts[cluster.CHECKPOINT] = found[1]
        if unit.incarnation != wanted and unit.state is not State.DOWN:
            self._take_down()
        if wanted not in (NO_WORKERS, unit.incarnation) and not self._group.alive:
            self._spawn(wanted)
        launch = self._order.launch
        if launch and found and unit.state is State.LOADING and not self._is_launched:
            self._is_launched = True
            resolved = msgspec.structs.replace(launch.resolved, model_path=found[0])
            self._group.broadcast(msgspec.structs.replace(launch, resolved=resolved))

    def _spawn(self, incarnation: int) -> None:
        unit = self._unit
        unit.incarnation, unit.state, self._is_launched = incarnation, State.LOADING, False
        unit.ready.clear()
        key = cluster.engine_key(self._key, self._order.session, incarnation)
        cluster.write_key(self._group.runtime, incarnation, key)
        environment = cluster.worker_environment(self._own)
        try:
            for role, index in unit.names:
                self._group.spawn(role, index, incarnation=incarnation, env=environment)
        except OSError as error:
            self.lost(unit.names[0], incarnation, f"cannot be started: {error}")
        self._wake()

    def _take_down(self) -> None:
        self._unit.state = State.DOWN
        for role, index in self._unit.names:
            self._group.signal(role, index, signal.SIGKILL)
            self._tree.ready.pop((role, index), None)

    async def _leave(self) -> str | None:
        """End the workers, and tell the head unless it knows; return the fault, if there is one."""
        tree, order = self._tree, self._order
        fault = tree.fault or order.fault or None
        self._notifier.stopping(fault or "shutting down", STOP_SECONDS)
        if order.leave and fault is None:
            tree.is_stopping = True
            self._group.broadcast(Stop())
            await tree.until(lambda: not self._group.alive, STOP_SECONDS)
        elif not order.leave:
            reason = f"died: its machine leaves: {fault or 'it was told to'}"
            self._news.append(Lost(*self._unit.names[0], reason, max(0, order.incarnation)))
        self._group.kill()
        self._report()
        self._disconnect(GOODBYE_MS)
        logger.info("all workers have left")
        return fault

    # ------------------------------------------------------------- what the tree and hangs ask

    def news(self) -> dict[Name, int]:
        """Return nothing: it is the head that waits for a start."""
        return {}

    def incarnation(self, role: str, index: int) -> int:
        """Return which incarnation of a worker is the present one."""
        return self._unit.incarnation

    def take_ready(self, message: Ready) -> None:
        """Pass on that a worker can work."""
        unit = self._unit
        unit.ready.add((message.role, message.index))
        if unit.state is State.LOADING and unit.ready.issuperset(unit.names):
            unit.state = State.UP
            if not self._has_been_ready:
                self._notifier.ready(f"node {self._rank} of {self._parallel.nnodes}")
            self._has_been_ready = True
        self._tell(message)

    def tell_progress(self, role: str, index: int, text: str) -> None:
        """Pass on how far a worker is, or this supervisor before there are any."""
        if role == "supervisor":
            (role, index), text = self._unit.names[0], f"node {self._rank}: {text}"
        self._tell(Progress(role, index, text, max(0, self._order.incarnation)))

    def lost(self, name: Name, incarnation: int, reason: str) -> bool:
        """Pass on that a worker is dead or must die, and kill the others; return whether that is
        news.
        """
        self._wake()
        if incarnation != self._unit.incarnation or self._unit.state is State.DOWN:
            return False
        logger.error("%s %d %s", *name, reason)
        self._take_down()
        self._tell(Lost(*name, reason, incarnation))
        return True

    def _tell_stuck(self, stall: Stall) -> None:
        """Pass on that a worker does not get on; the head has all killed when it has looked."""
        incarnation = self._unit.incarnation
        self._tell(Stuck(stall.role, stall.index, stall.seconds, stall.is_stopped, incarnation))

    def _tell(self, news: Ready | Progress | Lost | Stuck) -> None:
        self._news.append(news)
        self._wake()
