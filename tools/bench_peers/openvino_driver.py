"""OpenVINO GenAI's continuous batching pipeline on the CPU, prefix caching on, steps of up to 2048 tokens.

It runs models in its own format: `optimum-cli export openvino --model DIR --task text-generation-with-past
--weight-format fp16 CONVERTED` makes one (package optimum-intel). Its KV cache is 8-bit unless told otherwise.

options: "converted", the folder of the converted model (required); "kv", for its KV_CACHE_PRECISION ("u8" by default).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai
from protocol import serve


class ContinuousBatching:
    """The pipeline with a cache that holds all sequences at once."""

    def __init__(self, settings: dict[str, Any]) -> None:
        options = {"kv": "u8", **settings["options"]}
        if "converted" not in options:
            raise ValueError("openvino: expected the option converted=FOLDER, made by optimum-cli export openvino")
        folder = Path(options["converted"])
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = max(settings["max_sequences"], 1)
        scheduler.enable_prefix_caching = True
        config = json.loads((folder / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 2
        scheduler.cache_size = settings["kv_tokens"] * token_bytes // 2**30 + 1  # GiB
        properties = {
            "INFERENCE_NUM_THREADS": settings["threads"],
            "KV_CACHE_PRECISION": options["kv"],
            "PERFORMANCE_HINT": "THROUGHPUT",
            "NUM_STREAMS": 1,
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self.facts = {
            "engine": "openvino-genai",
            "version": openvino_genai.__version__.partition("-")[0],
            "settings": f"{folder.name}, KV {options['kv']}, 2048 tokens a step",
        }

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `protocol.Engine.run`."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        inputs = [ov.Tensor(np.array([p], dtype=np.int64)) for p in prompts]
        started = time.perf_counter()
        results = self.pipeline.generate(inputs, [config] * len(prompts))
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "token_ids": [list(r.m_generation_ids[0]) for r in results]}


if __name__ == "__main__":
    serve(ContinuousBatching)
