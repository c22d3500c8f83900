"""The block tables of all running sequences, over all KV groups.

Owns, for each group, one block pool and one table a slot: the blocks that hold tokens
[i * block_size, (i + 1) * block_size) at index i. Owns also the list of table entries that changed
since the last step, for the workers. Knows slots and positions, not sequences or token ids.

All groups share one block size, so the tables of a slot have the same length in each. A sliding
group gives back the blocks behind its window, one of chunks those before the current chunk, and
points their entries at the null block:

    index        0    1    2    3    4          next query at position p
    full       | 17 | 4  | 9  | 22 | 5  |
    sliding    | 0  | 0  | 3  | 8  | 12 |       0, 1: no query at p or later reads them

When may a block be handed to another sequence, with steps in flight that still use it? At once:
workers execute steps strictly in order, so whatever an earlier step writes to the block is there
before the new owner's first step, and the new owner reads only what it wrote itself.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

from zlm.engine.block_pool import NULL_BLOCK, BlockPool, InvariantError
from zlm.engine.prefix_cache import first_live_block, longest_hit

MOST_RESERVED = 20  # at most one block in so many is set aside for running sequences to grow


class TableEntries:
    """Columns of changed block-table entries (see messages.Execute), taken once a step."""

    def __init__(self) -> None:
        self.groups = array("i")
        self.slots = array("i")
        self.indices = array("i")
        self.blocks = array("i")

    def add_run(self, group: int, slot: int, first: int, blocks: list[int]) -> None:
        """Note that the entries of *slot* in *group* from index *first* on are now *blocks*."""
        count = len(blocks)
        self.groups.extend([group] * count)
        self.slots.extend([slot] * count)
        self.indices.extend(range(first, first + count))
        self.blocks.extend(blocks)

    def add(self, group: int, slot: int, index: int, block: int) -> None:
        """Note that entry *index* of *slot* in *group* is now *block*."""
        self.groups.append(group)
        self.slots.append(slot)
        self.indices.append(index)
        self.blocks.append(block)

    def without(self, slot: int) -> "TableEntries":
        """Return the entries of all slots but *slot*."""
        rest = TableEntries()
        for entry in zip(self.groups, self.slots, self.indices, self.blocks, strict=True):
            if entry[1] != slot:
                rest.add(*entry)
        return rest


class KVGroups:
    """Block pools and block tables of all groups."""

    def __init__(
        self,
        windows: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        num_slots: int,
        *,
        keep_contents: bool = False,
    ) -> None:
        """Make a pool of ``num_blocks[g]`` blocks (null block included) for each group g.

        ``windows[g]`` is the attention window of group g in tokens, 0 for full attention, -n for
        chunks of n. With *keep_contents* every prefix hit is compared with the token ids it stands
        for.
        """
        self.block_size = block_size
        self.windows = tuple(windows)
        self.pools = [BlockPool(n, keep_contents=keep_contents) for n in num_blocks]
        self.entries = TableEntries()
        self._tables: list[list[list[int]]] = [[[] for _ in range(num_slots)] for _ in windows]
        self._first_live: list[list[int]] = [[0] * num_slots for _ in windows]
        self._sliding = [g for g, window in enumerate(windows) if window]

    # ------------------------------------------------------------------ what fits

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that *num_tokens* tokens fill, the last perhaps partly."""
        return -(-num_tokens // self.block_size)

    def most_live_blocks(self, group: int, num_tokens: int, chunk: int) -> int:
        """Return the most blocks of *group* that a sequence holds at a time.

        It has *num_tokens* tokens in the end and is computed *chunk* tokens at a time at most.
        """
        blocks = self.blocks_for(num_tokens)
        window = self.windows[group]
        if not window:
            return blocks
        return min(blocks, self.blocks_for(abs(window) - 1 + chunk - 1) + 1)

    def fits(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        chunk: int,
        promised: Mapping[int, int],
        growing: int,
    ) -> bool:
        """Whether a sequence can start that is *num_tokens* long, the prefix *keys* being cached.

        Set aside are the blocks that slots in *promised* (with their number of tokens) have still
        to take, and one for each of *growing* running sequences, within reason.
        """
        for group, pool in enumerate(self.pools):
            shared, idle = self._taken_by_hit(group, keys)
            wanted = self.most_live_blocks(group, num_tokens, chunk) - shared + idle
            for slot, tokens in promised.items():
                held = len(self._tables[group][slot]) - self._first_live[group][slot]
                wanted += max(0, self.most_live_blocks(group, tokens, chunk) - held)
            reserve = min(growing, pool.num_usable // MOST_RESERVED)
            if wanted + reserve > pool.num_free:
                return False
        return True

    def longest_sequence(self, limit: int, *, chunked: bool) -> int:
        """Return how many tokens, at most *limit*, a sequence can have that runs alone.

        A sliding group needs its window and a chunk. Chunks shrink to what is free, so any pool
        that holds a window and one more token takes sequences of any length; without chunking
        (*chunked* false) a prompt is computed at once and must fit as a whole.
        """
        longest = limit
        for group, pool in enumerate(self.pools):
            chunk = 1 if chunked else limit
            if self.most_live_blocks(group, limit, chunk) > pool.num_usable:
                longest = min(longest, pool.num_usable * self.block_size)
        return longest

    def room(self, slot: int) -> int:
        """Return the number of tokens that the table of *slot* could cover with all free blocks."""
        free = min(pool.num_free for pool in self.pools)
        return (len(self._tables[0][slot]) + free) * self.block_size

    def capacity(self, slot: int) -> int:
        """Return the number of tokens that the table of *slot* covers."""
        return len(self._tables[0][slot]) * self.block_size

    def min_free(self) -> int:
        """Return the number of blocks that can be allocated in every group."""
        return min(pool.num_free for pool in self.pools)

    def usage(self) -> float:
        """Return the fraction of blocks in use, 0..1, in the fullest group."""
        return max(pool.num_in_use / max(1, pool.num_usable) for pool in self.pools)

    @property
    def releases(self) -> int:
        """A number that grows whenever a block is given back."""
        return sum(pool.releases for pool in self.pools)

    # ------------------------------------------------------------------ a slot's tables

    def extend(self, slot: int, num_tokens: int) -> int:
        """Allocate blocks until the table of *slot* covers *num_tokens*; return its capacity.

        The caller has seen that there is room.
        """
        have = len(self._tables[0][slot])
        want = -(-num_tokens // self.block_size)
        if have >= want:
            return have * self.block_size
        for group, pool in enumerate(self.pools):
            blocks = pool.allocate_many(want - have)
            self._tables[group][slot] += blocks
            self.entries.add_run(group, slot, have, blocks)
        return want * self.block_size

    def extend_each(self, slots: list[int]) -> None:
        """Allocate one more block for each of *slots* in every group: steady decode's growth.

        The caller has seen that so many are free.
        """
        entries = self.entries
        for group, pool in enumerate(self.pools):
            tables = self._tables[group]
            blocks = pool.allocate_many(len(slots))
            for slot, block in zip(slots, blocks, strict=True):
                table = tables[slot]
                entries.indices.append(len(table))
                table.append(block)
            entries.groups.extend([group] * len(slots))
            entries.slots.extend(slots)
            entries.blocks.extend(blocks)

    def trim(self, slot: int, position: int) -> None:
        """Give back the blocks that no query at *position* or later can read."""
        for group in self._sliding:
            first_live = self._first_live[group]
            live = first_live_block(position, self.windows[group], self.block_size)
            if live <= first_live[slot]:
                continue
            pool, table = self.pools[group], self._tables[group][slot]
            for index in range(first_live[slot], live):
                pool.release(table[index])
                table[index] = NULL_BLOCK
                self.entries.add(group, slot, index, NULL_BLOCK)
            first_live[slot] = live

    def release(self, slot: int) -> None:
        """Give back all blocks of *slot*, the last first: a prefix is worth more than its tail.

        Entries of the slot not sent yet are void: its next holder writes the same places.
        """
        if slot in self.entries.slots:
            self.entries = self.entries.without(slot)
        for group, pool in enumerate(self.pools):
            table = self._tables[group][slot]
            for block in reversed(table):
                if block != NULL_BLOCK:
                    pool.release(block)
            table.clear()
            self._first_live[group][slot] = 0

    def take_entries(self) -> TableEntries:
        """Return the entries that changed since the last call."""
        entries, self.entries = self.entries, TableEntries()
        return entries

    # ------------------------------------------------------------------ sharing

    def find_hit(self, keys: Sequence[bytes]) -> int:
        """Return the most leading blocks of *keys* that every group can serve."""
        return longest_hit(keys, self.pools, self.windows, self.block_size)

    def adopt(self, slot: int, keys: Sequence[bytes], contents: Sequence[bytes] = ()) -> int:
        """Let the empty *slot* begin with the cached prefix *keys*; return its capacity.

        *contents*, if given, are the token ids of each block, compared with what is cached.
        """
        for group, pool in enumerate(self.pools):
            end = len(keys) * self.block_size
            live = first_live_block(end, self.windows[group], self.block_size)
            table = self._tables[group][slot]
            table.extend([NULL_BLOCK] * live)
            for index in range(live, len(keys)):
                block = self._found(group, keys[index])
                if contents and pool.contents(block) not in (None, contents[index]):
                    raise InvariantError("a prefix-cache key stands for two different texts")
                pool.share(block)
                table.append(block)
            self._first_live[group][slot] = live
            self._announce(group, slot)
        return len(keys) * self.block_size

    def can_fork(self, slot: int, position: int) -> bool:
        """Whether *slot* still holds all that a sequence starting at *position* reads."""
        return all(
            self._first_live[group][slot]
            <= first_live_block(position, self.windows[group], self.block_size)
            for group in self._sliding
        )

    def fork(self, parent: int, child: int, position: int) -> list[tuple[int, int, int]]:
        """Let the empty slot *child* share what *parent* holds of the tokens before *position*.

        Full blocks are shared. The block that *position* falls into becomes the child's own; what
        it holds before *position* is to be copied: returns (group, from block, to block) for each
        group, nothing when *position* begins a block. The caller has seen ``can_fork`` and one
        free block in each group.
        """
        copies = []
        last = position // self.block_size
        for group, pool in enumerate(self.pools):
            source = self._tables[group][parent]
            live = first_live_block(position, self.windows[group], self.block_size)
            table = self._tables[group][child]
            table.extend([NULL_BLOCK] * min(live, last))
            for block in source[live:last]:
                pool.share(block)
                table.append(block)
            table.append(pool.allocate())
            self._first_live[group][child] = live
            self._announce(group, child)
            if position % self.block_size:
                copies.append((group, source[last], table[last]))
        return copies

    def publish(self, slot: int, index: int, key: bytes, contents: bytes = b"") -> None:
        """Let *key* find the block at *index* of *slot*, in every group that still has it."""
        for group, pool in enumerate(self.pools):
            block = self._tables[group][slot][index]
            if block != NULL_BLOCK:
                pool.publish(block, key, contents)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Make *keys* find nothing in any group."""
        for pool in self.pools:
            for key in keys:
                pool.forget(key)

    def forget_all(self) -> int:
        """Make every prefix unknown in every group; return the blocks that could be found."""
        return sum(pool.forget_all() for pool in self.pools)

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Raise InvariantError unless pools and tables agree, block by block."""
        for group, pool in enumerate(self.pools):
            references: Counter[int] = Counter()
            for slot, table in enumerate(self._tables[group]):
                live = [block for block in table if block != NULL_BLOCK]
                references.update(live)
                first = self._first_live[group][slot]
                if len(table) != len(self._tables[0][slot]) or NULL_BLOCK in table[first:]:
                    raise InvariantError(f"the block table of slot {slot} has a hole: {table}")
                if any(table[:first]):
                    raise InvariantError(f"slot {slot} holds blocks behind its window: {table}")
            pool.check(references)

    def check_idle(self) -> None:
        """Raise InvariantError unless no block is in use."""
        for pool in self.pools:
            pool.check()
            if pool.num_in_use:
                raise InvariantError(f"{pool.num_in_use} KV blocks are in use by nobody")

    def _taken_by_hit(self, group: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """Return how many blocks of *group* the prefix *keys* stands for, and how many are idle.

        Idle ones count as free now and will not once the prefix is adopted.
        """
        pool = self.pools[group]
        live = first_live_block(len(keys) * self.block_size, self.windows[group], self.block_size)
        blocks = [self._found(group, key) for key in keys[live:]]
        return len(blocks), sum(pool.is_idle(block) for block in blocks)

    def _found(self, group: int, key: bytes) -> int:
        block = self.pools[group].find(key)
        if block is None:
            raise InvariantError("a block of a prefix hit is gone")
        return block

    def _announce(self, group: int, slot: int) -> None:
        for index, block in enumerate(self._tables[group][slot]):
            self.entries.add(group, slot, index, block)
