"""What a user may name as a model, and what is said when it is not one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.model.load import checkpoint_info, find_checkpoint, resolve_checkpoint
from pagefleet.runtime.model.open import open_checkpoint
from pagefleet.runtime.model.self_test import PagedRun

IDS = [5, 17, 3, 42, 8, 77, 21]


@pytest.fixture
def checkpoint(tmp_path, tiny_model):
    """(folder, logits of IDS by the model that was saved there)."""
    model = tiny_model("llama", seed=1, eos_token_id=2)
    model.generation_config.eos_token_id = [2, 9]
    model.save_pretrained(tmp_path / "ckpt")
    with torch.inference_mode():
        return tmp_path / "ckpt", model(torch.tensor([IDS])).logits[0]


def paged_logits(model):
    return PagedRun(model, 1, len(IDS)).step([(0, IDS)])[0]


def test_a_saved_checkpoint_loads_and_gives_the_same_logits(checkpoint, backend):
    folder, expected = checkpoint
    model = open_checkpoint(resolve_checkpoint(str(folder)), "fp32", backend)
    torch.testing.assert_close(paged_logits(model), expected, atol=1e-4, rtol=1e-4)
    assert model.eos_token_ids == {2, 9}
    assert (model.vocab_size, model.max_len, model.dtype) == (96, 256, "fp32")
    assert model.execution == "lowered"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_loads_keep_fp32_logits(checkpoint, backend, dtype):
    model = open_checkpoint(checkpoint[0], dtype, backend)
    logits = paged_logits(model)
    assert logits.dtype == torch.float32
    spread = checkpoint[1].abs().max()
    assert 0 < float((logits - checkpoint[1]).abs().max() / spread) < 0.1  # rounded, and not by much


def test_checkpoint_info_reads_headers_and_no_torch(checkpoint):
    folder, _ = checkpoint
    info = checkpoint_info(folder)
    weights = load_file(folder / "model.safetensors")
    assert info.num_parameters == sum(t.numel() for t in weights.values())
    assert info.weight_bytes == 4 * info.num_parameters
    assert info.dtypes == {"F32": len(weights)}
    assert info.config["model_type"] == "llama"
    code = (
        "import sys; from pagefleet.runtime.model.load import checkpoint_info;"
        f"checkpoint_info({str(folder)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_tied_checkpoint_that_ships_lm_head_means_what_transformers_says(tmp_path, tiny_model, backend):
    from transformers import AutoModelForCausalLM

    tiny_model("llama", seed=1, tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, file, metadata={"format": "pt"})
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([IDS])).logits[0]
    model = open_checkpoint(tmp_path, "fp32", backend)
    torch.testing.assert_close(paged_logits(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_the_plan_counts_a_tied_head_as_often_as_it_is_held(kind, tmp_path, tiny_model):
    import gc

    from pagefleet.backends import registry
    from pagefleet.runtime.compose import load_config
    from pagefleet.runtime.plan_command import make_plan

    module = tiny_model("llama", tie_word_embeddings=True, vocab_size=999)
    module.save_pretrained(tmp_path)
    stored = sum(parameter.numel() for parameter in module.parameters())  # the tied weight is one of them, once
    del module

    def held() -> set[int]:
        gc.collect()
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.shape == (999, 32)]
        return {id(o) if o.is_mkldnn else o.untyped_storage().data_ptr() for o in found}

    before = held()
    model = open_checkpoint(tmp_path, "fp32", registry.create(kind))
    copies = len(held() - before)
    assert copies >= 1
    overrides = [f"model.path={tmp_path}", f"backend={kind}", "precision=fp32"]
    assert make_plan(load_config(overrides, "plan"))[0].weights == 4 * (stored + (copies - 1) * 999 * 32)
    assert model.vocab_size == 999


def test_max_len_is_the_models_unless_less_is_asked(checkpoint, backend):
    assert open_checkpoint(checkpoint[0], "fp32", backend, max_len=40).max_len == 40
    with pytest.raises(ModelError, match="at most 256"):
        open_checkpoint(checkpoint[0], "fp32", backend, max_len=257)


# --- what is no checkpoint ---


def test_truncated_weights_are_named(checkpoint, backend):
    file = checkpoint[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors.*100 bytes are missing"):
        open_checkpoint(checkpoint[0], "fp32", backend)


def test_weights_that_the_checkpoint_lacks_are_never_made_up(checkpoint, backend):
    file = checkpoint[0] / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(checkpoint[0], "fp32", backend)


def test_an_unknown_architecture_is_named(checkpoint, backend):
    file = checkpoint[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "nobody_knows"}))
    with pytest.raises(ModelError, match="nobody_knows"):
        open_checkpoint(checkpoint[0], "fp32", backend)


def test_an_unknown_dtype_lists_what_is_known(checkpoint, backend):
    with pytest.raises(ModelError, match="fp32, bf16, fp16"):
        open_checkpoint(checkpoint[0], "int3", backend)


def test_folders_and_files_that_are_no_checkpoint(tmp_path, checkpoint):
    folder = checkpoint[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_checkpoint(tmp_path / "empty")
    with pytest.raises(ModelError, match="does not exist"):
        resolve_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"folder with config\.json"):
        resolve_checkpoint(folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \.safetensors weights; it has pytorch_model\.bin"):
        resolve_checkpoint(folder)


def test_a_folder_that_holds_one_gguf_file_and_nothing_else_means_that_file(tmp_path, checkpoint):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "x.gguf").write_bytes(b"")
    assert find_checkpoint(tmp_path / "one") == find_checkpoint(tmp_path / "one" / "x.gguf") == tmp_path / "one/x.gguf"
    (checkpoint[0] / "x.gguf").write_bytes(b"")
    assert find_checkpoint(checkpoint[0]) == checkpoint[0]
    (tmp_path / "one" / "y.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"2 \.gguf files \(x\.gguf, y\.gguf\); name one"):
        find_checkpoint(tmp_path / "one")


def test_the_plan_refuses_what_loading_refuses_in_the_same_words(tmp_path, checkpoint):
    from pagefleet.runtime.compose import load_config
    from pagefleet.runtime.plan_command import make_plan

    (tmp_path / "two").mkdir()
    for name in ("x.gguf", "y.gguf"):
        (tmp_path / "two" / name).write_bytes(b"")
    for path in (tmp_path / "two", tmp_path / "nowhere", checkpoint[0] / "config.json"):
        with pytest.raises(ModelError) as loading:
            resolve_checkpoint(path)
        with pytest.raises(ModelError) as planning:
            make_plan(load_config([f"model.path={path}"], "plan"))
        assert str(loading.value) == str(planning.value)


def test_a_revision_of_what_is_here_is_said_to_be_of_no_use(checkpoint, caplog):
    assert find_checkpoint(checkpoint[0], "v2") == checkpoint[0]
    assert "model.revision=v2 is of no use" in caplog.text


def test_missing_shards_are_named(checkpoint):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (checkpoint[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names model-00001-of-00002\.safetensors; fetch"):
        resolve_checkpoint(checkpoint[0])


def test_a_hub_id_without_a_network_is_one_clear_error(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"'some/model' is no folder.*no route to host") as caught:
        resolve_checkpoint("some/model")
    assert "\n" not in str(caught.value)
