"""Which sequences decode in a step, with one stage and in a pipeline."""

import numpy as np

from zlm.engine.decodes import Decodes
from zlm.engine.slots import SlotTable


def table(known: list[int], computed: list[int], decoding: list[bool]) -> SlotTable:
    slots = SlotTable(len(known), 16)
    slots.known[:], slots.computed[:], slots.decoding[:] = known, computed, decoding
    slots.tokens[:] = np.arange(16) + 100 * np.arange(len(known))[:, None]
    return slots


def test_one_stage_takes_all_and_looks_when_told() -> None:
    slots = table([3, 4, 5], [3, 4, 4], [True, False, True])
    decodes = Decodes(slots, 1)
    decodes.changed = True
    decodes.begin()
    assert decodes.count() == 2 and decodes.slots.tolist() == [0, 2]
    assert decodes.tokens(slots.computed[decodes.slots]) == b"", "workers have them"
    slots.decoding[1] = True
    decodes.begin()
    assert decodes.count() == 2, "nobody said that it changed"


def test_each_stage_has_other_sequences() -> None:
    slots = table([4] * 5, [3] * 5, [True] * 5)
    decodes = Decodes(slots, 2)
    steps = []
    for _ in range(3):
        decodes.begin()
        decodes.count()
        chosen = decodes.slots
        tokens = np.frombuffer(decodes.tokens(slots.computed[chosen]), np.int32)
        assert tokens.tolist() == [100 * slot + 3 for slot in chosen.tolist()]
        slots.computed[chosen] += 1
        steps.append(chosen.tolist())
    assert steps == [[0, 1, 2], [3, 4], []], "none whose last token has not come back"
    slots.known[[0, 1, 2]] += 1
    decodes.begin()
    assert decodes.count() == 3 and decodes.slots.tolist() == [0, 1, 2]
