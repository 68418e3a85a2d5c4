"""`pagefleet bench`: workloads that repeat, measures of what the engine did, and a floor worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagefleet.runtime import cli
from pagefleet.runtime.bench.command import measure
from pagefleet.runtime.bench.floor import Ceilings, ModelSizes, floor, measure_ceilings, token_bytes
from pagefleet.runtime.bench.measure import percentiles
from pagefleet.runtime.bench.workloads import (
    SMALL_WORKLOADS,
    WORKLOADS,
    TokenSource,
    Workload,
    custom,
    fingerprint,
    read_text,
    warmup,
)
from pagefleet.runtime.compose import load_config
from pagefleet.runtime.config import BENCH_WORKLOADS, BenchConfig
from pagefleet.runtime.errors import ConfigError, ErrorCode
from pagefleet.runtime.memory_plan import GroupShape, ModelShape
from pagefleet.runtime.outputs import CompletionOutput, OutputError, RequestOutput, RequestTimings
from pagefleet.runtime.text.tokenizer import Tokenizer
from pagefleet.runtime.weights import TensorInfo

# -- workloads -------------------------------------------------------------------------------------------------------


def test_the_four_workloads_have_the_sizes_that_engines_are_compared_on() -> None:
    w1, w2, w3, w4 = (WORKLOADS[name] for name in ("w1", "w2", "w3", "w4"))
    assert (len(w1.lengths), min(w1.lengths), max(w1.lengths), w1.new) == (64, 32, 512, 128)
    assert sum(w1.lengths) == 64 * 272
    assert (w2.lengths, w2.new) == ((128,), 128)
    assert (w3.lengths, w3.shared, w3.new) == ((544,) * 64, 512, 32)
    assert (w4.lengths, w4.new) == ((6000,), 64)
    assert set(WORKLOADS) == set(SMALL_WORKLOADS) == set(BENCH_WORKLOADS) - {"custom", "all"}


def test_prompts_repeat_by_seed_share_a_prefix_and_keep_their_lengths() -> None:
    workload = custom(BenchConfig(num_prompts=50, input_len=100, input_len_spread=0.2, shared_prefix_len=30), seed=3)
    source = TokenSource(range(5000))
    prompts = source.prompts(workload, seed=3)
    assert prompts == source.prompts(workload, seed=3)
    assert fingerprint(prompts) != fingerprint(source.prompts(workload, seed=4))
    assert fingerprint(prompts) != fingerprint(source.prompts(workload, seed=3, run=1))
    assert [len(p) for p in prompts] == list(workload.lengths)
    assert len({tuple(p[:30]) for p in prompts}) == 1
    assert len({tuple(p[:31]) for p in prompts}) > 1
    assert set(workload.lengths) <= set(range(80, 121))
    assert len(set(workload.lengths)) > 5


def test_a_text_shorter_than_a_prompt_is_read_in_a_circle_and_an_empty_one_is_refused() -> None:
    (prompt,) = TokenSource([1, 2, 3]).prompts(Workload("x", (7,), 1), seed=0)
    assert len(prompt) == 7
    assert prompt[3:] == prompt[:4]
    with pytest.raises(ConfigError, match="has no tokens"):
        TokenSource([])


def test_a_prefix_that_leaves_a_prompt_no_token_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than 5, the shortest prompt, got 5"):
        custom(BenchConfig(input_len=10, shared_prefix_len=5), 0)


def test_the_text_is_a_file_of_the_users_or_one_that_python_carries(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("grüße", encoding="utf-8")
    assert read_text(str(tmp_path / "a.txt")) == "grüße"
    assert len(read_text(None)) > 100_000
    with pytest.raises(ConfigError, match="cannot read"):
        read_text(str(tmp_path / "missing.txt"))


def test_a_warm_up_is_short_whatever_it_warms_up_for() -> None:
    short = warmup(WORKLOADS["w3"], requests=2)
    assert (short.lengths, short.new) == ((96, 96), 8)


# -- measures --------------------------------------------------------------------------------------------------------


class Engine:
    """One request a step; first token after 1 s, then one token every 0.5 s. Request 3 of each run is refused."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, list[int]]] = []
        self.names: list[str] = []
        self.prompts: list[list[int]] = []

    def submit(self, request_id, prompt, params):
        assert params.ignore_eos
        assert params.max_tokens == 3
        self.names.append(request_id)
        self.prompts.append(prompt)
        self.waiting.append((request_id, prompt))

    @property
    def has_unfinished(self):
        return bool(self.waiting)

    def step(self):
        name, prompt = self.waiting.pop(0)
        if name.endswith("-3"):
            return [RequestOutput(name, None, prompt, error=OutputError(ErrorCode.NEVER_FITS, "too big"))]
        timings = RequestTimings(arrived=10.0, scheduled=10.5, first_token=11.0, finished=12.0)
        outputs = [CompletionOutput(0, token_ids=[7, 8, 9], finish_reason="length")]
        return [RequestOutput(name, None, prompt, outputs, num_cached_tokens=5, timings=timings)]

    def metrics(self):
        return {"backend": "toy", "isa": "none", "kernels": {}, "preemptions": 0}


def test_bench_measures_what_the_engine_did() -> None:
    sizes = "bench.num_prompts=4 bench.input_len=10 bench.input_len_spread=0 bench.output_len=3"
    config = load_config(f"{sizes} bench.warmup=2 bench.runs=3".split(), "bench")
    engine = Engine()
    report = measure(engine, TokenSource(range(500)), custom(config.bench, 0), config)
    assert engine.names[:2] == ["custom-warmup-0", "custom-warmup-1"]
    assert engine.names[2:] == [f"custom-{run}-{i}" for run in range(3) for i in range(4)]
    assert len({tuple(p) for p in engine.prompts}) == 14, "a prompt came twice: a prefix cache would answer it"
    assert (report["requests"], report["errors"]) == (12, 3)
    assert report["error_messages"] == ["never_fits: too big"]
    assert (report["prompt_tokens"], report["output_tokens"]) == (90, 27)
    assert report["kv_hit_rate"] == 0.5
    assert report["time_to_first_token_s"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert report["inter_token_latency_s"]["p50"] == 0.5
    assert report["request_latency_s"]["p99"] == 2.0
    assert report["seconds"] == sorted(report["seconds_of_runs"])[1]
    assert report["output_tokens_per_s"] == pytest.approx(9 / report["seconds"])
    assert report["backend"] == "toy"
    json.dumps(report)


def test_percentiles_are_nearest_rank() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([4.0]) == {"p50": 4.0, "p90": 4.0, "p99": 4.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


# -- the floor -------------------------------------------------------------------------------------------------------

SHAPE = ModelShape(8, 4, 16, 32, 1024, (GroupShape(2, 2, 4, 4),))
SIZES = ModelSizes(linear=1000.0, head=256.0, shape=SHAPE)
FAST_PRODUCTS = Ceilings(read_bytes_per_s=1.0, products_per_s={"bf16": 1e30, "int8": 1e30})
FAST_MEMORY = Ceilings(read_bytes_per_s=1e30, products_per_s={"bf16": 1.0, "int8": 2.0})
TWO = Workload("two", (3, 5), new=3, shared=10)


def test_floor_of_reads_by_hand() -> None:
    least = floor(TWO, SIZES, FAST_PRODUCTS, "bf16", "bf16")
    per_token = 2 * 2 * (4 + 4) * 2
    assert token_bytes(SHAPE.groups[0], "bf16") == per_token
    assert least.prefill_products == 2000
    assert least.decode_products == 2 * 2000
    assert least.head == 3 * 512
    first, second = (3 + 1) + (5 + 1) + 10, (3 + 2) + (5 + 2) + 10  # the shared tokens are read once a step
    assert least.decode_attention == (first + second) * per_token
    assert least.prefill_attention == pytest.approx(0, abs=1e-9)
    assert least.seconds == pytest.approx(2000 + 4000 + 1536 + 42 * per_token)


def test_floor_of_products_by_hand() -> None:
    least = floor(TWO, SIZES, FAST_MEMORY, "w8a8", "int8")
    assert least.prefill_products == 2 * 1000 * (10 + 3 + 5) / 2
    assert least.decode_products == 2 * (2 * 1000 * 2) / 2
    assert least.head == 3 * (2 * 256 * 2) / 2
    a_key = 2 * 2 * 4 * (4 + 4)  # layers; multiply and add; query heads; key and value sizes
    prompt_keys = sum(range(1, 11)) + sum(range(11, 14)) + sum(range(11, 16))
    assert least.prefill_attention == prompt_keys * a_key  # attention of an 8-bit model multiplies in bf16
    assert least.decode_attention == ((14 + 15) + (16 + 17)) * a_key


def test_a_window_bounds_what_attention_computes_and_reads() -> None:
    shape = ModelShape(8, 4, 16, 32, 1024, (GroupShape(2, 2, 4, 4, window=6),))
    sizes = ModelSizes(1000.0, 256.0, shape)
    reads = floor(TWO, sizes, FAST_PRODUCTS, "bf16", "bf16").decode_attention
    own, shared = (4 + 6) + (5 + 6), (6 - 4) + (6 - 5)
    assert reads == (own + shared) * token_bytes(shape.groups[0], "bf16")
    products = floor(Workload("one", (10,), new=1), sizes, FAST_MEMORY, "bf16", "bf16").prefill_attention
    assert products == (1 + 2 + 3 + 4 + 5 + 6 * 5) * 2 * 2 * 4 * 8


def test_model_sizes_leave_embeddings_out_and_count_only_the_experts_that_a_token_picks() -> None:
    infos = [
        TensorInfo("model.embed_tokens.weight", "BF16", (32, 8)),
        TensorInfo("lm_head.weight", "BF16", (32, 8)),
        TensorInfo("model.layers.0.input_layernorm.weight", "BF16", (8,)),
        TensorInfo("model.layers.0.self_attn.q_proj.weight", "BF16", (16, 8)),
        *(TensorInfo(f"model.layers.0.mlp.experts.{i}.up_proj.weight", "BF16", (10, 8)) for i in range(4)),
    ]
    config = SimpleNamespace(num_local_experts=4, num_experts_per_tok=2)
    sizes = ModelSizes.of(infos, config, SHAPE)
    assert (sizes.linear, sizes.head) == (16 * 8 + 2 * 80, 32 * 8)


def test_ceilings_are_measured_for_the_dtypes_that_a_precision_multiplies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet.runtime.bench.floor._READ_BYTES", 2**20)
    monkeypatch.setattr("pagefleet.runtime.bench.floor._PRODUCT_SIZE", 32)
    ceilings = measure_ceilings("cpu", lambda: None, ["w8a8", "fp32"], repeats=1)
    assert set(ceilings.products_per_s) == {"int8", "bf16", "fp32"}
    assert all(rate > 0 for rate in (ceilings.read_bytes_per_s, *ceilings.products_per_s.values()))


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=byte_level.vocab_size,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_level.hf.save_pretrained(folder)
    return folder


def test_the_command_runs_every_small_workload_and_compares_with_the_floor(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagefleet.runtime.bench.floor._READ_BYTES", 2**20)
    monkeypatch.setattr("pagefleet.runtime.bench.floor._PRODUCT_SIZE", 32)
    arguments = f"bench model.path={checkpoint} backend=reference cache.memory=16MiB precision=fp32".split()
    assert cli.main([*arguments, "bench.workload=all", "bench.small=true", "bench.json=true"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [r["workload"] for r in reports] == ["w1", "w2", "w3", "w4"]
    for report in reports:
        workload = SMALL_WORKLOADS[report["workload"]]
        assert report["errors"] == 0
        assert report["prompt_tokens"] == sum(workload.lengths)
        assert report["output_tokens"] == len(workload.lengths) * workload.new
        assert report["times_floor"] == pytest.approx(report["seconds"] / report["floor"]["seconds"])
    assert reports[2]["kv_hit_rate"] > 0.7, "the shared prefix was computed more than once"


def test_the_command_prints_a_table_and_the_exit_code_tells_of_failed_requests(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"bench model.path={checkpoint} backend=reference cache.memory=16MiB bench.floor=false".split()
    sizes = "bench.num_prompts=2 bench.input_len=10 bench.output_len=2"
    assert cli.main([*arguments, *sizes.split()]) == 0
    printed = capsys.readouterr().out
    assert "output tokens/s" in printed
    assert "floor" not in printed
    assert cli.main([*arguments, "bench.num_prompts=1", "bench.input_len=500", "bench.input_len_spread=0"]) == 1
    assert "prompt_too_long" in capsys.readouterr().out
