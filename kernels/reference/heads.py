"""What comes between a merged projection and attention: norms of heads, rotation, and the KV write."""

from __future__ import annotations

import torch

from .cache import write_kv
from .rows import norm, rotate

Parameters = tuple[str, "torch.Tensor | None", "torch.Tensor | None", float]  # kind, weight [n], bias [n], eps


def query_and_store(
    qkv: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    norms: tuple[Parameters | None, Parameters | None, Parameters | None] = (None, None, None),
    norm_all_heads: bool = False,
    norm_after_rotary: bool = False,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    kind: str = "int8",
    group_size: int | None = None,
) -> torch.Tensor:
    """Normalise and rotate the queries and keys of qkv, store keys and values; returns queries [T, Hq, D].

    Args:
        qkv: [T, (Hq + Hkv) * D + Hkv * Dv]: queries, keys, values, head by head.
        key_cache, value_cache, slots, key_scales, value_scales, kind, group_size: as in `write_kv`.
        cos, sin: [T, R / 2] as in `rotate`, or None.
        norms: of queries, keys and values, as in `norm`; over each head of D elements (Dv for values), or, but for
            values, over all heads of a token together with `norm_all_heads`.
        norm_after_rotary: queries and keys are rotated before they are normalised.
    """
    tokens, kv_heads, head_dim, value_dim = qkv.shape[0], *key_cache.shape[2:], value_cache.shape[3]
    parts = qkv.split([num_heads * head_dim, kv_heads * head_dim, kv_heads * value_dim], -1)

    def prepared(x: torch.Tensor, parameters: Parameters | None) -> torch.Tensor:
        def normed(x: torch.Tensor) -> torch.Tensor:
            if parameters is None:
                return x
            return norm(x.flatten(1) if norm_all_heads else x, *parameters).view(x.shape)

        x = x.reshape(tokens, -1, head_dim)
        x = x if norm_after_rotary else normed(x)
        if cos is not None and sin is not None:
            x = rotate(x, cos, sin, interleaved)
        return normed(x) if norm_after_rotary else x

    value = parts[2].reshape(tokens, kv_heads, value_dim)
    if norms[2] is not None:
        value = norm(value, *norms[2])
    key = prepared(parts[1], norms[1])
    write_kv(key, value, key_cache, value_cache, slots, key_scales, value_scales, kind, group_size)
    return prepared(parts[0], norms[0])
