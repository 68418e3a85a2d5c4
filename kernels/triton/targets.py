"""What each GPU architecture wants: tile sizes, warps, pipeline stages. A table, so that no kernel asks where it runs.

Shared memory is the most that one program may use: 163, 99 and 227 KiB on compute capability 8.0, 8.6/8.9 and 9.0
(CUDA C++ Programming Guide, table of technical specifications), 64 KiB of LDS on CDNA 1 to 3 and RDNA 3, 160 KiB on
CDNA 4 (their ISA guides).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

KIB = 1024


@dataclass(frozen=True)
class AttentionTiles:
    """Query rows and tokens of one step of the attention kernel, and how it is compiled."""

    block_m: int
    tile: int
    warps: int
    stages: int
    options: dict[str, int] = field(default_factory=dict)  # compiler options that only this vendor knows


@dataclass(frozen=True)
class Target:
    """One architecture.

    Attributes:
        arch: "sm90", "gfx942"; "interpreter" for Triton's.
        vendor: "cuda", "hip" or "interpreter".
        warp_size: threads that run together.
        shared_bytes: shared memory (LDS) that one program may use.
        prefill: tiles for steps with prompts, compute in 16 bits; decode: for steps of single tokens.
    """

    arch: str
    vendor: str
    warp_size: int
    shared_bytes: int
    prefill: AttentionTiles
    decode: AttentionTiles

    def attention(self, group: int, head_dim: int, value_dim: int, query_bytes: int, decode: bool) -> AttentionTiles:
        """Tiles for `group` query heads a KV head and padded head sizes, cut until they fit the shared memory.

        Queries of 4 bytes are multiplied without matrix cores, to keep float32: they get small tiles.
        """
        tiles = self.decode if decode else self.prefill
        if query_bytes == 4 and self.vendor != "interpreter":
            tiles = replace(tiles, block_m=16, tile=min(tiles.tile, 32), warps=4, stages=1)
        while tiles.block_m < group:
            tiles = replace(tiles, block_m=tiles.block_m * 2)
        while self._shared(tiles, head_dim, value_dim, query_bytes) > self.shared_bytes:
            if tiles.stages > 1:
                tiles = replace(tiles, stages=tiles.stages - 1)
            elif tiles.tile > 16:
                tiles = replace(tiles, tile=tiles.tile // 2)
            elif tiles.block_m > max(16, group):
                tiles = replace(tiles, block_m=tiles.block_m // 2)
            else:
                break  # the compiler has the last word
        return tiles

    def complaints(self, shared_bytes: int, scratch_bytes: int | None) -> list[str]:
        """What is wrong with a kernel that needs this much; nothing, if the list is empty."""
        found = []
        if shared_bytes > self.shared_bytes:
            found.append(f"TOO MUCH shared memory: {shared_bytes} of {self.shared_bytes} bytes")
        if scratch_bytes:
            found.append(f"SPILLS {scratch_bytes} bytes a thread")
        return found

    @staticmethod
    def _shared(tiles: AttentionTiles, head_dim: int, value_dim: int, query_bytes: int) -> int:
        """Bytes of queries, weights and the pipeline's keys and values, as if all lay in shared memory."""
        buffers = tiles.block_m * (head_dim + tiles.tile)
        return query_bytes * (buffers + tiles.stages * tiles.tile * (head_dim + value_dim))


def _nvidia(arch: str, shared_kib: int, prefill: AttentionTiles) -> Target:
    # decode reads memory: 16 rows are the smallest that the matrix cores take, deep pipelines hide the latency
    return Target(arch, "cuda", 32, shared_kib * KIB, prefill, AttentionTiles(16, 64, 4, 3))


def _amd(arch: str, warp_size: int, lds_kib: int, prefill: AttentionTiles) -> Target:
    return Target(arch, "hip", warp_size, lds_kib * KIB, prefill, AttentionTiles(16, 64, 4, 1, {"waves_per_eu": 2}))


TARGETS = {
    target.arch: target
    for target in (
        _nvidia("sm80", 163, AttentionTiles(64, 64, 4, 3)),
        _nvidia("sm86", 99, AttentionTiles(64, 32, 4, 2)),
        _nvidia("sm89", 99, AttentionTiles(64, 64, 4, 2)),
        # two warpgroups of 64 rows feed Hopper's asynchronous matrix cores
        _nvidia("sm90", 227, AttentionTiles(128, 64, 8, 3)),
        # CDNA: 32 x 32 matrix instructions, 64 threads a wave; one stage, since LDS is small and occupancy hides more
        _amd("gfx90a", 64, 64, AttentionTiles(64, 32, 4, 1, {"waves_per_eu": 2})),
        _amd("gfx942", 64, 64, AttentionTiles(128, 32, 4, 1, {"waves_per_eu": 2})),
        _amd("gfx950", 64, 160, AttentionTiles(128, 64, 4, 2, {"waves_per_eu": 2})),
        # RDNA 3: 16 x 16 WMMA, 32 threads a wave
        _amd("gfx1100", 32, 64, AttentionTiles(64, 32, 4, 1)),
        # numpy does a tile at once: few large ones are fastest
        Target("interpreter", "interpreter", 1, 1 << 40, AttentionTiles(64, 128, 1, 1), AttentionTiles(16, 128, 1, 1)),
    )
}


def target_of(arch: str) -> Target:
    """The table's entry. Raises ValueError for an architecture that is not in it."""
    if arch not in TARGETS:
        known = ", ".join(name for name in TARGETS if name != "interpreter")
        raise ValueError(f"GPU architecture '{arch}' is not supported; expected one of: {known}")
    return TARGETS[arch]
