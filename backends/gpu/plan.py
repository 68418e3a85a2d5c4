"""What a step looks like from the host, without asking the device: shapes alone decide how kernels are launched."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet.kernels.triton.formats import QuantizedViews

from ..base import AttentionBatch
from ..pool import SCALED, BlockPool

MOST_SPLITS = 64
TILES_A_SPLIT = 4  # fewer are not worth a program and its share of the merge


@dataclass(frozen=True)
class GpuPlan:
    """A step and its pools. `decode`: every sequence has at most one new token, so small tiles serve best."""

    batch: AttentionBatch
    pools: tuple[BlockPool, ...]
    decode: bool


def quantized_views(pool: BlockPool, layer: int) -> QuantizedViews | None:
    """The scales of a layer in an 8-bit pool; None for others."""
    if pool.group.dtype not in SCALED:
        return None
    scales = (pool.key_scales[layer].unsqueeze(-1), pool.value_scales[layer].unsqueeze(-1))
    return QuantizedViews(pool.group.dtype, *scales)


def number_of_splits(programs: int, most_tokens: int, tile: int, processors: int) -> int:
    """Programs that share the KV of one query block, a power of two: enough to fill the processors twice.

    Args:
        programs: that there are without splitting.
        most_tokens: that a sequence may have (the block table's width; the real lengths are on the device).
    """
    wanted = min(2 * processors // max(programs, 1), most_tokens // (TILES_A_SPLIT * tile), MOST_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1
