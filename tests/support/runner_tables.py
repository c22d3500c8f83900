"""Block tables as an engine keeps them, for tests that send step messages to a real runner."""

from collections.abc import Sequence

from worker_steps import execute

from zlm.messages import Execute, Join


class Tables:
    """Keeps block tables as an engine would, and writes the messages of steps."""

    def __init__(self, num_groups: int, block_size: int = 16) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self.held: dict[int, int] = {}  # blocks of each slot
        self.next_block, self.steps = 1, 0

    def message(
        self,
        rows: list[tuple[int, int, int, int]],
        joins: Sequence[Join] = (),
        copies: Sequence[tuple[int, int, int]] = (),
    ) -> Execute:
        """Return a step of *rows* (slot, start, count, sample), with the blocks that they need."""
        entries = []
        for joined in joins:
            self.held[joined.slot] = 0
        for slot, start, count, _ in rows:
            while self.held[slot] * self.block_size < start + count:
                for group in range(self.num_groups):
                    entries.append((group, slot, self.held[slot], self.next_block))
                self.held[slot] += 1
                self.next_block += 1
        self.steps += 1
        return execute(self.steps, rows, joins, entries, copies)
