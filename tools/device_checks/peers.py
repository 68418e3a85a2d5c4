"""The engine against transformers on the same weights, in turns: its static batch and its own continuous batching."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from pagefleet.runtime import LLM, SamplingParams
from pagefleet.runtime.config import BackendConfig, CacheConfig, Config, ModelConfig, PrecisionConfig, SchedulerConfig

from .machine import Machine
from .models import SHAPES, checkpoint, random_module
from .report import Row, failure
from .worker import describe

CONCURRENT = 64


def run(machine: Machine) -> Iterator[Row]:
    """New tokens a second of 64 greedy requests; each engine runs twice, in turns, and its better run counts."""
    requests, prompt, new = machine.pick((CONCURRENT, 256, 128), (2, 5, 2))
    vocab = SHAPES[machine.pick("1B", "dry")]["vocab_size"]
    generator = torch.Generator().manual_seed(9)
    module = random_module(machine, "1B", machine.pick(torch.bfloat16, torch.float32))
    with checkpoint(module, vocab) as folder, LLM.from_config(_config(machine, folder, prompt + new)) as llm:
        engines: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
            "pagefleet": lambda prompts: _ours(llm, prompts, new),
            "transformers, continuous batching": lambda prompts: _continuous(machine, module, prompts, new),
            "transformers, static batch": lambda prompts: _static(module, prompts, new),
        }
        best: dict[str, float] = {}
        broken: dict[str, str] = {}
        for _ in range(machine.pick(2, 1)):
            for name, generate in engines.items():
                prompts = torch.randint(2, vocab, (requests, prompt), generator=generator).tolist()
                try:
                    rate = _rate(machine, generate, prompts, new)
                except Exception as error:
                    broken[name] = describe(error)
                    continue
                best[name] = max(rate, best.get(name, 0.0))
    yield from _rows(machine, best, broken, f"1B, {requests} requests of {prompt} + {new} tokens")


def _rows(machine: Machine, best: dict[str, float], broken: dict[str, str], note: str) -> Iterator[Row]:
    targets = {"transformers, continuous batching": 10.0}
    for name, reason in broken.items():
        if name not in best:
            yield failure(name, reason)
    for name, rate in best.items():
        yield Row(name, rate, "new tokens/s", note)
        if name != "pagefleet" and "pagefleet" in best:
            target = None if machine.dry else targets.get(name)
            yield Row(f"pagefleet over {name}", best["pagefleet"] / rate, "x", note, at_least=target)


def _rate(
    machine: Machine, generate: Callable[[list[list[int]]], list[list[int]]], prompts: list[list[int]], new: int
) -> float:
    machine.synchronize()
    began = monotonic()
    outputs = generate(prompts)
    machine.synchronize()
    seconds = monotonic() - began
    short = [len(ids) for ids in outputs if len(ids) != new]
    if short or len(outputs) != len(prompts):
        raise ValueError(f"expected {len(prompts)} outputs of {new} tokens, got {len(outputs)}, some of {short[:3]}")
    return len(prompts) * new / seconds


def _config(machine: Machine, folder: Path, length: int) -> Config:
    return Config(
        model=ModelConfig(str(folder), max_len=length + 1),
        backend=BackendConfig(machine.name),
        precision=PrecisionConfig(machine.pick("bf16", "fp32")),
        cache=CacheConfig(block_size=machine.pick(32, 4), memory=machine.pick("8GiB", "256KiB")),
        scheduler=SchedulerConfig(max_batched_tokens=machine.pick(8192, 16), max_sequences=machine.pick(CONCURRENT, 4)),
    )


def _ours(llm: LLM, prompts: list[list[int]], new: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0))
    return [list(out.outputs[0].token_ids) if out.outputs else [] for out in outputs]


def _static(module: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    module.set_attn_implementation("sdpa")
    ids = torch.tensor(prompts, device=module.device)
    with torch.inference_mode():
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


def _continuous(machine: Machine, module: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    wanted: dict[str, Any] = {"max_memory_percent": 0.5, "auto_switch_to_flash": False}  # flash kernels need a network
    wanted |= machine.pick({}, {"page_size": 16, "num_blocks": 8, "max_batch_tokens": 32})
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    settings = ContinuousBatchingConfig(**{k: v for k, v in wanted.items() if k in known})
    module.set_attn_implementation("sdpa")
    done = module.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=settings,
    )
    return [list(output.generated_tokens) for output in done.values()]
