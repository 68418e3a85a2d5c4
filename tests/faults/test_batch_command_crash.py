"""`pagefleet batch` on a real model, killed in the middle: what was committed stays as it is and is not redone."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pagefleet.runtime.cli import main

ROWS = 24
_spec = importlib.util.spec_from_file_location("faults_tiny", Path(__file__).parents[1] / "models" / "tiny.py")
_tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tiny)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of a tiny llama with one token a character, and rows whose prompts share no block."""
    folder = tmp_path_factory.mktemp("job")
    characters = ["<bos>", *map(chr, range(32, 127))]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>").save_pretrained(folder / "model")
    _tiny.tiny_model("llama").save_pretrained(folder / "model")
    sampling = {"max_tokens": 40, "logprobs": 1}
    rows = [{"id": f"r{i}", "prompt": f"{i} is this row", "temperature": i % 2, **sampling} for i in range(ROWS)]
    rows[7] = {"id": "bad", "prompt": ""}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(folder: Path, output: Path) -> list[str]:
    files = [f"model.path={folder / 'model'}", f"job.input={folder / 'rows.jsonl'}", f"job.output={output}"]
    exact = ["precision=fp32", "precision.exact=true", "cache.num_blocks=100", "scheduler.max_sequences=2"]
    return ["batch", "backend=cpu", "backend.threads=1", *files, *exact]


def start(folder: Path, output: Path) -> subprocess.Popen:
    line = [sys.executable, "-m", "pagefleet.runtime.cli", *command(folder, output)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


def whole_lines(journal: Path) -> bytes:
    """What of the journal a kill cannot have torn."""
    data = journal.read_bytes() if journal.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def when_journal_has(num_rows: int, journal: Path, process: subprocess.Popen) -> bytes:
    """Wait until that many rows are in the journal of a running job; the journal's whole lines."""
    end = time.monotonic() + 90
    while whole_lines(journal).count(b"\n") <= num_rows:  # the header is a line too
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "no rows came"
        time.sleep(0.002)
    return whole_lines(journal)


def test_killed_in_the_middle_it_ends_with_the_bytes_of_an_undisturbed_run_and_redoes_nothing(folder):
    undisturbed, output = folder / "undisturbed.jsonl", folder / "killed.jsonl"
    journal = folder / "killed.jsonl.journal"
    assert main(command(folder, undisturbed)) == 3  # one row is bad

    process = start(folder, output)
    when_journal_has(5, journal, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    kept = whole_lines(journal)
    committed = kept.count(b'"row":')
    assert 5 <= committed < ROWS

    process = start(folder, output)
    assert when_journal_has(committed + 1, journal, process).startswith(kept), "a resume changed committed rows"
    err = process.communicate(timeout=90)[1]
    assert process.returncode == 3, err
    assert f"resuming: {committed} rows are done already" in err
    assert output.read_bytes() == undisturbed.read_bytes()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    texts = [row["outputs"][0]["text"] for row in rows if row["id"] != "bad"]
    assert len(set(texts)) == ROWS - 1, "the rows must differ, or the comparison shows nothing"
    summary = json.loads(Path(f"{output}.summary.json").read_text())
    counts = {"total": ROWS, "good": ROWS - 1, "error": 1, "resumed": committed, "computed": ROWS - committed}
    assert summary["rows"] == counts
    done = {json.loads(line)["row"] for line in kept.splitlines() if b'"row":' in line}
    left = [len(row["outputs"][0]["token_ids"]) for i, row in enumerate(rows) if i not in done and row["id"] != "bad"]
    assert summary["tokens"]["completion"] == sum(left), "rows that were committed were computed again"
    assert sorted(path.name for path in folder.glob("killed.*")) == ["killed.jsonl", "killed.jsonl.summary.json"]
