"""A job's results: one per row, in order, in the form of the row."""

from __future__ import annotations

import gzip
import json

import pytest

SIMPLE = [{"id": f"r{i}", "prompt": f"prompt {i}"} for i in range(40)]


def chat(index, **body):
    body = {"model": "tiny-model", "messages": [{"role": "user", "content": f"hi {index}"}], **body}
    return {"custom_id": f"c{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(index, **body):
    body = {"model": "org/tiny-model", "prompt": f"say {index}", **body}
    return {"custom_id": f"c{index}", "method": "POST", "url": "/v1/completions", "body": body}


def test_results_come_in_input_order_though_the_engine_finishes_in_another(bench):
    bench.write(*SIMPLE)
    assert bench.run() == 0
    assert [r["id"] for r in bench.results()] == [r["id"] for r in SIMPLE]
    assert bench.results()[7]["outputs"][0]["text"] == "prompt 7"[::-1] + "/0"
    assert bench.left_behind() == ["results.jsonl", "results.jsonl.summary.json"]
    assert bench.engines[0].closed


def test_simple_result_has_usage_outputs_and_no_error(bench):
    bench.write({"prompt": "abcd", "n": 2, "max_tokens": 3})
    bench.run()
    (result,) = bench.results()
    assert result["id"] == "row-0"
    assert result["error"] is None
    assert [o["index"] for o in result["outputs"]] == [0, 1]
    assert result["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_every_sampling_field_reaches_the_engine(bench):
    given = {
        "n": 2, "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "stop": ["x"],
        "stop_token_ids": [3], "include_stop_str_in_output": True, "ignore_eos": True, "logprobs": 2,
        "prompt_logprobs": 1, "logit_bias": {"4": 1.5}, "allowed_token_ids": [1, 2], "bad_words": ["no"],
        "skip_special_tokens": False, "structured": {"regex": "a+"},
    }  # fmt: skip
    bench.write({"prompt": "p", **given})
    assert bench.run() == 0
    params = bench.engines[0].params["0"]
    for name, value in given.items():
        held = getattr(params, name)
        if name == "structured":
            assert held.regex == "a+"
        elif name == "logit_bias":
            assert held == {4: 1.5}
        else:
            assert (list(held) if isinstance(value, list) else held) == value, name


def test_chat_completion_body_is_openais(bench):
    bench.write(chat(1, logprobs=True, top_logprobs=2, max_completion_tokens=4))
    assert bench.run() == 0
    (result,) = bench.results()
    assert set(result) == {"id", "custom_id", "response", "error"}
    assert result["custom_id"] == "c1"
    assert result["error"] is None
    assert result["response"]["status_code"] == 200
    body = result["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny-model"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    first = choice["logprobs"]["content"][0]
    assert first["logprob"] == -0.5
    assert first["bytes"] == list(first["token"].encode())
    assert [t["logprob"] for t in first["top_logprobs"]] == [-0.5, -9999.0]
    assert body["usage"]["completion_tokens"] == 4


def test_text_completion_with_several_prompts_gives_one_row_with_all_choices(bench):
    bench.write(completion(0, prompt=["ab", "cd", "ef"], n=2, logprobs=1), completion(1, prompt=[[1, 2], [3]]))
    assert bench.run() == 0
    first, second = bench.results()
    choices = first["response"]["body"]["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3, 4, 5]
    assert [c["text"] for c in choices] == ["ba/0", "ba/1", "dc/0", "dc/1", "fe/0", "fe/1"]
    assert choices[0]["logprobs"]["text_offset"][:2] == [0, 1]
    assert [c["text"] for c in second["response"]["body"]["choices"]] == ["2,1/0", "3/0"]


def test_one_bad_prompt_among_several_makes_the_row_an_error_and_drops_the_rest(bench):
    bench.write(completion(0, prompt=["ab", "x" * 2000, "ef"]), completion(1))
    assert bench.run() == 3
    first, second = bench.results()
    assert first["error"]["code"] == "prompt_too_long"
    assert second["error"] is None


def test_chat_without_a_limit_runs_to_the_models_length_and_defaults_apply(bench):
    bench.write(chat(0), completion(1), {"messages": [{"role": "user", "content": "x"}]}, {"prompt": "x"})
    bench.run()
    assert [bench.engines[0].params[str(i)].max_tokens for i in range(4)] == [None, 16, None, 16]
    bench.output = bench.folder / "out" / "second.jsonl"
    bench.run(defaults={"max_tokens": 5, "temperature": 0.0})
    assert [bench.engines[1].params[str(i)].max_tokens for i in range(4)] == [5] * 4
    assert bench.engines[1].params["0"].greedy


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}, {"type": "string"}),
    ],
)
def test_response_format_becomes_a_constraint(bench, response_format, schema):
    bench.write(chat(0, response_format=response_format))
    assert bench.run() == 0
    assert bench.engines[0].params["0"].structured.json_schema == schema


def test_served_names_are_accepted_and_unnamed_rows_get_the_first(bench):
    bench.write(chat(0, model="gpt-x"), chat(1, model=None), {"prompt": "x", "model": "org/tiny-model"})
    assert bench.run(served=("gpt-x",)) == 0
    assert [r["response"]["body"]["model"] for r in bench.results()[:2]] == ["gpt-x", "gpt-x"]


def test_a_row_without_a_seed_draws_from_its_index_not_from_what_ran_before(bench):
    bench.write(*SIMPLE[:5])
    bench.run(max_in_flight=1)
    bench.output = bench.folder / "out" / "b.jsonl"
    bench.run(max_in_flight=5)
    seeds = [[engine.params[str(i)].seed for i in range(5)] for engine in bench.engines]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 5


def test_at_most_max_in_flight_requests_are_in_the_engine(bench):
    bench.write(*SIMPLE, completion(0, prompt=[f"p{i}" for i in range(30)]))
    assert bench.run(max_in_flight=3) == 0
    assert bench.engines[0].peak == 3


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_output_is_compressed_by_its_name(bench, suffix):
    bench.output = bench.folder / "out" / f"results{suffix}"
    bench.write(*SIMPLE)
    assert bench.run() == 0
    if suffix.endswith("gz"):
        data = gzip.decompress(bench.output.read_bytes())
    else:
        import zstandard

        data = zstandard.ZstdDecompressor().stream_reader(bench.output.open("rb")).read()
    assert [json.loads(line)["id"] for line in data.splitlines()] == [r["id"] for r in SIMPLE]


def test_parquet_output_holds_both_forms(bench):
    import pyarrow.parquet as pq

    bench.output = bench.folder / "out" / "results.parquet"
    bench.write({"id": 7, "prompt": "ab", "logprobs": 1}, chat(1), b"nonsense")
    assert bench.run() == 3
    rows = pq.read_table(bench.output).to_pylist()
    assert rows[0]["id"] == "7"
    assert rows[0]["outputs"][0]["text"] == "ba/0"
    assert json.loads(rows[0]["outputs"][0]["logprobs"])[0][0]["rank"] == 1
    assert json.loads(rows[1]["response"]["body"])["object"] == "chat.completion"
    assert rows[2]["error"]["code"] == "invalid_json"


def test_summary_says_what_happened_under_the_names_of_the_measures(bench):
    bench.write(*SIMPLE[:3], b"{}", b"[]")
    assert bench.run() == 3
    summary = bench.summary
    assert summary["rows"] == {"total": 5, "good": 3, "error": 2, "resumed": 0, "computed": 5}
    assert summary["errors_by_code"] == {"invalid_type": 1, "missing_field": 1}
    assert summary["kv_hit_rate"] == 0.5
    assert summary["block_utilization"] == 0.25
    assert "3 of 5 rows good" in bench.summary_text
    assert "KV hit rate 50%" in bench.summary_text


def test_text_that_readers_split_on_stays_in_one_line(bench):
    bench.write({"prompt": "a\u2028b\u0085c"})
    assert bench.run() == 0
    text = bench.output.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1
    assert json.loads(text)["outputs"][0]["text"] == "c\u0085b\u2028a/0"


def test_an_empty_input_gives_an_empty_output(bench):
    bench.input.write_bytes(b"\n\n")
    assert bench.run() == 0
    assert bench.output.read_bytes() == b""
    assert bench.engines == []
