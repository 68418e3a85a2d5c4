"""The GPU backends without a GPU: why there is none, what happens when a kernel does not compile, the suite."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagefleet.backends import SHARED, registry
from pagefleet.backends.base import BackendError, BackendOptions
from pagefleet.backends.gpu.device import probe_vendor
from pagefleet.kernels import triton as kernels
from pagefleet.runtime.config import installed_backends

needs_triton = pytest.mark.skipif(bool(kernels.unavailable()), reason=str(kernels.unavailable()))
ROOT = Path(__file__).parents[2]

# A small part of the suite: the whole of it takes minutes in the interpreter
#   TRITON_INTERPRET=1 pytest tests/backends/test_conformance.py
PART = (
    "(mixed_prefill and 16-4-2-24-40) or (windows and 17-True-2.0-3) or (small_dtypes and bf16-bf16)"
    " or null or empty_step or touch_each_other or capabilities or kv_dtype or a_part_of or copied or padding"
)


@needs_triton
def test_the_conformance_suite_passes_in_the_interpreter() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/backends/test_conformance.py",
            "-k",
            PART,
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 14, done.stdout[-500:]


def runtime(cuda="12.8", hip=None, count=1, init=None, free=70, **properties):
    """What stands for torch: a build, a driver that may refuse, and one card."""

    def refuse():
        if init is not None:
            raise init

    properties = {"name": "Card", "major": 9, "minor": 0, "gcnArchName": "gfx942:sramecc+:xnack-", **properties}
    gib = 1 << 30
    return SimpleNamespace(
        __version__="2.13",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            init=refuse,
            device_count=lambda: count,
            get_device_properties=lambda index: SimpleNamespace(**properties),
            mem_get_info=lambda index: (int(free * gib), 80 * gib),
        ),
    )


NO_DRIVER = RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU.\nThen more.")
OLD_DRIVER = RuntimeError(
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading."
)


@needs_triton
@pytest.mark.skipif(kernels.interpreted(), reason="Triton interprets here")
@pytest.mark.parametrize(
    ("backend", "torch", "said"),
    [
        ("cuda", runtime(cuda=None), r"torch 2.13 is not built for NVIDIA GPUs; install its CUDA build"),
        ("rocm", runtime(), r"torch 2.13 is not built for AMD GPUs"),
        ("cuda", runtime(init=NO_DRIVER), r"no NVIDIA GPU can be used: Found no NVIDIA driver on your system"),
        ("cuda", runtime(init=OLD_DRIVER), r"driver on your system is too old \(found version 11040\)"),
        ("cuda", runtime(count=0), r"no NVIDIA GPU that this process may see"),
        ("cuda", runtime(major=7, minor=0), r"Card: GPU architecture 'sm70' is not supported; expected one of: sm80"),
        ("rocm", runtime(None, "7.0", gcnArchName="gfx803"), r"'gfx803' is not supported; .*gfx942"),
        ("cuda", runtime(free=0.5), r"Card has 512 MiB of its 80 GiB free and needs at least 1 GiB"),
    ],
)
def test_a_gpu_that_cannot_be_used_says_why_in_one_line(backend, torch, said):
    found = probe_vendor(backend, torch)
    assert not found.available
    assert re.search(said, found.reason)
    assert "\n" not in found.reason


@needs_triton
@pytest.mark.skipif(kernels.interpreted(), reason="Triton interprets here")
def test_a_gpu_that_can_be_used_is_named_and_comes_before_cpus():
    nvidia, amd = probe_vendor("cuda", runtime()), probe_vendor("rocm", runtime(None, "7.0"))
    assert nvidia.available
    assert nvidia.reason == "Card, sm90, 70 of 80 GiB free"
    assert amd.reason == "Card, gfx942, 70 of 80 GiB free"
    assert min(nvidia.score, amd.score) > registry.probe_all()["cpu"].score


def test_without_triton_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(kernels, "unavailable", lambda: "Triton is not installed")
    assert probe_vendor("cuda", runtime()).reason == "Triton is not installed"


def test_what_backends_share_is_no_backend():
    assert not SHARED & {*registry.probe_all(), *installed_backends()}
    assert {"cuda", "rocm"} <= {*registry.probe_all()} & {*installed_backends()}


@needs_triton
def test_a_kernel_that_does_not_compile_gives_way_to_the_next_aloud(caplog):
    from triton.errors import TritonError

    from pagefleet.backends.gpu.choice import Choice

    tried = []

    def broken(x):
        tried.append(x)
        raise TritonError("at 7:3\nno such instruction")

    choice = Choice("attention", "sm90", [("Triton", broken), ("torch", lambda x: x + 1)])
    assert choice.name == "Triton"
    with caplog.at_level(logging.WARNING):
        assert [choice(1), choice(2)] == [2, 3]
    assert tried == [1]
    assert choice.name == "torch"
    (record,) = caplog.records
    assert record.message == ("attention: Triton does not compile on sm90 (no such instruction); torch runs instead")
    with pytest.raises(BackendError, match="no other way"):
        Choice("norm", "sm90", [("Triton", broken)])(1)
    with pytest.raises(ValueError, match="mine"):  # what is no compiler's error passes
        Choice("norm", "sm90", [("Triton", lambda: (_ for _ in ()).throw(ValueError("mine"))), ("torch", print)])()


@needs_triton
def test_attention_is_chosen_by_name_and_the_reason_is_in_the_log(caplog):
    import torch

    from pagefleet.backends.gpu.backend import GpuBackend
    from pagefleet.backends.gpu.device import GpuDevice
    from pagefleet.kernels.triton.targets import target_of

    gpu = GpuDevice("cuda", torch.device("cpu"), "none", target_of("interpreter"), 1)
    for asked, taken in ((None, "Triton, paged"), ("triton", "Triton, paged"), ("torch", "torch, one query at a time")):
        with caplog.at_level(logging.INFO):
            backend = GpuBackend(BackendOptions(extra={"attention": asked}), gpu)
        assert backend.capabilities().kernels["attention"] == taken
        assert "attention" in caplog.records[-1].message
    with pytest.raises(BackendError, match="'flash3'; on GPUs expected one of auto, triton, torch"):
        GpuBackend(BackendOptions(extra={"attention": "flash3"}), gpu)


@needs_triton
def test_tiles_of_another_architecture_are_taken_where_they_fit_and_else_refused_aloud(caplog):
    import torch

    from pagefleet.backends.gpu.device import GpuDevice, with_tiles
    from pagefleet.kernels.triton.targets import target_of

    l4 = GpuDevice("cuda", torch.device("cuda", 0), "L4", target_of("sm89"), 58)
    hopper = GpuDevice("cuda", torch.device("cuda", 0), "H200", target_of("sm90"), 132)
    assert with_tiles(l4, None) is l4
    assert with_tiles(l4, "sm89") is l4
    ampere = with_tiles(hopper, "sm80").target
    assert (ampere.arch, ampere.shared_bytes) == ("sm90", hopper.target.shared_bytes)
    assert ampere.prefill == target_of("sm80").prefill
    for gpu, asked, said in ((l4, "sm90", "227 KiB of shared memory; sm89 is cuda with 99"), (hopper, "gfx942", "hip")):
        caplog.clear()
        assert with_tiles(gpu, asked) is gpu
        assert said in caplog.text


@needs_triton
@pytest.mark.parametrize(
    ("programs", "tokens", "splits"), [(8, 32768, 32), (8, 1024, 4), (8, 100, 1), (2048, 32768, 1), (1, 10**6, 64)]
)
def test_the_kv_is_split_when_processors_would_idle(programs, tokens, splits):
    from pagefleet.backends.gpu.plan import number_of_splits

    assert number_of_splits(programs, tokens, 64, 132) == splits
