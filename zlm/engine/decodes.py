"""Which sequences decode in the next step: all that can, or in a pipeline a share of them.

With stages that compute different layers, as many steps are under way as there are stages, and each
has other sequences: a sequence's next token can be computed when its last one has come back. So a
step takes of those that wait for nothing its stages' part of all.
"""

import numpy as np

from zlm.engine.plan import DecodeColumns, Indices
from zlm.engine.slots import SlotTable


class Decodes:
    """Slots of one token in the next step, and their columns of Execute, kept while they stay."""

    def __init__(self, table: SlotTable, stages: int) -> None:
        self._table = table
        self._stages = stages
        self.slots: Indices = np.zeros(0, np.int64)
        self.columns = DecodeColumns.of(self.slots)
        self.changed = False  # set by whoever changes who decodes

    def begin(self) -> None:
        """Begin a plan; from here on the slots stay unless a sequence leaves."""
        self.changed |= self._stages > 1

    def count(self) -> int:
        """Return how many there are, brought up to date."""
        if self.changed:
            self.changed = False
            table = self._table
            slots = np.flatnonzero(table.decoding)
            if self._stages > 1:
                share = -(-len(slots) // self._stages)
                slots = slots[table.computed[slots] < table.known[slots]][:share]
            self.slots = slots
            self.columns = DecodeColumns.of(slots)
        return len(self.slots)

    def tokens(self, starts: Indices) -> bytes:
        """Return the tokens at *starts* of all, int32, if workers do not have them: in a pipeline
        only the last stage has sampled them.
        """
        return self._table.tokens[self.slots, starts].tobytes() if self._stages > 1 else b""
