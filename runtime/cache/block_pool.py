"""BlockPool: every block of one KV group on one device; reference counts and an LRU free list. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks-1 are handed out; block 0 is the null block and belongs to nobody.

    The free list is an intrusive doubly linked list over block numbers, least recently used first, so that a block
    leaves its middle in O(1) when a prefix hit takes it back. A freed block that holds hashed tokens stays hittable
    until it is reused; one that holds nothing worth keeping is reused first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: expected at least 2 (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._tokens: list[tuple[int, ...]] = [()] * num_blocks
        self._by_hash: dict[bytes, list[int]] = {}
        # Block 0 is also the list's sentinel: next[0] is the first to be reused, previous[0] the last.
        self._next = [(b + 1) % num_blocks for b in range(num_blocks)]
        self._previous = [(b - 1) % num_blocks for b in range(num_blocks)]
        self._num_free = num_blocks - 1

    @property
    def capacity(self) -> int:
        """Blocks that sequences can own."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, hashed ones included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks that some sequence refers to."""
        return self.capacity - self._num_free

    def references(self, block: int) -> int:
        """How many tables refer to `block`."""
        return self._references[block]

    def is_hashed(self, block: int) -> bool:
        """True if `block` can be found by a prefix lookup."""
        return self._hash[block] is not None

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, least recently used first, or None if there are too few (then nothing changes)."""
        if count > self._num_free:
            return None
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to a block that is in use or was found by `lookup`."""
        if self._references[block] == 0:
            self._unlink(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less. Release a sequence's blocks tail first: its head is the likeliest to be hit again."""
        count = self._references[block]
        if block == NULL_BLOCK or count <= 0:
            raise AssertionError(f"block {block} was released more often than it was taken")
        self._references[block] = count - 1
        if count == 1:
            if self._hash[block] is None:
                self._link(NULL_BLOCK, block)
            else:
                self._link(self._previous[NULL_BLOCK], block)

    def register(self, block: int, prefix_hash: bytes, tokens: Sequence[int]) -> None:
        """Make a full block findable by its prefix hash. A block that already has a hash keeps it."""
        if self._hash[block] is None:
            self._hash[block] = prefix_hash
            self._tokens[block] = tuple(tokens)
            self._by_hash.setdefault(prefix_hash, []).append(block)

    def lookup(self, prefix_hash: bytes, tokens: Sequence[int]) -> int | None:
        """A block with this hash and exactly these tokens, or None. The token check makes a hash collision harmless."""
        for block in self._by_hash.get(prefix_hash, ()):
            if self._tokens[block] == tuple(tokens):
                return block
        return None

    def forget_all(self) -> None:
        """Drop every hash, so that nothing is hit any more."""
        for block in range(1, self.num_blocks):
            self._forget(block)

    def check(self) -> None:
        """Integrity check for when the engine is idle and for tests; AssertionError tells what is broken."""
        free: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            assert self._previous[self._next[block]] == block, f"free list is torn at block {block}"
            assert len(free) <= self.num_blocks, "free list has a cycle"
            free.append(block)
            block = self._next[block]
        assert len(free) == self._num_free, f"free list holds {len(free)} blocks, the counter says {self._num_free}"
        unreferenced = {b for b in range(1, self.num_blocks) if self._references[b] == 0}
        assert set(free) == unreferenced, "free list and reference counts disagree"
        hashed = {b for blocks in self._by_hash.values() for b in blocks}
        assert hashed == {b for b in range(self.num_blocks) if self._hash[b] is not None}, "hash map is stale"

    def _forget(self, block: int) -> None:
        prefix_hash = self._hash[block]
        if prefix_hash is None:
            return
        blocks = self._by_hash[prefix_hash]
        blocks.remove(block)
        if not blocks:
            del self._by_hash[prefix_hash]
        self._hash[block] = None
        self._tokens[block] = ()

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._num_free -= 1

    def _link(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block
        self._num_free += 1
