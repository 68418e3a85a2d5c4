"""From what a user names to weights in memory: folder, GGUF file or hub id; every failure is one clear ModelError."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.home import home_folder
from pagefleet.runtime.weights import tensor_infos

from .gguf import cached_checkpoint, convert_gguf

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointInfo",
    "cache_home",
    "checkpoint_info",
    "convert_gguf",
    "find_checkpoint",
    "load_module",
    "resolve_checkpoint",
]

logger = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint folder as its headers tell it.

    Attributes:
        weight_bytes: bytes of all tensors as stored.
        dtypes: number of tensors of each dtype, by safetensors' names.
        num_parameters: elements of all tensors.
        config: the content of config.json.
    """

    weight_bytes: int
    dtypes: dict[str, int]
    num_parameters: int
    config: dict[str, Any]


def cache_home() -> Path:
    """The cache folder: $PAGEFLEET_HOME, else $XDG_CACHE_HOME/pagefleet, else ~/.cache/pagefleet."""
    return home_folder()


def find_checkpoint(path: str | Path, revision: str | None = None) -> Path:
    """What `path` means: a folder with config.json and safetensors files, or a `.gguf` file.

    A folder without config.json that holds one `.gguf` file means that file. What is no file or folder here, and looks
    like a hub id, is fetched where there is a network; `revision` counts for it alone.

    Raises:
        ModelError: nothing usable there; the message says what was expected.
    """
    given = Path(path).expanduser()
    if revision is not None and given.exists():
        logger.warning("model.revision=%s is of no use: %s is here, and not fetched from a hub", revision, given)
    if given.is_file():
        if given.suffix != ".gguf":
            raise ModelError(
                f"{given} is not a checkpoint; expected a folder with config.json and .safetensors, or a .gguf file"
            )
        return given
    if given.is_dir():
        return _from_folder(given)
    if _HUB_ID.fullmatch(str(path)) and given.suffix not in (".gguf", ".safetensors", ".bin"):
        return _from_hub(str(path), revision)
    raise ModelError(
        f"{given} does not exist; expected a checkpoint folder, a .gguf file or a hub id like 'owner/name'"
    )


def resolve_checkpoint(path: str | Path, revision: str | None = None) -> Path:
    """The safetensors checkpoint folder of what `path` means; a GGUF file is converted once into the cache folder.

    Raises:
        ModelError: as `find_checkpoint`, or the GGUF file cannot be converted.
    """
    found = find_checkpoint(path, revision)
    return cached_checkpoint(found, cache_home() / "models") if found.suffix == ".gguf" else found


def _from_folder(folder: Path) -> Path:
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").is_file():
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise ModelError(f"{folder} holds {len(ggufs)} .gguf files ({', '.join(g.name for g in ggufs)}); name one")
        raise ModelError(f"{folder} is not a checkpoint: it has no config.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted({name for name in _shards(index) if not (folder / name).is_file()})
        if missing:
            raise ModelError(f"{folder} is incomplete: {index.name} names {', '.join(missing)}; fetch them again")
    elif not any(folder.glob("*.safetensors")):
        others = [f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in sorted(folder.glob(pattern))]
        hint = f"it has {', '.join(others[:3])}; save it again with safetensors" if others else "fetch it again"
        raise ModelError(f"{folder} has no .safetensors weights; {hint}")
    return folder


def _shards(index: Path) -> list[str]:
    try:
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is damaged ({error}); fetch it again") from error


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, etag_timeout=10)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"'{name}' is no folder or file here, and could not be fetched as a hub id: {first} "
            "Check the name, or the network, or give the path of a checkpoint"
        ) from error
    return _from_folder(Path(found))


def checkpoint_info(folder: str | Path) -> CheckpointInfo:
    """Sizes and dtypes of a checkpoint folder, from headers alone; imports no torch.

    Raises:
        ModelError: no config.json, no weights, or a weight file that is damaged or cut short.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is not a checkpoint: it has no config.json") from error
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is not JSON ({error}); fetch it again") from error
    infos = tensor_infos(folder)
    elements = Counter[str]()
    for info in infos:
        elements[info.dtype] += prod(info.shape)
    bits = {name: int(re.search(r"\d+", name).group()) if name != "BOOL" else 8 for name in elements}  # type: ignore[union-attr]
    return CheckpointInfo(
        weight_bytes=sum(count * bits[name] // 8 for name, count in elements.items()),
        dtypes=dict(Counter(info.dtype for info in infos)),
        num_parameters=sum(elements.values()),
        config=config,
    )


def load_module(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The transformers causal model of a checkpoint folder, in `dtype`, on the CPU.

    Raises:
        ModelError: an unknown or refused architecture, damaged files, or weights that the checkpoint lacks.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from .support import check_supported

    checkpoint_info(folder)  # a truncated file is named here, before gigabytes are read
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
    except Exception as error:
        raise ModelError(f"{folder}: its config.json cannot be used: {_first_line(error)}") from error
    check_supported(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True, **options
        )
    except Exception as error:
        raise ModelError(f"{folder}: {config.model_type} cannot be loaded: {_first_line(error)}") from error
    module, report = loaded
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, report.get(problem) or ())):
            shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            raise ModelError(f"{folder} does not fit {type(module).__name__}: {problem.replace('_', ' ')}: {shown}")
    if unused := sorted(report.get("unexpected_keys") or ()):
        logger.warning("%s: %d tensors of the checkpoint are not used, such as %s", folder, len(unused), unused[0])
    return module


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
