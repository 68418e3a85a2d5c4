"""`pagefleet bench`: random prompts of known lengths through the engine, measured from outside."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet.runtime.config import BenchConfig, Config
from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.outputs import RequestOutput
from pagefleet.runtime.sampling_params import SamplingParams

_FIRST_ID = 3  # below it are, by custom, padding and the beginning and end of a sequence


@dataclass(frozen=True)
class Result:
    """The outputs of one drive through the engine, and how long it took."""

    outputs: list[RequestOutput]
    seconds: float


def run_bench(config: Config) -> int:
    """Measure, print, and return 0, or 1 if a request failed."""
    from pagefleet.runtime.llm import LLM

    llm = LLM.from_config(config)
    try:
        report = measure(llm, config)
    finally:
        llm.close()
    if config.bench.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 1 if report["errors"] else 0


def measure(llm: Any, config: Config) -> dict[str, Any]:
    """Run warm-up and benchmark on an engine; the report as plain JSON values."""
    settings = config.bench
    prompts = random_prompts(settings, llm.tokenizer.vocab_size, config.seed)
    params = SamplingParams(max_tokens=settings.output_len, temperature=0.0, ignore_eos=True)
    warmup = random_prompts(settings, llm.tokenizer.vocab_size, config.seed + 1)[: settings.warmup]
    _drive(llm, warmup, params, "warmup")
    result = _drive(llm, prompts, params, "bench")
    return summarize(result, llm.metrics())


def random_prompts(settings: BenchConfig, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids, repeatable by seed; all begin with the same `shared_prefix_len` tokens.

    Raises:
        ConfigError: the shared prefix is longer than the shortest prompt.
    """
    low = max(1, round(settings.input_len * (1 - settings.input_len_spread)))
    high = max(low, round(settings.input_len * (1 + settings.input_len_spread)))
    if settings.shared_prefix_len > low:
        raise ConfigError(
            f"bench.shared_prefix_len: expected at most {low}, the shortest prompt, got {settings.shared_prefix_len}"
        )
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(min(_FIRST_ID, vocab_size - 1), vocab_size) for _ in range(count)]

    prefix = ids(settings.shared_prefix_len)
    return [prefix + ids(draw.randint(low, high) - len(prefix)) for _ in range(settings.num_prompts)]


def _drive(llm: Any, prompts: Sequence[list[int]], params: SamplingParams, name: str) -> Result:
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        llm.submit(f"{name}-{number}", prompt, params)
    outputs: list[RequestOutput] = []
    while llm.has_unfinished:
        outputs += llm.step()
    return Result(outputs, time.perf_counter() - started)


def summarize(result: Result, metrics: dict[str, Any]) -> dict[str, Any]:
    """Throughput over the whole run, latency percentiles over its requests, and the engine's own facts."""
    good = [o for o in result.outputs if o.error is None]
    failed = [o for o in result.outputs if o.error is not None]
    generated = sum(len(c.token_ids) for o in good for c in o.outputs)
    prompt = sum(len(o.prompt_token_ids) for o in good)
    cached = sum(o.num_cached_tokens for o in good)
    first, total, between = [], [], []
    for output in good:
        t = output.timings
        if t is None or t.first_token is None or t.finished is None:
            continue
        first.append(t.first_token - t.arrived)
        total.append(t.finished - t.arrived)
        count = max((len(c.token_ids) for c in output.outputs), default=0)
        if count > 1:
            between.append((t.finished - t.first_token) / (count - 1))
    seconds = max(result.seconds, 1e-9)
    return {
        "requests": len(result.outputs),
        "errors": len(failed),
        "error_messages": sorted({f"{o.error.code.value}: {o.error.message}" for o in failed if o.error})[:5],
        "seconds": result.seconds,
        "prompt_tokens": prompt,
        "output_tokens": generated,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": generated / seconds,
        "total_tokens_per_s": (prompt + generated) / seconds,
        "kv_hit_rate": cached / prompt if prompt else 0.0,
        "time_to_first_token_s": percentiles(first),
        "inter_token_latency_s": percentiles(between),
        "request_latency_s": percentiles(total),
        **{
            key: metrics[key]
            for key in ("backend", "isa", "kernels", "peak_memory_bytes", "preemptions")
            if key in metrics
        },
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 by nearest rank; None without values."""
    ordered = sorted(values)
    return {f"p{p}": ordered[max(-(-p * len(ordered) // 100), 1) - 1] if ordered else None for p in (50, 90, 99)}


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['requests']} requests on {report.get('backend', '?')} ({report.get('isa', '?')})")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("output tokens/s", f"{report['output_tokens_per_s']:.1f}")
    table.add_row("total tokens/s", f"{report['total_tokens_per_s']:.1f}")
    table.add_row("requests/s", f"{report['requests_per_s']:.2f}")
    table.add_row("KV hit rate", f"{report['kv_hit_rate']:.1%}")
    for key in ("time_to_first_token_s", "inter_token_latency_s", "request_latency_s"):
        shown = " / ".join("-" if v is None else f"{v * 1000:.1f}" for v in report[key].values())
        table.add_row(f"{key.removesuffix('_s').replace('_', ' ')}, ms (p50 / p90 / p99)", shown)
    console = Console()
    console.print(table)
    for message in report["error_messages"]:
        console.print(f"error: {message}", markup=False)
