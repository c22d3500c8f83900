"""The KV blocks of one group: who may have the next one, and which old ones are still worth having.

Owns the reference counts, the free list and the map from content keys to blocks of one KV group.
Knows nothing of sequences, windows or tokens: a key is opaque bytes (see ``prefix_cache``).

A block is in exactly one of three places:

    free      nobody refers to it and nothing knows its contents     (a stack: last in, first out)
    cached    nobody refers to it, its key still finds its contents  (LRU order: oldest goes first)
    in use    one or more block tables refer to it                   (it may have a key as well)

Block 0 is the null block: never handed out, what table entries behind a sliding window point at.
Every operation is O(1).
"""

from collections import OrderedDict

NULL_BLOCK = 0


class InvariantError(Exception):
    """The engine's own bookkeeping contradicts itself: a fault of ours, fatal to the engine."""


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1 of one KV group."""

    def __init__(self, num_blocks: int, *, keep_contents: bool = False) -> None:
        """Hold *num_blocks* blocks, the null block included.

        With *keep_contents* the token ids behind each key are kept, for ``contents`` to compare.
        """
        self.num_usable = num_blocks - 1
        self.num_in_use = 0
        self.releases = 0  # grows whenever a block becomes free or cached
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[bytes, int] = {}
        self._contents: dict[int, bytes] | None = {} if keep_contents else None

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can still hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self) -> int:
        """Return a block with one reference and no key; free ones go before cached ones.

        The caller has seen that ``num_free`` is not 0.
        """
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._drop_key(block)
        self._references[block] = 1
        self.num_in_use += 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """Return *count* blocks; the caller has seen that so many are free."""
        if count > len(self._free):
            return [self.allocate() for _ in range(count)]
        blocks = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        references = self._references
        for block in blocks:
            references[block] = 1
        self.num_in_use += count
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to *block*, which is in use or cached."""
        if self._references[block] == 0:
            del self._cached[block]
            self.num_in_use += 1
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference to *block*; the last one makes it cached, or free if it has no key."""
        left = self._references[block] - 1
        self._references[block] = left
        if left == 0:
            self.num_in_use -= 1
            self.releases += 1
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        elif left < 0:
            raise InvariantError(f"KV block {block} was released more often than it was taken")

    def publish(self, block: int, key: bytes, contents: bytes = b"") -> None:
        """Let *key* find *block* from now on, unless it finds an equal block already."""
        if key in self._by_key or self._keys[block] is not None:
            return
        self._by_key[key] = block
        self._keys[block] = key
        if self._contents is not None:
            self._contents[block] = contents

    def find(self, key: bytes) -> int | None:
        """Return the block that holds the contents of *key*, if there is one."""
        return self._by_key.get(key)

    def forget(self, key: bytes) -> None:
        """Make *key* find nothing: its contents are not to be trusted."""
        block = self._by_key.get(key)
        if block is None:
            return
        self._drop_key(block)
        if self._references[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def forget_all(self) -> int:
        """Make every key find nothing; return how many blocks could be found before."""
        count = len(self._by_key)
        for key in list(self._by_key):
            self.forget(key)
        return count

    def is_idle(self, block: int) -> bool:
        """Whether nobody refers to *block* (sharing it then takes it from the free count)."""
        return self._references[block] == 0

    def contents(self, block: int) -> bytes | None:
        """Return the token ids that *block* was published with; None if they are not kept."""
        return None if self._contents is None else self._contents.get(block)

    def check(self, references: dict[int, int] | None = None) -> None:
        """Raise InvariantError unless free + cached + in use = total.

        *references* is the count of table entries that refer to each block: with it every block
        is looked at, without it only the totals.
        """
        accounted = len(self._free) + len(self._cached) + self.num_in_use
        if accounted != self.num_usable:
            raise InvariantError(
                f"{len(self._free)} free + {len(self._cached)} cached + {self.num_in_use} in use "
                f"is not {self.num_usable} KV blocks"
            )
        if references is None:
            return
        free = set(self._free)
        for block in range(1, self.num_usable + 1):
            wanted = references.get(block, 0)
            if self._references[block] != wanted:
                raise InvariantError(
                    f"KV block {block} has {self._references[block]} references, "
                    f"block tables hold {wanted}"
                )
            places = (wanted > 0) + (block in free) + (block in self._cached)
            if places != 1:
                raise InvariantError(f"KV block {block} is in {places} places")
            key = self._keys[block]
            if key is not None and (block in free or self._by_key[key] != block):
                raise InvariantError(f"KV block {block} has a key that does not find it")
        if len(self._by_key) != sum(key is not None for key in self._keys):
            raise InvariantError("a key finds a KV block that does not bear it")

    def _drop_key(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
            if self._contents is not None:
                self._contents.pop(block, None)
