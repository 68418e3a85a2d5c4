"""Drive prompts through an engine and tell what it took. Knows the engine's public interface only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet.runtime.outputs import RequestOutput
from pagefleet.runtime.sampling_params import SamplingParams

_FACTS = ("backend", "isa", "kernels", "dtype", "kv_dtype", "execution")


@dataclass(frozen=True)
class Run:
    """The outputs of one drive through the engine, and how long it took."""

    outputs: list[RequestOutput]
    seconds: float


def drive(llm: Any, prompts: Sequence[list[int]], new_tokens: int, name: str) -> Run:
    """Submit all prompts at once and step until all have ended; greedy, the end of sequence ignored."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        llm.submit(f"{name}-{number}", prompt, params)
    outputs: list[RequestOutput] = []
    while llm.has_unfinished:
        outputs += llm.step()
    return Run(outputs, time.perf_counter() - started)


def summarize(runs: Sequence[Run], metrics: dict[str, Any]) -> dict[str, Any]:
    """Median time of the runs, throughput from it, latencies over all their requests, and facts of the engine.

    Counts (`requests`, tokens, `errors`) are of all runs together; rates are of one run of median time.
    """
    outputs = [o for run in runs for o in run.outputs]
    good = [o for o in outputs if o.error is None]
    failed = [o for o in outputs if o.error is not None]
    generated = sum(len(c.token_ids) for o in good for c in o.outputs)
    prompt = sum(len(o.prompt_token_ids) for o in good)
    cached = sum(o.num_cached_tokens for o in good)
    seconds = statistics.median(run.seconds for run in runs)
    per_run = max(seconds, 1e-9) * len(runs)
    return {
        "requests": len(outputs),
        "errors": len(failed),
        "error_messages": sorted({f"{o.error.code.value}: {o.error.message}" for o in failed if o.error})[:5],
        "seconds": seconds,
        "seconds_of_runs": [run.seconds for run in runs],
        "prompt_tokens": prompt,
        "output_tokens": generated,
        "requests_per_s": len(good) / per_run,
        "output_tokens_per_s": generated / per_run,
        "total_tokens_per_s": (prompt + generated) / per_run,
        "kv_hit_rate": cached / prompt if prompt else 0.0,
        **latencies(good),
        **{
            key: metrics[key]
            for key in (*_FACTS, "peak_memory_bytes", "preemptions", "step_overhead")
            if key in metrics
        },
    }


def latencies(outputs: Sequence[RequestOutput]) -> dict[str, dict[str, float | None]]:
    """Percentiles of time to first token, time between tokens and whole requests, seconds."""
    first, total, between = [], [], []
    for output in outputs:
        t = output.timings
        if t is None or t.first_token is None or t.finished is None:
            continue
        first.append(t.first_token - t.arrived)
        total.append(t.finished - t.arrived)
        count = max((len(c.token_ids) for c in output.outputs), default=0)
        if count > 1:
            between.append((t.finished - t.first_token) / (count - 1))
    return {
        "time_to_first_token_s": percentiles(first),
        "inter_token_latency_s": percentiles(between),
        "request_latency_s": percentiles(total),
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 by nearest rank; None without values."""
    ordered = sorted(values)
    return {f"p{p}": ordered[max(-(-p * len(ordered) // 100), 1) - 1] if ordered else None for p in (50, 90, 99)}
