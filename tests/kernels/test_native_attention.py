"""The compiled attention equals the float64 specification on every instruction set, and a row's bits are its own.

Memory is NaN wherever nothing was written (the scales of int8 too), in the null block as well.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagefleet.backends.base import AttentionArgs, AttentionBatch, BackendError, GroupTables, KVGroup, LayerKV
from pagefleet.backends.cpu.native_attention import NativeAttention
from pagefleet.backends.cpu.native_kv import NativePool
from pagefleet.backends.pool import padded_block_bytes, with_views
from pagefleet.kernels import reference

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1.5e-2}


@dataclass
class Step:
    """Sequences (cached and new tokens, new tokens) whose tables may share blocks, have holes and repeat."""

    sequences: list[tuple[int, int]]
    tables: torch.Tensor
    heads: int = 6
    kv_heads: int = 2
    size: int = 16
    value_size: int = 16
    block_size: int = 16
    kv: str = "fp32"
    compute: str = "fp32"
    args: AttentionArgs = field(default_factory=lambda: AttentionArgs(0.25))
    pool: NativePool = field(init=False)
    query: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        group = KVGroup((LayerKV(0, self.kv_heads, self.size, self.value_size),), None, self.kv, self.block_size)
        count = int(self.tables.max()) + 2
        data = torch.full((count, padded_block_bytes(group, "cpu")), 255, dtype=torch.uint8)
        self.pool = NativePool.of(with_views(group, data))
        used = self.tables.unique()
        used = used[used != 0].long()
        slots = (used[:, None] * self.block_size + torch.arange(self.block_size)).view(-1)
        written = torch.zeros(count * self.block_size, dtype=torch.bool)
        for table, (length, _) in zip(self.tables, self.sequences, strict=True):
            at = torch.arange(length)
            written[table[at // self.block_size].long() * self.block_size + at % self.block_size] = True
        slots = slots[written[slots]]
        reference.write_kv(
            torch.randn(len(slots), self.kv_heads, self.size, generator=generator),
            torch.randn(len(slots), self.kv_heads, self.value_size, generator=generator),
            self.pool.keys[0],
            self.pool.values[0],
            slots,
            self.pool.key_scales.get(0),
            self.pool.value_scales.get(0),
        )
        tokens = sum(new for _, new in self.sequences)
        self.query = torch.randn(tokens, self.heads, self.size, generator=generator).to(TORCH[self.compute])

    def starts(self, chosen: list[int]) -> list[int]:
        return [0, *itertools.accumulate(self.sequences[s][1] for s in chosen)]

    def batch(self, chosen: list[int]) -> AttentionBatch:
        return AttentionBatch(
            torch.tensor(self.starts(chosen), dtype=torch.int32),
            torch.tensor([self.sequences[s][0] for s in chosen], dtype=torch.int32),
            (GroupTables(torch.zeros(0, dtype=torch.int64), self.tables[chosen]),),
        )

    def run(self, native: Any, chosen: list[int] | None = None) -> list[torch.Tensor]:
        """The outputs of the chosen sequences, computed together."""
        chosen = list(range(len(self.sequences))) if chosen is None else chosen
        attention = NativeAttention(native, "test")
        plan = attention.plan(self.batch(chosen), (self.pool,))
        everything = self.starts(list(range(len(self.sequences))))
        query = torch.cat([self.query[everything[s] : everything[s + 1]] for s in chosen])
        out = attention.attention(plan, 0, 0, query, self.args)
        return list(out.split([self.sequences[s][1] for s in chosen]))

    def facts(self, native: Any) -> dict[str, int]:
        plan = NativeAttention(native, "test").plan(self.batch(list(range(len(self.sequences)))), (self.pool,))
        return native.attention_plan_facts(plan.work(0, self.args.window, self.kv_heads, self.heads // self.kv_heads))

    def expected(self) -> torch.Tensor:
        chosen = list(range(len(self.sequences)))
        keys, values = self.pool.keys[0].double(), self.pool.values[0].double()
        if self.kv == "int8":
            keys = keys * self.pool.key_scales[0][..., None].double()
            values = values * self.pool.value_scales[0][..., None].double()
        batch = self.batch(chosen)
        return reference.paged_attention(
            self.query.double(),
            keys,
            values,
            self.tables,
            batch.query_starts,
            batch.kv_lengths,
            scale=self.args.scale,
            window=self.args.window,
            softcap=self.args.softcap,
            sinks=None if self.args.sinks is None else self.args.sinks.double(),
        )

    def check(self, native: Any) -> None:
        got = torch.cat(self.run(native))
        bound = TOLERANCE[self.compute]
        assert not got.isnan().any(), "read memory that it must not"
        torch.testing.assert_close(got.double(), self.expected(), rtol=bound, atol=bound)


def tables_of(lengths: list[int], block_size: int, shared: int = 0, seed: int = 0) -> torch.Tensor:
    """Tables over shuffled blocks; the first `shared` blocks are the same for all."""
    counts = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int() + 1
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for s, own in enumerate(order[: sum(counts)].split(counts)):
        tables[s, : len(own)] = own
    tables[:, :shared] = tables[0, :shared]
    return tables


LENGTHS = [(300, 1), (129, 1), (128, 1), (1, 1), (127, 9), (260, 140), (17, 17), (5, 0)]


@pytest.mark.parametrize(
    ("kv", "compute"),
    [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp32", "bf16")],
)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 9, "kv_heads": 3, "size": 64, "value_size": 64},
        {"heads": 2, "kv_heads": 1, "size": 17, "value_size": 5, "block_size": 1},
        {"heads": 3, "kv_heads": 3, "size": 24, "value_size": 40, "block_size": 128},
        {"heads": 34, "kv_heads": 2, "size": 40, "value_size": 8, "block_size": 5},
    ],
    ids=str,
)
def test_native_attention_equals_the_specification(native: Any, kv: str, compute: str, shape: dict[str, int]) -> None:
    tables = tables_of([length for length, _ in LENGTHS], shape.get("block_size", 16))
    Step(LENGTHS, tables, kv=kv, compute=compute, **shape).check(native)


@pytest.mark.parametrize("window", [None, 1, 128, 130])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_soft_caps_and_sinks(native: Any, window: int | None, softcap: float | None, sinks: bool) -> None:
    sink_scores = torch.linspace(-2, 4, 6) if sinks else None
    args = AttentionArgs(0.25, window=window, softcap=softcap, sinks=sink_scores)
    tables = tables_of([length for length, _ in LENGTHS], 16)
    if window is not None:  # what slid out of the window is a null block
        for table, (length, new) in zip(tables, LENGTHS, strict=True):
            table[: max(0, length - new - window + 1) // 16] = 0
    Step(LENGTHS, tables, args=args).check(native)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    sequences=st.lists(st.tuples(st.integers(1, 330), st.integers(0, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16, 32, 128]),
    seed=st.integers(0, 10**6),
    window=st.sampled_from([None, None, 20, 150]),
    kind=st.sampled_from([("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"), ("int8", "fp32")]),
)
def test_random_tables_with_shared_repeated_and_null_blocks(
    native: Any,
    sequences: list[tuple[int, int]],
    block_size: int,
    seed: int,
    window: int | None,
    kind: tuple[str, str],
) -> None:
    sequences = [(length, min(length, new)) for length, new in sequences]
    generator = torch.Generator().manual_seed(seed)
    columns = -(-max(length for length, _ in sequences) // block_size)
    tables = torch.randint(0, max(2, columns), (len(sequences), columns), generator=generator).int()  # few: repeated
    for s in range(1, len(sequences)):  # some go on as the one before for a while
        if int(torch.randint(0, 3, (1,), generator=generator)):
            same = int(torch.randint(0, columns + 1, (1,), generator=generator))
            tables[s, :same] = tables[s - 1, :same]
    step = Step(sequences, tables, block_size=block_size, kv=kind[0], compute=kind[1], args=AttentionArgs(0.25, window))
    step.check(native)


SHARED = [(300 + 7 * i, 1) for i in range(9)] + [(256, 1), (500, 30), (40, 1)]


@pytest.mark.parametrize("kind", [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16")], ids=str)
def test_a_row_has_the_same_bits_alone_in_any_company_and_on_any_number_of_threads(
    native: Any, kind: tuple[str, str]
) -> None:
    lengths = [length for length, _ in SHARED]
    step = Step(SHARED, tables_of(lengths, 16, shared=16), kv=kind[0], compute=kind[1], heads=6, kv_heads=2)
    apart = Step(SHARED, tables_of(lengths, 16), kv=kind[0], compute=kind[1], heads=6, kv_heads=2)
    apart.query = step.query
    for s, (length, _) in enumerate(SHARED):  # the same keys and values in blocks of their own
        for token in range(0, length, 16):
            apart.pool.data[apart.tables[s, token // 16]] = step.pool.data[step.tables[s, token // 16]]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [step.run(native, [s])[0] for s in range(len(SHARED))]
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together, unshared = step.run(native), apart.run(native)
            backwards = step.run(native, list(reversed(range(len(SHARED)))))[::-1]
            for s, row in enumerate(alone):
                assert torch.equal(row, together[s]), (s, count)
                assert torch.equal(row, unshared[s]), (s, count)
                assert torch.equal(row, backwards[s]), (s, count)
    finally:
        torch.set_num_threads(threads)


def test_a_prompt_has_the_same_bits_however_it_is_chunked(native: Any) -> None:
    tables = tables_of([400], 16)
    for kv, compute in (("fp32", "fp32"), ("bf16", "bf16")):
        whole = Step([(400, 400)], tables, kv=kv, compute=compute)
        expected, parts, done = whole.run(native)[0], [], 0
        for end in (1, 100, 128, 300, 399, 400):
            chunk = Step([(400, 400)], tables, kv=kv, compute=compute)
            chunk.sequences, chunk.query = [(end, end - done)], whole.query[done:end]
            parts.append(chunk.run(native)[0])
            done = end
        assert torch.equal(torch.cat(parts), expected)


def test_blocks_that_sequences_share_are_read_once(native: Any) -> None:
    sequences = [(560, 1)] * 16
    torch_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        tables = tables_of([560] * 16, 16, shared=32)
        assert Step(sequences, tables).facts(native)["tiles"] == 2 * (4 + 16)  # two KV heads; 512 tokens in common
        assert Step(sequences, tables_of([560] * 16, 16)).facts(native)["tiles"] == 2 * 16 * 5
    finally:
        torch.set_num_threads(torch_threads)


def test_what_would_read_outside_the_pool_is_refused(native: Any) -> None:
    for change, message in [
        (lambda step: step.tables.fill_(99), "names a block outside 0"),
        (lambda step: setattr(step, "tables", step.tables[:, :2]), "too short for a sequence of 40"),
        (lambda step: setattr(step, "sequences", [(1, 2)]), "sequence 0 has 2 queries and only 1 tokens"),
        (lambda step: setattr(step, "query", step.query[:, :5]), "layer 0 keeps 2 KV heads of 16"),
    ]:
        step = Step([(40, 1)], tables_of([40], 16))
        change(step)
        with pytest.raises(BackendError, match=message):
            step.run(native)
