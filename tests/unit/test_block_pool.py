"""Promises of the block pool, the prefix hashes and the cache manager. No tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet.runtime.cache.block_pool import BlockPool
from pagefleet.runtime.cache.manager import CacheManager
from pagefleet.runtime.cache.prefix import block_hash, root_hash
from pagefleet.runtime.request import Request, Sequence
from pagefleet.runtime.sampling_params import SamplingParams


def a_sequence(tokens: list[int], number: int = 0, groups: int = 1, salt: str = "") -> Sequence:
    request = Request(f"r{number}", None, list(tokens), SamplingParams(), 16, salt)
    sequence = Sequence(request, 0, number, 0, list(tokens), tables=[[] for _ in range(groups)])
    request.sequences.append(sequence)
    return sequence


def compute(cache: CacheManager, sequence: Sequence) -> None:
    assert cache.reserve(sequence, sequence.remaining)
    cache.commit(sequence, sequence.remaining)


@given(st.lists(st.tuples(st.sampled_from("arhk"), st.integers(0, 7), st.integers(1, 4)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_counts_balance_after_any_operations(operations: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(8)
    held: list[int] = []
    for kind, which, count in operations:
        if kind == "a":
            before = pool.num_free
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > before)
            assert blocks is None or (len(set(blocks)) == count and not set(blocks) & set(held) and 0 not in blocks)
            held += blocks or []
        elif held and kind == "r":
            pool.release(held.pop(which % len(held)))
        elif held and kind == "h":
            block = held[which % len(held)]
            pool.register(block, bytes([block]), [block])
        elif kind == "k":
            hit = pool.lookup(bytes([which]), [which])
            if hit is not None:
                pool.acquire(hit)
                held.append(hit)
        pool.check()
        assert all(pool.references(b) == held.count(b) for b in range(8))
    for block in held:
        pool.release(block)
    pool.check()
    assert pool.num_free == pool.capacity


def test_a_block_released_twice_is_refused() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1) or []
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_a_freed_hashed_block_stays_hittable_until_reused_least_recently_used_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block in blocks:
        pool.register(block, bytes([block]), [block])
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    assert pool.allocate(1) == [blocks[1]]
    assert pool.lookup(bytes([blocks[1]]), [blocks[1]]) is None
    assert pool.lookup(bytes([blocks[0]]), [blocks[0]]) == blocks[0]


def test_a_forced_hash_collision_is_rejected_by_the_token_check() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1) or []
    pool.register(block, b"same", [1, 2, 3])
    assert pool.lookup(b"same", [1, 2, 4]) is None
    assert pool.lookup(b"same", [1, 2, 3]) == block


def test_prefix_hashes_are_the_same_in_another_process() -> None:
    ours = block_hash(root_hash(model="m", salt="s"), [1, 2, 2**40])
    script = (
        "from pagefleet.runtime.cache.prefix import *;"
        "print(block_hash(root_hash(salt='s', model='m'), [1, 2, 2**40]).hex())"
    )
    theirs = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert ours.hex() == theirs


def test_a_hit_is_capped_one_token_before_the_end_and_whole_blocks_only() -> None:
    cache = CacheManager([None], [16], block_size=4)
    first = a_sequence(list(range(8)))
    compute(cache, first)
    cache.free(first)
    assert cache.match(a_sequence(list(range(8)), 1)).num_tokens == 4
    assert cache.match(a_sequence(list(range(9)), 2)).num_tokens == 8
    assert cache.match(a_sequence([9, *range(1, 9)], 3)).num_tokens == 0


def test_another_salt_never_hits() -> None:
    cache = CacheManager([None], [16], block_size=4)
    compute(cache, a_sequence(list(range(9)), salt="a"))
    assert cache.match(a_sequence(list(range(9)), 1, salt="a")).num_tokens == 8
    assert cache.match(a_sequence(list(range(9)), 2, salt="b")).num_tokens == 0


def test_a_window_group_frees_blocks_behind_the_window_and_hits_on_what_the_window_sees() -> None:
    cache = CacheManager([None, 6], [32, 32], block_size=4)
    first = a_sequence(list(range(21)), groups=2)
    compute(cache, first)
    # the next query is at 21 and sees from 16 on: blocks 0 to 3 of the window group are gone
    assert first.tables[1][:4] == [0, 0, 0, 0]
    assert 0 not in first.tables[1][4:]
    assert 0 not in first.tables[0]
    hit = cache.match(a_sequence(list(range(21)), 1, groups=2))
    assert hit.num_tokens == 20
    assert [b != 0 for b in hit.tables[1]] == [False, False, False, True, True]


def test_a_fork_shares_full_blocks_and_copies_only_the_tail() -> None:
    cache = CacheManager([None], [16], block_size=4)
    parent, child = a_sequence(list(range(10))), a_sequence(list(range(10)), 1)
    compute(cache, parent)
    copies: list[list[tuple[int, int]]] = [[]]
    assert cache.fork(parent, child, copies)
    assert child.tables[0][:2] == parent.tables[0][:2]
    assert copies == [[(parent.tables[0][2], child.tables[0][2])]]
    assert cache.pools[0].references(parent.tables[0][0]) == 2
    cache.free(parent)
    cache.free(child)
    cache.check()
    assert cache.pools[0].num_used == 0


def test_rollback_leaves_the_tables_as_they_were() -> None:
    cache = CacheManager([None], [16], block_size=4)
    sequence = a_sequence(list(range(6)))
    compute(cache, sequence)
    before, used = [list(t) for t in sequence.tables], cache.pools[0].num_used
    sequence.token_ids += [7] * 9
    assert cache.reserve(sequence, 9)
    cache.rollback(sequence)
    assert (sequence.tables, cache.pools[0].num_used) == (before, used)
