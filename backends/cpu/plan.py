"""The step, laid out for attention once and shared by all layers: which blocks to gather, what each query may see.

A step has two kinds of work. Sequences with one new token (decode) are put in buckets of like length and computed
together; a sequence with more (prefill) is computed alone. Both first gather the blocks they need, so that keys and
values lie in one run of memory, and hide what no query may see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..base import AttentionBatch, BackendError, GroupTables
from ..pool import BlockPool

BUCKET_BYTES = 8 << 20  # keys and values gathered at once: stays in the last-level cache
BUCKET_WASTE = 0.75  # the shortest sequence of a bucket has at least this share of the longest's blocks


@dataclass(frozen=True)
class Gather:
    """Blocks to bring together for C sequences, L = blocks * block_size tokens each.

    blocks: int64 [C * blocks]; hidden: int64, the rows of [C * L] that no query sees (their memory may hold anything);
    positions: int64 [C, L]; visible: bool [C, L], the token is cached and in no null block.
    """

    blocks: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True)
class Decode:
    """C sequences with one query each: tokens int64 [C] are their rows in the step; blind: bool [C], sees nothing."""

    tokens: torch.Tensor
    gather: Gather
    blind: torch.Tensor | None
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor:
        """[C, 1, L], 0 where visible and the dtype's lowest number elsewhere."""
        if dtype not in self.masks:
            mask = torch.zeros(self.gather.visible.shape, dtype=dtype)
            lowest = torch.finfo(dtype).min
            self.masks[dtype] = mask.masked_fill_(~self.gather.visible, lowest)[:, None, :]
        return self.masks[dtype]


@dataclass(frozen=True)
class Prefill:
    """One sequence with queries at rows first:last of the step; the first query is at position `start`.

    causal: every query sees exactly the tokens up to its own, from position 0.
    """

    first: int
    last: int
    start: int
    gather: Gather
    causal: bool


@dataclass(frozen=True)
class GroupPlan:
    """What one KV group has to do in a step for one window."""

    decodes: list[Decode]
    prefills: list[Prefill]


@dataclass
class CpuPlan:
    """The step as the CPU backend sees it. Group plans are made when a layer first asks for them."""

    batch: AttentionBatch
    pools: tuple[BlockPool, ...]
    starts: list[int]
    lengths: list[int]
    write_slots: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    groups: dict[tuple[int, int | None], GroupPlan] = field(default_factory=dict)
    exact_jobs: dict[tuple[int, int | None, int], list] = field(default_factory=dict)

    def group(self, group: int, window: int | None) -> GroupPlan:
        """The plan of `group` for layers with this window."""
        key = (group, window)
        if key not in self.groups:
            tables, pool = self.batch.groups[group], self.pools[group]
            self.groups[key] = plan_group(tables, pool, self.starts, self.lengths, window)
        return self.groups[key]


def make_plan(batch: AttentionBatch, pools: tuple[BlockPool, ...]) -> CpuPlan:
    """Check the step and find where its tokens are stored. Raises BackendError for a step that contradicts itself."""
    starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
    for s, length in enumerate(lengths):
        if not 0 <= starts[s + 1] - starts[s] <= length:
            raise BackendError(f"sequence {s} has {starts[s + 1] - starts[s]} queries and only {length} tokens")
    write_slots = []
    for tables, pool in zip(batch.groups, pools, strict=True):
        slots, keep = tables.slots, None
        if bool((slots < 0).any()):
            keep = (slots >= 0).nonzero().squeeze(1)
            slots = slots[keep]
        block_size = pool.group.block_size
        write_slots.append((slots // block_size, slots % block_size, keep))
    return CpuPlan(batch, pools, starts, lengths, write_slots)


def plan_group(
    tables: GroupTables, pool: BlockPool, starts: list[int], lengths: list[int], window: int | None
) -> GroupPlan:
    """Sort the sequences of a step into decode buckets and prefills."""
    block_size, block_tables = pool.group.block_size, tables.block_tables.long()
    decodes: list[tuple[int, int]] = []  # (blocks to read, sequence)
    prefills = []
    for s, length in enumerate(lengths):
        queries = starts[s + 1] - starts[s]
        if queries == 1:
            oldest = 0 if window is None else max(0, length - window)
            decodes.append(((length - 1) // block_size - oldest // block_size + 1, s))
        elif queries > 1:
            prefills.append(_plan_prefill(s, starts, length, block_tables, block_size, window))
    element_bytes = pool.keys[pool.group.layers[0].layer].element_size()
    widest = max(x.num_kv_heads * (x.head_dim + x.value_head_dim) for x in pool.group.layers)
    buckets = _buckets(sorted(decodes), max(1, BUCKET_BYTES // (widest * element_bytes * block_size)))
    return GroupPlan([_plan_decode(x, starts, lengths, block_tables, block_size, window) for x in buckets], prefills)


def _buckets(decodes: list[tuple[int, int]], most_blocks: int) -> list[list[tuple[int, int]]]:
    """Cut sequences, shortest first, into buckets that waste little padding and fit the cache."""
    buckets: list[list[tuple[int, int]]] = []
    for blocks, sequence in decodes:
        bucket = buckets[-1] if buckets else []
        if bucket and bucket[0][0] >= BUCKET_WASTE * blocks and (len(bucket) + 1) * blocks <= most_blocks:
            bucket.append((blocks, sequence))
        else:
            buckets.append([(blocks, sequence)])
    return buckets


def _plan_decode(
    bucket: list[tuple[int, int]],
    starts: list[int],
    lengths: list[int],
    block_tables: torch.Tensor,
    block_size: int,
    window: int | None,
) -> Decode:
    sequences = torch.tensor([s for _, s in bucket])
    ends = torch.tensor([lengths[s] for _, s in bucket])
    oldest = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    gather = gather_blocks(block_tables[sequences], oldest, ends, bucket[-1][0], block_size)
    blind = ~gather.visible.any(1)
    tokens = torch.tensor([starts[s] for _, s in bucket])
    return Decode(tokens, gather, blind if bool(blind.any()) else None)


def _plan_prefill(
    s: int, starts: list[int], length: int, block_tables: torch.Tensor, block_size: int, window: int | None
) -> Prefill:
    first, last = starts[s], starts[s + 1]
    start = length - (last - first)
    oldest = 0 if window is None else max(0, start - window + 1)
    blocks = (length - 1) // block_size - oldest // block_size + 1
    gather = gather_blocks(block_tables[s : s + 1], torch.tensor([oldest]), torch.tensor([length]), blocks, block_size)
    whole = bool(gather.visible[0, : length - oldest].all()) if oldest == 0 else False
    causal = start == 0 and whole and (window is None or window >= length)
    return Prefill(first, last, start, gather, causal)


def gather_blocks(
    block_tables: torch.Tensor, oldest: torch.Tensor, ends: torch.Tensor, blocks: int, block_size: int
) -> Gather:
    """Blocks that hold positions oldest:ends of C sequences, `blocks` each (short ones are padded with block 0)."""
    first_block = oldest // block_size
    columns = first_block[:, None] + torch.arange(blocks)
    inside = columns < block_tables.shape[1]
    numbers = torch.where(inside, block_tables.gather(1, columns.clamp(max=block_tables.shape[1] - 1)), 0)
    numbers = torch.where(columns * block_size < ends[:, None], numbers, 0)
    positions = first_block[:, None] * block_size + torch.arange(blocks * block_size)
    real = (numbers != 0).repeat_interleave(block_size, 1)
    visible = real & (positions < ends[:, None]) & (positions >= oldest[:, None])
    hidden = (~visible.view(-1)).nonzero().squeeze(1)
    return Gather(numbers.view(-1), hidden, positions, visible)
