"""Storing keys and values with the compiled kernels leaves the bytes that the reference leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagefleet.backends.base import BackendError, KVGroup, LayerKV
from pagefleet.backends.cpu.native_kv import NativePool, write_kv
from pagefleet.backends.pool import padded_block_bytes, with_views
from pagefleet.kernels import reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def poisoned_pool(dtype: str, block_size: int, layers: tuple[LayerKV, ...]) -> NativePool:
    group = KVGroup(layers, None, dtype, block_size)
    data = torch.full((9, padded_block_bytes(group, "cpu")), 255, dtype=torch.uint8)
    return NativePool.of(with_views(group, data))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("source", list(DTYPES))
@pytest.mark.parametrize(
    ("heads", "size", "value_size", "block_size"), [(3, 64, 64, 16), (2, 17, 5, 1), (1, 24, 40, 5)]
)
def test_native_write_kv_leaves_the_bytes_of_the_reference(
    native: Any, dtype: str, source: str, heads: int, size: int, value_size: int, block_size: int
) -> None:
    layers = (LayerKV(0, heads, size, value_size), LayerKV(1, heads, size, value_size))
    ours, theirs = (poisoned_pool(dtype, block_size, layers) for _ in range(2))
    slots = torch.randperm(8 * block_size)[:7] + block_size
    slots[3] = -1
    merged = torch.randn(7, heads * (size + value_size) + 3).to(DTYPES[source])  # rows as a merged projection has them
    merged[5] = 0
    key = merged[:, : heads * size].view(7, heads, size)
    value = merged[:, heads * size : heads * (size + value_size)].view(7, heads, value_size)
    reference.write_kv(
        key, value, theirs.keys[1], theirs.values[1], slots, theirs.key_scales.get(1), theirs.value_scales.get(1)
    )
    write_kv(native, ours.addresses[1], slots, key, value)
    assert torch.equal(ours.data, theirs.data)


def test_a_slot_past_the_pool_is_refused_before_anything_is_written(native: Any) -> None:
    pool = poisoned_pool("fp32", 4, (LayerKV(0, 1, 8, 8),))
    new = torch.randn(2, 1, 8)
    with pytest.raises(IndexError, match="slot 36 lies past the last block: the pool has 9 blocks of 4 tokens"):
        write_kv(native, pool.addresses[0], torch.tensor([5, 36]), new, new)
    assert bool((pool.data == 255).all())


def test_keys_and_values_of_different_dtypes_are_refused(native: Any) -> None:
    pool = poisoned_pool("fp32", 4, (LayerKV(0, 1, 8, 8),))
    new = torch.randn(1, 1, 8)
    with pytest.raises(BackendError, match="one float dtype"):
        write_kv(native, pool.addresses[0], torch.tensor([5]), new, new.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_rows_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 3, 33) * torch.logspace(-3, 3, 50)[:, None, None]).to(dtype)
    x[7] = 0
    q, scale = reference.quantize_int8(x)
    assert (q.dtype, scale.shape) == (torch.int8, (50, 3))
    assert bool(((q * scale[..., None] - x.float()).abs() <= 0.501 * scale[..., None]).all())
