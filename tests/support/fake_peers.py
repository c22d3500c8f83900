"""A child without sockets: its outboxes keep what is sent, by address."""

from typing import Any


class FakeOutbox:
    """Keeps what is sent until it is closed; sending afterwards is a fault."""

    def __init__(self, to: tuple[str, int, int]) -> None:
        self.to = to
        self.sent: list[Any] = []
        self.is_closed = False

    def send(self, message: Any) -> None:
        assert not self.is_closed, f"{self.to} is closed"
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


class FakeChild:
    """What ``zlm.process.child.Child`` is to those who open outboxes."""

    def __init__(self) -> None:
        self.opened: list[FakeOutbox] = []

    def outbox(self, role: str, index: int = 0, incarnation: int = 0) -> FakeOutbox:
        self.opened.append(FakeOutbox((role, index, incarnation)))
        return self.opened[-1]

    def living(self) -> list[tuple[str, int, int]]:
        """Return where the outboxes go that are open."""
        return [outbox.to for outbox in self.opened if not outbox.is_closed]
