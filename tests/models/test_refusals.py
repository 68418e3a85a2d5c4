"""What cannot run on a paged cache is refused by name and reason, and the self-test notices what slips through."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AutoConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from pagefleet.backends.reference.backend import ReferenceBackend
from pagefleet.backends.torch_ops import TorchOps
from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.model import self_test
from pagefleet.runtime.model.open import open_checkpoint, open_module
from pagefleet.runtime.model.probe import measure_window
from pagefleet.runtime.model.support import check_supported, length_limit


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "recurrent state"),
        ("jamba", "recurrent state"),
        ("recurrent_gemma", "recurrent state"),
        ("minimax", "recurrent state"),
        ("rwkv", "recurrent state"),
        ("qwen3_next", "recurrent state"),
        ("falcon_h1", "recurrent state"),
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("llama4_text", "chunk"),
        ("deepseek_v32", "indexer"),
        ("xlnet", "permutation"),
    ],
)
def test_refused_from_the_configuration_by_name(model_type, reason):
    with pytest.raises(ModelError, match=f"'{model_type}' is not supported: .*{reason}"):
        check_supported(AutoConfig.for_model(model_type))


def test_refused_before_weights_are_read(tmp_path, backend):
    config = AutoConfig.for_model("mamba")
    config.save_pretrained(tmp_path)
    header = b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)  # no weights at all
    with pytest.raises(ModelError, match="recurrent state"):
        open_checkpoint(tmp_path, "fp32", backend)


def test_bidirectional_models_are_refused(tiny_model, backend):
    with pytest.raises(ModelError, match=r"BertLMHeadModel is not supported: .*bidirectional"):
        open_module(tiny_model("bert", is_decoder=False), backend)


def test_models_that_do_not_attend_through_the_interface_are_refused(tiny_model, backend):
    with pytest.raises(ModelError, match=r"BloomForCausalLM is not supported: .*AttentionInterface"):
        open_module(tiny_model("bloom", n_head=4, n_layer=2), backend, max_len=64)


@pytest.mark.parametrize("window", [1, 2, 7, 512, 4096])
def test_a_window_is_measured_as_the_tokens_a_query_sees_itself_included(window):
    assert measure_window(sliding_window_causal_mask_function(window)) == window


def test_masks_that_are_no_window_are_told_apart():
    assert measure_window(causal_mask_function) is None
    with pytest.raises(ModelError, match="later ones"):
        measure_window(bidirectional_mask_function)
    with pytest.raises(ModelError, match="chunks or blocks"):
        measure_window(chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(ModelError, match="chunks or blocks"):  # every second key only
        measure_window(and_masks(causal_mask_function, lambda b, h, q, kv: kv % 2 == q % 2))
    with pytest.raises(ModelError, match="more than positions"):
        measure_window(and_masks(causal_mask_function, lambda b, h, q, kv: torch.ones(4, dtype=torch.bool)[kv]))


def test_windows_of_the_model_make_kv_groups_full_attention_first(tiny_model, backend):
    model = open_module(tiny_model("gemma2"), backend)
    assert model.windows == (5, None, 5)
    groups = model.kv_groups(16, "fp32")
    assert [(g.window, [x.layer for x in g.layers]) for g in groups] == [(None, [1]), (5, [0, 2])]
    assert (groups[0].layers[0].num_kv_heads, groups[0].layers[0].head_dim, groups[0].block_size) == (2, 16, 16)


def test_a_window_as_long_as_the_longest_sequence_is_full_attention(tiny_model, backend):
    model = open_module(tiny_model("mistral", sliding_window=40), backend, max_len=40)
    assert [g.window for g in model.kv_groups(16, "fp32")] == [None]


def test_layers_that_share_keys_are_kept_once(tiny_model, backend):
    model = open_module(tiny_model("gemma3n_text"), backend)
    kept = sorted(x.layer for g in model.kv_groups(4, "fp32") for x in g.layers)
    assert kept == [0, 1]
    assert [c.source for c in model.calls] == [0, 1, 0, 1]


# --- the self-test notices a wrong backend ---


class Wrong(ReferenceBackend):
    """A backend with one fault."""

    fault = ""

    def attention(self, plan, group, layer, query, args):
        if self.fault == "no window":
            args = type(args)(args.scale, None, args.softcap, args.sinks)
        if self.fault == "scale":
            args = type(args)(args.scale * 1.05, args.window, args.softcap, args.sinks)
        if self.fault == "no sinks":
            args = type(args)(args.scale, args.window, args.softcap, None)
        if self.fault == "one layer":
            group, layer = group, 0
        return super().attention(plan, group, layer, query, args)

    def write_kv(self, plan, group, layer, key, value):
        if self.fault == "late token":
            key, value = key[:-1], value[:-1]
            slots = plan.batch.groups[group].slots[:-1]
            groups = list(plan.batch.groups)
            groups[group] = type(groups[group])(slots, groups[group].block_tables)
            batch = type(plan.batch)(plan.batch.query_starts, plan.batch.kv_lengths, tuple(groups))
            plan = type(plan)(batch, plan.pools)
        super().write_kv(plan, group, layer, key, value)

    def prepare_model(self, model):
        if self.fault == "weights":
            with torch.no_grad():
                model.model.layers[1].mlp.down_proj.weight.mul_(1.01)

    def ops(self):
        return WrongOps(self) if self.fault == "weights" else super().ops()


class WrongOps(TorchOps):
    """Packs the second layer's last product wrongly: the eighth that is asked for."""

    def linear(self, weight, bias, scheme=None):
        self._backend.packed = getattr(self._backend, "packed", 0) + 1
        return super().linear(weight * 1.01 if self._backend.packed == 8 else weight, bias, scheme)


@pytest.mark.parametrize(
    ("fault", "with_model"),
    [
        ("no window", "mistral"),
        ("scale", "llama"),
        ("no sinks", "gpt_oss"),
        ("one layer", "llama"),
        ("late token", "llama"),
        ("weights", "llama"),
    ],
)
@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_the_self_test_fails_at_load_for_a_backend_with_a_fault(fault, with_model, lowering, tiny_model):
    from pagefleet.backends.base import BackendOptions

    backend = Wrong(BackendOptions())
    backend.fault = fault
    with pytest.raises(ModelError, match=r"self-test failed: logits of sequence \d differ .* from position \d+"):
        open_module(tiny_model(with_model), backend, lowering=lowering)


def test_the_self_test_says_how_far_it_was(tiny_model, backend, monkeypatch):
    model = open_module(tiny_model("llama"), backend, lowering="off")
    assert model.self_test().ok
    assert 0 <= model.self_test().max_error < 1e-4
    monkeypatch.setitem(self_test.TOLERANCE, "fp32", -1.0)
    outcome = model.self_test()
    assert not outcome.ok
    assert "first chunk" in outcome.reason


def test_the_model_cannot_be_run_beside_its_cache(tiny_model, backend):
    model = open_module(tiny_model("llama"), backend, lowering="off")
    assert "pagefleet" in AttentionInterface()
    with pytest.raises(ModelError, match=r"run it with HFModel\.forward"):
        model.module(input_ids=torch.tensor([[1, 2]]), use_cache=False)


# --- lengths ---


def test_rotations_that_depend_on_the_batch_limit_the_length():
    config = AutoConfig.for_model(
        "phi3",
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        },
    )
    assert length_limit(config) == 128
    with pytest.raises(ModelError, match=r"at most 128 .*longrope"):
        length_limit(config, 200)


def test_a_model_without_a_stated_length_asks_for_one():
    config = AutoConfig.for_model("bloom")
    with pytest.raises(ModelError, match=r"set model\.max_len"):
        length_limit(config)
    assert length_limit(config, 77) == 77
