"""The compiled kernels, once for each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagefleet.backends import host
from pagefleet.kernels.cpu import LEVELS, load_native, why_not_native


def _levels_here() -> list[str]:
    best = host.isa()
    return list(LEVELS[: LEVELS.index(best) + 1]) if best in LEVELS else []


@pytest.fixture(params=LEVELS)
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The compiled module, set to one level; levels that the processor lacks are skipped."""
    if request.param not in _levels_here():
        pytest.skip(f"this processor has no {request.param}")
    if reason := why_not_native(request.param):
        pytest.skip(reason)
    yield load_native(request.param)
    load_native(_levels_here()[-1])
