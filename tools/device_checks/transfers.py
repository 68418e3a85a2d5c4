"""Pinned transfers between host and card: bandwidth each way and both ways, and what they cost a step beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch

from pagefleet.kernels.triton.cache import move_blocks

from .machine import GIB, Machine
from .report import Row


def run(machine: Machine) -> Iterator[Row]:
    """Host to card, card to host, both at once, beside products, and blocks gathered on the way."""
    size = machine.pick(GIB, 1 << 12)
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=not machine.dry) for _ in range(2)]
    held = [torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    streams = [None if machine.dry else torch.cuda.Stream() for _ in range(2)]

    def to_card() -> None:
        with _on(streams[0]):
            held[0].copy_(pinned[0], non_blocking=True)

    def to_host() -> None:
        with _on(streams[1]):
            pinned[1].copy_(held[1], non_blocking=True)

    def both() -> None:
        to_card()
        to_host()

    yield Row("host to card", size / machine.seconds(to_card) / 1e9, "GB/s", "1 GiB, pinned")
    yield Row("card to host", size / machine.seconds(to_host) / 1e9, "GB/s", "1 GiB, pinned")
    yield Row("both at once", 2 * size / machine.seconds(both) / 1e9, "GB/s", "a stream each way")
    yield _overlap(machine, both)
    yield _gathered(machine, pinned[1], streams[1])


def _on(stream: torch.cuda.Stream | None) -> object:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _overlap(machine: Machine, copies: Callable[[], None]) -> Row:
    """How much longer products take with copies beside them, of the time that the copies take alone."""
    side = machine.pick(8192, 16)
    a = torch.randn(side, side, device=machine.device).to(torch.bfloat16)

    def products() -> None:
        for _ in range(machine.pick(40, 1)):
            a @ a

    def together() -> None:
        copies()
        products()

    alone, copying, beside = (machine.seconds(x) for x in (products, copies, together))
    hidden = 100 * (alone + copying - beside) / min(alone, copying)
    note = f"products {alone * 1e3:.1f} ms, copies {copying * 1e3:.1f}, together {beside * 1e3:.1f}"
    return Row("copies hidden behind products", hidden, "%", note)


def _gathered(machine: Machine, pinned: torch.Tensor, stream: torch.cuda.Stream | None) -> Row:
    """Blocks from all over a pool, gathered by a kernel and copied as one run: how a tier is filled."""
    block = machine.pick(1 << 20, 256)
    pool = torch.zeros(machine.pick(4096, 12), block, dtype=torch.uint8, device=machine.device)
    count = len(pinned) // block // 2
    rows = torch.randperm(len(pool), device=machine.device)[:count]
    count = len(rows)
    staging = torch.empty(count, block, dtype=torch.uint8, device=machine.device)
    target = pinned[: count * block].view(count, block)

    def run() -> None:
        with _on(stream):
            move_blocks(pool, staging, sources=rows)
            target.copy_(staging, non_blocking=True)

    rate = count * block / machine.seconds(run) / 1e9
    return Row("blocks gathered and to host", rate, "GB/s", f"{count} blocks of {block >> 10} KiB")
