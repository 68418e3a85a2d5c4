"""The CPU backend: compiled kernels where there are any, prepacked products, a fixed-tile exact mode."""

from __future__ import annotations

import logging
from typing import Any

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
from .native_attention import NativeAttention
from .native_ops import NativeOps
from .ops import CpuOps
from .torch_attention import TorchAttention

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
        native = native_kernels()
        self._ops = CpuOps(self, options.exact) if native is None else NativeOps(self, native, options.exact)
        self._attention: Any = TorchAttention(options.exact) if native is None else NativeAttention(native, host.isa())

    def capabilities(self) -> Capabilities:
        """What it can do here. bf16 comes first only where the processor multiplies it faster than fp32."""
        dtypes = ("bf16", "fp32", "fp16") if host.has_fast_bf16() else ("fp32", "bf16", "fp16")
        return Capabilities(
            name="cpu",
            device="cpu",
            isa=host.isa(),
            compute_dtypes=dtypes,
            packed_dtypes=self._ops.packed_dtypes,
            kv_dtypes=self._attention.kv_dtypes,
            schemes=SCHEMES,
            kernels={
                **self._attention.kernels,
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
        return padded_block_bytes(group, "cpu", self._attention.kv_dtypes)

    def allocate_pool(self, group: KVGroup, num_blocks: int) -> BlockPool:
        """A zeroed pool, whose pages are taken as blocks are first written. Raises OutOfMemory."""
        size, free = self.block_bytes(group), self.memory().free
        return self._attention.pool(allocate_pool(group, num_blocks, size, torch.device("cpu"), free))

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

    def plan(self, batch: AttentionBatch, pools: tuple[KVPool, ...]) -> Any:
        """Lay the step out. Raises BackendError for a step that contradicts itself."""
        return self._attention.plan(batch, pools)

    def write_kv(self, plan: Any, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the slots of the step."""
        self._attention.write_kv(plan, group, layer, key, value)

    def attention(self, plan: Any, group: int, layer: int, query: torch.Tensor, args: AttentionArgs) -> torch.Tensor:
        """Causal attention of query [T, Hq, D]; returns [T, Hq, Dv]."""
        with out_of_memory_as_error():
            return self._attention.attention(plan, group, layer, query, args)

    def synchronize(self) -> None:
        """Nothing runs ahead on a CPU."""
