"""The CPU backend: gathered blocks and torch's attention, prepacked products, a fixed-tile exact mode."""

from __future__ import annotations

import logging

import torch

from pagefleet.kernels.cpu import NativeKernels, load_native, why_not_native

from ..base import (
    AttentionArgs,
    AttentionBatch,
    BackendError,
    BackendOptions,
    Capabilities,
    KVGroup,
    KVPool,
    MemoryInfo,
)
from ..modules import SchemeOf, replace_linears
from ..pool import BlockPool, allocate_pool, copy_blocks, out_of_memory_as_error, padded_block_bytes
from ..schemes import SCHEMES
from . import host
from .attention import Scratch, attention
from .exact_attention import exact_attention
from .native_ops import NativeOps
from .ops import CpuOps
from .plan import CpuPlan, make_plan

logger = logging.getLogger(__name__)
_reasons_told: set[str] = set()


def native_kernels() -> NativeKernels | None:
    """The compiled kernels for this processor; without them a reason is logged, once, and plain torch does the work."""
    isa = host.isa()
    native = load_native(isa)
    if native is None and (reason := str(why_not_native(isa))) not in _reasons_told:
        _reasons_told.add(reason)
        logger.warning("plain torch does the work of the CPU kernels: %s", reason)
    return native


class CpuBackend:
    """One process on the cores it may use."""

    def __init__(self, options: BackendOptions) -> None:
        usable = host.usable_threads()
        threads = options.threads if options.threads is not None else usable
        if threads < 1:
            raise BackendError(f"backend.threads must be at least 1, not {threads}; leave it unset for {usable}")
        torch.set_num_threads(threads)
        self.exact = options.exact
        self._scratch = Scratch()
        native = native_kernels()
        self._ops = CpuOps(self, options.exact) if native is None else NativeOps(self, native, options.exact)

    def capabilities(self) -> Capabilities:
        """What it can do here. bf16 comes first only where the processor multiplies it faster than fp32."""
        dtypes = ("bf16", "fp32", "fp16") if host.has_fast_bf16() else ("fp32", "bf16", "fp16")
        return Capabilities(
            name="cpu",
            device="cpu",
            isa=host.isa(),
            compute_dtypes=dtypes,
            packed_dtypes=self._ops.packed_dtypes,
            kv_dtypes=("fp32", "bf16", "fp16"),
            schemes=SCHEMES,
            kernels={
                "attention": "torch, fixed tiles" if self.exact else "torch, gathered blocks",
                "write_kv": "torch",
                "copy_blocks": "torch",
                **self._ops.kernels,
            },
        )

    def memory(self) -> MemoryInfo:
        """Bytes of the cgroup or the host, whichever is less; what the allocator keeps unused counts as free."""
        host.return_unused_memory()
        return MemoryInfo(host.memory_limit_bytes(), host.available_memory_bytes())

    def block_bytes(self, group: KVGroup) -> int:
        """See `Backend.block_bytes`."""
        return padded_block_bytes(group, "cpu", self.capabilities().kv_dtypes)

    def allocate_pool(self, group: KVGroup, num_blocks: int) -> BlockPool:
        """A zeroed pool, whose pages are taken as blocks are first written. Raises OutOfMemory."""
        return allocate_pool(group, num_blocks, self.block_bytes(group), torch.device("cpu"), self.memory().free)

    def copy_blocks(self, pool: KVPool, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, every read before any write. Raises BackendError for a destination named twice."""
        copy_blocks(pool, pairs)

    def prepare_model(self, model: torch.nn.Module, scheme_of: SchemeOf | None = None) -> None:
        """Pack linear layers in place; in exact mode no product lets a row see another."""
        with out_of_memory_as_error():
            packed = replace_linears(model, self._ops, self.exact, scheme_of)
        logger.info("packed %d linear layers", packed)

    def ops(self) -> CpuOps:
        """See `Backend.ops`."""
        return self._ops

    def plan(self, batch: AttentionBatch, pools: tuple[KVPool, ...]) -> CpuPlan:
        """Lay the step out; what depends on a group's window is worked out once, when a layer first asks."""
        return make_plan(batch, pools)  # type: ignore[arg-type]

    def write_kv(self, plan: CpuPlan, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the slots of the step."""
        pool, (blocks, offsets, keep) = plan.pools[group], plan.write_slots[group]
        for cache, new in ((pool.keys[layer], key), (pool.values[layer], value)):
            cache[blocks, offsets] = (new if keep is None else new[keep]).to(cache.dtype)

    def attention(
        self, plan: CpuPlan, group: int, layer: int, query: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D]; returns [T, Hq, Dv]."""
        with out_of_memory_as_error():
            if self.exact:
                return exact_attention(plan, group, layer, query, args, self._scratch)
            pool = plan.pools[group]
            plan_of_group = plan.group(group, args.window)
            return attention(plan_of_group, pool.keys[layer], pool.values[layer], query, args, self._scratch)

    def synchronize(self) -> None:
        """Nothing runs ahead on a CPU."""
