"""The summary of a job, as JSON beside the output and as text."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagefleet.runtime.job.files import replace_file
from pagefleet.runtime.job.journal import OK, Journal
from pagefleet.runtime.job.progress import duration


def make_summary(
    journal: Journal,
    output: Path,
    made: tuple[int, str],
    resumed: int,
    wall_time_s: float,
    tokens: Counter[str],
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything a later run or a person wants to know.

    Args:
        made: (bytes, SHA-256) of the output.
        resumed: rows that earlier runs had committed.
        wall_time_s, tokens, metrics: of this run; the engine's measures keep their names.
    """
    total = len(journal)
    good = journal.codes[OK]
    errors = {code: count for code, count in sorted(journal.codes.items()) if code != OK}
    return {
        **metrics,
        "job": journal.header["job"],
        "output": {"name": output.name, "bytes": made[0], "sha256": made[1]},
        "rows": {
            "total": total,
            "good": good,
            "error": total - good,
            "resumed": resumed,
            "computed": total - resumed,
        },
        "errors_by_code": errors,
        "tokens": {name: tokens[name] for name in ("prompt", "completion", "cached")},
        "wall_time_s": round(wall_time_s, 3),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fingerprint": journal.header["fingerprint"],
    }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Atomically; OSError if it cannot be written."""
    replace_file(path, json.dumps(_finite(summary), indent=2, ensure_ascii=False, default=str).encode() + b"\n")


def summary_text(summary: Mapping[str, Any], output: Path) -> str:
    """A few lines for a person."""
    rows = summary["rows"]
    lines = [f"{rows['good']} of {rows['total']} rows good, {rows['error']} errors  ->  {output}"]
    if summary["errors_by_code"]:
        lines.append("errors: " + ", ".join(f"{code} {n}" for code, n in summary["errors_by_code"].items()))
    took = f"time {duration(summary['wall_time_s'])}"
    if rows["resumed"]:
        took += f" for {rows['computed']} rows ({rows['resumed']} were done before)"
    tokens = summary["tokens"]
    took += f"; {tokens['prompt']} prompt tokens ({tokens['cached']} from the cache), {tokens['completion']} generated"
    lines.append(took)
    measures = [text for text in (_measure(summary, *m) for m in _MEASURES) if text]
    if measures:
        lines.append(", ".join(measures))
    if summary.get("execution"):
        lines.append(f"model run {summary['execution']}")
    return "\n".join(lines)


_MEASURES = (
    ("output_tokens_per_s", "{:.1f} output tokens/s", 1),
    ("total_tokens_per_s", "{:.1f} tokens/s in all", 1),
    ("kv_hit_rate", "KV hit rate {:.0f}%", 100),
    ("block_utilization", "block utilisation {:.0f}%", 100),
    ("fragmentation", "fragmentation {:.1f}%", 100),
    ("fault_rate", "fault rate {:.2g}", 1),
    ("preemptions", "{:.0f} preemptions", 1),
    ("acceptance_rate", "{:.0f}% of guessed tokens accepted", 100),
)


def _measure(summary: Mapping[str, Any], key: str, text: str, scale: float) -> str:
    value = summary.get(key)
    return text.format(value * scale) if isinstance(value, (int, float)) else ""


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: null."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
