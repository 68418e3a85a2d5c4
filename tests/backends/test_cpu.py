"""What only the CPU backend promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagefleet.backends.base import KVGroup, LayerKV, OutOfMemory, out_of_memory_as_error
from pagefleet.backends.cpu import plan
from pagefleet.backends.cpu.linear import can_pack


@pytest.fixture
def cpu():
    from pagefleet.backends import registry
    from pagefleet.backends.base import BackendOptions

    return registry.create("cpu", BackendOptions(threads=torch.get_num_threads()))


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError("Unable to allocate 9.00 GiB"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_a_failed_allocation_in_a_step_is_out_of_memory(cpu, make_world, args_of, monkeypatch, failure):
    world = make_world(cpu, [5])

    def fail(*_args, **_kwargs):
        raise failure

    monkeypatch.setattr(cpu._attention, "attention", fail)
    with pytest.raises(OutOfMemory):
        world.step([(0, 0, 5)], args_of(16))
    monkeypatch.setattr(cpu._attention, "attention", lambda *_: (_ for _ in ()).throw(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        world.step([(0, 0, 5)], args_of(16))


def test_torchs_own_refusal_is_recognised():
    with pytest.raises(OutOfMemory), out_of_memory_as_error():
        torch.empty(1 << 50, dtype=torch.uint8)


def test_a_long_pool_takes_memory_only_as_it_is_written(cpu):
    import psutil

    group = KVGroup((LayerKV(0, 4, 64, 64),), None, "fp32", 16)
    before = psutil.Process().memory_info().rss
    kept = cpu.allocate_pool(group, (512 << 20) // cpu.block_bytes(group))
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert kept.data.numel() > 500 << 20


def test_slots_past_two_gigabytes_are_reached(cpu, make_world, args_of):
    world = make_world(cpu, [40], heads=2, kv_heads=2, size=128, block_size=16, poison=False)
    bytes_per_block = cpu.block_bytes(world.group)
    far = (5 << 30) // bytes_per_block
    if cpu.memory().free < 8 << 30:
        pytest.skip("needs 8 GiB of memory, of which it touches little")
    world.pool = cpu.allocate_pool(world.group, far + 4)
    world.tables = torch.tensor([[far + 1, 1, far + 3]], dtype=torch.int32)
    work = [(0, 0, 40)]
    (got,), (expected,) = world.step(work, args_of(128)), world.expected(work, args_of(128))
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


def test_decode_buckets_hold_like_lengths_and_lose_no_sequence():
    work = sorted((n, s) for s, n in enumerate([1, 2, 3, 40, 41, 44, 100, 100, 100, 100, 5000]))
    buckets = plan._buckets(work, most_blocks=300)
    assert sorted(x for bucket in buckets for x in bucket) == work
    for bucket in buckets:
        longest = max(n for n, _ in bucket)
        assert min(n for n, _ in bucket) >= plan.BUCKET_WASTE * longest
        assert len(bucket) == 1 or len(bucket) * longest <= 300


def test_a_packed_layer_frees_its_weight_and_answers_nan_to_whoever_still_computes_with_it(cpu):
    if not can_pack(torch.float32):
        pytest.skip("this torch has no oneDNN")
    import weakref

    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    original = weakref.ref(model[0].weight)
    cpu.prepare_model(model)
    assert original() is None
    assert model[0].weight.shape == (32, 64)
    assert model[0].weight.isnan().all()


def test_a_linear_layer_with_its_own_forward_is_left_alone(cpu):
    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    model = nn.Sequential(Router(8, 4))
    cpu.prepare_model(model)
    assert type(model[0]) is Router
