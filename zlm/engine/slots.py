"""The slots of running sequences: numpy columns that advance a whole batch at once.

Owns one row a slot of every column. The worker keeps the same slots on its device; a sequence
keeps its slot from the step it joins until it finishes or is preempted. Knows nothing of blocks or
queues. Columns are plain attributes: the scheduler indexes them.
"""

import numpy as np
import numpy.typing as npt

from zlm.engine.request import Sequence


class SlotTable:
    """Columns by slot, and which slots are free."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        """Make *num_slots* slots for sequences of at most *max_tokens* tokens.

        The token table is allocated zeroed, so the system commits only what is written.
        """
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        self.seq_ids = np.zeros(num_slots, np.int64)
        self.known = np.zeros(num_slots, np.int64)  # tokens whose ids are known here
        self.computed = np.zeros(num_slots, np.int64)  # tokens computed, steps in flight included
        self.capacity = np.zeros(num_slots, np.int64)  # tokens that the block table covers
        self.limit = np.zeros(num_slots, np.int64)  # tokens the sequence may have
        self.stops_on_eos = np.zeros(num_slots, np.bool_)
        self.stop_ids = np.full((num_slots, 0), -1, np.int32)  # the client's, padded with -1
        self.last_token_at = np.zeros(num_slots, np.float64)
        self.has_grammar = np.zeros(num_slots, np.bool_)
        # Slots whose next row is the one token sampled last: the steady state.
        self.decoding = np.zeros(num_slots, np.bool_)
        self.sequences: dict[int, Sequence] = {}  # by slot
        self.num_with_stop_ids = 0
        self.num_with_grammar = 0
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def join(self, sequence: Sequence) -> int:
        """Give *sequence* a slot, its known tokens in it; return the slot."""
        slot = self._free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        known = len(sequence.tokens)
        self.tokens[slot, :known] = sequence.tokens
        self.seq_ids[slot] = sequence.seq_id
        self.known[slot] = known
        self.computed[slot] = 0
        self.capacity[slot] = 0
        self.limit[slot] = sequence.limit
        self.stops_on_eos[slot] = not sequence.ignore_eos
        self.last_token_at[slot] = sequence.last_token_at
        self.decoding[slot] = False
        self.has_grammar[slot] = sequence.grammar is not None
        self.num_with_grammar += sequence.grammar is not None
        if sequence.stop_ids:
            self._set_stop_ids(slot, sequence.stop_ids)
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Take the slot of *sequence* back; its known tokens go with it."""
        slot = sequence.slot
        sequence.tokens = self.tokens[slot, : self.known[slot]].copy()
        sequence.last_token_at = float(self.last_token_at[slot])
        self.decoding[slot] = False
        self.has_grammar[slot] = False
        self.num_with_grammar -= sequence.grammar is not None
        if sequence.stop_ids:
            self.stop_ids[slot] = -1
            self.num_with_stop_ids -= 1
        del self.sequences[slot]
        sequence.slot = -1
        self._free.append(slot)

    def hits_stop_id(
        self, slots: npt.NDArray[np.int64], ids: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Return which of *ids* is among the client's stop ids of its slot."""
        return (self.stop_ids[slots] == ids[:, None]).any(axis=1)

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((len(self.stop_ids), len(stop_ids)), -1, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.num_with_stop_ids += 1
