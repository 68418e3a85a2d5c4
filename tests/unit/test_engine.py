"""The engine end to end on a tiny random model: cases that other engines' users hit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, LlamaForCausalLM

from pagefleet.backends.base import OutOfMemory
from pagefleet.runtime import LLM, SamplingParams, StructuredOutput
from pagefleet.runtime.errors import ErrorCode

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * i + j * j) % 250 + 5 for j in range(n)] for i, n in enumerate((3, 17, 1, 40, 9, 33, 8, 25))]


def ids(outputs: list[Any]) -> list[list[int]]:
    assert all(o.error is None for o in outputs), [o.error for o in outputs]
    return [c.token_ids for o in outputs for c in o.outputs]


def generated(path: str, prompt: list[int], count: int) -> list[int]:
    kind = LlamaForCausalLM if "llama" in path else Gemma3ForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_greedy_ids_equal_transformers_generate(
    model: str, make: Callable[..., LLM], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    ours = ids(make(path).generate(PROMPTS, GREEDY))
    assert ours == [generated(path, p, 12) for p in PROMPTS]


VARIATIONS = [
    {"block_size": 1, "num_kv_blocks": 900},
    {"block_size": 128, "num_kv_blocks": 12},
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    {"max_num_seqs": 1},
    {"num_kv_blocks": 16, "block_size": 4},
    {"backend": "reference"},
    {"exact": True, "max_num_batched_tokens": 7, "max_num_seqs": 3},
]


@pytest.mark.parametrize("options", VARIATIONS, ids=str)
@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_cache_chunk_block_batch_and_preemption_never_change_a_token(
    model: str, options: dict[str, Any], make: Callable[..., LLM], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    expected = ids(make(path, max_num_seqs=1, enable_prefix_caching=False).generate(PROMPTS, GREEDY))
    llm = make(path, **options)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected
    assert ids(llm.generate(PROMPTS[::-1], GREEDY)) == expected[::-1], "a second run, warm cache, other order"
    if options.get("num_kv_blocks") == 16:
        assert llm.metrics()["preemptions"] > 0


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_a_prefix_that_is_shared_within_one_step_never_changes_a_token(
    model: str, exact: bool, make: Callable[..., LLM], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    prompts = [PROMPTS[3] + [9 + i] * (1 + i) for i in range(5)]
    alone = ids(make(path, max_num_seqs=1, enable_prefix_caching=False, exact=exact).generate(prompts, GREEDY))
    llm = make(path, block_size=4, exact=exact)
    outputs = llm.generate(prompts, GREEDY)
    assert ids(outputs) == alone
    assert [o.num_cached_tokens for o in outputs] == [0, 40, 40, 40, 40], "one step computed the prefix for all"


def test_exact_mode_gives_bit_identical_logprobs_in_any_company(llama: str, make: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    llm = make(llama, exact=True)
    together = llm.generate(PROMPTS, params)
    alone = [
        make(llama, exact=True, max_num_batched_tokens=4, max_num_seqs=2).generate([p], params)[0] for p in PROMPTS
    ]
    for a, b in zip(together, alone, strict=True):
        assert a.outputs[0].cumulative_logprob == b.outputs[0].cumulative_logprob


def test_forks_equal_separate_requests_and_a_greedy_fork_repeats_itself(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama, block_size=4)
    (output,) = llm.generate([PROMPTS[1]], SamplingParams(n=4, max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 1
    assert output.outputs[0].token_ids == generated(llama, PROMPTS[1], 8)
    sampled = SamplingParams(n=4, max_tokens=8, temperature=1.5, seed=3, ignore_eos=True)
    (big,) = llm.generate([PROMPTS[1]], sampled)
    (small,) = make(llama, block_size=4, num_kv_blocks=9).generate([PROMPTS[1]], sampled)
    assert len({tuple(c.token_ids) for c in big.outputs}) == 4
    assert ids([big]) == ids([small]), "forks that had to wait and recompute"


def test_an_over_long_prompt_between_two_short_ones_is_one_error_in_its_place(
    llama: str, make: Callable[..., LLM]
) -> None:
    outputs = make(llama).generate([[5, 6], [7] * 200, [8, 9]], GREEDY)
    assert [o.error.code if o.error else None for o in outputs] == [None, ErrorCode.PROMPT_TOO_LONG, None]
    assert "128" in outputs[1].error.message
    assert outputs[0].outputs[0].token_ids == generated(llama, [5, 6], 12)


def test_a_request_larger_than_the_pool_is_an_error_at_once_and_others_run(
    llama: str, make: Callable[..., LLM]
) -> None:
    llm = make(llama, num_kv_blocks=4, block_size=16)
    llm.submit("big", [5] * 60, GREEDY)
    llm.submit("small", [5] * 4, GREEDY)
    (first,) = [o for o in llm.step() if o.request_id == "big"]
    assert first.error is not None
    assert first.error.code is ErrorCode.NEVER_FITS
    while llm.has_unfinished:
        last = llm.step()
    assert last[0].request_id == "small"
    assert last[0].error is None


def test_without_max_tokens_the_answer_is_cut_to_what_the_pool_and_the_model_hold(
    llama: str, make: Callable[..., LLM]
) -> None:
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    (by_model,) = make(llama).generate([[5] * 100], params)
    (by_pool,) = make(llama, num_kv_blocks=4, block_size=16).generate([[5] * 30], params)
    assert (len(by_model.outputs[0].token_ids), by_model.outputs[0].finish_reason) == (28, "length")
    assert (len(by_pool.outputs[0].token_ids), by_pool.outputs[0].finish_reason) == (18, "length")


def test_bad_prompts_are_errors_and_good_ones_are_unchanged(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama)
    outputs = llm.generate([[1, 2], [], "", [5, 10**6], {"prompts": 1}, None, "Hey"], GREEDY)  # type: ignore[list-item]
    assert [o.error.code.value if o.error else None for o in outputs] == [
        None,
        "empty_prompt",
        "empty_prompt",
        "invalid_token",
        "unknown_field",
        "invalid_type",
        None,
    ]
    assert outputs[0].outputs[0].token_ids == generated(llama, [1, 2], 12)


def test_generate_twice_on_one_engine_gives_the_same_and_hits_the_cache(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama, block_size=4)
    first, second = llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY)
    assert ids(first) == ids(second)
    assert second[3].num_cached_tokens == 36
    assert 0 < llm.metrics()["kv_hit_rate"] < 1


def test_metrics_tell_where_the_time_of_the_steps_went(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama)
    llm.generate(PROMPTS, GREEDY)
    metrics = llm.metrics()
    spent = metrics["step_seconds_by_phase"]
    assert list(spent) == ["schedule", "batch", "model", "sampling", "commit"]
    assert all(seconds > 0 for seconds in spent.values())
    assert sum(spent.values()) <= metrics["busy_seconds"] * 1.01
    assert metrics["step_overhead"] == pytest.approx(1 - spent["model"] / sum(spent.values()))


def test_the_same_seed_repeats_draws_vary_by_step_and_neighbours_do_not_matter(
    llama: str, make: Callable[..., LLM]
) -> None:
    params = SamplingParams(max_tokens=16, temperature=2.0, seed=11, ignore_eos=True)
    llm = make(llama)
    (alone,) = llm.generate([PROMPTS[0]], params)
    among = llm.generate(PROMPTS, params)
    assert alone.outputs[0].token_ids == among[0].outputs[0].token_ids
    assert len(set(alone.outputs[0].token_ids)) > 3
    (other,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=16, temperature=2.0, seed=12, ignore_eos=True))
    assert other.outputs[0].token_ids != alone.outputs[0].token_ids


def test_top_k_one_equals_temperature_zero(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama)
    top_one = SamplingParams(max_tokens=12, temperature=1.0, top_k=1, ignore_eos=True)
    assert ids(llm.generate(PROMPTS, top_one)) == ids(llm.generate(PROMPTS, GREEDY))


def test_stop_tokens_stop_strings_and_min_tokens(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama)
    (free,) = llm.generate([PROMPTS[0]], GREEDY)
    tokens, text = free.outputs[0].token_ids, free.outputs[0].text
    stop_id = tokens[4]
    (by_id,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=[stop_id]))
    end = tokens.index(stop_id) + 1
    assert by_id.outputs[0].token_ids == tokens[:end]
    assert (by_id.outputs[0].finish_reason, by_id.outputs[0].stop_reason) == ("stop", stop_id)
    stop = text[3:5]
    (by_text,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=stop))
    assert by_text.outputs[0].text == text[: text.index(stop)]
    assert by_text.outputs[0].stop_reason == stop


def test_logprobs_and_prompt_logprobs_equal_those_of_transformers(llama: str, make: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    llm = make(llama, max_num_batched_tokens=16, max_num_seqs=16)
    llm.generate([PROMPTS[3]], GREEDY)  # a warm cache must not leave holes
    (output,) = llm.generate([PROMPTS[3]], params)
    tokens = PROMPTS[3] + output.outputs[0].token_ids
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPTS[3])
    for position, listed in enumerate(output.prompt_logprobs[1:], start=1):
        token = tokens[position]
        assert listed is not None
        assert listed[token].logprob == pytest.approx(float(expected[position - 1, token]), abs=1e-4)
    assert output.outputs[0].logprobs is not None
    for step, listed in enumerate(output.outputs[0].logprobs):
        chosen = listed[output.outputs[0].token_ids[step]]
        assert chosen.rank == 1
        assert chosen.decoded_token is not None
        assert chosen.logprob == pytest.approx(float(expected[len(PROMPTS[3]) + step - 1].max()), abs=1e-4)
    assert llm.score([PROMPTS[3]])[0][1:] == pytest.approx(
        [float(expected[i - 1, tokens[i]]) for i in range(1, len(PROMPTS[3]))], abs=1e-4
    )


def test_structured_output_matches_its_constraint(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama)
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=1, structured=StructuredOutput(choice=("yes", "no"))),
        SamplingParams(max_tokens=20, temperature=1.0, seed=1, structured=StructuredOutput(regex="[0-9]{3}")),
        SamplingParams(max_tokens=20, structured=StructuredOutput(regex="(")),
        GREEDY,
    ]
    choice, regex, broken, free = llm.generate([PROMPTS[0]] * 4, params)
    assert choice.outputs[0].text in ("yes", "no")
    assert regex.outputs[0].text.isdigit()
    assert len(regex.outputs[0].text) == 3
    assert broken.error is not None
    assert broken.error.code is ErrorCode.GRAMMAR
    assert free.outputs[0].token_ids == generated(llama, PROMPTS[0], 12)


def test_abort_gives_back_what_there_is(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama)
    llm.submit("a", PROMPTS[0], GREEDY)
    llm.submit("b", PROMPTS[1], GREEDY)
    for _ in range(4):
        assert llm.step() == []
    assert llm.abort("a")
    assert not llm.abort("nobody")
    outputs = {}
    while llm.has_unfinished:
        outputs |= {o.request_id: o.outputs[0] for o in llm.step()}
    assert outputs["a"].finish_reason == "abort"
    assert outputs["a"].token_ids == outputs["a"].token_ids[:4] != []
    assert outputs["b"].finish_reason == "length"


def test_results_are_given_as_they_finish(llama: str, make: Callable[..., LLM]) -> None:
    long = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    order = [index for index, _ in make(llama).iterate([PROMPTS[0], PROMPTS[1]], [long, GREEDY])]
    assert order == [1, 0]


def test_a_step_that_runs_out_of_memory_is_rolled_back_and_retried_smaller(
    llama: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(llama)
    forward, sizes = llm.engine.runner.forward, []

    def failing(batch: Any) -> torch.Tensor:
        sizes.append(len(batch.token_ids))
        if len(sizes) == 1 or sizes[-1] > 70:
            raise OutOfMemory("made up")
        return forward(batch)

    monkeypatch.setattr(llm.engine.runner, "forward", failing)
    assert ids(llm.generate(PROMPTS, GREEDY)) == [generated(llama, p, 12) for p in PROMPTS]
    assert sizes[:2] == [136, 68]
    assert llm.engine.scheduler.config.max_batched_tokens == 68


PLACES = {
    "in the model": lambda llm: (llm.engine.runner.model, "forward"),
    "in its head": lambda llm: (llm.engine.runner.model, "logits"),
    "writing KV": lambda llm: (llm.backend.ops(), "query_and_store"),
    "laying the step out": lambda llm: (llm.backend, "plan"),
    "sampling": lambda llm: (llm.engine._sampler, "sample"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_torchs_own_out_of_memory_anywhere_in_a_step_is_rolled_back_and_something_given_up(
    backend: str,
    place: str,
    llama: str,
    make: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = make(llama, backend=backend, max_num_batched_tokens=128)
    llm.submit("first", PROMPTS[1], GREEDY)
    llm.step()
    held = [pool.num_used for pool in llm.engine.cache.pools]
    for number, prompt in enumerate(PROMPTS[3:6]):
        llm.submit(str(number), prompt, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place](llm), lambda *_: torch.empty(1 << 50, dtype=torch.uint8))
        assert llm.step() == []
    assert [pool.num_used for pool in llm.engine.cache.pools] == held, "the failed step kept blocks"
    llm.engine.cache.check()
    said = [r.getMessage() for r in caplog.records if r.name == "pagefleet.runtime.degrade"]
    assert len(said) == 1
    assert "can't allocate memory" in said[0]
    assert "giving up: max_batched_tokens 128 -> 64" in said[0]
    outputs = {}
    while llm.has_unfinished:
        outputs |= {o.request_id: o.outputs[0].token_ids for o in llm.step()}
    prompts = {"first": PROMPTS[1]} | {str(n): p for n, p in enumerate(PROMPTS[3:6])}
    assert outputs == {name: generated(llama, prompt, 12) for name, prompt in prompts.items()}


def test_fewer_sequences_run_at_once_when_a_small_step_does_not_fit_and_none_is_lost(
    llama: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(llama)
    forward = llm.engine.runner.forward

    def failing(batch: Any) -> torch.Tensor:
        if len(batch.attention.kv_lengths) > 2:
            raise OutOfMemory("made up")
        return forward(batch)

    monkeypatch.setattr(llm.engine.runner, "forward", failing)
    assert ids(llm.generate(PROMPTS, GREEDY)) == [generated(llama, p, 12) for p in PROMPTS]
    assert llm.engine.scheduler.config.max_sequences == 2


def test_a_request_that_does_not_fit_in_memory_alone_is_an_error_and_the_others_run(
    llama: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(llama)
    forward = llm.engine.runner.forward

    def failing(batch: Any) -> torch.Tensor:
        if int(batch.attention.kv_lengths.max()) > 30:
            raise OutOfMemory("made up")
        return forward(batch)

    monkeypatch.setattr(llm.engine.runner, "forward", failing)
    outputs = llm.generate([PROMPTS[3], PROMPTS[0], PROMPTS[5], PROMPTS[2]], GREEDY)
    codes = [o.error and o.error.code for o in outputs]
    assert codes == [ErrorCode.OUT_OF_MEMORY, None, ErrorCode.OUT_OF_MEMORY, None]
    assert [o.outputs[0].token_ids for o in outputs[1::2]] == [generated(llama, PROMPTS[i], 12) for i in (0, 2)]


def test_a_kernel_error_leaves_the_cache_as_it_was_and_the_engine_usable(
    llama: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(llama)
    llm.submit("a", PROMPTS[1], GREEDY)
    llm.step()
    used = llm.engine.cache.pools[0].num_used
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    llm.engine.cache.check()
    assert llm.engine.cache.pools[0].num_used == used
    while llm.has_unfinished:
        last = llm.step()
    assert last[0].outputs[0].token_ids == generated(llama, PROMPTS[1], 12)


def test_a_chat_has_one_bos_and_a_refused_role_is_an_error(llama: str, make: Callable[..., LLM]) -> None:
    llm = make(llama)
    good = [{"role": "user", "content": "Hey"}]
    refused = [*good, {"role": "system", "content": "late"}]
    outputs = llm.chat([good, refused], GREEDY)
    assert outputs[0].prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    assert outputs[1].error is not None
    assert outputs[1].error.code is ErrorCode.CHAT_TEMPLATE
