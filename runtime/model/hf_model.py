"""A transformers model as it is, its attention replaced by the paged attention of a backend."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from pagefleet.backends.base import AttentionArgs, Backend, KVGroup, LayerKV
from pagefleet.runtime.errors import ModelError

from .attention import attending
from .load import load_module
from .probe import AttentionCall, record_attention
from .self_test import SelfTest, eager_logits, run_self_test, test_sequences
from .support import check_supported, length_limit

logger = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HFModel:
    """Runs any supported causal model of transformers over paged KV.

    Attributes:
        module: the transformers model, its attention set to Pagefleet's.
        config: its configuration.
        vocab_size: width of the logits.
        max_len: most tokens of a sequence.
        eos_token_ids: tokens that end a sequence, from the generation configuration.
        dtype: compute dtype, "fp32", "bf16" or "fp16".
        windows: the window of every attention layer, in order; None for full attention.
    """

    def __init__(self, module: Any, backend: Backend, calls: list[AttentionCall], max_len: int) -> None:
        """Use `load` or `from_module`; this takes what they have checked."""
        self.module, self.backend, self.calls, self.max_len = module, backend, calls, max_len
        self.config = module.config
        self.device = backend.capabilities().device
        self.dtype = _dtype_name(module)
        self.eos_token_ids = _eos_token_ids(module)
        self.windows = tuple(_window(call, max_len) for call in calls)
        self._base = _base_model(module)
        self._extra = _forward_arguments(self._base)
        self._group_windows = sorted(set(self.windows), key=lambda w: (w is not None, w or 0))
        self._places = [(self._group_windows.index(self.windows[c.source]), c.source) for c in calls]
        self._args = [AttentionArgs(c.scale, w, c.softcap) for c, w in zip(calls, self.windows, strict=True)]
        self._head: Any = None
        self.vocab_size = int(self.config.get_text_config(decoder=True).vocab_size)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        dtype: str,
        backend: Backend,
        *,
        exact: bool = False,
        trust_remote_code: bool = False,
        max_len: int | None = None,
    ) -> HFModel:
        """Load a safetensors checkpoint folder (see `resolve_checkpoint`) onto a backend.

        Raises:
            ModelError: the architecture is refused, the checkpoint is damaged, or the self-test failed.
        """
        if dtype not in DTYPES:
            raise ModelError(f"dtype '{dtype}' is unknown; expected one of {', '.join(DTYPES)}")
        module = load_module(Path(folder), DTYPES[dtype], trust_remote_code=trust_remote_code)
        return cls.from_module(module, backend, exact=exact, max_len=max_len)

    @classmethod
    def from_module(cls, module: Any, backend: Backend, exact: bool = False, max_len: int | None = None) -> HFModel:
        """Take over a causal transformers model: it is changed in place and belongs to the result.

        `exact` states what the backend was created with; the backend makes the linear layers exact.

        Raises:
            ModelError: the architecture is refused, or the self-test failed.
        """
        check_supported(module.config)
        if exact and not backend.capabilities().exact:
            raise ModelError(f"exact mode is not possible on backend '{backend.capabilities().name}'")
        started = time.monotonic()
        device = backend.capabilities().device
        module = module.eval().requires_grad_(False).to(device)
        if module._can_set_experts_implementation():
            module.set_experts_implementation("eager")  # grouped products pick kernels by the rows of other sequences
        base = _base_model(module)
        extra = _forward_arguments(base)
        calls = record_attention(
            module, lambda ids, at: base(input_ids=ids, position_ids=at, **extra).last_hidden_state, device
        )
        model = cls(module, backend, calls, length_limit(module.config, max_len))
        sequences = test_sequences(model)
        expected = eager_logits(model, sequences)  # before the backend touches the weights: it is under test too
        backend.prepare_model(module)
        model._head = _head_alone(module)
        model.vocab_size = expected[0].shape[-1]
        outcome = model._tested(sequences, expected)
        if not outcome.ok:
            raise ModelError(f"{type(module).__name__} is not supported: its self-test failed: {outcome.reason}")
        logger.info(
            "model %s: %d attention layers in %d KV groups, self-test passed in %.1f s: %s",
            type(module).__name__,
            len(calls),
            len(model._group_windows),
            time.monotonic() - started,
            outcome.reason,
        )
        return model

    def kv_groups(self, block_size: int, kv_dtype: str) -> tuple[KVGroup, ...]:
        """The layers grouped by window, full attention first; a layer's number is its place in the forward pass."""
        groups = []
        for number, window in enumerate(self._group_windows):
            layers = tuple(
                LayerKV(i, call.num_kv_heads, call.head_dim, call.value_head_dim)
                for i, call in enumerate(self.calls)
                if call.source == i and self._places[i][0] == number
            )
            groups.append(KVGroup(layers, window, kv_dtype, block_size))
        return tuple(groups)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """Hidden states [T, H] of flat token ids int64 [T] at positions int64 [T]; `plan` is the backend's."""
        step = _PagedStep(self, plan)
        with attending(step):
            out = self._base(input_ids=token_ids[None], position_ids=positions[None], **self._extra)
        step.check_complete()
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [L, V] of hidden states [L, H], by the model's own head with whatever it does after it."""
        placeholder = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        stub: _GivenHidden = self._head.pagefleet_given
        with stub.giving(hidden[None]):
            return self._head(input_ids=placeholder, use_cache=False).logits[0].float()

    @contextmanager
    def observing(self, note: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """Inside, `note(layer, output)` is called with the output [T, H] of each decoder layer in every forward pass.

        Raises:
            ModelError: the model keeps its layers in no list.
        """
        attending_modules = {id(call.module) for call in self.calls}
        lists = [m for m in self._base.modules() if isinstance(m, nn.ModuleList)]
        layers = next((x for x in lists if len(x) and any(id(m) in attending_modules for m in x[0].modules())), None)
        if layers is None:
            raise ModelError(f"{type(self.module).__name__} keeps its layers in no list, so they cannot be observed")

        def hook(number: int) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, _args, out: note(number, (out[0] if isinstance(out, tuple) else out).flatten(0, -2))

        hooks = [layer.register_forward_hook(hook(number)) for number, layer in enumerate(layers)]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def self_test(self) -> SelfTest:
        """Packed two-sequence and chunked run against eager attention of the model as it is now."""
        return self._tested(None, None)

    def _tested(self, sequences: list[list[int]] | None, expected: list[torch.Tensor] | None) -> SelfTest:
        outcome = run_self_test(self, sequences, expected)
        if not outcome.ok:
            logger.warning("self-test of %s failed: %s", type(self.module).__name__, outcome.reason)
        return outcome


class _PagedStep:
    """Answers the attention calls of one step out of the backend's cache."""

    def __init__(self, model: HFModel, plan: Any) -> None:
        self._model, self._plan, self._next = model, plan, 0

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        model, number = self._model, self._next
        if number >= len(model.calls) or model.calls[number].module is not module:
            raise ModelError(f"attention call {number} came from another layer than at load")
        self._next = number + 1
        group, layer = model._places[number]
        if layer == number:
            model.backend.write_kv(self._plan, group, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        args = model._args[number]
        sinks = settings.get("s_aux")
        if sinks is not None:
            args = AttentionArgs(args.scale, args.window, args.softcap, sinks)
        out = model.backend.attention(self._plan, group, layer, query[0].transpose(0, 1), args)
        return out.to(value.dtype)[None]

    def check_complete(self) -> None:
        """Raises ModelError if a layer did not attend: its keys would be missing in the cache."""
        if self._next != len(self._model.calls):
            raise ModelError(f"{self._next} attention calls in a step, expected {len(self._model.calls)} as at load")


class _GivenHidden(nn.Module):
    """Stands for the decoder in a copy of the causal model, so that only its head runs."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._hidden: torch.Tensor | None = None
        self.__dict__["_base"] = base  # not a child module

    def __getattr__(self, name: str) -> Any:
        """Whatever else a head asks of its decoder; where it calls a decoder inside the decoder, that is this one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_base"], name)
            return self if isinstance(found, PreTrainedModel) else found

    def giving(self, hidden: torch.Tensor) -> _GivenHidden:
        """Give `hidden` [1, L, H] inside a with block."""
        self._hidden = hidden
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._hidden = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """What a decoder returns."""
        return _HeadInput(last_hidden_state=self._hidden)


class _HeadInput(MoeModelOutputWithPast):
    """A decoder's output in which whatever else a head passes on (cross-attentions, ...) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _head_alone(module: Any) -> Any:
    """A shallow copy of the causal model that shares its head; its decoder returns what it is given."""
    head = copy.copy(module)
    head.__dict__ = dict(module.__dict__)
    head._modules = dict(module._modules)
    stub = _GivenHidden(_base_model(module))
    head._modules[module.base_model_prefix] = stub
    head.__dict__["pagefleet_given"] = stub
    return head


def _base_model(module: Any) -> Any:
    base = module._modules.get(module.base_model_prefix)
    if base is None:
        raise ModelError(
            f"{type(module).__name__} is not supported: it has no decoder under '{module.base_model_prefix}' that "
            "could run apart from its head"
        )
    return base


def _forward_arguments(base: Any) -> dict[str, Any]:
    """Arguments of every call of the decoder. Raises ModelError if it cannot be told positions."""
    parameters = inspect.signature(base.forward).parameters
    if "position_ids" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ModelError(f"{type(base).__name__} is not supported: it cannot be told the positions of its tokens")
    return {"use_cache": False, "return_dict": True}


def _window(call: AttentionCall, max_len: int) -> int | None:
    return None if call.window is None or call.window >= max_len else call.window


def _dtype_name(module: Any) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    if module.dtype not in names:
        raise ModelError(f"the model's weights are {module.dtype}; expected one of {', '.join(DTYPES)}")
    return names[module.dtype]


def _eos_token_ids(module: Any) -> frozenset[int]:
    generation = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(module.config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
