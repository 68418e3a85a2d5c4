"""The quality gate: it measures what differs, passes what is the same, and fails what is worse."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pagefleet.backends.base import Backend
from pagefleet.runtime import cli
from pagefleet.runtime.config import GateConfig
from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.gate import Trace, compare, read_text, trace
from pagefleet.runtime.home import home_folder
from pagefleet.runtime.model.open import open_module


def _trace(tokens: int = 6, layers: int = 2) -> Trace:
    generator = torch.Generator().manual_seed(1)
    outputs = [torch.randn(tokens + 1, 8, generator=generator) for _ in range(layers)]
    return Trace(torch.full((tokens,), -1.0, dtype=torch.float64), torch.arange(tokens), outputs)


def test_a_model_equal_to_the_baseline_passes_the_strictest_bounds() -> None:
    report = compare(_trace(), _trace(), GateConfig(max_perplexity_increase=0.0, min_top1_agreement=1.0))
    assert report["passed"]
    assert report["failed"] == []
    assert report["perplexity_increase"] == 0.0
    assert report["layer_cosine"]["lowest"] == pytest.approx(1.0)


def test_each_bound_fails_by_itself_and_is_named() -> None:
    base, bounds = _trace(), GateConfig()
    worse = Trace(base.logprobs - 0.1, base.best, base.layers)
    assert compare(base, worse, bounds)["failed"] == ["perplexity_increase"]
    other = Trace(base.logprobs, base.best.roll(1), base.layers)
    assert compare(base, other, bounds)["failed"] == ["top1_agreement"]
    turned = Trace(base.logprobs, base.best, [base.layers[0], base.layers[1].roll(1, -1)])
    report = compare(base, turned, bounds)
    assert report["failed"] == ["layer_cosine"]
    assert report["layer_cosine"]["layer"] == 1


def test_nan_keeps_no_bound() -> None:
    base = _trace()
    broken = Trace(base.logprobs * torch.nan, base.best, [base.layers[0], base.layers[1] * torch.nan])
    report = compare(base, broken, GateConfig())
    assert report["failed"] == ["perplexity_increase", "layer_cosine"]
    assert report["layer_cosine"]["layer"] == 1


def test_a_trace_holds_what_the_model_says_of_each_token_and_every_layers_output(
    tiny_model: Any, backend: Backend
) -> None:
    module = tiny_model("llama")
    generator = torch.Generator().manual_seed(3)
    passages = [torch.randint(2, 96, (n,), generator=generator).tolist() for n in (70, 5)]
    wanted, hidden = [], []
    with torch.inference_mode():
        for ids in passages:
            out = module(torch.tensor([ids]), output_hidden_states=True)
            hidden.append(out.hidden_states[1][0])  # of the first layer
            logits = out.logits[0].double()
            wanted.append(torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    got = trace(open_module(module, backend), passages, "fp32")
    assert len(got.layers) == 3
    assert len(got.logprobs) == len(got.best) == 69 + 4
    first, second = wanted
    torch.testing.assert_close(got.logprobs, torch.cat([first[:64], second, first[64:]]), atol=1e-4, rtol=1e-4)
    in_steps = torch.cat([hidden[0][:64], hidden[1], hidden[0][64:]])
    torch.testing.assert_close(got.layers[0], in_steps, atol=1e-4, rtol=1e-4)


def test_a_damaged_model_is_told_from_the_baseline(tiny_model: Any, backend: Backend) -> None:
    passages = [list(range(2, 60))]
    base = trace(open_module(tiny_model("llama"), backend), passages, "fp32")
    module = tiny_model("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(-1)
    report = compare(base, trace(open_module(module, backend), passages, "fp32"), GateConfig())
    assert not report["passed"]
    assert report["layer_cosine"]["layer"] >= 1
    assert report["layer_cosine"]["all"][0] == pytest.approx(1.0)


def test_the_shipped_text_has_passages_and_another_is_read_from_a_file(tmp_path: Any) -> None:
    assert len(read_text(None)) >= 5
    (tmp_path / "mine.txt").write_text("one\n---\ntwo\n---\n", encoding="utf-8")
    assert read_text(str(tmp_path / "mine.txt")) == ["one", "two"]


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="expected a file of UTF-8 text"):
        read_text(str(tmp_path / "absent.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="expected a file of UTF-8 text"):
        read_text(str(tmp_path / "latin.txt"))
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected some text"):
        read_text(str(tmp_path / "empty.txt"))


def test_the_command_passes_bf16_on_a_real_model_and_fails_an_impossible_bound(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = home_folder() / "models" / "smollm2-135m-instruct"
    if not model.is_dir():
        pytest.skip("not fetched: python tools/fetch_models.py smollm2")
    (tmp_path / "text.txt").write_text(read_text(None)[0][:300], encoding="utf-8")
    arguments = [
        "gate",
        f"model.path={model}",
        "precision=bf16",
        f"gate.text={tmp_path / 'text.txt'}",
        "gate.json=true",
    ]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["baseline"]["dtype"], report["candidate"]["dtype"]) == ("fp32", "bf16")
    assert report["perplexity"]["baseline"] < 100
    assert len(report["layer_cosine"]["all"]) == 30
    assert cli.main([*arguments, "gate.min_layer_cosine=1.0"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["layer_cosine"]
