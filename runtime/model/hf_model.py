"""A transformers model as it is, its attention replaced by the paged attention of a backend."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from pagefleet.backends import host
from pagefleet.backends.base import AttentionArgs, Backend, KVGroup
from pagefleet.runtime.errors import ModelError

from .attention import PAGED, attending, set_attention
from .layers import decoder_layers, observing
from .layout import AttentionLayout
from .probe import AttentionCall, record_attention
from .quantize import UNQUANTIZED, Quantization, scheme_of_modules
from .self_test import Expected, SelfTest, run_eager, run_self_test, test_sequences

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HFModel:
    """Runs any supported causal model of transformers over paged KV, as it is.

    Attributes:
        module: the transformers model, its attention set to Pagefleet's. It is changed in place and belongs to this.
        calls: its attention calls, in order.
        execution: "as is", and why it is not lowered.
        config: its configuration.
        vocab_size: width of the logits.
        max_len: most tokens of a sequence.
        eos_token_ids: tokens that end a sequence, from the generation configuration.
        dtype: compute dtype, "fp32", "bf16" or "fp16".
        windows: the window of every attention layer, in order; None for full attention.
    """

    def __init__(self, module: Any, backend: Backend, max_len: int, quantization: Quantization = UNQUANTIZED) -> None:
        """Use `open_checkpoint` or `open_module`; this takes a module that they have checked.

        Raises:
            ModelError: the model cannot run on a paged cache; the message says why.
        """
        self.module, self.backend, self.max_len = module, backend, max_len
        self.quantization = quantization
        self.execution = "as is"
        self.config = module.config
        self.device = backend.capabilities().device
        self.dtype = _dtype_name(module)
        self.eos_token_ids = _eos_token_ids(module)
        self.vocab_size = int(self.config.get_text_config(decoder=True).vocab_size)
        self._base = _base_model(module)
        self._extra = _forward_arguments(self._base)
        self._head: Any = None
        self.calls = self._recorded_calls()
        self.layout = AttentionLayout(self.calls, max_len)
        self.windows = self.layout.windows
        self.kv_groups: Callable[[int, str], tuple[KVGroup, ...]] = self.layout.kv_groups
        self._layers = decoder_layers(module, self.calls)

    def prepare(self, expected: Expected) -> SelfTest:
        """Let the backend repack the weights, then compare with what was `expected` before that.

        Raises:
            ModelError: the self-test failed.
        """
        if self.quantization.scheme is None:
            self.backend.prepare_model(self.module)
        else:
            scheme_of = scheme_of_modules(self.quantization, self.module, self._base)
            self.backend.prepare_model(self.module, scheme_of)
        host.return_unused_memory()
        self._head = _head_alone(self.module)
        self.vocab_size = expected.logits[0].shape[-1]
        outcome = run_self_test(self, expected)
        if not outcome.ok:
            name = type(self.module).__name__
            raise ModelError(f"{name} is not supported: its self-test failed: {outcome.reason}")
        return outcome

    def expected(self) -> Expected:
        """What transformers alone, with eager attention, gives for the sequences of the self-test."""
        sequences = test_sequences(self.windows, self.max_len, self.vocab_size)
        return run_eager(self.module, sequences, self.device, self._layers)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """Hidden states [T, H] of flat token ids int64 [T] at positions int64 [T]; `plan` is the backend's."""
        step = _PagedStep(self, plan)
        with attending(step):
            out = self._base(input_ids=token_ids[None], position_ids=positions[None], **self._extra)
        step.check_complete()
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [L, V] of hidden states [L, H], by the model's own head with whatever it does after it."""
        placeholder = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        stub: _GivenHidden = self._head.pagefleet_given
        with stub.giving(hidden[None]):
            return self._head(input_ids=placeholder, use_cache=False).logits[0]

    def observing(self, note: Callable[[int, torch.Tensor], None]) -> AbstractContextManager[None]:
        """Inside, `note(layer, output)` is called with the output [T, H] of each decoder layer in every forward pass.

        Raises:
            ModelError: the model keeps its layers in no list.
        """
        if not self._layers:
            raise ModelError(f"{type(self.module).__name__} keeps its layers in no list, so they cannot be observed")
        return observing(self._layers, note)

    def self_test(self) -> SelfTest:
        """Packed two-sequence and chunked run against eager attention of the model as it is now."""
        return run_self_test(self, self.expected())

    def _recorded_calls(self) -> list[AttentionCall]:
        def run(ids: torch.Tensor, positions: torch.Tensor) -> Any:
            return self._base(input_ids=ids, position_ids=positions, **self._extra).last_hidden_state

        calls = record_attention(self.module, run, self.device)
        set_attention(self.module, PAGED)
        return calls


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
        group, layer = model.layout.places[number]
        if layer == number:
            model.backend.write_kv(self._plan, group, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        args = model.layout.args[number]
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
