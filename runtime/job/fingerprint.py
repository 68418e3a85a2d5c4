"""What a job's results depend on, so that a resume mixes nothing and a repeat does nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet.runtime.job.readers import InputFile

VERSION = 1


def fingerprint(files: Sequence[InputFile], shaping: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object; names of files are in it for messages only."""
    return {
        "version": VERSION,
        "input": [{"name": f.path.name, "bytes": f.size, "sha256": f.sha256} for f in files],
        "shaping": json.loads(json.dumps(dict(shaping), default=str, sort_keys=True)),
    }


def differences(old: Any, new: Mapping[str, Any]) -> list[str]:
    """What changed, one sentence each; empty if the two stand for the same results."""
    if not isinstance(old, Mapping) or old.get("version") != new["version"]:
        return ["it was made by another version of pagefleet"]
    changes = _input_changes(old.get("input", []), new["input"])
    was, now = old.get("shaping", {}), new["shaping"]
    for key in sorted({*was, *now}):
        if was.get(key) != now.get(key):
            changes.append(f"{key} was {was.get(key)!r}, is {now.get(key)!r}")
    return changes


def _input_changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    if [f["sha256"] for f in old] == [f["sha256"] for f in new]:
        return []
    if len(old) != len(new):
        return [f"the input had {len(old)} files, has {len(new)}"]
    return [
        f"the content of input file {now['name']} changed ({was['bytes']} bytes then, {now['bytes']} now)"
        for was, now in zip(old, new, strict=True)
        if was["sha256"] != now["sha256"]
    ]
