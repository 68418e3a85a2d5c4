"""What a step costs beside its arithmetic: a random model, many layers that are next to nothing, through the engine.

    python tools/bench_step.py [--layers 30] [--hidden 64] [--sequences 1,64] [--steps 200] [--json FILE]

Prints milliseconds of a decode step by phase. "model" is nearly all interpreter and glue: calls, views, memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pagefleet.runtime import LLM, SamplingParams

VOCAB = 128
_PROMPT = 16


def main(argv: list[str] | None = None) -> dict[int, dict[str, float]]:
    """Measure what the command line asks for; milliseconds by number of sequences and phase."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sequences", default="1,64", help="comma-separated")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--threads", type=int, default=1, help="of more, the barriers would be measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.layers, options.hidden)
        counts = [int(count) for count in options.sequences.split(",")]
        blocks = max(counts) * -(-(_PROMPT + options.steps + 2) // 16) + 1
        with LLM(folder, dtype=options.precision, threads=options.threads, num_kv_blocks=blocks) as llm:
            report = {count: step_milliseconds(llm, count, options.steps) for count in counts}
    for count, phases in report.items():
        print(f"{count:4} sequences:", ", ".join(f"{name} {value:.3f}" for name, value in phases.items()), "ms")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def save_model(folder: Path, layers: int, hidden: int) -> None:
    """A random Llama with two query heads and one KV head, and a tokenizer of single letters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters = {chr(33 + i): i for i in range(VOCAB)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, []))).save_pretrained(folder)


def step_milliseconds(llm: Any, sequences: int, steps: int) -> dict[str, float]:
    """Of a decode step: the median of all, and the means of its phases."""
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    for number in range(sequences):
        llm.submit(f"{sequences}-{number}", [number % VOCAB] * _PROMPT, params)
    llm.step()  # the prompts
    clock, seconds = llm.engine.metrics.clock, []
    before = dict(clock.seconds)
    while llm.has_unfinished:
        started = time.perf_counter()
        llm.step()
        seconds.append(time.perf_counter() - started)
    phases = {name: 1000 * (after - before[name]) / len(seconds) for name, after in clock.seconds.items()}
    return {"step": 1000 * statistics.median(seconds), **phases}


if __name__ == "__main__":
    main()
