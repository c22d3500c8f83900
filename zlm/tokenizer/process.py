"""The tokenizer process: ``python -m zlm.tokenizer.process RUNTIME INDEX``.

An asyncio loop around ``TokenizerCore``: one inbox, an outbox to the engine and one to each front
end. Owns the sockets; knows nothing of text. Ready once the vocabulary is loaded and the engine is.

The engine and front ends may die and be replaced; ``Peers`` has the ways to those that are there.
When the engine is lost, each request that it worked on ends with an error, and so does every one
that comes before the next engine has said EngineReady. When a front end is lost, its requests are
given up.
"""

import asyncio
from typing import Any

import uvloop

from zlm.messages import (
    OWNER_SHIFT,
    WAITING,
    Detokenize,
    EngineReady,
    Generate,
    Launch,
    PeerLost,
    PeerUp,
    Pool,
    Stop,
    Tokenize,
    ToTokenizer,
)
from zlm.process import garbage
from zlm.process.child import Child, run
from zlm.tokenizer.core import TokenizerCore
from zlm.tokenizer.peers import Peers

ROLE = "tokenizer"
BEAT_SECONDS = 1.0


class TokenizerProcess:
    """Routes messages between the sockets and the core."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._core: TokenizerCore | None = None
        self._early: list[Any] = []  # messages that came before Launch
        self._peers: Peers | None = None
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Work until Stop."""
        inbox = self._child.async_inbox(ToTokenizer, self._take)
        beats = asyncio.create_task(self._beat())
        await self._stopped.wait()
        beats.cancel()
        inbox.close()
        if self._core is not None:
            self._core.close()

    def _take(self, message: Any) -> None:
        if isinstance(message, Stop):
            self._stopped.set()
        elif isinstance(message, Launch):
            self._launch(message)
        elif self._core is None or self._peers is None:
            self._early.append(message)
        else:
            self._work(self._core, self._peers, message)

    def _launch(self, message: Launch) -> None:
        child = self._child
        child.say_progress("loading the tokenizer")
        peers = self._peers = Peers(child, message)
        core = self._core = TokenizerCore(
            message.resolved,
            child.index,
            to_engine=peers.to_engine,
            to_frontend=peers.to_frontend,
            run_later=asyncio.get_running_loop().call_soon_threadsafe,
            incarnation=child.incarnation,
        )
        core.lose_engine("it is not ready yet")
        garbage.settle()
        if not any(isinstance(waiting, EngineReady) for waiting in self._early):
            child.say_progress(f"{WAITING}the engine core")
        early, self._early = self._early, []
        for waiting in early:
            self._work(core, peers, waiting)

    def _work(self, core: TokenizerCore, peers: Peers, message: Any) -> None:
        match message:
            case EngineReady():
                self._take_engine(core, peers, message)
            case PeerLost(role="engine"):
                if peers.engine_lost(message.incarnation):
                    core.lose_engine(message.reason)
            case PeerLost() | PeerUp():
                if peers.frontend_changed(message):
                    core.lose_frontend(message.index)
            case Generate() | Pool() | Tokenize() | Detokenize():
                if peers.is_from_the_dead(message.request_id):
                    return
                if peers.follow_successor(message.request_id):
                    core.lose_frontend(message.request_id >> OWNER_SHIFT)
                core.handle(message)
            case _:
                core.handle(message)

    def _take_engine(self, core: TokenizerCore, peers: Peers, ready: EngineReady) -> None:
        """Work with an engine that says it is ready, unless it is dead by now."""
        if not peers.engine_is_new(ready.incarnation):
            return
        core.lose_engine("it was replaced")  # a former one, whose loss may not have been told yet
        peers.connect_engine(ready.incarnation)
        core.handle(ready)
        self._child.say_ready(f"{core.vocabulary.size} tokens", engine=ready.incarnation)

    async def _beat(self) -> None:
        """Show that the loop goes round; a hung one stops showing it."""
        while True:
            core = self._core
            pending = core is not None and core.open_requests > 0
            self._child.heartbeat.beat(pending, 0 if core is None else core.steps)
            await asyncio.sleep(BEAT_SECONDS)


def body(child: Child) -> None:
    """Run the process's event loop until Stop."""

    async def main() -> None:
        await TokenizerProcess(child).serve()

    uvloop.run(main())


if __name__ == "__main__":
    run(ROLE, body)
