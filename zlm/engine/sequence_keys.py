"""Sequences and the prefix cache: their block keys, what they find, what they leave behind.

Owns the hasher. Reads a sequence's known tokens (in its slot, or with it) and fills in its ``keys``
and ``num_published``; the blocks themselves are ``kv_groups``'.
"""

from zlm.engine.kv_groups import KVGroups
from zlm.engine.prefix_cache import FIELD_SALT, BlockHasher
from zlm.engine.request import Sequence
from zlm.engine.slots import SlotTable

ID_BYTES = 4  # a token id is an int32


class SequenceKeys:
    """Block keys of sequences."""

    def __init__(
        self, kv: KVGroups, slots: SlotTable, hasher: BlockHasher, *, enabled: bool, verify: bool
    ) -> None:
        """If not *enabled*, nothing is published and nothing found.

        With *verify*, the token ids behind each key are kept and compared on every hit.
        """
        self._kv = kv
        self._slots = slots
        self._hasher = hasher
        self._enabled = enabled
        self._verify = verify

    def root(self, cache_salt: bytes) -> bytes:
        """Return what the chain of a sequence with *cache_salt* (empty: none) begins with."""
        fields = [(FIELD_SALT, cache_salt)] if cache_salt else []
        return self._hasher.root(fields) if self._enabled else b""

    def find_hit(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the cached prefix that *sequence*, in no slot, may start from.

        The last known token is never part of it: a row has at least one token to compute.
        """
        if not self._enabled or not sequence.reads_cache:
            return []
        keys = self._keys(sequence, (len(sequence.tokens) - 1) // self._kv.block_size)
        return keys[: self._kv.find_hit(keys)]

    def adopt(self, sequence: Sequence, keys: list[bytes]) -> int:
        """Let the slot of *sequence* begin with the hit *keys*; return its capacity in tokens."""
        contents = []
        if self._verify:
            contents = [self._tokens(sequence, index, index + 1) for index in range(len(keys))]
        sequence.num_published = len(keys)
        return self._kv.adopt(sequence.slot, keys, contents)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the cache know the full blocks of the first *num_tokens* tokens of *sequence*.

        All of them are known, and the steps that compute them were sent.
        """
        full = num_tokens // self._kv.block_size
        published = sequence.num_published
        if full <= published or not self._enabled:
            return
        keys = self._keys(sequence, full)
        contents = b""
        for index in range(published, full):
            if self._verify:
                contents = self._tokens(sequence, index, index + 1)
            self._kv.publish(sequence.slot, index, keys[index], contents)
        sequence.num_published = full

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the keys of the first *count* blocks, making those not made before."""
        keys = sequence.keys
        if len(keys) < count:
            parent = keys[-1] if keys else sequence.root
            token_ids = self._tokens(sequence, len(keys), count)
            keys += self._hasher.blocks(parent, token_ids, self._kv.block_size * ID_BYTES)
        return keys[:count] if len(keys) > count else keys

    def _tokens(self, sequence: Sequence, first: int, end_block: int) -> bytes:
        """Return the token ids of the blocks from *first* up to *end_block*."""
        start, end = first * self._kv.block_size, end_block * self._kv.block_size
        if sequence.slot >= 0:
            return self._slots.tokens[sequence.slot, start:end].tobytes()
        return sequence.tokens[start:end].tobytes()
