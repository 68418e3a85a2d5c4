"""What every backend promises, checked on every backend that can run here.

Attention is compared with the float64 specification on a pool whose memory is NaN wherever nothing was written, the
null block included: a read that should not happen shows in the result.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from pagefleet.backends import registry
from pagefleet.backends.base import BackendError, BackendOptions, KVGroup, LayerKV, OutOfMemory

LENGTHS = [40, 1, 17, 130, 16, 15, 33, 64]
# (sequence, first new position, end): fresh prompts, chunks behind a cached prefix, decodes, nothing at all
PREFIX = [(0, 0, 39), (2, 0, 5), (3, 0, 129), (4, 0, 15), (5, 0, 15), (6, 0, 17), (7, 0, 60)]
MIXED = [(0, 39, 40), (1, 0, 1), (2, 5, 17), (3, 129, 130), (4, 15, 16), (5, 15, 15), (6, 17, 33), (7, 60, 64)]


def check(world, args, tolerance, work=MIXED, prefix=PREFIX):
    for done, steps in enumerate((prefix, work)):
        for got, expected in zip(world.step(steps, args), world.expected(steps, args), strict=True):
            assert not got.isnan().any(), f"step {done} read memory that it must not"
            torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size"),
    [(2, 2, 16, 16), (9, 3, 64, 64), (8, 1, 80, 80), (3, 1, 128, 128), (4, 2, 24, 40), (2, 1, 17, 5), (34, 2, 16, 16)],
)
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_mixed_prefill_and_decode_equal_the_specification(
    make_backend, make_world, args_of, exact, heads, kv_heads, size, value_size, block_size
):
    world = make_world(
        make_backend(exact),
        LENGTHS,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        value_size=value_size,
        block_size=block_size,
    )
    check(world, args_of(size), 2e-5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 16, 17, 40, 1000])  # 40 and 16 are also lengths
def test_windows_soft_caps_and_sinks_equal_the_specification(
    make_backend, make_world, args_of, exact, block_size, softcap, with_sinks, window
):
    world = make_world(make_backend(exact), LENGTHS, heads=6, kv_heads=2, block_size=block_size, window=window)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(3)) if with_sinks else None
    check(world, args_of(16, window=window, softcap=softcap, sinks=sinks), 2e-5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [64, 24])
@pytest.mark.parametrize(
    ("dtype", "compute"),
    [("bf16", "fp32"), ("fp16", "fp32"), ("int8", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("int8", "bf16")],
)
def test_small_dtypes_stay_within_their_rounding(make_backend, make_world, args_of, exact, size, dtype, compute):
    backend = make_backend(exact)
    if dtype not in backend.capabilities().kv_dtypes:
        assert dtype == "int8", "what every backend keeps"
        pytest.skip(f"keeps {backend.capabilities().kv_dtypes}")
    world = make_world(backend, LENGTHS, dtype=dtype, compute=compute, size=size, heads=6)
    check(world, args_of(size), 2e-5 if compute == "fp32" else 1.5e-2)


def test_blocks_behind_the_window_may_be_null(make_backend, make_world, args_of):
    for exact in (False, True):
        world = make_world(make_backend(exact), [100, 90], block_size=8, window=20)
        args = args_of(16, window=20)
        world.step([(0, 0, 99), (1, 0, 80)], args)
        work = [(0, 99, 100), (1, 80, 90)]
        tables = world.tables.clone()
        tables[0, : (100 - 20) // 8] = 0
        tables[1, : (80 - 19) // 8] = 0
        for got, expected in zip(world.step(work, args, tables=tables), world.expected(work, args), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_query_whose_blocks_are_all_null_gives_zeros(make_backend, make_world, args_of):
    for exact in (False, True):
        world = make_world(make_backend(exact), [5, 5])
        out = world.step([(0, 4, 5), (1, 3, 5)], args_of(16), tables=torch.zeros_like(world.tables))
        assert all(torch.equal(x, torch.zeros_like(x)) for x in out)


def test_an_empty_step_is_an_empty_result(make_backend, make_world, args_of):
    for exact in (False, True):
        world = make_world(make_backend(exact), [5])
        assert world.step([], args_of(16)) == [] or world.step([], args_of(16))[0].shape[0] == 0
        (out,) = world.step([(0, 0, 0)], args_of(16))
        assert out.shape == (0, 4, 16)


def test_layers_of_a_group_do_not_touch_each_other(make_backend, make_world, args_of):
    world = make_world(make_backend(), [20, 9], layers=3)
    work = [(0, 0, 20), (1, 0, 9)]
    first = world.step(work, args_of(16), layer=1)
    for sequence in world.sequences:
        sequence.keys, sequence.values = -sequence.keys, sequence.values * 3
    world.step(work, args_of(16), layer=0)
    world.step(work, args_of(16), layer=2)
    again = world.step(work, args_of(16), layer=1, write=False)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_capabilities_name_what_the_backend_has(make_backend, backend_name):
    capabilities = make_backend().capabilities()
    assert capabilities.name == backend_name
    assert {"attention", "write_kv", "copy_blocks", "linear"} <= set(capabilities.kernels)
    assert set(capabilities.compute_dtypes) <= {"fp32", "bf16", "fp16"}
    torch.empty(1, device=capabilities.device)
    with pytest.raises(dataclasses.FrozenInstanceError):
        capabilities.name = "other"


def test_every_kv_dtype_it_claims_can_be_kept_and_no_other(make_backend):
    backend = make_backend()
    layer = LayerKV(0, 2, 24, 40)
    for dtype in backend.capabilities().kv_dtypes:
        group = KVGroup((layer,), None, dtype, 3)
        size = backend.block_bytes(group)
        assert size % 128 == 0
        assert size >= group.block_bytes({"fp32": 4, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}.get(dtype, 2))
        pool = backend.allocate_pool(group, 5)
        assert (pool.data.dtype, tuple(pool.data.shape), pool.num_blocks) == (torch.uint8, (5, size), 5)
        assert not pool.data.any()
        assert pool.data.data_ptr() % 64 == 0
    with pytest.raises(BackendError, match="int3"):
        backend.block_bytes(KVGroup((layer,), None, "int3", 16))


def test_memory_is_a_part_of_what_there_is(make_backend):
    memory = make_backend().memory()
    assert 0 < memory.free <= memory.total


def test_a_pool_larger_than_memory_is_out_of_memory_and_nothing_breaks(make_backend, make_world, args_of):
    backend = make_backend()
    group = KVGroup((LayerKV(0, 2, 16, 16),), None, "fp32", 16)
    too_many = 4 * backend.memory().total // backend.block_bytes(group)
    with pytest.raises(OutOfMemory, match="memory"):
        backend.allocate_pool(group, too_many)
    check(make_world(backend, LENGTHS), args_of(16), 2e-5)


def test_copied_blocks_hold_the_same_bytes_and_every_read_comes_first(make_backend):
    backend = make_backend()
    pool = backend.allocate_pool(KVGroup((LayerKV(0, 1, 16, 16), LayerKV(1, 1, 16, 16)), None, "fp32", 4), 6)
    pool.data.copy_(torch.arange(6, dtype=torch.uint8)[:, None])
    backend.copy_blocks(pool, [(1, 2), (2, 3), (1, 5)])
    assert pool.data[:, 0].tolist() == [0, 1, 1, 2, 4, 1]
    assert torch.equal(pool.data, pool.data[:, :1].expand_as(pool.data))
    backend.copy_blocks(pool, [])
    with pytest.raises(BackendError):
        backend.copy_blocks(pool, [(1, 2), (3, 2)])


def test_padding_slots_store_nothing(make_backend, make_world, args_of):
    from pagefleet.backends.base import AttentionBatch, GroupTables

    world = make_world(make_backend(), [4])
    before = world.pool.data.clone()
    batch = AttentionBatch(
        torch.tensor([0, 4]).int(),
        torch.tensor([4]).int(),
        (GroupTables(torch.full((4,), -1), world.tables),),
    )
    plan = world.backend.plan(batch, (world.pool,))
    world.backend.write_kv(plan, 0, 0, world.sequences[0].keys, world.sequences[0].values)
    assert torch.equal(world.pool.data, before)


EXACT_CASES = [
    {"heads": 9, "kv_heads": 3, "size": 64},
    {"heads": 4, "kv_heads": 4, "size": 40, "value_size": 24},
    {"heads": 34, "kv_heads": 2, "size": 16},
    {"heads": 4, "kv_heads": 2, "size": 16, "window": 21},
    {"heads": 4, "kv_heads": 2, "size": 16, "dtype": "bf16", "compute": "bf16"},
    {"heads": 4, "kv_heads": 2, "size": 16, "dtype": "int8", "compute": "bf16"},
]


@pytest.mark.parametrize("case", EXACT_CASES, ids=str)
def test_exact_attention_gives_the_same_bits_however_a_sequence_is_run(make_backend, make_world, args_of, case):
    backend = make_backend(exact=True)
    if not backend.capabilities().exact:
        pytest.skip("does not claim exact")
    if case.get("dtype", "fp32") not in backend.capabilities().kv_dtypes:
        pytest.skip(f"keeps {backend.capabilities().kv_dtypes}")
    lengths = [97, *range(1, 64, 2)]  # 33 sequences; what the neighbours have cached is NaN
    sinks = torch.linspace(-1, 1, case["heads"])
    args = args_of(case["size"], window=case.get("window"), softcap=3.0, sinks=sinks)
    plain = args_of(case["size"], window=case.get("window"))
    for settings in (args, plain) if case["size"] == 64 else (plain,):
        alone = None
        for block_size, threads, chunks in [
            (16, 1, [97]),
            (1, 2, [1, 5, 40, 90, 97]),
            (128, 1, list(range(1, 98, 12))),
            (16, 1, [96, 97]),
            (24, 1, [33, 64, 65, 97]),
        ]:
            torch.set_num_threads(threads)
            world = make_world(backend, lengths, block_size=block_size, seed=5, **case)
            outputs, start = [], 0
            for end in chunks:
                others = (
                    [(s, max(0, lengths[s] - 2), lengths[s]) for s in range(1, 33)]
                    if end == 97 and block_size != 1
                    else []
                )
                outputs.append(world.step([*others, (0, start, end)], settings)[-1])
                start = end
            result = torch.cat(outputs)
            alone = result if alone is None else alone
            assert torch.equal(result, alone), (block_size, threads, chunks)


class Block(nn.Module):
    """Every kind of module that multiplies, activates or normalises."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(40, 77), nn.Linear(77, 40, bias=False)
        self.norm, self.odd = nn.LayerNorm(40), nn.Linear(40, 7)
        self.act, self.gelu = nn.SiLU(), nn.GELU(approximate="tanh")
        self.experts, self.head = Experts(), nn.Linear(40, 301)

    def forward(self, x):
        x = self.norm(x + self.down(self.act(self.up(x))))
        return torch.cat([self.head(self.gelu(self.experts(x))), self.odd(x)], -1)


class Experts(nn.Module):
    """Two experts as one parameter, chosen by row, as transformers keeps them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 33, 40) * 0.2)
        self.back = nn.Parameter(torch.randn(2, 33, 40) * 0.2)

    def forward(self, x):
        rows, out = x.reshape(-1, 40), torch.zeros_like(x.reshape(-1, 40))
        for expert in range(2):
            index = ((rows[:, 0] > 0).long() == expert).nonzero().squeeze(1)
            hidden = nn.functional.silu(nn.functional.linear(rows[index], self.weight[expert]))
            out.index_add_(0, index, hidden @ self.back[expert])
        return out.view_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_model_gives_a_row_the_same_bits_in_any_batch(make_backend, dtype):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = Block().to(dtype).eval()
        x = torch.randn(1, 133, 40).to(dtype)
        with torch.inference_mode():
            before = model(x)
            make_backend(exact=True).prepare_model(model)
            after = model(x)
            torch.testing.assert_close(after, before, rtol=3e-2, atol=3e-2 if dtype != torch.float32 else 1e-5)
            for first, last in [(0, 1), (5, 6), (0, 33), (100, 133), (32, 65), (1, 132), (0, 133)]:
                assert torch.equal(model(x[:, first:last]), after[:, first:last]), (threads, first, last)
        results.append(after)
    assert torch.equal(results[0], results[1])  # a third thread may split a product's columns elsewhere


def test_a_prepared_model_computes_the_same_function(make_backend):
    torch.manual_seed(0)
    model = Block().eval()
    tied = nn.Embedding(301, 40)
    model.head.weight = tied.weight
    x = torch.randn(1, 50, 40)
    with torch.inference_mode():
        before = model(x)
        make_backend().prepare_model(model)
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        assert not tied.weight.isnan().any()  # the embedding keeps its values
        assert model(x[:, :0]).shape == (1, 0, 308)


def test_threads_must_be_positive(backend_name):
    if backend_name != "cpu":
        pytest.skip("only the CPU backend counts threads")
    with pytest.raises(BackendError, match="threads"):
        registry.create(backend_name, BackendOptions(threads=0))
