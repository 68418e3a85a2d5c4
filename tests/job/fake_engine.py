"""A deterministic engine without a model: answers after a few steps, in scrambled order, and logs what it computed."""

from __future__ import annotations

import random
from pathlib import Path

from pagefleet.runtime.errors import ErrorCode
from pagefleet.runtime.outputs import CompletionOutput, Logprob, OutputError, RequestOutput


class FakeEngine:
    """Same submissions, same steps, same outputs.

    Args:
        log: file that gets the request id of everything computed, one a line, before it is handed out.
        max_prompt: longer prompts (in characters or ids) come back with PROMPT_TOO_LONG.
        fail_at_step: raise RuntimeError in this step.
    """

    def __init__(self, log: Path | None = None, max_prompt: int = 1000, fail_at_step: int | None = None) -> None:
        self._log = log
        self._max_prompt = max_prompt
        self._fail_at_step = fail_at_step
        self._waiting: dict[str, tuple[int, RequestOutput]] = {}
        self._random = random.Random(0)
        self.steps = 0
        self.peak = 0
        self.closed = False
        self.aborted: list[str] = []
        self.params: dict[str, object] = {}
        self.prompts: dict[str, object] = {}
        self.keep = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    def submit(self, request_id, prompt, params) -> None:
        assert request_id not in self._waiting
        if self.keep:
            self.params[request_id], self.prompts[request_id] = params, prompt
        self._waiting[request_id] = (self.steps + self._random.randint(1, 5), self._answer(request_id, prompt, params))
        self.peak = max(self.peak, len(self._waiting))

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        if self.steps == self._fail_at_step:
            raise RuntimeError("the device fell over")
        ready = [name for name, (due, _) in self._waiting.items() if due <= self.steps]
        self._random.shuffle(ready)
        outputs = [self._waiting.pop(name)[1] for name in ready]
        if self._log is not None and ready:
            with self._log.open("a") as file:
                file.write("".join(f"{name}\n" for name in ready))
        return outputs

    def abort(self, request_id) -> None:
        self._waiting.pop(request_id, None)
        self.aborted.append(request_id)

    def metrics(self) -> dict:
        return {"output_tokens_per_s": 10.0, "kv_hit_rate": 0.5, "block_utilization": 0.25, "preemptions": 0}

    def close(self) -> None:
        self.closed = True

    def _answer(self, request_id, prompt, params) -> RequestOutput:
        text = _text(prompt)
        ids = [ord(c) % 97 for c in text]
        if text.startswith("REFUSE"):
            return _refused(request_id, ErrorCode.CHAT_TEMPLATE, "the template refuses this role")
        if len(text) > self._max_prompt:
            return _refused(request_id, ErrorCode.PROMPT_TOO_LONG, f"{len(text)} tokens, {self._max_prompt} fit")
        outputs = []
        for index in range(params.n):
            answer = f"{text[::-1]}/{index}"
            token_ids = [ord(c) for c in answer][: params.max_tokens]
            logprobs = None
            if params.logprobs is not None:
                logprobs = [{t: Logprob(-0.5, 1, chr(t)), t + 1: Logprob(-float("inf"), 2, "é")} for t in token_ids]
            outputs.append(CompletionOutput(index, answer, token_ids, -1.0, logprobs, "stop", None))
        return RequestOutput(request_id, text, ids, outputs, num_cached_tokens=len(ids) // 2)


def _text(prompt) -> str:
    if "messages" in prompt:
        return "".join(f"{m['role']}:{m['content']};" for m in prompt["messages"])
    if "prompt_token_ids" in prompt:
        return ",".join(map(str, prompt["prompt_token_ids"]))
    return prompt["prompt"]


def _refused(request_id, code, message) -> RequestOutput:
    return RequestOutput(request_id, None, [], [], error=OutputError(code, message))
