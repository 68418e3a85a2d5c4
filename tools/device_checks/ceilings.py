"""What the card can do at most: copies through its memory, and matrix products."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .machine import Machine
from .report import Row, failure
from .worker import describe


def run(machine: Machine) -> Iterator[Row]:
    """Copy bandwidth, then products of each dtype."""
    yield Row("copy, read and written", machine.copy_bytes_per_s / 1e9, "GB/s", "the ceiling of what only moves data")
    yield Row("product, bf16", machine.bf16_flops / 1e12, "TFLOP/s", "8192 x 8192 x 8192: the ceiling of prefill")
    for dtype in (torch.float16, torch.float32):
        yield Row(f"product, {str(dtype).removeprefix('torch.')}", machine.product_flops(dtype) / 1e12, "TFLOP/s")
    try:
        yield Row("product, fp8_e4m3", _scaled_flops(machine) / 1e12, "TFLOP/s", "scaled, to bf16")
    except Exception as error:  # a card or a torch without scaled products
        yield failure("product, fp8_e4m3", describe(error))


def _scaled_flops(machine: Machine) -> float:
    size = machine.pick(8192, 32)
    a, b = (torch.randn(size, size, device=machine.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=machine.device)
    run = lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * size**3 / machine.seconds(run, inner=8)
