"""The process that runs sections: says on its standard output, line by line, what it begins, finds and ends."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace
from typing import Any

from .report import Row, failure

MARK = "@device-check "  # begins our lines; whatever else libraries print is not ours
NO_CARD = 2
BROKEN = 3  # exit code: the card no longer answers, and another process should do the rest


def say(kind: str, **content: Any) -> None:
    """One line to the supervisor."""
    print(MARK + json.dumps({"kind": kind, **content}), flush=True)


def work(names: list[str], dry: bool) -> int:
    """Run sections in order; BROKEN if the card stopped working in one of them."""
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    from pagefleet.backends.base import BackendError

    from .machine import Machine
    from .sections import SECTIONS

    try:
        machine = Machine(dry)
    except BackendError as error:
        say("row", **failure("a card", str(error), "start").as_dict())
        return NO_CARD
    say("machine", **machine.facts())
    by_name = {section.name: section for section in SECTIONS}
    for name in names:
        say("begin", section=name)
        section = by_name[name]
        machine.begin(section.budget_s)
        try:
            for row in section.run(machine):
                say("row", **replace(row, section=name).as_dict())
                if machine.seconds_left() < 0:
                    say("row", **failure("the rest", f"out of its {section.budget_s} s", name).as_dict())
                    break
        except Exception as error:
            say("row", **failure(name, describe(error), name).as_dict())
            traceback.print_exc(file=sys.stderr)
        say("end", section=name, seconds=section.budget_s - machine.seconds_left())
        if not machine.still_works():
            return BROKEN
    return 0


def describe(error: BaseException) -> str:
    """An exception in one line: its kind, where in the code it was raised, and what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}: {' '.join(str(error).split())[:300]}"


def row_of(message: dict[str, Any]) -> Row:
    """The row that a line told."""
    return Row(**{k: v for k, v in message.items() if k not in ("kind", "met")})
