"""The compiled kernels are there where there is a compiler, run on the level that was chosen, and say why where not."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from pagefleet.backends import host
from pagefleet.kernels.cpu import LEVELS, load_native, native, why_not_native


@pytest.mark.skipif(shutil.which("g++") is None or host.isa() == "generic", reason="no compiler, or no kernels for it")
def test_where_there_is_a_compiler_the_kernels_were_built() -> None:
    assert why_not_native(host.isa()) is None


def test_levels_are_those_that_the_host_tells_apart() -> None:
    assert list(LEVELS) == list(host.ISA_FLAGS)


def test_an_instruction_set_without_kernels_gives_none_and_a_reason() -> None:
    assert load_native("generic") is None
    assert "no compiled kernels for instruction set 'generic'" in str(why_not_native("generic"))


def test_a_missing_module_gives_none_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_failure", None)
    monkeypatch.setitem(__import__("sys").modules, "pagefleet.kernels.cpu._native", None)
    assert load_native("avx2") is None
    assert "install with a C++ compiler" in str(why_not_native("avx2"))


def test_a_call_with_wrong_arguments_is_an_exception_and_not_a_crash(native: Any) -> None:
    with pytest.raises(TypeError, match="expected 12 arguments, got 1"):
        native.norm(0)
    with pytest.raises(ValueError, match="no compiled kernels for instruction set 'mmx'"):
        native.set_isa("mmx")
