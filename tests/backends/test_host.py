"""Limits are the container's, found on any level above the process, in cgroup v1 and v2; the ISA is the processor's."""

from __future__ import annotations

import os

import psutil
import pytest

from pagefleet.backends import host

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """machine({path: text}): a root folder with these files."""

    def make(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(str(text))
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def _big_host(monkeypatch):
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=512 * GIB, available=400 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.delenv(host.ISA_ENV, raising=False)


def test_no_cgroup_means_the_whole_host(machine):
    root = machine({})
    assert host.memory_limit_bytes(root) == 512 * GIB
    assert host.available_memory_bytes(root) == 400 * GIB
    assert host.usable_threads(root) == 64


def test_v2_limits_on_a_parent_hold_for_the_child(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/pod/container/task\n",
            "sys/fs/cgroup/pod/container/task/memory.max": "max",
            "sys/fs/cgroup/pod/container/memory.max": 8 * GIB,
            "sys/fs/cgroup/pod/container/memory.current": 6 * GIB,
            "sys/fs/cgroup/pod/container/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/memory.max": 64 * GIB,
            "sys/fs/cgroup/pod/memory.current": 10 * GIB,
            "sys/fs/cgroup/pod/cpu.max": "350000 100000",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000",
        }
    )
    assert host.memory_limit_bytes(root) == 8 * GIB
    assert host.available_memory_bytes(root) == 3 * GIB
    assert host.usable_threads(root) == 4  # 3.5, rounded up


def test_v1_limits_are_found_where_only_the_containers_view_is_mounted(machine):
    root = machine(
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 4 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 50000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
        }
    )
    assert host.memory_limit_bytes(root) == 4 * GIB
    assert host.available_memory_bytes(root) == 3 * GIB
    assert host.usable_threads(root) == 1


def test_v1_numbers_that_mean_no_limit_are_none(machine):
    root = machine(
        {
            "proc/self/cgroup": "5:memory:/\n4:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
        }
    )
    assert host.memory_limit_bytes(root) == 512 * GIB
    assert host.available_memory_bytes(root) == 400 * GIB
    assert host.usable_threads(root) == 64


def test_affinity_below_the_quota_wins(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    root = machine({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000"})
    assert host.usable_threads(root) == 2


AVX2 = "avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("flags", "expected", "fast_bf16"),
    [
        ("sse2", "generic", False),
        (AVX2, "avx2", False),
        (AVX512, "avx512", False),
        (f"{AVX512} avx512_vnni", "avx512_vnni", False),
        (f"{AVX512} avx512_vnni avx512_bf16", "avx512_bf16", True),
        (f"{AVX512} avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8", "amx", True),
        ("avx512f avx512_bf16", "generic", False),
    ],
)
def test_the_isa_is_the_best_whose_every_flag_is_there(machine, flags, expected, fast_bf16):
    root = machine({"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n"})
    assert host.isa(root) == expected
    assert host.has_fast_bf16(root) is fast_bf16


def test_the_mask_lowers_the_isa_and_never_raises_it(machine, monkeypatch):
    root = machine({"proc/cpuinfo": "flags : avx2 fma\n"})
    monkeypatch.setenv(host.ISA_ENV, "generic")
    assert host.isa(root) == "generic"
    monkeypatch.setenv(host.ISA_ENV, "amx")
    with pytest.raises(ValueError, match="more than this processor has"):
        host.isa(root)
    monkeypatch.setenv(host.ISA_ENV, "mmx")
    with pytest.raises(ValueError, match="expected one of: generic, avx2"):
        host.isa(root)


def test_this_machine_gives_sane_numbers():
    assert host.usable_threads() >= 1
    assert 0 < host.available_memory_bytes() <= host.memory_limit_bytes()


def test_memory_that_nobody_uses_goes_back_to_the_system():
    blocks = [bytearray(60_000) for _ in range(2000)]  # small enough for the heap
    kept = bytearray(100)
    before = psutil.Process().memory_info().rss
    del blocks
    host.return_unused_memory()
    assert psutil.Process().memory_info().rss < before - (60 << 20)
    assert len(kept) == 100
