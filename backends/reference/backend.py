"""The reference backend: the kernels of `kernels.reference`, called as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagefleet.kernels import reference

from .. import host
from ..base import (
    AttentionArgs,
    AttentionBatch,
    BackendOptions,
    Capabilities,
    KVGroup,
    KVPool,
    MemoryInfo,
)
from ..modules import SchemeOf, replace_linears
from ..pool import BlockPool, allocate_pool, copy_blocks, out_of_memory_as_error, padded_block_bytes
from ..schemes import SCHEMES
from ..torch_ops import TorchOps


@dataclass(frozen=True)
class ReferencePlan:
    """Nothing is worked out ahead: the step and its pools."""

    batch: AttentionBatch
    pools: tuple[BlockPool, ...]


class ReferenceBackend:
    """Slow and obvious; every query is computed alone, so its rows are exact by construction."""

    def __init__(self, options: BackendOptions) -> None:
        self.device = torch.device(options.extra.get("device", "cpu"))
        self.exact = options.exact
        self._ops = TorchOps(self, options.exact)
        if options.threads is not None:
            torch.set_num_threads(options.threads)

    def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities(
            name="reference",
            device=str(self.device),
            isa=host.isa() if self.device.type == "cpu" else str(self.device),
            compute_dtypes=("fp32", "bf16", "fp16"),
            kv_dtypes=("fp32", "bf16", "fp16", "int8"),
            schemes=SCHEMES,
            kernels={
                "attention": "torch, one query at a time",
                "write_kv": "torch",
                "copy_blocks": "torch",
                "linear": "torch, fixed row tiles" if self.exact else "torch",
            },
        )

    def memory(self) -> MemoryInfo:
        """Bytes of the device."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return MemoryInfo(total, free)
        return MemoryInfo(host.memory_limit_bytes(), host.available_memory_bytes())

    def block_bytes(self, group: KVGroup) -> int:
        """See `Backend.block_bytes`."""
        return padded_block_bytes(group, "reference")

    def allocate_pool(self, group: KVGroup, num_blocks: int) -> KVPool:
        """A zeroed pool. Raises OutOfMemory."""
        return allocate_pool(group, num_blocks, self.block_bytes(group), self.device, self.memory().free)

    def copy_blocks(self, pool: KVPool, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, every read before any write."""
        copy_blocks(pool, pairs)

    def prepare_model(self, model: torch.nn.Module, scheme_of: SchemeOf | None = None) -> None:
        """Quantise what `scheme_of` says; in exact mode every other product runs in fixed row tiles."""
        replace_linears(model, self._ops, self.exact, scheme_of)

    def ops(self) -> TorchOps:
        """See `Backend.ops`."""
        return self._ops

    def plan(self, batch: AttentionBatch, pools: tuple[KVPool, ...]) -> ReferencePlan:
        """Keep the step for `attention`."""
        return ReferencePlan(batch, pools)  # type: ignore[arg-type]

    def write_kv(self, plan: ReferencePlan, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the slots of the step."""
        pool = plan.pools[group]
        reference.write_kv(
            key,
            value,
            pool.keys[layer],
            pool.values[layer],
            plan.batch.groups[group].slots,
            pool.key_scales.get(layer),
            pool.value_scales.get(layer),
        )

    def attention(
        self, plan: ReferencePlan, group: int, layer: int, query: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D]; returns [T, Hq, Dv]."""
        pool = plan.pools[group]
        with out_of_memory_as_error():
            return reference.paged_attention(
                query,
                pool.keys[layer],
                pool.values[layer],
                plan.batch.groups[group].block_tables,
                plan.batch.query_starts,
                plan.batch.kv_lengths,
                scale=args.scale,
                window=args.window,
                softcap=args.softcap,
                sinks=args.sinks,
                key_scales=pool.key_scales.get(layer),
                value_scales=pool.value_scales.get(layer),
            )

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
