"""Finds backends: every package folder in here, and every entry point of the group `pagefleet.backends`.

Nothing is imported until it is asked for, and a backend that fails while it is imported or probed is listed as
unavailable with the reason: a broken one never hides the others. An entry point names a module (or an object) with
the same two functions as a folder: `probe() -> Availability` and `create(options) -> Backend`.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from .base import Availability, Backend, BackendError, BackendOptions

logger = logging.getLogger(__name__)
ENTRY_POINT_GROUP = "pagefleet.backends"


@dataclass(frozen=True)
class Choice:
    """Which backend was chosen, and why: one line for each backend looked at."""

    name: str
    reasons: list[str]


def _sources() -> dict[str, Callable[[], Any]]:
    """Name -> a function that imports the backend. A folder wins over an entry point of the same name."""
    package = importlib.import_module(__package__)
    found: dict[str, Callable[[], Any]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg and not module.name.startswith("_") and module.name not in package.SHARED:
            found[module.name] = partial(importlib.import_module, f"{package.__name__}.{module.name}")
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in found:
            logger.warning("backend entry point '%s' (%s) is ignored: the name is taken", entry.name, entry.value)
        else:
            found[entry.name] = entry.load
    return found


def _probe(load: Callable[[], Any]) -> Availability:
    try:
        availability = load().probe()
    except Exception as error:
        return Availability(False, f"probing failed with {type(error).__name__}: {error}")
    if not isinstance(availability, Availability):
        return Availability(False, f"probe() returned {type(availability).__name__}, expected Availability")
    return availability


def probe_all() -> dict[str, Availability]:
    """Every backend there is, in order of name, and whether it can run here. Never raises."""
    return {name: _probe(load) for name, load in sorted(_sources().items())}


def choose(name: str = "auto") -> Choice:
    """Settle on a backend: `auto` takes the available one with the highest score.

    Raises:
        BackendError: no such backend, the named one is unavailable, or none is available.
    """
    sources = _sources()
    if name != "auto":
        if name not in sources:
            raise BackendError(f"unknown backend '{name}'; expected auto or one of: {', '.join(sorted(sources))}")
        availability = _probe(sources[name])
        if not availability.available:
            raise BackendError(f"backend '{name}' cannot run here: {availability.reason}")
        return Choice(name, [f"{name}: asked for by name ({availability.reason})"])
    probed = {key: _probe(load) for key, load in sorted(sources.items())}
    usable = {key: value for key, value in probed.items() if value.available}
    if not usable:
        listing = "; ".join(f"{key}: {value.reason}" for key, value in probed.items())
        raise BackendError(f"no backend can run here ({listing or 'none is installed'})")
    best = max(usable, key=lambda key: usable[key].score)
    reasons = [f"{best}: chosen, score {probed[best].score} ({probed[best].reason})"]
    for key, value in probed.items():
        if key != best:
            state = f"available, lower score {value.score}" if value.available else "unavailable"
            reasons.append(f"{key}: {state} ({value.reason})")
    return Choice(best, reasons)


def create(name: str = "auto", options: BackendOptions | None = None) -> Backend:
    """Make the backend `choose(name)` settles on, and log why. Raises BackendError as `choose` does."""
    choice = choose(name)
    for reason in choice.reasons:
        logger.info("backend %s", reason)
    return _sources()[choice.name]().create(options or BackendOptions())
