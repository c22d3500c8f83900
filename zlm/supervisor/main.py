"""How a server comes up and is watched: the body of the supervisor process.

    bind the socket ─ spawn all processes ─┬─ they import what they need ──────────────┐
                                           └─ find the model, read its facts ─ Launch ─┴─ Ready ×N
    ─ the first token comes round ─ READY=1 ─ replace what dies or hangs ─ drain

Owns the runtime directory and the socket while the server lives. Exit status: 0 when a signal ended
it, 1 when a fault did; the fault is then the last line on stderr. Knows nothing of what processes
do between Launch and Ready.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
import zmq

from zlm.config import Config, Resolved
from zlm.errors import ConfigError
from zlm.process import cluster, notes
from zlm.process.launch import ProcessGroup, module_command
from zlm.process.linux import memory_bytes
from zlm.process.logs import escape
from zlm.process.runtime import RuntimeDirectory
from zlm.supervisor.device import find_device
from zlm.supervisor.drain import ABORT_SECONDS, STOP_SECONDS, drain
from zlm.supervisor.hangs import HangWatch
from zlm.supervisor.keeper import Keeper
from zlm.supervisor.listen import Listener, open_listener
from zlm.supervisor.node import Node
from zlm.supervisor.nodes import SpreadGroup
from zlm.supervisor.notify import Notifier
from zlm.supervisor.process_counts import with_process_counts
from zlm.supervisor.ray_cluster import placed
from zlm.supervisor.resolve import resolve_config
from zlm.supervisor.resolving import Report, Resolving
from zlm.supervisor.startup_table import StartupTable
from zlm.supervisor.tree import END_SIGNALS, Tree

logger = logging.getLogger(__name__)


def serve(
    config: Config,
    *,
    command: Callable[[str], Sequence[str]] = module_command,
    resolver: Callable[[Config, Report], Resolved] = resolve_config,
) -> int:
    """Serve as *config* says until a signal or a fault ends it; return the exit status.

    *command* gives the command of each role and *resolver* reads the model; tests put in their own.
    """
    for number in END_SIGNALS:  # until the event loop takes them over
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    supervisor: Supervisor | Node | None = None
    try:
        with placed(config) as config:
            supervisor = Supervisor(config, command, resolver)
            if config.parallel.node_rank:
                supervisor = Node(config, command)
            fault = supervisor.run()
    except ConfigError as error:
        fault = error.message
    if fault is not None:
        print(f"zlm: {escape(fault)}", file=sys.stderr, flush=True)
    status = 0 if fault is None else 1
    if supervisor is not None and supervisor.is_resolving:
        # A download has threads of its own that an exit by the book would wait for.
        logging.shutdown()
        os._exit(status)
    return status


def _settled(config: Config) -> Config:
    """Return *config* with what must be known before anything is spawned: device and counts."""
    device = find_device(config.parallel.device, config.parallel.workers_per_node)
    parallel = msgspec.structs.replace(config.parallel, device=device)
    config = msgspec.structs.replace(config, parallel=parallel)
    return with_process_counts(config, device, len(os.sched_getaffinity(0)))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


class Supervisor:
    """One server from its first to its last moment."""

    def __init__(
        self,
        config: Config,
        command: Callable[[str], Sequence[str]],
        resolver: Callable[[Config, Report], Resolved],
    ) -> None:
        self._config = config
        self._command = command
        self._resolver = resolver
        self._notifier = Notifier()
        self._started = time.monotonic()
        self._resolving: Resolving[Resolved] | None = None
        self._key = b""  # of the nodes, and what they must have alike, if there are several
        self._facts: dict[str, str] = {}

    @property
    def is_resolving(self) -> bool:
        """Whether the thread that looks for the model is still at work."""
        return self._resolving is not None and self._resolving.is_running

    def run(self) -> str | None:
        """Serve until the end; return the fault that was its reason, if one was."""
        try:
            self._config = _settled(self._config)
            parallel = self._config.parallel
            if parallel.nnodes > 1:
                self._key = cluster.read_secret(parallel)
                self._facts = cluster.facts(parallel)
            with RuntimeDirectory() as runtime:
                listener = open_listener(self._config.server)
                try:
                    return asyncio.run(self._live(listener, runtime.path))
                finally:
                    listener.close()
        except ConfigError as error:
            return error.message
        finally:
            self._notifier.close()

    async def _live(self, listener: Listener, runtime: Path) -> str | None:
        context = zmq.Context()
        group = self._group(runtime, context)
        tree = Tree(group, context, self._notifier.status)
        server = self._config.server
        workers = self._config.parallel.num_workers
        keeper = tree.keeper = tree.server = Keeper(tree, server, listener, workers)
        hangs = HangWatch(tree, keeper, self._notifier, server)
        watching = asyncio.create_task(hangs.run())
        watching.add_done_callback(tree.note_end)
        try:
            if isinstance(group, SpreadGroup):
                group.open(tree)
            keeper.spawn_all()
            await self._bring_up(tree, keeper, listener)
            await self._serve(tree, keeper, listener)
            watching.cancel()
            keeper.give_up_loading()
            listener.close()  # front ends close theirs at Drain
            seconds = server.shutdown_timeout_seconds
            self._notifier.stopping(
                tree.fault or "shutting down", seconds + ABORT_SECONDS + STOP_SECONDS
            )
            await drain(tree, seconds)
        finally:
            watching.cancel()
            group.kill()
            tree.close()
            context.destroy(linger=0)
        logger.info("all processes have left")
        return tree.fault

    async def _bring_up(self, tree: Tree, keeper: Keeper, listener: Listener) -> None:
        """Go from spawned to serving; return early when the tree is to end."""
        name = self._config.model.model
        logger.info("listening on %s, loading %s", listener.url, name)
        self._notifier.status(f"loading {name}")
        table = tree.startup = StartupTable(self._started)
        own = os.getpid()
        table.phase("supervisor", "reading the model", time.monotonic(), memory_bytes(own))
        resolving = self._resolving = Resolving(tree, self._read_model)
        await tree.until(lambda: tree.is_ending or resolving.found is not None)
        resolved = resolving.found
        if resolved is None or tree.is_ending:
            return
        table.ready("supervisor", resolving.found_at, memory_bytes(own))
        keeper.launch(resolved)
        await tree.until(lambda: tree.is_ending or keeper.is_serving)
        if tree.is_ending:
            return
        tree.startup, now = None, time.monotonic()
        logger.info("ready in %.2f s", now - self._started)
        for line in table.lines(now):
            logger.info("%s", line)
        notes.write(tree.group.runtime, notes.START, table.facts(now))
        logger.info("serving %s on %s", ", ".join(resolved.served_names), listener.url)
        if listener.is_public and not self._config.server.asks_for_keys:
            logger.warning("anyone who reaches this machine may use the server: no --api-key")
        self._notifier.ready(f"serving {name} on {listener.url}")

    async def _serve(self, tree: Tree, keeper: Keeper, listener: Listener) -> None:
        """Tell the service manager when the server is away and when it is back, until the end."""
        name = self._config.model.model
        while not tree.is_ending:
            await tree.until(lambda: tree.is_ending or not keeper.is_serving)
            if not tree.is_ending:
                away = "sleeping" if keeper.is_asleep else "restarting the engine"
                self._notifier.status(away)
                await tree.until(lambda: tree.is_ending or keeper.is_serving)
                self._notifier.status(f"serving {name} on {listener.url}")

    def _read_model(self, report: Report) -> Resolved:
        resolved = self._resolver(self._config, report)
        if self._config.parallel.nnodes > 1:
            from zlm.weights.fingerprint import fingerprint  # reads checkpoints

            self._facts[cluster.CHECKPOINT] = fingerprint(resolved.model_path, self._config.model)
        return resolved

    def _group(self, runtime: Path, context: zmq.Context) -> ProcessGroup:
        config = self._config
        if config.parallel.nnodes == 1:
            return ProcessGroup(runtime, context, command=self._command)
        return SpreadGroup(
            runtime,
            context,
            config.parallel,
            self._key,
            self._facts,
            silence_seconds=config.server.health_timeout_seconds,
            command=self._command,
        )
