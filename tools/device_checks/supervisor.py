"""Starts workers, listens, ends what hangs, and writes the report."""

from __future__ import annotations

import datetime
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from .report import Row, failure, table
from .sections import SECTIONS
from .worker import BROKEN, MARK, NO_CARD, row_of

GRACE_S = 15.0  # beyond a section's budget, for the case that is running when it ends
START_S = 90.0  # for a worker to import its libraries and find its card


class Supervisor:
    """What is known so far, and until when there is time.

    Args:
        command: starts a worker for some sections.
        budgets: section -> seconds that it may take.
        limit_s: for everything.
    """

    def __init__(self, command: Callable[[list[str]], list[str]], budgets: Mapping[str, float], limit_s: float) -> None:
        self.command, self.budgets = command, budgets
        self.began, self.deadline = monotonic(), monotonic() + limit_s
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

    def run(self, names: list[str]) -> None:
        """All sections, with as many workers as it takes: one that dies has at least one section less to do."""
        left = list(names)
        while left and monotonic() < self.deadline:
            ended = self._one_worker(left)
            if not self.facts:  # there is no card, or nothing to import
                return
            left = left[max(1, ended) :]
        for name in left:
            self._add(failure(name, "not run: no time was left", name))

    def _one_worker(self, names: list[str]) -> int:
        """Listen to one worker until it ends or must be ended; how many of its sections are over."""
        worker = subprocess.Popen(self.command(names), stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_listen, args=(worker, lines), daemon=True).start()
        running, ended, until = None, 0, min(monotonic() + START_S, self.deadline)
        while True:
            try:
                line = lines.get(timeout=max(0.0, until - monotonic()))
            except queue.Empty:
                self._gone(running, "did not end in its time and was stopped")
                worker.kill()
                return ended + 1
            if line is None:
                break
            message = json.loads(line)
            kind = message.pop("kind")
            if kind == "machine":
                self.facts = self.facts or message
            elif kind == "begin":
                running = message["section"]
                until = min(monotonic() + self.budgets[running] + GRACE_S, self.deadline)
            elif kind == "row":
                self._add(row_of(message))
            elif kind == "end":
                self.seconds[message["section"]] = message["seconds"]
                running, ended, until = None, ended + 1, min(monotonic() + GRACE_S, self.deadline)
        code = worker.wait()
        if running is not None or (code not in (0, BROKEN, NO_CARD) and not ended):
            self._gone(running, f"its process ended with exit code {code}")
            ended += running is not None
        return ended

    def _gone(self, running: str | None, reason: str) -> None:
        self._add(failure(running or "start", reason, running or "start"))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        mark = {None: " ", True: "+", False: "!"}[row.met]
        value = "" if row.value is None else f"{row.value:,.4g} {row.unit}"
        print(f"{monotonic() - self.began:6.1f} s {mark} {row.section}: {row.name} {value} {row.note}", flush=True)

    def report(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": self.facts,
            "seconds": monotonic() - self.began,
            "section_seconds": self.seconds,
            "rows": [row.as_dict() for row in self.rows],
        }


def _listen(worker: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(MARK):
            lines.put(line.removeprefix(MARK))
        else:
            sys.stderr.write(line)
    lines.put(None)


def supervise(names: list[str], dry: bool, limit_s: float, json_file: Path | None) -> int:
    """Run the sections, print the table and write the JSON; the exit code of the script."""
    script = [sys.executable, str(Path(__file__).resolve().parents[1] / "device_check.py"), *(["--dry"] if dry else [])]
    budgets = {s.name: s.budget_s for s in SECTIONS}
    supervisor = Supervisor(lambda left: [*script, "--worker", *left], budgets, limit_s)
    supervisor.run(names)
    print("\n" + table(supervisor.rows) + "\n")
    missed = [row for row in supervisor.rows if row.met is False]
    targets = [row for row in supervisor.rows if row.target]
    seconds = monotonic() - supervisor.began
    print(
        f"{supervisor.facts.get('card', 'no card')}: {len(supervisor.rows)} rows in {seconds:.0f} s, "
        f"{sum(row.met is True for row in targets)} of {len(targets)} targets met, "
        f"{sum(not row.ok for row in supervisor.rows)} failures"
    )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(supervisor.report(), indent=1) + "\n", encoding="utf-8")
    if not supervisor.facts:
        return 2
    return 1 if missed else 0
