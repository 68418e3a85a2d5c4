"""SamplingParams refuses what is impossible when it is made, and says what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from pagefleet.runtime import SamplingParams, StructuredOutput

IMPOSSIBLE: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", 10**400),
    ("top_p", 0.0),
    ("top_p", float("inf")),
    ("top_k", -2),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("presence_penalty", 2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0.0),
    ("stop", [""]),
    ("stop", 3),
    ("stop_token_ids", ["a"]),
    ("logprobs", -1),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: float("nan")}),
    ("allowed_token_ids", []),
    ("bad_words", "word"),
    ("ignore_eos", 1),
    ("structured", {"regex": "a"}),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        SamplingParams(**{name: value})


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_a_constraint_is_exactly_one_thing() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutput(regex="a", choice=("b",))
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutput()


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="x", top_k=-1, logit_bias={"3": 1})  # type: ignore[dict-item]
    assert (params.stop, params.top_k, params.logit_bias) == (("x",), 0, {3: 1.0})
