"""Runs batch jobs with a fake engine in processes that die at a chosen instant. Run as a script by the tests.

crash_job.py run FOLDER            one job; FOLDER has rows.jsonl, computed ids go to computed.log
crash_job.py sweep FOLDER          kill at every system call that changes a file, resume, check; prints what it did
crash_job.py full-disk FOLDER      files may not grow beyond ever larger limits; then resume, check
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from pagefleet.runtime.config import Config
from pagefleet.runtime.job import run_job
from pagefleet.runtime.job.journal import Journal

_spec = importlib.util.spec_from_file_location("job_fake_engine", Path(__file__).parents[1] / "job" / "fake_engine.py")
_fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fake)


class SlowEngine(_fake.FakeEngine):
    """Takes a moment for each step, so that a kill from outside finds it at work."""

    pause_s = 0.0

    def step(self):
        time.sleep(self.pause_s)
        return super().step()


def job(folder: Path, out=None, err=None, pause_s: float = 0.0) -> int:
    config = Config()
    config.model.path = "m"
    config.job.input, config.job.output = str(folder / "rows.jsonl"), str(folder / "out" / "results.jsonl")
    config.job.fsync_interval_s, config.job.max_in_flight = 0.0, 4
    engine = SlowEngine(log=folder / "computed.log")
    engine.pause_s = pause_s
    return run_job(config, lambda: engine, stdout=out or io.StringIO(), stderr=err or io.StringIO())


class KillAt:
    """Dies by SIGKILL at the `point`-th event; an event is the instant before, in the middle of, or after a call."""

    def __init__(self, point: int) -> None:
        self.point = point
        self.events = 0
        self._write = os.write
        os.write = self._torn_write
        for name in ("fsync", "replace", "unlink", "ftruncate"):
            setattr(os, name, self._around(getattr(os, name)))
        Journal.result = self._around(Journal.result)

    def event(self) -> bool:
        self.events += 1
        return self.events == self.point

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _torn_write(self, fd, data):
        if self.event():
            self.die()
        if self.event():
            self._write(fd, bytes(data)[: len(data) // 2])
            self.die()
        count = self._write(fd, data)
        if self.event():
            self.die()
        return count

    def _around(self, call):
        def wrapped(*args, **kwargs):
            if self.event():
                self.die()
            result = call(*args, **kwargs)
            if self.event():
                self.die()
            return result

        return wrapped


def forked(action) -> int:
    """Exit status of `action` in a child process; negative: the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check(folder: Path, committed: Counter) -> None:
    """One result a row in order, nothing left over; `committed` rows were not computed again after they were."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    results = [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]
    assert [r["id"] for r in results] == [r["id"] for r in rows]
    assert all(r["outputs"][0]["text"] == row["prompt"][::-1] + "/0" for r, row in zip(results, rows, strict=True))
    assert sorted(os.listdir(folder / "out")) == ["results.jsonl", "results.jsonl.summary.json"], os.listdir(
        folder / "out"
    )
    computed = computed_rows(folder)
    assert set(computed) == {str(i) for i in range(len(rows))}
    assert all(computed[row] == times for row, times in committed.items()), (computed, committed)


def computed_rows(folder: Path) -> Counter:
    log = folder / "computed.log"
    return Counter(log.read_text().split()) if log.exists() else Counter()


def committed_rows(folder: Path) -> Counter:
    """Rows whose journal line is whole, with how often each was computed until then."""
    computed = computed_rows(folder)
    journal = folder / "out" / "results.jsonl.journal"
    found: Counter = Counter()
    for line in journal.read_bytes().splitlines(keepends=True) if journal.exists() else ():
        if line.endswith(b"\n") and b'"row":' in line:
            row = str(json.loads(line)["row"])
            found[row] = computed[row]
    return found


def fresh(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "computed.log").unlink(missing_ok=True)


def killed_at(folder: Path, point: int) -> int:
    def action() -> int:
        KillAt(point)
        return job(folder)

    return forked(action)


def assert_finished(folder: Path) -> None:
    """Running again computes nothing and changes nothing."""
    before = computed_rows(folder), (folder / "out" / "results.jsonl").stat().st_mtime_ns
    err = io.StringIO()
    assert job(folder, err=err) == 0
    assert "nothing to compute" in err.getvalue()
    assert before == (computed_rows(folder), (folder / "out" / "results.jsonl").stat().st_mtime_ns)


def sweep(folder: Path) -> dict:
    """Every instant once, and a second kill during the resume at a third of them."""
    kills = point = 0
    while True:
        point += 1
        fresh(folder)
        if killed_at(folder, point) != -signal.SIGKILL:
            break
        kills += 1
        committed = committed_rows(folder)
        if point % 3 == 0 and killed_at(folder, 2 + point % 40) == -signal.SIGKILL:
            kills += 1
            for row, times in committed_rows(folder).items():
                committed.setdefault(row, times)
        assert forked(lambda: job(folder)) == 0, point
        check(folder, committed)
        assert_finished(folder)
    return {"kills": kills, "points": point - 1}


def full_disk(folder: Path) -> dict:
    """The journal, the output or the summary meets the end of the disk."""
    stops = limit = 0
    while True:
        limit += 150
        fresh(folder)
        (folder / "out").mkdir()
        err = io.StringIO()

        def action(limit=limit) -> int:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            with (folder / "messages").open("w") as err:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                return job(folder, err=err)

        code = forked(action)
        if code == 0:
            break
        stops += 1
        text = (folder / "messages").read_text()
        committed = committed_rows(folder)
        if committed:
            assert code == 1, (code, text)
            assert "File too large" in text, text
        assert job(folder, err=err) == 0, err.getvalue()
        check(folder, committed)
    return {"stops": stops}


def main() -> int:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "run":
        return job(folder, sys.stdout, sys.stderr, pause_s=float(sys.argv[3]))
    print(json.dumps({"sweep": sweep, "full-disk": full_disk}[mode](folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
