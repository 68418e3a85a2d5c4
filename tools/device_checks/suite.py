"""The backend conformance suite of `tests/backends/`, on the card, where pytest is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from .machine import Machine
from .models import ROOT
from .report import Row, failure


def run(machine: Machine) -> Iterator[Row]:
    """Its tests for this backend, in a process of their own."""
    if importlib.util.find_spec("pytest") is None:
        yield failure("conformance suite", "pytest is not installed; section `kernels` stands for it")
        return
    selected = machine.pick(machine.name, "capabilities or padding")
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-p", "no:cacheprovider", "-k", selected]
    if not machine.dry and importlib.util.find_spec("xdist") is not None:
        command += ["-n", "8"]  # most of its time is compiling
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    try:
        done = subprocess.run(
            [*command, "tests/backends/test_conformance.py"], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=machine.seconds_left(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield failure("conformance suite", "did not end in its time")
        return
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    passed = re.search(r"(\d+) passed", last)
    if done.returncode != 0 or passed is None:
        yield failure("conformance suite", last)
        return
    yield Row("conformance suite", int(passed[1]), "tests passed", last, at_least=1)
