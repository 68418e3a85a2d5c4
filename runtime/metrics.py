"""Counters of an engine and the measures made of them. Keys are listed in `EngineMetrics.as_dict`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pagefleet.runtime.outputs import RequestOutput

_KEPT = 100_000  # latencies kept; older ones give way, so that a long job's memory stays flat


class Latencies:
    """Seconds; the last `_KEPT` of them."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._next = 0

    def add(self, seconds: float) -> None:
        """Record one latency."""
        if len(self._values) < _KEPT:
            self._values.append(seconds)
        else:
            self._values[self._next] = seconds
            self._next = (self._next + 1) % _KEPT

    def percentiles(self) -> dict[str, float | None]:
        """p50, p90, p99 by nearest rank; None without values."""
        ordered = sorted(self._values)
        if not ordered:
            return {"p50": None, "p90": None, "p99": None}
        return {f"p{p}": ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99)}


PHASES = ("schedule", "batch", "model", "sampling", "commit")  # of a step, in order


class StepClock:
    """Where the time of the steps goes: seconds by phase.

    On a device that works asynchronously, "model" is the time to launch it and "sampling" waits for it.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self._last = time.perf_counter()

    def end_of(self, phase: str) -> None:
        """A phase has ended: what passed since the last call was spent in it."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    @property
    def overhead(self) -> float:
        """Share of the time that is not the model's."""
        total = sum(self.seconds.values())
        return 1.0 - self.seconds["model"] / total if total else 0.0


@dataclass
class EngineMetrics:
    """What an engine counted since it was made."""

    started: float = field(default_factory=time.monotonic)
    busy_seconds: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    requests_by_finish_reason: Counter[str] = field(default_factory=Counter)
    errors_by_code: Counter[str] = field(default_factory=Counter)
    time_to_first_token: Latencies = field(default_factory=Latencies)
    inter_token_latency: Latencies = field(default_factory=Latencies)
    utilization_sum: float = 0.0
    utilization_peak: float = 0.0
    fragmentation_sum: float = 0.0
    clock: StepClock = field(default_factory=StepClock)

    def step(self, seconds: float, utilization: float, fragmentation: float) -> None:
        """One step ended: its duration, and the shares of used blocks and of unused slots in them."""
        self.steps += 1
        self.busy_seconds += seconds
        self.utilization_sum += utilization
        self.utilization_peak = max(self.utilization_peak, utilization)
        self.fragmentation_sum += fragmentation

    def finish(self, output: RequestOutput) -> None:
        """One request ended."""
        if output.error is not None:
            self.errors_by_code[output.error.code.value] += 1
            self.requests_by_finish_reason["error"] += 1
            return
        self.prompt_tokens += len(output.prompt_token_ids)
        for completion in output.outputs:
            self.requests_by_finish_reason[completion.finish_reason or "unknown"] += 1

    def as_dict(self) -> dict[str, Any]:
        """Measures; rates are per second of step time, shares are averages over steps."""
        seconds = max(self.busy_seconds, 1e-9)
        steps = max(self.steps, 1)
        return {
            "output_tokens_per_s": self.output_tokens / seconds,
            "total_tokens_per_s": (self.output_tokens + self.prompt_tokens) / seconds,
            "output_tokens": self.output_tokens,
            "prompt_tokens": self.prompt_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None,
            "steps": self.steps,
            "busy_seconds": self.busy_seconds,
            "step_seconds_by_phase": dict(self.clock.seconds),
            "step_overhead": self.clock.overhead,
            "block_utilization": self.utilization_sum / steps,
            "block_utilization_peak": self.utilization_peak,
            "fragmentation": self.fragmentation_sum / steps,
            "requests_by_finish_reason": dict(self.requests_by_finish_reason),
            "errors_by_code": dict(self.errors_by_code),
            "time_to_first_token_s": self.time_to_first_token.percentiles(),
            "inter_token_latency_s": self.inter_token_latency.percentiles(),
        }
