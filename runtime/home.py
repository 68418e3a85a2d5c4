"""Where models, converted checkpoints and records of sweeps are kept."""

from __future__ import annotations

import os
from pathlib import Path


def home_folder() -> Path:
    """The cache folder: $PAGEFLEET_HOME, else $XDG_CACHE_HOME/pagefleet, else ~/.cache/pagefleet."""
    if home := os.environ.get("PAGEFLEET_HOME"):
        return Path(home)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pagefleet"
