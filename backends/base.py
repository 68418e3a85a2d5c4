"""The whole contract between the runtime and a device.

A backend is one folder under `backends/` whose package exposes `create(options) -> Backend` and
`probe() -> Availability`. The runtime reads `Capabilities` and never asks which backend it has.

Shapes use these letters: T tokens of the step (all sequences one after another, no padding), S sequences of the
step, Hq query heads, Hkv KV heads, D head size, B blocks of the longest block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .modules import SchemeOf
    from .ops import Ops


class BackendError(Exception):
    """A backend is unknown or unavailable, or a step failed in it."""


class OutOfMemory(BackendError):
    """The device could not hold what a step needed; the step is rolled back and the degrade plan asked."""


# What torch's allocators, numpy, C++ and the vendors' matrix libraries say when there is no memory left.
_ALLOCATION_FAILURES = (
    "out of memory",
    "can't allocate memory",
    "DefaultCPUAllocator",
    "Unable to allocate",
    "bad_alloc",
    "STATUS_ALLOC_FAILED",
)


@contextmanager
def out_of_memory_as_error() -> Iterator[None]:
    """Turn allocation failures of torch, numpy and C++ into `OutOfMemory`; everything else passes unchanged."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(text in str(error) for text in _ALLOCATION_FAILURES):
            raise OutOfMemory(f"the device could not hold what the step needed: {error}") from error
        raise


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here, and why (not)."""

    available: bool
    reason: str
    score: int = 0  # `auto` takes the highest available score


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; frozen, read before anything is constructed."""

    name: str
    device: str  # a torch device string, where weights and step tensors live
    isa: str  # for a CPU its instruction set, for a GPU its architecture
    compute_dtypes: tuple[str, ...]  # "fp32", "bf16", "fp16"; the first is the preferred one
    kv_dtypes: tuple[str, ...]
    kernels: dict[str, str]  # op -> implementation that really runs
    schemes: tuple[str, ...] = ()  # of linear layers with fewer bits, see backends/schemes.py
    graphs: bool = False
    exact: bool = True  # can give bit-identical rows whatever runs beside them
    packed_dtypes: tuple[str, ...] = ()  # compute dtypes whose linear weights get a layout of the backend's own


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of the device (for a CPU: of the cgroup or the host, whichever is less)."""

    total: int
    free: int


@dataclass(frozen=True)
class LayerKV:
    """What one attention layer keeps for each token."""

    layer: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table because they keep the same tokens.

    `window` is the number of tokens a query sees, itself included; None for full attention.
    """

    layers: tuple[LayerKV, ...]
    window: int | None
    dtype: str
    block_size: int

    def block_bytes(self, element_bytes: int) -> int:
        """Unpadded bytes of one block, keys and values of all layers; scales of a quantised dtype come on top."""
        per_token = sum(x.num_kv_heads * (x.head_dim + x.value_head_dim) for x in self.layers)
        return per_token * element_bytes * self.block_size


@dataclass(frozen=True)
class GroupTables:
    """Where the tokens of a step live in one KV group.

    slots: int64 [T], `block * block_size + offset` of each new token.
    block_tables: int32 [S, B]; entries past a sequence's blocks, and those slid out of a window, are 0 (the null
        block).
    """

    slots: torch.Tensor
    block_tables: torch.Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """The step as attention sees it, shared by all layers.

    query_starts: int32 [S + 1]; sequence s owns tokens query_starts[s]:query_starts[s + 1].
    kv_lengths: int32 [S]; tokens of the sequence after this step (cached + new).
    The query at row i of sequence s has position kv_lengths[s] - num_queries[s] + i and sees keys up to its position.
    """

    query_starts: torch.Tensor
    kv_lengths: torch.Tensor
    groups: tuple[GroupTables, ...]


@dataclass(frozen=True)
class AttentionArgs:
    """Per-layer attention settings. `window` counts the query's own token; `sinks` is [Hq] or None."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class BackendOptions:
    """What the configuration may ask of a backend."""

    threads: int | None = None
    exact: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


class KVPool(Protocol):
    """All blocks of one KV group on one device: `data` is uint8 [num_blocks, block_bytes]."""

    group: KVGroup
    data: torch.Tensor

    @property
    def num_blocks(self) -> int: ...


class Backend(Protocol):
    """Everything that knows a device."""

    def capabilities(self) -> Capabilities: ...

    def memory(self) -> MemoryInfo: ...

    def block_bytes(self, group: KVGroup) -> int:
        """Bytes of one block with this backend's inner layout (a multiple of 128). Raises
        BackendError for a dtype or head size it cannot keep."""
        ...

    def allocate_pool(self, group: KVGroup, num_blocks: int) -> KVPool: ...

    def copy_blocks(self, pool: KVPool, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), all in one call."""
        ...

    def prepare_model(self, model: torch.nn.Module, scheme_of: SchemeOf | None = None) -> None:
        """Called once after the weights are loaded: repack or replace linear layers in place.

        `scheme_of(module)` names the scheme of a linear layer, None for its weight's dtype.
        """
        ...

    def ops(self) -> Ops:
        """The operations of a lowered decoder; the same object every time."""
        ...

    def plan(self, batch: AttentionBatch, pools: tuple[KVPool, ...]) -> Any:
        """Work shared by all layers of the step; the result is handed to every `attention` call of the step."""
        ...

    def write_kv(self, plan: Any, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store new keys [T, Hkv, D] and values [T, Hkv, Dv] of `layer` in the slots of the step.

        All of them, before `attention` reads any: a block table may hold blocks that another sequence of the same
        step fills.
        """
        ...

    def attention(self, plan: Any, group: int, layer: int, query: torch.Tensor, args: AttentionArgs) -> torch.Tensor:
        """Causal attention of query [T, Hq, D] over the cached tokens; returns [T, Hq, Dv]."""
        ...

    def synchronize(self) -> None: ...
