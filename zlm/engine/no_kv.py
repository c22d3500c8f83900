"""Block tables of a model that keeps no keys and values: there is always room, nothing is shared.

Stands in ``KVGroups``' place for encoders, whose sequences are computed in one row, at once. Owns
how many tokens each slot covers, which is all that the scheduler asks of a table.
"""

from collections.abc import Mapping, Sequence

from zlm.engine.block_pool import InvariantError
from zlm.engine.kv_groups import KVGroups

ENDLESS = 2**62  # blocks or tokens: more than anyone asks for


class NoKV(KVGroups):
    """KV groups without a group."""

    def __init__(self, block_size: int, num_slots: int) -> None:
        super().__init__([], [], block_size, num_slots)
        self._capacity = [0] * num_slots

    def fits(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        chunk: int,
        promised: Mapping[int, int],
        growing: int,
    ) -> bool:
        return True

    def room(self, slot: int) -> int:
        return ENDLESS

    def capacity(self, slot: int) -> int:
        return self._capacity[slot]

    def min_free(self) -> int:
        return ENDLESS

    def usage(self) -> float:
        return 0.0

    def extend(self, slot: int, num_tokens: int) -> int:
        self._capacity[slot] = max(self._capacity[slot], num_tokens)
        return self._capacity[slot]

    def release(self, slot: int) -> None:
        self._capacity[slot] = 0

    def find_hit(self, keys: Sequence[bytes]) -> int:
        return 0

    def adopt(self, slot: int, keys: Sequence[bytes], contents: Sequence[bytes] = ()) -> int:
        if keys:
            raise InvariantError("a prefix hit without a cache")
        return 0

    def check(self) -> None:
        if any(capacity < 0 for capacity in self._capacity):
            raise InvariantError("a slot covers fewer than no tokens")

    def check_idle(self) -> None:
        if any(self._capacity):
            raise InvariantError("a slot covers tokens although no sequence is left")
