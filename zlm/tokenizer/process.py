"""The tokenizer process: ``python -m zlm.tokenizer.process RUNTIME INDEX``.

An asyncio loop around ``TokenizerCore``: one inbox, an outbox to the engine and one to each front
end. Owns the sockets; knows nothing of text. Ready once the vocabulary is loaded and the engine is.
"""

import asyncio
from typing import Any

import uvloop

from zlm.ipc.sockets import Outbox
from zlm.messages import EngineReady, Launch, Progress, Ready, Stop, ToTokenizer
from zlm.process import garbage
from zlm.process.child import Child, run
from zlm.tokenizer.core import TokenizerCore

ROLE = "tokenizer"
BEAT_SECONDS = 1.0


class TokenizerProcess:
    """Routes messages between the sockets and the core."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._core: TokenizerCore | None = None
        self._early: list[Any] = []  # messages that came before Launch
        self._stopped = asyncio.Event()
        self._ready = False

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
        elif self._core is None:
            self._early.append(message)
        else:
            self._work(self._core, message)

    def _launch(self, message: Launch) -> None:
        child = self._child
        child.supervisor.send(Progress(ROLE, child.index, "loading the tokenizer"))
        engine = child.outbox("engine")
        frontends: list[Outbox] = [
            child.outbox("frontend", i) for i in range(message.resolved.num_front_ends)
        ]
        self._core = TokenizerCore(
            message.resolved,
            child.index,
            to_engine=engine.send,
            to_frontend=lambda index, answer: frontends[index].send(answer),
            run_later=asyncio.get_running_loop().call_soon_threadsafe,
        )
        garbage.settle()
        early, self._early = self._early, []
        for waiting in early:
            self._work(self._core, waiting)

    def _work(self, core: TokenizerCore, message: Any) -> None:
        core.handle(message)
        if isinstance(message, EngineReady) and not self._ready:
            self._ready = True
            detail = f"{core.vocabulary.size} tokens"
            self._child.supervisor.send(Ready(ROLE, self._child.index, detail))

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
