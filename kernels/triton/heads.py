"""What comes between the merged projection and attention, in one kernel: q/k/v norm, rotation and the KV write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .cache import cache_arguments, store_heads
from .formats import QuantizedViews, padded, rounded
from .rows import Parameters


@triton.jit
def _statistics(x, live, size, eps, KIND: tl.constexpr, ALL: tl.constexpr):
    """(mean, 1 / deviation) of float32 x [heads, width] by head, or of all heads together; `size` elements each."""
    axis: tl.constexpr = None if ALL else 1
    mean = tl.zeros((1, 1), tl.float32)
    if KIND == "layer":
        summed = tl.sum(tl.where(live, x, 0.0), axis)
        mean = (tl.full((1,), summed, tl.float32) if ALL else summed)[:, None] / size
        x = x - mean
    squares = tl.sum(tl.where(live, x * x, 0.0), axis)
    variance = (tl.full((1,), squares, tl.float32) if ALL else squares)[:, None] / size
    return mean, tl.rsqrt(variance + eps)


@triton.jit
def _applied(
    x, head, dims, live, mean, inverse, weight, bias,
    DIM: tl.constexpr, ALL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Elements `dims` of heads, float32 x [heads, width], normalised with these statistics; zero where not `live`."""
    x = (x - mean) * inverse
    at = dims[None, :] + (head[:, None] * DIM if ALL else head[:, None] * 0)
    if HAS_WEIGHT:
        x *= tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=live, other=0.0).to(tl.float32)
    return tl.where(live, x, 0.0)


@triton.jit
def _prepared(
    base, first_head, num_heads, weight, bias, eps, cos, sin,
    DIM: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr, ALL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM_AFTER: tl.constexpr,
):  # fmt: skip
    """float32 [HEADS, PAD]: heads at `base`, normalised and rotated in the order asked for; zero past DIM.

    The partner of each element is loaded a second time, from the first-level cache, instead of moved between threads.
    """
    head, dims = first_head + tl.arange(0, HEADS), tl.arange(0, PAD)
    live = (head < num_heads)[:, None] & (dims < DIM)[None, :]
    at = base + head[:, None] * DIM
    x = tl.load(at + dims[None, :], mask=live, other=0.0).to(tl.float32)
    size = num_heads * DIM if ALL else DIM
    NORM_FIRST: tl.constexpr = KIND != "none" and not NORM_AFTER
    if NORM_FIRST:
        mean, inverse = _statistics(x, live, size, eps, KIND, ALL)
        x = _applied(x, head, dims, live, mean, inverse, weight, bias, DIM, ALL, HAS_WEIGHT, HAS_BIAS)
    if HALF > 0:
        if INTERLEAVED:
            pair = dims // 2
            second = dims % 2 == 1
            partner = tl.where(second, dims - 1, dims + 1)
        else:
            pair = dims % HALF
            second = dims >= HALF
            partner = tl.where(second, dims - HALF, dims + HALF)
        turned = dims < 2 * HALF
        partner = tl.where(turned, partner, 0)
        other = tl.load(at + partner[None, :], mask=live, other=0.0).to(tl.float32)
        if NORM_FIRST:
            other = _applied(other, head, partner, live, mean, inverse, weight, bias, DIM, ALL, HAS_WEIGHT, HAS_BIAS)
        c = tl.load(cos + pair, mask=turned, other=1.0)[None, :]
        s = tl.load(sin + pair, mask=turned, other=0.0)[None, :]
        x = x * c + tl.where(second[None, :], other, -other) * s
    if KIND != "none" and NORM_AFTER:
        mean, inverse = _statistics(x, live, size, eps, KIND, ALL)
        x = _applied(x, head, dims, live, mean, inverse, weight, bias, DIM, ALL, HAS_WEIGHT, HAS_BIAS)
    return x


@triton.jit
def heads_kernel(
    query,
    qkv,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slots,
    cos,
    sin,
    query_weight,
    query_bias,
    key_weight,
    key_bias,
    value_weight,
    value_bias,
    query_eps,
    key_eps,
    value_eps,
    qkv_stride,
    angle_stride,
    cache_strides,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_CHUNK: tl.constexpr,
    KV_CHUNK: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    NORM_ALL: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    KIND: tl.constexpr,
    KEY_QUANT_GROUP: tl.constexpr,
    VALUE_QUANT_GROUP: tl.constexpr,
):
    """One chunk of heads of one token: queries to `query`, or keys and values to the token's slot."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv + token * qkv_stride
    cos += token * angle_stride
    sin += token * angle_stride
    QUERY_CHUNKS: tl.constexpr = (NUM_HEADS + QUERY_CHUNK - 1) // QUERY_CHUNK
    if chunk < QUERY_CHUNKS:
        first = chunk * QUERY_CHUNK
        q = _prepared(
            row, first, NUM_HEADS, query_weight, query_bias, query_eps, cos, sin, HEAD_DIM, HEAD_PAD, QUERY_CHUNK,
            QUERY_NORM, NORM_ALL, HAS_WEIGHTS[0], HAS_BIASES[0], HALF, INTERLEAVED, NORM_AFTER,
        )  # fmt: skip
        head, dims = first + tl.arange(0, QUERY_CHUNK), tl.arange(0, HEAD_PAD)
        tl.store(
            query + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :],
            rounded(q, query.dtype.element_ty),
            mask=(head < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :],
        )
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            k_block, k_token, k_head, v_block, v_token, v_head = cache_strides[:6]
            ks_block, ks_token, ks_head, vs_block, vs_token, vs_head = cache_strides[6:]
            first = (chunk - QUERY_CHUNKS) * KV_CHUNK
            head = first + tl.arange(0, KV_CHUNK)
            live = head < NUM_KV_HEADS
            k = _prepared(
                row + NUM_HEADS * HEAD_DIM, first, NUM_KV_HEADS, key_weight, key_bias, key_eps, cos, sin, HEAD_DIM,
                HEAD_PAD, KV_CHUNK, KEY_NORM, NORM_ALL, HAS_WEIGHTS[1], HAS_BIASES[1], HALF, INTERLEAVED, NORM_AFTER,
            )  # fmt: skip
            store_heads(
                k, head, live, key_cache, key_scales, block, place, k_block, k_token, k_head,
                ks_block, ks_token, ks_head, HEAD_DIM, HEAD_PAD, KIND, KEY_QUANT_GROUP,
            )  # fmt: skip
            v = _prepared(
                row + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM, first, NUM_KV_HEADS, value_weight, value_bias, value_eps,
                cos, sin, VALUE_DIM, VALUE_PAD, KV_CHUNK, VALUE_NORM, False, HAS_WEIGHTS[2], HAS_BIASES[2], 0, False,
                False,
            )  # fmt: skip
            store_heads(
                v, head, live, value_cache, value_scales, block, place, v_block, v_token, v_head,
                vs_block, vs_token, vs_head, VALUE_DIM, VALUE_PAD, KIND, VALUE_QUANT_GROUP,
            )  # fmt: skip


@dataclass(frozen=True)
class HeadNorms:
    """Norms of queries, keys and values, (kind, weight, bias, eps) or None each; see `backends.ops.Heads`."""

    query: Parameters | None = None
    key: Parameters | None = None
    value: Parameters | None = None
    all_heads: bool = False
    after_rotary: bool = False


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
    norms: HeadNorms | None = None,
    quantized: QuantizedViews | None = None,
) -> torch.Tensor:
    """See `kernels.reference.query_and_store`; with `quantized` the caches hold codes and its scales are written too.

    Everything between loading qkv and storing is float32: keys are rounded once, to the cache's dtype.
    """
    norms = norms or HeadNorms()
    tokens, kv_heads, head_dim = qkv.shape[0], key_cache.shape[2], key_cache.shape[3]
    query = qkv.new_empty(tokens, num_heads, head_dim)
    if tokens == 0:
        return query
    pointers, strides, constants = cache_arguments(key_cache, value_cache, quantized)
    every = (norms.query, norms.key, norms.value)
    kinds, weights, biases, epsilons = zip(*(norm or ("none", None, None, 0.0) for norm in every), strict=True)
    largest = max(1, 2048 // padded(max(head_dim, value_cache.shape[3])))  # heads of a chunk: registers are few

    def chunk(heads: int) -> int:
        whole = triton.next_power_of_2(heads)
        return whole if norms.all_heads else min(whole, largest)

    query_chunk, kv_chunk = chunk(num_heads), chunk(kv_heads)
    grid = (tokens, triton.cdiv(num_heads, query_chunk) + triton.cdiv(kv_heads, kv_chunk))
    parameters = [qkv if t is None else t for pair in zip(weights, biases, strict=True) for t in pair]
    heads_kernel[grid](
        query,
        qkv,
        *pointers,
        slots,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        *parameters,
        *epsilons,
        qkv.stride(0),
        0 if cos is None else cos.stride(0),
        strides,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        QUERY_CHUNK=query_chunk,
        KV_CHUNK=kv_chunk,
        HALF=0 if cos is None else cos.shape[1],
        INTERLEAVED=interleaved,
        QUERY_NORM=kinds[0],
        KEY_NORM=kinds[1],
        VALUE_NORM=kinds[2],
        HAS_WEIGHTS=tuple(t is not None for t in weights),
        HAS_BIASES=tuple(t is not None for t in biases),
        NORM_ALL=norms.all_heads,
        NORM_AFTER=norms.after_rotary,
        **constants,
    )
    return query
