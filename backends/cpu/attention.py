"""Attention over gathered blocks, in torch.

The query heads of a KV head are rows of one product, so keys and values are never repeated. Memory that no query may
see is zeroed after the gather: whatever it held (it may be NaN) cannot reach a result, masked or not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..base import AttentionArgs
from .plan import Decode, Gather, GroupPlan, Prefill

MASK_ELEMENTS = 1 << 22  # query rows of a prefill are cut so that a mask stays below this


class Scratch:
    """Buffers for gathered keys and values, kept from call to call: fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        """An uninitialised [rows, columns] buffer; the last one of that name is given up."""
        key, size = (name, dtype), rows * columns
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=dtype)
        return self._buffers[key][:size].view(rows, columns)


def attention(
    plan: GroupPlan,
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    args: AttentionArgs,
    scratch: Scratch,
) -> torch.Tensor:
    """Attention of query [T, Hq, D] over keys [num_blocks, block_size, Hkv, D] and values (Dv); returns [T, Hq, Dv]."""
    out = query.new_zeros(query.shape[0], query.shape[1], values.shape[-1])
    for decode in plan.decodes:
        _decode(decode, keys, values, query, args, scratch, out)
    for prefill in plan.prefills:
        _prefill(prefill, keys, values, query, args, scratch, out)
    return out


def gather_kv(gather: Gather, cache: torch.Tensor, name: str, scratch: Scratch) -> torch.Tensor:
    """[Hkv, C, L, D] from a cache [num_blocks, block_size, Hkv, D], zero where nothing is visible."""
    _, block_size, heads, size = cache.shape
    buffer = scratch.take(name, cache.dtype, heads * len(gather.blocks), block_size * size)
    per_head = buffer.view(heads, len(gather.blocks), -1)
    for head in range(heads):
        source = cache[:, :, head]
        if source.stride(1) == size or block_size == 1:  # the head's tokens lie together: one row a block
            source = source.as_strided((len(cache), block_size * size), (source.stride(0), 1))
            torch.index_select(source, 0, gather.blocks, out=per_head[head])
        else:
            per_head[head] = source[gather.blocks].flatten(1)
    tokens = buffer.view(heads, -1, size)
    if len(gather.hidden):
        tokens.index_fill_(1, gather.hidden, 0)
    return tokens.view(heads, len(gather.positions), -1, size)


def _decode(
    decode: Decode,
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    args: AttentionArgs,
    scratch: Scratch,
    out: torch.Tensor,
) -> None:
    k = gather_kv(decode.gather, keys, "keys", scratch).to(query.dtype)
    v = gather_kv(decode.gather, values, "values", scratch).to(query.dtype)
    kv_heads, count = k.shape[:2]
    rows = query[decode.tokens].view(count, kv_heads, -1, query.shape[-1]).transpose(0, 1)  # a group's heads are rows
    mixed = _softmax_attention(rows, k, v, decode.additive_mask(torch.float32), args)
    mixed = mixed.transpose(0, 1).reshape(count, -1, v.shape[-1])
    if decode.blind is not None:
        mixed = mixed.masked_fill(decode.blind[:, None, None], 0)
    out[decode.tokens] = mixed


def _prefill(
    prefill: Prefill,
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    args: AttentionArgs,
    scratch: Scratch,
    out: torch.Tensor,
) -> None:
    k = gather_kv(prefill.gather, keys, "keys", scratch).to(query.dtype)
    v = gather_kv(prefill.gather, values, "values", scratch).to(query.dtype)
    kv_heads, _, length, size = k.shape
    count, plain = prefill.last - prefill.first, args.softcap is None and args.sinks is None
    grouped = query[prefill.first : prefill.last].view(count, kv_heads, -1, size).permute(1, 2, 0, 3)
    result = out[prefill.first : prefill.last].view(count, kv_heads, grouped.shape[1], -1)
    if prefill.causal and plain:
        k, v = (x[:, :, :count].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=args.scale)
        result.copy_(mixed.permute(2, 0, 1, 3))
        return
    tile = max(16, min(512, MASK_ELEMENTS // length))
    positions, base = prefill.gather.positions[0], int(prefill.gather.positions[0, 0])
    for begin in range(0, count, tile):
        end = min(count, begin + tile)
        newest = prefill.start + end - 1
        oldest = base if args.window is None else max(base, prefill.start + begin - args.window + 1)
        seen = slice(oldest - base, newest + 1 - base)
        at = torch.arange(prefill.start + begin, prefill.start + end)[:, None]
        visible = (positions[seen] <= at) & prefill.gather.visible[0, seen]
        if args.window is not None:
            visible &= positions[seen] > at - args.window
        kt, vt = (x[:, :, seen].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
        rows = grouped[:, :, begin:end]
        if plain:
            mixed = F.scaled_dot_product_attention(rows, kt, vt, attn_mask=visible[None, None], scale=args.scale)
        else:
            mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
            mixed = _softmax_attention(rows, kt, vt, mask, args)
        blind = ~visible.any(1)
        if bool(blind.any()):
            mixed = mixed.masked_fill(blind[:, None], 0)
        result[begin:end] = mixed.permute(2, 0, 1, 3)


def _softmax_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, args: AttentionArgs
) -> torch.Tensor:
    """Attention by hand: for decodes, where it is faster than torch's fused one, and for soft caps and sinks.

    query [Hkv, C, G, D] over keys [Hkv, C, L, D] and values, mask float32 [C, 1, L]; or, for one sequence, query
    [Hkv, G, n, D] over keys expanded to [Hkv, G, L, D], mask [n, L]. Softmax is in float32.
    """
    scores = ((query * args.scale) @ keys.transpose(-1, -2)).float()
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    scores += mask
    if args.sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sinks = args.sinks.float().view(query.shape[0], 1, -1, 1)
        sinks = sinks if mask.dim() == 3 else sinks.transpose(1, 2)
        highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        weights = torch.exp(scores - highest)
        weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks - highest))
    return weights.to(values.dtype) @ values
