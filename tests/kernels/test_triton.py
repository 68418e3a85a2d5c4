"""The Triton kernels without a GPU: numerics in Triton's interpreter, machine code for every supported GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagefleet.kernels import triton as kernels

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm80", "sm90", "gfx90a", "gfx942", "gfx950", "gfx1100")

needs_triton = pytest.mark.skipif(bool(kernels.unavailable()), reason=str(kernels.unavailable()))
needs_compiler = pytest.mark.skipif(
    bool(kernels.unavailable()) or kernels.interpreted(), reason="Triton interprets here, or is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str] | None]:
    """The tests in the interpreter, in a process beside those of this file: either takes most of a minute."""
    wanted = any("in_the_interpreter" in item.name for item in request.session.items)
    if kernels.unavailable() or not wanted:
        yield None
        return
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )
        process.said = said  # type: ignore[attr-defined]
        yield process
        process.kill()
        process.wait()


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_become_machine_code_that_fits_and_does_not_spill(arch: str) -> None:
    from pagefleet.kernels.triton import launches
    from pagefleet.kernels.triton.ahead import compiling_for
    from pagefleet.kernels.triton.targets import target_of

    target = target_of(arch)
    with compiling_for(target) as done:
        for _, launch in launches.covering(target):
            launch()
    kernels_here = {compiled.kernel for compiled in done}
    assert kernels_here == launches.KERNELS
    for compiled in done:
        assert compiled.code_bytes > 1000
        assert target.complaints(compiled.shared_bytes, compiled.scratch_bytes) == [], compiled
        assert compiled.scratch_bytes is not None, "no tool told whether registers spill"


@needs_compiler
def test_too_much_shared_memory_and_spills_are_noticed() -> None:
    import torch

    from pagefleet.kernels.triton import launches
    from pagefleet.kernels.triton.ahead import compiling_for
    from pagefleet.kernels.triton.targets import AttentionTiles, Target, target_of

    class Greedy(Target):
        def attention(self, *shape: object, **options: object) -> AttentionTiles:  # type: ignore[override]
            return AttentionTiles(64, 16, 4, 1)

    real = target_of("gfx1100")
    with compiling_for(real) as done:
        launches._attention(Greedy(**vars(real)), launches.HEADS[2], torch.bfloat16)[1]()
    assert "SPILLS" in real.complaints(done[0].shared_bytes, done[0].scratch_bytes)[0]
    assert "TOO MUCH" in real.complaints(real.shared_bytes + 1, 0)[0]


@needs_triton
def test_an_unknown_architecture_is_refused_by_name() -> None:
    from pagefleet.kernels.triton.targets import target_of

    with pytest.raises(ValueError, match=r"'gfx803' is not supported; expected one of: sm80, .*gfx942"):
        target_of("gfx803")


@needs_triton
@pytest.mark.parametrize("group", [1, 4, 7, 48])
@pytest.mark.parametrize("size", [16, 128, 256, 512])
def test_tiles_hold_a_head_group_and_fit_the_shared_memory(group: int, size: int) -> None:
    from pagefleet.kernels.triton.targets import TARGETS

    for target in TARGETS.values():
        for query_bytes, decode in ((2, False), (2, True), (4, False)):
            tiles = target.attention(group, size, size, query_bytes, decode)
            assert tiles.block_m >= max(16, group)
            assert tiles.tile >= 16
            assert {tiles.block_m.bit_count(), tiles.tile.bit_count(), tiles.warps.bit_count()} == {1}
            keys_and_values = query_bytes * tiles.stages * tiles.tile * 2 * size
            assert keys_and_values <= target.shared_bytes or tiles.tile == 16


def _branch(name: str, constants: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """What a compile-time constant decides: of numbers only whether, and how, what they size is there at all."""
    value = constants[name]
    if name.endswith("QUANT_GROUP"):
        pad = constants["HEAD_PAD" if name.startswith("KEY") else "VALUE_PAD"]
        yield name, "none" if value == 0 else "whole head" if value == pad else "part of a head"
    elif name in ("SPLITS", "HALF"):
        yield name, value > (name == "SPLITS")
    elif isinstance(value, tuple):
        yield from ((f"{name}[{i}]", each) for i, each in enumerate(value))
    elif isinstance(value, (bool, str)):
        yield name, value


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_compiled_here_takes_every_branch(arch: str) -> None:
    from pagefleet.kernels.triton import launches
    from pagefleet.kernels.triton.ahead import recording
    from pagefleet.kernels.triton.targets import target_of

    def branches(launched: Callable[..., Iterator[Any]]) -> set[tuple[str, str, object]]:
        with recording() as done:
            for _, launch in launched(target_of(arch)):
                launch()
        return {(kernel, *branch) for kernel, fixed in done for name in fixed for branch in _branch(name, fixed)}

    missing = branches(launches.every) - branches(launches.covering)
    assert missing <= {("heads_kernel", "KIND", "fp8_e4m3")}  # it stores by the function that write_kernel is made of
    assert len(branches(launches.covering)) > 70


@needs_triton
def test_every_kernel_equals_its_reference_in_the_interpreter(interpreted: subprocess.Popen[str]) -> None:
    code = interpreted.wait()
    interpreted.said.seek(0)  # type: ignore[attr-defined]
    said = interpreted.said.read()  # type: ignore[attr-defined]
    assert code == 0, said[-8000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed
    assert int(passed[1]) > 100, said[-500:]
    assert "skipped" not in said


def test_without_triton_the_reason_and_the_remedy_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    reason = kernels.unavailable()
    assert reason
    assert "pip install" in reason
    assert "\n" not in reason
