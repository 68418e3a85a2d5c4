"""The cache as the compiled kernels see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagefleet.kernels.cpu import NativeKernels
from pagefleet.kernels.cpu.native import TYPES

from ..base import BackendError
from ..pool import BlockPool


@dataclass
class NativePool(BlockPool):
    """A pool with descriptions of its layers, int64 arrays that csrc/kv_cache.h reads as `KvLayer`.

    Attributes:
        addresses: layer -> address of its description, good as long as the pool is.
    """

    addresses: dict[int, int] = field(default_factory=dict)
    _descriptions: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in self.group.layers:
            views = [x.get(layer.layer) for x in (self.keys, self.values, self.key_scales, self.value_scales)]
            description = torch.tensor(
                [
                    TYPES[self.keys[layer.layer].dtype],
                    self.num_blocks,
                    self.group.block_size,
                    self.data.stride(0),
                    layer.num_kv_heads,
                    layer.head_dim,
                    layer.value_head_dim,
                    *(0 if view is None else view.data_ptr() for view in views),
                ]
            )
            self._descriptions[layer.layer] = description
            self.addresses[layer.layer] = description.data_ptr()

    @classmethod
    def of(cls, pool: BlockPool) -> NativePool:
        """The same pool, over the same memory."""
        return cls(**vars(pool))


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
