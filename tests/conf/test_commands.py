"""plan, doctor and bench end to end, on a checkpoint of headers and an engine of our own."""

import json

import pytest

from pagefleet.runtime import cli
from pagefleet.runtime.bench import measure, percentiles, random_prompts
from pagefleet.runtime.compose import load_config
from pagefleet.runtime.config import BenchConfig
from pagefleet.runtime.errors import ConfigError, ErrorCode
from pagefleet.runtime.outputs import CompletionOutput, OutputError, RequestOutput, RequestTimings


def test_plan_of_a_tiny_checkpoint_by_hand(tiny_checkpoint, capsys):
    arguments = (
        "precision=fp32 plan.json=true plan.memory=8MiB scheduler.max_batched_tokens=64 scheduler.max_sequences=4"
    )
    code = cli.main(["plan", f"model.path={tiny_checkpoint}", "backend=reference", *arguments.split()])
    got = json.loads(capsys.readouterr().out)
    assert code == 0
    assert got["weight_bytes"] == 20_000 * 4
    assert got["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head size, bytes
    assert got["activation_bytes"] == 64 * (2 * 64 + 3 * 128) * 4
    assert got["logits_bytes"] == 2 * 4 * 256 * 4
    left = 8 * 1024**2 - 80_000 - 131_072 - 8_192
    assert got["kv_budget_bytes"] == int(left * 0.8)
    assert got["blocks"] == [4 * 32 + 1]  # four sequences of 512 tokens in blocks of 16, and the null block
    assert (got["tokens"], got["sequences_of_max_len"], got["fits"]) == (2048, 4, True)
    assert (got["backend"], got["precision"], got["kv_dtype"]) == ("reference", "fp32", "fp32")


def test_plan_says_what_would_fit_when_it_does_not(tiny_checkpoint, capsys):
    code = cli.main(["plan", f"model.path={tiny_checkpoint}", "backend=reference", "plan.memory=128KiB"])
    out = capsys.readouterr().out
    assert code == 1
    assert "Does not fit" in out
    assert "scheduler.max_batched_tokens=512" in out


def test_plan_without_a_fixed_size_uses_what_this_process_may_use(tiny_checkpoint, capsys):
    assert cli.main(["plan", f"model.path={tiny_checkpoint}", "backend=reference", "plan.json=true"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["memory_limit_bytes"] == got["memory_free_bytes"] <= got["memory_total_bytes"]


def test_plan_prints_a_table(tiny_checkpoint, capsys):
    assert cli.main(["plan", f"model.path={tiny_checkpoint}", "backend=reference"]) == 0
    out = capsys.readouterr().out
    assert "weights" in out
    assert "sequences of 512" in " ".join(out.split())


def test_plan_of_a_file_that_is_no_model_is_refused(tmp_path, capsys):
    (tmp_path / "x.bin").write_bytes(b"")
    assert cli.main(["plan", f"model.path={tmp_path / 'x.bin'}", "backend=reference"]) == 2
    assert "expected a checkpoint folder or a .gguf file" in capsys.readouterr().err


def test_plan_of_a_folder_without_a_configuration_is_refused(tmp_path, capsys):
    assert cli.main(["plan", f"model.path={tmp_path}", "backend=reference"]) == 2
    err = capsys.readouterr().err
    assert "model configuration cannot be read" in err
    assert "Traceback" not in err


def test_doctor_lists_every_backend_with_a_reason(capsys, home_in_tmp):
    assert cli.main(["doctor", "doctor.json=true"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert {"cpu", "reference", "cuda", "rocm", "onnx"} <= set(got["backends"])
    assert all(entry["reason"] for entry in got["backends"].values())
    assert got["backends"][got["choice"]]["available"]
    assert got["choice"] in got["reasons"][0]
    assert got["cpu"]["usable_threads"] >= 1
    assert 0 < got["memory"]["available_bytes"] <= got["memory"]["limit_bytes"]
    assert got["versions"]["torch"]
    assert got["cache_folder"]["path"] == str(home_in_tmp)
    assert not home_in_tmp.exists(), "looking must not create"


def test_doctor_says_so_when_the_backend_asked_for_cannot_run(capsys, monkeypatch):
    from pagefleet.backends import registry
    from pagefleet.backends.base import Availability

    monkeypatch.setattr(registry, "_probe", lambda load: Availability(False, "switched off for this test"))
    assert cli.main(["doctor", "doctor.json=true"]) == 1
    got = json.loads(capsys.readouterr().out)
    assert got["choice"] is None
    assert "switched off for this test" in got["reasons"][0]


def test_doctor_reports_a_backend_that_breaks_when_it_is_made(capsys, monkeypatch):
    from pagefleet.backends import registry

    def broken(name, options=None):
        raise RuntimeError("driver too old")

    monkeypatch.setattr(registry, "create", broken)
    cli.main(["doctor", "doctor.json=true"])
    got = json.loads(capsys.readouterr().out)
    assert got["backends"]["cpu"]["available"] is False
    assert "driver too old" in got["backends"]["cpu"]["reason"]


def test_doctor_prints_for_people(capsys):
    assert cli.main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "backend=auto takes: " in out
    assert "versions: python" in out


# -- bench -----------------------------------------------------------------------------------------------------------


def test_prompts_repeat_by_seed_share_a_prefix_and_keep_their_lengths():
    settings = BenchConfig(num_prompts=50, input_len=100, input_len_spread=0.2, shared_prefix_len=30)
    prompts = random_prompts(settings, vocab_size=500, seed=3)
    assert prompts == random_prompts(settings, vocab_size=500, seed=3)
    assert prompts != random_prompts(settings, vocab_size=500, seed=4)
    assert len({tuple(p[:30]) for p in prompts}) == 1
    assert len({tuple(p[:31]) for p in prompts}) > 1
    assert {len(p) for p in prompts} <= set(range(80, 121))
    assert len({len(p) for p in prompts}) > 5
    assert all(0 <= t < 500 for p in prompts for t in p)


def test_a_prefix_longer_than_a_prompt_is_refused():
    with pytest.raises(ConfigError, match="at most 5, the shortest prompt"):
        random_prompts(BenchConfig(input_len=10, shared_prefix_len=6), 500, 0)


class Engine:
    """One request a step; first token after 1 s, then one token every 0.5 s. The last request is refused."""

    class tokenizer:
        vocab_size = 500

    def __init__(self):
        self.waiting, self.names = [], []

    def submit(self, request_id, prompt, params):
        assert params.ignore_eos
        assert params.max_tokens == 3
        self.names.append(request_id)
        self.waiting.append((request_id, prompt))

    @property
    def has_unfinished(self):
        return bool(self.waiting)

    def step(self):
        name, prompt = self.waiting.pop(0)
        if name == "bench-3":
            return [RequestOutput(name, None, prompt, error=OutputError(ErrorCode.NEVER_FITS, "too big"))]
        timings = RequestTimings(arrived=10.0, scheduled=10.5, first_token=11.0, finished=12.0)
        outputs = [CompletionOutput(0, token_ids=[7, 8, 9], finish_reason="length")]
        return [RequestOutput(name, None, prompt, outputs, num_cached_tokens=5, timings=timings)]

    def metrics(self):
        return {"backend": "toy", "isa": "none", "kernels": {}, "preemptions": 0}


def test_bench_measures_what_the_engine_did():
    overrides = "bench.num_prompts=4 bench.input_len=10 bench.input_len_spread=0 bench.output_len=3 bench.warmup=2"
    engine = Engine()
    report = measure(engine, load_config(overrides.split(), "bench"))
    assert engine.names == ["warmup-0", "warmup-1", "bench-0", "bench-1", "bench-2", "bench-3"]
    assert (report["requests"], report["errors"]) == (4, 1)
    assert report["error_messages"] == ["never_fits: too big"]
    assert (report["prompt_tokens"], report["output_tokens"]) == (30, 9)
    assert report["kv_hit_rate"] == 0.5
    assert report["time_to_first_token_s"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert report["inter_token_latency_s"]["p50"] == 0.5
    assert report["request_latency_s"]["p99"] == 2.0
    assert report["output_tokens_per_s"] == pytest.approx(9 / report["seconds"])
    assert report["backend"] == "toy"
    json.dumps(report)


def test_percentiles_are_nearest_rank():
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([4.0]) == {"p50": 4.0, "p90": 4.0, "p99": 4.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


# -- batch -----------------------------------------------------------------------------------------------------------


def test_batch_hands_the_job_its_configuration_a_factory_and_what_shapes_results(monkeypatch):
    from pagefleet.runtime import llm
    from pagefleet.runtime.config import result_shaping
    from pagefleet.runtime.job import batch_job

    calls = []

    def run_job(config, factory, *, result_shaping):
        calls.append((config, factory(), result_shaping))
        return 3

    monkeypatch.setattr(batch_job, "run_job", run_job)
    monkeypatch.setattr(llm.LLM, "from_config", classmethod(lambda cls, config: ("an engine for", config.model.path)))
    assert cli.main(["batch", "model.path=m", "job.input=a", "job.output=b", "seed=4"]) == 3
    config, engine, shaping = calls[0]
    assert engine == ("an engine for", "m")
    assert shaping == result_shaping(config)
    assert shaping["seed"] == 4


def test_a_folder_that_holds_one_gguf_file_is_planned_from_it(tmp_path):
    from pagefleet.runtime.plan_command import local_checkpoint

    (tmp_path / "x.gguf").write_bytes(b"")
    config = load_config([f"model.path={tmp_path}"], "plan")
    assert local_checkpoint(config) == tmp_path / "x.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert local_checkpoint(config) == tmp_path
