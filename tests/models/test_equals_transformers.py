"""Packed, chunked, paged = transformers, for every family: logits at every position and greedy tokens."""

from __future__ import annotations

import copy

import pytest
import torch

from pagefleet.runtime.model.open import open_module
from pagefleet.runtime.model.self_test import PagedRun

NEW_TOKENS = 14
AS_IS_ONLY = {"gpt_oss", "gemma3n_text", "deepseek_v3"}
LOGIT_TOLERANCE = 2e-4  # of the spread; fp32, sums in another order


@pytest.fixture
def lowering():
    return "auto"


@pytest.fixture
def pair(family, lowering, tiny_model, backend):
    """(untouched transformers model, the same weights as a model of ours)."""
    original = tiny_model(family, seed=3)
    model = open_module(copy.deepcopy(original), backend, lowering=lowering)
    as_is = lowering == "off" or family in AS_IS_ONLY
    assert model.execution.startswith("as is: ") if as_is else model.execution == "lowered"
    return original, model


def eager(original, ids):
    original.set_attn_implementation("eager")
    with torch.inference_mode():
        return original(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def chunked(run, prompts, size):
    """Logits of every prompt token, prompts computed together in chunks of `size` tokens."""
    rows = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), size):
        parts = [(i, ids[start : start + size]) for i, ids in enumerate(prompts) if len(ids) > start]
        for (i, _), logits in zip(parts, run.step(parts), strict=True):
            rows[i].append(logits)
    return [torch.cat(r) for r in rows]


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 5), (16, 1000), (4, 3)])
def test_logits_at_every_position_equal_eager(pair, prompts, block_size, chunk):
    original, model = pair
    run = PagedRun(model, len(prompts), 32, block_size)
    for ids, got in zip(prompts, chunked(run, prompts, chunk), strict=True):
        want = eager(original, ids)
        spread = (want - want.mean(-1, keepdim=True)).abs().max()
        assert float((got - want).abs().max() / spread) < LOGIT_TOLERANCE


@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_greedy_tokens_equal_generate(pair, prompts):
    original, model = pair
    run = PagedRun(model, len(prompts), 64, 16)
    rows = chunked(run, prompts, 6)
    outputs = [[int(r[-1].argmax())] for r in rows]
    while len(outputs[0]) < NEW_TOKENS:
        steps = run.step([(i, out[-1:]) for i, out in enumerate(outputs)])
        for out, logits in zip(outputs, steps, strict=True):
            out.append(int(logits[-1].argmax()))
    assert len({t for out in outputs for t in out}) > 4, "the tiny model says the same thing always: no test"
    for ids, out in zip(prompts, outputs, strict=True):
        made = original.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        assert made[0, len(ids) :].tolist() == out
