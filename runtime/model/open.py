"""From a checkpoint to a model that runs on a backend: lowered where it is understood, else as it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagefleet.backends.base import Backend
from pagefleet.runtime.errors import ModelError

from .decoder import Decoder
from .hf_model import DTYPES, HFModel
from .load import load_module
from .lower import build, recognise
from .quantize import UNQUANTIZED, Quantization
from .recognise import NotUnderstood
from .self_test import Expected, SelfTest, run_self_test
from .support import check_supported, length_limit

logger = logging.getLogger(__name__)


def open_checkpoint(
    folder: Path | str,
    dtype: str,
    backend: Backend,
    *,
    exact: bool = False,
    trust_remote_code: bool = False,
    max_len: int | None = None,
    lowering: str = "auto",
    quantization: Quantization = UNQUANTIZED,
) -> HFModel | Decoder:
    """Load a safetensors checkpoint folder (see `resolve_checkpoint`) onto a backend.

    Args:
        lowering: "auto" lowers what is understood, "off" runs every model as it is.

    Raises:
        ModelError: the architecture is refused, the checkpoint is damaged, or the self-test failed.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' is unknown; expected one of {', '.join(DTYPES)}")

    def load() -> Any:
        return load_module(Path(folder), DTYPES[dtype], trust_remote_code=trust_remote_code)

    return open_module(
        load(), backend, exact=exact, max_len=max_len, lowering=lowering, quantization=quantization, reload=load
    )


def open_module(
    module: Any,
    backend: Backend,
    *,
    exact: bool = False,
    max_len: int | None = None,
    lowering: str = "auto",
    quantization: Quantization = UNQUANTIZED,
    reload: Callable[[], Any] | None = None,
) -> HFModel | Decoder:
    """Take over a causal transformers model: it is changed in place, its weights given up.

    Every way to run it is compared with transformers' own before it is given back. A specification is compared layer
    by layer while the model still has its weights; should the lowered model differ all the same, `reload` brings them
    back.

    Args:
        exact: what the backend was created with.
        quantization: which linear layers the backend keeps in fewer bits.
        reload: gives the same model once more.

    Raises:
        ModelError: the architecture is refused, or the self-test failed.
    """
    check_supported(module.config)
    if exact and not backend.capabilities().exact:
        raise ModelError(f"exact mode is not possible on backend '{backend.capabilities().name}'")
    started = time.monotonic()
    name, limit = type(module).__name__, length_limit(module.config, max_len)
    as_is = HFModel(_on_device(module, backend), backend, limit, quantization)
    expected = as_is.expected()  # before the backend touches the weights: it is under test too
    model: HFModel | Decoder = as_is
    if lowering == "off":
        as_is.execution, outcome = "as is: model.lowering=off", as_is.prepare(expected)
    else:
        model, outcome = _lowered_if_understood(as_is, expected, reload)
    logger.info(
        "model %s: %s, %d attention layers in %d KV groups, self-test passed in %.1f s: %s",
        name,
        model.execution,
        len(model.windows),
        len(set(model.windows)),
        time.monotonic() - started,
        outcome.reason,
    )
    return model


def _lowered_if_understood(
    as_is: HFModel, expected: Expected, reload: Callable[[], Any] | None
) -> tuple[HFModel | Decoder, SelfTest]:
    module, backend, max_len, quantization = as_is.module, as_is.backend, as_is.max_len, as_is.quantization
    name = type(module).__name__
    try:
        parts = recognise(module, as_is.calls, max_len, as_is.device)
    except NotUnderstood as reason:
        logger.warning("model %s runs as it is, slower than lowered: %s", name, reason)
        as_is.execution = f"as is: {reason}"
        return as_is, as_is.prepare(expected)
    lowered = build(parts, as_is)
    del parts
    outcome = run_self_test(lowered, expected)
    if outcome.ok:
        return lowered, outcome
    if reload is None:
        raise ModelError(f"{name} is not supported: its self-test failed: {outcome.reason}")
    logger.warning("model %s runs as it is: lowered, its self-test failed: %s", name, outcome.reason)
    del lowered, module, as_is
    again = HFModel(_on_device(reload(), backend), backend, max_len, quantization)
    again.execution = f"as is: lowered, its self-test failed: {outcome.reason}"
    return again, again.prepare(expected)


def _on_device(module: Any, backend: Backend) -> Any:
    module = module.eval().requires_grad_(False).to(backend.capabilities().device)
    if module._can_set_experts_implementation():
        module.set_experts_implementation("eager")  # grouped products pick kernels by the rows of other sequences
    return module
