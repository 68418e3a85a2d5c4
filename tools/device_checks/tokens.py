"""The whole engine on the card against the CPU backend: the same tokens, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagefleet.runtime import LLM, SamplingParams
from pagefleet.runtime.config import BackendConfig, CacheConfig, Config, ModelConfig, PrecisionConfig, SchedulerConfig

from .machine import Machine
from .models import checkpoint, tiny_module
from .report import Row, failure
from .worker import describe

_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
# family of `tests/models/tiny.py`, changes to it, KV dtype, graphs
CASES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("llama", {}, "fp32", "off"),
    ("llama", {}, "fp32", "on"),
    ("gemma3_text", _WINDOWED, "fp32", "auto"),
    ("gpt_oss", _WINDOWED, "fp32", "auto"),  # sinks
    ("gemma2", _WINDOWED, "fp32", "auto"),  # soft caps
    ("llama", {}, "int8", "auto"),
)
DRY_CASES = (("llama", {"num_hidden_layers": 1}, "fp32", "off"),)


def run(machine: Machine) -> Iterator[Row]:
    """Greedy and sampled tokens of one family after another."""
    for family, changes, kv, graphs in machine.pick(CASES, DRY_CASES):
        name = f"{family}, KV {kv}, graphs {graphs}"
        try:
            yield _compare(machine, name, family, changes, kv, graphs)
        except Exception as error:
            yield failure(name, describe(error))


def _compare(machine: Machine, name: str, family: str, changes: dict[str, Any], kv: str, graphs: str) -> Row:
    rules = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 11}]
    prompts = [[5, 9, 33, 41, 8, 77, 20], [17], list(range(30, 47)), [2, 3, 5, 7, 11] * 8]
    prompts = machine.pick(prompts * 8, prompts[:2])
    params = [
        SamplingParams(max_tokens=machine.pick(24, 2), ignore_eos=True, **rules[i % 2]) for i in range(len(prompts))
    ]
    module = tiny_module(family, **changes)
    tokens = {}
    with checkpoint(module, module.config.vocab_size) as folder:
        for backend in ("cpu", machine.name):
            with LLM.from_config(_config(folder, backend, kv, graphs)) as llm:
                tokens[backend] = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
                kernels = llm.metrics()["kernels"]
    same = sum(a == b for a, b in zip(tokens["cpu"], tokens[machine.name], strict=True))
    return Row(name, same, "same requests", f"of {len(prompts)}; {kernels['attention']}", at_least=len(prompts))


def _config(folder: Path, backend: str, kv: str, graphs: str) -> Config:
    return Config(
        model=ModelConfig(str(folder), max_len=96),
        backend=BackendConfig(backend, graphs=graphs),
        precision=PrecisionConfig("fp32"),
        cache=CacheConfig(dtype=kv, block_size=4, memory="8MiB"),
        scheduler=SchedulerConfig(max_batched_tokens=64, max_sequences=16),
    )
