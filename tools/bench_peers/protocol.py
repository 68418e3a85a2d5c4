"""What tools/bench.py and a driver say to one another: JSON, one object a line. Standard library only.

A driver is a program that loads one engine and runs workloads on it. Its first line of input are its settings; it
answers with facts about the engine when that is ready. Each further line is a workload, answered with what it took:

    {"model": DIR, "threads": 2, "max_len": 6064, "max_sequences": 64, "options": {...}}
        -> {"engine": "name", "version": "1.2", "settings": "what else matters", "load_seconds": 3.1}
    {"prompts": [[ids], ...], "new": 128}
        -> {"seconds": 12.3, "token_ids": [[...], ...], "peak_memory_bytes": 123456789}

An error is answered with {"error": "what went wrong"}. End of input ends the driver. Whatever an engine prints goes to
standard error: the answers have the original standard output to themselves.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """What a driver has loaded.

    Attributes:
        facts: "engine", "version" and "settings", texts for the report.
    """

    facts: dict[str, Any]

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Generate `new` tokens greedily for every prompt, all given at once, the end of sequence ignored.

        Returns at least "token_ids", the new tokens of every prompt, and whatever else should be in the report.
        """
        ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer the lines of standard input until it ends; `load` makes the engine of the settings."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines print to descriptor 1, not only through sys.stdout
    sys.stdout = sys.stderr
    engine: Engine | None = None
    for line in sys.stdin:
        message = json.loads(line)
        started = time.perf_counter()
        try:
            if engine is None:
                engine = load(message)
                answer = {**engine.facts, "load_seconds": time.perf_counter() - started}
            else:
                answer = engine.run(message["prompts"], message["new"])
                answer = {"seconds": time.perf_counter() - started, **answer}
            answer["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def with_environment(wanted: dict[str, str]) -> None:
    """Start this program again with these variables, unless they are set: some are read before Python begins."""
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
