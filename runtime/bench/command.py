"""`pagefleet bench`: run workloads on an engine in this process, print what was measured beside the machine's floor."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any

from pagefleet.backends import registry
from pagefleet.backends.base import Backend, BackendOptions
from pagefleet.runtime.bench.floor import Ceilings, ModelSizes, floor, measure_ceilings
from pagefleet.runtime.bench.measure import drive, summarize
from pagefleet.runtime.bench.workloads import TokenSource, Workload, chosen, fingerprint, read_text, warmup
from pagefleet.runtime.config import Config
from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.memory_plan import shape_from_config
from pagefleet.runtime.model.load import find_checkpoint
from pagefleet.runtime.plan_command import read_model_config
from pagefleet.runtime.sizes import format_size
from pagefleet.runtime.weights import tensor_infos

log = logging.getLogger(__name__)


def run_bench(config: Config) -> int:
    """Measure, print, and return 0, or 1 if a request failed."""
    from pagefleet.runtime import LLM

    workloads = chosen(config.bench, config.seed)
    text = read_text(config.bench.text)
    llm = LLM.from_config(config)
    try:
        source = TokenSource(llm.tokenizer.encode(text))
        reports = [measure(llm, source, workload, config) for workload in workloads]
        if config.bench.floor:
            add_floors(llm, workloads, reports)
    finally:
        llm.close()
    if config.bench.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=2))
    else:
        for report in reports:
            _print_report(report)
    return 1 if any(report["errors"] for report in reports) else 0


def measure(llm: Any, source: TokenSource, workload: Workload, config: Config) -> dict[str, Any]:
    """Warm up and run a workload `bench.runs` times on an engine; the report as plain JSON values."""
    settings = config.bench
    if settings.warmup:
        short = warmup(workload, settings.warmup)
        drive(llm, source.prompts(short, config.seed, run=-1), short.new, f"{workload.name}-warmup")
    prompts = [source.prompts(workload, config.seed, run) for run in range(settings.runs)]
    runs = [drive(llm, each, workload.new, f"{workload.name}-{run}") for run, each in enumerate(prompts)]
    return {
        "workload": workload.name,
        "shape": workload.describe(),
        "prompts_fingerprint": fingerprint([p for each in prompts for p in each]),
        **summarize(runs, llm.metrics()),
    }


def add_floors(llm: Any, workloads: list[Workload], reports: list[dict[str, Any]]) -> None:
    """Measure the machine's ceilings and add each workload's floor, and the ratio to it, to its report.

    Run after the workloads: it takes memory of its own, which must not be in their peak. A model whose sizes are not
    understood has no floor; the log says why.
    """
    precision = llm.config.precision.name
    try:
        sizes = model_sizes(llm.config)
    except ModelError as error:
        log.warning("no floor: %s", error)
        return
    ceilings = _ceilings(llm.backend, [precision])
    for workload, report in zip(workloads, reports, strict=True):
        least = floor(workload, sizes, ceilings, precision, llm.kv_dtype)
        report["ceilings"], report["floor"] = ceilings.as_dict(), least.as_dict()
        report["times_floor"] = report["seconds"] / least.seconds


def ceilings_of(config: Config, precisions: Collection[str]) -> Ceilings:
    """The ceilings of the device that a configuration names, without a model."""
    return _ceilings(registry.create(config.backend.name, BackendOptions(threads=config.backend.threads)), precisions)


def _ceilings(backend: Backend, precisions: Collection[str]) -> Ceilings:
    return measure_ceilings(backend.capabilities().device, backend.synchronize, precisions, pack=backend.ops().linear)


def model_sizes(config: Config) -> ModelSizes:
    """The sizes of a configured model, from its checkpoint's headers.

    Raises:
        ModelError: a header cannot be read, or a size is missing.
    """
    path = find_checkpoint(config.model.path, config.model.revision)
    model_config = read_model_config(path, config.model.trust_remote_code)
    return ModelSizes.of(tensor_infos(path), model_config, shape_from_config(model_config))


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{report['workload']}: {report['shape']}, on {report.get('backend', '?')} ({report.get('isa', '?')})"
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("seconds" if len(report["seconds_of_runs"]) == 1 else "seconds, median", f"{report['seconds']:.3f}")
    if "floor" in report:
        table.add_row("times the machine's floor", f"{report['times_floor']:.2f} x {report['floor']['seconds']:.3f} s")
    table.add_row("output tokens/s", f"{report['output_tokens_per_s']:.1f}")
    table.add_row("total tokens/s", f"{report['total_tokens_per_s']:.1f}")
    table.add_row("requests/s", f"{report['requests_per_s']:.2f}")
    table.add_row("KV hit rate", f"{report['kv_hit_rate']:.1%}")
    for key in ("time_to_first_token_s", "inter_token_latency_s", "request_latency_s"):
        shown = " / ".join("-" if v is None else f"{v * 1000:.1f}" for v in report[key].values())
        table.add_row(f"{key.removesuffix('_s').replace('_', ' ')}, ms (p50 / p90 / p99)", shown)
    if "step_overhead" in report:
        table.add_row("of the steps' time not in the model", f"{report['step_overhead']:.1%}")
    if "peak_memory_bytes" in report:
        table.add_row("peak memory of the process", format_size(report["peak_memory_bytes"]))
    console = Console()
    console.print(table)
    for message in report["error_messages"]:
        console.print(f"error: {message}", markup=False)
