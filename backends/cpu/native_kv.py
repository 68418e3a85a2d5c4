"""The cache as the compiled kernels see it."""

from __future__ import annotations

import torch

from pagefleet.kernels.cpu import NativeKernels
from pagefleet.kernels.cpu.native import TYPES

from ..base import BackendError
from ..pool import BlockPool


class NativeLayers:
    """Descriptions of the layers of one pool: int64 arrays that csrc/kv_cache.h reads as `KvLayer`."""

    def __init__(self, pool: BlockPool) -> None:
        self._arrays: dict[int, torch.Tensor] = {}
        self.addresses: dict[int, int] = {}
        for layer in pool.group.layers:
            views = [x.get(layer.layer) for x in (pool.keys, pool.values, pool.key_scales, pool.value_scales)]
            array = torch.tensor(
                [
                    TYPES[pool.keys[layer.layer].dtype],
                    pool.num_blocks,
                    pool.group.block_size,
                    pool.data.stride(0),
                    layer.num_kv_heads,
                    layer.head_dim,
                    layer.value_head_dim,
                    *(0 if view is None else view.data_ptr() for view in views),
                ]
            )
            self._arrays[layer.layer] = array
            self.addresses[layer.layer] = array.data_ptr()


def rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] such that the heads of a token lie together; only the stride from token to token is free."""
    together = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if together or x.numel() == 0 else x.contiguous()


def write_kv(native: NativeKernels, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store key [T, Hkv, D] and value [T, Hkv, Dv] in slots int64 [T] of the layer at address `layer`.

    Raises:
        BackendError: keys and values differ in dtype, or are no floats.
        IndexError: a slot lies past the last block.
    """
    if key.dtype != value.dtype or not key.is_floating_point() or key.dtype not in TYPES:
        raise BackendError(f"write_kv takes keys and values of one float dtype, not {key.dtype} and {value.dtype}")
    key, value = rows_of_heads(key), rows_of_heads(value)
    native.write_kv(
        layer,
        TYPES[key.dtype],
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        slots.data_ptr(),
        slots.shape[0],
    )
