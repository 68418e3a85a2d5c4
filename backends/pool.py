"""The block pool that torch backends share: one uint8 tensor, and typed strided views of each layer in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagefleet.kernels import reference

from .base import BackendError, KVGroup, KVPool, LayerKV, OutOfMemory, out_of_memory_as_error

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.uint8,  # the bits, which kernels code and decode
    "fp8_e5m2": torch.uint8,
}
SCALED = ("int8", "fp8_e4m3", "fp8_e5m2")  # kept with one float32 scale for each token and KV head
PLAIN = ("fp32", "bf16", "fp16", "int8")  # what plain torch can read
BLOCK_ALIGNMENT = 128


@dataclass
class BlockPool:
    """All blocks of one KV group.

    In a block lies layer after layer: keys, then values, each head after head and token by token, so that what one
    head reads lies together. A layer of an 8-bit pool begins with its scales, one float32 for each token and head: of
    the keys, head after head and token by token, then of the values. Its end is padded to a multiple of 4 bytes.

    Attributes:
        data: uint8 [num_blocks, block_bytes].
        keys: layer -> [num_blocks, block_size, Hkv, D] view; values: the same with Dv.
        key_scales, value_scales: layer -> float32 [num_blocks, block_size, Hkv] view; empty unless 8-bit.
    """

    group: KVGroup
    data: torch.Tensor
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    key_scales: dict[int, torch.Tensor]
    value_scales: dict[int, torch.Tensor]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.data.shape[0]


def padded_block_bytes(group: KVGroup, backend: str, kv_dtypes: tuple[str, ...] = PLAIN) -> int:
    """Bytes of one block, rounded up to 128. Raises BackendError for a dtype or a size that cannot be kept."""
    if group.dtype not in kv_dtypes:
        raise BackendError(f"backend '{backend}' cannot keep KV as '{group.dtype}'; choose one of {sorted(kv_dtypes)}")
    if group.block_size < 1:
        raise BackendError(f"block_size must be at least 1, not {group.block_size}")
    for layer in group.layers:
        if min(layer.num_kv_heads, layer.head_dim, layer.value_head_dim) < 1:
            raise BackendError(f"layer {layer.layer} has an empty KV shape: {layer}")
    exact = sum(layer_bytes(group, layer) for layer in group.layers)
    return -(-exact // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def layer_bytes(group: KVGroup, layer: LayerKV) -> int:
    """Bytes of one layer in a block, its scales included."""
    rows = group.block_size * layer.num_kv_heads
    data = rows * (layer.head_dim + layer.value_head_dim) * DTYPES[group.dtype].itemsize
    return 2 * 4 * rows + -(-data // 4) * 4 if group.dtype in SCALED else data


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
    return with_views(group, data)


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


def with_views(group: KVGroup, data: torch.Tensor) -> BlockPool:
    """A pool over `data` uint8 [num_blocks, block_bytes] with typed views of every layer."""
    pool = BlockPool(group, data, {}, {}, {}, {})
    typed = data.view(DTYPES[group.dtype])
    scales = data.view(torch.float32) if group.dtype in SCALED else None
    offset = 0

    def view(of: torch.Tensor, begin: int, heads: int, *size: int) -> torch.Tensor:
        rest = size[0] if size else 1
        shape = (data.shape[0], group.block_size, heads, *size)
        strides = (of.stride(0), rest, group.block_size * rest, *(1 for _ in size))
        return of.as_strided(shape, strides, of.storage_offset() + begin // of.element_size())

    for layer in group.layers:
        begin, heads, rows = offset, layer.num_kv_heads, group.block_size * layer.num_kv_heads
        if scales is not None:
            for scale_views in (pool.key_scales, pool.value_scales):
                scale_views[layer.layer] = view(scales, begin, heads)
                begin += 4 * rows
        for views, size in ((pool.keys, layer.head_dim), (pool.values, layer.value_head_dim)):
            views[layer.layer] = view(typed, begin, heads, size)
            begin += rows * size * typed.element_size()
        offset += layer_bytes(group, layer)
    return pool
