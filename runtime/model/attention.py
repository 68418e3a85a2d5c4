"""The one attention function that transformers' models call, and the handler that answers it.

Some architectures drop keyword arguments on the way to their attention layers, so what a step needs does not travel
through the model: it stands in a context variable while the model runs (`attending`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from pagefleet.runtime.errors import ModelError

PAGED = "pagefleet"  # no mask function has this name, so transformers makes no mask
RECORDING = "pagefleet_recording"  # `probe` registers a mask function under this name


class AttentionHandler(Protocol):
    """Answers the attention calls of one forward pass, in the order in which the model makes them."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of query [1, Hq, T, D], key [1, Hkv, T, D] and value [1, Hkv, T, Dv]; returns [1, T, Hq, Dv]."""
        ...


_handler: ContextVar[AttentionHandler | None] = ContextVar("pagefleet_attention_handler", default=None)


@contextmanager
def attending(handler: AttentionHandler) -> Iterator[None]:
    """Hand every attention call made inside to `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    handler = _handler.get()
    if handler is None:
        raise ModelError("this model attends through Pagefleet's cache; run it with HFModel.forward, not by itself")
    return handler.attend(module, query, key, value, attention_mask, settings), None


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(RECORDING, _attention)


def set_attention(module: Any, name: str) -> None:
    """Make every layer of a transformers model attend through `name`.

    Raises:
        ModelError: the architecture does not let its attention be chosen.
    """
    if not module._can_set_attn_implementation():
        raise ModelError(
            f"{type(module).__name__} is not supported: its layers do not attend through transformers' "
            "AttentionInterface, so a paged cache cannot be put under them"
        )
    try:
        module.set_attn_implementation(name)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{type(module).__name__} is not supported: it refuses attention '{name}': {error}") from error
