"""ONNX Runtime GenAI's engine on the CPU, in static batches: what its models with plain caches allow.

It runs models in its own format: `python -m onnxruntime_genai.models.builder -i DIR -o CONVERTED -p int4 -e cpu` makes
one (it needs torch, transformers, onnx and onnx_ir beside it).

options: "converted", the folder of the converted model (required).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
from protocol import serve


class StaticBatches:
    """The engine with room for every sequence in one batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        options = settings["options"]
        if "converted" not in options:
            raise ValueError("ortgenai: expected the option converted=FOLDER, made by onnxruntime_genai.models.builder")
        folder = Path(options["converted"])
        session = {"intra_op_num_threads": settings["threads"]}
        changes = {
            "engine": {"static_batching": {"max_batch_size": settings["max_sequences"]}},
            "model": {"decoder": {"session_options": session}},
        }
        config = og.Config(str(folder))
        config.overlay(json.dumps(changes))
        self.model = og.Model(config)
        self.engine = og.Engine(self.model)
        self.facts = {
            "engine": "onnxruntime-genai",
            "version": og.__version__,
            "settings": f"{folder.name}, static batches of {settings['max_sequences']}",
        }

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `protocol.Engine.run`; its `min_generated_tokens` masks the end of sequence."""
        started = time.perf_counter()
        requests = [self._begin(prompt, new) for prompt in prompts]
        made: list[list[int]] = [[] for _ in prompts]
        events = self.engine.create_event_buffer(4 * len(prompts))
        while self.engine.has_pending_requests():
            for event in self.engine.run(events) or ():
                if event.error_code != og.EngineErrorCode.NONE:
                    raise RuntimeError(f"the engine answered {event.error_code}")
                if event.flags.value & og.EngineEventFlags.TOKEN.value:
                    made[requests.index(event.request)].append(int(event.token))
        seconds = time.perf_counter() - started
        for request in requests:
            request.close()
        return {"seconds": seconds, "token_ids": made}

    def _begin(self, prompt: list[int], new: int) -> Any:
        options = og.RequestOptions()
        options.set_max_session_tokens(len(prompt) + new)
        request = self.engine.create_request(options=options)
        turn = og.TurnOptions(request)
        turn.set_do_sample(False)
        turn.set_max_generated_tokens(new)
        turn.set_min_generated_tokens(new)
        request.begin_turn(np.array(prompt, dtype=np.int32), turn)
        return request


if __name__ == "__main__":
    serve(StaticBatches)
