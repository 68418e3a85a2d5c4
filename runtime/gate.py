"""`pagefleet gate`: what a precision and a KV dtype cost in quality, measured against the unquantised model.

Both models read the same text through the paged cache, in chunks, one model after the other. Compared are perplexity,
how often the likeliest next token is the same, and the cosine between the two models' outputs of every layer.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from pagefleet.runtime.config import Config, GateConfig, PrecisionConfig
from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.llm import LLM
from pagefleet.runtime.model.self_test import PagedRun

PASSED, FAILED = 0, 1
CHUNK_TOKENS = 64  # of each passage in a step: what a query sees is mostly read from the cache
_PASSAGE_MARK = "\n---\n"
_ENGINE_BLOCKS = 2  # the engine is not used; the passages have pools of their own


@dataclass(frozen=True)
class Trace:
    """What a model made of a text of N predicted and T read tokens.

    Attributes:
        logprobs: float64 [N], of the token that came next.
        best: int64 [N], the likeliest next token.
        layers: float32 [T, H] for each layer, its output.
    """

    logprobs: torch.Tensor
    best: torch.Tensor
    layers: list[torch.Tensor]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability."""
        return math.exp(min(-float(self.logprobs.mean()), 700.0))


def run_gate(config: Config) -> int:
    """Measure both models, print, and return 0 if the candidate keeps every bound, else 1."""
    text = read_text(config.gate.text)
    baseline, baseline_facts, passages = _measured(_baseline_config(config), text, None)
    candidate, candidate_facts, _ = _measured(config, text, passages)
    report = {"baseline": baseline_facts, "candidate": candidate_facts} | compare(baseline, candidate, config.gate)
    if config.gate.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report, config.gate)
    return PASSED if report["passed"] else FAILED


def read_text(path: str | None) -> list[str]:
    """The passages of a text file, which lines of `---` separate; of the text that is shipped if None.

    Raises:
        ConfigError: no such file, no UTF-8, or nothing in it.
    """
    try:
        source: Any = Path(path).expanduser() if path else files("pagefleet.runtime") / "data" / "gate_text.txt"
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gate.text: expected a file of UTF-8 text, could not read {path} ({error})") from error
    passages = [part.strip() for part in text.split(_PASSAGE_MARK)]
    if not any(passages):
        raise ConfigError(f"gate.text: expected some text, {path} is empty")
    return [part for part in passages if part]


def trace(model: Any, passages: Sequence[Sequence[int]], kv_dtype: str) -> Trace:
    """Run passages of token ids, each a sequence of its own, through `model` with a cache of `kv_dtype`."""
    run = PagedRun(model, len(passages), max(map(len, passages)), block_size=16, kv_dtype=kv_dtype)
    logprobs, best = [], []
    seen: list[list[torch.Tensor]] = []

    def note(layer: int, output: torch.Tensor) -> None:
        while len(seen) <= layer:
            seen.append([])
        seen[layer].append(output.detach().to("cpu", torch.float32, copy=True))

    with model.observing(note):
        for start in range(0, max(map(len, passages)), CHUNK_TOKENS):
            parts = [(i, ids[start : start + CHUNK_TOKENS]) for i, ids in enumerate(passages) if len(ids) > start]
            for (i, part), logits in zip(parts, run.step(parts), strict=True):
                targets = torch.tensor(passages[i][start + 1 : start + 1 + len(part)], device=logits.device)
                rows = logits[: len(targets)]
                chosen = torch.log_softmax(rows.double(), -1).gather(1, targets[:, None])[:, 0]
                logprobs.append(chosen.cpu())
                best.append(rows.argmax(-1).cpu())
    return Trace(torch.cat(logprobs), torch.cat(best), [torch.cat(parts) for parts in seen])


def compare(baseline: Trace, candidate: Trace, bounds: GateConfig) -> dict[str, Any]:
    """The measures as plain JSON values, which bounds were not kept, and whether all were. NaN keeps no bound."""
    cosines = [
        float(torch.nn.functional.cosine_similarity(mine.double(), theirs.double(), dim=-1).mean())
        for mine, theirs in zip(candidate.layers, baseline.layers, strict=True)
    ]
    lowest = min(range(len(cosines)), key=lambda i: cosines[i] if math.isfinite(cosines[i]) else -math.inf)
    increase = candidate.perplexity / baseline.perplexity - 1
    agreement = float((candidate.best == baseline.best).double().mean())
    kept = {
        "perplexity_increase": increase <= bounds.max_perplexity_increase,
        "top1_agreement": agreement >= bounds.min_top1_agreement,
        "layer_cosine": cosines[lowest] >= bounds.min_layer_cosine,
    }
    return {
        "tokens": len(baseline.best),
        "perplexity": {"baseline": baseline.perplexity, "candidate": candidate.perplexity},
        "perplexity_increase": increase,
        "top1_agreement": agreement,
        "layer_cosine": {"lowest": cosines[lowest], "layer": lowest, "all": cosines},
        "failed": [name for name, good in kept.items() if not good],
        "passed": all(kept.values()),
    }


def _baseline_config(config: Config) -> Config:
    return replace(
        config,
        precision=PrecisionConfig(config.gate.baseline_precision, config.precision.exact),
        cache=replace(config.cache, dtype="auto", quant_group_size=None),
    )


def _measured(
    config: Config, text: Sequence[str], passages: list[list[int]] | None
) -> tuple[Trace, dict[str, Any], list[list[int]]]:
    """Load, trace and drop one model. `passages` are the text's token ids where they are known already."""
    llm = LLM.from_config(replace(config, cache=replace(config.cache, num_blocks=_ENGINE_BLOCKS)))
    try:
        if passages is None:
            most = min(config.gate.max_tokens, llm.model.max_len)
            passages = [ids for part in text if len(ids := llm.tokenizer.encode(part)[:most]) > 1]
            if not passages:
                raise ConfigError("gate.text: expected passages of at least two tokens")
        wanted = ("backend", "isa", "dtype", "scheme", "kv_dtype", "kernels", "execution")
        facts = {key: llm.metrics()[key] for key in wanted}
        return trace(llm.model, passages, llm.kv_dtype), facts, passages
    finally:
        llm.close()
        del llm
        gc.collect()  # modules hold cycles; the next model needs the memory


def _print_report(report: dict[str, Any], bounds: GateConfig) -> None:
    from rich.console import Console
    from rich.table import Table

    base, mine = report["baseline"], report["candidate"]
    table = Table(
        title=f"{mine['scheme'] or mine['dtype']}, KV {mine['kv_dtype']} "
        f"against {base['dtype']}, KV {base['kv_dtype']}: "
        f"{report['tokens']} tokens",
        title_justify="left",
    )
    for column in ("measure", "value", "bound", ""):
        table.add_column(column, justify="right" if column in ("value", "bound") else "left")

    def verdict(name: str) -> str:
        return "FAILED" if name in report["failed"] else "ok"

    perplexity, cosine = report["perplexity"], report["layer_cosine"]
    table.add_row("perplexity", f"{perplexity['candidate']:.4g}", f"{perplexity['baseline']:.4g} unquantised", "")
    table.add_row(
        "perplexity increase",
        f"{report['perplexity_increase']:+.2%}",
        f"<= {bounds.max_perplexity_increase:.2%}",
        verdict("perplexity_increase"),
    )
    table.add_row(
        "same likeliest token",
        f"{report['top1_agreement']:.2%}",
        f">= {bounds.min_top1_agreement:.2%}",
        verdict("top1_agreement"),
    )
    table.add_row(
        f"lowest layer cosine (layer {cosine['layer']})",
        f"{cosine['lowest']:.5f}",
        f">= {bounds.min_layer_cosine}",
        verdict("layer_cosine"),
    )
    Console().print(table)
