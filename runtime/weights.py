"""How many weight bytes a checkpoint becomes in memory, from headers alone: safetensors or GGUF, no tensor is read."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagefleet.runtime.config import DEFAULT_INT4_GROUP, PrecisionConfig
from pagefleet.runtime.errors import ModelError

_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_STORED_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER = 100_000_000
_SCALE_BYTES = 4  # fp32 of a channel, or fp16 scale and offset of a group
_HEAD = re.compile(r"lm_head|embed_out|^output\.weight")  # as checkpoints name it, safetensors and GGUF
_EMBEDDINGS = ("embed_", "embedding", "wte", "wpe", "token_embd")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its name, dtype as the file calls it, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_infos(path: Path) -> list[TensorInfo]:
    """Every tensor of a GGUF file, or of a checkpoint folder's safetensors files.

    Raises:
        ModelError: nothing there to read, or a header is damaged.
    """
    if path.suffix == ".gguf":
        return _gguf_infos(path)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [path / name for name in names]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: no .safetensors or .gguf file there")
    return [info for file in files for info in _safetensors_infos(file)]


def weight_bytes(
    infos: list[TensorInfo],
    element_bytes: int,
    tied: bool = False,
    precision: PrecisionConfig | None = None,
    packed_head_elements: int = 0,
) -> int:
    """Bytes once loaded: floating-point weights in the compute dtype or the precision's scheme, others as stored.

    A `tied` checkpoint that also ships `lm_head.weight` holds it once; with a quantised head it is kept twice. On a
    backend that lays linear weights out in its own way a tied head is held apart from the embedding all the same:
    `packed_head_elements` more, of the compute dtype.
    """
    skipped = {"lm_head.weight"} if tied else set()
    return packed_head_elements * element_bytes + sum(
        sum(round(math.prod(info.shape) * size) for size in _element_bytes(info, element_bytes, tied, precision))
        for info in infos
        if info.name not in skipped
    )


def _element_bytes(
    info: TensorInfo, element_bytes: int, tied: bool, precision: PrecisionConfig | None
) -> Iterator[float]:
    """Bytes of an element of each copy that is kept of a tensor."""
    stored = _STORED_BYTES.get(info.dtype, element_bytes)
    scheme = None if precision is None or len(info.shape) < 2 or info.dtype not in _FLOATS else precision.scheme
    if precision is None or scheme is None:
        yield stored
        return
    bits, group = int(scheme[1]), precision.group_size or (DEFAULT_INT4_GROUP if scheme[1] == "4" else info.shape[-1])
    quantized = bits / 8 + _SCALE_BYTES / group
    head, embedding = bool(_HEAD.search(info.name)), any(x in info.name for x in _EMBEDDINGS)
    if embedding or (head and not precision.quantize_head):
        yield stored
    if (head and precision.quantize_head) or (tied and embedding and precision.quantize_head):
        yield quantized
    if not head and not embedding:
        yield quantized


def _safetensors_infos(file: Path) -> Iterator[TensorInfo]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            text = stream.read(length)
            if len(text) < length:
                raise ValueError("the header ends early")
            header = json.loads(text)
            missing = 8 + length + _data_bytes(header) - file.stat().st_size
            if missing > 0:
                raise ValueError(f"{missing} bytes are missing")
        infos = [
            TensorInfo(name, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file}: not a safetensors file, or cut short ({error}); fetch it again") from error
    unknown = sorted({info.dtype for info in infos} - _FLOATS - set(_STORED_BYTES))
    if unknown:
        raise ModelError(f"{file}: tensors of unknown dtype {', '.join(unknown)}")
    yield from infos


def _data_bytes(header: dict[str, Any]) -> int:
    return max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)


def _gguf_infos(file: Path) -> list[TensorInfo]:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{file}: not a GGUF file, or cut short ({error}); fetch it again") from error
    # every GGUF weight, packed or not, is loaded in the compute dtype
    return [TensorInfo(t.name, "F32", tuple(int(n) for n in t.shape)) for t in reader.tensors]
