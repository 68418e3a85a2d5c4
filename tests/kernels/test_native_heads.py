"""From a merged projection to queries and the cache: compiled, it equals its twin on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagefleet.backends import registry
from pagefleet.backends.base import AttentionBatch, BackendOptions, GroupTables, KVGroup, LayerKV
from pagefleet.backends.cpu.native_ops import NativeOps
from pagefleet.backends.ops import Heads, Norm, Rotary
from pagefleet.backends.pool import BlockPool
from pagefleet.backends.torch_ops import TorchOps

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYER, BLOCK_SIZE, BLOCKS = 3, 4, 8


class Recorder:
    """A backend that keeps what it is told to store."""

    def write_kv(self, plan: Any, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value = key, value


class Step:
    """A step of some tokens on the CPU backend, with a pool full of NaN."""

    def __init__(self, native: Any, heads: Heads, kv_dtype: str, tokens: int) -> None:
        self.backend = registry.create("cpu", BackendOptions(threads=torch.get_num_threads()))
        self.ops, self.heads = NativeOps(self.backend, native), heads
        other = LayerKV(7, 2, 3, 3)
        layer = LayerKV(LAYER, heads.num_kv_heads, heads.head_dim, heads.value_head_dim)
        self.pool: BlockPool = self.backend.allocate_pool(  # type: ignore[assignment]
            KVGroup((other, layer), None, kv_dtype, BLOCK_SIZE), BLOCKS
        )
        self.pool.data.fill_(255)  # NaN in every float dtype, -1 in int8
        self.slots = torch.randperm((BLOCKS - 1) * BLOCK_SIZE)[:tokens] + BLOCK_SIZE
        self.slots[tokens // 2] = -1
        tables = GroupTables(self.slots, torch.zeros(1, BLOCKS, dtype=torch.int32))
        starts, lengths = torch.tensor([0, tokens]), torch.tensor([tokens])
        batch = AttentionBatch(starts.int(), lengths.int(), (tables,))
        self.plan = self.backend.plan(batch, (self.pool,))

    def run(self, qkv: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        return self.ops.query_and_store(self.plan, 0, LAYER, qkv, self.heads, rotary)

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in float64 of the tokens that have a slot."""
        slots = self.slots[self.slots >= 0]
        at, pool = (slots // BLOCK_SIZE, slots % BLOCK_SIZE), self.pool
        key, value = pool.keys[LAYER][at].double(), pool.values[LAYER][at].double()
        if pool.group.dtype == "int8":
            key = key * pool.key_scales[LAYER][at][..., None].double()
            value = value * pool.value_scales[LAYER][at][..., None].double()
        return key, value


def make_qkv(heads: Heads, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """A random merged projection with NaN around each row."""
    width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim + heads.num_kv_heads * heads.value_head_dim
    view = torch.full((tokens + 2, width + 3), torch.nan, dtype=dtype)[1:-1, 2 : width + 2]
    return view.copy_(torch.randn(tokens, width) * 2)


def make_rotary(tokens: int, half: int, interleaved: bool = False) -> Rotary:
    angles = torch.randn(tokens, half) * 5
    return Rotary(angles.cos(), angles.sin(), interleaved)


def make_norm(n: int, kind: str = "rms") -> Norm:
    return Norm(kind, torch.randn(n) + 1, torch.randn(n) if kind == "layer" else None, 1e-5)


def in_double(heads: Heads) -> Heads:
    def wide(norm: Norm | None) -> Norm | None:
        if norm is None:
            return None
        return Norm(norm.kind, *(None if x is None else x.double() for x in (norm.weight, norm.bias)), norm.eps)

    return replace(
        heads, query_norm=wide(heads.query_norm), key_norm=wide(heads.key_norm), value_norm=wide(heads.value_norm)
    )


def expected(qkv: torch.Tensor, heads: Heads, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    recorder = Recorder()
    query = TorchOps(recorder).query_and_store(None, 0, LAYER, qkv.double(), in_double(heads), rotary)  # type: ignore[arg-type]
    return query, recorder.key, recorder.value


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, atol=16 * max(step, 2**-23), rtol=2 * step)


PLAIN = Heads(6, 2, 16, 16)
CASES: dict[str, tuple[Heads, int, bool]] = {  # heads, pairs to rotate, interleaved
    "as they are": (PLAIN, 0, False),
    "halves": (PLAIN, 8, False),
    "interleaved": (PLAIN, 8, True),
    "part of a head": (Heads(3, 1, 20, 20), 5, False),
    "odd sizes": (Heads(5, 5, 22, 7), 11, False),
    "values wider than keys": (Heads(2, 1, 6, 40), 3, True),
    "heads normalised": (Heads(4, 2, 18, 18, make_norm(18), make_norm(18)), 9, False),
    "layer norms": (Heads(4, 2, 18, 18, make_norm(18, "layer"), make_norm(18, "layer")), 9, False),
    "all heads in one norm": (Heads(4, 2, 18, 18, make_norm(72), make_norm(36), norm_all_heads=True), 9, False),
    "normalised after": (Heads(4, 2, 18, 18, make_norm(18), make_norm(18), norm_after_rotary=True), 9, True),
    "values normalised": (Heads(4, 2, 18, 18, make_norm(18), make_norm(18), Norm("rms", None, None, 1e-6)), 9, False),
}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", list(CASES))
def test_queries_keys_and_values(native: Any, case: str, dtype: str) -> None:
    heads, half, interleaved = CASES[case]
    tokens = 5
    step = Step(native, heads, dtype, tokens)
    qkv, rotary = make_qkv(heads, tokens, DTYPES[dtype]), make_rotary(tokens, half, interleaved) if half else None
    before = step.pool.data.clone()
    query, (want_query, *want) = step.run(qkv, rotary), expected(qkv, heads, rotary)
    assert query.dtype == qkv.dtype
    close(query, want_query, qkv.dtype)
    for got, wanted in zip(step.stored(), want, strict=True):
        close(got, wanted[step.slots >= 0], qkv.dtype)
    written = (step.pool.data != before).any(1).nonzero().flatten().tolist()
    assert set(written) <= {int(s) // BLOCK_SIZE for s in step.slots if s >= 0}
    assert step.pool.keys[7].isnan().all()


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_cache_may_have_another_dtype(native: Any, dtype: str, kv_dtype: str) -> None:
    heads = CASES["heads normalised"][0]
    step = Step(native, heads, kv_dtype, 6)
    qkv, rotary = make_qkv(heads, 6, DTYPES[dtype]), make_rotary(6, 9)
    step.run(qkv, rotary)
    for got, want in zip(step.stored(), expected(qkv, heads, rotary)[1:], strict=True):
        want = want[step.slots >= 0]
        if kv_dtype == "int8":  # within half a step of the scale
            assert ((got - want).abs() <= want.abs().amax(-1, keepdim=True) / 127 * 0.501).all()
        else:
            close(got, want, DTYPES[kv_dtype])


def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it_or_on_threads(native: Any) -> None:
    heads, tokens = Heads(16, 4, 64, 64, make_norm(64), make_norm(64)), 24
    qkv, rotary, threads = make_qkv(heads, tokens, torch.bfloat16), make_rotary(tokens, 32), torch.get_num_threads()
    one, alone = Step(native, heads, "bf16", 1), []
    one.slots.fill_(BLOCK_SIZE)
    one.plan.slots[0].fill_(BLOCK_SIZE)
    for i in range(tokens):
        query = one.run(qkv[i : i + 1], Rotary(rotary.cos[i : i + 1], rotary.sin[i : i + 1]))
        alone.append([query, *one.stored()])
    step = Step(native, heads, "bf16", tokens)
    kept = step.slots >= 0
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            query = step.run(qkv, rotary)
            assert torch.equal(query, torch.cat([x[0] for x in alone]))
            for got, which in zip(step.stored(), (1, 2), strict=True):
                assert torch.equal(got, torch.cat([x[which] for x in alone]).double()[kept])
    finally:
        torch.set_num_threads(threads)


def test_what_does_not_fit_together_is_refused(native: Any) -> None:
    step = Step(native, PLAIN, "fp32", 3)
    qkv = make_qkv(PLAIN, 3, torch.float32)
    with pytest.raises(ValueError, match="qkv has 159 columns; its heads make 160"):
        step.run(qkv[:, :-1], None)
    with pytest.raises(ValueError, match="2 tokens, but 3 slots"):
        step.run(qkv[:2], None)
    with pytest.raises(ValueError, match="3 slots and 2 angles"):
        step.run(qkv, make_rotary(2, 8))
    with pytest.raises(ValueError, match="18 dimensions to rotate, of heads of 16"):
        step.run(qkv, make_rotary(3, 9))
    step.heads = replace(PLAIN, query_norm=make_norm(17))
    with pytest.raises(ValueError, match="a norm of 17 elements cannot be of rows of 16"):
        step.run(qkv, None)
    step.heads = Heads(6, 1, 16, 32)
    with pytest.raises(ValueError, match="the layer caches 2 heads of 16 and 16, not 1 of 16 and 32"):
        step.run(qkv, None)
    step.slots[0] = BLOCKS * BLOCK_SIZE
    step.plan.slots[0][0] = BLOCKS * BLOCK_SIZE
    step.heads = PLAIN
    with pytest.raises(IndexError, match="past the last block"):
        step.run(qkv, None)
