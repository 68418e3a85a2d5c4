"""Attention by the compiled kernels (kernels/cpu/csrc/attention.h): a step planned once, then a call for each layer."""

from __future__ import annotations

from typing import Any

import torch

from pagefleet.kernels.cpu import NativeKernels
from pagefleet.kernels.cpu.native import TYPES

from ..base import AttentionArgs, AttentionBatch, BackendError, KVPool
from ..pool import BlockPool
from .native_kv import NativePool, rows_of_heads, write_kv


class NativePlan:
    """One step: its tables as the kernels read them, and the work of each kind of layer, planned when asked for."""

    def __init__(self, native: NativeKernels, batch: AttentionBatch, pools: tuple[NativePool, ...]) -> None:
        self._native = native
        self.pools = pools
        self.slots = [tables.slots.long().contiguous() for tables in batch.groups]
        self._tables = [tables.block_tables.int().contiguous() for tables in batch.groups]
        self._query_starts = batch.query_starts.int().contiguous()
        self._kv_lengths = batch.kv_lengths.int().contiguous()
        self._plans: dict[tuple[int, int, int, int], Any] = {}
        check_step(self._query_starts, self._kv_lengths, self._tables, pools)

    def work(self, group: int, window: int | None, kv_heads: int, heads_per_group: int) -> Any:
        """The plan of layers of `group` with this window and these heads."""
        key = (group, window or 0, kv_heads, heads_per_group)
        if key not in self._plans:
            tables = self._tables[group]
            self._plans[key] = self._native.attention_plan(
                tables.data_ptr(),
                tables.shape[0],
                tables.shape[1],
                self._query_starts.data_ptr(),
                self._kv_lengths.data_ptr(),
                self.pools[group].group.block_size,
                window or 0,
                kv_heads,
                heads_per_group,
            )
        return self._plans[key]


def check_step(
    query_starts: torch.Tensor, kv_lengths: torch.Tensor, tables: list[torch.Tensor], pools: tuple[NativePool, ...]
) -> None:
    """Raises BackendError for a step that contradicts itself or the pools: the kernels would read what is not there."""
    queries = query_starts.diff()
    wrong = (queries < 0) | (queries > kv_lengths)
    if bool(wrong.any()):
        s = int(wrong.nonzero()[0])
        raise BackendError(f"sequence {s} has {int(queries[s])} queries and only {int(kv_lengths[s])} tokens")
    longest = int(kv_lengths.max()) if len(kv_lengths) else 0
    for group, (table, pool) in enumerate(zip(tables, pools, strict=True)):
        if table.shape[1] * pool.group.block_size < longest:
            raise BackendError(
                f"KV group {group}: block tables of {table.shape[1]} blocks of {pool.group.block_size} tokens are too"
                f" short for a sequence of {longest}"
            )
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < pool.num_blocks:
            raise BackendError(f"KV group {group}: a block table names a block outside 0..{pool.num_blocks - 1}")


class NativeAttention:
    """Paged attention in C++. A row's bits depend on its own sequence alone, so exact mode needs nothing else."""

    kv_dtypes = ("fp32", "bf16", "fp16", "int8")

    def __init__(self, native: NativeKernels, isa: str) -> None:
        self._native = native
        name = f"C++ {isa}"
        self.kernels = {"attention": f"{name}, fixed tiles, shared blocks read once", "write_kv": name}

    def pool(self, pool: BlockPool) -> NativePool:
        """The pool as `plan` wants it."""
        return NativePool.of(pool)

    def plan(self, batch: AttentionBatch, pools: tuple[KVPool, ...]) -> NativePlan:
        """See `Backend.plan`. Raises BackendError for a step that contradicts itself."""
        return NativePlan(self._native, batch, pools)  # type: ignore[arg-type]

    def write_kv(self, plan: NativePlan, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the slots of the step."""
        write_kv(self._native, plan.pools[group].addresses[layer], plan.slots[group], key, value)

    def attention(
        self, plan: NativePlan, group: int, layer: int, query: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D] over the cached tokens; returns [T, Hq, Dv].

        Raises:
            BackendError: a dtype or shape that the kernels cannot take.
            MemoryError: no room for the states of split sequences.
        """
        pool = plan.pools[group]
        kv_heads, size, value_size = pool.keys[layer].shape[2], pool.keys[layer].shape[3], pool.values[layer].shape[3]
        tokens, heads = query.shape[:2]
        if query.dtype not in TYPES or not query.is_floating_point():
            raise BackendError(f"attention takes queries in float32, bfloat16 or float16, not {query.dtype}")
        if heads % kv_heads or size != query.shape[2]:
            raise BackendError(
                f"layer {layer} keeps {kv_heads} KV heads of {size}: a query of shape {tuple(query.shape)} does not fit"
            )
        query = rows_of_heads(query)
        sinks = None if args.sinks is None else args.sinks.float().contiguous()
        out = query.new_empty(tokens, heads, value_size)
        self._native.attention(
            plan.work(group, args.window, kv_heads, heads // kv_heads),
            pool.addresses[layer],
            TYPES[query.dtype],
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            args.scale,
            args.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
        )
        return out
