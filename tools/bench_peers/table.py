"""The report of tools/bench.py as a Markdown table."""

from __future__ import annotations

from typing import Any


def markdown(report: dict[str, Any]) -> str:
    """One row an engine, one column a workload: median seconds, and how often the floor or the first engine's time."""
    names = list(report["workloads"])
    rows = [["engine", "settings", *names, "ready in", "peak memory"]]
    for label, engine in report["engines"].items():
        cells = [_cell(engine["workloads"][name]) for name in names]
        peak = max(w["peak_memory_bytes"] for w in engine["workloads"].values())
        settings = f"{engine['version']}; {engine['settings']}"
        rows.append([label, settings, *cells, f"{engine['load_seconds']:.1f} s", f"{peak / 2**20:.0f} MiB"])
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    lines = [head, "|---" * len(rows[0]) + "|", *body, ""]
    lines += [f"- {name}: {w['shape']}" for name, w in report["workloads"].items()]
    lines.append(
        f"- {report['model']}, {report['processor']}, {report['threads']} threads, median of {report['runs']} runs in "
        f"turns, {report['date']}; first engine's time = 1.00x"
    )
    if "ceilings" in report:
        products = ", ".join(f"{k} {v / 1e9:.0f}" for k, v in report["ceilings"]["products_per_s"].items())
        read = report["ceilings"]["read_bytes_per_s"] / 1e9
        lines.append(f"- measured ceilings: reads {read:.1f} GB/s; products, G operations/s: {products}")
    return "\n".join(lines)


def _cell(result: dict[str, Any]) -> str:
    floor = f", {result['times_floor']:.2f}x floor" if "times_floor" in result else ""
    return f"{result['seconds']:.2f} s ({result['times_the_first']:.2f}x{floor})"
