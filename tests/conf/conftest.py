import json
import struct
from pathlib import Path

import pytest

from pagefleet.backends import detect

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Header and zero bytes, as the format's specification says."""
    width = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1}
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = width[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


@pytest.fixture
def safetensors_file():
    return write_safetensors


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """A llama of two layers whose tensors have 20,000 elements in all: only headers matter here."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    write_safetensors(
        folder / "model.safetensors",
        {"model.embed_tokens.weight": ("BF16", [256, 64]), "rest": ("BF16", [3616])},
    )
    return folder


@pytest.fixture(autouse=True)
def home_in_tmp(tmp_path, monkeypatch):
    """No test writes into the user's cache folder, and none litters the folder it runs in."""
    monkeypatch.setenv("PAGEFLEET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def detected(monkeypatch):
    """`hardware=auto` takes what this says, whatever machine the tests run on: backend -> target."""
    targets = {"target": detect.Target("generic", "made up for the test")}
    monkeypatch.setattr(detect, "detect", lambda backend="auto": targets.get(backend, targets["target"]))
    return targets


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
