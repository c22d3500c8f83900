"""How a tree ends: the order of leaving, and how long each step may take.

    a signal    front ends: Drain ── wait for Drained, at most --shutdown-timeout ──┐
    2nd signal ─────────────────────────────────────────────────────────────────────┤
    a fault ────────────────────────────────────────────────────────────────────────┤
                               front ends: Drain(abort) ── wait for Drained, a few seconds
                                                      │
    3rd signal, or ended while loading ─ kill ←── all: Stop ── wait, a few seconds

With ``abort`` a front end ends its open requests with an error answer, so that no client is left
without an end. A process that is still loading cannot read messages, so a tree that ends before it
was ready is killed: nothing in it is worth waiting for. While a tree ends nothing is replaced.
Knows nothing of how a tree comes up.
"""

import logging

from zlm.messages import Drain, Stop
from zlm.supervisor.tree import Tree

ABORT_SECONDS = 5.0  # for front ends to write the answers of requests that are cut off
STOP_SECONDS = 5.0  # for all processes to leave

logger = logging.getLogger(__name__)


async def drain(tree: Tree, shutdown_timeout: float) -> None:
    """End *tree*, which a signal or a fault asks for; no process is left when this returns.

    Open requests may finish for *shutdown_timeout* seconds, unless a fault or a second signal
    says otherwise. A fault on the way is left in ``tree.fault``.
    """
    was_ready = tree.has_served
    if tree.fault is None and was_ready and tree.num_signals < 2:
        await _finish_requests(tree, shutdown_timeout)
    if not _is_drained(tree):
        await _abort_requests(tree)
    tree.is_stopping = True
    if was_ready:
        tree.group.broadcast(Stop())
        await tree.until(lambda: not tree.group.alive or tree.num_signals > 2, STOP_SECONDS)
    if was_ready and tree.group.alive:
        names = ", ".join(f"{role} {index}" for role, index in tree.group.alive)
        logger.warning("killing what has not left: %s", names)
    tree.group.kill()


async def _finish_requests(tree: Tree, seconds: float) -> None:
    logger.info("draining: open requests may finish within %g s", seconds)
    tree.tell_frontends("draining", "the server is shutting down")
    tree.group.broadcast(Drain(), "frontend")
    await tree.until(
        lambda: _is_drained(tree) or tree.fault is not None or tree.num_signals > 1, seconds
    )


async def _abort_requests(tree: Tree) -> None:
    reason = tree.fault or "the server is shutting down"
    logger.warning("ending open requests with an error: %s", reason)
    tree.tell_frontends("draining", reason)
    tree.drained.clear()
    tree.group.broadcast(Drain(abort=True), "frontend")
    await tree.until(lambda: _is_drained(tree) or tree.num_signals > 2, ABORT_SECONDS)


def _is_drained(tree: Tree) -> bool:
    return tree.answering <= tree.drained
