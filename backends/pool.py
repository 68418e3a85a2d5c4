"""The block pool that torch backends share: one uint8 tensor, and typed strided views of each layer in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagefleet.kernels import reference

from .base import BackendError, KVGroup, KVPool, OutOfMemory, out_of_memory_as_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK_ALIGNMENT = 128


@dataclass
class BlockPool:
    """All blocks of one KV group.

    Attributes:
        data: uint8 [num_blocks, block_bytes]; in a block, layer after layer, keys then values, head after head,
            token by token: what one head reads lies together.
        keys: layer -> [num_blocks, block_size, Hkv, D] view; values: the same with Dv.
    """

    group: KVGroup
    data: torch.Tensor
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.data.shape[0]


def padded_block_bytes(group: KVGroup, backend: str) -> int:
    """Bytes of one block, rounded up to 128. Raises BackendError for a dtype or a size that cannot be kept."""
    if group.dtype not in DTYPES:
        raise BackendError(f"backend '{backend}' cannot keep KV as '{group.dtype}'; choose one of {sorted(DTYPES)}")
    if group.block_size < 1:
        raise BackendError(f"block_size must be at least 1, not {group.block_size}")
    for layer in group.layers:
        if min(layer.num_kv_heads, layer.head_dim, layer.value_head_dim) < 1:
            raise BackendError(f"layer {layer.layer} has an empty KV shape: {layer}")
    exact = group.block_bytes(DTYPES[group.dtype].itemsize)
    return -(-exact // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def allocate_pool(group: KVGroup, num_blocks: int, block_bytes: int, device: torch.device, free: int) -> BlockPool:
    """A zeroed pool. On a CPU its pages are taken from the system only as blocks are first written.

    Raises:
        OutOfMemory: the pool is larger than `free` bytes (a system that overcommits would kill us only later), or the
            allocation was refused.
        BackendError: there would be no block beside the null block.
    """
    if num_blocks < 2:
        raise BackendError(f"a pool needs at least 2 blocks (block 0 is the null block), not {num_blocks}")
    if num_blocks * block_bytes > free:
        raise OutOfMemory(
            f"a pool of {num_blocks} blocks needs {num_blocks * block_bytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB"
            " of memory are free; ask for fewer blocks or a smaller KV dtype"
        )
    with out_of_memory_as_error():
        if device.type == "cpu":  # calloc: torch.zeros would touch every page
            buffer = np.zeros(num_blocks * block_bytes + BLOCK_ALIGNMENT, dtype=np.uint8)
            skip = -buffer.ctypes.data % BLOCK_ALIGNMENT
            data = torch.from_numpy(buffer[skip : skip + num_blocks * block_bytes]).view(num_blocks, block_bytes)
        else:
            data = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    keys, values = layer_views(group, data)
    return BlockPool(group, data, keys, values)


def copy_blocks(pool: KVPool, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (source, destination), every read before any write.

    Raises:
        BackendError: a destination is named twice, or is the null block.
        OutOfMemory: there was no room for the blocks on their way.
    """
    with out_of_memory_as_error():
        try:
            reference.copy_blocks(pool.data, pairs)
        except ValueError as error:
            raise BackendError(str(error)) from error


def layer_views(group: KVGroup, data: torch.Tensor) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Typed views of every layer's keys and values in `data` (see `BlockPool`)."""
    typed = data.view(DTYPES[group.dtype])
    keys: dict[int, torch.Tensor] = {}
    values: dict[int, torch.Tensor] = {}
    offset = 0
    for layer in group.layers:
        for views, size in ((keys, layer.head_dim), (values, layer.value_head_dim)):
            shape = (data.shape[0], group.block_size, layer.num_kv_heads, size)
            strides = (typed.stride(0), size, group.block_size * size, 1)
            views[layer.layer] = typed.as_strided(shape, strides, typed.storage_offset() + offset)
            offset += group.block_size * layer.num_kv_heads * size
    return keys, values
