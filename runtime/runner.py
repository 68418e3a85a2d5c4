"""Runner: Batch -> hidden states -> logits, with one model on one backend."""

from __future__ import annotations

from typing import Protocol

import torch

from pagefleet.backends.base import Backend, KVGroup, KVPool
from pagefleet.runtime.batch import Batch


class Model(Protocol):
    """What the runner needs of a model, however it is run."""

    vocab_size: int
    max_len: int
    eos_token_ids: frozenset[int]

    def kv_groups(self, block_size: int, kv_dtype: str) -> tuple[KVGroup, ...]: ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: object) -> torch.Tensor:
        """Hidden states [T, H] of flat tokens [T]; KV goes through the backend with `plan`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [L, V] of hidden states [L, H], in whatever float dtype they come: no wider one makes them better."""
        ...


class Runner:
    """Owns the KV pools and runs forward passes over them."""

    def __init__(self, model: Model, backend: Backend, groups: tuple[KVGroup, ...], num_blocks: list[int]) -> None:
        self.model = model
        self.backend = backend
        self.pools: tuple[KVPool, ...] = tuple(
            backend.allocate_pool(group, n) for group, n in zip(groups, num_blocks, strict=True)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, H] of the step; writes the step's KV."""
        with torch.inference_mode():
            plan = self.backend.plan(batch.attention, self.pools)
            return self.model.forward(batch.token_ids, batch.positions, plan)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [L, V] of chosen rows int64 [L] of `hidden`."""
        with torch.inference_mode():
            return self.model.logits(hidden[rows])

    def copy_blocks(self, copies: list[list[tuple[int, int]]]) -> None:
        """Run the block copies (source, destination) of each KV group."""
        for pool, pairs in zip(self.pools, copies, strict=True):
            if pairs:
                self.backend.copy_blocks(pool, pairs)
