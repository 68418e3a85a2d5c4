"""Rows stream through a job: memory does not grow with their number but for a few bytes each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROBE = Path(__file__).with_name("memory_probe.py")
BYTES_PER_ROW = 250  # 8 for the journal's offset, at most 65 for the id while its table grows, and room for noise


def probe(folder: Path, rows: int) -> dict:
    done = subprocess.run([sys.executable, PROBE, folder, str(rows)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_more_than_three_times_the_rows_take_next_to_no_more_memory(tmp_path):
    few = probe(tmp_path / "few", 5_000)
    many = probe(tmp_path / "many", 17_000)
    assert few["code"] == many["code"] == 0
    grown = (many["peak_kib"] - few["peak_kib"]) * 1024
    assert grown < 12_000 * BYTES_PER_ROW, f"{grown / 12_000:.0f} bytes a row"


def test_importing_the_job_package_loads_nothing_heavy():
    code = "import sys, pagefleet.runtime.job; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "pagefleet.runtime.job.batch_job" in loaded, done.stderr
    assert not loaded & {"torch", "transformers", "pyarrow", "rich", "zstandard"}
