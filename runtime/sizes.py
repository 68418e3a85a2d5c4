"""Sizes in bytes as people write them: "2GiB", "512 MB", 1048576."""

from __future__ import annotations

import re

from pagefleet.runtime.errors import ConfigError

_UNITS = {"b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes of a size such as "2GiB" (binary), "2GB" (decimal) or a plain number of bytes.

    Raises:
        ConfigError: not a size, or less than one byte; the message begins with `name`.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name}: expected a size such as 2GiB, 512MB or a number of bytes, got {text!r}")
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise ConfigError(f"{name}: expected at least one byte, got {text!r}")
    return size


def format_size(size: int) -> str:
    """A size for people: three significant digits and a binary unit."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{size} B" if unit == "B" else f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:,.3g} TiB" if abs(amount) < 999.5 else f"{amount:,.0f} TiB"
