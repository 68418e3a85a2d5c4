"""Run again: a finished job computes nothing, an unfinished one only what is missing, another one is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.job.journal import Journal, JournalError, seal, unseal

ROWS = [{"id": f"r{i}", "prompt": f"prompt {i}"} for i in range(60)]


def stop_in_the_middle(bench, fake_engine, **job):
    bench.write(*ROWS, b"bad row")
    engine = fake_engine(fail_at_step=8)
    assert bench.run(engine, max_in_flight=10, **job) == 1
    assert bench.journal.exists()
    assert not bench.output.exists()
    return engine


def computed(engine):
    return {name for name in engine.prompts if name not in engine.aborted}


def test_a_failing_engine_loses_no_finished_row_and_the_rest_is_computed_once(bench, fake_engine):
    first = stop_in_the_middle(bench, fake_engine)
    assert "the device fell over" in bench.messages
    assert "run the same command again to resume" in bench.messages
    assert "Traceback" not in bench.messages
    assert "RuntimeError" in Path(f"{bench.output}.error.log").read_text()
    assert first.closed
    second = fake_engine()
    assert bench.run(second, max_in_flight=10) == 3
    assert not computed(first) & computed(second)
    assert len(computed(first)) + len(computed(second)) == len(ROWS)
    assert [r["id"] for r in bench.results()[:60]] == [r["id"] for r in ROWS]
    assert bench.summary["rows"]["resumed"] == len(computed(first))


def test_resumed_output_is_the_bytes_of_an_uninterrupted_one(bench, fake_engine):
    bench.write(*ROWS, b"bad row")
    bench.run()
    whole = bench.output.read_bytes()
    bench.output = bench.folder / "out" / "again.jsonl"
    stop_in_the_middle(bench, fake_engine)
    bench.run()
    assert bench.output.read_bytes() == whole


def test_a_finished_job_run_again_does_no_work_and_says_so(bench):
    bench.write(*ROWS, b"bad row")
    assert bench.run() == 3
    before = bench.output.stat().st_mtime_ns
    assert bench.run() == 3
    assert len(bench.engines) == 1
    assert "nothing to compute" in bench.messages
    assert bench.output.stat().st_mtime_ns == before
    assert bench.left_behind() == ["results.jsonl", "results.jsonl.summary.json"]


@pytest.mark.parametrize("changed", ["input", "settings", "defaults", "files"])
def test_another_job_on_the_same_journal_is_refused_with_what_changed(bench, fake_engine, changed):
    stop_in_the_middle(bench, fake_engine)
    journal = bench.journal.read_bytes()
    shaping, job = None, {}
    if changed == "input":
        bench.write(*ROWS, {"prompt": "bad row"})
        expected = "content of input file rows.jsonl changed"
    elif changed == "settings":
        shaping = {"model.path": "another"}
        expected = "model.path was 'org/tiny-model', is 'another'"
    elif changed == "defaults":
        job["defaults"] = {"max_tokens": 3}
        expected = "job.defaults was {}, is {'max_tokens': 3}"
    else:
        bench.write(path=bench.input.with_name("z.jsonl"))
        bench.input = bench.input.parent
        expected = "the input had 1 files, has 2"
    assert bench.run(shaping=shaping, **job) == 2
    assert expected in bench.messages
    assert "job.on_mismatch=restart" in bench.messages
    assert bench.journal.read_bytes() == journal
    assert bench.run(shaping=shaping, on_mismatch="restart", **job) in (0, 3)
    assert len(bench.engines[-1].prompts) >= 60


def test_restart_on_a_matching_journal_still_resumes(bench, fake_engine):
    first = stop_in_the_middle(bench, fake_engine)
    second = fake_engine()
    assert bench.run(second, on_mismatch="restart") == 3
    assert not computed(first) & computed(second)


def test_a_moved_input_of_the_same_content_resumes(bench, fake_engine):
    stop_in_the_middle(bench, fake_engine)
    bench.input = bench.input.rename(bench.folder / "renamed.jsonl")
    assert bench.run() == 3
    assert "resuming" in bench.messages


@pytest.mark.parametrize("made_by", ["someone else", "another job", "edited"])
def test_an_output_that_is_not_this_jobs_is_never_overwritten_unasked(bench, made_by):
    bench.write(*ROWS)
    if made_by == "someone else":
        bench.output.parent.mkdir()
        bench.output.write_text("precious")
    else:
        bench.run()
        if made_by == "edited":
            bench.output.write_text("precious")
        else:
            bench.write(*ROWS[:5])
    kept = bench.output.read_bytes()
    assert bench.run() == 2
    assert bench.output.read_bytes() == kept
    assert bench.run(on_mismatch="restart") == 0
    assert bench.output.read_bytes() != kept


def test_an_output_that_appears_while_the_job_is_down_is_not_overwritten(bench, fake_engine):
    stop_in_the_middle(bench, fake_engine)
    bench.output.write_text("precious")
    assert bench.run() == 2
    assert bench.output.read_text() == "precious"


def test_a_torn_last_line_is_cut_off_and_only_its_row_computed_again(bench, fake_engine):
    stop_in_the_middle(bench, fake_engine)
    data = bench.journal.read_bytes()
    whole = data.count(b"\n")
    bench.journal.write_bytes(data[:-7])
    assert bench.run(engine := fake_engine()) == 3
    assert "repaired the journal" in bench.messages
    assert len(engine.prompts) + (whole - 2) == 60 or len(engine.prompts) + (whole - 2) == 61
    assert len(bench.results()) == 61


@pytest.mark.parametrize("tail", [b"\0" * 4096, b'{"crc":"00000000","row":1,"code":"ok","result":{}}\n', b"\n\n", b"{"])
def test_any_rubbish_at_the_tail_is_repaired(bench, fake_engine, tail):
    stop_in_the_middle(bench, fake_engine)
    with bench.journal.open("ab") as file:
        file.write(tail)
    assert bench.run() == 3
    assert "repaired" in bench.messages
    assert len(bench.results()) == 61


def test_damage_in_the_middle_of_the_journal_is_refused_and_names_the_line(bench, fake_engine):
    stop_in_the_middle(bench, fake_engine)
    lines = bench.journal.read_bytes().splitlines(keepends=True)
    flipped = bytearray(lines[3])
    flipped[40] ^= 1
    bench.journal.write_bytes(b"".join([*lines[:3], bytes(flipped), *lines[4:]]))
    assert bench.run() == 2
    assert "damaged at line 4" in bench.messages
    bench.journal.write_bytes(b"".join([*lines[:3], *lines[4:]]))  # what the message advises
    assert bench.run() == 3
    assert len(bench.results()) == 61


def test_a_file_that_is_no_journal_is_refused(bench):
    bench.write(*ROWS)
    bench.output.parent.mkdir()
    bench.journal.write_text("my notes\n")
    assert bench.run() == 2
    assert "is not a journal" in bench.messages


def test_journal_lines_know_when_they_are_damaged():
    line = seal(b'"row":1,"code":"ok","result":{"a":"b"}')
    assert unseal(line) == b'"row":1,"code":"ok","result":{"a":"b"}'
    for cut in range(len(line)):
        assert unseal(line[:cut]) is None
    for position in range(len(line)):
        damaged = bytearray(line)
        damaged[position] ^= 0x20 if position < len(line) - 1 else 1
        assert unseal(bytes(damaged)) != unseal(line)


def test_a_journal_gives_back_what_it_was_given_in_any_order(tmp_path):
    journal = Journal.create(tmp_path / "j", {"a": 1}, 0.0)
    for row in (5, 0, 3):
        journal.append(row, "ok", b'{"row":%d}' % row)
    journal.close()
    journal = Journal.open(tmp_path / "j", 0.0)
    assert journal.header == {"a": 1}
    assert [row in journal for row in range(7)] == [True, False, False, True, False, True, False]
    assert journal.result(3) == b'{"row":3}'
    journal.close()
    (tmp_path / "j").write_bytes(b"")
    with pytest.raises(JournalError):
        Journal.open(tmp_path / "j", 0.0)


def test_a_second_job_on_one_output_is_refused_and_told_the_first_ones_pid(bench, fake_engine):
    bench.write(*ROWS)
    nested = {}

    class Meeting(fake_engine):
        def step(self):
            if self.steps == 0:
                nested["code"] = bench.run(fake_engine())
                nested["messages"] = bench.messages
            return super().step()

    assert bench.run(Meeting()) == 0
    assert nested["code"] == 2
    assert f"pid {os.getpid()} on " in nested["messages"]
    assert len(bench.results()) == 60


@pytest.mark.parametrize("where", ["input itself", "link to the input", "in the input folder", "in the glob"])
def test_an_output_among_the_inputs_is_refused(bench, where):
    bench.write(*ROWS)
    kept = bench.input.read_bytes()
    if where == "input itself":
        bench.output = bench.input
    elif where == "link to the input":
        bench.output = bench.folder / "link.jsonl"
        bench.output.symlink_to(bench.input)
    else:
        bench.output = bench.input.parent / "results.jsonl"
        original, bench.input = bench.input, bench.input.parent / ("*.jsonl" if "glob" in where else "")
    assert bench.run() == 2
    assert "job.output" in bench.messages
    assert (original if "in the" in where else bench.input).read_bytes() == kept


@pytest.mark.parametrize("output", ["", "in", "in/rows.jsonl/x.jsonl", "/proc/no/such.jsonl", "out/results.csv"])
def test_an_output_that_cannot_be_written_is_refused_before_the_engine_is_made(bench, output):
    bench.write(*ROWS)
    bench.output = str(bench.folder / output) if output and output[0] != "/" else output
    assert bench.run() == 2
    assert bench.messages.startswith("refused: job.output")
    assert bench.engines == []


@pytest.mark.parametrize(
    "job",
    [
        {"on_mismatch": "maybe"},
        {"max_in_flight": 0},
        {"fsync_interval_s": -1},
        {"progress": "dots"},
        {"defaults": {"temprature": 1}},
        {"defaults": {"temperature": -1}},
        {"defaults": {"id": "x"}},
    ],
)
def test_a_wrong_job_value_is_refused_by_name(bench, job):
    bench.write(*ROWS)
    assert bench.run(**job) == 2
    assert f"job.{next(iter(job))}" in bench.messages


def test_a_model_that_is_refused_leaves_nothing_behind(bench):
    bench.write(*ROWS)

    class Refusing:
        def __init__(self):
            raise ModelError("mamba: recurrent state is not supported")

    import io

    from pagefleet.runtime.config import Config
    from pagefleet.runtime.job import run_job

    config, err = Config(), io.StringIO()
    config.job.input, config.job.output = str(bench.input), str(bench.output)
    assert run_job(config, Refusing, stderr=err) == 2
    assert "mamba" in err.getvalue()
    assert bench.left_behind() == []


def test_an_engine_that_forgets_a_request_is_found_out(bench, fake_engine):
    class Forgetting(fake_engine):
        def submit(self, request_id, prompt, params):
            if request_id != "3":
                super().submit(request_id, prompt, params)

    bench.write(*ROWS)
    assert bench.run(Forgetting()) == 1
    assert "never answered 1 requests" in bench.messages
    assert bench.run() == 0
    assert len(bench.results()) == 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_cleanly_and_says_how_to_resume(bench, fake_engine, number):
    class Interrupted(fake_engine):
        def step(self):
            if self.steps == 4:
                os.kill(os.getpid(), number)
            return super().step()

    bench.write(*ROWS)
    before = signal.getsignal(number)
    engine = Interrupted()
    assert bench.run(engine, max_in_flight=10) == 130
    assert signal.getsignal(number) is before
    assert engine.closed
    assert engine.aborted
    assert "run the same command again to resume" in bench.messages
    assert "results.jsonl.lock" not in bench.left_behind()
    second = fake_engine()
    assert bench.run(second) == 0
    assert not computed(engine) & computed(second)
    assert len(bench.results()) == 60


def test_a_job_runs_outside_the_main_thread(bench):
    bench.write(*ROWS)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(bench.run()))
    thread.start()
    thread.join(30)
    assert codes == [0]


def test_plain_progress_is_lines_with_rows_speed_and_time_left(bench, fake_engine, monkeypatch):
    from pagefleet.runtime.job.progress import PlainProgress

    monkeypatch.setattr(PlainProgress, "interval_s", 0.0)

    class Slow(fake_engine):
        def step(self):
            time.sleep(0.002)
            return super().step()

    bench.write(*ROWS)
    assert bench.run(Slow(), max_in_flight=5) == 0
    line = next(m for m in bench.messages.splitlines() if "ETA" in m and not m.endswith("?"))
    assert "/60 rows" in line
    assert "tokens/s" in line
    assert "KV use 25%" in line
    assert "hit rate 50%" in line


def test_rich_progress_draws_on_a_terminal(bench):
    bench.write(*ROWS)
    assert bench.run(progress="rich") == 0
    assert "60/60 rows" in bench.messages


def test_the_time_left_is_by_work_of_this_run_and_unknown_until_a_tenth_of_it_is_done():
    from pagefleet.runtime.job.progress import Counts

    counts = Counts(rows_total=100, work_total=1000.0, work=200.0, work_before=200.0)
    assert counts.eta_s(5.0) is None
    counts.work = 279.0
    assert counts.eta_s(5.0) is None
    counts.work = 400.0
    assert counts.eta_s(5.0) == 15.0
