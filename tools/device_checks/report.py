"""Rows, the table they are printed as, and the JSON they are kept in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes:
        value: None for a failure, or for a fact that is no number.
        at_most, at_least: a target for the value, if there is one.
        ok: False for a failure.
        note: what the number stands on, or the reason of a failure.
    """

    name: str
    value: float | None = None
    unit: str = ""
    note: str = ""
    at_most: float | None = None
    at_least: float | None = None
    ok: bool = True
    section: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None if there is none, False for a failure."""
        if not self.ok:
            return False
        if self.value is None or (self.at_most is None and self.at_least is None):
            return None
        enough = self.at_least is None or self.value >= self.at_least
        return enough and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        """As people read it."""
        bounds = [
            f"{sign} {bound:g}" for sign, bound in (("<=", self.at_most), (">=", self.at_least)) if bound is not None
        ]
        return " and ".join(bounds)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `Row(**row.as_dict())` without "met" is the row again."""
        return {**asdict(self), "met": self.met}


def failure(name: str, reason: str, section: str = "") -> Row:
    """A row for what did not work."""
    return Row(name, note=reason, ok=False, section=section)


def table(rows: Iterable[Row]) -> str:
    """A GitHub table, one line a row, a heading for each section."""
    lines, section = [], None
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", f"### {section}", "", "| what | value | target | | note |", "|---|---:|---|---|---|"]
        value = "failed" if not row.ok else "" if row.value is None else f"{row.value:,.4g} {row.unit}".strip()
        verdict = {None: "", True: "met", False: "NOT MET"}[row.met] if row.ok else ""
        lines.append(f"| {row.name} | {value} | {row.target} | {verdict} | {row.note.replace('|', '/')} |")
    return "\n".join(lines[1:])
