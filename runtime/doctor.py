"""`pagefleet doctor`: what there is here, what `auto` would choose, and why."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagefleet.runtime.config import DECLARED_BACKENDS, Config
from pagefleet.runtime.home import home_folder
from pagefleet.runtime.sizes import format_size

PACKAGES = ("pagefleet", "torch", "transformers", "tokenizers", "hydra-core", "omegaconf", "llguidance", "gguf")


def run_doctor(config: Config) -> int:
    """Print the report; exit code 0 if some backend can run here, else 1."""
    logging.getLogger("pagefleet.backends.registry").setLevel(logging.WARNING)  # the report says it all, once
    report = examine(config)
    if config.doctor.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 0 if report["choice"] else 1


def examine(config: Config) -> dict[str, Any]:
    """Everything the report says, as plain JSON values."""
    from pagefleet.backends import detect, host, registry
    from pagefleet.backends.base import BackendError

    target = detect.detect(config.backend.name)
    backends = {name: _backend_report(name, availability) for name, availability in registry.probe_all().items()}
    for name in DECLARED_BACKENDS:
        backends.setdefault(name, {"available": False, "reason": "not in this version"})
    choice, reasons = None, []
    try:
        chosen = registry.choose(config.backend.name)
        choice, reasons = chosen.name, chosen.reasons
    except BackendError as error:
        reasons = [str(error)]
    return {
        "backends": dict(sorted(backends.items())),
        "asked_for": config.backend.name,
        "choice": choice,
        "reasons": reasons,
        "hardware": {"auto": target.name, "reason": target.reason, "taken": config.hardware.name},
        "cpu": {
            "model": host.cpu_name(),
            "isa": _isa(),
            "usable_threads": host.usable_threads(),
            "host_threads": os.cpu_count(),
        },
        "memory": {"limit_bytes": host.memory_limit_bytes(), "available_bytes": host.available_memory_bytes()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "python_executable": sys.executable,
        "cache_folder": _folder_report(home_folder()),
    }


def _backend_report(name: str, availability: Any) -> dict[str, Any]:
    """What a backend says of itself; one that fails when it is made is reported, not raised."""
    from pagefleet.backends import registry

    report: dict[str, Any] = {"available": availability.available, "reason": availability.reason}
    if not availability.available:
        return report
    report["score"] = availability.score
    try:
        capabilities = registry.create(name).capabilities()
    except Exception as error:
        return {"available": False, "reason": f"making it failed with {type(error).__name__}: {error}"}
    return report | {
        "device": capabilities.device,
        "isa": capabilities.isa,
        "compute_dtypes": list(capabilities.compute_dtypes),
        "kv_dtypes": list(capabilities.kv_dtypes),
        "kernels": dict(capabilities.kernels),
    }


def _folder_report(folder: Path) -> dict[str, Any]:
    existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    models = folder / "models"
    return {
        "path": str(folder),
        "exists": folder.is_dir(),
        "writable": os.access(existing, os.W_OK),
        "models": sorted(p.name for p in models.glob("[!.]*") if p.is_dir()) if models.is_dir() else [],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _isa() -> str:
    from pagefleet.backends import host

    try:
        return host.isa()
    except ValueError as error:  # PAGEFLEET_ISA asks for what there is not
        return str(error)


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Backends", title_justify="left")
    for heading in ("name", "available", "why", "ISA", "dtypes"):
        table.add_column(heading)
    for name, entry in report["backends"].items():
        dtypes = ", ".join(entry.get("compute_dtypes", ()))
        table.add_row(name, "yes" if entry["available"] else "no", entry["reason"], entry.get("isa", ""), dtypes)
    console.print(table)
    console.print(f"backend={report['asked_for']} takes: {report['choice'] or 'none'}")
    for reason in report["reasons"]:
        console.print(f"  - {reason}", markup=False)
    if report["choice"]:
        for op, kernel in report["backends"][report["choice"]].get("kernels", {}).items():
            console.print(f"  {op}: {kernel}", markup=False)
    hardware = report["hardware"]
    console.print(f"hardware=auto takes: {hardware['auto']} ({hardware['reason']})", markup=False)
    cpu, memory, cache = report["cpu"], report["memory"], report["cache_folder"]
    console.print(f"CPU: {cpu['model']}, {cpu['isa']}, {cpu['usable_threads']} of {cpu['host_threads']} threads usable")
    console.print(f"memory: {format_size(memory['available_bytes'])} free of {format_size(memory['limit_bytes'])}")
    state = "writable" if cache["writable"] else "NOT writable: set PAGEFLEET_HOME to a folder that is"
    console.print(
        f"cache folder: {cache['path']} ({state}); models: {', '.join(cache['models']) or 'none'}", markup=False
    )
    console.print("versions: " + ", ".join(f"{k} {v or 'not installed'}" for k, v in report["versions"].items()))
