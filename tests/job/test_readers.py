"""Inputs of every kind read the same; damaged ones are refused before anything is computed."""

from __future__ import annotations

import gzip
import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pagefleet.runtime.job import readers

ROWS = [{"id": f"r{i}", "prompt": f"p{i}", "max_tokens": 5} for i in range(500)]


def lines(rows=ROWS):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def ids(bench):
    return [r["id"] for r in bench.results()]


def zstd_frames(data: bytes) -> bytes:
    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


def gzip_members(data: bytes) -> bytes:
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.gz", gzip_members),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress),
        ("a.jsonl.zst", zstd_frames),
    ],
)
def test_compressed_files_read_like_plain_ones(bench, name, pack):
    bench.input = bench.input.with_name(name)
    bench.input.write_bytes(pack(lines()))
    assert bench.run() == 0
    assert ids(bench) == [r["id"] for r in ROWS]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flip", "not compressed"])
def test_a_truncated_or_damaged_file_is_refused_before_the_engine_is_made(bench, suffix, damage):
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(pack(lines()))
    if damage == "cut":
        del data[-20:]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(lines())
    bench.input = bench.input.with_name(f"a.jsonl{suffix}")
    bench.input.write_bytes(data)
    assert bench.run() == 2
    assert "truncated or damaged" in bench.messages
    assert bench.engines == []
    assert bench.left_behind() == []


def test_parquet_columns_are_row_fields_and_nulls_are_absent(bench):
    table = pa.table(
        {
            "id": ["a", "b", "c", None],
            "prompt": ["x", None, None, "y"],
            "messages": [None, [{"role": "user", "content": "hi"}], None, None],
            "prompt_token_ids": pa.array([None, None, [1, 2], None], pa.list_(pa.int64())),
            "max_tokens": pa.array([5.0, None, 7.0, float("nan")], pa.float64()),  # as pandas writes integers with gaps
            "logit_bias": pa.array([[("3", 1.0)], None, None, None], pa.map_(pa.string(), pa.float64())),
        }
    )
    bench.input = bench.input.with_name("a.parquet")
    pq.write_table(table, bench.input)
    assert bench.run() == 0
    assert ids(bench) == ["a", "b", "c", "row-3"]
    params = bench.engines[0].params
    assert [params[str(i)].max_tokens for i in range(4)] == [5, None, 7, 16]
    assert params["0"].logit_bias == {3: 1.0}


@pytest.mark.parametrize("as_text", [True, False])
def test_parquet_openai_rows_have_a_body_of_columns_or_of_json_text(bench, as_text):
    body = {"model": "tiny-model", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
    row = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": json.dumps(body) if as_text else body,
    }
    bench.input = bench.input.with_name("a.parquet")
    pq.write_table(pa.Table.from_pylist([row]), bench.input)
    assert bench.run() == 0
    assert bench.results()[0]["custom_id"] == "c"
    assert bench.engines[0].params["0"].temperature == 0.5


def test_damaged_parquet_is_refused(bench):
    bench.input = bench.input.with_name("a.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), bench.input)
    bench.input.write_bytes(bench.input.read_bytes()[:-30])
    assert bench.run() == 2
    assert "a.parquet is truncated or damaged" in bench.messages


def test_a_folder_is_read_sorted_and_other_files_are_left_alone(bench):
    folder = bench.input.parent
    bench.write(*ROWS[:3], path=folder / "b.jsonl")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[3:5])))
    pq.write_table(pa.Table.from_pylist(ROWS[5:7]), folder / "c.parquet")
    (folder / "notes.txt").write_text("not rows")
    (folder / ".hidden.jsonl").write_text("not rows")
    bench.input = folder
    assert bench.run() == 0
    assert ids(bench) == ["r3", "r4", "r0", "r1", "r2", "r5", "r6"]


def test_a_glob_is_read_sorted_with_one_count_of_rows(bench):
    folder = bench.input.parent
    for name in ("x2", "x1", "y"):
        bench.write({"prompt": name}, path=folder / f"{name}.jsonl")
    bench.input = folder / "x*.jsonl"
    assert bench.run() == 0
    assert [(r["id"], r["outputs"][0]["text"]) for r in bench.results()] == [("row-0", "1x/0"), ("row-1", "2x/0")]


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_no_trouble(bench):
    bench.input.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n{"prompt": "b"}\r\n{"prompt": "c"}')
    assert bench.run() == 0
    assert [r["outputs"][0]["text"] for r in bench.results()] == ["a/0", "b/0", "c/0"]


@pytest.mark.parametrize("name", ["missing.jsonl", "rows.txt", "empty"])
def test_inputs_that_are_not_there_or_not_rows_are_refused(bench, name):
    (bench.folder / "rows.txt").write_text("x")
    (bench.folder / "empty").mkdir()
    bench.input = bench.folder / name
    assert bench.run() == 2
    assert "job.input" in bench.messages


def test_the_totals_for_the_progress_are_known_before_the_start(bench):
    bench.input.write_bytes(lines() + b'{"prompt": "last"}')
    info = readers.inspect(bench.input)
    assert info.rows == 501
    assert info.weight == bench.input.stat().st_size == sum(r.weight for r in readers.read_rows(info))


@pytest.mark.parametrize("change", ["grows", "is edited", "is touched"])
def test_an_input_that_changes_while_the_job_runs_never_mixes_two_versions(bench, fake_engine, change):
    bench.write(*ROWS[:20])

    class Editing(fake_engine):
        def step(self):
            if self.steps == 1:
                new = {"grows": ROWS[:21], "is edited": ROWS[1:21], "is touched": ROWS[:20]}
                bench.input.write_bytes(lines(new[change]))
            return super().step()

    code = bench.run(Editing(), max_in_flight=2)
    if change == "is touched":
        assert code == 0
        return
    assert code == 1
    assert not bench.output.exists()
    assert bench.journal.exists()
    bench.write(*ROWS[:20])
    if change == "is edited":
        assert bench.run() == 2
        assert "rows.jsonl changed while" in bench.messages
        assert bench.run(on_mismatch="restart") == 0
    else:
        assert bench.run() == 0
        assert len(bench.engines) == 1
    assert ids(bench) == [r["id"] for r in ROWS[:20]]


def test_rows_are_read_only_as_the_engine_has_room(bench, fake_engine):
    bench.write(*ROWS)
    seen = []

    class Watching(fake_engine):
        def step(self):
            seen.append(len(self.prompts))
            return super().step()

    assert bench.run(Watching(), max_in_flight=7) == 0
    assert seen[0] == 7
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 7
