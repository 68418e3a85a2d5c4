"""Attention by itself, over the layers of a pool far larger than the caches: decode against the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pagefleet.backends.base import AttentionArgs, AttentionBatch, Backend, BackendError, GroupTables, KVGroup, LayerKV

from .machine import GIB, Machine
from .report import Row, failure
from .worker import describe

BLOCK = 32
HEADS, KV_HEADS, SIZE = 32, 8, 128  # of an 8B model

CASES: tuple[tuple[str, int, int, float | None], ...] = (  # KV dtype, sequences, context, target
    ("bf16", 64, 8192, 80.0),
    ("bf16", 8, 8192, None),
    ("bf16", 1, 32768, None),
    ("bf16", 64, 1024, None),
    ("int8", 64, 8192, None),
    ("fp8_e4m3", 64, 8192, None),
)


def run(machine: Machine) -> Iterator[Row]:
    """Decode of each KV dtype; other ways to do attention in turns with ours; prefill."""
    for kv, sequences, context, target in machine.pick(CASES, CASES[:1]):
        yield _decode(machine, "auto", kv, sequences, context, target)
    for other in machine.pick(("triton", "flash_attn", "torch_varlen", "flashinfer", "aiter"), ("flashinfer",)):
        yield _decode(machine, other, "bf16", 64, 8192, None)
    yield _prefill(machine, machine.pick(8192, 9))


def _decode(machine: Machine, attention: str, kv: str, sequences: int, context: int, target: float | None) -> Row:
    sequences, context = machine.pick((sequences, context), (2, 9))
    kv = machine.pick(kv, "fp32" if kv == "bf16" else kv)
    name = f"decode, {attention}, KV {kv}, {sequences} of {context}"
    try:
        backend = machine.backend(attention=attention, graphs="off")
        run_layers, read = _layers(machine, backend, kv, sequences, context, 1)
        seconds = machine.seconds(run_layers)
    except BackendError as error:  # what is not installed is no fault
        return Row(name, note=f"not here: {error}") if attention != "auto" else failure(name, describe(error))
    except Exception as error:
        return failure(name, describe(error))
    share = 100 * read / seconds / machine.copy_bytes_per_s
    note = f"{read / seconds / 1e9:,.0f} GB/s; {backend.capabilities().kernels['attention']}"
    return Row(name, share, "% of copy bandwidth", note, at_least=None if machine.dry else target)


def _prefill(machine: Machine, tokens: int) -> Row:
    name = f"prefill, one prompt of {tokens}"
    try:
        run_layers, _ = _layers(machine, machine.backend(graphs="off"), machine.pick("bf16", "fp32"), 1, tokens, tokens)
        seconds = machine.seconds(run_layers)
    except Exception as error:
        return failure(name, describe(error))
    layers = machine.pick(4, 1)
    flops = layers * 4 * HEADS * SIZE * tokens * (tokens + 1) / 2 / seconds
    return Row(name, 100 * flops / machine.bf16_flops, "% of the bf16 ceiling", f"{flops / 1e12:.0f} TFLOP/s, causal")


def _layers(
    machine: Machine, backend: Backend, kv: str, sequences: int, context: int, new: int
) -> tuple[Callable[[], object], float]:
    """A walk over all layers of a pool, and the bytes of keys and values that it reads."""
    heads, kv_heads, size, block = machine.pick((HEADS, KV_HEADS, SIZE, BLOCK), (4, 2, 16, 4))
    number = machine.pick(4, 1)
    layers = tuple(LayerKV(i, kv_heads, size, size) for i in range(number))
    group = KVGroup(layers, None, kv, block)
    each = -(-context // block)
    most = machine.pick(int(48 * GIB), 1 << 16) // backend.block_bytes(group)
    blocks = min(sequences * each, most - 1)
    pool = backend.allocate_pool(group, blocks + 1)
    tables = (torch.randperm(sequences * each, generator=torch.Generator().manual_seed(2)) % blocks + 1).view(-1, each)
    device = machine.device
    batch = AttentionBatch(
        torch.arange(0, (sequences + 1) * new, new, dtype=torch.int32, device=device),
        torch.full((sequences,), context, dtype=torch.int32, device=device),
        (GroupTables(torch.zeros(sequences * new, dtype=torch.int64, device=device), tables.to(device, torch.int32)),),
    )
    plan = backend.plan(batch, (pool,))
    query = torch.randn(sequences * new, heads, size, device=device).to(machine.pick(torch.bfloat16, torch.float32))
    args = AttentionArgs(size**-0.5)
    read = sequences * context * backend.block_bytes(group) / block
    return lambda: [backend.attention(plan, 0, i, query, args) for i in range(number)], read
