"""What a lowered decoder asks of a backend between its attention calls: a few fused operations, and linear layers.

`TorchOps` in `backends/torch_ops.py` is their plain form on any device; a backend with kernels of its own overrides
what it does faster. Letters as in `backends/base.py`; H hidden size, I inner size of an MLP, R rotary dimensions.

Every operation treats a row by itself: what else is in the step never reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from .selection import Selection

NO_NORM = (2, 0, 0, 0, 0.0)  # `Norm.arguments` of no norm
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")


def _check_plain(tensor: torch.Tensor, what: str) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous float32, not {tensor.dtype} with strides {tensor.stride()}")


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last dimension, computed in float32.

    Attributes:
        kind: "rms" (Zhang and Sennrich, 2019) or "layer" (Ba et al., 2016).
        weight: float32 [n], whatever the model adds to it (Gemma's 1 + w) already added; None for ones.
        bias: float32 [n], of a layer norm only.
        eps: added to the mean square or the variance.
    """

    kind: str
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    @cached_property
    def arguments(self) -> tuple[int, int, int, int, float]:
        """What a compiled kernel is called with: kind, the addresses of weight and bias (or 0), their size, eps."""
        given = {"weight": self.weight, "bias": self.bias}
        for name, tensor in given.items():
            if tensor is not None:
                _check_plain(tensor, f"norm: its {name}")
        sizes = {tensor.numel() for tensor in given.values() if tensor is not None}
        if len(sizes) > 1:
            raise ValueError(f"norm: weight and bias differ in size: {sorted(sizes)}")
        weight, bias = (0 if tensor is None else tensor.data_ptr() for tensor in given.values())
        return {"rms": 0, "layer": 1}[self.kind], weight, bias, max(sizes, default=0), self.eps


@dataclass(frozen=True)
class Rotary:
    """Rotation of a step's queries and keys (Su et al., 2021): float32 cos and sin [T, R / 2], one angle a pair.

    interleaved: the pair i is elements (2i, 2i + 1) of a head; otherwise (i, i + R / 2). Elements from R on stay.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @cached_property
    def arguments(self) -> tuple[int, int, int, int, bool]:
        """What a compiled kernel is called with: rows, addresses of cos and sin, pairs, interleaved."""
        for name, tensor in (("cos", self.cos), ("sin", self.sin)):
            _check_plain(tensor, f"rotary: its {name}")
        return *self.cos.shape[:1], self.cos.data_ptr(), self.sin.data_ptr(), self.cos.shape[1], self.interleaved


@dataclass(frozen=True)
class Heads:
    """How a merged projection [T, (Hq + Hkv) * D + Hkv * Dv] splits: queries, then keys, then values, head by head.

    Attributes:
        query_norm, key_norm: applied before the rotation (after it with `norm_after_rotary`).
        norm_all_heads: they run over all heads of a token together (OLMo 2), not over each head.
        value_norm: over each value head (Gemma 4), or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    norm_all_heads: bool = False
    norm_after_rotary: bool = False

    @cached_property
    def arguments(self) -> tuple[int | float, ...]:
        """What a compiled kernel is called with: the four sizes, three norms, the two flags."""
        norms = [NO_NORM if x is None else x.arguments for x in (self.query_norm, self.key_norm, self.value_norm)]
        sizes = self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim
        return *sizes, *norms[0], *norms[1], *norms[2], self.norm_all_heads, self.norm_after_rotary


class Linear(Protocol):
    """A packed linear layer: x [rows, in] -> [rows, out] in x's dtype.

    Attributes:
        scheme: how its weight is kept: a float dtype's name, "w8a8", "w8a16" or "w4a16".
        kernel: what computes it, for the doctor and the log.
        weight_bytes: bytes of the packed weight.
    """

    in_features: int
    out_features: int
    scheme: str
    kernel: str
    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Ops(Protocol):
    """The operations of a decoder layer that are not attention."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: str | None = None) -> Linear:
        """Pack weight [out, in] and bias [out]. `scheme` None keeps the weight's dtype.

        The caller gives the weight up; nothing of it may be kept that is not needed.

        Raises:
            BackendError: a scheme that this backend does not have.
        """
        ...

    def selection(self) -> Selection:
        """What chooses tokens from logits."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x [rows, n] normalised, in x's dtype."""
        ...

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, post: Norm | None = None, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + scale * post(x)`, normalised: returns (norm(sum), sum), [rows, H] each.

        `post` None adds x as it is; `norm` None returns the sum twice. `residual` may be overwritten.
        """
        ...

    def query_and_store(
        self, plan: Any, group: int, layer: int, qkv: torch.Tensor, heads: Heads, rotary: Rotary | None
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys of qkv, store keys and values in the step's slots.

        `plan` is the backend's, `group` and `layer` as in `Backend.write_kv`. Returns queries [T, Hq, D].
        """
        ...

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """One of `ACTIVATIONS` of x [rows, I]."""
        ...

    def gated_activation(self, gate_up: torch.Tensor, name: str) -> torch.Tensor:
        """gate_up [rows, 2 I], gates first: activation(gate) * up, [rows, I]."""
        ...
