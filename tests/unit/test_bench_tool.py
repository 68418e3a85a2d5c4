"""tools/bench.py: engines in processes of their own that take turns, and what it says of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagefleet.runtime.text.tokenizer import Tokenizer

TOOLS = Path(__file__).parents[2] / "tools"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are stopped by POSIX signals")

FAKE = """
import sys
sys.path.insert(0, {folder!r})
from protocol import serve

class Fake:
    def __init__(self, settings):
        print("noise on standard output")
        self.extra = int(settings["options"].get("extra", 0))
        if settings["options"].get("broken"):
            raise ValueError("no such model")
        self.facts = {{"engine": "fake", "version": "1", "settings": f"{{settings['threads']}} threads"}}

    def run(self, prompts, new):
        return {{"token_ids": [[7] * (new + self.extra) for _ in prompts]}}

serve(Fake)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, with one peer more: `fake`, whose environment is this one."""
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("pagefleet_tool_bench", TOOLS / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "fake_driver.py").write_text(FAKE.format(folder=str(TOOLS / "bench_peers")))
    (tmp_path / "fake" / "bin").mkdir(parents=True)
    (tmp_path / "fake" / "bin" / "python").symlink_to(sys.executable)
    kind = type(module.OURS)(str(tmp_path / "fake_driver.py"))
    monkeypatch.setitem(module.PEERS, "fake", kind)
    return module


@pytest.fixture(scope="module")
def checkpoint(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench-tool-llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=byte_level.vocab_size, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_level.hf.save_pretrained(folder)
    return folder


def test_we_and_transformers_take_turns_on_the_same_prompts_and_agree(
    bench: ModuleType, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        f"--model {checkpoint} --small --runs 1 --no-floor --threads 1 --ours precision=fp32:backend=cpu".split()
    )
    file = tmp_path / "out" / "report.json"
    assert bench.main([*arguments, "--peer", "transformers:dtype=fp32", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    ours, theirs = (
        report["engines"]["pagefleet precision=fp32:backend=cpu"],
        report["engines"]["transformers dtype=fp32"],
    )
    assert set(report["workloads"]) == set(ours["workloads"]) == {"w1", "w2", "w3", "w4"}
    for name, result in ours["workloads"].items():
        assert result["times_the_first"] == 1.0
        assert result["peak_memory_bytes"] > 10 * 2**20
        assert result["time_to_first_token_s"]["p50"] <= result["seconds"]
        assert theirs["workloads"][name]["same_first_token"] == 1.0
    assert ours["workloads"]["w3"]["kv_hit_rate"] > 0.7
    assert str(tmp_path) not in file.read_text(), "a report names no folders"
    table = capsys.readouterr().out
    assert table.count("\n| ") == 2
    assert "median of 1 runs" in table


def test_an_engine_that_gives_too_few_or_many_tokens_is_not_measured(
    bench: ModuleType,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = f"--model {checkpoint} --small --no-floor --peer-envs {tmp_path} --workloads w2".split()
    all_of_them = bench._contenders
    monkeypatch.setattr(bench, "_contenders", lambda options, logs: all_of_them(options, logs)[1:])  # the fake alone
    assert bench.main([*arguments, "--peer", "fake", "--runs", "2"]) == 0
    assert "| fake | 1; " in capsys.readouterr().out
    assert bench.main([*arguments, "--peer", "fake:extra=1"]) == 1
    assert "fake extra=1: expected 8 tokens for each of 1 prompts, got [9]" in capsys.readouterr().err
    assert bench.main([*arguments, "--peer", "fake:broken=yes"]) == 1
    assert "fake broken=yes: ValueError: no such model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "nobody"], "no 'nobody'; expected one of transformers"),
        (["--peer", "vllm"], "make its environment with --set-up"),
        (["--workloads", "w1,w9"], "no w9"),
        (["--peer", "fake", "--peer", "fake"], "two engines are called the same"),
        (["--ours", "bf16"], "expected NAME:key=value"),
        (["--set-up", "nobody"], "no peer 'nobody'"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_error(
    bench: ModuleType,
    checkpoint: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["--model", str(checkpoint), "--small", "--no-floor", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_what_the_readme_says_about_measuring_is_what_the_tool_takes(bench: ModuleType) -> None:
    readme = (TOOLS.parent / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python tools/bench\.py (.*)$", readme, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        options = bench._arguments().parse_args(line.split())
        for text in options.peer:
            name, given = bench.parse(text)
            driver = (TOOLS / "bench_peers" / bench.PEERS[name].driver).read_text()
            assert all(f'"{key}"' in driver for key in given), text
        assert set((options.set_up or "vllm").split(",")) <= set(bench.PEERS)


def test_every_driver_is_there_and_tells_its_options(bench: ModuleType) -> None:
    for kind in (bench.OURS, *(kind for name, kind in bench.PEERS.items() if name != "fake")):
        text = (TOOLS / "bench_peers" / kind.driver).read_text()
        assert "options:" in text
        assert "serve(" in text
