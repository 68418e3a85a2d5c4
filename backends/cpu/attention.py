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


def _gather(
    gather: Gather, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [C, Hkv, L, D] and values [C, Hkv, L, Dv] in `dtype`, zero where nothing is visible."""
    gathered = []
    for name, cache in (("keys", keys), ("values", values)):
        _, block_size, heads, size = cache.shape
        buffer = scratch.take(name, cache.dtype, len(gather.blocks), block_size * heads * size)
        torch.index_select(cache.view(cache.shape[0], -1), 0, gather.blocks, out=buffer)
        rows = buffer.view(-1, heads * size)
        if len(gather.hidden):
            rows.index_fill_(0, gather.hidden, 0)
        gathered.append(rows.view(len(gather.positions), -1, heads, size).transpose(1, 2).to(dtype))
    return gathered[0], gathered[1]


def _decode(
    decode: Decode,
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    args: AttentionArgs,
    scratch: Scratch,
    out: torch.Tensor,
) -> None:
    k, v = _gather(decode.gather, keys, values, query.dtype, scratch)
    count, kv_heads, length, _ = k.shape
    rows = query[decode.tokens].view(count, kv_heads, -1, query.shape[-1])  # the heads of a group are query rows
    if args.softcap is None and args.sinks is None:
        mask = decode.additive_mask(query.dtype).expand(count, kv_heads, rows.shape[2], length)
        mixed = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=args.scale)
    else:
        mixed = _softmax_attention(rows, k, v, decode.gather.visible[:, None, None, :], args)
    mixed = mixed.reshape(count, -1, v.shape[-1])
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
    k, v = _gather(prefill.gather, keys, values, query.dtype, scratch)
    _, kv_heads, length, size = k.shape
    count, plain = prefill.last - prefill.first, args.softcap is None and args.sinks is None
    grouped = query[prefill.first : prefill.last].view(count, kv_heads, -1, size).permute(1, 2, 0, 3)
    result = out[prefill.first : prefill.last].view(count, kv_heads, grouped.shape[1], -1)
    if prefill.causal and plain:
        k, v = (x[0, :, None, :count].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
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
        kt, vt = (x[0, :, None, seen].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
        rows = grouped[:, :, begin:end]
        if plain:
            mixed = F.scaled_dot_product_attention(rows, kt, vt, attn_mask=visible[None, None], scale=args.scale)
        else:
            mixed = _softmax_attention(rows, kt, vt, visible[None, None], args, grouped_rows=False)
        blind = ~visible.any(1)
        if bool(blind.any()):
            mixed = mixed.masked_fill(blind[:, None], 0)
        result[begin:end] = mixed.permute(2, 0, 1, 3)


def _softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    args: AttentionArgs,
    grouped_rows: bool = True,
) -> torch.Tensor:
    """The same by hand, for soft caps and sinks, in float32.

    query [C, Hkv, G, D] where the third axis is heads of a group (`grouped_rows`), or [Hkv, G, n, D]; visible
    broadcasts against the scores [.., .., rows, L].
    """
    scores = query.float() @ keys.float().transpose(-1, -2) * args.scale
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    sinks = None
    if args.sinks is not None:
        kv_heads = keys.shape[1] if grouped_rows else keys.shape[0]
        sinks = args.sinks.float().view(kv_heads, -1, 1)
        sinks = sinks[None] if grouped_rows else sinks[..., None]
        highest = torch.maximum(highest, sinks)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    return ((weights / total) @ values.float()).to(query.dtype)
