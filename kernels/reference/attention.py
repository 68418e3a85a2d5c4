"""Paged attention, one query at a time: what every attention kernel must compute.

Letters as in `backends/base.py`: T tokens of the step, S sequences, Hq query heads, Hkv KV heads, D head size.
"""

from __future__ import annotations

import itertools

import torch

from .quantized import CODES, dequantize


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    kind: str = "int8",
    group_size: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the step's queries over cached tokens; prefill and decode are one thing.

    Args:
        query: [T, Hq, D], the sequences one after another.
        key_cache: [num_blocks, block_size, Hkv, D]; value_cache: [num_blocks, block_size, Hkv, Dv]; any strides.
        block_tables: int [S, B]; 0 is the null block, whose tokens are never seen.
        query_starts: int [S + 1]; sequence s owns queries query_starts[s]:query_starts[s + 1], maybe none.
        kv_lengths: int [S], cached and new tokens; the last query of a sequence is at position kv_lengths[s] - 1.
        window: how many tokens a query sees, its own included; None sees all before it.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [Hq], a score per head that takes part in the softmax and carries no value.
        key_scales, value_scales: [num_blocks, block_size, Hkv] or [..., groups], of an 8-bit cache only.
        kind, group_size: as in `quantize`; the bits of 8-bit floats lie in uint8 caches.
        alibi_slopes: [Hq]; a score falls by the head's slope for each token of distance (Press et al., 2022).

    Returns:
        [T, Hq, Dv] in query's dtype, computed in float64 for a float64 query and in float32 otherwise. A query that
        sees no token gives zeros.

    Raises:
        ValueError: a sequence has more queries than tokens.
    """
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    num_heads, dtype = query.shape[1], torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(query.shape[0], num_heads, value_cache.shape[-1])
    starts, lengths = query_starts.tolist(), kv_lengths.tolist()
    for s, (first, last) in enumerate(itertools.pairwise(starts)):
        if last - first > lengths[s]:
            raise ValueError(f"sequence {s} has {last - first} queries and only {lengths[s]} tokens")
        for t in range(first, last):
            position = lengths[s] - (last - t)
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(oldest, position + 1, device=query.device)
            blocks = block_tables[s].long()[seen // block_size]
            seen, blocks = seen[blocks != 0], blocks[blocks != 0]
            if len(seen) == 0:
                continue
            keys, values = key_cache[blocks, seen % block_size], value_cache[blocks, seen % block_size]  # [L, Hkv, D]
            if key_scales is not None and value_scales is not None:
                keys, values = (
                    dequantize(
                        codes.view(CODES[kind]),
                        scales[blocks, seen % block_size].view(*codes.shape[:2], -1),
                        group_size,
                    )
                    for codes, scales in ((keys, key_scales), (values, value_scales))
                )
            keys, values = keys.to(dtype), values.to(dtype)
            grouped = query[t].to(dtype).view(num_kv_heads, num_heads // num_kv_heads, -1)
            scores = torch.einsum("hgd,lhd->hgl", grouped, keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                distance = (position - seen).to(dtype)
                scores = scores - alibi_slopes.to(dtype).view(num_kv_heads, -1, 1) * distance
            highest = scores.amax(-1, keepdim=True)
            sink_scores = None if sinks is None else sinks.to(dtype).view(num_kv_heads, -1, 1)
            if sink_scores is not None:
                highest = torch.maximum(highest, sink_scores)
            weights = torch.exp(scores - highest)
            total = weights.sum(-1, keepdim=True)
            if sink_scores is not None:
                total = total + torch.exp(sink_scores - highest)
            mixed = torch.einsum("hgl,lhd->hgd", weights / total, values)
            out[t] = mixed.reshape(num_heads, -1).to(query.dtype)
    return out
