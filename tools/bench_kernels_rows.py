"""How fast the CPU backend's fused row operations and token selection are here, beside their plain torch forms.

    python tools/bench_kernels_rows.py [--isa avx2] [--threads 2] [--only draw] [--rows 1 64]

One call each in turns with torch's, the interpreter's part included; the best of each is printed, in microseconds. The
sizes are those of SmolLM2-135M in bf16; logits are as peaked as a language model's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pagefleet.backends import host, registry
from pagefleet.backends.base import AttentionBatch, BackendOptions, GroupTables, KVGroup, LayerKV
from pagefleet.backends.ops import Heads, Norm, Rotary
from pagefleet.backends.selection import Draw
from pagefleet.backends.torch_ops import TorchOps

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, VOCAB = 576, 1536, 9, 3, 64, 49152
SECONDS = 0.3  # for each case and implementation

Case = tuple[str, Callable[[], Any], Callable[[], Any]]


def cases(rows: int) -> Iterator[Case]:
    """Name, ours, torch's."""
    backend = registry.create("cpu", BackendOptions(threads=torch.get_num_threads()))
    ours, plain = backend.ops(), TorchOps(backend)
    norm = Norm("rms", torch.ones(HIDDEN), None, 1e-5)
    x, residual, gate_up = (torch.randn(rows, n).bfloat16() for n in (HIDDEN, HIDDEN, 2 * INNER))
    yield "norm", lambda: ours.norm(x, norm), lambda: plain.norm(x, norm)
    yield "add_norm", lambda: ours.add_norm(x, residual, norm), lambda: plain.add_norm(x, residual, norm)
    for name in ("silu", "gelu", "gelu_tanh"):
        yield (
            f"gated {name}",
            lambda name=name: ours.gated_activation(gate_up, name),
            lambda name=name: plain.gated_activation(gate_up, name),
        )
    yield from query_and_store(backend, plain, rows)
    yield from selection(ours, plain, rows)


def query_and_store(backend: Any, plain: TorchOps, rows: int) -> Iterator[Case]:
    """Rotation and KV write of one decode step's merged projections."""
    pool = backend.allocate_pool(KVGroup((LayerKV(0, KV_HEADS, SIZE, SIZE),), None, "bf16", 16), rows + 1)
    tables = torch.arange(1, rows + 1, dtype=torch.int32)[:, None]
    starts, lengths = torch.arange(rows + 1, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    plan = backend.plan(AttentionBatch(starts, lengths, (GroupTables(tables[:, 0].long() * 16, tables),)), (pool,))
    angles = torch.randn(rows, SIZE // 2)
    qkv, rotary = torch.randn(rows, (HEADS + 2 * KV_HEADS) * SIZE).bfloat16(), Rotary(angles.cos(), angles.sin())
    heads = Heads(HEADS, KV_HEADS, SIZE, SIZE)
    arguments = (plan, 0, 0, qkv, heads, rotary)
    yield (
        "query_and_store",
        lambda: backend.ops().query_and_store(*arguments),
        lambda: plain.query_and_store(*arguments),
    )


def selection(ours: Any, plain: TorchOps, rows: int) -> Iterator[Case]:
    """Tokens of bf16 logits."""
    mine, torchs = ours.selection(), plain.selection()
    logits = (torch.randn(rows, VOCAB).exp() * 3).bfloat16()
    _, largest = mine.largest(logits)
    yield "largest", lambda: mine.largest(logits), lambda: torchs.largest(logits)
    for filters in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.95, "top_k": 50, "temperature": 0.7}):
        draws = [Draw(i, largest[i], 977 * i, **filters) for i in range(rows)]  # type: ignore[arg-type]
        yield (
            f"draw {filters or ''}",
            lambda draws=draws: mine.draw(logits, draws),
            lambda draws=draws: torchs.draw(logits, draws),
        )
    every = list(range(rows))
    yield "score", lambda: mine.score(logits, every, every), lambda: torchs.score(logits, every, every)


def best_times(calls: tuple[Callable[[], Any], ...]) -> list[float]:
    """The best of each in seconds, run in turns: what else runs on the machine only ever adds."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + SECONDS * len(calls)
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            call()  # after the other's turn: memory and branches are warm again
            started = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - started)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="run on this instruction set")
    parser.add_argument("--threads", type=int, default=host.usable_threads())
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 2048], help="rows of a step")
    options = parser.parse_args()
    if options.isa:
        os.environ[host.ISA_ENV] = options.isa
    torch.set_num_threads(options.threads)
    print(f"{host.isa()}, {options.threads} threads")
    with torch.inference_mode():
        for rows in options.rows:
            for name, ours, plain in cases(rows):
                if options.only in name and (rows <= 256 or name.split()[0] not in ("largest", "draw", "score")):
                    mine, theirs = (1e6 * t for t in best_times((ours, plain)))
                    print(f"{rows:5} rows  {name:60} {mine:10.1f} us   torch {theirs:10.1f} us   {theirs / mine:6.2f}x")


if __name__ == "__main__":
    main()
