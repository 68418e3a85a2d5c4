"""The whole engine with the Triton kernels, on tiny models: the tokens of the CPU backend.

A step of two layers takes 0.3 s in the interpreter, some thousand times what it takes compiled.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pagefleet.backends import registry
from pagefleet.backends.gpu.backend import GpuBackend
from pagefleet.backends.gpu.device import GpuDevice
from pagefleet.kernels.triton.targets import target_of
from pagefleet.runtime import LLM, SamplingParams


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(family): a folder with a tiny random model and a tokenizer of one word an id."""
    place = Path(__file__).parents[1] / "models" / "tiny.py"
    spec = importlib.util.spec_from_file_location("pagefleet_tests_tiny_interpreted", place)
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)

    def make(family, **changes):
        tiny.tiny_model(family, seed=3, num_hidden_layers=2, **changes).save_pretrained(tmp_path)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1").save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture
def interpreted_gpu(monkeypatch):
    """backend=cuda is the GPU backends' code on CPU tensors."""
    made = []

    def create(name="auto", options=None):
        if name != "cuda":
            return real(name, options)
        gpu = GpuDevice("cuda", torch.device("cpu"), "none", target_of("interpreter"), 8)
        made.append(GpuBackend(options, gpu))
        return made[-1]

    real = registry.create
    monkeypatch.setattr(registry, "create", create)
    return made


PARAMS = [
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.9, top_k=20, top_p=0.9, seed=11),
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.2, min_p=0.01, seed=12),
]


MIXED = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "changes", "kv"),
    [
        ("llama", {}, "auto"),
        ("llama", {}, "int8"),
        ("gemma3_text", MIXED, "auto"),  # windows, q/k norms
        ("gemma2", MIXED, "auto"),  # soft caps
        ("gpt_oss", MIXED, "auto"),  # sinks, experts
    ],
)
def test_the_engine_gives_the_cpu_backends_tokens(checkpoint, interpreted_gpu, family, changes, kv):
    folder = checkpoint(family, **changes)
    prompts = [[5, 9, 33, 41, 8, 77, 20], [17], list(range(30, 47))]
    outputs = {}
    for backend in ("cpu", "cuda"):
        with LLM(
            folder, backend=backend, dtype="fp32", block_size=4, max_model_len=64, kv_cache_memory_bytes=1 << 20,
            max_num_batched_tokens=12, kv_cache_dtype=kv,
        ) as llm:  # fmt: skip
            outputs[backend] = llm.generate(prompts, PARAMS)
            measures = llm.metrics()
            assert measures["backend"] == backend
    assert interpreted_gpu, "the CPU backend was compared with itself"
    assert [op for op, kernel in measures["kernels"].items() if not kernel.startswith("Triton")] == ["linear"]
    for got, expected in zip(outputs["cuda"], outputs["cpu"], strict=True):
        assert got.error is None
        assert got.outputs[0].token_ids == expected.outputs[0].token_ids
    pairs = zip(outputs["cuda"][0].outputs[0].logprobs, outputs["cpu"][0].outputs[0].logprobs, strict=True)
    for got, expected in pairs:
        assert got.keys() == expected.keys()
        for token, value in got.items():
            assert value.rank == expected[token].rank
            assert value.logprob == pytest.approx(expected[token].logprob, abs=1e-4)
