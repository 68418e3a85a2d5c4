"""The engine gives the same tokens with speculation and without, whatever is drafted and whatever is asked for."""

from __future__ import annotations

import importlib.util
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagefleet.backends.base import OutOfMemory
from pagefleet.runtime import LLM, SamplingParams, StructuredOutput
from pagefleet.runtime.config import SpeculationConfig
from pagefleet.runtime.outputs import RequestOutput
from pagefleet.runtime.request import Sequence
from pagefleet.runtime.speculation.speculator import Speculator

PROMPTS = [[(7 * i + j * j) % 250 + 5 for j in range(n)] for i, n in enumerate((3, 17, 1, 40, 9, 33, 8, 25))]
PERIODIC = [20, 21, 22, 23, 24] * 6
SAMPLED = {"temperature": 0.7, "seed": 5, "ignore_eos": True}
GREEDY = {"temperature": 0.0, "ignore_eos": True}

REQUESTS = [
    (PROMPTS[0], SamplingParams(max_tokens=24, **GREEDY)),
    (PROMPTS[3], SamplingParams(max_tokens=23, **GREEDY, logprobs=2, prompt_logprobs=0)),
    (PERIODIC, SamplingParams(max_tokens=24, **SAMPLED)),
    (PROMPTS[1], SamplingParams(max_tokens=20, **SAMPLED, top_p=0.9, top_k=40, logprobs=0)),
    (PROMPTS[4], SamplingParams(max_tokens=20, **GREEDY, repetition_penalty=1.3, frequency_penalty=0.5)),
    (PROMPTS[5], SamplingParams(max_tokens=20, **SAMPLED, presence_penalty=0.7, min_p=0.01, logit_bias={9: 4.0})),
    (PROMPTS[5], SamplingParams(n=4, max_tokens=16, **SAMPLED)),
    (PROMPTS[7], SamplingParams(max_tokens=20, temperature=0.9, seed=3, min_tokens=9)),
    (PROMPTS[6], SamplingParams(max_tokens=24, temperature=1.0, seed=2, structured=StructuredOutput(regex="(ab|c)+d"))),
    (PROMPTS[2], SamplingParams(max_tokens=20, **GREEDY, structured=StructuredOutput(regex="[0-9]{12}"))),
    (PROMPTS[2], SamplingParams(max_tokens=20, **SAMPLED, allowed_token_ids=[30, 31, 32, 33], bad_words=["a"])),
]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """Everything that a user sees, but times; log-probabilities apart, since rows of another step may round."""
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.outputs] if o.error is None else o.error
        for o in outputs
    ]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [
        listed[token].logprob
        for output in outputs
        for completion in output.outputs
        for token, listed in zip(completion.token_ids, completion.logprobs or [], strict=False)
    ]


def generate(llm: LLM, requests: list[Any]) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> Callable[[str], tuple[list[Any], list[RequestOutput]]]:
    """Per model: the requests (with stop strings and tokens taken from the answers) and what they give, undrafted."""
    known: dict[str, tuple[list[Any], list[RequestOutput]]] = {}

    def of(model: str) -> tuple[list[Any], list[RequestOutput]]:
        if model not in known:
            path = request.getfixturevalue(model)
            with LLM(path, backend="cpu", dtype="fp32", num_kv_blocks=200, threads=1) as llm:
                first = llm.generate([PROMPTS[0]], REQUESTS[0][1])[0].outputs[0]
                stops: list[dict[str, Any]] = [{"stop_token_ids": [first.token_ids[9]]}, {"stop": [first.text[7:10]]}]
                stops.append({"stop": [first.text[5:7]], "include_stop_str_in_output": True, "min_tokens": 3})
                asked = [*REQUESTS, *((PROMPTS[0], SamplingParams(max_tokens=20, **GREEDY, **s)) for s in stops)]
                known[model] = asked, generate(llm, asked)
        return known[model]

    return of


class Oracle(Speculator):
    """Drafts the known answers with mistakes in them, so that all lengths of agreement happen; goes beyond ends."""

    def __init__(self, llm: LLM, known: list[RequestOutput], seed: int) -> None:
        super().__init__(SpeculationConfig("ngram"), llm.model.eos_token_ids | llm.tokenizer.eos_token_ids)
        self._known = known
        self._random = random.Random(seed)
        self._vocabulary = llm.model.vocab_size

    def draft(self, sequence: Sequence, room: int, num_running: int) -> tuple[int, ...]:
        number = int(sequence.request.request_id.removeprefix("generate-")) % len(self._known)
        ahead = self._known[number].outputs[sequence.index].token_ids[sequence.num_output :]
        count = self._random.randint(0, max(0, min(room, 6)))
        guess = [*ahead, *(self._random.randrange(self._vocabulary) for _ in range(6))][:count]
        if count and self._random.random() < 0.6:
            guess[self._random.randrange(count)] = self._random.randrange(self._vocabulary)
        return self._possible(sequence, guess)


VARIATIONS: list[dict[str, Any]] = [
    {},
    {"block_size": 4, "num_kv_blocks": 26},  # preempts
    {"block_size": 1, "num_kv_blocks": 900, "max_num_batched_tokens": 11, "max_num_seqs": 3},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 24},
    {"exact": True, "block_size": 128, "num_kv_blocks": 20},
]


@pytest.mark.parametrize("options", VARIATIONS, ids=str)
@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_no_draft_right_or_wrong_changes_what_a_request_gives(
    model: str, options: dict[str, Any], make: Callable[..., LLM], request: pytest.FixtureRequest, expected: Any
) -> None:
    asked, known = expected(model)
    llm = make(request.getfixturevalue(model), **options)
    llm.engine.scheduler.speculator = Oracle(llm, known, seed=len(str(options)))
    for run in ("cold", "warm"):
        got = generate(llm, asked)
        assert answers(got) == answers(known), f"{run} cache"
        assert logprobs(got) == pytest.approx(logprobs(known), abs=1e-4)
    metrics = llm.metrics()
    assert 100 < metrics["accepted_tokens"] < metrics["drafted_tokens"]
    assert metrics["acceptance_rate"] == metrics["accepted_tokens"] / metrics["drafted_tokens"]
    assert metrics["output_tokens"] == 2 * sum(len(c.token_ids) for o in known for c in o.outputs)
    assert (metrics["preemptions"] > 0) == (options.get("num_kv_blocks") == 26)


@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_guesses_from_the_text_change_no_token_and_take_fewer_steps(
    model: str, make: Callable[..., LLM], request: pytest.FixtureRequest, expected: Any
) -> None:
    asked, known = expected(model)
    path = request.getfixturevalue(model)
    assert answers(generate(make(path, speculation="ngram"), asked)) == answers(known)
    greedy = [(p, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)) for p in (PERIODIC, PROMPTS[0])]
    plain, guessing = make(path), make(path, speculation="ngram")
    assert answers(generate(guessing, greedy)) == answers(generate(plain, greedy))
    assert guessing.metrics()["accepted_tokens"] > 0
    assert guessing.metrics()["steps"] < plain.metrics()["steps"] == 60
    assert (plain.metrics()["drafted_tokens"], plain.metrics()["acceptance_rate"]) == (0, None)


def test_drafted_tokens_that_were_accepted_are_hits_for_a_later_prompt(llama: str, make: Callable[..., LLM]) -> None:
    hits = {}
    for name in ("none", "ngram"):
        llm = make(llama, block_size=4, speculation=name)
        (first,) = llm.generate([PERIODIC], SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True))
        (second,) = llm.generate([PERIODIC + first.outputs[0].token_ids], SamplingParams(max_tokens=1))
        hits[name] = second.num_cached_tokens
    assert llm.metrics()["accepted_tokens"] > 0
    assert hits == {"none": 68, "ngram": 68}


def test_a_step_with_drafts_that_fails_is_rolled_back(
    llama: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = answers(make(llama).generate([PERIODIC], params))
    llm = make(llama, speculation="ngram", block_size=4)
    monkeypatch.setattr(llm.engine.scheduler.speculator, "draft", lambda sequence, room, running: (7, 8, 9)[:room])
    llm.submit("a", PERIODIC, params)
    llm.step()
    sequence = llm.engine.scheduler.running[0]
    sizes = []
    for failing in (True, False) * 3:
        before = list(sequence.tables[0]), list(sequence.token_ids), llm.engine.cache.pools[0].num_used
        with monkeypatch.context() as patch:
            if failing:
                patch.setattr(llm.engine.runner, "forward", lambda batch: sizes.append(len(batch.token_ids)) or 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    llm.step()
                assert before == (list(sequence.tables[0]), sequence.token_ids, llm.engine.cache.pools[0].num_used)
            else:
                llm.step()
    assert sizes == [4, 4, 4], "the failed steps had no drafts"
    outputs: list[RequestOutput] = []
    while llm.has_unfinished:
        outputs += llm.step()
    assert answers(outputs) == expected


def test_a_step_without_memory_for_its_drafts_gives_up_speculation_and_nothing_else(
    llama: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = answers(make(llama).generate([PERIODIC], params))
    llm = make(llama, speculation="ngram")
    forward = llm.engine.runner.forward

    def failing(batch: Any) -> Any:
        if 1 < len(batch.token_ids) < len(PERIODIC):
            raise OutOfMemory("made up")
        return forward(batch)

    monkeypatch.setattr(llm.engine.runner, "forward", failing)
    limits = llm.engine.scheduler.config
    assert answers(llm.generate([PERIODIC], params)) == expected
    assert llm.engine.scheduler.config == limits
    assert caplog.text.count("giving up: speculation") == 1


# -- the tool that measures it ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool() -> Any:
    path = Path(__file__).parents[2] / "tools" / "bench_speculation.py"
    spec = importlib.util.spec_from_file_location("pagefleet_tool_bench_speculation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_break_even_rows_are_those_of_the_line_through_the_steps(tool: Any) -> None:
    assert tool.break_even_rows({rows: 0.030 + 0.002 * (1 + rows) for rows in (0, 1, 4, 16)}) == pytest.approx(15)
    assert tool.break_even_rows({0: 0.03, 8: 0.03}) == float("inf")


def test_the_tool_compares_the_same_work_and_counts_what_was_refused(
    tool: Any, llama: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "PROMPTS", tmp_path / "prompts.json")
    tool.PROMPTS.write_text(json.dumps({"copying": ["ab ab ab ab"], "free": ["Hey"]}))
    llm = make(llama, speculation="ngram")
    speculator = llm.engine.scheduler.speculator
    assert set(tool.step_seconds(llm, "Hey", rounds=1, clock=time.perf_counter, steps=2)) == set(tool.DRAFTED_ROWS)
    refused = llm.metrics()
    assert refused["drafted_tokens"] == 2 * sum(tool.DRAFTED_ROWS)
    assert refused["accepted_tokens"] == 0
    row = tool.compare(llm, ("copying", "copying", 2, 0.0), new=40, rounds=1, clock=time.perf_counter)
    assert row["same_tokens"] == 1.0
    assert row["steps_ratio"] < 1.0
    assert row["drafted_per_token"] > 0
    assert llm.engine.scheduler.speculator is speculator
