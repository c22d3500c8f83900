"""A planned step: what the scheduler remembers of it until its result comes, and its message.

A plan is a value with two exceptions: ``departed``, where the scheduler notes the sequences that
lost their slot while the step was in flight, and ``masked``, which is empty once it was told.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from zlm.engine.kv_groups import TableEntries
from zlm.engine.request import Sequence, State
from zlm.engine.slots import SlotTable
from zlm.messages import Execute, Join, Masks

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row that is not steady decode: a chunk of a prompt, a fork's first row, a resumption."""

    sequence: Sequence
    slot: int
    start: int  # position of its first token
    count: int  # tokens
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Plan:
    """A step in flight. Rows are *num_decodes* decode rows, then ``prefills`` in order."""

    step: int
    num_decodes: int
    slots: Indices  # of all rows
    prefills: list[PrefillRow]
    sample_slots: Indices  # of the rows that sample, in order
    sample_ends: Indices  # positions their tokens will have
    masked: list[tuple[int, Sequence]] = field(default_factory=list)  # sampling rows with a grammar
    departed: dict[int, Sequence] = field(default_factory=dict)  # by the slot they had

    def depart(self, slot: int, sequence: Sequence) -> bool:
        """Note that *sequence* lost *slot*; return whether this step has a row of it.

        A slot that has changed hands before keeps its first note: the row is not the new holder's.
        """
        if slot in self.departed or not (self.slots == slot).any():
            return False
        self.departed[slot] = sequence
        return True


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """The columns of Execute that stay the same while the same slots decode."""

    slots: bytes
    counts: bytes
    sample: bytes

    @classmethod
    def of(cls, slots: Indices) -> "DecodeColumns":
        """Return the columns of one token for each of *slots*."""
        ones = np.ones(len(slots), np.int32)
        return cls(slots.astype(np.int32).tobytes(), ones.tobytes(), b"\1" * len(slots))


def make_plan(
    step: int, decode_slots: Indices, decode_ends: Indices, prefills: list[PrefillRow]
) -> Plan:
    """Return the plan of a step: one token of each decode slot, and *prefills*.

    The tokens that decode rows sample will stand at *decode_ends*.
    """
    if not prefills:
        return Plan(step, len(decode_slots), decode_slots, [], decode_slots, decode_ends)
    sampling = [row for row in prefills if row.samples]
    return Plan(
        step=step,
        num_decodes=len(decode_slots),
        slots=_extended(decode_slots, [row.slot for row in prefills]),
        prefills=prefills,
        sample_slots=_extended(decode_slots, [row.slot for row in sampling]),
        sample_ends=_extended(decode_ends, [row.end for row in sampling]),
    )


def _extended(column: Indices, values: list[int]) -> Indices:
    return np.concatenate((column, np.array(values, np.int64)))


def make_execute(
    step: int,
    decodes: DecodeColumns,
    decode_starts: Indices,
    prefills: list[PrefillRow],
    entries: TableEntries,
    joins: list[Join],
    copies: list[tuple[int, int, int]],
    *,
    masked: bool,
    tokens: bytes = b"",
) -> Execute:
    """Return the message of a step; see ``messages.Execute`` for its columns."""
    slots, counts, sample = decodes.slots, decodes.counts, decodes.sample
    starts = decode_starts.astype(np.int32).tobytes()
    if prefills:
        slots += array("i", [row.slot for row in prefills]).tobytes()
        counts += array("i", [row.count for row in prefills]).tobytes()
        starts += array("i", [row.start for row in prefills]).tobytes()
        sample += bytes(row.samples for row in prefills)
    return Execute(
        step=step,
        slots=slots,
        starts=starts,
        counts=counts,
        sample=sample,
        joins=joins,
        table_groups=entries.groups.tobytes(),
        table_slots=entries.slots.tobytes(),
        table_indices=entries.indices.tobytes(),
        table_blocks=entries.blocks.tobytes(),
        copies=copies,
        masked=masked,
        tokens=tokens,
    )


def note_masked(plan: Plan, slots: SlotTable) -> None:
    """Note the sampling rows of *plan*, just made, whose sequences have a grammar."""
    if slots.num_with_grammar:
        for row in np.flatnonzero(slots.has_grammar[plan.sample_slots]).tolist():
            plan.masked.append((row, slots.sequences[int(plan.sample_slots[row])]))


def take_masks(plan: Plan) -> Masks | None:
    """Return the masks of *plan*, once; None if it has none. All earlier results are in.

    Rows of sequences that are over need none: what they sample is dropped.
    """
    if not plan.masked:
        return None
    rows = [
        (row, sequence.grammar.words)
        for row, sequence in plan.masked
        if sequence.grammar is not None and sequence.state is not State.FINISHED
    ]
    plan.masked.clear()
    return Masks(
        plan.step,
        array("i", [row for row, _ in rows]).tobytes(),
        b"".join(words.tobytes() for _, words in rows),
    )
