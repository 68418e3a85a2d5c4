"""A lowered model: few operations, weights held once, exact rows, and never a layer that was misread."""

from __future__ import annotations

import logging
import re
from collections import Counter

import pytest
import torch
from torch import nn

from pagefleet.backends import registry
from pagefleet.backends.base import BackendOptions
from pagefleet.backends.reference.backend import ReferenceBackend
from pagefleet.backends.torch_ops import TorchOps
from pagefleet.runtime.model.layers import KeptOutputs
from pagefleet.runtime.model.open import open_checkpoint, open_module
from pagefleet.runtime.model.self_test import PagedRun

IDS = [5, 17, 3, 42, 8, 77, 21]


def logits(model, ids=IDS):
    return PagedRun(model, 1, len(ids)).step([(0, ids)])[0]


# --- what it costs ---


class Counting(ReferenceBackend):
    """Counts the operations that a decoder asks for, and the weights that its model still holds at each packing."""

    module: nn.Module | None = None

    def __init__(self, options):
        super().__init__(options)
        self.counts, self.held = Counter(), []
        self._ops = CountingOps(self)

    def attention(self, *args):
        self.counts["attention"] += 1
        return super().attention(*args)


class CountingOps(TorchOps):
    def linear(self, weight, bias, scheme=None):
        made, backend = super().linear(weight, bias, scheme), self._backend
        backend.held.append(sum(p.numel() for p in backend.module.parameters()))

        def product(x):
            backend.counts["linear"] += 1
            return made(x)

        product.out_features = made.out_features
        return product

    def add_norm(self, *args):
        self._backend.counts["add_norm"] += 1
        return super().add_norm(*args)

    def query_and_store(self, *args):
        self._backend.counts["query_and_store"] += 1
        return super().query_and_store(*args)

    def gated_activation(self, *args):
        self._backend.counts["gated_activation"] += 1
        return super().gated_activation(*args)


@pytest.fixture
def counting(tiny_model):
    """(backend that counts, model of three layers on it, parameters that the model had)."""
    backend, module = Counting(BackendOptions()), tiny_model("qwen3")
    backend.module, total = module, sum(p.numel() for p in module.parameters())
    return backend, open_module(module, backend), total


def test_a_layer_is_nine_operations(counting):
    backend, model, _ = counting
    backend.counts.clear()
    logits(model)
    per_layer = {"linear": 4, "add_norm": 2, "query_and_store": 1, "attention": 1, "gated_activation": 1}
    assert backend.counts == {name: 3 * n for name, n in per_layer.items()} | {"linear": 3 * 4 + 1}  # and the head


def test_weights_are_given_up_one_product_at_a_time(counting):
    backend, _, total = counting
    head, inner = 96 * 32, 48 * 32
    sizes = [2 * inner, inner, 32 * 128, 64 * 32]  # gate and up, down, qkv, output
    left = [total - sum(sizes) * layer - sum(sizes[: i + 1]) for layer in range(3) for i in range(4)]
    assert backend.held == [*left, left[-1] - head]


def test_a_tied_head_leaves_the_embedding_its_weights(tiny_model, backend):
    module = tiny_model("llama", tie_word_embeddings=True)
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0]
    model = open_module(module, backend)
    assert model.execution == "lowered"
    assert module.model.embed_tokens.weight.shape == (96, 32)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


# --- it is not believed, it is checked ---


@pytest.mark.parametrize(
    ("name", "changes", "part"),
    [
        ("gpt_oss", {}, r"layers\.0: mlp\.experts \(GptOssExperts\)"),
        ("deepseek_v3", {}, r"layers\.0: queries, keys and values do not come from one input"),
        ("gemma3n_text", {}, "some of its layers use the keys of others"),
        ("cohere", {"use_qk_norm": True}, r"layers\.0: .*q_norm"),
        ("opt", {"do_layer_norm_before": False}, r"layers\.0: "),
        ("llama", {"hidden_act": "mish"}, "MishActivation is none of the activations silu"),
    ],
)
def test_what_is_not_understood_is_named_and_runs_as_it_is(name, changes, part, tiny_model, backend, caplog):
    with caplog.at_level(logging.WARNING):
        model = open_module(tiny_model(name, **changes), backend)
    said = [r.getMessage() for r in caplog.records if "runs as it is" in r.getMessage()]
    assert len(said) == 1
    assert model.execution.startswith("as is: ")
    assert model.execution.removeprefix("as is: ") in said[0]
    assert re.search(part, said[0]), said[0]


@pytest.mark.parametrize("part", ["model.layers.2", "model.layers.2.self_attn", "lm_head"])
def test_arithmetic_between_known_parts_is_noticed(part, tiny_model, backend):
    module = tiny_model("llama")
    target = module.get_submodule(part)
    forward = target.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        return (out[0] * 1.01, *out[1:]) if isinstance(out, tuple) else out * 1.01

    target.forward = scaled
    model = open_module(module, backend)
    assert model.execution.startswith("as is: ")
    assert ("its logits" if part == "lm_head" else "model.layers.2: ") in model.execution


class WrongWhenPacked(ReferenceBackend):
    """Its seventh packed product is off: the second layer's merged gate and up."""

    def __init__(self, options):
        super().__init__(options)
        self._ops = WrongOps(self)


class WrongOps(TorchOps):
    packed = 0

    def linear(self, weight, bias, scheme=None):
        self.packed += 1
        return super().linear(weight * 1.02 if self.packed == 7 else weight, bias, scheme)


def test_a_lowered_model_that_differs_once_packed_is_loaded_again_and_runs_as_it_is(tmp_path, tiny_model, caplog):
    module = tiny_model("llama")
    module.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = module(torch.tensor([IDS])).logits[0]
    with caplog.at_level(logging.WARNING):
        model = open_checkpoint(tmp_path, "fp32", WrongWhenPacked(BackendOptions()))
    assert "layer 1 is the first that differs" in caplog.text
    assert model.execution.startswith("as is: lowered, its self-test failed: logits of sequence 0")
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)


# --- the same as the model as it is ---


@pytest.mark.parametrize("backend_name", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2", "cohere", "qwen3_moe"])
def test_a_row_is_the_same_bit_for_bit_whatever_runs_beside_it(name, backend_name, tiny_model, prompts):
    backend = registry.create(backend_name, BackendOptions(threads=1, exact=True))
    model = open_module(tiny_model(name), backend, exact=True)
    assert model.execution == "lowered"
    together = PagedRun(model, len(prompts), 32).step(list(enumerate(prompts)))
    for prompt, beside in zip(prompts, together, strict=True):
        run = PagedRun(model, 1, 32)
        alone = [run.step([(0, prompt[:2])])[0], *([run.step([(0, prompt[2:])])[0]] if prompt[2:] else [])]
        assert torch.equal(torch.cat(alone), beside)


@pytest.mark.parametrize("name", ["gemma3_text", "olmo2", "gpt_neox"])
def test_layers_give_the_same_outputs_lowered_and_as_they_are(name, tiny_model, backend):
    seen = []
    for lowering in ("auto", "off"):
        model, kept = open_module(tiny_model(name), backend, lowering=lowering), KeptOutputs()
        with model.observing(kept):
            logits(model)
        logits(model)
        seen.append(kept.outputs)
    assert len(seen[0]) == 3
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
