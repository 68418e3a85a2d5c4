"""The planning formula against numbers worked out by hand, and weights read from headers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.memory_plan import (
    GroupBudget,
    GroupShape,
    ModelShape,
    activation_bytes,
    kv_blocks_that_fit,
    logits_bytes,
    most_blocks,
    plan_memory,
    shape_from_config,
)
from pagefleet.runtime.weights import tensor_infos, weight_bytes

GIB = 1024**3
SMOL = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}


def test_shape_of_a_llama():
    shape = shape_from_config(SMOL)
    assert shape == ModelShape(576, 9, 1536, 49152, 8192, (GroupShape(30, 3, 64, 64, None),))
    assert shape.groups[0].token_bytes("bf16") == 2 * 30 * 3 * 64 * 2 == 23040


def test_shape_of_a_mixed_window_model_has_two_groups():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = SMOL | {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 512, "head_dim": 256}
    assert shape_from_config(config).groups == (GroupShape(1, 3, 256, 256, None), GroupShape(5, 3, 256, 256, 512))


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        ({"sliding_window": 128}, (GroupShape(30, 3, 64, 64, 128),)),
        ({"sliding_window": 128, "use_sliding_window": False}, (GroupShape(30, 3, 64, 64, None),)),
        (
            {"sliding_window": 128, "sliding_window_pattern": 6},
            (GroupShape(5, 3, 64, 64, None), GroupShape(25, 3, 64, 64, 128)),
        ),
        ({"multi_query": True}, (GroupShape(30, 1, 64, 64, None),)),
        ({"num_key_value_heads": None}, (GroupShape(30, 9, 64, 64, None),)),
        (
            {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            (GroupShape(30, 9, 192, 128, None),),
        ),
    ],
)
def test_shapes_that_differ(change, groups):
    assert shape_from_config(SMOL | change).groups == groups


def test_shape_reads_gpt2_names_and_nested_text_configs():
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    assert shape_from_config(gpt2) == ModelShape(768, 12, 3072, 50257, 1024, (GroupShape(12, 12, 64, 64, None),))
    assert shape_from_config({"text_config": SMOL, "vision_config": {}}) == shape_from_config(SMOL)


def test_a_missing_size_is_named():
    with pytest.raises(ModelError, match="vocab_size"):
        shape_from_config({k: v for k, v in SMOL.items() if k != "vocab_size"})


@pytest.mark.parametrize(
    ("tokens", "window", "chunk", "blocks"),
    [
        (1, None, 64, 1),
        (16, None, 64, 1),
        (17, None, 64, 2),
        (1000, 512, 64, 37),  # ceil(576 / 16) + 1
        (1000, 512, 488, 63),  # window + chunk reaches the end: all of them, ceil(1000 / 16)
        (1000, 512, 487, 63),  # ceil(999 / 16) + 1 = 64, but never more than all
        (100, 512, 64, 7),
    ],
)
def test_blocks_of_one_sequence(tokens, window, chunk, blocks):
    assert most_blocks(tokens, window, 16, chunk) == blocks


def fit(free, budgets, **change):
    given_ = {"max_len": 160, "max_sequences": 4, "max_batched_tokens": 32} | change
    return kv_blocks_that_fit(free, budgets, 16, **given_)


def test_one_group_takes_all_the_bytes_less_the_null_block():
    got = fit(26 * 1000 + 999, [GroupBudget(1000)])
    assert (got.blocks, got.tokens, got.longest, got.sequences, got.pool_bytes) == ((26,), 400, 160, 2, 26_000)


def test_the_pool_is_no_larger_than_all_sequences_can_use():
    assert fit(10**9, [GroupBudget(1000)]).blocks == (41,)  # 4 sequences of 10 blocks, and the null block


def test_a_window_group_gets_what_its_sequences_can_hold():
    # window 32, chunk 32: ceil(64 / 16) + 1 = 5 blocks a sequence, 20 for four
    got = fit(10**9, [GroupBudget(1000), GroupBudget(3000, 32)])
    assert got.blocks == (41, 21)
    assert (got.tokens, got.longest, got.sequences) == (640, 160, 4)


def test_with_little_memory_a_window_group_shrinks_until_the_longest_sequence_fits():
    # equal shares: 7 usable blocks each, 112 tokens; the window needs 5 of them, the other bytes hold 10 full blocks
    budgets = [GroupBudget(1000), GroupBudget(3000, 32)]
    got = fit(8 * 4000, budgets)
    assert got.blocks == (11, 6)
    assert (got.longest, got.sequences) == (160, 1)


@pytest.mark.parametrize("free", [-5, 0, 999, 1999])
def test_nothing_fits_in_less_than_two_blocks(free):
    got = fit(free, [GroupBudget(1000)])
    assert (got.blocks, got.tokens, got.longest, got.sequences, got.pool_bytes) == ((), 0, 0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(
    free=st.integers(0, 10**7),
    sizes=st.lists(st.tuples(st.integers(128, 9000), st.none() | st.integers(1, 300)), min_size=1, max_size=3),
    max_len=st.integers(1, 2000),
    max_sequences=st.integers(1, 64),
    chunk=st.integers(1, 512),
)
def test_pools_never_exceed_the_bytes_and_what_is_promised_fits(free, sizes, max_len, max_sequences, chunk):
    budgets = [GroupBudget(*size) for size in sizes]
    got = kv_blocks_that_fit(free, budgets, 16, max_len=max_len, max_sequences=max_sequences, max_batched_tokens=chunk)
    assert got.pool_bytes <= free
    for usable, budget in zip((n - 1 for n in got.blocks), budgets, strict=bool(got.blocks)):
        assert most_blocks(got.longest, budget.window, 16, chunk) <= usable
        assert got.sequences * most_blocks(max_len, budget.window, 16, chunk) <= usable
    assert got.sequences <= max_sequences
    assert (got.longest == max_len) == (got.sequences >= 1)
    alone = sum((most_blocks(max_len, b.window, 16, chunk) + 1) * b.block_bytes for b in budgets)
    if alone <= free:
        assert got.longest == max_len, "one sequence of max_len would have fitted"


def test_the_plan_of_smollm2_in_two_gib_by_hand():
    shape = shape_from_config(SMOL)
    weights = 134_515_008 * 2
    plan = plan_memory(
        shape, weight_bytes=weights, limit_bytes=2 * GIB, compute_dtype="bf16", max_sequences=64, memory_fraction=0.5
    )
    # 2048 tokens x (2 x 576 + max(2 x 9 x 64 + 3 x 128, 3 x 1536)) x 2 bytes
    assert plan.activations == activation_bytes(shape, 2048, 2) == 2048 * (1152 + 4608) * 2 == 23_592_960
    assert plan.logits == logits_bytes(shape, 64) == 2 * 64 * 49152 * 4 == 25_165_824
    assert plan.kv_budget == (2 * GIB - weights - 23_592_960 - 25_165_824) // 2
    assert plan.token_bytes == 23040
    block = 23040 * 16
    assert plan.fit.blocks == (plan.kv_budget // block,)
    assert plan.fit.tokens == (plan.kv_budget // block - 1) * 16 == 39_680
    assert plan.fit.sequences == 4
    assert plan.fits
    assert plan.advice == ()


def test_fixed_kv_memory_is_taken_as_given_but_never_more_than_is_left():
    shape = shape_from_config(SMOL)
    common = {"weight_bytes": 10**8, "limit_bytes": GIB, "compute_dtype": "fp32"}
    assert plan_memory(shape, kv_memory_bytes=10**8, **common).kv_budget == 10**8
    plan = plan_memory(shape, kv_memory_bytes=10**10, **common)
    assert plan.kv_budget == GIB - 10**8 - plan.activations - plan.logits


def test_weights_that_are_loaded_already_are_not_counted_again():
    shape = shape_from_config(SMOL)
    common = {"weight_bytes": 10**8, "compute_dtype": "fp32"}
    before = plan_memory(shape, limit_bytes=GIB, **common)
    after = plan_memory(shape, limit_bytes=GIB - 10**8, loaded=True, **common)
    assert before.kv_budget == after.kv_budget


def test_kv_dtype_decides_the_bytes_of_a_token():
    shape = shape_from_config(SMOL)
    common = {"weight_bytes": 0, "limit_bytes": GIB, "compute_dtype": "bf16"}
    assert plan_memory(shape, kv_dtype="fp32", **common).token_bytes == 46080
    assert plan_memory(shape, kv_dtype="auto", **common).token_bytes == 23040
    assert plan_memory(shape, kv_dtype="int8", **common).token_bytes == 11520 + 30 * 3 * 2 * 4  # and their scales


def test_when_nothing_fits_the_advice_really_would():
    shape = shape_from_config(SMOL)
    common = {"weight_bytes": 4 * 134_515_008, "compute_dtype": "fp32", "max_sequences": 8}
    tight = plan_memory(shape, limit_bytes=800 * 1024**2, **common)
    assert not tight.fits
    assert 0 < tight.fit.longest < 8192
    assert f"model.max_len={tight.fit.longest}" in tight.advice[0]
    assert plan_memory(shape, limit_bytes=800 * 1024**2, max_len=tight.fit.longest, **common).fits
    assert any(line.startswith("precision=bf16") for line in tight.advice)
    hopeless = plan_memory(shape, limit_bytes=2**20, **common)
    assert (hopeless.fit.blocks, hopeless.fit.longest) == ((), 0)
    assert "of memory would hold one sequence of 8192 tokens" in hopeless.advice[-1]
    needed = hopeless.weights + hopeless.activations + hopeless.logits + 513 * 46080 * 16
    assert plan_memory(shape, limit_bytes=needed, memory_fraction=1.0, **common).fits
    assert not plan_memory(shape, limit_bytes=needed - 1, memory_fraction=1.0, **common).fits


def test_the_plan_is_plain_json():
    plan = plan_memory(shape_from_config(SMOL), weight_bytes=1, limit_bytes=GIB, compute_dtype="bf16")
    assert json.loads(json.dumps(plan.as_dict()))["sequences_of_max_len"] == plan.fit.sequences


# -- weights ---------------------------------------------------------------------------------------------------------


def test_weights_are_counted_in_the_compute_dtype_from_the_header(tiny_checkpoint):
    infos = tensor_infos(tiny_checkpoint)
    assert weight_bytes(infos, 4) == 20_000 * 4
    assert weight_bytes(infos, 2) == 20_000 * 2


def test_integers_stay_as_stored_and_a_tied_head_counts_once(tmp_path, safetensors_file):
    tensors = {"lm_head.weight": ("F32", [10, 4]), "x": ("F16", [10, 4]), "ids": ("I64", [3]), "scalar": ("F32", [])}
    safetensors_file(tmp_path / "model.safetensors", tensors)
    infos = tensor_infos(tmp_path)
    assert weight_bytes(infos, 2) == 80 + 80 + 24 + 2
    assert weight_bytes(infos, 2, tied=True) == 80 + 24 + 2


def test_shards_are_found_by_the_index(tmp_path, safetensors_file):
    safetensors_file(tmp_path / "a.safetensors", {"a": ("F32", [5])})
    safetensors_file(tmp_path / "b.safetensors", {"b": ("F32", [6])})
    safetensors_file(tmp_path / "old.safetensors", {"c": ("F32", [7])})
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(tensor_infos(tmp_path), 4) == 11 * 4


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file"):
        tensor_infos(tmp_path)


def test_a_file_whose_data_was_cut_short_is_named(tiny_checkpoint):
    file = tiny_checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ModelError, match="3 bytes are missing"):
        tensor_infos(tiny_checkpoint)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no \.safetensors or \.gguf file"):
        tensor_infos(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="not a GGUF file"):
        tensor_infos(tmp_path / "x.gguf")
