"""What is checked, in order of importance, and how many seconds each may take; together under eight minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from .report import Row

if TYPE_CHECKING:
    from .machine import Machine


@dataclass(frozen=True)
class Section:
    """A part of the check: `module.run_*` yields its rows, the most important first."""

    name: str
    budget_s: float
    function: str

    def run(self, machine: Machine) -> Iterator[Row]:
        """Do it. The libraries it needs are imported only now."""
        module, name = self.function.split(":")
        run: Callable[[Machine], Iterator[Row]] = getattr(import_module(f"device_checks.{module}"), name)
        with machine.memory_given_back():
            yield from run(machine)


SECTIONS = (
    Section("ceilings", 15, "ceilings:run"),
    Section("kernels", 45, "kernels:run"),
    Section("tokens", 40, "tokens:run"),
    Section("decode", 75, "steps:run_decode"),
    Section("prefill", 25, "steps:run_prefill"),
    Section("attention", 30, "attention:run"),
    Section("transformers", 80, "peers:run"),
    Section("kv dtypes", 25, "steps:run_kv_dtypes"),
    Section("graphs", 30, "steps:run_graphs"),
    Section("transfers", 15, "transfers:run"),
    Section("suite", 60, "suite:run"),
)
