"""transformers as most people run it: one static batch, padded on the left; also the naive baselines.

options: "cache" is "contiguous" (DynamicCache, the default), "static" (StaticCache) or "none" (every token computes
the whole sequence again); "dtype" is "bf16" (default) or "fp32".
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from protocol import serve
from transformers import AutoModelForCausalLM

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class StaticBatch:
    """All prompts in one padded batch, until every one has its new tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        options = {"cache": "contiguous", "dtype": "bf16", **settings["options"]}
        torch.set_num_threads(settings["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=_DTYPES[options["dtype"]]).eval()
        self.model.generation_config.eos_token_id = None
        self.cache = options["cache"]
        self.facts = {
            "engine": "transformers",
            "version": transformers.__version__,
            "settings": f"{options['dtype']}, static batch, cache {self.cache}, torch {torch.__version__}",
        }

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `protocol.Engine.run`; without streaming only the whole batch's time is known."""
        longest = max(len(p) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        started = time.perf_counter()
        cache = {"contiguous": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                **cache[self.cache],
            )
        return {"seconds": time.perf_counter() - started, "token_ids": out[:, longest:].tolist()}


if __name__ == "__main__":
    serve(StaticBatch)
