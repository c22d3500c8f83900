"""The books of the scheduler, checked: slots, sequences, block tables and pools must agree.

Called by tests after every event, and by the engine core whenever it goes idle.
"""

from collections.abc import Collection

from zlm.engine.block_pool import InvariantError
from zlm.engine.kv_groups import KVGroups
from zlm.engine.request import Sequence, State
from zlm.engine.slots import SlotTable


def check(
    kv: KVGroups, slots: SlotTable, sequences: Collection[Sequence], num_queued: int, num_slots: int
) -> None:
    """Raise InvariantError unless all of them agree; *sequences* are those that are not over."""
    kv.check()
    held = slots.sequences
    if len(held) + slots.num_free != num_slots:
        raise InvariantError("a slot is neither free nor held")
    for slot, sequence in held.items():
        capacity = kv.capacity(slot)
        if sequence.slot != slot or sequence.state is not State.RUNNING:
            raise InvariantError(f"slot {slot} is held by a sequence that does not run")
        if not slots.computed[slot] <= slots.capacity[slot] == capacity:
            raise InvariantError(f"slot {slot} computes beyond its block table")
    with_grammar = sum(sequence.grammar is not None for sequence in held.values())
    if not with_grammar == slots.num_with_grammar == slots.has_grammar.sum():
        raise InvariantError("slots do not know which of them have a grammar")
    states = [sequence.state for sequence in sequences]
    if states.count(State.RUNNING) != len(held):
        raise InvariantError("a running sequence has no slot")
    if states.count(State.WAITING) != num_queued:
        raise InvariantError("a waiting sequence is not in the queue")


def check_idle(
    kv: KVGroups, slots: SlotTable, prefilling: Collection[Sequence], num_slots: int
) -> None:
    """Raise InvariantError unless nothing is held now that no sequence is left."""
    kv.check_idle()
    if slots.num_free != num_slots or prefilling:
        raise InvariantError("a slot is held although no sequence is left")
