"""Steps of models of real shapes against their floors: decode against memory, prefill against matrix products.

A step is what the engine runs on the card: the forward pass, the logits of the last tokens, the most likely ids and
their way to the host. Its KV is never computed: block tables walk through a pool larger than any cache, so that
everything is read from memory; where a batch needs more KV than the card holds, sequences share blocks that lie far
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pagefleet.backends.base import AttentionBatch, GroupTables, OutOfMemory
from pagefleet.runtime.batch import Batch
from pagefleet.runtime.runner import Runner

from .machine import GIB, Machine
from .models import Opened, open_random
from .report import Row, failure
from .worker import describe

BLOCK = 32  # tokens, as conf/hardware/h200.yaml has it
LONGEST = 32768
LEAST_S = 6.0  # that a case may take: kernels of its shape may have to be compiled


@dataclass(frozen=True)
class Steps:
    """A model with pools, and its synthetic steps."""

    machine: Machine
    opened: Opened
    runner: Runner
    kv_dtype: str
    num_blocks: int

    @classmethod
    def make(cls, machine: Machine, opened: Opened, kv_dtype: str = "bf16", most_bytes: float = 96 * GIB) -> Steps:
        """Pools of at most `most_bytes`, and of 85% of what is free, for one KV dtype."""
        machine.free_memory()
        kv_dtype = machine.pick(kv_dtype, "fp32" if kv_dtype == "bf16" else kv_dtype)
        groups = opened.groups(machine.pick(BLOCK, 4), kv_dtype)
        block_bytes = sum(opened.backend.block_bytes(group) for group in groups)
        room = min(machine.pick(most_bytes, 1 << 16), 0.85 * opened.backend.memory().free)
        blocks = int(room // block_bytes)
        return cls(
            machine, opened, Runner(opened.model, opened.backend, groups, [blocks] * len(groups)), kv_dtype, blocks
        )

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.runner.pools[0].group.block_size

    def decode(self, sequences: int, context: int) -> Callable[[], object]:
        """A step of one token for each sequence, the last of its `context`."""
        tables = self._tables(sequences, context)
        at = torch.full((sequences,), context - 1)
        return self._step(tables, at, torch.ones(sequences, dtype=torch.int64), torch.arange(sequences))

    def prefill(self, tokens: int) -> Callable[[], object]:
        """A step of one prompt."""
        tables = self._tables(1, tokens)
        return self._step(tables, torch.arange(tokens), torch.tensor([tokens]), torch.tensor([tokens - 1]))

    def _tables(self, sequences: int, context: int) -> torch.Tensor:
        each = -(-context // self.block_size)
        return (torch.arange(sequences * each) % (self.num_blocks - 1) + 1).view(sequences, each)

    def _step(
        self, tables: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor
    ) -> Callable[[], object]:
        device, size = self.machine.device, self.block_size
        row = torch.repeat_interleave(torch.arange(len(counts)), counts)
        slots = tables[row, positions // size] * size + positions % size
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        lengths = positions[starts[1:] - 1] + 1
        group = GroupTables(slots.to(device), tables.to(device, torch.int32))
        attention = AttentionBatch(
            starts.to(device, torch.int32), lengths.to(device, torch.int32), (group,) * len(self.runner.pools)
        )
        vocab = self.opened.model.vocab_size
        ids = torch.randint(0, vocab, positions.shape, generator=torch.Generator().manual_seed(5))
        batch = Batch(ids.to(device), positions.to(device), attention, rows.to(device), [])
        selection = self.opened.backend.ops().selection()

        def step() -> object:
            hidden = self.runner.forward(batch)
            return selection.largest(self.runner.logits(hidden, batch.sample_rows))

        return step

    def decode_floor(self, sequences: int, context: int) -> float:
        """Seconds to read weights, keys and values once at the measured copy bandwidth."""
        kv = sequences * context * self.opened.kv_token_bytes(self.block_size, self.kv_dtype)
        return (self.opened.weight_bytes + kv) / self.machine.copy_bytes_per_s

    def prefill_operations(self, tokens: int) -> float:
        """Of the layers' products and of causal attention; the head runs for one row."""
        attention = sum(
            2 * self.opened.num_heads * (layer.head_dim + layer.value_head_dim) * tokens * (tokens + 1) / 2
            for pool in self.runner.pools
            for layer in pool.group.layers
        )
        return 2 * self.opened.product_weights * tokens + attention


def _decode_row(steps: Steps, label: str, sequences: int, context: int, at_most: float | None = None) -> Row:
    machine = steps.machine
    sequences, context = machine.pick((sequences, context), (2, 9))
    name = f"{label}, {sequences} of {context}"
    try:
        floor = steps.decode_floor(sequences, context)
        step = steps.decode(sequences, context)
        seconds = machine.seconds(step, repeats=3 if floor > 0.02 else 8)
    except OutOfMemory as error:
        return failure(name, describe(error))
    note = f"{seconds * 1e3:.2f} ms a step, floor {floor * 1e3:.2f}; {sequences / seconds:,.0f} tokens/s"
    return Row(name, seconds / floor, "x its floor", note, at_most=None if machine.dry else at_most)


def run_decode(machine: Machine) -> Iterator[Row]:
    """8B, then 1B: the batch and context that have a target first."""
    grid = [(64, 1024), (64, 8192), (1, 1024), (8, 1024), (256, 1024), (1, 8192), (8, 8192), (256, 8192)]
    grid += [(1, LONGEST), (8, LONGEST), (64, LONGEST), (256, LONGEST)]
    for model in machine.pick(("8B", "1B"), ("8B",)):
        steps = Steps.make(machine, open_random(machine, model, graphs="auto"))
        for sequences, context in machine.pick(grid, grid[:1]):
            target = 1.25 if (model, sequences) == ("8B", 64) and context <= 8192 else None
            if machine.seconds_left() < LEAST_S:
                yield Row(f"{model}: the rest", note=f"not measured: no time was left at {sequences} of {context}")
                return
            yield _decode_row(steps, f"{model}, bf16, batch", sequences, context, target)
        yield Row(f"{model}: how it ran", note=_how(steps.opened))
        del steps


def run_kv_dtypes(machine: Machine) -> Iterator[Row]:
    """The same step with 8-bit keys and values: what they save."""
    opened = open_random(machine, "8B", graphs="auto")
    for kv_dtype in machine.pick(("bf16", "int8", "fp8_e4m3", "fp8_e5m2"), ("int8",)):
        try:
            steps = Steps.make(machine, opened, kv_dtype, most_bytes=64 * GIB)
            yield _decode_row(steps, f"8B, KV {kv_dtype}, batch", 64, 8192)
            del steps
        except Exception as error:
            yield failure(f"8B, KV {kv_dtype}", describe(error))


def run_graphs(machine: Machine) -> Iterator[Row]:
    """1B with and without graphs: at small batches a step is mostly launches."""
    times: dict[tuple[str, int], float] = {}
    for graphs in ("off", "on"):
        steps = Steps.make(machine, open_random(machine, "1B", graphs=graphs), most_bytes=16 * GIB)
        for sequences in machine.pick((1, 8, 64, 256), (2,)):
            seconds = machine.seconds(steps.decode(sequences, machine.pick(1024, 9)), repeats=10)
            times[graphs, sequences] = seconds
            note = f"{seconds * 1e3:.3f} ms a step"
            if graphs == "on":
                gain = times["off", sequences] / seconds
                yield Row(f"1B, batch {sequences} of 1024, graphs on", gain, "x as fast as without", note)
            else:
                yield Row(f"1B, batch {sequences} of 1024, graphs off", seconds * 1e3, "ms")
        yield Row(f"graphs {graphs}: how it ran", note=_how(steps.opened))
        del steps


def run_prefill(machine: Machine) -> Iterator[Row]:
    """One prompt a step, against the measured bf16 ceiling."""
    for model in machine.pick(("8B", "1B"), ("8B",)):
        steps = Steps.make(machine, open_random(machine, model, graphs="off"), most_bytes=16 * GIB)
        for tokens in machine.pick((8192, 2048, LONGEST), (3,)):
            seconds = machine.seconds(steps.prefill(tokens), repeats=3)
            share = steps.prefill_operations(tokens) / seconds / machine.bf16_flops
            target = 60.0 if (model, tokens) == ("8B", 8192) else None
            note = f"{seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s"
            yield Row(f"{model}, prompt of {tokens}", 100 * share, "% of the bf16 ceiling", note, at_least=target)
        del steps


def _how(opened: Opened) -> str:
    kernels: dict[str, Any] = opened.backend.capabilities().kernels
    named = ", ".join(f"{op}: {name}" for op, name in sorted(kernels.items()))
    return f"{opened.model.execution}; graphs: {opened.backend.capabilities().graphs}; {named}"
