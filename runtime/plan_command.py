"""`pagefleet plan`: gather what the planning formula needs, and print what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagefleet.runtime.config import Config
from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.memory_plan import ELEMENT_BYTES, MemoryPlan, ModelShape, plan_memory, shape_from_config
from pagefleet.runtime.sizes import format_size, parse_size
from pagefleet.runtime.weights import tensor_infos, weight_bytes

DOES_NOT_FIT = 1


def run_plan(config: Config) -> int:
    """Print the plan; exit code 0 if a sequence of max_len fits, else 1."""
    plan, facts = make_plan(config)
    if config.plan.json:
        print(json.dumps(facts | plan.as_dict(), indent=2))
    else:
        _print_table(plan, facts)
    return 0 if plan.fits else DOES_NOT_FIT


def make_plan(config: Config) -> tuple[MemoryPlan, dict[str, Any]]:
    """The plan, and the facts it stands on (model, backend, dtypes). Reads headers only, no weights.

    Raises:
        ModelError: the checkpoint cannot be read; BackendError: the backend cannot run here.
    """
    from pagefleet.runtime.choices import create_backend
    from pagefleet.runtime.model.load import find_checkpoint

    path = find_checkpoint(config.model.path, config.model.revision)
    hf_config = read_model_config(path, config.model.trust_remote_code)
    shape = shape_from_config(hf_config)
    backend, config = create_backend(config)
    capabilities, memory, dtype = backend.capabilities(), backend.memory(), config.precision.compute
    limit, source = _limit(config, memory.free)
    elsewhere = source == "hardware.memory"
    tied = bool(getattr(hf_config, "tie_word_embeddings", False))
    quantized_head = config.precision.scheme is not None and config.precision.quantize_head  # counted with its scheme
    packs_head = tied and not quantized_head and dtype in capabilities.packed_dtypes and not elsewhere
    packed_head = shape.vocab_size * shape.hidden_size if packs_head else 0
    plan = plan_memory(
        shape,
        weight_bytes=weight_bytes(
            tensor_infos(path), ELEMENT_BYTES[dtype], tied, config.precision, packed_head_elements=packed_head
        ),
        limit_bytes=limit,
        compute_dtype=dtype,
        kv_dtype=config.cache.dtype,
        block_size=config.cache.block_size,
        max_len=config.model.max_len,
        max_sequences=config.scheduler.max_sequences,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        drafted_rows=config.speculation.most_rows,
        memory_fraction=config.cache.memory_fraction,
        kv_memory_bytes=config.cache.memory_bytes,
    )
    return plan, {
        "model": config.model.path,
        "backend": config.hardware.name if elsewhere else capabilities.name,
        "isa": "a card that is not here" if elsewhere else capabilities.isa,
        "precision": config.precision.name,
        "scheme": config.precision.scheme,
        "kv_dtype": config.cache.dtype,
        "memory_total_bytes": limit if elsewhere else memory.total,
        "memory_free_bytes": limit if elsewhere else memory.free,
        "memory_source": source,
        "kv_groups": _groups(shape),
        "packed_head_bytes": packed_head * ELEMENT_BYTES[dtype],
    }


def _limit(config: Config, free: int) -> tuple[int, str]:
    """Bytes to plan for, and where the number is from: asked for, a card's that is not in this machine, free here."""
    from pagefleet.backends import detect

    if config.plan.memory:
        return parse_size(config.plan.memory, "plan.memory"), "plan.memory"
    card = config.hardware
    if card.memory and detect.detect("auto").name != card.name:
        return parse_size(card.memory, "hardware.memory"), "hardware.memory"
    return free, "free now"


def read_model_config(path: Path, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a checkpoint. Raises ModelError if there is none."""
    from transformers import AutoConfig

    try:
        if path.suffix == ".gguf":
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: its model configuration cannot be read: {str(error).splitlines()[0]}") from error


def _groups(shape: ModelShape) -> list[dict[str, Any]]:
    return [
        {
            "layers": group.num_layers,
            "kv_heads": group.num_kv_heads,
            "head_dim": group.head_dim,
            "window": group.window,
        }
        for group in shape.groups
    ]


def _print_table(plan: MemoryPlan, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{facts['model']}: {facts['precision']} on {facts['backend']} ({facts['isa']}), KV {facts['kv_dtype']}"
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("how")
    table.add_row(
        "memory", format_size(plan.limit), f"{facts['memory_source']}; total {format_size(facts['memory_total_bytes'])}"
    )
    head = facts["packed_head_bytes"]
    apart = f"; {format_size(head)} of it the tied head, packed apart from the embedding" if head else ""
    table.add_row("weights", format_size(plan.weights), f"from the checkpoint's headers{apart}")
    table.add_row("activations", format_size(plan.activations), f"a step of {plan.max_batched_tokens} tokens")
    table.add_row("logits", format_size(plan.logits), "of a step's last and drafted tokens, fp32, with a working copy")
    table.add_row("KV budget", format_size(plan.kv_budget), "what is left, or as cache.memory says")
    for group in facts["kv_groups"]:
        kind = f"window {group['window']}" if group["window"] else "full attention"
        table.add_row("", "", f"{group['layers']} layers x {group['kv_heads']} KV heads x {group['head_dim']}, {kind}")
    table.add_row("KV of a token", format_size(plan.token_bytes), f"blocks of {plan.block_size} tokens")
    console.print(table)
    if plan.fits:
        console.print(
            f"Fits: {plan.fit.tokens:,} tokens in the cache, {plan.fit.sequences:,} sequences of {plan.max_len:,} "
            f"tokens at once (at most {plan.max_sequences} run)."
        )
        return
    console.print(f"Does not fit: a sequence of {plan.max_len:,} tokens. What would:")
    for line in plan.advice:
        console.print(f"  - {line}")
