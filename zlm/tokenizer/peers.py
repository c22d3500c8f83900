"""A tokenizer's ways to the engine core and the front ends, each of which may die and be replaced.

Owns one outbox to the newest incarnation of each. News of the same death come from several sides in
any order (the supervisor's word, a successor's first message); the highest incarnation counts.
"""

from zlm.ipc.sockets import Outbox
from zlm.messages import (
    INCARNATIONS,
    OWNER_SHIFT,
    Abort,
    Launch,
    Message,
    PeerLost,
    PeerUp,
    Submit,
    TokenBytes,
    incarnation_of,
)
from zlm.process.child import Child


class Peers:
    """The engine core and all front ends."""

    def __init__(self, child: Child, launch: Launch) -> None:
        self._child = child
        self._engine: Outbox | None = None
        self._engine_incarnation = -1  # of the last one that was connected to, or is known lost
        count = launch.resolved.num_front_ends
        self._incarnations = [launch.incarnation("frontend", index) for index in range(count)]
        self._frontends: list[Outbox | None] = [
            child.outbox("frontend", index, incarnation)
            for index, incarnation in enumerate(self._incarnations)
        ]

    # ------------------------------------------------------------------ the engine core

    def to_engine(self, message: Submit | Abort | TokenBytes) -> None:
        """Send to the engine core, which must be there."""
        assert self._engine is not None, "there is no engine to submit to"
        self._engine.send(message)

    def engine_is_new(self, incarnation: int) -> bool:
        """Whether an engine core that says it is ready is one not known yet."""
        return incarnation > self._engine_incarnation

    def connect_engine(self, incarnation: int) -> None:
        """Send to this incarnation from now on."""
        self._drop_engine(incarnation)
        self._engine = self._child.outbox("engine", 0, incarnation)

    def engine_lost(self, incarnation: int) -> bool:
        """Take in that an engine core is lost; return whether that is news."""
        is_news = incarnation > self._engine_incarnation or (
            incarnation == self._engine_incarnation and self._engine is not None
        )
        if is_news:
            self._drop_engine(incarnation)
        return is_news

    def _drop_engine(self, incarnation: int) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._engine_incarnation = incarnation

    # ------------------------------------------------------------------ front ends

    def to_frontend(self, index: int, message: Message) -> None:
        """Send to a front end; nowhere if it is dead."""
        outbox = self._frontends[index]
        if outbox is not None:
            outbox.send(message)

    def frontend_changed(self, message: PeerLost | PeerUp) -> bool:
        """Take in that a front end is lost or there; return whether the former one's work is void.

        The loss of one that was replaced meanwhile is no news, nor is a successor already known.
        """
        index, known = message.index, self._incarnations[message.index]
        if message.role != "frontend" or message.incarnation < known:
            return False
        if isinstance(message, PeerLost):
            self._drop_frontend(index, message.incarnation)
            return True
        if message.incarnation > known or self._frontends[index] is None:
            self._connect_frontend(index, message.incarnation)
            return True
        return False

    def is_from_the_dead(self, request_id: int) -> bool:
        """Whether a request is of a front end that is gone: nobody waits for its answer."""
        index, made_by = request_id >> OWNER_SHIFT, incarnation_of(request_id)
        known = self._incarnations[index]
        is_lost = self._frontends[index] is None and made_by == known % INCARNATIONS
        return is_lost or _is_older(made_by, known)

    def follow_successor(self, request_id: int) -> bool:
        """Connect to the front end that made *request_id*, if it has taken another's place.

        Return whether it has, and that was not known yet.
        """
        index, made_by = request_id >> OWNER_SHIFT, incarnation_of(request_id)
        known = self._incarnations[index]
        if made_by == known % INCARNATIONS:
            return False
        self._connect_frontend(index, known + (made_by - known) % INCARNATIONS)
        return True

    def _connect_frontend(self, index: int, incarnation: int) -> None:
        self._drop_frontend(index, incarnation)
        self._frontends[index] = self._child.outbox("frontend", index, incarnation)

    def _drop_frontend(self, index: int, incarnation: int) -> None:
        outbox = self._frontends[index]
        if outbox is not None:
            outbox.close()
        self._frontends[index] = None
        self._incarnations[index] = incarnation


def _is_older(made_by: int, known: int) -> bool:
    """Whether an incarnation, as ids tell it, is one before *known*."""
    return (made_by - known) % INCARNATIONS > INCARNATIONS // 2
