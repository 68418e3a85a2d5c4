"""Paged attention equals the float64 specification, wherever memory that must not be read is poisoned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagefleet.backends.base import AttentionArgs, AttentionBatch, BackendOptions, GroupTables, KVGroup, LayerKV
from pagefleet.backends.gpu.backend import GpuBackend
from pagefleet.backends.gpu.device import GpuDevice
from pagefleet.kernels import reference
from pagefleet.kernels.triton.attention import paged_attention
from pagefleet.kernels.triton.formats import QuantizedViews
from pagefleet.kernels.triton.targets import target_of

LENGTHS = [40, 1, 17, 0, 15, 9]
MIXED = [1, 1, 5, 0, 0, 9]  # decodes, a chunk behind a prefix, two sequences without queries, a whole prompt
DECODES = [1, 1, 1, 0, 2, 1]
SCALES = ("key_scales", "value_scales", "kind", "group_size")
SHAPES = [(2, 2, 16, 16), (6, 2, 17, 5), (9, 3, 64, 64), (34, 2, 24, 40)]  # query heads, KV heads, key and value size


def compare(
    cached, counts, starts_of, heads, *, block_m=None, splits=1, dtype=torch.float32, tolerance=2e-5, **options
):
    kv_heads, size = cached.keys.shape[2:]
    value_size = cached.values.shape[3]
    query = torch.randn(sum(counts), heads, size, generator=torch.Generator().manual_seed(2)).to(dtype)
    tiles = target_of("interpreter").attention(heads // kv_heads, size, value_size, 4, decode=block_m is None)
    tiles = tiles if block_m is None else replace(tiles, block_m=block_m, tile=32)
    places = (cached.tables, starts_of(counts), cached.lengths)
    got = paged_attention(
        query, cached.keys, cached.values, *places, scale=size**-0.5, tiles=tiles, splits=splits,
        quantized=cached.quantized, **options,
    )  # fmt: skip
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    expected = reference.paged_attention(
        query.double(), cached.exact_keys, cached.exact_values, *places, scale=size**-0.5, **exact
    )
    assert not got.isnan().any(), "memory was read that must not be"
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), SHAPES)
@pytest.mark.parametrize(("block_size", "block_m", "splits"), [(1, None, 1), (5, 64, 1), (16, None, 4)])
def test_prefill_decode_and_mixtures(
    make_cached, starts_of, heads, kv_heads, size, value_size, block_size, block_m, splits
):
    cached = make_cached(LENGTHS, kv_heads=kv_heads, size=size, value_size=value_size, block_size=block_size)
    compare(cached, MIXED if splits == 1 else DECODES, starts_of, heads, block_m=block_m, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 17},  # exactly the length of a sequence
        {"window": 1000, "softcap": 2.0},
        {"sinks": torch.tensor([-1.0, 0.0, 3.0, 0.5, -9.0, 1.0])},
        {"window": 8, "softcap": 1.5, "sinks": torch.linspace(-2, 2, 6)},
        {"alibi_slopes": torch.logspace(-3, 0, 6)},
    ],
    ids=lambda options: "-".join(options),
)
def test_windows_soft_caps_sinks_and_alibi(make_cached, starts_of, options, splits):
    cached = make_cached(LENGTHS, kv_heads=2, size=16, value_size=16, block_size=4)
    compare(cached, MIXED if splits == 1 else DECODES, starts_of, 6, splits=splits, **options)


@pytest.mark.parametrize(("held", "dtype"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_small_dtypes_stay_within_their_rounding(make_cached, starts_of, held, dtype):
    held, dtype = getattr(torch, held), getattr(torch, dtype)
    cached = make_cached(LENGTHS, kv_heads=2, size=64, value_size=64, block_size=16, dtype=held)
    tolerance = 2e-5 if dtype == torch.float32 else 1.5e-2
    compare(cached, MIXED, starts_of, 4, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize(("size", "value_size"), [(24, 40), (64, 64)])
def test_quantized_blocks_are_read_as_what_they_hold(make_cached, starts_of, kind, group_size, size, value_size):
    cached = make_cached(
        LENGTHS, kv_heads=2, size=size, value_size=value_size, block_size=5, kind=kind, group_size=group_size
    )
    compare(cached, DECODES, starts_of, 4)
    compare(cached, DECODES, starts_of, 4, dtype=torch.bfloat16, tolerance=1.5e-2)
    query, places = torch.randn(6, 4, size).double(), (cached.tables, starts_of(DECODES), cached.lengths)
    scales = (cached.quantized.key_scales, cached.quantized.value_scales, kind, group_size)
    from_codes = reference.paged_attention(
        query, cached.keys, cached.values, *places, scale=0.2, **dict(zip(SCALES, scales, strict=True))
    )
    exact = reference.paged_attention(query, cached.exact_keys, cached.exact_values, *places, scale=0.2)
    torch.testing.assert_close(from_codes, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv", ["fp32", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_plain_torch_reads_and_writes_what_the_kernels_do(starts_of, kv):
    """What a backend falls back to where a kernel does not compile."""
    gpu = GpuDevice("cuda", torch.device("cpu"), "none", target_of("interpreter"), 1)
    kernels, plain = (GpuBackend(BackendOptions(extra={"attention": way}), gpu) for way in ("triton", "torch"))
    group = KVGroup((LayerKV(0, 2, 16, 24),), None, kv, 4)
    key, value, query = torch.randn(9, 2, 16), torch.randn(9, 2, 24), torch.randn(9, 4, 16)
    tables = torch.tensor([[3, 1, 0], [2, 4, 0]], dtype=torch.int32)
    slots = torch.cat([tables[0, torch.arange(4) // 4] * 4 + torch.arange(4), tables[1, torch.arange(5) // 4] * 4])
    slots[5:8] += torch.arange(1, 4)
    batch = AttentionBatch(starts_of([4, 5]), torch.tensor([4, 5]).int(), (GroupTables(slots.long(), tables),))
    pools = [kernels.allocate_pool(group, 6) for _ in range(2)]
    kernels.write_kv(kernels.plan(batch, (pools[0],)), 0, 0, key, value)
    plain._write_torch(pools[1], 0, key, value, slots.long())
    assert torch.equal(pools[0].data, pools[1].data)
    args = AttentionArgs(0.25)
    outputs = [b.attention(b.plan(batch, (pools[0],)), 0, 0, query, args) for b in (kernels, plain)]
    torch.testing.assert_close(*outputs, rtol=2e-5, atol=2e-5)


def test_null_blocks_are_not_seen(make_cached, starts_of):
    cached = make_cached([20, 9], kv_heads=1, size=16, value_size=16, block_size=4)
    cached.tables[0, :3] = 0  # slid out of the window of 6
    compare(cached, [1, 9], starts_of, 2, window=6)
    cached.tables[:] = 0
    compare(cached, [3, 1], starts_of, 2, splits=2)  # a query that sees nothing gives zeros


def test_a_row_keeps_its_bits_whatever_is_beside_it(make_cached, starts_of):
    cached = make_cached([50, 33, 20], kv_heads=2, size=16, value_size=16, block_size=4)
    tiles = replace(target_of("interpreter").decode, tile=32)
    query = torch.randn(103, 6, 16, generator=torch.Generator().manual_seed(2))

    def run(rows, lengths, counts, sequences):
        places = (cached.tables[sequences], starts_of(counts), torch.tensor(lengths, dtype=torch.int32))
        return paged_attention(query[rows], cached.keys, cached.values, *places, scale=0.3, tiles=tiles)

    whole = run(slice(0, 103), [50, 33, 20], [50, 33, 20], [0, 1, 2])
    assert torch.equal(run(slice(49, 50), [50], [1], [0]), whole[49:50])
    assert torch.equal(run(slice(60, 70), [20], [10], [1]), whole[60:70])
    assert torch.equal(run([70, 85], [21, 3], [1, 1], [1, 2]), whole[[70, 85]])


def test_offsets_beyond_two_gib_reach_the_last_block(starts_of):
    """The pool is memory that was asked for and, but for its last block, never touched."""
    block_size, heads, size = 16, 2, 64
    blocks = (1 << 31) // (block_size * heads * size) + 3
    cache = torch.from_numpy(np.zeros((blocks, block_size, heads, size), dtype=np.int8))
    scales = torch.from_numpy(np.zeros((blocks, block_size, heads, 1), dtype=np.float32))
    last = blocks - 1
    assert last * cache.stride(0) > 2**31
    cache[last, :3] = torch.randint(-127, 127, (3, heads, size)).to(torch.int8)
    scales[last, :3] = 0.01
    query, places = torch.randn(1, 2, size), (torch.tensor([[last]]).int(), starts_of([1]), torch.tensor([3]).int())
    got = paged_attention(
        query, cache, cache, *places, scale=0.125, tiles=target_of("interpreter").decode,
        quantized=QuantizedViews("int8", scales, scales),
    )  # fmt: skip
    exact = torch.zeros(2, block_size, heads, size, dtype=torch.float64)
    exact[1, :3] = reference.dequantize(cache[last, :3], scales[last, :3])
    expected = reference.paged_attention(query.double(), exact, exact, torch.ones(1, 1).int(), *places[1:], scale=0.125)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_empty_step_is_an_empty_result(starts_of):
    cache = torch.zeros(2, 4, 1, 16)
    places = (torch.zeros(0, 1).int(), starts_of([]), torch.zeros(0).int())
    tiles = target_of("interpreter").decode
    assert paged_attention(torch.zeros(0, 2, 16), cache, cache, *places, scale=1.0, tiles=tiles).shape == (0, 2, 16)
