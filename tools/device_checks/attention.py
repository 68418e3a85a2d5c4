"""Attention by itself, over the layers of a pool far larger than the caches: decode against the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from pagefleet.backends.base import AttentionArgs, AttentionBatch, Backend, BackendError, GroupTables, KVGroup, LayerKV

from .machine import GIB, Machine
from .report import Row, failure
from .worker import describe

BLOCK = 32
HEADS, KV_HEADS, SIZE = 32, 8, 128  # of an 8B model


@dataclass(frozen=True)
class Case:
    """`sequences` of `context` tokens, of which the first `shared` lie in the same blocks for all."""

    kv: str
    sequences: int
    context: int
    shared: int = 0
    target: float | None = None
    attention: str = "auto"


CASES = (
    Case("bf16", 64, 8192, target=80.0),
    Case("bf16", 8, 8192),
    Case("bf16", 1, 32768),
    Case("bf16", 64, 1024),
    Case("bf16", 64, 8192, shared=7168),  # beyond 100%: the caches serve what sequences share
    Case("int8", 64, 8192),
    Case("fp8_e4m3", 64, 8192),
    *(Case("bf16", 64, 8192, attention=a) for a in ("triton", "flash_attn", "torch_varlen", "flashinfer", "aiter")),
)
DRY_CASES = (Case("bf16", 2, 9, shared=4), Case("int8", 2, 9, attention="flashinfer"))


def run(machine: Machine) -> Iterator[Row]:
    """Decode of each KV dtype; other ways to do attention in turns with ours; prefill."""
    for case in machine.pick(CASES, DRY_CASES):
        yield _decode(machine, case)
    yield _prefill(machine, machine.pick(8192, 9))


def _decode(machine: Machine, case: Case) -> Row:
    name = f"decode, {case.attention}, KV {case.kv}, {case.sequences} of {case.context}"
    name += f", {case.shared} shared" if case.shared else ""
    try:
        backend = machine.backend(attention=case.attention, graphs="off")
        run_layers, read = _layers(machine, backend, case, 1)
        seconds = machine.seconds(run_layers)
    except BackendError as error:  # what is not installed is no fault
        return Row(name, note=f"not here: {error}") if case.attention != "auto" else failure(name, describe(error))
    except Exception as error:
        return failure(name, describe(error))
    share = 100 * read / seconds / machine.copy_bytes_per_s
    note = f"{read / seconds / 1e9:,.0f} GB/s; {backend.capabilities().kernels['attention']}"
    return Row(name, share, "% of copy bandwidth", note, at_least=case.target)


def _prefill(machine: Machine, tokens: int) -> Row:
    name = f"prefill, one prompt of {tokens}"
    try:
        run_layers, _ = _layers(machine, machine.backend(graphs="off"), Case("bf16", 1, tokens), tokens)
        seconds = machine.seconds(run_layers)
    except Exception as error:
        return failure(name, describe(error))
    layers = machine.pick(4, 1)
    flops = layers * 4 * HEADS * SIZE * tokens * (tokens + 1) / 2 / seconds
    return Row(name, 100 * flops / machine.bf16_flops, "% of the bf16 ceiling", f"{flops / 1e12:.0f} TFLOP/s, causal")


def _layers(machine: Machine, backend: Backend, case: Case, new: int) -> tuple[Callable[[], object], float]:
    """A walk over all layers of a pool, and the bytes of keys and values that its queries see."""
    sequences, context = case.sequences, case.context
    machine.free_memory()
    heads, kv_heads, size, block = machine.pick((HEADS, KV_HEADS, SIZE, BLOCK), (4, 2, 16, 4))
    number = machine.pick(4, 1)
    layers = tuple(LayerKV(i, kv_heads, size, size) for i in range(number))
    group = KVGroup(layers, None, machine.pick(case.kv, "fp32" if case.kv == "bf16" else case.kv), block)
    each = -(-context // block)
    most = machine.pick(int(48 * GIB), 1 << 16) // backend.block_bytes(group)
    blocks = min(sequences * each, most - 1)
    pool = backend.allocate_pool(group, blocks + 1)
    tables = (torch.randperm(sequences * each, generator=torch.Generator().manual_seed(2)) % blocks + 1).view(-1, each)
    tables[:, : case.shared // block] = tables[0, : case.shared // block]
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
