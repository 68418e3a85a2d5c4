"""What a running job shows: a live line on a terminal, plain lines when piped. All on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from pagefleet.runtime.config import PROGRESS_KINDS, check_choice

_TELLING_SHARE = 0.1


@dataclass
class Counts:
    """Rows and work (bytes of rows) so far. `*_before` were committed by earlier runs."""

    rows_total: int = 0
    work_total: float = 0.0
    rows: int = 0
    work: float = 0.0
    rows_before: int = 0
    work_before: float = 0.0
    errors: int = 0
    output_tokens: int = 0

    def eta_s(self, elapsed_s: float) -> float | None:
        """Seconds left at this run's pace, by work rather than rows: long rows take longer. None while unknown.

        Unknown until a share of the work is done: rows run side by side, so the first ones to end tell next to nothing.
        """
        done = self.work - self.work_before
        if done < _TELLING_SHARE * (self.work_total - self.work_before) or done <= 0 or elapsed_s <= 0:
            return None
        return max(self.work_total - self.work, 0.0) * elapsed_s / done


class Progress:
    """Reports at an interval; base class and the silent kind."""

    interval_s = 1.0

    def __init__(self, stream: TextIO, counts: Counts, metrics: Callable[[], Mapping[str, Any]]) -> None:
        self._stream = stream
        self._counts = counts
        self._metrics = metrics
        self._started = self._shown = time.monotonic()

    def start(self) -> None:
        """Begin to show."""
        self._started = self._shown = time.monotonic()

    def tick(self) -> None:
        """Show the state if the interval has passed."""
        if time.monotonic() - self._shown >= self.interval_s:
            self._shown = time.monotonic()
            self._show()

    def say(self, text: str) -> None:
        """A message for a person."""
        _write(self._stream, text + "\n")

    def stop(self) -> None:
        """End the display."""

    def _show(self) -> None:
        """Nothing, in the silent kind."""

    def _facts(self) -> list[str]:
        counts, elapsed = self._counts, time.monotonic() - self._started
        metrics = self._metrics()
        speed = metrics.get("output_tokens_per_s")
        if speed is None and elapsed > 0:
            speed = counts.output_tokens / elapsed
        facts = [f"{counts.rows}/{counts.rows_total} rows"]
        if counts.errors:
            facts.append(f"{counts.errors} errors")
        facts.append(f"{speed or 0.0:.1f} tokens/s")
        for label, key in (("KV use", "block_utilization"), ("hit rate", "kv_hit_rate")):
            if isinstance(metrics.get(key), (int, float)):
                facts.append(f"{label} {100 * metrics[key]:.0f}%")
        facts.append(f"ETA {duration(counts.eta_s(elapsed))}")
        return facts


class PlainProgress(Progress):
    """A line every few seconds."""

    interval_s = 5.0

    def _show(self) -> None:
        self.say("  ".join(self._facts()))


class RichProgress(Progress):
    """One live bar."""

    interval_s = 0.25

    def start(self) -> None:
        super().start()
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%  {task.description}", markup=False),
            console=Console(file=self._stream),
        )
        self._task = self._bar.add_task("", total=max(self._counts.work_total, 1.0))
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._show()
        self._bar.stop()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._counts.work, description="  ".join(self._facts()))


def make_progress(kind: str, stream: TextIO, counts: Counts, metrics: Callable[[], Mapping[str, Any]]) -> Progress:
    """The display that `job.progress` asks for; `auto` looks whether the stream is a terminal.

    Raises:
        ConfigError: unknown kind.
    """
    check_choice("job.progress", kind, PROGRESS_KINDS)
    if kind == "auto":
        kind = "rich" if stream.isatty() else "plain"
    chosen = {"rich": RichProgress, "plain": PlainProgress, "off": Progress}[kind]
    return chosen(stream, counts, metrics)


def duration(seconds: float | None) -> str:
    """ "1h 02m", "3m 05s", "12s"; "?" for None."""
    if seconds is None:
        return "?"
    whole = int(seconds + 0.5)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def say(text: str, stream: TextIO | None = None) -> None:
    """A message outside the display."""
    _write(stream or sys.stderr, text + "\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        pass  # a closed terminal or pipe is no reason to stop computing
