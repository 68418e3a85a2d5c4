"""Tests of the Triton kernels in Triton's interpreter, on CPU tensors.

Triton decides when it is imported whether it interprets, so they need a process of their own:
`tests/kernels/test_triton.py` starts one; by hand it is `TRITON_INTERPRET=1 pytest tests/interpreted`. The interpreter
runs one program of the grid after another, about a millisecond for every few operations, so shapes here are small.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from pagefleet.kernels import reference
from pagefleet.kernels.triton import interpreted, unavailable

if unavailable() or not interpreted():
    collect_ignore_glob = ["test_*.py"]


@dataclass
class Cached:
    """Sequences in a poisoned paged cache. The caches are what a kernel reads; `exact_*` hold the same in float64."""

    keys: torch.Tensor
    values: torch.Tensor
    exact_keys: torch.Tensor
    exact_values: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    quantized: object = None


def block_tables(lengths, block_size, spare=3, seed=7):
    """(tables [S, B], slots of every token of every sequence, number of blocks), blocks in random order from 1."""
    counts = [-(-n // block_size) for n in lengths]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)) + 1
    tables = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    slots = []
    for s, own in enumerate(order[: sum(counts)].split(counts)):
        tables[s, : counts[s]] = own
        at = torch.arange(lengths[s])
        slots.append(own[at // block_size] * block_size + at % block_size)
    return tables, torch.cat(slots), total + 1


@pytest.fixture
def make_cached():
    """make_cached(lengths, ...): random sequences, cached; everything that they do not own is NaN (or 8-bit junk)."""

    def make(lengths, *, kv_heads, size, value_size, block_size, dtype=torch.float32, kind=None, group_size=None):
        from pagefleet.kernels.triton.formats import QuantizedViews

        generator = torch.Generator().manual_seed(1)
        tables, slots, blocks = block_tables(lengths, block_size)
        lengths_tensor = torch.tensor(lengths, dtype=torch.int32)
        caches, exact, scales = [], [], []
        for width in (size, value_size):
            new = torch.randn(len(slots), kv_heads, width, generator=generator)
            shape = (blocks, kv_heads, block_size, width)  # head after head: strides that are not in order
            held = torch.full(shape, torch.nan, dtype=torch.float64).transpose(1, 2)
            place = (slots // block_size, slots % block_size)
            if kind is None:
                cache = torch.full(shape, torch.nan, dtype=dtype).transpose(1, 2)
                cache[place] = new.to(dtype)
                held[place] = cache[place].double()
            else:
                codes, new_scales = reference.quantize(new, kind, group_size)
                stored = torch.int8 if kind == "int8" else torch.uint8
                cache = torch.full(shape, 127, dtype=stored).transpose(1, 2)
                cache[place] = codes.view(stored)
                held[place] = reference.dequantize(codes, new_scales, group_size)
                scale = torch.full((blocks, kv_heads, block_size, new_scales.shape[-1]), torch.nan).transpose(1, 2)
                scale[place] = new_scales
                scales.append(scale)
            caches.append(cache)
            exact.append(held)
        quantized = QuantizedViews(kind, *scales, group_size) if kind else None
        return Cached(*caches, *exact, tables, lengths_tensor, quantized)

    return make


@pytest.fixture
def starts_of():
    """starts_of(counts): int32 [S + 1] query starts."""
    return lambda counts: torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
