"""What is settled before torch is imported, and what makes a start quick."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_SPINS = "10000"  # some 10 us: longer than the gap between two kernels, far shorter than a time slice


def spin_briefly_at_barriers() -> None:
    """Have OpenMP's threads spin for a moment at barriers before they sleep, unless the user chose how they wait.

    A step has hundreds of parallel regions. Threads that sleep at once (`OMP_WAIT_POLICY=passive`) are woken for each,
    a quarter of the time of a batch of one; threads that spin for long, as GNU's OpenMP does by default, starve each
    other when something else uses a core. Read when torch loads its OpenMP, so without effect once that is imported.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    if "torch" in sys.modules:
        log.info("torch is imported already: set GOMP_SPINCOUNT=%s where cores are shared", _SPINS)
        return
    os.environ["GOMP_SPINCOUNT"] = _SPINS


@contextmanager
def no_collection() -> Iterator[None]:
    """Leave Python's cyclic garbage collector off inside.

    Imports and loading make some million objects that stay: each of its many passes would walk them all and find
    nothing. It takes a quarter of the time from process start to first token.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
