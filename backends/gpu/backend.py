"""A GPU backend: the Triton kernels over one block pool a KV group, and the vendor's matrix library through torch."""

from __future__ import annotations

import logging

import torch

from pagefleet.kernels import reference
from pagefleet.kernels.triton import attention as attention_kernels
from pagefleet.kernels.triton import cache as cache_kernels
from pagefleet.kernels.triton.formats import padded

from ..base import (
    AttentionArgs,
    AttentionBatch,
    BackendError,
    BackendOptions,
    Capabilities,
    KVGroup,
    KVPool,
    MemoryInfo,
    out_of_memory_as_error,
)
from ..modules import SchemeOf, replace_linears
from ..pool import BlockPool, allocate_pool, padded_block_bytes
from .choice import Choice
from .device import GpuDevice, with_tiles
from .ops import GpuOps
from .plan import GpuPlan, number_of_splits, quantized_views

logger = logging.getLogger(__name__)
KV_DTYPES = ("bf16", "fp16", "fp32", "int8", "fp8_e4m3", "fp8_e5m2")
ATTENTION = ("auto", "triton", "torch")


class GpuBackend:
    """One process on one GPU."""

    def __init__(self, options: BackendOptions, gpu: GpuDevice) -> None:
        gpu = with_tiles(gpu, options.extra.get("tiles"))
        self.gpu, self.exact, self.device = gpu, options.exact, gpu.device
        arch = gpu.target.arch
        self._ops = GpuOps(self, arch, options.exact)
        self._attention = Choice("attention", arch, self._attention_ways(options.extra.get("attention") or "auto"))
        self._write = Choice(
            "write_kv", arch, [("Triton, quantizing as it writes", self._write_kernel), ("torch", self._write_torch)]
        )

    def _attention_ways(self, asked: str) -> list:
        """Ways to do attention, best first, and a line in the log for each that was looked at."""
        if asked not in ATTENTION:
            raise BackendError(f"backend.attention is '{asked}'; on GPUs expected one of {', '.join(ATTENTION)}")
        triton = ("Triton, paged", self._attention_kernel)
        plain = ("torch, one query at a time", self._attention_torch)
        if asked == "torch":
            logger.info("attention: plain torch was asked for; it is slow and made to be compared with")
            return [plain]
        logger.info("attention: Triton (%s); plain torch would follow if it did not compile", asked)
        return [triton, plain]

    def capabilities(self) -> Capabilities:
        """What it can do here."""
        linear = "torch (cuBLAS or hipBLASLt)"
        return Capabilities(
            name=self.gpu.backend,
            device=str(self.device),
            isa=self.gpu.target.arch,
            compute_dtypes=("bf16", "fp16", "fp32"),
            kv_dtypes=KV_DTYPES,
            kernels={
                "attention": self._attention.name,
                "write_kv": self._write.name,
                "copy_blocks": "Triton",
                "linear": f"{linear}, fixed row tiles" if self.exact else linear,
                "selection": "Triton",
                **self._ops.kernels,
            },
        )

    def memory(self) -> MemoryInfo:
        """Bytes of the card."""
        return self.gpu.memory()

    def block_bytes(self, group: KVGroup) -> int:
        """See `Backend.block_bytes`."""
        return padded_block_bytes(group, self.gpu.backend, KV_DTYPES)

    def allocate_pool(self, group: KVGroup, num_blocks: int) -> BlockPool:
        """A zeroed pool on the card. Raises OutOfMemory."""
        return allocate_pool(group, num_blocks, self.block_bytes(group), self.device, self.memory().free)

    def copy_blocks(self, pool: KVPool, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, every read before any write. Raises BackendError for a destination named twice."""
        with out_of_memory_as_error():
            try:
                cache_kernels.copy_blocks(pool.data, pairs)
            except ValueError as error:
                raise BackendError(str(error)) from error

    def prepare_model(self, model: torch.nn.Module, scheme_of: SchemeOf | None = None) -> None:
        """Quantise what `scheme_of` says; in exact mode every other product runs in fixed row tiles."""
        if self.exact or scheme_of is not None:
            replace_linears(model, self._ops, self.exact, scheme_of)

    def ops(self) -> GpuOps:
        """See `Backend.ops`."""
        return self._ops

    def plan(self, batch: AttentionBatch, pools: tuple[KVPool, ...]) -> GpuPlan:
        """Nothing is read back from the device: shapes tell a step of decodes from one with prompts.

        In exact mode every step is computed as decodes are, so that a row's bits do not depend on the kind of step.
        """
        tokens = batch.groups[0].slots.shape[0] if batch.groups else 0
        return GpuPlan(batch, pools, self.exact or tokens <= batch.kv_lengths.shape[0])  # type: ignore[arg-type]

    def write_kv(self, plan: GpuPlan, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys [T, Hkv, D] and values [T, Hkv, Dv] in the slots of the step."""
        self._write(plan.pools[group], layer, key, value, plan.batch.groups[group].slots)

    def _write_kernel(
        self, pool: BlockPool, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        caches = (pool.keys[layer], pool.values[layer])
        cache_kernels.write_kv(_dense(key), _dense(value), *caches, slots, quantized_views(pool, layer))

    def _write_torch(
        self, pool: BlockPool, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        scales = (pool.key_scales.get(layer), pool.value_scales.get(layer))
        reference.write_kv(key, value, pool.keys[layer], pool.values[layer], slots, *scales, kind=pool.group.dtype)

    def attention(
        self, plan: GpuPlan, group: int, layer: int, query: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """Causal attention of query [T, Hq, D]; returns [T, Hq, Dv]."""
        with out_of_memory_as_error():
            return self._attention(plan, group, layer, query, args)

    def _attention_kernel(
        self, plan: GpuPlan, group: int, layer: int, query: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        pool, batch = plan.pools[group], plan.batch
        keys, values, tables = pool.keys[layer], pool.values[layer], batch.groups[group].block_tables
        kv_heads, head_dim, value_dim = keys.shape[2], padded(keys.shape[3]), padded(values.shape[3])
        heads_a_group = query.shape[1] // kv_heads
        tiles = self.gpu.target.attention(heads_a_group, head_dim, value_dim, query.element_size(), plan.decode)
        splits = 1
        if plan.decode and not self.exact:
            most_tokens = tables.shape[1] * pool.group.block_size
            seen = most_tokens if args.window is None else min(most_tokens, args.window)
            splits = number_of_splits(tables.shape[0] * kv_heads, seen, tiles.tile, self.gpu.processors)
        return attention_kernels.paged_attention(
            _dense(query),
            keys,
            values,
            tables,
            batch.query_starts,
            batch.kv_lengths,
            scale=args.scale,
            tiles=tiles,
            splits=splits,
            window=args.window,
            softcap=args.softcap,
            sinks=args.sinks,
            quantized=quantized_views(pool, layer),
        )

    def _attention_torch(
        self, plan: GpuPlan, group: int, layer: int, query: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        pool, batch = plan.pools[group], plan.batch
        return reference.paged_attention(
            query,
            pool.keys[layer],
            pool.values[layer],
            batch.groups[group].block_tables,
            batch.query_starts,
            batch.kv_lengths,
            scale=args.scale,
            window=args.window,
            softcap=args.softcap,
            sinks=args.sinks,
            key_scales=pool.key_scales.get(layer),
            value_scales=pool.value_scales.get(layer),
            kind=pool.group.dtype,
        )

    def synchronize(self) -> None:
        """Wait for the card."""
        self.gpu.synchronize()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with the elements of a head side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()
