"""A GGUF file becomes an ordinary checkpoint: once, whole, and with the same logits."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import pytest
import torch

from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.model.load import checkpoint_info, resolve_checkpoint
from pagefleet.runtime.model.open import open_checkpoint
from pagefleet.runtime.model.self_test import PagedRun

IDS = [5, 17, 3, 42, 8, 77, 21]
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture
def gguf_file(tmp_path, tiny_model):
    """(a GGUF file of a tiny llama with a tokenizer and a chat template, the model it was written from)."""
    model = tiny_model("llama", seed=1)
    path = tmp_path / "source" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(model, path)
    return path, model


def write_gguf(model, path, dtype="float32"):
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<pad>", "<s>", "</s>", '!"', *(chr(33 + i) for i in range(config.vocab_size - 4))])
    writer.add_token_types([3, 3, 3, *([1] * (config.vocab_size - 3))])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in WHOLE:
            target = WHOLE[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{PARTS[part]}"
        if stem.endswith(("q_proj", "k_proj")):  # GGUF keeps the two numbers of a rotary pair side by side
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if tensor.dim() > 1:
            tensor = tensor.to(getattr(torch, dtype))
        writer.add_tensor(f"{target}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_it_is_converted_once_with_tokenizer_and_template(gguf_file, tmp_path, monkeypatch, backend):
    from transformers import AutoTokenizer

    path, original = gguf_file
    monkeypatch.setenv("PAGEFLEET_HOME", str(tmp_path / "home"))
    folder = resolve_checkpoint(path)
    assert folder.parent == tmp_path / "home" / "models"
    assert resolve_checkpoint(path.parent) == folder, "the folder that holds it names the same model"
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == [folder.name], "no scratch folder is left"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_checkpoint(path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert set(checkpoint_info(folder).dtypes) == {"F32"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    assert tokenizer.eos_token_id == 2
    model = open_checkpoint(folder, "fp32", backend)
    with torch.inference_mode():
        expected = original(torch.tensor([IDS])).logits[0]
    logits = PagedRun(model, 1, len(IDS)).step([(0, IDS)])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert model.eos_token_ids == {2}


def test_a_changed_file_is_converted_again(gguf_file, tmp_path, monkeypatch, tiny_model):
    path, _ = gguf_file
    monkeypatch.setenv("PAGEFLEET_HOME", str(tmp_path / "home"))
    first = resolve_checkpoint(path)
    path.unlink()
    write_gguf(tiny_model("llama", seed=2), path, dtype="float16")
    second = resolve_checkpoint(path)
    assert second != first
    assert set(checkpoint_info(second).dtypes) == {"F16"}, "matrices that are 16 bits wide stay so"


def test_two_processes_that_convert_one_file_agree(gguf_file, tmp_path):
    code = "import sys; from pagefleet.runtime.model.load import resolve_checkpoint as r; print(r(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(gguf_file[0])]
    environment = os.environ | {"PAGEFLEET_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(found) == 1
    assert checkpoint_info(found.pop()).config["model_type"] == "llama"


def test_a_conversion_that_fails_leaves_nothing(gguf_file, tmp_path, monkeypatch):
    from transformers import PreTrainedModel

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("PAGEFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(ModelError, match=r"No space left on device; set PAGEFLEET_HOME"):
        resolve_checkpoint(gguf_file[0])
    assert not [p for p in (tmp_path / "home" / "models").iterdir() if p.is_dir()]


def test_damaged_files_are_named(tmp_path, gguf_file, monkeypatch):
    monkeypatch.setenv("PAGEFLEET_HOME", str(tmp_path / "home"))
    bad = tmp_path / "bad.gguf"
    whole = gguf_file[0].read_bytes()
    for content in (b"not a model", whole[:4000], whole[:-5000], struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)):
        bad.write_bytes(content)
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            resolve_checkpoint(bad)
    (tmp_path / "worse.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files .*name one"):
        resolve_checkpoint(tmp_path)
