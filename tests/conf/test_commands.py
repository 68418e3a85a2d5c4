"""plan and doctor end to end, on a checkpoint of headers, and what batch is handed."""

import json

import pytest

from pagefleet.backends import detect
from pagefleet.backends.cpu import host
from pagefleet.runtime import cli
from pagefleet.runtime.compose import load_config
from pagefleet.runtime.sizes import parse_size


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


@pytest.mark.parametrize(
    "name",
    ["generic", "epyc_genoa", "h200", "h100", "a100", "l4", "rtx4090", "mi300x", "mi325x", "mi355x", "rx7900xtx"],
)
def test_plan_for_a_card_that_is_not_here_counts_that_cards_memory(tiny_checkpoint, capsys, name, detected):
    command = ["plan", f"model.path={tiny_checkpoint}", "backend=reference", "plan.json=true", f"hardware={name}"]
    assert cli.main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    memory = load_config([f"hardware={name}"]).hardware.memory
    if memory is None:  # a processor: there is one here
        assert (facts["memory_source"], facts["backend"]) == ("free now", "reference")
    else:
        assert (facts["memory_source"], facts["backend"]) == ("hardware.memory", name)
        assert facts["memory_free_bytes"] == parse_size(memory)
    detected["target"] = detect.Target(name, "there it is")
    assert cli.main(command) == 0
    assert json.loads(capsys.readouterr().out)["memory_source"] == "free now"


def test_plan_of_a_file_that_is_no_model_is_refused(tmp_path, capsys):
    (tmp_path / "x.bin").write_bytes(b"")
    assert cli.main(["plan", f"model.path={tmp_path / 'x.bin'}", "backend=reference"]) == 2
    assert "expected a folder with config.json and .safetensors, or a .gguf file" in capsys.readouterr().err


def test_plan_of_a_folder_without_a_configuration_is_refused(tmp_path, capsys):
    assert cli.main(["plan", f"model.path={tmp_path}", "backend=reference"]) == 2
    err = capsys.readouterr().err
    assert "is not a checkpoint: it has no config.json" in err
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


def test_the_log_and_the_doctor_say_which_hardware_target_was_taken_and_why(detected, tiny_checkpoint, capsys):
    detected["target"] = detect.Target("xeon_icx", "AVX-512 without bf16")
    command = ["plan", f"model.path={tiny_checkpoint}", "plan.json=true"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["precision"] == "fp32"
    assert "hardware=auto takes xeon_icx: AVX-512 without bf16" in said.err
    assert cli.main([*command, "hardware=laptop"]) == 0
    assert "hardware" not in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0
    assert "hardware=auto takes: xeon_icx (AVX-512 without bf16)" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def finished_job(work_folder, monkeypatch):
    """A job whose engine answers nothing but bad rows, so that what it would have computed with is all that counts."""
    from pagefleet.runtime import llm

    monkeypatch.setattr(llm.LLM, "from_config", classmethod(lambda cls, config: pytest.fail("nothing to compute")))
    monkeypatch.setattr(host, "has_fast_bf16", lambda: True)
    (work_folder / "in.jsonl").write_text("not JSON\n")
    command = ["batch", "backend=cpu", "hardware=auto", "model.path=m", "job.input=in.jsonl", "job.output=out.jsonl"]
    assert cli.main(command) == 3
    return command


def test_the_fingerprint_names_what_was_chosen_and_not_what_was_asked(finished_job, work_folder):
    shaping = json.loads((work_folder / "out.jsonl.summary.json").read_text())["fingerprint"]["shaping"]
    assert (shaping["backend"], shaping["precision"], shaping["cache.dtype"]) == ("cpu", "bf16", "bf16")
    assert "auto" not in shaping.values()


def test_a_job_goes_on_where_auto_chooses_the_same_and_is_refused_where_it_does_not(finished_job, monkeypatch, capsys):
    assert cli.main(finished_job) == 3
    assert "nothing to compute" in capsys.readouterr().err
    assert cli.main([*finished_job, "precision=bf16"]) == 3
    monkeypatch.setattr(host, "has_fast_bf16", lambda: False)
    assert cli.main(finished_job) == 2
    said = capsys.readouterr().err
    assert "precision was 'bf16', is 'fp32'" in said
    assert "cache.dtype was 'bf16', is 'fp32'" in said
    assert cli.main([*finished_job, "precision=bf16"]) == 3


def test_a_job_is_refused_on_another_backend(finished_job, capsys):
    assert cli.main([*finished_job, "backend=reference", "precision=bf16"]) == 2
    assert "backend was 'cpu', is 'reference'" in capsys.readouterr().err
