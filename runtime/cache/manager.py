"""CacheManager: gives sequences their blocks, finds shared prefixes, forks, and frees. Knows no device.

Blocks are only ever appended to a sequence's tables between `reserve` and `commit`, so a failed step is undone by
`rollback`, which drops what was appended.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pagefleet.runtime.cache.block_pool import NULL_BLOCK, BlockPool
from pagefleet.runtime.cache.prefix import extend_hashes, root_hash
from pagefleet.runtime.memory_plan import blocks_for, largest, most_blocks
from pagefleet.runtime.request import Sequence, block_table

Copies = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Hit:
    """A cached prefix of a sequence: its length in tokens and, per KV group, the table that holds it."""

    num_tokens: int
    tables: list[list[int]]


class CacheManager:
    """Block tables of all sequences over one BlockPool per KV group.

    Args:
        windows: per KV group, how many tokens a query sees (itself included); None for full attention.
        num_blocks: per KV group, blocks of its pool, the null block included.
        block_size: tokens per block, the same for all groups.
        identity: what makes KV differ for the same tokens; part of every prefix hash.
    """

    def __init__(
        self,
        windows: list[int | None],
        num_blocks: list[int],
        block_size: int,
        prefix_caching: bool = True,
        identity: str = "",
    ) -> None:
        self.windows = windows
        self.pools = [BlockPool(n) for n in num_blocks]
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._identity = identity
        self._roots: dict[str, bytes] = {}
        self._in_step: list[dict[bytes, tuple[int, list[int]]]] = [{} for _ in num_blocks]  # hash -> block, its tokens
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.reservations = 0
        self.failed_reservations = 0

    # -- sizes ---------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one group."""
        return blocks_for(num_tokens, self.block_size)

    def most_blocks(self, group: int, num_tokens: int, chunk: int) -> int:
        """Blocks that a lone sequence of `num_tokens` needs at its worst moment, computed `chunk` tokens at a time."""
        return most_blocks(num_tokens, self.windows[group], self.block_size, chunk)

    def can_ever_hold(self, num_tokens: int, chunk: int) -> bool:
        """True if a sequence of `num_tokens` fits when it is alone."""
        return all(self.most_blocks(g, num_tokens, chunk) <= pool.capacity for g, pool in enumerate(self.pools))

    def max_tokens(self, limit: int, chunk: int) -> int:
        """The longest sequence, at most `limit` tokens, that fits when it is alone."""
        return largest(limit, lambda length: self.can_ever_hold(length, chunk))

    def fits(self, sequence: Sequence, hit: Hit, growth_tokens: int, chunk: int) -> bool:
        """True if all of a waiting sequence's tokens fit now beside `growth_tokens` kept free for what runs."""
        for group, pool in enumerate(self.pools):
            revived = sum(1 for b in hit.tables[group] if b != NULL_BLOCK and pool.references(b) == 0)
            owned = sum(1 for b in hit.tables[group] if b != NULL_BLOCK)
            needed = max(self.most_blocks(group, sequence.num_tokens, chunk) - owned, 0)
            if self.windows[group] is None:
                needed += self.blocks_for(growth_tokens)
            if needed + revived > pool.num_free:
                return False
        return True

    # -- prefix cache --------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Hit:
        """The longest prefix, at most num_tokens - 1, that every group has or that the step will have filled.

        Takes nothing yet.
        """
        empty = Hit(0, [[] for _ in self.pools])
        if not self.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return empty
        self._hash(sequence, sequence.num_tokens)
        length = (sequence.num_tokens - 1) // self.block_size
        while length > 0:
            # Every group may shorten the hit; repeat until all agree.
            agreed = length
            tables = []
            for group in range(len(self.pools)):
                agreed, table = self._match_group(group, sequence, agreed)
                tables.append(table)
            if agreed == length:
                return Hit(length * self.block_size, tables)
            length = agreed
        return empty

    def attach(self, sequence: Sequence, hit: Hit) -> None:
        """Give a sequence without blocks the prefix that `match` found."""
        for pool, table in zip(self.pools, hit.tables, strict=True):
            for block in table:
                if block != NULL_BLOCK:
                    pool.acquire(block)
        sequence.tables = [block_table(table) for table in hit.tables]
        sequence.num_computed = hit.num_tokens
        sequence.num_cached = max(sequence.num_cached, min(hit.num_tokens, sequence.num_prompt))

    # -- a step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A new step is planned: what the last one announced is either committed or gone."""
        for announced in self._in_step:
            announced.clear()

    def announce(self, sequence: Sequence, num_new: int) -> None:
        """The step will fill prompt blocks of a sequence: others that join the step may already share them.

        In every layer the keys and values of all tokens of a step are written before any of them is attended to.
        """
        if not self.prefix_caching or num_new <= 1:
            return
        first = sequence.num_computed // self.block_size
        end = min(sequence.num_computed + num_new, sequence.num_prompt)
        self._hash(sequence, end)
        for index in range(first, end // self.block_size):
            tokens = self._block_tokens(sequence, index)
            for announced, table in zip(self._in_step, sequence.tables, strict=True):
                announced.setdefault(sequence.hashes[index], (table[index], tokens))

    def reserve(self, sequence: Sequence, num_new: int) -> bool:
        """Append the blocks that the next `num_new` tokens need, in every group or in none."""
        self.reservations += 1
        wanted = self.blocks_for(sequence.num_computed + num_new)
        if all(len(table) >= wanted for table in sequence.tables):
            return True
        taken: list[list[int]] = []
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            blocks = pool.allocate(max(wanted - len(table), 0))
            if blocks is None:
                self.failed_reservations += 1
                for other, got in zip(self.pools, taken, strict=False):
                    for block in reversed(got):
                        other.release(block)
                return False
            taken.append(blocks)
        for table, blocks in zip(sequence.tables, taken, strict=True):
            table.extend(blocks)
        return True

    def room(self, sequence: Sequence) -> int:
        """How many next tokens of a sequence could be reserved now."""
        return min(
            (len(table) + pool.num_free) * self.block_size - sequence.num_computed
            for pool, table in zip(self.pools, sequence.tables, strict=True)
        )

    def rollback(self, sequence: Sequence) -> None:
        """Drop the blocks that were reserved beyond the computed tokens."""
        kept = self.blocks_for(sequence.num_computed)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            while len(table) > kept:
                pool.release(table.pop())

    def commit(self, sequence: Sequence, num_new: int) -> None:
        """The KV of `num_new` more tokens is in the cache: hash new full blocks, free those behind the windows."""
        first = sequence.num_computed // self.block_size
        sequence.num_computed += num_new
        full = sequence.num_computed // self.block_size
        if self.prefix_caching and full > first:
            self._hash(sequence, sequence.num_computed)
            for index in range(first, full):
                tokens = self._block_tokens(sequence, index)
                for pool, table in zip(self.pools, sequence.tables, strict=True):
                    if table[index] != NULL_BLOCK:
                        pool.register(table[index], sequence.hashes[index], tokens)
        for group, window in enumerate(self.windows):
            if window is not None:
                self._slide(group, sequence, window)

    def fork(self, parent: Sequence, child: Sequence, copies: Copies) -> bool:
        """Share the parent's full blocks with `child` and give it a copy of the partial tail.

        Appends (source, destination) per group to `copies`; the caller runs them before the next forward. Returns
        False, and takes nothing, if a tail block is missing.
        """
        full = parent.num_computed // self.block_size
        has_tail = parent.num_computed % self.block_size != 0
        tails: list[int] = []
        if has_tail:
            for pool in self.pools:
                tail = pool.allocate(1)
                if tail is None:
                    for other, got in zip(self.pools, tails, strict=False):
                        other.release(got)
                    return False
                tails.append(tail[0])
        child.tables = []
        for group, (pool, table) in enumerate(zip(self.pools, parent.tables, strict=True)):
            for block in table[:full]:
                if block != NULL_BLOCK:
                    pool.acquire(block)
            child.tables.append(table[:full])
            if has_tail:
                child.tables[group].append(tails[group])
                copies[group].append((table[full], tails[group]))
        child.num_computed = parent.num_computed
        child.num_cached = parent.num_cached
        child.hashes = parent.hashes[:full]
        return True

    def free(self, sequence: Sequence) -> None:
        """Give back every block, tail first; hashed ones stay hittable until reused."""
        for pool, table in zip(self.pools, sequence.tables, strict=False):
            for block in reversed(table):
                if block != NULL_BLOCK:
                    pool.release(block)
        sequence.tables = self.no_blocks()
        sequence.num_computed = 0

    # -- measures ------------------------------------------------------------------------------------------------

    def utilization(self) -> float:
        """Share of all blocks that sequences refer to."""
        return sum(p.num_used for p in self.pools) / max(sum(p.capacity for p in self.pools), 1)

    def no_blocks(self) -> list[array[int]]:
        """The tables of a sequence without blocks, one per KV group."""
        return [block_table() for _ in self.pools]

    def check(self) -> None:
        """AssertionError if any pool is inconsistent."""
        for pool in self.pools:
            pool.check()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _hash(self, sequence: Sequence, num_tokens: int) -> None:
        salt = sequence.request.salt
        root = self._roots.get(salt)
        if root is None:
            root = root_hash(identity=self._identity, block_size=self.block_size, salt=salt)
            if len(self._roots) < 1024:
                self._roots[salt] = root
        extend_hashes(sequence.hashes, root, sequence.token_ids, self.block_size, num_tokens)

    def _block_tokens(self, sequence: Sequence, index: int) -> list[int]:
        return sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _match_group(self, group: int, sequence: Sequence, length: int) -> tuple[int, list[int]]:
        """Longest hit of at most `length` blocks in one group, with its table."""
        if self.windows[group] is None:
            table: list[int] = []
            for index in range(length):
                block = self._lookup(group, sequence, index)
                if block is None:
                    break
                table.append(block)
            return len(table), table
        return self._match_window(group, sequence, length)

    def _match_window(self, group: int, sequence: Sequence, length: int) -> tuple[int, list[int]]:
        """Right to left: the last blocks that cover `window - 1` tokens suffice; what is before them is masked."""
        window = self.windows[group]
        assert window is not None
        needed = self.blocks_for(window - 1)
        end = length
        run: list[int] = []
        index = length - 1
        while index >= 0 and len(run) < min(needed, end):
            block = self._lookup(group, sequence, index)
            if block is None:
                end, run = index, []
            else:
                run.append(block)
            index -= 1
        return end, [NULL_BLOCK] * (end - len(run)) + run[::-1]

    def _lookup(self, group: int, sequence: Sequence, index: int) -> int | None:
        tokens = self._block_tokens(sequence, index)
        block = self.pools[group].lookup(sequence.hashes[index], tokens)
        if block is None:
            announced, filled_with = self._in_step[group].get(sequence.hashes[index], (None, None))
            block = announced if filled_with == tokens else None
        return block

    def _slide(self, group: int, sequence: Sequence, window: int) -> None:
        """Free blocks that no later query can see: all their positions are <= num_computed - window."""
        gone = max(sequence.num_computed - window + 1, 0) // self.block_size
        table, pool = sequence.tables[group], self.pools[group]
        for index in range(min(gone, len(table)) - 1, -1, -1):
            if table[index] == NULL_BLOCK:
                break
            pool.release(table[index])
            table[index] = NULL_BLOCK
