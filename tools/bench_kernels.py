"""How fast the CPU backend's attention is on this machine, beside what the machine can do and the plain torch path.

    python tools/bench_kernels.py [--isa avx2] [--threads 2] [--only decode] [--quick]

Decode is held to the measured read bandwidth, prefill to the measured ceiling of products. Every case walks over the
layers of a pool that no cache holds, as a step does; ours and torch's run in turns, and the best of each is printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import dataclass

import torch

from pagefleet.backends import host, registry
from pagefleet.backends.base import (
    AttentionArgs,
    AttentionBatch,
    Backend,
    BackendOptions,
    GroupTables,
    KVGroup,
    LayerKV,
)
from pagefleet.runtime.bench.floor import Ceilings, measure_ceilings

KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """`sequences` of `context` tokens, the last `new` of them queries; the first `shared` lie in common blocks."""

    name: str
    sequences: int
    context: int
    new: int
    kv: str
    compute: str = "bf16"
    shared: int = 0
    layers: int = 8
    heads: int = 9
    kv_heads: int = 3
    size: int = 64
    block_size: int = 16

    @property
    def read_bytes(self) -> int:
        """Keys and values that a layer must read, shared ones once."""
        tokens = self.sequences * (self.context - self.shared) + self.shared
        return tokens * self.kv_heads * 2 * (self.size * KV_BYTES[self.kv] + (4 if self.kv == "int8" else 0))

    @property
    def operations(self) -> int:
        """Of a layer's two products, two for each multiply-add."""
        seen = self.new * (2 * self.context - self.new + 1) // 2
        return self.sequences * seen * self.heads * self.size * 4


CASES = [
    Case("decode, 1 of 1k", 1, 1024, 1, "bf16", layers=30),
    Case("decode, 1 of 4k", 1, 4096, 1, "bf16", layers=30),
    Case("decode, 64 of 1k", 64, 1024, 1, "bf16"),
    Case("decode, 16 of 4k", 16, 4096, 1, "bf16"),
    Case("decode, 64 of 1k, int8", 64, 1024, 1, "int8"),
    Case("decode, 16 of 4k, int8", 16, 4096, 1, "int8"),
    Case("decode, 16 of 4k, fp32", 16, 4096, 1, "fp32", "fp32", layers=4),
    Case("decode, 64 of 576, 512 shared", 64, 576, 1, "bf16", shared=512),
    Case("decode, 16 of 4k, 32 heads on 8 of 128", 16, 4096, 1, "bf16", layers=2, heads=32, kv_heads=8, size=128),
    Case("prefill, 4k", 1, 4096, 4096, "bf16", layers=2),
    Case("prefill, 4k, int8", 1, 4096, 4096, "int8", layers=2),
    Case("prefill, 4k, fp32", 1, 4096, 4096, "fp32", "fp32", layers=2),
    Case("prefill, 2k behind 2k", 1, 4096, 2048, "bf16", layers=2),
    Case("prefill, 16 of 256", 16, 256, 256, "bf16", layers=4),
]


class Step:
    """A case on one backend, ready to run."""

    def __init__(self, backend: Backend, case: Case) -> None:
        self.backend, self.case = backend, case
        layers = tuple(LayerKV(i, case.kv_heads, case.size, case.size) for i in range(case.layers))
        group = KVGroup(layers, None, case.kv, case.block_size)
        own = -(-case.context // case.block_size)
        common = case.shared // case.block_size
        count = common + case.sequences * (own - common)
        self.pool = backend.allocate_pool(group, count + 1)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int() + 1
        rest = order[common:].view(case.sequences, -1)
        tables = torch.cat([order[:common].expand(case.sequences, -1), rest], 1)
        starts = torch.arange(case.sequences + 1).int() * case.new
        lengths = torch.full((case.sequences,), case.context).int()
        self.query = torch.randn(case.sequences * case.new, case.heads, case.size).to(TORCH_DTYPES[case.compute])
        tokens = torch.arange(case.context)
        for table in tables:
            slots = table[tokens // case.block_size].long() * case.block_size + tokens % case.block_size
            batch = AttentionBatch(starts[:2] * 0, lengths[:1] * 0, (GroupTables(slots, tables[:1]),))
            key, value = torch.randn(2, case.context, case.kv_heads, case.size).to(TORCH_DTYPES[case.compute]).unbind()
            plan = backend.plan(batch, (self.pool,))
            for layer in range(case.layers):
                backend.write_kv(plan, 0, layer, key, value)
        self.batch = AttentionBatch(starts, lengths, (GroupTables(slots, tables.contiguous()),))

    def run(self) -> float:
        """Seconds for a layer, the plan of the step included."""
        args = AttentionArgs(self.case.size**-0.5)
        started = time.perf_counter()
        plan = self.backend.plan(self.batch, (self.pool,))
        for layer in range(self.case.layers):
            self.backend.attention(plan, 0, layer, self.query, args)
        return (time.perf_counter() - started) / self.case.layers


def best_times(steps: list[Step | None], seconds: float) -> list[float | None]:
    """The best of each, run in turns for about `seconds` in all: what else runs on the machine only ever adds."""
    times: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn >= 3 and time.perf_counter() > end:
            return [min(t[1:]) if t else None for t in times]
        for step, kept in zip(steps, times, strict=True):
            if step is not None:
                kept.append(step.run())
    raise AssertionError


def report(case: Case, ours: float, torch_path: float | None, ceilings: Ceilings) -> str:
    """One line of the table."""
    if case.new == 1:
        rate = case.read_bytes / ours
        reached = f"{rate / 1e9:7.1f} GB/s   {rate / ceilings.read_bytes_per_s:6.1%} of reads"
    else:
        rate, ceiling = case.operations / ours, ceilings.products_per_s[case.compute]
        reached = f"{rate / 1e9:7.0f} GFLOP/s {rate / ceiling:6.1%} of {case.compute} products"
    beside = "" if torch_path is None else f"   torch {torch_path / ours:5.2f}x as long"
    return f"{case.name:40} {ours * 1e3:8.3f} ms a layer {reached}{beside}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="run on this instruction set")
    parser.add_argument("--threads", type=int, default=host.usable_threads())
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    parser.add_argument("--no-torch", action="store_true", help="leave the torch path out")
    options = parser.parse_args()
    if options.isa:
        os.environ[host.ISA_ENV] = options.isa
    torch.manual_seed(0)
    ours = registry.create("cpu", BackendOptions(threads=options.threads))
    capabilities = ours.capabilities()
    print(f"attention: {capabilities.kernels['attention']}; {options.threads} threads")
    before = os.environ.get(host.ISA_ENV)
    os.environ[host.ISA_ENV] = "generic"
    plain = registry.create("cpu", BackendOptions(threads=options.threads))
    os.environ.pop(host.ISA_ENV) if before is None else os.environ.update({host.ISA_ENV: before})
    precisions = ["bf16", "fp32"]
    ceilings = measure_ceilings("cpu", ours.synchronize, precisions, ours.ops().linear, repeats=4)
    products = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in ceilings.products_per_s.items())
    print(f"reads {ceilings.read_bytes_per_s / 1e9:.1f} GB/s; products {products}")
    for case in CASES:
        if options.only not in case.name or case.kv not in capabilities.kv_dtypes:
            continue
        beside = case.kv in plain.capabilities().kv_dtypes and not options.no_torch
        with torch.inference_mode():
            steps = [Step(ours, case), Step(plain, case) if beside else None]
            mine, torch_path = best_times(steps, options.seconds)
        assert mine is not None
        print(report(case, mine, torch_path, ceilings), flush=True)


if __name__ == "__main__":
    main()
