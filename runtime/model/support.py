"""What cannot run on a paged KV cache, refused by name and reason before weights are read.

The configuration decides as far as it can. What only the model's code shows (masks, biases, layers that do not attend
through transformers' interface) is found by `probe` and by the self-test; `tools/SUPPORT.md` lists the outcome for
every causal architecture of transformers.
"""

from __future__ import annotations

import logging
from typing import Any

from pagefleet.runtime.errors import ModelError

logger = logging.getLogger(__name__)

_RECURRENT = "it keeps a recurrent state, which is not made of blocks of tokens"
_OWN_ATTENTION = "its layers do not attend through transformers' AttentionInterface, so they cannot use a paged cache"
_BIDIRECTIONAL = "its tokens attend to later ones"
_SPARSE = "a learned indexer chooses the keys that a query sees, which needs a cache of its own"

# Layer types of transformers that a paged KV cache can serve; any other name is refused.
SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "sparse", "dense", "moe"})
_LAYER_REASONS = {
    "linear_attention": _RECURRENT,
    "mamba": _RECURRENT,
    "recurrent": _RECURRENT,
    "hybrid": _RECURRENT,
    "hybrid_sliding": _RECURRENT,
    "conv": "its convolution layers keep a state of the last tokens, which is not made of blocks",
    "chunked_attention": "queries see the chunk they are in, which is neither full attention nor a sliding window",
    "indexed_attention": _SPARSE,
}
# Attributes that only architectures with a state have.
_STATE_ATTRIBUTES = (
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_expand",
    "ssm_state_size",
    "linear_conv_kernel_dim",
    "conv_L_cache",
    "rwkv",
    "lru_width",
)
_STATE_FAMILIES = frozenset({"rwkv", "xlstm", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "minimax", "jamba"})
_NO_CAUSAL_MASK = {
    "xlnet": "its permutation masks carry meaning",
    "reformer": "it hashes tokens into buckets across the sequence",
    "big_bird": "its block-sparse attention depends on the whole sequence",
    "blt": "it re-chunks bytes into patches across the sequence",
}


def check_supported(config: Any) -> None:
    """Refuse what cannot work, from a transformers configuration alone.

    Raises:
        ModelError: naming the architecture and the reason.
    """
    text = config.get_text_config(decoder=True)
    reason = _reason(config) or _reason(text)
    if reason:
        raise ModelError(f"model type '{config.model_type}' is not supported: {reason}")


def _reason(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; expected a decoder-only causal language model"
    if getattr(config, "add_cross_attention", False):
        return "it attends across to another model's output"
    if config.model_type in _STATE_FAMILIES or any(getattr(config, a, None) is not None for a in _STATE_ATTRIBUTES):
        return _RECURRENT
    if config.model_type in _NO_CAUSAL_MASK:
        return _NO_CAUSAL_MASK[config.model_type]
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return _BIDIRECTIONAL
    if getattr(config, "alibi", False):
        return "it adds ALiBi biases to attention, which no backend here gives yet"
    for name in getattr(config, "layer_types", None) or ():
        if name not in SERVED_LAYER_TYPES:
            return f"layer type '{name}': {_LAYER_REASONS.get(name, 'it is not known how it attends')}"
    return None


_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")


def length_limit(config: Any, max_len: int | None = None) -> int:
    """Most tokens of a sequence: the model's own limit, or `max_len` if that is less.

    Rotary embeddings that change with the longest sequence of a batch ("dynamic", "longrope") would let one sequence
    change another; up to their original length they do not change, so that is the limit.

    Raises:
        ModelError: `max_len` is more than the model can do.
    """
    text = config.get_text_config(decoder=True)
    own = next((int(v) for name in _LENGTH_NAMES if isinstance(v := getattr(text, name, None), int) and v > 0), None)
    why = "positions that the model has"
    for rope in _rope_settings(text):
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind == "longrope" or "dynamic" in kind:
            original = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            original = int(original or own or 0)
            if original and (own is None or original < own):
                own, why = original, f"its '{kind}' rotation beyond that depends on the other sequences of a batch"
                logger.info("model type %s: sequences are limited to %d tokens: %s", text.model_type, own, why)
    if own is None:
        if max_len is None:
            raise ModelError(f"model type '{config.model_type}' states no greatest length; set model.max_len")
        return max_len
    if max_len is not None and max_len > own:
        raise ModelError(f"model.max_len is {max_len}; at most {own} is possible ({why})")
    return own if max_len is None else max_len


def _rope_settings(text: Any) -> list[dict[str, Any]]:
    """The rotary settings, one dict, or one per layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
