"""Pagefleet's runtime. `LLM` is imported when first asked for, so that configuration needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefleet.runtime.outputs import CompletionOutput, RequestOutput
from pagefleet.runtime.sampling_params import SamplingParams, StructuredOutput
from pagefleet.runtime.startup import no_collection, spin_briefly_at_barriers

if TYPE_CHECKING:
    from pagefleet.runtime.llm import LLM

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        spin_briefly_at_barriers()
        with no_collection():
            from pagefleet.runtime.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
