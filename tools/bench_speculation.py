"""Measure prompt-lookup speculation: on against off, in turns, in one process.

    python tools/bench_speculation.py [--model DIR] [--dtype bf16] [--tokens 96] [--rounds 3] [--json FILE]

Prints what refused drafts cost (and the `speculation.break_even_rows` that follows from it), then the ratio of tokens
per second on copying prompts (edits, a summary with quotes) and on free ones, alone and in batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pagefleet.runtime import LLM, SamplingParams
from pagefleet.runtime.config import SpeculationConfig
from pagefleet.runtime.home import home_folder

PROMPTS = Path(__file__).parent / "data" / "speculation_prompts.json"
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
DRAFTED_ROWS = (0, 1, 2, 4, 8, 16, 32)

# name, kind of prompts, sequences at once, temperature
WORKLOADS = (
    ("copying, greedy, alone", "copying", 1, 0.0),
    ("copying, sampled, alone", "copying", 1, 0.7),
    ("copying, greedy, 8 at once", "copying", 8, 0.0),
    ("copying, sampled, 8 at once", "copying", 8, 0.7),
    ("copying, greedy, 32 at once", "copying", 32, 0.0),
    ("free, greedy, alone", "free", 1, 0.0),
    ("free, sampled, alone", "free", 1, 1.0),
    ("free, sampled, 8 at once", "free", 8, 1.0),
    ("free, sampled, 32 at once", "free", 32, 1.0),
)


class Refused:
    """In place of a Speculator: drafts of a fixed length that are never right."""

    def __init__(self, count: int, token_id: int) -> None:
        self.config = SpeculationConfig("ngram", break_even_rows=max(DRAFTED_ROWS))
        self._draft = (token_id,) * count

    def draft(self, sequence: Any, room: int, num_running: int) -> tuple[int, ...]:
        """The same token again and again; one that no model says."""
        return self._draft[:room]


def step_seconds(llm: LLM, prompt: str, rounds: int, clock: Clock, steps: int = 12) -> dict[int, float]:
    """Median seconds of a step of one sequence with so many drafted rows, all refused."""
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    times: dict[int, list[float]] = {count: [] for count in DRAFTED_ROWS}
    scheduler = llm.engine.scheduler
    speculator = scheduler.speculator
    llm.submit("steps", prompt, params)
    llm.step()
    for _ in range(rounds):
        for count in DRAFTED_ROWS:
            scheduler.speculator = Refused(count, llm.model.vocab_size - 1)  # type: ignore[assignment]
            for _ in range(steps):
                started = clock()
                llm.step()
                times[count].append(clock() - started)
    scheduler.speculator = speculator
    llm.abort("steps")
    llm.step()
    return {count: statistics.median(values) for count, values in times.items()}


def break_even_rows(seconds: dict[int, float]) -> float:
    """F / r of the line F + r * rows that fits best; `seconds` by drafted rows, beside one that is not drafted."""
    line = statistics.linear_regression([1 + count for count in seconds], list(seconds.values()))
    return line.intercept / line.slope if line.slope > 0 else float("inf")


def generate(
    llm: LLM, prompts: Sequence[str], at_once: int, params: Sequence[SamplingParams], clock: Clock
) -> dict[str, Any]:
    """Answer prompts `at_once` by `at_once`; tokens, seconds and what speculation did."""
    before, outputs = llm.metrics(), []
    started = clock()
    for first in range(0, len(prompts), at_once):
        conversations = [[{"role": "user", "content": p}] for p in prompts[first : first + at_once]]
        outputs += llm.chat(conversations, params[first : first + at_once])
    seconds, after = clock() - started, llm.metrics()
    tokens = [o.outputs[0].token_ids for o in outputs]
    counted = {key: after[key] - before[key] for key in ("steps", "drafted_tokens", "accepted_tokens")}
    return {"tokens": tokens, "rate": sum(map(len, tokens)) / seconds, **counted}


def compare(llm: LLM, workload: tuple[str, str, int, float], new: int, rounds: int, clock: Clock) -> dict[str, Any]:
    """One row of the table: rates with speculation and without, each run in turn."""
    name, kind, at_once, temperature = workload
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))[kind]
    prompts = prompts * max(1, at_once // len(prompts))
    params = [SamplingParams(max_tokens=new, temperature=temperature, seed=i) for i in range(len(prompts))]
    scheduler, speculator = llm.engine.scheduler, llm.engine.scheduler.speculator
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for turn in range(rounds + 1):  # the first is a warm-up: it fills the prefix cache
        for on in (False, True) if turn % 2 else (True, False):
            scheduler.speculator = speculator if on else None
            runs[on].append(generate(llm, prompts, at_once, params, clock))
    scheduler.speculator = speculator
    off, on = runs[False][1:], runs[True][1:]
    drafted, accepted = (sum(r[key] for r in on) for key in ("drafted_tokens", "accepted_tokens"))
    tokens = sum(len(t) for r in on for t in r["tokens"])
    return {
        "workload": name,
        "off_tokens_per_s": statistics.median(r["rate"] for r in off),
        "on_tokens_per_s": statistics.median(r["rate"] for r in on),
        "ratio": statistics.median(b["rate"] / a["rate"] for a, b in zip(off, on, strict=True)),
        "steps_ratio": sum(r["steps"] for r in on) / sum(r["steps"] for r in off),
        "drafted_per_token": drafted / tokens,
        "acceptance_rate": accepted / drafted if drafted else None,
        "same_tokens": sum(a == b for a, b in zip(off[0]["tokens"], on[0]["tokens"], strict=True)) / len(prompts),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(home_folder() / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    parser.add_argument("--json", default="", help="write the figures to this file too")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: this process's seconds, for a busy machine"
    )
    asked = parser.parse_args(argv)
    clock = CLOCKS[asked.clock]
    options: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 2**30, "speculation": "ngram"}
    with LLM(asked.model, dtype=asked.dtype, **options) as llm:
        seconds = step_seconds(llm, json.loads(PROMPTS.read_text(encoding="utf-8"))["free"][0], asked.rounds, clock)
        facts = {key: llm.metrics()[key] for key in ("backend", "isa", "dtype", "kernels")}
        print(f"{facts['backend']} {facts['isa']} {facts['dtype']}; milliseconds of a step by refused drafted tokens:")
        print("  " + "  ".join(f"{count}: {value * 1e3:.1f}" for count, value in seconds.items()))
        print(f"  a line through them gives break_even_rows = {break_even_rows(seconds):.0f}\n")
        print(f"{'workload':30} {'off/s':>7} {'on/s':>7} {'ratio':>6} {'steps':>6} {'drafted':>8} {'accepted':>9}")
        rows = []
        for workload in (w for w in WORKLOADS if asked.only in w[0]):
            rows.append(row := compare(llm, workload, asked.tokens, asked.rounds, clock))
            accepted = "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}"
            rates = f"{row['off_tokens_per_s']:7.1f} {row['on_tokens_per_s']:7.1f} {row['ratio']:5.2f}x"
            counts = f"{row['steps_ratio']:6.2f} {row['drafted_per_token']:8.2f} {accepted:>9}"
            print(f"{row['workload']:30} {rates} {counts}", flush=True)
    if asked.json:
        figures = {**facts, "step_seconds": seconds, "break_even_rows": break_even_rows(seconds), "workloads": rows}
        Path(asked.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
