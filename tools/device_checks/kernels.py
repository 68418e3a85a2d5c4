"""Every kernel on the card against its specification in float64, around poisoned memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagefleet.backends.base import AttentionArgs, AttentionBatch, Backend, GroupTables, KVGroup, LayerKV
from pagefleet.backends.ops import Heads, Norm, Rotary
from pagefleet.backends.pool import BlockPool
from pagefleet.backends.selection import Draw
from pagefleet.kernels import reference

from .machine import GIB, Machine
from .report import Row, failure
from .worker import describe

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1.6e-2, torch.float16: 3e-3}
LENGTHS, COUNTS = [700, 1, 33, 0, 130, 300], [1, 1, 5, 0, 40, 1]  # a mixed step: decodes, a chunk, no query, a prompt
DRY_LENGTHS, DRY_COUNTS = [9, 1, 0], [1, 1, 0]


@dataclass(frozen=True)
class Case:
    """An attention step."""

    name: str
    kv: str = "bf16"
    compute: torch.dtype = torch.bfloat16
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    decode: bool = False
    args: tuple[tuple[str, Any], ...] = ()


CASES = (
    Case("mixed, bf16"),
    Case("decode, split KV, bf16", decode=True),
    Case("mixed, int8", kv="int8"),
    Case("decode, int8", kv="int8", decode=True),
    Case("mixed, fp8_e4m3", kv="fp8_e4m3"),
    Case("decode, fp8_e5m2", kv="fp8_e5m2", decode=True),
    Case("window and soft cap, heads of 256", heads=4, kv_heads=1, size=256, args=(("window", 100), ("softcap", 30.0))),
    Case("window, decode", decode=True, args=(("window", 64),)),
    Case("sinks, heads of 64", heads=64, size=64, args=(("sinks", True),)),
    Case("sinks, decode", decode=True, args=(("sinks", True),)),
    Case("odd heads, fp16", kv="fp16", compute=torch.float16, heads=9, kv_heads=3, size=80),
    Case("mixed, fp32", kv="fp32", compute=torch.float32, heads=9, kv_heads=3, size=64),
)


def run(machine: Machine) -> Iterator[Row]:
    """Attention in its variants, then what is around it."""
    backend = machine.backend(graphs="off")
    for case in machine.pick(CASES, CASES[2:4]):
        yield from _guarded(f"attention: {case.name}", lambda case=case: _attention(machine, backend, case))
    yield from _guarded("attention beyond 2 GiB", lambda: _far_offsets(machine, backend))
    for kind in machine.pick(("int8", "fp8_e4m3", "fp8_e5m2"), ("int8",)):
        yield from _guarded(f"KV write: {kind}", lambda kind=kind: _write(machine, backend, kind))
    yield from _guarded("norm, rotation and KV write", lambda: _heads(machine, backend))
    yield from _guarded("residual and norm", lambda: _norm(machine, backend))
    yield from _guarded("gated activation", lambda: _gated(machine, backend))
    yield from _guarded("block copies", lambda: _copies(machine, backend))
    yield from _guarded("sampling", lambda: _sampling(machine, backend))
    names = ", ".join(f"{op}: {name}" for op, name in sorted(backend.capabilities().kernels.items()))
    fell_back = [op for op, name in backend.capabilities().kernels.items() if name == "torch"]
    yield Row("kernels that gave way to torch", len(fell_back), "", names, at_most=0)


def _guarded(name: str, check: Any) -> Iterator[Row]:
    try:
        error, bound, note = check()
        yield Row(name, error, "largest error", note, at_most=bound)
    except Exception as error:
        yield failure(name, describe(error))


def _group(kv: str, kv_heads: int, size: int, block_size: int = 16) -> KVGroup:
    return KVGroup((LayerKV(0, kv_heads, size, size),), None, kv, block_size)


def _places(
    machine: Machine, lengths: Sequence[int], counts: Sequence[int], tables: torch.Tensor, block_size: int
) -> AttentionBatch:
    """A step whose last `counts` tokens of each sequence are new."""
    slots = [
        tables[s, torch.arange(n - c, n) // block_size].long() * block_size + torch.arange(n - c, n) % block_size
        for s, (n, c) in enumerate(zip(lengths, counts, strict=True))
    ]
    return AttentionBatch(
        torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=machine.device),
        torch.tensor(lengths, dtype=torch.int32, device=machine.device),
        (GroupTables(torch.cat(slots).to(machine.device), tables.to(machine.device)),),
    )


def _tables(lengths: Sequence[int], block_size: int, first: int = 1) -> torch.Tensor:
    """Block tables [S, B] with blocks in random order from `first` on."""
    counts = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7)) + first
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for s, own in enumerate(order.split(counts)):
        tables[s, : counts[s]] = own
    return tables


def _exact(pool: BlockPool) -> list[torch.Tensor]:
    """Keys and values of layer 0 as the pool keeps them, float64 on the CPU; NaN where nothing was written."""
    kept = []
    for cache, scales in ((pool.keys[0], pool.key_scales.get(0)), (pool.values[0], pool.value_scales.get(0))):
        codes = cache.cpu()
        if scales is None:
            kept.append(codes.double())
            continue
        codes = codes.view(reference.quantized.CODES[pool.group.dtype])
        kept.append(codes.double() * scales.cpu().double()[..., None])
    return kept


def _attention(machine: Machine, backend: Backend, case: Case) -> tuple[float, float, str]:
    lengths, counts = machine.pick((LENGTHS, COUNTS), (DRY_LENGTHS, DRY_COUNTS))
    if case.decode:
        counts = [min(1, n) for n in lengths]
    return _attention_step(machine, backend, case, lengths, counts, sum(lengths) // 16 + len(lengths) + 4, 1)


def _attention_step(
    machine: Machine, backend: Backend, case: Case, lengths: list[int], counts: list[int], blocks: int, first: int
) -> tuple[float, float, str]:
    pool = backend.allocate_pool(_group(case.kv, case.kv_heads, case.size), blocks)
    tables = _tables(lengths, 16, first)
    assert isinstance(pool, BlockPool)
    pool.data[first:].fill_(255)  # not a number in every dtype and in the scales
    generator = torch.Generator().manual_seed(1)

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, case.size, generator=generator).to(machine.device, case.compute)

    whole = _places(machine, lengths, lengths, tables, 16)
    backend.write_kv(
        backend.plan(whole, (pool,)), 0, 0, random(sum(lengths), case.kv_heads), random(sum(lengths), case.kv_heads)
    )
    step, query = _places(machine, lengths, counts, tables, 16), random(sum(counts), case.heads)
    settings = dict(case.args)
    if settings.get("sinks"):
        settings["sinks"] = torch.linspace(-3, 3, case.heads, device=machine.device).to(case.compute)
    args = AttentionArgs(case.size**-0.5, **settings)
    got = backend.attention(backend.plan(step, (pool,)), 0, 0, query, args).cpu().double()
    view = BlockPool(
        pool.group,
        pool.data[first:],
        *({0: x[0][first:]} if 0 in x else {} for x in (pool.keys, pool.values, pool.key_scales, pool.value_scales)),
    )
    shifted = torch.where(tables == 0, tables, tables - first + 1)
    keys, values = (torch.cat([torch.full_like(x[:1], torch.nan), x]) for x in _exact(view))
    if settings.get("sinks") is not None:
        settings["sinks"] = settings["sinks"].cpu().double()
    expected = reference.paged_attention(
        query.cpu().double(), keys, values, shifted, step.query_starts.cpu(), step.kv_lengths.cpu(), scale=args.scale,
        **settings,
    )  # fmt: skip
    return _error(got, expected), TOLERANCE[case.compute], f"{sum(counts)} queries, {sum(lengths)} tokens"


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative where the expected value is above 1; infinite for what is not a number."""
    difference = (got - expected).abs() / expected.abs().clamp(min=1.0)
    return float(difference.nan_to_num(torch.inf).max()) if difference.numel() else 0.0


def _far_offsets(machine: Machine, backend: Backend) -> tuple[float, float, str]:
    case = Case("far", kv="int8", heads=8, kv_heads=2, size=64)
    block = backend.block_bytes(_group(case.kv, case.kv_heads, case.size))
    first = machine.pick(5 * GIB // block, 1)
    lengths, counts = machine.pick(([40, 9], [3, 1]), ([9], [1]))
    error, bound, _ = _attention_step(machine, backend, case, lengths, counts, first + 8, first)
    return error, bound, f"blocks from {first * block / GIB:.1f} GiB on"


def _write(machine: Machine, backend: Backend, kind: str) -> tuple[float, float, str]:
    tokens, heads, size = machine.pick((200, 8, 128), (3, 2, 16))
    pool = backend.allocate_pool(_group(kind, heads, size), tokens // 16 + 2)
    key = (torch.randn(tokens, heads, size) * torch.logspace(-5, 5, heads)[:, None]).bfloat16()
    tables = _tables([tokens], 16)
    step = _places(machine, [tokens], [tokens], tables, 16)
    backend.write_kv(backend.plan(step, (pool,)), 0, 0, key.to(machine.device), key.to(machine.device))
    codes, scales = reference.quantize(key, kind)
    at = torch.arange(tokens)
    place = (tables[0, at // 16].long(), at % 16)
    assert isinstance(pool, BlockPool)
    wrong = (pool.keys[0].cpu()[place] != codes.view(pool.keys[0].dtype)).sum()
    wrong += (pool.value_scales[0].cpu()[place] != scales[..., 0]).sum()
    return float(wrong), 0.0, f"codes and scales that differ, of {codes.numel()}"


def _heads(machine: Machine, backend: Backend) -> tuple[float, float, str]:
    tokens, heads, kv_heads, size = machine.pick((50, 32, 8, 128), (2, 4, 2, 16))
    weight = torch.rand(size) + 0.5
    angle = torch.rand(tokens, size // 2) * 6
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size)
    pool = backend.allocate_pool(_group("fp32", kv_heads, size), tokens // 16 + 2)
    tables = _tables([tokens], 16)
    plan = backend.plan(_places(machine, [tokens], [tokens], tables, 16), (pool,))
    norm = Norm("rms", weight.to(machine.device), None, 1e-6)
    rotary = Rotary(angle.cos().to(machine.device), angle.sin().to(machine.device))
    shape = Heads(heads, kv_heads, size, size, norm, norm)
    got = backend.ops().query_and_store(plan, 0, 0, qkv.to(machine.device), shape, rotary)
    caches = [torch.zeros(len(pool.data), 16, kv_heads, size, dtype=torch.float64) for _ in range(2)]
    at = torch.arange(tokens)
    slots = tables[0, at // 16].long() * 16 + at % 16
    parameters = ("rms", weight.double(), None, 1e-6)
    expected = reference.query_and_store(
        qkv.double(), heads, *caches, slots, cos=angle.cos().double(), sin=angle.sin().double(),
        norms=(parameters, parameters, None),
    )  # fmt: skip
    assert isinstance(pool, BlockPool)
    stored = max(_error(x[0].cpu().double(), y) for x, y in ((pool.keys, caches[0]), (pool.values, caches[1])))
    return max(_error(got.cpu().double(), expected), stored), 1e-4, "queries, keys and values, fp32"


def _norm(machine: Machine, backend: Backend) -> tuple[float, float, str]:
    rows, size = machine.pick((60, 4096), (2, 48))
    x, residual = (torch.randn(rows, size).bfloat16() for _ in range(2))
    weight = torch.rand(size) + 0.5
    norm = Norm("rms", weight.to(machine.device), None, 1e-5)
    out, total = backend.ops().add_norm(x.to(machine.device), residual.to(machine.device).clone(), norm)
    expected = reference.norm(total.cpu().double(), "rms", weight.double(), None, 1e-5)
    added = _error(total.cpu().double(), x.double() + residual.double())
    return max(added, _error(out.cpu().double(), expected)), TOLERANCE[torch.bfloat16], "bf16"


def _gated(machine: Machine, backend: Backend) -> tuple[float, float, str]:
    x = torch.randn(*machine.pick((60, 2 * 14336), (2, 64))).bfloat16()
    worst = 0.0
    for name in ("silu", "gelu_tanh", "gelu"):
        got = backend.ops().gated_activation(x.to(machine.device), name)
        worst = max(worst, _error(got.cpu().double(), reference.activation(x.double(), name, gated=True)))
    return worst, TOLERANCE[torch.bfloat16], "silu, gelu, gelu_tanh; bf16"


def _copies(machine: Machine, backend: Backend) -> tuple[float, float, str]:
    pool = backend.allocate_pool(_group("bf16", 2, 64), 12)
    pool.data.copy_(torch.randint(0, 256, pool.data.shape, dtype=torch.uint8))
    expected, pairs = pool.data.cpu().clone(), [(1, 2), (2, 3), (1, 7), (9, 11)]
    backend.copy_blocks(pool, pairs)
    reference.copy_blocks(expected, pairs)
    return float((pool.data.cpu() != expected).sum()), 0.0, "bytes that differ"


def _sampling(machine: Machine, backend: Backend) -> tuple[float, float, str]:
    rows, vocab = machine.pick((8, 128256), (2, 300))
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3
    selection = backend.ops().selection()
    ids, largest = selection.largest(logits.to(machine.device))
    settings = [(1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 200, 0.8, 0.01)]
    draws = [
        Draw(r, largest[r], 1000 + 17 * i, *rule)
        for i, (r, rule) in enumerate(itertools.product(range(rows), settings))
    ]
    drawn = selection.draw(logits.to(machine.device), draws)
    expected = [
        reference.draw_token(logits[d.row], d.largest, d.key, d.temperature, d.top_k, d.top_p, d.min_p) for d in draws
    ]
    wrong = sum(a != b for a, b in zip(ids + drawn, logits.argmax(-1).tolist() + expected, strict=True))
    scores = selection.score(logits.to(machine.device), list(range(rows)), ids)
    exact = torch.log_softmax(logits.double(), -1)
    wrong += sum(s.rank != 1 or abs(s.logprob - float(exact[r, ids[r]])) > 1e-4 for r, s in enumerate(scores))
    return float(wrong), 0.0, f"tokens, ranks and log-probabilities that differ, of {len(draws) + 2 * rows}"
