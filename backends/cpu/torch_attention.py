"""Attention in plain torch: what the CPU backend runs where its compiled kernels are not."""

from __future__ import annotations

import torch

from ..base import AttentionArgs, AttentionBatch, KVPool
from ..pool import BlockPool
from .attention import Scratch, attention
from .exact_attention import exact_attention
from .plan import CpuPlan, make_plan


class TorchAttention:
    """Gathered blocks and torch's attention; in exact mode tiles of a fixed shape."""

    kv_dtypes = ("fp32", "bf16", "fp16")

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._scratch = Scratch()
        self.kernels = {"attention": "torch, fixed tiles" if exact else "torch, gathered blocks", "write_kv": "torch"}

    def pool(self, pool: BlockPool) -> BlockPool:
        """The pool as `plan` wants it."""
        return pool

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
        if self._exact:
            return exact_attention(plan, group, layer, query, args, self._scratch)
        pool, plan_of_group = plan.pools[group], plan.group(group, args.window)
        return attention(plan_of_group, pool.keys[layer], pool.values[layer], query, args, self._scratch)
