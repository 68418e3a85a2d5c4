"""KV writes, with and without quantizing, and block moves: equal to the specification, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagefleet.kernels import reference
from pagefleet.kernels.triton.cache import copy_blocks, move_blocks, write_kv
from pagefleet.kernels.triton.formats import QuantizedViews

SLOTS = torch.tensor([5, -1, 14, 4, 0, 20])


def caches(kv_heads, size, value_size, block_size, dtype, fill):
    shapes = [(8, kv_heads, block_size, width) for width in (size, value_size)]
    return [torch.full(shape, fill, dtype=dtype).transpose(1, 2) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "size", "value_size", "block_size"), [(1, 16, 16, 4), (9, 24, 7, 3)])
def test_new_tokens_fill_their_slots_and_nothing_else(dtype, kv_heads, size, value_size, block_size):
    key, value = torch.randn(6, kv_heads, size + 3)[..., :size], torch.randn(6, kv_heads, value_size)
    got, expected = (caches(kv_heads, size, value_size, block_size, dtype, -7.0) for _ in range(2))
    write_kv(key, value, *got, SLOTS)
    reference.write_kv(key, value, *expected, SLOTS)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_writes_the_specifications_codes_and_scales_to_the_bit(kind, group_size, dtype):
    kv_heads, size, value_size, block_size = 3, 20, 32, 4
    spread = torch.logspace(-6, 6, kv_heads)[None, :, None]
    key, value = (torch.randn(6, kv_heads, n).mul(spread).to(dtype) for n in (size, value_size))
    key[2] = 0.0
    stored = torch.int8 if kind == "int8" else torch.uint8
    got = caches(kv_heads, size, value_size, block_size, stored, 99)
    groups = [-(-n // (group_size or n)) for n in (size, value_size)]
    scales = [torch.full((8, block_size, kv_heads, n), -7.0) for n in groups]
    expected, expected_scales = [x.clone() for x in got], [x.clone() for x in scales]
    write_kv(key, value, *got, SLOTS, QuantizedViews(kind, *scales, group_size))
    reference.write_kv(key, value, *expected, SLOTS, *expected_scales, kind, group_size)
    for x, y in zip(got + scales, expected + expected_scales, strict=True):
        assert torch.equal(x, y)
    assert (expected[0] == 99).any()
    assert not (expected[0] == 99).all()


def test_slots_beyond_two_gib_are_written_where_they_are():
    """The pool is memory that was asked for and, but for its last block, never touched."""
    block_size, heads, size = 16, 2, 64
    blocks = (1 << 31) // (block_size * heads * size) + 3
    cache = torch.from_numpy(np.zeros((blocks, block_size, heads, size), dtype=np.int8))
    scales = torch.from_numpy(np.zeros((blocks, block_size, heads, 1), dtype=np.float32))
    key, last = torch.randn(1, heads, size), blocks - 1
    assert last * cache.stride(0) > 2**31
    write_kv(key, key, cache, cache, torch.tensor([last * block_size + 3]), QuantizedViews("int8", scales, scales))
    codes, expected_scales = reference.quantize(key, "int8")
    assert torch.equal(cache[last, 3], codes[0])
    assert torch.equal(scales[last, 3], expected_scales[0])
    assert not cache[last, :3].any()


def test_every_8_bit_float_is_reached_and_rounds_to_even():
    """A ramp through all codes and the points halfway between them, against torch's own conversion."""
    for kind, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        largest = reference.quantized.LARGEST[kind]
        codes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
        codes = codes[codes <= largest].unique()
        between = (codes[1:] + codes[:-1]) / 2
        ramp = torch.cat([codes, between, between * (1 + 1e-6), between * (1 - 1e-6)])
        x = torch.cat([torch.tensor([largest]), ramp]).repeat(1, 2, 1)  # the scale of both heads becomes 1
        x[:, 1, 1:] *= -1
        got = [torch.zeros(1, 1, 2, x.shape[-1], dtype=torch.uint8) for _ in range(2)]
        scales = torch.zeros(1, 1, 2, 1)
        write_kv(x, x, *got, torch.zeros(1, dtype=torch.int64), QuantizedViews(kind, scales, scales.clone()))
        assert torch.equal(got[0][0], x.to(dtype).view(torch.uint8))


def test_copies_of_a_step_read_before_they_write():
    data, expected = (torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 20000) for _ in range(2))
    for pairs in ([(1, 2), (2, 3), (1, 5)], [(4, 6), (4, 7)], []):
        copy_blocks(data, pairs)
        reference.copy_blocks(expected, pairs)
        assert torch.equal(data, expected)
    with pytest.raises(ValueError, match="named twice"):
        copy_blocks(data, [(1, 2), (3, 2)])
    with pytest.raises(ValueError, match="null block"):
        copy_blocks(data, [(1, 0)])


def test_gathered_blocks_scatter_back_to_where_they_were():
    data = torch.randint(0, 256, (9, 20000), dtype=torch.uint8)
    rows = torch.tensor([7, 2, 4])
    staging, other = torch.empty(3, 20000, dtype=torch.uint8), torch.zeros_like(data)
    move_blocks(data, staging, sources=rows)
    assert torch.equal(staging, data[rows])
    expected = other.clone()
    for source, places in (
        (staging, {"destinations": rows}),
        (staging, {}),
        (data, {"sources": rows, "destinations": torch.tensor([8, 0, 3])}),
    ):
        move_blocks(source, other, **places)
        reference.move_blocks(source, expected, **places)
        assert torch.equal(other, expected)
