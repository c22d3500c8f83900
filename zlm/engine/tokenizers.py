"""The engine core's ways to the tokenizers, which may die and be replaced.

Owns one outbox a tokenizer, to its newest incarnation. A message of an older one (it was under way
when its sender died) is for nobody: ids tell which incarnation made them.
"""

from zlm.ipc.sockets import Outbox
from zlm.messages import (
    INCARNATIONS,
    OWNER_SHIFT,
    EngineReady,
    Launch,
    PeerLost,
    PeerUp,
    StepOutput,
    incarnation_of,
)
from zlm.process.child import Child


class Tokenizers:
    """All tokenizers, by index."""

    def __init__(self, child: Child, launch: Launch) -> None:
        self._child = child
        self._announcement: EngineReady | None = None
        count = launch.resolved.num_tokenizers
        self._incarnations = [launch.incarnation("tokenizer", index) for index in range(count)]
        self._outboxes: list[Outbox | None] = [
            child.outbox("tokenizer", index, incarnation)
            for index, incarnation in enumerate(self._incarnations)
        ]

    def announce(self, ready: EngineReady) -> None:
        """Tell every tokenizer, and each that comes later, that the engine core can work."""
        self._announcement = ready
        for outbox in self._outboxes:
            if outbox is not None:
                outbox.send(ready)

    def send(self, index: int, output: StepOutput) -> None:
        """Send news to a tokenizer; nowhere if it is dead."""
        outbox = self._outboxes[index]
        if outbox is not None:
            outbox.send(output)

    def knows(self, seq_id: int) -> bool:
        """Whether *seq_id* was made by the tokenizer that is there now."""
        index = seq_id >> OWNER_SHIFT
        here = self._incarnations[index] % INCARNATIONS == incarnation_of(seq_id)
        return here and self._outboxes[index] is not None

    def take(self, message: PeerUp | PeerLost) -> bool:
        """Take in that a tokenizer is lost or there; return whether the former one's work is void.

        The loss of one that was replaced meanwhile is no news.
        """
        index = message.index
        if message.role != "tokenizer" or message.incarnation < self._incarnations[index]:
            return False
        outbox = self._outboxes[index]
        if outbox is not None:
            outbox.close()
        self._outboxes[index] = None
        self._incarnations[index] = message.incarnation
        if isinstance(message, PeerUp):
            outbox = self._child.outbox("tokenizer", index, message.incarnation)
            if self._announcement is not None:
                outbox.send(self._announcement)
            self._outboxes[index] = outbox
        return True
