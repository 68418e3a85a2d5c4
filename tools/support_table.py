"""Try every causal architecture of the installed transformers and write tools/SUPPORT.md.

    python tools/support_table.py [MODEL_TYPE ...] [--output tools/SUPPORT.md] [--timeout 90]

Each architecture is made small by shrinking its default configuration, filled with random weights, loaded as any model
is and self-tested on the reference backend, in a process of its own. With model types given, only prints their rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_MAX_PARAMETERS = 60_000_000

_LAYERS = 4
_WINDOWS = frozenset({"sliding_window", "window_size", "attention_window"})
_FILLED = frozenset({"n_group", "topk_group", "n_routed_experts", "num_experts_per_tok"})  # if the default has none
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# What names of a configuration mean, and how small they are made; the first are the numbers of layers.
_SMALL: tuple[tuple[tuple[str, ...], int], ...] = (
    (("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 4),
    (("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "n_embed", "emb_dim"), 64),
    (
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "d_ff", "feed_forward_size"),
        96,
    ),
    (("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
    (("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    (("head_dim", "global_head_dim", "swa_head_dim", "attention_head_dim"), 16),
    (("vocab_size", "vocab_size_per_layer_input"), 160),
    (("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    (("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    (("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token"), 2),
    (("n_group", "topk_group"), 1),
    (("q_lora_rank", "kv_lora_rank"), 16),
    (("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    (("first_k_dense_replace", "num_kv_shared_layers", "num_dense_layers"), 1),
    (("hidden_size_per_layer_input", "laurel_rank", "rotary_dim"), 8),
    (("image_size", "patch_size", "projection_dim"), 32),
    (("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
)


def shrink(config: Any, **forced: Any) -> Any:
    """The same architecture, small: sizes by name, per-layer lists cut to the new number of layers.

    Parts of a composite configuration are shrunk too, so that the architecture is tried as a whole.
    """
    plain = _plain(config)
    known = {name: small for names, small in _SMALL for name in names}
    if "qk_rope_head_dim" in plain:  # latent attention: the rotary part is what `head_dim` means
        known |= {"head_dim": 8, "qk_head_dim": 16, "num_key_value_heads": 4, "num_attention_heads": 4}
    changes: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, bool):
            continue
        if name in _FILLED and value is None:
            changes[name] = known[name]
        elif name in known and isinstance(value, int):
            changes[name] = min(known[name], value) if value > 0 else value
        elif name in known and isinstance(value, list) and value and all(isinstance(v, int) for v in value):
            changes[name] = [min(known[name], v) for v in value[:_LAYERS]]
        elif name in _WINDOWS and isinstance(value, int) and value > 0:
            changes[name] = 6
        elif name in _TOKENS:
            changes[name] = _TOKENS[name]
        elif isinstance(value, list) and len(value) == _layers(plain):
            changes[name] = _representative(value, _LAYERS)
    if plain.get("is_decoder") is False:  # what loads as a causal model is one
        changes["is_decoder"] = True
    for name in getattr(type(config), "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            changes[name] = shrink(getattr(config, name))
    return type(config)(**{**plain, **changes, **{k: v for k, v in forced.items() if k in plain}})


def _layers(plain: dict[str, Any]) -> int | None:
    return next((plain[name] for name in _SMALL[0][0] if isinstance(plain.get(name), int)), None)


# Tried in turn until one can be made: sizes that the default leaves to be worked out, layers that share keys.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 16, "num_key_value_heads": 2},
    {"head_dim": 16, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    {"layer_types": None, "num_kv_shared_layers": 0},
    {"layer_types": None, "per_layer_config": None, "num_kv_shared_layers": 2},
    {"layer_types": None, "per_layer_config": None, "num_kv_shared_layers": 0},
)


def small_model(whole: Any) -> Any:
    """A random fp32 model of the architecture. Raises ValueError saying why none could be made."""
    import torch
    from transformers import AutoModelForCausalLM

    first: Exception | None = None
    for variant in _VARIANTS:
        try:
            config = shrink(whole, **variant)
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if size > _MAX_PARAMETERS:
                raise ValueError(f"the smallest one has {size:.1e} weights")
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:
            first = first or error
    raise ValueError(f"a small one could not be made from its default configuration: {first!r}") from first


def _representative(per_layer: list[Any], count: int) -> list[Any]:
    """The first `count` layers, the last of them replaced by a kind that would otherwise be missing."""
    kept = per_layer[:count]
    missing = [v for v in per_layer if v not in kept]
    return [*kept[:-1], missing[0]] if missing else kept


def _plain(config: Any) -> dict[str, Any]:
    drop = {"architectures", "transformers_version", "model_type", "_name_or_path", "dtype", "torch_dtype"}
    return {k: v for k, v in config.to_dict().items() if k not in drop and not k.startswith("_")}


def examine(model_type: str) -> tuple[str, str]:
    """(outcome, reason) of one architecture: works, refused, or untried."""
    import torch
    from transformers import AutoConfig

    from pagefleet.backends import registry
    from pagefleet.backends.base import BackendOptions
    from pagefleet.runtime.errors import ModelError
    from pagefleet.runtime.model.open import open_module
    from pagefleet.runtime.model.support import check_supported

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        whole = AutoConfig.for_model(model_type)
    except Exception as error:
        return "untried", f"its default configuration cannot be made: {_short(error)}"
    try:
        check_supported(whole)
    except ModelError as error:
        return "refused", _short(error)
    try:
        module = small_model(whole)
    except ValueError as error:
        return "untried", _short(error)
    _spread(module)
    try:
        open_module(module, registry.create("reference", BackendOptions(threads=1)))
    except ModelError as error:
        return "refused", _short(error)
    except Exception as error:
        return "refused", f"{type(error).__name__}: {_short(error)}"
    return "works", ""


def _spread(module: Any) -> None:
    """Random weights wide enough that attention matters."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def _short(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].replace("|", "/")
    return line if len(line) < 220 else line[:217] + "..."


def in_own_process(model_type: str, timeout: float) -> tuple[str, str]:
    """`examine` where a crash or a hang cannot hurt; forked where the system can, as imports take seconds."""
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_examine_into, args=(model_type, sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout):
            return "untried", f"took more than {timeout:g} s"
        outcome, reason = receiving.recv()
        return outcome, reason
    except EOFError:
        process.join()
        return "untried", f"its process died with status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _examine_into(model_type: str, sending: Any) -> None:
    sending.send(examine(model_type))


def table(rows: list[tuple[str, str, str]]) -> str:
    """The Markdown file."""
    import torch
    import transformers

    counts = {name: sum(1 for _, outcome, _ in rows if outcome == name) for name in ("works", "refused", "untried")}
    head = f"""# Which architectures run

Made by `python tools/support_table.py` with transformers {transformers.__version__} and torch
{torch.__version__.split("+")[0]}: every model type of `AutoModelForCausalLM`, shrunk, with random weights, through the
self-test that every model passes at load. **works**: packed and chunked over a paged cache equals the model's own eager
attention in fp32. **refused**: loading it is an error that says this. **untried**: the table's maker could not build a
small one; loading a real one decides. Models that also take images or sound are tried, and served, with text only.

{counts["works"]} work, {counts["refused"]} are refused, {counts["untried"]} are untried.

| model type | outcome | why |
|---|---|---|
"""
    return head + "".join(f"| {name} | {outcome} | {reason} |\n" for name, outcome, reason in rows)


def main() -> int:
    """Write the table, or print the rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--output", type=Path, default=_HERE / "SUPPORT.md")
    parser.add_argument("--timeout", type=float, default=90)
    options = parser.parse_args()
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import pagefleet.runtime.model.hf_model  # noqa: F401  (before forking)

    torch.set_num_threads(1)  # a process with other threads cannot be forked safely
    rows = []
    for name in options.model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append((name, *in_own_process(name, options.timeout)))
        print(*rows[-1], sep="\t", flush=True)
    if not options.model_types:
        options.output.write_text(table(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
