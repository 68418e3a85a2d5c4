"""What a model's attention layers really do, read from one short run instead of from its configuration.

The run records each attention call in order: head counts and sizes, scale, soft cap, and which earlier layer's keys it
uses. What a layer may see is measured on the mask *function* that the model gives to transformers, so that a window of
any length is known exactly, and a mask that carries more than a window (chunks, blocks, future tokens, biases) is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask

from pagefleet.runtime.errors import ModelError

from .attention import RECORDING, attending, set_attention

PROBE_TOKENS = 4
_FAR = 1 << 20  # a window longer than this many tokens is taken as none
# Settings that say how to attend. A value of one that `AttentionArgs` cannot express is a reason to refuse.
_UNEXPRESSED = ("position_bias", "head_mask", "block_mask", "indices")


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward pass.

    Attributes:
        module: the attention module that makes it.
        source: the call whose keys and values it uses; its own number unless layers share their KV.
        window: tokens a query sees, itself included; None for all.
    """

    module: torch.nn.Module
    source: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    window: int | None
    softcap: float | None


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.masks: list[tuple[torch.Tensor, int | ModelError | None]] = []
        self._keys: list[tuple[torch.Tensor, torch.Tensor]] = []  # kept alive, so that addresses stay unique

    def mask(self, *args: Any, mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
        try:
            window: int | ModelError | None = measure_window(mask_function)
        except ModelError as error:  # it matters only if a layer uses this mask
            window = error
        kwargs.pop("allow_is_bidirectional_skip", None)
        made = eager_mask(*args, **kwargs | {"mask_function": mask_function})
        self.masks.append((made, window))
        return made

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        number = len(self.calls)
        where = f"attention call {number} ({type(module).__name__})"
        tokens = (query.shape[0], query.shape[2], key.shape[2])
        if tokens != (1, PROBE_TOKENS, PROBE_TOKENS):
            raise ModelError(f"{where} attends to something else than the tokens of the sequence: {tokens}")
        odd = [name for name in _UNEXPRESSED if settings.get(name) is not None]
        if odd:
            raise ModelError(f"{where} needs {', '.join(odd)}, which a paged cache cannot give")
        softcap, scale = settings.get("softcap"), settings.get("scaling")
        self.calls.append(
            AttentionCall(
                module=module,
                source=self._source(number, key, value),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=key.shape[3],
                value_head_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=self._window(where, mask),
                softcap=float(softcap) if softcap else None,
            )
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _source(self, number: int, key: torch.Tensor, value: torch.Tensor) -> int:
        self._keys.append((key, value))
        for earlier, (old_key, old_value) in enumerate(self._keys[:-1]):
            if _same_memory(key, old_key) and _same_memory(value, old_value):
                return self.calls[earlier].source
        return number

    def _window(self, where: str, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            raise ModelError(f"{where} is given no causal mask, so it would see future tokens")
        for made, window in self.masks:
            if made is mask:
                return _known(window)
        visible = mask if mask.dtype == torch.bool else mask == 0
        alike = {
            window
            for made, window in self.masks
            if made.shape == mask.shape
            and torch.equal(made == 0, visible)
            and (mask.dtype == torch.bool or bool((mask[~visible] <= -1e4).all()))
        }
        if len(alike) != 1:
            raise ModelError(f"{where} is given a mask that carries more than causality and a window (a bias, say)")
        return _known(alike.pop())


def _known(window: int | ModelError | None) -> int | None:
    if isinstance(window, ModelError):
        raise window
    return window


_recorder: list[_Recorder] = []


def _recording_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    if not _recorder:
        raise ModelError("the recording attention is used while a model is loaded, and at no other time")
    return _recorder[-1].mask(*args, **kwargs)


AttentionMaskInterface.register(RECORDING, _recording_mask)


def record_attention(module: Any, run: Callable[[torch.Tensor, torch.Tensor], Any], device: str) -> list[AttentionCall]:
    """The attention calls of one forward pass of `module`, in order.

    Args:
        module: the transformers model; it is left attending through the recording function.
        run: runs its decoder on token ids [1, N] and positions [1, N].

    Raises:
        ModelError: the model cannot run on a paged cache; the message says why.
    """
    name = type(module).__name__
    set_attention(module, RECORDING)
    recorder = _Recorder()
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    _recorder.append(recorder)
    try:
        with attending(recorder), torch.inference_mode():
            run(positions + 1, positions)
    except ModelError as error:
        raise ModelError(f"{name} is not supported: {error}") from error
    except Exception as error:
        raise ModelError(
            f"{name} is not supported: it cannot run on flat tokens without a cache of its own "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        _recorder.pop()
    if not recorder.calls:
        raise ModelError(f"{name} is not supported: none of its layers attends through the AttentionInterface")
    return recorder.calls


def measure_window(mask_function: Callable[..., torch.Tensor]) -> int | None:
    """How many tokens a query sees under a transformers mask function, itself included; None for all.

    Raises:
        ModelError: queries see future tokens, or what they see is not simply the last so many tokens.
    """

    def sees(query: int, keys: list[int]) -> torch.Tensor:
        zero, kv = torch.zeros((), dtype=torch.int64), torch.tensor(keys)
        return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), kv)).expand(len(keys))

    queries = (0, 1, 5, 63, _FAR, _FAR + 1, _FAR + 777)
    try:
        if any(bool(sees(q, [q + 1, q + 2, q + 70]).any()) for q in queries):
            raise ModelError("its mask lets a token see later ones (bidirectional attention)")
        reach = _FAR
        if not bool(sees(_FAR, [0])):
            low, high = 0, _FAR  # distance `low` is visible, `high` is not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if bool(sees(_FAR, [_FAR - middle])) else (low, middle)
            reach = low
        for q in queries:
            inside = sorted({q - min(reach, q) * step // 97 for step in range(98)})
            if not bool(sees(q, inside).all()) or (
                q > reach and bool(sees(q, [q - reach - 1, 0]).any()) and reach < _FAR
            ):
                raise ModelError("what its mask shows is not simply the last so many tokens (chunks or blocks)")
    except (IndexError, RuntimeError, TypeError) as error:
        raise ModelError(f"its mask depends on more than positions ({error})") from error
    return None if reach == _FAR else reach + 1


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
