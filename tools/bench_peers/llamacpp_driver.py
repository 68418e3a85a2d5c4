"""llama.cpp through llama-cpp-python's low-level interface: parallel sequences, each with a stream of its own.

options: "gguf", the model file (required); "quant", "bf16" (default), "f16", "q8_0" or "q4_0", into which the file is
converted beside it, once; "flash", "on" (default) or "off". A shared prefix is computed once and its cache copied to
every sequence, as llama.cpp's own batched benchmark does.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from protocol import serve

_FILE_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # llama_ftype
_BATCH = 2048


def _converted(source: Path, quant: str) -> Path:
    target = source.with_name(f"{source.stem}.bench-{quant}.gguf")
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = _FILE_TYPES[quant], True
        made = target.with_suffix(f".{os.getpid()}")
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(made).encode(), ctypes.byref(params))
        if failed:
            raise RuntimeError(f"llama_model_quantize gave {failed}")
        made.rename(target)
    return target


class ParallelSequences:
    """A context with room for every sequence; greedy choices by numpy over the logits of a step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        options = {"quant": "bf16", "flash": "on", **settings["options"]}
        if "gguf" not in options:
            raise ValueError("llamacpp: expected the option gguf=FILE")
        llama_cpp.llama_backend_init()
        self.file = _converted(Path(options["gguf"]), options["quant"])
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(self.file).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"cannot load {self.file.name}")
        self.settings, self.flash = settings, options["flash"] == "on"
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.facts = {
            "engine": "llama.cpp",
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "settings": f"{options['quant']}, KV f16, flash attention {options['flash']}, a stream each",
        }

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `protocol.Engine.run`; making the context is not part of the time."""
        context = self._context(len(prompts), max(len(p) for p in prompts) + new)
        try:
            started = time.perf_counter()
            tokens = self._generate(context, prompts, new)
            return {"seconds": time.perf_counter() - started, "token_ids": tokens}
        finally:
            llama_cpp.llama_free(context)

    def _context(self, sequences: int, length: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * -(-(length + 1) // 256) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = _BATCH, 512, sequences
        params.n_threads = params.n_threads_batch = self.settings["threads"]
        params.kv_unified = False
        params.flash_attn_type = 1 if self.flash else 0
        context = llama_cpp.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("llama_init_from_model failed")
        return context

    def _generate(self, context: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
        shared = self._compute_shared(context, prompts)
        queue = [
            (token, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
            if at >= shared
        ]
        made: list[list[int]] = [[] for _ in prompts]
        for sequence, token in self._decode(context, queue).items():
            made[sequence].append(token)
        for step in range(new - 1):
            queue = [(made[s][-1], len(p) + step, s, True) for s, p in enumerate(prompts)]
            for sequence, token in self._decode(context, queue).items():
                made[sequence].append(token)
        return made

    def _compute_shared(self, context: Any, prompts: list[list[int]]) -> int:
        """Compute what all prompts begin with, and copy it to every sequence; returns its length in tokens."""
        most = min(map(len, prompts)) - 1 if len(prompts) > 1 else 0
        shared = next((i for i in range(most) if any(p[i] != prompts[0][i] for p in prompts)), most)
        if shared:
            self._decode(context, [(token, at, 0, False) for at, token in enumerate(prompts[0][:shared])])
            memory = llama_cpp.llama_get_memory(context)
            for sequence in range(1, len(prompts)):
                llama_cpp.llama_memory_seq_cp(memory, 0, sequence, 0, -1)
        return shared

    def _decode(self, context: Any, queue: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token, position, sequence, wants a choice) in batches; the greedy choice of each sequence that wants."""
        chosen = {}
        for start in range(0, len(queue), _BATCH):
            part = queue[start : start + _BATCH]
            batch = llama_cpp.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wants) in enumerate(part):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = wants
            failed = llama_cpp.llama_decode(context, batch)
            llama_cpp.llama_batch_free(batch)
            if failed:
                raise RuntimeError(f"llama_decode gave {failed}")
            for i, (_, _, sequence, wants) in enumerate(part):
                if wants:
                    logits = llama_cpp.llama_get_logits_ith(context, i)
                    chosen[sequence] = int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())
        return chosen


if __name__ == "__main__":
    serve(ParallelSequences)
