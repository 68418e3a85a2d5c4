"""What each GPU architecture wants: tile sizes, warps, pipeline stages. A table, so that no kernel asks where it runs.

Shared memory is the most that one program may use: 163, 99 and 227 KiB on compute capability 8.0, 8.6/8.9 and 9.0
(CUDA C++ Programming Guide, table of technical specifications), 64 KiB of LDS on CDNA 1 to 3 and RDNA 3, 160 KiB on
CDNA 4 (their ISA guides).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB = 1024


@dataclass(frozen=True)
class AttentionTiles:
    """Query rows and tokens of one step of the attention kernel, and how it is compiled."""

    block_m: int
    tile: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Target:
    """One architecture.

    Attributes:
        arch: "sm90", "gfx942"; "interpreter" for Triton's.
        vendor: "cuda", "hip" or "interpreter".
        warp_size: threads that run together.
        shared_bytes: shared memory (LDS) that one program may use.
        prefill: tiles for steps with prompts, compute in 16 bits; decode: for steps of single tokens; the wide ones
            are for heads of more than 128 elements.
        full: tiles of 4-byte queries, which are multiplied without matrix cores to keep float32.
    """

    arch: str
    vendor: str
    warp_size: int
    shared_bytes: int
    prefill: AttentionTiles
    wide_prefill: AttentionTiles
    decode: AttentionTiles
    wide_decode: AttentionTiles
    full: AttentionTiles

    def attention(self, group: int, head_dim: int, value_dim: int, query_bytes: int, decode: bool) -> AttentionTiles:
        """Tiles for `group` query heads a KV head and padded head sizes, cut until they fit the shared memory."""
        if max(head_dim, value_dim) > 128:
            tiles = self.wide_decode if decode else self.wide_prefill
        else:
            tiles = self.decode if decode else self.prefill
        if query_bytes == 4 and self.vendor != "interpreter":
            tiles = self.full
        while tiles.block_m < group:
            tiles = replace(tiles, block_m=tiles.block_m * 2)
        while self._shared(tiles, head_dim, value_dim, query_bytes) > self.shared_bytes:
            if tiles.stages > 1:
                tiles = replace(tiles, stages=tiles.stages - 1)
            elif tiles.tile > 16:
                tiles = replace(tiles, tile=tiles.tile // 2)
            elif tiles.block_m // 2 >= max(16, group):
                tiles = replace(tiles, block_m=tiles.block_m // 2)
            else:
                break  # the compiler has the last word
        return tiles

    def with_tiles_of(self, other: Target) -> Target:
        """This target, with the tile sizes of another.

        Raises:
            ValueError: the other is another vendor's, or its tiles are made for more shared memory than there is here.
        """
        if other.vendor != self.vendor or other.shared_bytes > self.shared_bytes:
            raise ValueError(
                f"tiles of {other.arch} are for {other.vendor} and {other.shared_bytes // KIB} KiB of shared memory;"
                f" {self.arch} is {self.vendor} with {self.shared_bytes // KIB} KiB"
            )
        names = ("prefill", "wide_prefill", "decode", "wide_decode", "full")
        return replace(self, **{name: getattr(other, name) for name in names})

    def complaints(self, shared_bytes: int, scratch_bytes: int | None) -> list[str]:
        """What is wrong with a kernel that needs this much; nothing, if the list is empty."""
        found = []
        if shared_bytes > self.shared_bytes:
            found.append(f"TOO MUCH shared memory: {shared_bytes} of {self.shared_bytes} bytes")
        if scratch_bytes and scratch_bytes > 16:  # a register or two: ptxas takes them back for occupancy
            found.append(f"SPILLS {scratch_bytes} bytes a thread")
        return found

    @staticmethod
    def _shared(tiles: AttentionTiles, head_dim: int, value_dim: int, query_bytes: int) -> int:
        """Bytes of queries, weights and the pipeline's keys and values, as if all lay in shared memory."""
        buffers = tiles.block_m * (head_dim + tiles.tile)
        return query_bytes * (buffers + tiles.stages * tiles.tile * (head_dim + value_dim))


def _tiles(*sizes: int) -> tuple[AttentionTiles, ...]:
    return tuple(AttentionTiles(*sizes[i : i + 4]) for i in range(0, len(sizes), 4))


# Rows, tokens, warps and stages: of prefill, of prefill with wide heads, of decode, of decode with wide heads, of
# float32. The largest that were compiled without a spill (`tools/compile_kernels.py` shows registers and spills).
# Decode reads memory and has 16 rows, the fewest that matrix cores take; deep pipelines hide the latency.
_SM80 = _tiles(128, 32, 8, 2, 64, 16, 8, 2, 16, 64, 4, 3, 16, 32, 4, 3, 16, 32, 8, 1)
_SM89 = _tiles(64, 32, 4, 2, 64, 16, 8, 2, 16, 64, 4, 2, 16, 64, 4, 2, 16, 32, 8, 1)
# two warpgroups of 64 rows feed Hopper's asynchronous matrix cores
_SM90 = _tiles(128, 64, 8, 2, 64, 32, 8, 2, 16, 64, 4, 3, 16, 32, 4, 3, 16, 32, 8, 1)
# CDNA: 64 threads a wave; one stage, since LDS is small and occupancy hides more
_CDNA2 = _tiles(64, 32, 4, 1, 64, 16, 4, 1, 16, 64, 4, 1, 16, 32, 4, 1, 16, 32, 8, 1)
_CDNA3 = _tiles(128, 32, 4, 1, 64, 16, 4, 1, 16, 64, 4, 1, 16, 32, 4, 1, 16, 32, 8, 1)
_CDNA4 = _tiles(128, 64, 8, 1, 64, 32, 4, 1, 16, 64, 4, 1, 16, 32, 4, 1, 16, 32, 8, 1)
# RDNA 3: 32 threads a wave and at most 256 registers a thread, so more warps share a tile
_RDNA3 = _tiles(64, 32, 8, 1, 16, 16, 8, 1, 16, 32, 8, 1, 16, 16, 8, 1, 16, 16, 4, 1)
# numpy does a tile at once: few large ones are fastest
_INTERPRETER = _tiles(64, 128, 1, 1, 64, 128, 1, 1, 16, 128, 1, 1, 16, 128, 1, 1, 64, 128, 1, 1)

TARGETS = {
    target.arch: target
    for target in (
        Target("sm80", "cuda", 32, 163 * KIB, *_SM80),
        Target("sm86", "cuda", 32, 99 * KIB, *_SM89),
        Target("sm89", "cuda", 32, 99 * KIB, *_SM89),
        Target("sm90", "cuda", 32, 227 * KIB, *_SM90),
        Target("gfx90a", "hip", 64, 64 * KIB, *_CDNA2),
        Target("gfx942", "hip", 64, 64 * KIB, *_CDNA3),
        Target("gfx950", "hip", 64, 160 * KIB, *_CDNA4),
        Target("gfx1100", "hip", 32, 64 * KIB, *_RDNA3),
        Target("interpreter", "interpreter", 1, 1 << 40, *_INTERPRETER),
    )
}


def target_of(arch: str) -> Target:
    """The table's entry. Raises ValueError for an architecture that is not in it."""
    if arch not in TARGETS:
        known = ", ".join(name for name in TARGETS if name != "interpreter")
        raise ValueError(f"GPU architecture '{arch}' is not supported; expected one of: {known}")
    return TARGETS[arch]
