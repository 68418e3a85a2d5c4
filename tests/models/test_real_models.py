"""The real models, fp32, through the whole engine: greedy ids equal transformers.generate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagefleet.runtime import LLM, SamplingParams
from pagefleet.runtime.model.load import cache_home

MODELS = {"smollm2-135m-instruct": (2, 64), "gemma3-270m": (3, 620)}  # name -> number of prompts, longest in tokens
TEXT = (
    "The harbour town had one rule that nobody broke: the lighthouse keeper's number was 7319. "
    + "Every evening the boats came home and the gulls followed them, loud and hungry, over the grey water. " * 40
    + "The lighthouse keeper's number was"
)
NEW = 8


@pytest.fixture(params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    folder = cache_home() / "models" / request.param
    assert folder.is_dir(), f"{folder} is missing; run: python tools/fetch_models.py all"
    return request.param


@pytest.fixture
def llm(name: str) -> Iterator[LLM]:
    with LLM(
        str(cache_home() / "models" / name),
        backend="cpu",
        dtype="fp32",
        max_model_len=1024,
        num_kv_blocks=160,
        max_num_batched_tokens=256,
    ) as made:
        yield made
    gc.collect()


def test_greedy_ids_equal_transformers_generate_beyond_the_window_too(name: str, llm: LLM) -> None:
    count, longest = MODELS[name]
    head, tail = llm.tokenizer.encode(TEXT[:400]), llm.tokenizer.encode(TEXT)
    prompts = [tail[: longest - 12] + tail[-12:], head[:20], head[:57]][:count]
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    ours = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    again = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert ours == again, "a warm cache changed a token"
    module = AutoModelForCausalLM.from_pretrained(
        cache_home() / "models" / name, dtype=torch.float32, attn_implementation="sdpa"
    )
    module.generation_config.eos_token_id = None
    with torch.inference_mode():
        for prompt, got in zip(prompts, ours, strict=True):
            out = module.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            assert out[0, len(prompt) :].tolist() == got


def test_a_model_that_repeats_its_prompt_takes_few_steps_with_speculation_and_says_the_same() -> None:
    text = TEXT[:90] + TEXT[-200:-45]
    options: dict[str, Any] = {"dtype": "fp32", "max_model_len": 512, "num_kv_blocks": 64, "speculation": "ngram"}
    with LLM(str(cache_home() / "models" / "smollm2-135m-instruct"), backend="cpu", **options) as llm:
        params = SamplingParams(max_tokens=48, temperature=0.0)
        asked = [{"role": "user", "content": f"Repeat the following text word for word:\n{text}"}]
        (guessed,) = llm.chat(asked, params)
        taken, rate = llm.metrics()["steps"], llm.metrics()["acceptance_rate"]
        llm.engine.scheduler.speculator = None
        (plain,) = llm.chat(asked, params)
        assert guessed.outputs[0].token_ids == plain.outputs[0].token_ids
        assert llm.metrics()["steps"] - taken > 2 * taken
        assert rate > 0.5
    gc.collect()
