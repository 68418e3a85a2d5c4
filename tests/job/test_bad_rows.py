"""A bad row is one error row with a typed code, and its neighbours do not notice."""

from __future__ import annotations

import pytest

CHAT = "/v1/chat/completions"


def openai(body, **row):
    return {"custom_id": "x", "method": "POST", "url": CHAT, "body": body, **row}


USER = [{"role": "user", "content": "hi"}]
DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

BAD = [
    (b"{nonsense", "invalid_json"),
    (b'{"prompt": "a"', "invalid_json"),
    (b'{"prompt": "a"} trailing', "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_json"),
    (b'{"prompt": "a", "prompt": "b"}', "invalid_json"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    (DEEP, "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', "invalid_encoding"),
    (b'{"prompt": "\\ud800 alone"}', "invalid_encoding"),
    (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "invalid_encoding"),
    (b"\xff\xfe{\x00}\x00", "invalid_encoding"),
    (b"null", "invalid_type"),
    (b"[]", "invalid_type"),
    (b"3", "invalid_type"),
    (b'"text"', "invalid_type"),
    ({}, "missing_field"),
    ({"prompt": None}, "missing_field"),
    ({"prompt": ""}, "empty_prompt"),
    ({"prompt": []}, "empty_prompt"),
    ({"messages": []}, "empty_prompt"),
    ({"prompt": 5}, "invalid_type"),
    ({"prompt": True}, "invalid_type"),
    ({"prompt": {"a": 1}}, "invalid_type"),
    ({"prompt": ["a", "b"]}, "invalid_type"),
    ({"prompt": [1, "a"]}, "invalid_type"),
    ({"prompt": [1, None]}, "invalid_type"),
    ({"prompt": [1, 2.5]}, "invalid_type"),
    ({"prompt": [True]}, "invalid_type"),
    ({"prompt": [-1]}, "invalid_token"),
    ({"prompt": [10**30]}, "invalid_token"),
    ({"prompt": "a", "messages": USER}, "invalid_value"),
    ({"messages": "hi"}, "invalid_type"),
    ({"messages": ["hi"]}, "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "missing_field"),
    ({"messages": [{"role": "user"}]}, "missing_field"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "invalid_type"),
    ({"messages": [{"role": "user", "content": 1}]}, "invalid_type"),
    ({"prompt": "x" * 2000}, "prompt_too_long"),
    ({"prompt": "REFUSE"}, "chat_template"),
    ({"prompt": "a", "temprature": 1}, "unknown_field"),
    ({"prompt": "a", "model": "gpt-4"}, "unknown_model"),
    ({"prompt": "a", "model": 4}, "invalid_type"),
    ({"prompt": "a", "id": 1.5}, "invalid_type"),
    ({"prompt": "a", "id": ""}, "invalid_value"),
    ({"prompt": "a", "id": ["x"]}, "invalid_type"),
    ({"prompt": "a", "max_tokens": "5"}, "invalid_type"),
    ({"prompt": "a", "max_tokens": 0}, "invalid_value"),
    ({"prompt": "a", "temperature": -1}, "invalid_value"),
    ({"prompt": "a", "temperature": True}, "invalid_type"),
    ({"prompt": "a", "temperature": 10**400}, "invalid_value"),
    ({"prompt": "a", "seed": 2**64}, "invalid_value"),
    ({"prompt": "a", "stop": ""}, "invalid_value"),
    ({"prompt": "a", "stop": 5}, "invalid_type"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid_value"),
    ({"prompt": "a", "logit_bias": [1]}, "invalid_type"),
    ({"prompt": "a", "structured": {"regex": "a", "choice": ["b"]}}, "invalid_value"),
    ({"prompt": "a", "structured": {"regexp": "a"}}, "unknown_field"),
]
BAD_OPENAI = [
    (openai({"messages": USER}, url="/v1/embeddings"), "unknown_endpoint"),
    (openai({"messages": USER}, url=None), "missing_field"),
    (openai({"messages": USER}, url=3), "invalid_type"),
    (openai({"messages": USER}, method="GET"), "invalid_value"),
    (openai({"messages": USER}, custom_id=7), "invalid_type"),
    (openai({"messages": USER}, extra=1), "unknown_field"),
    (openai(None), "missing_field"),
    (openai("text"), "invalid_type"),
    (openai({}), "missing_field"),
    (openai({"messages": None}), "missing_field"),
    (openai({"prompt": "wrong endpoint"}), "unknown_field"),
    (openai({"messages": USER, "model": "gpt-4"}), "unknown_model"),
    (openai({"messages": USER, "stream": True}), "invalid_value"),
    (openai({"messages": USER, "logprobs": 3}), "invalid_type"),
    (openai({"messages": USER, "top_logprobs": 3}), "invalid_value"),
    (openai({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}), "invalid_value"),
    (openai({"messages": USER, "tools": [{}]}), "invalid_value"),
    (openai({"messages": USER, "response_format": "json"}), "invalid_type"),
    (openai({"messages": USER, "response_format": {"type": "yaml"}}), "invalid_value"),
    (openai({"messages": USER, "response_format": {"type": "json_schema"}}), "invalid_type"),
    (openai({"prompt": ["a", [1]]}, url="/v1/completions"), "invalid_type"),
    (openai({"prompt": ["a", ""]}, url="/v1/completions"), "empty_prompt"),
    (openai({"prompt": "a", "echo": True}, url="/v1/completions"), "invalid_value"),
]


@pytest.mark.parametrize(("row", "code"), BAD, ids=[f"{i}-{c}" for i, (_, c) in enumerate(BAD)])
def test_bad_simple_row_is_an_error_row_between_good_ones(bench, row, code):
    bench.write({"id": "before", "prompt": "ab"}, row, {"id": "after", "prompt": "cd"})
    assert bench.run() == 3
    before, bad, after = bench.results()
    assert bad["error"]["code"] == code
    assert bad["error"]["message"]
    assert len(bad["error"]["message"]) <= 700
    assert bad["outputs"] == []
    assert (before["id"], before["outputs"][0]["text"]) == ("before", "ba/0")
    assert (after["id"], after["outputs"][0]["text"]) == ("after", "dc/0")


@pytest.mark.parametrize(("row", "code"), BAD_OPENAI, ids=[f"{i}-{c}" for i, (_, c) in enumerate(BAD_OPENAI)])
def test_bad_openai_row_is_an_error_in_openais_form(bench, row, code):
    bench.write(row, openai({"messages": USER}, custom_id="good"))
    assert bench.run() == 3
    bad, good = bench.results()
    assert set(bad) == {"id", "custom_id", "response", "error"}
    assert bad["error"]["code"] == code
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["code"] == code
    assert bad["custom_id"] == (row["custom_id"] if isinstance(row["custom_id"], str) else "row-0")
    assert good["response"]["status_code"] == 200


def test_a_good_row_is_the_same_bytes_with_and_without_bad_neighbours(bench):
    good = [{"id": f"g{i}", "prompt": f"p{i}", "temperature": 1.0} for i in range(10)]
    bench.write(*good)
    bench.run()
    alone = {r["id"]: r["outputs"] for r in bench.results()}
    bench.output = bench.folder / "out" / "mixed.jsonl"
    bench.write(*(row for g in good for row in (g, b"bad", {"prompt": "REFUSE"})))
    assert bench.run() == 3
    assert {r["id"]: r["outputs"] for r in bench.results() if r["error"] is None} == alone


def test_the_second_of_two_equal_ids_is_the_error(bench):
    bench.write(
        {"id": "a", "prompt": "1"}, {"id": "a", "prompt": "2"}, {"id": 5, "prompt": "3"}, {"id": "5", "prompt": "4"}
    )
    assert bench.run() == 3
    codes = [r["error"] and r["error"]["code"] for r in bench.results()]
    assert codes == [None, "duplicate_id", None, None]


def test_an_id_given_like_a_generated_one_does_not_appear_twice(bench):
    bench.write({"id": "row-1", "prompt": "1"}, {"prompt": "2"})
    assert bench.run() == 3
    assert [r["error"] and r["error"]["code"] for r in bench.results()] == [None, "duplicate_id"]


def test_a_duplicate_of_a_row_done_before_a_resume_is_still_seen(bench, fake_engine):
    bench.write(*({"id": f"r{i % 30}", "prompt": f"p{i}"} for i in range(40)))
    assert bench.run(fake_engine(fail_at_step=6), max_in_flight=4) == 1
    assert bench.run(max_in_flight=4) == 3
    assert [r["error"] is None for r in bench.results()] == [True] * 30 + [False] * 10


def test_an_unknown_field_is_answered_with_the_closest_one(bench):
    bench.write({"prompt": "a", "temprature": 1})
    bench.run()
    assert "did you mean temperature?" in bench.results()[0]["error"]["message"]


def test_unreadable_lines_take_the_form_of_the_job(bench):
    bench.write(b"{broken", openai({"messages": USER}))
    assert bench.run() == 3
    assert bench.results()[0]["custom_id"] == "row-0"


def test_a_job_of_bad_rows_needs_no_engine(bench):
    bench.write(b"bad", b"worse")
    assert bench.run() == 3
    assert bench.engines == []


def test_surrogate_pairs_escapes_and_emoji_are_good(bench):
    bench.write(b'{"prompt": "\\ud83d\\ude00 \xf0\x9f\x98\x80"}')
    assert bench.run() == 0
    assert bench.results()[0]["outputs"][0]["text"] == "😀 😀/0"


def test_a_line_longer_than_the_limit_is_one_error_row(bench, monkeypatch):
    from pagefleet.runtime.job import readers

    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 100)
    bench.write({"prompt": "a"}, {"prompt": "x" * 1000}, {"prompt": "b"})
    assert bench.run() == 3
    assert [r["error"] and r["error"]["code"] for r in bench.results()] == [None, "invalid_value", None]
