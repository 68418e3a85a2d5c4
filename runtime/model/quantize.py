"""Which linear layers of a model are kept in fewer bits. How they are is the backend's: see `backends/schemes.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

_FEWEST_OUTPUTS = 32  # gates and routers decide much with few weights: they stay


@dataclass(frozen=True)
class Quantization:
    """What `precision=w8a8` and its like ask for.

    Attributes:
        scheme: of the linear layers of the decoder's layers, such as "w4a16_g64"; None: all stay as loaded.
        head: whether the output head has it too. Embeddings never have.
    """

    scheme: str | None = None
    head: bool = False

    @property
    def head_scheme(self) -> str | None:
        """The scheme of the output head."""
        return self.scheme if self.head else None


UNQUANTIZED = Quantization()


def scheme_of_modules(quantization: Quantization, module: Any, base: nn.Module) -> Callable[[nn.Module], str | None]:
    """scheme_of(linear layer) for a model that runs as it is: `base` is its decoder."""
    inside = {id(m) for m in base.modules()}
    head = module.get_output_embeddings()

    def scheme_of(linear: nn.Module) -> str | None:
        if linear is head:
            return quantization.head_scheme
        outputs = getattr(linear, "out_features", getattr(linear, "nf", 0))
        return quantization.scheme if id(linear) in inside and outputs >= _FEWEST_OUTPUTS else None

    return scheme_of
