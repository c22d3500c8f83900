"""Which blocks of a prompt are already in the KV cache: content keys, and the longest usable hit.

A full block's key is a keyed 128-bit hash of the key before it and of its own token ids, so a key
stands for the whole text up to the block's end. The chain begins at a root that hashes what else
the cached values depend on, each as a typed field: equal bytes in fields of different kinds (a
client's salt, an adapter's name) never give equal roots. The hash key is random and made afresh
by each process, so clients cannot construct collisions.

Owns no state but the hash key; the maps from keys to blocks are the block pools'.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b

from zlm.config import first_seen
from zlm.engine.block_pool import BlockPool

KEY_BYTES = 16
FIELD_SALT = b"s"  # kinds of the root's fields: one byte each
FIELD_ADAPTER = b"a"


class BlockHasher:
    """Makes content keys. Two hashers with different secrets agree on nothing."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Use *secret* (at most 64 bytes); None draws a random one."""
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def root(self, fields: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
        """Return the key before a sequence's first block.

        *fields* are (kind, value) pairs of what the cached values depend on beside the tokens;
        kinds are one byte, empty values are left out by the caller.
        """
        hashed = blake2b(digest_size=KEY_BYTES, key=self._secret, person=b"root")
        for kind, value in fields:
            hashed.update(kind + len(value).to_bytes(8, "little") + value)
        return hashed.digest()

    def block(self, parent: bytes, token_ids: bytes) -> bytes:
        """Return the key of a full block: *token_ids* (int32) after the text of *parent*."""
        return blake2b(parent + token_ids, digest_size=KEY_BYTES, key=self._secret).digest()

    def blocks(self, parent: bytes, token_ids: bytes, block_bytes: int) -> list[bytes]:
        """Return the keys of the full blocks, *block_bytes* each, that *token_ids* consists of."""
        keys = []
        for start in range(0, len(token_ids), block_bytes):
            parent = self.block(parent, token_ids[start : start + block_bytes])
            keys.append(parent)
        return keys


def first_live_block(position: int, window: int, block_size: int) -> int:
    """Return the index of the first block that a query at *position* or later can read.

    A query at position p reads keys p - window + 1 .. p (all keys when *window* is 0, those of its
    chunk when it is below, see ``first_seen``):

        |----|----|----|----|----|     block_size 4, window 6, position 17
                     ^^^^^^            keys 12..17 are read: blocks 3 and 4
    """
    first: int = first_seen(position, window)
    return max(0, first) // block_size


def longest_hit(
    keys: Sequence[bytes], pools: Sequence[BlockPool], windows: Sequence[int], block_size: int
) -> int:
    """Return the most leading blocks of *keys* that every group still holds what it needs of.

    A full group needs all blocks of the prefix, a sliding group only those that cover the last
    window - 1 tokens before the prefix's end, one of chunks those of the chunk that the end is in.
    A missing block j cuts the prefix to j blocks, and
    the shorter prefix is then looked at again in every group, until nothing is missing.
    """
    hit = len(keys)
    for pool, window in zip(pools, windows, strict=True):
        if not window:
            hit = next((i for i in range(hit) if pool.find(keys[i]) is None), hit)
    settled = False
    while hit and not settled:
        settled = True
        for pool, window in zip(pools, windows, strict=True):
            needed = range(hit - 1, first_live_block(hit * block_size, window, block_size) - 1, -1)
            missing = next((i for i in needed if pool.find(keys[i]) is None), None)
            if window and missing is not None:
                hit, settled = missing, False
    return hit
