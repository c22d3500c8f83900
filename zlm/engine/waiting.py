"""The queue of sequences that wait for a slot and blocks: a heap by their order.

Owns the heap. A sequence that leaves from the middle (aborted, or finished by a token that was in
flight when it was preempted) stays in the heap as a dead entry until it surfaces or until dead
entries outnumber the living.
"""

import heapq

from zlm.engine.request import Order, Sequence, State


class WaitingQueue:
    """Waiting sequences, first by ``Sequence.order``. All operations are O(log n) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, sequence: Sequence) -> None:
        """Add *sequence*, in state WAITING and not in the queue."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> Sequence | None:
        """Return the sequence whose turn it is, and leave it there."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is State.WAITING:
                return sequence
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return None

    def pop(self) -> None:
        """Remove the sequence that ``head`` returned."""
        heapq.heappop(self._heap)

    def forget(self) -> None:
        """Take note that a sequence in the queue has left state WAITING."""
        self._num_dead += 1
        if self._num_dead > 64 + len(self):
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapq.heapify(self._heap)
            self._num_dead = 0
