"""Writing to the paged KV cache, and copying its blocks."""

from __future__ import annotations

import torch

from .quantized import quantize


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    kind: str = "int8",
    group_size: int | None = None,
) -> None:
    """Store the step's new keys and values in their slots, in place.

    Args:
        key: [T, Hkv, D]; value: [T, Hkv, Dv]; converted to the cache's dtype.
        key_cache: [num_blocks, block_size, Hkv, D], any strides; value_cache: the same with Dv.
        slots: int64 [T], `block * block_size + offset`; a negative slot is padding and stores nothing.
        key_scales, value_scales: float32 [num_blocks, block_size, Hkv] or [..., groups], of an 8-bit cache only.
        kind, group_size: how an 8-bit cache keeps them, see `quantize`; the bits of 8-bit floats lie in uint8 caches.

    Raises:
        IndexError: a slot lies past the last block.
    """
    block_size = key_cache.shape[1]
    keep = slots >= 0
    blocks, offsets = slots[keep] // block_size, slots[keep] % block_size
    for new, cache, scales in ((key[keep], key_cache, key_scales), (value[keep], value_cache, value_scales)):
        if scales is not None:
            codes, new_scales = quantize(new, kind, group_size)
            scales[blocks, offsets] = new_scales if scales.dim() == 4 else new_scales[..., 0]
            new = codes.view(cache.dtype)
        cache[blocks, offsets] = new.to(cache.dtype)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] as int8 [..., D] and a float32 scale [...] for each row: x is about int8 * scale, symmetric around 0.

    The scale is largest |x| / 127; a row of zeros has scale 0.
    """
    codes, scales = quantize(x, "int8")
    return codes, scales[..., 0]


def move_blocks(
    source: torch.Tensor,
    destination: torch.Tensor,
    sources: torch.Tensor | None = None,
    destinations: torch.Tensor | None = None,
) -> None:
    """Copy rows of uint8 [blocks, block_bytes]: row `sources[i]` of one tensor to row `destinations[i]` of another.

    Without `sources` the rows are taken in order (a scatter), without `destinations` put down in order (a gather).
    """
    count = next((len(rows) for rows in (sources, destinations) if rows is not None), len(source))
    in_order = torch.arange(count, device=source.device)
    taken = source[in_order if sources is None else sources]
    destination[in_order if destinations is None else destinations] = taken


def copy_blocks(data: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks of `data` [num_blocks, ...] in place, every read before any write.

    Args:
        pairs: (source, destination) block numbers; a block may be the source of many copies.

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
    data[torch.tensor(destinations, device=data.device)] = data[torch.tensor(sources, device=data.device)]
