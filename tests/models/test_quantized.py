"""Quantised linear layers in whole models: the same tokens lowered or as they are, compiled or specified."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from pagefleet.backends import registry
from pagefleet.backends.base import BackendOptions
from pagefleet.runtime.config import PrecisionConfig
from pagefleet.runtime.model.open import open_module
from pagefleet.runtime.model.quantize import Quantization
from pagefleet.runtime.model.self_test import PagedRun
from pagefleet.runtime.weights import TensorInfo, weight_bytes

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # rows of whole groups, and outputs enough to be quantised
NEW_TOKENS = 8


def greedy(model, prompts):
    run = PagedRun(model, len(prompts), 64, 16)
    outputs = [[int(rows[-1].argmax())] for rows in run.step(list(enumerate(prompts)))]
    while len(outputs[0]) < NEW_TOKENS:
        steps = run.step([(i, out[-1:]) for i, out in enumerate(outputs)])
        for out, logits in zip(outputs, steps, strict=True):
            out.append(int(logits[-1].argmax()))
    return outputs


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "w4a16_g32"])
def test_tokens_are_the_same_compiled_and_specified_lowered_and_as_is(scheme, tiny_model, prompts):
    original = tiny_model("llama", seed=3, **SIZES)
    outputs = {}
    for name in ("reference", "cpu"):
        for lowering in ("auto", "off"):
            backend = registry.create(name, BackendOptions(threads=1))
            module = copy.deepcopy(original)
            model = open_module(module, backend, lowering=lowering, quantization=Quantization(scheme))
            assert model.execution.startswith("as is") == (lowering == "off")
            outputs[name, lowering] = greedy(model, prompts)
    first = outputs["reference", "off"]
    assert all(out == first for out in outputs.values()), outputs
    assert len({t for out in first for t in out}) > 4, "the tiny model says the same thing always: no test"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text", "mixtral", "gpt2"])
def test_every_kind_of_layer_is_quantised_or_left_as_it_should(kind, tiny_model, prompts):
    backend = registry.create("cpu", BackendOptions(threads=1))
    sizes = {"n_embd": 64} if kind == "gpt2" else SIZES
    model = open_module(tiny_model(kind, seed=3, **sizes), backend, quantization=Quantization("w8a16"))
    assert model.execution == "lowered"
    for layer in model.layers:
        assert layer.qkv.scheme == layer.output.scheme == "w8a16"
        mixers = getattr(layer.mixer, "experts", [layer.mixer])
        assert {x.scheme for mlp in mixers for x in (mlp.up, mlp.down)} == {"w8a16"}
        if kind == "mixtral":
            assert layer.mixer.router.scheme == "float32"
    assert model._head.linear.scheme == "float32"
    assert len(greedy(model, prompts)) == len(prompts)


@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_the_head_is_quantised_when_asked_for(lowering, tiny_model):
    backend = registry.create("cpu", BackendOptions(threads=1))
    model = open_module(
        tiny_model("llama", **SIZES), backend, lowering=lowering, quantization=Quantization("w8a8", head=True)
    )
    head = model._head.linear if lowering == "auto" else model.module.lm_head.product
    assert head.scheme == "w8a8"


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16_g32"])
def test_in_exact_mode_neighbours_change_no_bit(scheme, tiny_model, prompts):
    backend = registry.create("cpu", BackendOptions(threads=1, exact=True))
    model = open_module(tiny_model("llama", **SIZES), backend, exact=True, quantization=Quantization(scheme))
    together = PagedRun(model, len(prompts), 64).step(list(enumerate(prompts)))
    for ids, got in zip(prompts, together, strict=True):
        (alone,) = PagedRun(model, 1, 64).step([(0, ids)])
        assert torch.equal(got, alone)


def infos(model) -> list[TensorInfo]:
    return [TensorInfo(name, "F32", tuple(x.shape)) for name, x in model.state_dict().items()]


@pytest.mark.parametrize(("name", "head"), [("w8a8", False), ("w8a16", True), ("w4a16", False)])
def test_the_plan_counts_packed_weights(name, head, tiny_model):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    module = tiny_model("llama", **sizes)
    precision = PrecisionConfig(name, quantize_head=head)
    planned = weight_bytes(infos(module), 4, False, precision)
    backend = registry.create("cpu", BackendOptions(threads=1))
    embedding = 512 * 256 * 4
    model = open_module(module, backend, quantization=Quantization(precision.scheme, head))
    linears = [model._head.linear]
    for layer in model.layers:
        linears += [layer.qkv, layer.output, layer.mixer.up, layer.mixer.down]
    assert math.isclose(planned, embedding + sum(x.weight_bytes for x in linears), rel_tol=0.05)


def test_a_tied_head_that_is_quantised_is_planned_beside_its_embedding():
    tied = [TensorInfo("model.embed_tokens.weight", "F32", (100, 32)), TensorInfo("lm_head.weight", "F32", (100, 32))]
    assert weight_bytes(tied, 2, True, PrecisionConfig("w8a8")) == 100 * 32 * 2
    assert weight_bytes(tied, 2, True, PrecisionConfig("w8a8", quantize_head=True)) == 100 * 32 * 3 + 100 * 4
