"""Names of the ways to keep and multiply a linear layer's weight in fewer bits than a float has."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from pagefleet.kernels.reference import QuantizedWeight, quantize_weight_int4, quantize_weight_int8

SCHEMES = ("w8a8", "w8a16", "w4a16")
GROUP_SIZES = (32, 64, 128)
_TEXT = re.compile(rf"({'|'.join(SCHEMES)})(?:_g(\d+))?")


@dataclass(frozen=True)
class Scheme:
    """How a weight is kept, and what rows are multiplied as.

    Attributes:
        name: "w8a8": 8-bit weights and rows, multiplied as integers; "w8a16", "w4a16": weights of that many bits,
            multiplied as floats.
        group: columns that share a scale; None: a scale for each output channel. Always set for w4a16.
    """

    name: str
    group: int | None = None

    @property
    def weight_bits(self) -> int:
        """Bits of a weight."""
        return int(self.name[1])

    @property
    def activation_bits(self) -> int:
        """Bits of an element of a row, as it is multiplied; 16 is whatever float it comes as."""
        return int(self.name[3:])

    def __str__(self) -> str:
        return self.name if self.group is None else f"{self.name}_g{self.group}"

    def quantized(self, weight: torch.Tensor) -> QuantizedWeight:
        """weight [out, in] in this scheme's form."""
        if self.weight_bits == 4:
            assert self.group is not None
            return quantize_weight_int4(weight, self.group)
        return quantize_weight_int8(weight, self.group)


def parse_scheme(text: str) -> Scheme:
    """The scheme of a name: "w8a8", "w8a16", "w4a16" (groups of 32), or with a group size, "w4a16_g128".

    Raises:
        ValueError: no such scheme.
    """
    match = _TEXT.fullmatch(text)
    name, group = match.groups() if match else (None, None)
    size = int(group) if group else 32 if name == "w4a16" else None
    if name is None or (size is not None and (size not in GROUP_SIZES or name == "w8a8")):
        sizes = ", ".join(f"_g{n}" for n in GROUP_SIZES)
        raise ValueError(
            f"'{text}' is no scheme of linear layers; expected {', '.join(SCHEMES)}, the last two also with a group "
            f"size ({sizes})"
        )
    return Scheme(name, size)
