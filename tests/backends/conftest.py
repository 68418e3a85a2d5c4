"""A step on a poisoned pool, and every backend that can run here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from pagefleet.backends import host, registry
from pagefleet.backends.base import (
    AttentionArgs,
    AttentionBatch,
    BackendOptions,
    GroupTables,
    KVGroup,
    LayerKV,
)
from pagefleet.kernels.reference import paged_attention, quantize_int8
from pagefleet.kernels.triton import interpreted, unavailable

NO_KERNELS = "cpu without compiled kernels"
# Under TRITON_INTERPRET=1 the suite is for the GPU backends' code, with its kernels in Triton's interpreter
INTERPRETED = interpreted() and not unavailable()
AVAILABLE = [name for name, found in registry.probe_all().items() if found.available]
EXPECTED = {}  # what every backend and block size is compared with does not depend on them
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=["cuda"] if INTERPRETED else [*AVAILABLE, NO_KERNELS])
def backend_name(request, monkeypatch):
    if request.param != NO_KERNELS:
        return request.param
    monkeypatch.setenv(host.ISA_ENV, "generic")
    return "cpu"


@pytest.fixture(autouse=True)
def _keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_backend(backend_name):
    """make_backend(exact=False): a new backend of the kind under test, on as many threads as now."""

    def make(exact=False):
        options = BackendOptions(threads=torch.get_num_threads(), exact=exact)
        return interpreted_backend(options) if INTERPRETED else registry.create(backend_name, options)

    return make


def interpreted_backend(options):
    """The GPU backends' code on CPU tensors."""
    from pagefleet.backends.gpu.backend import GpuBackend
    from pagefleet.backends.gpu.device import GpuDevice
    from pagefleet.kernels.triton.targets import target_of

    return GpuBackend(options, GpuDevice("cuda", torch.device("cpu"), "none", target_of("interpreter"), 1))


@dataclass
class Sequence:
    """Keys [L, Hkv, D], values [L, Hkv, Dv] and queries [L, Hq, D] of every position of one sequence."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor


class World:
    """Sequences cached in a poisoned pool of one backend; steps of them in any mixture."""

    def __init__(self, backend, group, sequences, seed=0, poison=True):
        self.backend, self.group, self.sequences = backend, group, sequences
        size = group.block_size
        counts = [-(-len(x.keys) // size) for x in sequences]
        self.pool = backend.allocate_pool(group, sum(counts) + 4)
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)) + 1
        self.tables = torch.zeros(len(sequences), max(1, *counts), dtype=torch.int32)
        for s, own in enumerate(order[: sum(counts)].split(counts)):
            self.tables[s, : len(own)] = own
        if poison:  # all ones is NaN in fp32 (the scales of int8 too), bf16 and fp16
            self.pool.data.fill_(255)

    def step(self, work, args, layer=0, write=True, tables=None):
        """Run (sequence, first position, last position) each; returns the outputs of each."""
        device = self.pool.data.device
        kept = [self.sequences[s] for s, _, _ in work]
        tables = (self.tables if tables is None else tables)[[s for s, _, _ in work]]
        counts = [last - first for _, first, last in work]
        size = self.group.block_size
        slots = [
            self.tables[s, torch.arange(a, b) // size].long() * size + torch.arange(a, b) % size for s, a, b in work
        ]
        batch = AttentionBatch(
            torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
            torch.tensor([last for _, _, last in work], dtype=torch.int32, device=device),
            (GroupTables(torch.cat([torch.zeros(0).long(), *slots]).to(device), tables.to(device)),),
        )
        plan = self.backend.plan(batch, (self.pool,))

        def rows(name):
            empty = getattr(self.sequences[0], name)[:0]
            parts = [getattr(x, name)[a:b] for x, (_, a, b) in zip(kept, work, strict=True)]
            return torch.cat([empty, *parts]).to(device)

        if write:
            self.backend.write_kv(plan, 0, layer, rows("keys"), rows("values"))
        out = self.backend.attention(plan, 0, layer, rows("queries"), args)
        self.backend.synchronize()
        return list(out.cpu().split(counts))

    def expected(self, work, args):
        """The same from the specification, in float64, from what the KV dtype keeps; worked out once a session."""
        sinks = None if args.sinks is None else tuple(args.sinks.tolist())
        inputs = tuple((x.values.shape, x.queries.shape, float(x.keys.double().sum())) for x in self.sequences)
        key = (inputs, self.group.dtype, tuple(work), args.scale, args.window, args.softcap, sinks)
        if key not in EXPECTED:
            EXPECTED[key] = self._expected(work, args)
        return EXPECTED[key]

    def _kept(self, x):
        """x as it comes back from the cache, in float64."""
        if self.group.dtype != "int8":
            return x.to(TORCH_DTYPES[self.group.dtype]).double()
        quantized, scale = quantize_int8(x)
        return quantized.double() * scale[..., None].double()

    def _expected(self, work, args):
        outputs = []
        for s, first, last in work:
            x = self.sequences[s]
            keys, values = (
                torch.cat([torch.full_like(y[:1], torch.nan).double(), self._kept(y)])[:, None]
                for y in (x.keys, x.values)
            )
            outputs.append(
                paged_attention(
                    x.queries[first:last].double(),
                    keys,  # one token a block
                    values,
                    torch.arange(1, len(keys), dtype=torch.int32)[None],
                    torch.tensor([0, last - first]),
                    torch.tensor([last]),
                    scale=args.scale,
                    window=args.window,
                    softcap=args.softcap,
                    sinks=None if args.sinks is None else args.sinks.double(),
                )
            )
        return outputs


@pytest.fixture
def make_world():
    """make_world(backend, lengths, ...): random sequences of these lengths, nothing cached yet."""

    def make(
        backend,
        lengths,
        *,
        heads=4,
        kv_heads=2,
        size=16,
        value_size=None,
        block_size=16,
        dtype="fp32",
        compute="fp32",
        window=None,
        layers=1,
        seed=0,
        poison=True,
    ):
        value_size = value_size or size
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(TORCH_DTYPES[compute])

        sequences = [
            Sequence(random(n, kv_heads, size), random(n, kv_heads, value_size), random(n, heads, size))
            for n in lengths
        ]
        layer_list = tuple(LayerKV(i, kv_heads, size, value_size) for i in range(layers))
        return World(backend, KVGroup(layer_list, window, dtype, block_size), sequences, seed, poison)

    return make


@pytest.fixture
def args_of():
    """args_of(size, **settings): attention settings with the usual scale."""

    def make(size, **settings):
        return AttentionArgs(size**-0.5, **settings)

    return make
