"""Killed at any instant and run again: one result per row, none recomputed that was committed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crash_job.py")


def rows(folder: Path, count: int) -> None:
    lines = [json.dumps({"id": f"r{i}", "prompt": f"prompt number {i}"}) for i in range(count)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def script(mode: str, folder: Path) -> dict:
    done = subprocess.run([sys.executable, SCRIPT, mode, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def start(folder: Path, pause_s: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, "run", folder, str(pause_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def journal_lines(folder: Path) -> int:
    journal = folder / "out" / "results.jsonl.journal"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def wait_for(condition, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def result_ids(folder: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (folder / "out" / "results.jsonl").read_text().splitlines()]


def computed(folder: Path) -> list[str]:
    return (folder / "computed.log").read_text().split()


def test_a_job_killed_at_every_change_of_a_file_ends_right(tmp_path):
    rows(tmp_path, 6)
    done = script("sweep", tmp_path)
    assert done["points"] > 60
    assert done["kills"] > done["points"]


def test_a_full_disk_stops_the_job_with_nothing_lost_wherever_it_strikes(tmp_path):
    rows(tmp_path, 12)
    assert script("full-disk", tmp_path)["stops"] > 10


def test_kill_9_at_row_50_of_100_then_resume(tmp_path):
    rows(tmp_path, 100)
    process = start(tmp_path, 0.005)
    wait_for(lambda: journal_lines(tmp_path) > 50)
    process.kill()
    process.communicate()
    assert not (tmp_path / "out" / "results.jsonl").exists()
    committed = journal_lines(tmp_path) - 1
    assert 50 <= committed < 100
    out, err = start(tmp_path, 0.0).communicate(timeout=60)
    assert f"resuming: {committed} rows are done already" in err
    assert "100 of 100 rows good" in out
    assert result_ids(tmp_path) == [f"r{i}" for i in range(100)]
    assert len(computed(tmp_path)) <= 100 + 4  # what was in flight or in the last step, at most
    before = computed(tmp_path)
    again = start(tmp_path, 0.0)
    assert "nothing to compute" in again.communicate(timeout=60)[1]
    assert again.returncode == 0
    assert computed(tmp_path) == before


def test_kill_9_at_random_moments_again_and_again(tmp_path):
    rows(tmp_path, 60)
    draw = random.Random(3)
    kills = 0
    while kills < 8:
        process = start(tmp_path, 0.01)
        lock = tmp_path / "out" / "results.jsonl.lock"
        wait_for(
            lambda p=process, lock=lock: p.poll() is not None or (lock.exists() and str(p.pid) in lock.read_text())
        )
        time.sleep(draw.uniform(0.0, 0.1))
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
    assert kills >= 2
    assert start(tmp_path, 0.0).wait(timeout=60) == 0
    assert result_ids(tmp_path) == [f"r{i}" for i in range(60)]
    assert len(computed(tmp_path)) <= 60 + 4 * kills


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_with_130_and_a_second_command_resumes(tmp_path, number):
    rows(tmp_path, 100)
    process = start(tmp_path, 0.005)
    wait_for(lambda: journal_lines(tmp_path) > 20)
    process.send_signal(number)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "run the same command again to resume" in err
    assert "Traceback" not in err
    assert start(tmp_path, 0.0).wait(timeout=60) == 0
    assert result_ids(tmp_path) == [f"r{i}" for i in range(100)]
    assert sorted(set(computed(tmp_path)), key=int) == sorted(computed(tmp_path), key=int)  # a clean end loses nothing


def test_a_second_ctrl_c_ends_at_once_in_the_middle_of_a_step(tmp_path):
    rows(tmp_path, 20)
    process = start(tmp_path, 30.0)
    wait_for(lambda: journal_lines(tmp_path) == 1)
    time.sleep(0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert time.monotonic() - began < 10


def test_a_second_process_is_refused_and_a_killed_one_holds_no_lock(tmp_path):
    rows(tmp_path, 100)
    first = start(tmp_path, 0.02)
    wait_for(lambda: journal_lines(tmp_path) > 2)
    second = start(tmp_path, 0.0)
    err = second.communicate(timeout=30)[1]
    assert second.returncode == 2
    assert f"pid {first.pid} on {os.uname().nodename}" in err
    first.kill()
    first.communicate()
    assert start(tmp_path, 0.0).wait(timeout=60) == 0
