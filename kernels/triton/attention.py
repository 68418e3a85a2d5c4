"""Paged attention: prefill, decode and any mixture in one launch, and a second kernel where the KV is split.

The query heads of one KV head are rows of the same product. A program takes `BLOCK_M // group` queries of one
sequence, which it finds by binary search, so the host need not know how the step is made up. Softmax runs online
(Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022). A decode with few sequences gives each split of the
KV to its own program (flash-decoding, Dao et al., 2023). Letters as in `backends/base.py`.

Sequences that share a prefix each read its blocks for themselves. Programs of one KV head start one after another (the
queries are the grid's first axis), so all but the first find them in the second-level cache while a layer's prefix fits
there: 2,048 tokens of 8 heads of 128 in bf16 are 8 MiB, of 50 on an H200 and 256 on an MI300X. A launch that multiplies
the prefix with all its queries at once would save those cache reads: by an estimate 3 of the 7 ms of a step of an 8B
model with 64 such sequences on an H200, a fifth with 500 shared tokens, less on AMD's faster cache. It would need a
second launch and a merge in every layer and graph. `tools/device_check.py` measures decode over a shared prefix, which
is to decide it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cache import cache_arguments
from .formats import LOG2_E, QuantizedViews, decode, product, rounded, spread, tanh
from .targets import AttentionTiles


@triton.jit
def find_sequence(query_starts, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The sequence that owns query block `block`: sequence s begins at block query_starts[s] // BLOCK_Q + s."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attention_kernel(
    out,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    query_starts,
    kv_lengths,
    sinks,
    slopes,
    partial_max,
    partial_sum,
    scale,
    softcap,
    window,
    num_seqs,
    out_stride_token,
    out_stride_head,
    out_stride_split,
    query_stride_token,
    query_stride_head,
    cache_strides,
    table_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,
    KEY_QUANT_GROUP: tl.constexpr,
    VALUE_QUANT_GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """One query block of one KV head over one split of the KV. With SPLITS > 1 the result is not normalised."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    key_stride_block, key_stride_token, key_stride_head = cache_strides[:3]
    value_stride_block, value_stride_token, value_stride_head = cache_strides[3:6]
    key_scale_stride_block, key_scale_stride_token, key_scale_stride_head = cache_strides[6:9]
    value_scale_stride_block, value_scale_stride_token, value_scale_stride_head = cache_strides[9:]
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = find_sequence(query_starts, num_seqs, block, BLOCK_Q)
    first = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first
    begin = (block - first // BLOCK_Q - sequence) * BLOCK_Q
    if begin >= num_queries:
        return
    context = tl.load(kv_lengths + sequence) - num_queries  # tokens before the sequence's first query
    rows = tl.arange(0, BLOCK_M)
    in_sequence = begin + rows // GROUP
    live = (rows < BLOCK_Q * GROUP) & (in_sequence < num_queries)
    position = context + in_sequence
    head = kv_head * GROUP + rows % GROUP
    token = (first + in_sequence).to(tl.int64)

    dims, value_dims = tl.arange(0, HEAD_PAD), tl.arange(0, VALUE_PAD)
    q = tl.load(
        query + (token * query_stride_token + head * query_stride_head)[:, None] + dims[None, :],
        mask=live[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS and split == 0:
        highest = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=live, other=0.0).to(tl.float32)
    mixed = tl.zeros((BLOCK_M, VALUE_PAD), tl.float32)

    newest = context + tl.minimum(begin + BLOCK_Q, num_queries) - 1
    oldest = 0
    if HAS_WINDOW:
        oldest = tl.maximum(context + begin - window + 1, 0)
    first_tile = oldest // TILE
    last_tile = newest // TILE + 1
    if SPLITS > 1:
        tiles = (last_tile - first_tile + SPLITS - 1) // SPLITS
        first_tile += split * tiles
        last_tile = tl.minimum(last_tile, first_tile + tiles)

    table = block_tables + sequence.to(tl.int64) * table_stride
    key_head, value_head = keys + kv_head * key_stride_head, values + kv_head * value_stride_head
    for tile in range(first_tile, last_tile):
        tokens = tile * TILE + tl.arange(0, TILE)
        inside = (tokens >= oldest) & (tokens <= newest)
        number = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cached = inside & (number != 0)  # block 0 is the null block
        place = tokens % BLOCK_SIZE
        k = tl.load(
            key_head + (number * key_stride_block + place * key_stride_token)[None, :] + dims[:, None],
            mask=cached[None, :] & (dims < HEAD_DIM)[:, None],
            other=0,
        )
        if KEY_QUANT_GROUP != 0:
            scale_at = key_scales + kv_head * key_scale_stride_head
            scale_at += number * key_scale_stride_block + place * key_scale_stride_token
        if KEY_QUANT_GROUP != 0 and KEY_QUANT_GROUP < HEAD_PAD:
            groups = tl.arange(0, HEAD_PAD // KEY_QUANT_GROUP)
            scales = tl.load(
                scale_at[:, None] + groups[None, :],
                mask=cached[:, None] & (groups * KEY_QUANT_GROUP < HEAD_DIM)[None, :],
                other=0.0,
            )
            k = (decode(k, KIND, tl.float32) * tl.trans(spread(scales, KEY_QUANT_GROUP))).to(q.dtype)
        else:
            k = decode(k, KIND, q.dtype)
        scores = product(q, k) * scale
        if KEY_QUANT_GROUP == HEAD_PAD:
            scores *= tl.load(scale_at, mask=cached, other=0.0)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        if HAS_SLOPES:
            scores += slope[:, None] * (tokens[None, :] - position[:, None]).to(tl.float32)
        visible = cached[None, :] & (tokens[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible &= tokens[None, :] > position[:, None] - window
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))

        raised = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(raised == float("-inf"), 0.0, raised)  # a row that has seen nothing yet
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(highest - reference)
        total = total * shrink + tl.sum(weights, 1)
        mixed *= shrink[:, None]
        highest = raised

        v = tl.load(
            value_head + (number * value_stride_block + place * value_stride_token)[:, None] + value_dims[None, :],
            mask=cached[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0,
        )
        if VALUE_QUANT_GROUP != 0:
            scale_at = value_scales + kv_head * value_scale_stride_head
            scale_at += number * value_scale_stride_block + place * value_scale_stride_token
        if VALUE_QUANT_GROUP != 0 and VALUE_QUANT_GROUP < VALUE_PAD:
            groups = tl.arange(0, VALUE_PAD // VALUE_QUANT_GROUP)
            scales = tl.load(
                scale_at[:, None] + groups[None, :],
                mask=cached[:, None] & (groups * VALUE_QUANT_GROUP < VALUE_DIM)[None, :],
                other=0.0,
            )
            v = (decode(v, KIND, tl.float32) * spread(scales, VALUE_QUANT_GROUP)).to(q.dtype)
        else:
            v = decode(v, KIND, q.dtype)
        if VALUE_QUANT_GROUP == VALUE_PAD:
            weights *= tl.load(scale_at, mask=cached, other=0.0)[None, :]
        mixed += product(rounded(weights, q.dtype), v)

    at = token * out_stride_token + head * out_stride_head
    if SPLITS > 1:
        at += split * out_stride_split
        per_split = (token * tl.num_programs(1) * GROUP + head) * SPLITS + split
        tl.store(partial_max + per_split, highest, mask=live)
        tl.store(partial_sum + per_split, total, mask=live)
    else:
        mixed = tl.where(total[:, None] > 0.0, mixed / total[:, None], 0.0)
    tl.store(
        out + at[:, None] + value_dims[None, :],
        rounded(mixed, out.dtype.element_ty),
        mask=live[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit
def merge_kernel(
    out,
    partial,
    partial_max,
    partial_sum,
    out_stride_token,
    out_stride_head,
    num_heads,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One head of one query: its splits weighed by their share of the softmax. Partials are [T, Hq, SPLITS, ...]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_PAD)
    row = token * num_heads + head
    highest = tl.load(partial_max + row * SPLITS + splits)
    sums = tl.load(partial_sum + row * SPLITS + splits)
    overall = tl.max(highest, 0)
    factor = tl.exp2(highest - tl.where(overall == float("-inf"), 0.0, overall))
    parts = tl.load(
        partial + (row * SPLITS + splits)[:, None] * VALUE_DIM + dims[None, :],
        mask=(sums > 0.0)[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(sums * factor, 0)
    mixed = tl.sum(parts * factor[:, None], 0)
    mixed = tl.where(total > 0.0, mixed / total, 0.0)
    tl.store(
        out + token * out_stride_token + head * out_stride_head + dims,
        rounded(mixed, out.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    scale: float,
    tiles: AttentionTiles,
    splits: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    quantized: QuantizedViews | None = None,
) -> torch.Tensor:
    """See `kernels.reference.paged_attention`, whose arguments these are; nothing is read back to the host.

    Args:
        tiles: from `Target.attention`; its block_m holds at least the query heads of one KV head.
        splits: programs that share the KV of one query block, a power of two.
        quantized: the scales of 8-bit caches.

    Returns:
        [T, Hq, Dv] in query's dtype. Rows that no sequence owns hold anything.
    """
    tokens, num_heads, _ = query.shape
    _, _, kv_heads, value_dim = value_cache.shape
    group = num_heads // kv_heads
    out = query.new_empty(tokens, num_heads, value_dim)
    if tokens == 0:
        return out
    pointers, strides, constants = cache_arguments(key_cache, value_cache, quantized)
    if splits == 1:
        target, highest, sums = out, out, out
        out_strides = (out.stride(0), out.stride(1), 0)
    else:
        target = query.new_empty(tokens, num_heads, splits, value_dim, dtype=torch.float32)
        highest, sums = (query.new_empty(tokens, num_heads, splits, dtype=torch.float32) for _ in range(2))
        out_strides = (target.stride(0), target.stride(1), target.stride(2))
    num_seqs = kv_lengths.shape[0]
    grid = (tokens // (tiles.block_m // group) + num_seqs, kv_heads, splits)
    attention_kernel[grid](
        target,
        query,
        *pointers,
        block_tables,
        query_starts,
        kv_lengths,
        out if sinks is None else sinks,
        out if alibi_slopes is None else alibi_slopes,
        highest,
        sums,
        scale,
        softcap or 0.0,
        window or 0,
        num_seqs,
        *out_strides,
        *query.stride()[:2],
        strides,
        block_tables.stride(0),
        GROUP=group,
        BLOCK_M=tiles.block_m,
        TILE=tiles.tile,
        SPLITS=splits,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SLOPES=alibi_slopes is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **constants,
    )
    if splits > 1:
        merge_kernel[(tokens, num_heads)](
            out,
            target,
            highest,
            sums,
            out.stride(0),
            out.stride(1),
            num_heads,
            VALUE_DIM=value_dim,
            VALUE_PAD=constants["VALUE_PAD"],
            SPLITS=splits,
            num_warps=4,
        )
    return out
