"""The specification against dense softmax attention in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from pagefleet.kernels.reference import copy_blocks, paged_attention, write_kv


def dense_attention(query, keys, values, start, *, scale, window, softcap, sinks):
    """One sequence, the textbook way: [n, Hq, D] over [L, Hkv, D], float64, a full mask."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,lhd->hnl", query, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at, token = torch.arange(start, start + len(query))[:, None], torch.arange(len(keys))[None]
    mask = token <= at
    if window is not None:
        mask &= at - token < window
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], -1)
        return torch.einsum("hnl,lhd->nhd", scores.softmax(-1)[..., :-1], values)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values)


def paged(keys, values, block_size, spare=3):
    """Spread sequences over a poisoned pool: everything they do not own is NaN, the null block too."""
    generator = torch.Generator().manual_seed(7)
    counts = [-(-len(k) // block_size) for k in keys]
    order = (torch.randperm(sum(counts) + spare, generator=generator) + 1)[: sum(counts)].tolist()
    total = sum(counts) + spare + 1
    key_cache = torch.full((total, block_size, *keys[0].shape[1:]), torch.nan, dtype=keys[0].dtype)
    value_cache = torch.full((total, block_size, *values[0].shape[1:]), torch.nan, dtype=values[0].dtype)
    tables = torch.zeros(len(keys), max(1, *counts), dtype=torch.int32)
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        own, order = order[: counts[s]], order[counts[s] :]
        tables[s, : len(own)] = torch.tensor(own, dtype=torch.int32)
        slots = torch.tensor([own[i // block_size] * block_size + i % block_size for i in range(len(k))]).long()
        write_kv(k, v, key_cache, value_cache, slots)
    return key_cache, value_cache, tables


SHAPES = [  # (query heads, KV heads, key size, value size)
    (1, 1, 16, 16),
    (6, 2, 7, 7),
    (8, 1, 8, 20),
    (3, 3, 5, 2),
]


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (4, None, False), (9, 1.5, True), (1, None, False), (None, 0.7, False), (None, None, True)],
)
def test_paged_equals_dense_softmax_whatever_lies_in_memory_it_must_not_read(
    heads, block_size, window, softcap, with_sinks
):
    num_heads, kv_heads, size, value_size = heads
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths, queries = [1, 9, 0, 17, 33, 16, 8], [1, 9, 0, 1, 5, 0, 8]  # 9 is also a window: exactly the length
    keys = [random(n, kv_heads, size) for n in lengths]
    values = [random(n, kv_heads, value_size) for n in lengths]
    query = random(sum(queries), num_heads, size)
    sinks = random(num_heads) if with_sinks else None
    key_cache, value_cache, tables = paged(keys, values, block_size)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    options = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": sinks}
    got = paged_attention(
        query, key_cache, value_cache, tables, starts, torch.tensor(lengths, dtype=torch.int32), **options
    )
    parts = query.split(queries)
    expected = [
        dense_attention(q, k, v, n - len(q), **options)
        for q, k, v, n in zip(parts, keys, values, lengths, strict=True)
        if len(q)
    ]
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_blocks_slid_out_of_the_window_may_be_null():
    keys, values = [torch.randn(20, 2, 4, dtype=torch.float64)], [torch.randn(20, 2, 4, dtype=torch.float64)]
    key_cache, value_cache, tables = paged(keys, values, 4)
    query, starts, lengths = torch.randn(1, 4, 4, dtype=torch.float64), torch.tensor([0, 1]), torch.tensor([20])
    whole = paged_attention(query, key_cache, value_cache, tables, starts, lengths, scale=1.0, window=6)
    tables[0, :3] = 0
    assert torch.equal(
        paged_attention(query, key_cache, value_cache, tables, starts, lengths, scale=1.0, window=6), whole
    )


def test_a_query_that_sees_nothing_gives_zeros():
    cache = torch.full((2, 4, 1, 8), torch.nan)
    out = paged_attention(
        torch.randn(2, 2, 8), cache, cache, torch.zeros(1, 1).int(), torch.tensor([0, 2]), torch.tensor([2]), scale=1.0
    )
    assert torch.equal(out, torch.zeros(2, 2, 8))


def test_an_empty_step_is_an_empty_result():
    cache = torch.zeros(2, 4, 1, 8)
    out = paged_attention(
        torch.randn(0, 2, 8), cache, cache, torch.zeros(0, 1).int(), torch.tensor([0]), torch.zeros(0).int(), scale=1.0
    )
    assert out.shape == (0, 2, 8)


def test_more_queries_than_tokens_is_refused():
    cache = torch.zeros(2, 4, 1, 8)
    with pytest.raises(ValueError, match="3 queries and only 2 tokens"):
        paged_attention(
            torch.randn(3, 1, 8),
            cache,
            cache,
            torch.ones(1, 1).int(),
            torch.tensor([0, 3]),
            torch.tensor([2]),
            scale=1.0,
        )


def test_write_kv_fills_its_slots_and_nothing_else():
    key_cache, value_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 6)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    write_kv(key, value, key_cache, value_cache, torch.tensor([4, 11, -1]))
    assert torch.equal(key_cache[1, 0], key[0])
    assert torch.equal(value_cache[2, 3], value[1])
    assert int((key_cache != 0).sum()) == 2 * 16
    with pytest.raises(IndexError):
        write_kv(key, value, key_cache, value_cache, torch.tensor([4, 12, 5]))


def test_copies_of_a_step_read_before_they_write():
    data = torch.arange(5, dtype=torch.uint8)[:, None].repeat(1, 128)
    copy_blocks(data, [(1, 2), (2, 3), (1, 4)])
    assert data[:, 0].tolist() == [0, 1, 1, 2, 1]
    copy_blocks(data, [])
    with pytest.raises(ValueError, match="named twice"):
        copy_blocks(data, [(1, 2), (3, 2)])
    with pytest.raises(ValueError, match="null block"):
        copy_blocks(data, [(1, 0)])
