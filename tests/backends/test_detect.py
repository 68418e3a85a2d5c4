"""Which hardware target a machine gets: made-up /proc and /sys trees, and targets that `conf/hardware` has."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

from pagefleet.backends import detect, host

TARGETS = {
    "avx2": "laptop",
    "avx512": "xeon_icx",
    "avx512_vnni": "xeon_icx",
    "avx512_bf16": "epyc_genoa",
    "amx": "xeon_spr",
}


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch):
    monkeypatch.delenv(host.ISA_ENV, raising=False)
    monkeypatch.setattr(detect, "_can_use", lambda backend, library: True)


@pytest.fixture
def machine(tmp_path):
    """machine(isa, nvidia=..., amd=...): the root of a machine with such a CPU and such devices."""

    def make(isa: str, nvidia: str | None = None, amd: int | None = None, device: int = 0):
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(
            f"model name\t: Some CPU\nflags\t\t: fpu {' '.join(host.ISA_FLAGS[isa])}\n"
        )
        if nvidia:
            folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {nvidia}\nIRQ:   \t 117\n")
        for node, version in enumerate(() if amd is None else (0, amd)):  # the CPU is a node too
            folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
            folder.mkdir(parents=True)
            (folder / "properties").write_text(
                f"cpu_cores_count 4\ngfx_target_version {version}\nvendor_id 4098\ndevice_id {device}\n"
            )
        return tmp_path

    return make


@pytest.mark.parametrize("isa", host.ISA_FLAGS)
def test_a_cpu_gets_the_target_of_its_best_instructions_and_the_reason_names_it(machine, isa):
    found = detect.detect("auto", machine(isa))
    assert found.name == TARGETS[isa]
    assert "Some CPU" in found.reason
    assert isa in found.reason


def test_masked_instructions_do_not_count(machine, monkeypatch):
    root = machine("amx")
    monkeypatch.setenv(host.ISA_ENV, "avx2")
    assert detect.detect("auto", root).name == "laptop"
    monkeypatch.setenv(host.ISA_ENV, "mmx")
    assert "mmx is not an instruction set" in detect.detect("auto", root).reason


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "generic"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "generic"),
    ],
)
def test_an_nvidia_device_is_known_by_its_name(machine, name, target):
    found = detect.detect("auto", machine("avx2", nvidia=name))
    assert found.name == target
    assert name in found.reason


@pytest.mark.parametrize(
    ("version", "device", "gfx", "target"),
    [
        (90402, 0x74A1, "gfx942", "mi300x"),
        (90402, 0x74A5, "gfx942", "mi325x"),
        (90500, 0x75A3, "gfx950", "mi355x"),
        (110000, 0x744C, "gfx1100", "rx7900xtx"),
        (90010, 0x740C, "gfx90a", "generic"),
    ],
)
def test_an_amd_device_is_known_by_its_architecture_and_number(machine, version, device, gfx, target):
    found = detect.detect("rocm", machine("avx2", amd=version, device=device))
    assert found.name == target
    assert gfx in found.reason


def test_a_device_counts_only_for_a_backend_that_can_use_it(machine, monkeypatch):
    root = machine("avx512", nvidia="NVIDIA H200")
    assert detect.detect("cpu", root).name == "xeon_icx"
    assert detect.detect("reference", root).name == "generic"
    assert detect.detect("cuda", root).name == "h200"
    monkeypatch.setattr(detect, "_can_use", lambda backend, library: False)
    assert detect.detect("target", root).name == "xeon_icx"
    assert detect.detect("cuda", root).name == "h200"  # asked for by name: whether it can run is the backend's to say


def test_without_proc_and_sys_there_is_still_a_target(tmp_path):
    assert detect.detect("auto", tmp_path).name == "laptop"
    assert detect.detect("cuda", tmp_path).name == "generic"


def test_every_target_that_can_be_found_is_a_file_of_conf():
    there = {f.name.removesuffix(".yaml") for f in (files("pagefleet.conf") / "hardware").iterdir()}
    named = {detect.GENERIC, "laptop", *(target for _, target in detect._NVIDIA), *detect._AMD.values()}
    named |= {*detect._AMD_DEVICES.values()}
    assert named | {target for target, _ in detect._CPU.values()} <= there


def test_this_machine_is_looked_at_without_importing_torch():
    code = (
        "import sys; from pagefleet.backends import detect; print(detect.detect()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
