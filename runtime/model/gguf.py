"""GGUF files become ordinary safetensors checkpoints, once, in the cache folder.

Weights are dequantised to fp32: a GGUF block is a 16-bit scale times a small integer, plus a 16-bit offset, which fp32
holds and bf16 does not. A file whose matrices are all fp16, or all bf16, keeps that dtype (the fp32 vectors beside
them come from the same 16-bit original).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pagefleet.runtime.errors import ModelError

logger = logging.getLogger(__name__)
_FORMAT = 1  # raise it when conversion changes: files are then converted again


def cached_checkpoint(gguf: Path, models: Path) -> Path:
    """The converted checkpoint of a GGUF file below `models`; made if it is not there.

    Safe against other processes and against being killed: one converts while others wait, and the folder appears whole.

    Raises:
        ModelError: the file cannot be read or converted.
    """
    state = gguf.stat()
    identity = f"{_FORMAT}|{gguf.resolve()}|{state.st_size}|{state.st_mtime_ns}"
    folder = models / f"{gguf.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if _complete(folder):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{folder.name}.lock"):
            if not _complete(folder):
                logger.info("converting %s to a safetensors checkpoint in %s (once)", gguf, folder)
                convert_gguf(gguf, folder)
    except OSError as error:
        raise ModelError(
            f"{gguf} could not be converted into {folder}: {error}; set PAGEFLEET_HOME to a folder with "
            "room for the weights in fp32"
        ) from error
    return folder


def convert_gguf(gguf: str | Path, folder: str | Path) -> Path:
    """Write the checkpoint folder (weights, configuration, tokenizer, chat template) of a GGUF file.

    The folder must not exist; it appears complete, by one rename.

    Raises:
        ModelError: not a GGUF file, or one that transformers cannot read.
    """
    gguf, folder = Path(gguf), Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _read_once(gguf) as reader:
            _write(gguf, work, _target_dtype(reader))
        if folder.is_dir() and not _complete(folder):
            shutil.rmtree(folder)
        os.chmod(work, 0o755)
        os.replace(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return folder


def _write(gguf: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype)
        )
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{gguf}: transformers cannot read this GGUF file: {first}") from error
    generation = model.generation_config
    if generation is not None and generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


@contextmanager
def _read_once(path: Path) -> Iterator[Any]:
    """The reader of a GGUF file, given to transformers too, which would parse the file three times more.

    Parsing takes most of a conversion: gguf goes through every token and merge in Python, over a memory map whose
    slices are costly to make, and builds its table of tensor names anew for each module.
    """
    gguf: Any = importlib.import_module("gguf")

    class PlainReader(gguf.GGUFReader):
        data: Any

        def _get(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = np.asarray(self.data)
            return super()._get(*args, **kwargs)

    try:
        reader = PlainReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path}: not a GGUF file, or cut short ({error}); fetch it again") from error
    real_reader, real_names = gguf.GGUFReader, gguf.get_tensor_name_map

    def same_reader(wanted: Any, *args: Any, **kwargs: Any) -> Any:
        return reader if os.path.samefile(wanted, path) else real_reader(wanted, *args, **kwargs)

    gguf.GGUFReader, gguf.get_tensor_name_map = same_reader, lru_cache(real_names)
    try:
        yield reader
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = real_reader, real_names


def _target_dtype(reader: Any) -> str:
    from gguf import GGMLQuantizationType

    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    if kinds == {GGMLQuantizationType.F16}:
        return "float16"
    return "bfloat16" if kinds == {GGMLQuantizationType.BF16} else "float32"


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; released by the system if it dies. No lock where the system has none: the rename
    then decides, and the work is done twice."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
