"""tools/device_check.py without a card: the whole path of the script, and what it does when a section goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagefleet.kernels import triton as kernels

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "device_check.py"
# not part of an installation of torch, triton and transformers
NOT_THERE = ("hydra", "omegaconf", "llguidance", "pyarrow", "zstandard")

needs_triton = pytest.mark.skipif(bool(kernels.unavailable()), reason=str(kernels.unavailable()))


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from device_checks import report, sections, supervisor

    yield report, sections, supervisor
    for name in [name for name in sys.modules if name.startswith("device_checks")]:
        del sys.modules[name]


@needs_triton
def test_every_section_runs_dry_with_torch_triton_and_transformers_alone(tmp_path, checks):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({NOT_THERE!r}))\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--dry", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    sections = {section.name for section in checks[1].SECTIONS}
    assert {row["section"] for row in report["rows"]} == set(report["section_seconds"]) == sections
    assert [row["name"] for row in report["rows"] if not row["ok"]] == []
    assert {"card", "arch", "torch", "triton", "transformers", "driver"} <= set(report["machine"])
    for name in sections:
        assert f"### {name}" in done.stdout


@needs_triton
def test_without_a_card_the_reason_is_a_row_and_the_exit_code_2():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--only", "ceilings"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    if done.returncode != 2:
        pytest.skip("there is a card here")
    assert "backend 'cuda' cannot run here" in done.stdout or "backend 'rocm' cannot run here" in done.stdout


def test_all_sections_together_fit_the_time_that_is_promised(checks):
    _, sections, supervisor = checks
    assert sum(section.budget_s for section in sections.SECTIONS) + supervisor.GRACE_S < 7.6 * 60


WORKER = """
import json, os, sys, time

def say(kind, **content):
    print("@device-check " + json.dumps({"kind": kind, **content}), flush=True)

say("machine", card="made up")
print("noise of a library")
for name in sys.argv[1:]:
    say("begin", section=name)
    if name == "crash":
        os._exit(139)
    if name == "hang":
        time.sleep(60)
    say("row", name="a number", value=3.0, unit="x", at_most=2.0 if name == "slow" else None, section=name)
    say("end", section=name, seconds=0.1)
    if name == "breaks the card":
        sys.exit(3)
"""


def test_a_section_that_crashes_or_hangs_is_a_row_and_the_others_run(checks, monkeypatch):
    report, _, supervisor = checks
    monkeypatch.setattr(supervisor, "GRACE_S", 0.4)
    names = ["good", "crash", "slow", "hang", "breaks the card", "last"]
    run = supervisor.Supervisor(lambda left: [sys.executable, "-c", WORKER, *left], dict.fromkeys(names, 1.0), 30.0)
    run.run(names)
    said = {row.section: (row.met, row.note) for row in run.rows}
    assert [row.section for row in run.rows] == names
    assert said["good"] == said["last"] == said["breaks the card"] == (None, "")
    assert said["crash"] == (False, "its process ended with exit code 139")
    assert said["hang"] == (False, "did not end in its time and was stopped")
    assert said["slow"][0] is False  # its target
    assert run.facts == {"card": "made up"}
    assert "| a number | 3 x | <= 2 | NOT MET |" in report.table(run.rows)


def test_when_the_time_is_up_what_was_not_run_is_named(checks):
    _, _, supervisor = checks
    run = supervisor.Supervisor(lambda left: [sys.executable, "-c", WORKER, *left], {"hang": 9.0, "never": 9.0}, 0.5)
    run.run(["hang", "never"])
    assert [(row.section, row.note) for row in run.rows][-1] == ("never", "not run: no time was left")
