"""Writing to the paged KV cache, quantizing on the way, and moving whole blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .formats import QuantizedViews, padded, quantize, rounded

WORDS = 2048  # 8-byte words that one program of a block move carries: 16 KiB


@triton.jit
def store_heads(
    x,
    head,
    live,
    cache,
    scales,
    block,
    place,
    stride_block,
    stride_token,
    stride_head,
    scale_stride_block,
    scale_stride_token,
    scale_stride_head,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    KIND: tl.constexpr,
    QUANT_GROUP: tl.constexpr,
):
    """Store float32 x [heads, DIM_PAD], zero past DIM, as token `place` of `block` in one layer's cache."""
    dims = tl.arange(0, DIM_PAD)
    at = cache + block * stride_block + place * stride_token + head[:, None] * stride_head + dims[None, :]
    mask = live[:, None] & (dims < DIM)[None, :]
    if QUANT_GROUP == 0:
        tl.store(at, rounded(x, cache.dtype.element_ty), mask=mask)
    else:
        codes, scale = quantize(x, KIND, QUANT_GROUP)
        tl.store(at, codes, mask=mask)
        groups = tl.arange(0, DIM_PAD // QUANT_GROUP)
        at_scale = scales + block * scale_stride_block + place * scale_stride_token
        at_scale += head[:, None] * scale_stride_head + groups[None, :]
        tl.store(at_scale, scale, mask=live[:, None] & (groups * QUANT_GROUP < DIM)[None, :])


@triton.jit
def write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slots,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    cache_strides,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
    KEY_QUANT_GROUP: tl.constexpr,
    VALUE_QUANT_GROUP: tl.constexpr,
):
    """One token's keys and values of HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < num_heads
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_block, k_token, k_head, v_block, v_token, v_head = cache_strides[:6]
    ks_block, ks_token, ks_head, vs_block, vs_token, vs_head = cache_strides[6:]
    dims, value_dims = tl.arange(0, HEAD_PAD), tl.arange(0, VALUE_PAD)
    k = tl.load(
        key + token * key_stride_token + head[:, None] * key_stride_head + dims[None, :],
        mask=live[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    v = tl.load(
        value + token * value_stride_token + head[:, None] * value_stride_head + value_dims[None, :],
        mask=live[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    store_heads(
        k.to(tl.float32), head, live, key_cache, key_scales, block, place, k_block, k_token, k_head,
        ks_block, ks_token, ks_head, HEAD_DIM, HEAD_PAD, KIND, KEY_QUANT_GROUP,
    )  # fmt: skip
    store_heads(
        v.to(tl.float32), head, live, value_cache, value_scales, block, place, v_block, v_token, v_head,
        vs_block, vs_token, vs_head, VALUE_DIM, VALUE_PAD, KIND, VALUE_QUANT_GROUP,
    )  # fmt: skip


@triton.jit
def move_kernel(
    source,
    destination,
    sources,
    destinations,
    words,
    source_stride,
    destination_stride,
    HAS_SOURCES: tl.constexpr,
    HAS_DESTINATIONS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Row i of a list: `source[sources[i]]` to `destination[destinations[i]]`; without a list, row i itself."""
    row = tl.program_id(0).to(tl.int64)
    first, last = row, row
    if HAS_SOURCES:
        first = tl.load(sources + row)
    if HAS_DESTINATIONS:
        last = tl.load(destinations + row)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = word < words
    content = tl.load(source + first * source_stride + word, mask=mask)
    tl.store(destination + last * destination_stride + word, content, mask=mask)


def cache_arguments(
    key_cache: torch.Tensor, value_cache: torch.Tensor, quantized: QuantizedViews | None
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, object]]:
    """One layer's cache as kernels take it: pointers, strides in order, and what is fixed when they are compiled."""
    head_dim, value_dim = key_cache.shape[3], value_cache.shape[3]
    head_pad, value_pad = padded(head_dim), padded(value_dim)
    scales = (key_cache, value_cache) if quantized is None else (quantized.key_scales, quantized.value_scales)
    strides = tuple(n for x in (key_cache, value_cache, *scales) for n in x.stride()[:3])
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "VALUE_DIM": value_dim,
        "VALUE_PAD": value_pad,
        "BLOCK_SIZE": key_cache.shape[1],
        "KIND": "float" if quantized is None else quantized.kind,
        "KEY_QUANT_GROUP": 0 if quantized is None else min(quantized.group_size or head_pad, head_pad),
        "VALUE_QUANT_GROUP": 0 if quantized is None else min(quantized.group_size or value_pad, value_pad),
    }
    return (key_cache, value_cache, *scales), strides, constants


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    quantized: QuantizedViews | None = None,
) -> None:
    """See `kernels.reference.write_kv`; with `quantized` the caches hold codes and its scales are written too.

    A slot past the last block is not noticed: nothing is read back to the host.
    """
    tokens, num_heads = key.shape[:2]
    if tokens == 0:
        return
    pointers, strides, constants = cache_arguments(key_cache, value_cache, quantized)
    heads = min(8, triton.next_power_of_2(num_heads))
    write_kernel[(tokens, triton.cdiv(num_heads, heads))](
        key,
        value,
        *pointers,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        strides,
        num_heads,
        HEADS=heads,
        **constants,
    )


def move_blocks(
    source: torch.Tensor,
    destination: torch.Tensor,
    sources: torch.Tensor | None = None,
    destinations: torch.Tensor | None = None,
) -> None:
    """Copy rows of uint8 [blocks, block_bytes], block_bytes a multiple of 8: row `sources[i]` to `destinations[i]`.

    Without `sources` the rows of `source` are taken in order (a scatter); without `destinations` they are put down in
    order (a gather). Both are int64 [n]. No destination may also be a source.
    """
    rows = sources if sources is not None else destinations
    count = len(source) if rows is None else len(rows)
    if count == 0:
        return
    source, destination = source.view(torch.int64), destination.view(torch.int64)
    unused = source
    grid = (count, triton.cdiv(source.shape[1], WORDS))
    move_kernel[grid](
        source,
        destination,
        unused if sources is None else sources,
        unused if destinations is None else destinations,
        source.shape[1],
        source.stride(0),
        destination.stride(0),
        HAS_SOURCES=sources is not None,
        HAS_DESTINATIONS=destinations is not None,
        WORDS=WORDS,
    )


def copy_blocks(data: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """See `kernels.reference.copy_blocks`. Chains of copies go through a buffer, so that every read comes first.

    Raises:
        ValueError: a destination is named twice, or is the null block 0.
    """
    if not pairs:
        return
    sources, destinations = (list(x) for x in zip(*pairs, strict=True))
    if len(set(destinations)) != len(destinations):
        raise ValueError(
            f"copy_blocks: a destination is named twice in {destinations}; every block has one new content"
        )
    if 0 in destinations:
        raise ValueError("copy_blocks: block 0 is the null block and cannot be a destination")
    from_rows, to_rows = (torch.tensor(x, device=data.device) for x in (sources, destinations))
    if set(sources) & set(destinations):
        buffer = torch.empty(len(pairs), data.shape[1], dtype=data.dtype, device=data.device)
        move_blocks(data, buffer, sources=from_rows)
        move_blocks(buffer, data, destinations=to_rows)
    else:
        move_blocks(data, data, from_rows, to_rows)
