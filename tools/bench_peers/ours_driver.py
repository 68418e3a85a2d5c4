"""Pagefleet itself, through the same door as its peers."""

from __future__ import annotations

from typing import Any

from protocol import serve

from pagefleet.runtime import LLM
from pagefleet.runtime.bench.measure import drive, latencies


class Ours:
    """options: "precision" and "kv", as the keys precision and cache.dtype; "auto" by default."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from pagefleet.runtime.compose import load_config

        options = {"precision": "auto", "kv": "auto", **settings["options"]}
        overrides = [
            f"model.path={settings['model']}",
            f"model.max_len={settings['max_len']}",
            f"precision={options.pop('precision')}",
            f"cache.dtype={options.pop('kv')}",
            f"cache.num_blocks={-(-settings['kv_tokens'] // 16) + settings['max_sequences'] + 1}",
            f"backend.threads={settings['threads']}",
            *(f"{key}={value}" for key, value in options.items()),
        ]
        self.llm = LLM.from_config(load_config(overrides, "bench"))
        facts = self.llm.metrics()
        self.facts = {
            "engine": "pagefleet",
            "version": "this checkout",
            "settings": f"{facts['dtype']}, KV {facts['kv_dtype']}, {facts['backend']} ({facts['isa']})",
            "kernels": facts["kernels"],
        }
        self.count = 0

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `protocol.Engine.run`, with percentiles of latencies."""
        self.count += 1
        run = drive(self.llm, prompts, new, f"run-{self.count}")
        failed = [o.error.message for o in run.outputs if o.error is not None]
        if failed:
            raise RuntimeError(failed[0])
        by_number = sorted(run.outputs, key=lambda o: int(o.request_id.rpartition("-")[2]))
        cached = sum(o.num_cached_tokens for o in run.outputs) / sum(len(p) for p in prompts)
        return {
            "seconds": run.seconds,
            "token_ids": [o.outputs[0].token_ids for o in by_number],
            "kv_hit_rate": cached,
            "step_overhead": self.llm.metrics()["step_overhead"],
            **latencies(run.outputs),
        }


if __name__ == "__main__":
    serve(Ours)
