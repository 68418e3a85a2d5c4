"""LLM: the Python API. Loads a model onto a backend and answers prompts in input order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagefleet.backends.base import KVGroup
from pagefleet.runtime.cache.manager import CacheManager
from pagefleet.runtime.choices import create_backend
from pagefleet.runtime.config import (
    BackendConfig,
    CacheConfig,
    Config,
    ModelConfig,
    PrecisionConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from pagefleet.runtime.engine import Engine
from pagefleet.runtime.errors import ConfigError, ErrorCode, RequestError
from pagefleet.runtime.memory_plan import GroupBudget, kv_blocks_that_fit
from pagefleet.runtime.model.load import resolve_checkpoint
from pagefleet.runtime.model.open import open_checkpoint
from pagefleet.runtime.model.quantize import Quantization
from pagefleet.runtime.outputs import RequestOutput
from pagefleet.runtime.runner import Runner
from pagefleet.runtime.sampling_params import SamplingParams
from pagefleet.runtime.startup import no_collection
from pagefleet.runtime.text.chat import render_chat
from pagefleet.runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "messages", "cache_salt"}


class LLM:
    """A model, ready to generate.

    Args:
        model: checkpoint folder, GGUF file or hub id.
        backend: "auto" or a backend's name.
        dtype: "auto", "fp32", "bf16" or "fp16", or a scheme of linear layers: "w8a8", "w8a16" or "w4a16".
        max_model_len: longest sequence in tokens; None for the model's own limit.
        block_size: tokens per KV block.
        kv_cache_dtype: "auto" (the compute dtype) or a dtype that the backend can keep.
        kv_cache_memory_bytes: size of the KV pools; None for `memory_fraction` of what is free after loading.
        num_kv_blocks: blocks per pool, overriding both.
        max_num_seqs, max_num_batched_tokens: sequences and tokens of one step.
        exact: a request's tokens are bit-identical whatever runs beside it.
        seed: of requests that name none.
        lowering: "auto" runs models that are understood as fused operations, "off" as transformers wrote them.
        speculation: "none", or "ngram": guess tokens from earlier places of the same text; changes no token. A
            `SpeculationConfig` sets its thresholds too.

    Raises:
        ConfigError, ModelError, BackendError: what was wrong, before anything runs.
    """

    def __init__(
        self,
        model: str,
        *,
        backend: str = "auto",
        dtype: str = "auto",
        tokenizer: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
        memory_fraction: float = 0.8,
        num_kv_blocks: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        exact: bool = False,
        seed: int = 0,
        threads: int | None = None,
        lowering: str = "auto",
        speculation: str | SpeculationConfig = "none",
    ) -> None:
        memory = None if kv_cache_memory_bytes is None else str(kv_cache_memory_bytes)
        self._load(
            Config(
                model=ModelConfig(str(model), revision, tokenizer, max_model_len, trust_remote_code, lowering),
                backend=BackendConfig(backend, threads),
                precision=PrecisionConfig(dtype, exact),
                cache=CacheConfig(
                    dtype=kv_cache_dtype,
                    block_size=block_size,
                    memory=memory,
                    memory_fraction=memory_fraction,
                    num_blocks=num_kv_blocks,
                    prefix_caching=enable_prefix_caching,
                ),
                scheduler=SchedulerConfig(
                    max_batched_tokens=max_num_batched_tokens,
                    max_sequences=min(max_num_seqs, max_num_batched_tokens),
                ),
                speculation=SpeculationConfig(speculation) if isinstance(speculation, str) else speculation,
                seed=seed,
            )
        )

    @classmethod
    def from_config(cls, config: Config) -> LLM:
        """An LLM with everything a `Config` can say."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    @no_collection()
    def _load(self, config: Config) -> None:
        if not config.model.path:
            raise ConfigError("model.path: expected a checkpoint folder, a .gguf file or a hub id, got nothing")
        self.backend, config = create_backend(config)
        self.config = config
        self.dtype, self.kv_dtype = config.precision.compute, config.cache.dtype
        folder = resolve_checkpoint(config.model.path, config.model.revision)
        self.tokenizer = Tokenizer.load(
            config.model.tokenizer or folder, trust_remote_code=config.model.trust_remote_code
        )
        self.model = open_checkpoint(
            folder,
            self.dtype,
            self.backend,
            exact=config.precision.exact,
            trust_remote_code=config.model.trust_remote_code,
            max_len=config.model.max_len,
            lowering=config.model.lowering,
            quantization=Quantization(config.precision.scheme, config.precision.quantize_head),
        )
        groups = self.model.kv_groups(config.cache.block_size, self.kv_dtype)
        num_blocks = self._num_blocks(groups)
        cache = CacheManager(
            [g.window for g in groups],
            num_blocks,
            config.cache.block_size,
            prefix_caching=config.cache.prefix_caching,
            identity=f"{folder}:{self.dtype}:{config.precision.scheme}:{self.kv_dtype}",
        )
        self.engine = Engine(
            Runner(self.model, self.backend, groups, num_blocks),
            cache,
            config.scheduler,
            self.tokenizer,
            max_len=self.model.max_len,
            device=self.backend.capabilities().device,
            seed=config.seed,
            speculation=config.speculation,
        )
        self._numbers = itertools.count()

    def _num_blocks(self, groups: tuple[KVGroup, ...]) -> list[int]:
        cache, scheduler = self.config.cache, self.config.scheduler
        if cache.num_blocks is not None:
            return [cache.num_blocks] * len(groups)
        free = self.backend.memory().free
        budget = cache.memory_bytes if cache.memory_bytes is not None else int(free * cache.memory_fraction)
        if budget > free:
            raise ConfigError(f"cache.memory: {budget} bytes asked for, {free} are free; lower it")
        fit = kv_blocks_that_fit(
            budget,
            [GroupBudget(self.backend.block_bytes(g), g.window) for g in groups],
            cache.block_size,
            max_len=self.model.max_len,
            max_sequences=scheduler.max_sequences,
            max_batched_tokens=scheduler.max_batched_tokens,
        )
        if not fit.blocks:
            raise ConfigError(f"cache.memory: {budget} bytes hold not even one block of each KV group; raise it")
        log.info("KV cache: %d tokens in %d bytes", fit.tokens, fit.pool_bytes)
        return list(fit.blocks)

    # -- all at once ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, in input order. A bad prompt gives an output with `error` set; the others are unaffected.

        A prompt is a string, a list of token ids, or a dict with `prompt`, `prompt_token_ids` or `messages`.

        Raises:
            ValueError: the numbers of prompts and of parameters differ.
        """
        outputs = dict(self.iterate(prompts, params))
        return [outputs[i] for i in sorted(outputs)]

    def iterate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but gives (index of the prompt, output) as they finish. Leaving early aborts the rest."""
        listed = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
        if len(each) != len(listed):
            raise ValueError(f"params: expected one for each of {len(listed)} prompts, got {len(each)}")
        ids = {f"generate-{next(self._numbers)}": i for i in range(len(listed))}
        for request_id, prompt, one in zip(ids, listed, each, strict=True):
            self.submit(request_id, prompt, one)
        try:
            while ids:
                for output in self.step():
                    if output.request_id in ids:
                        yield ids.pop(output.request_id), output
        finally:
            for request_id in ids:
                self.abort(request_id)

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of message dicts) or several (a list of such lists)."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        return self.generate([{"messages": m} for m in conversations], params)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float | None]]:
        """Log-probability of every prompt token given those before it; the first is None.

        Raises:
            RequestError: a prompt cannot be scored.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        scores = []
        for output in self.generate(prompts, params):
            if output.error is not None:
                raise RequestError(output.error.code, output.error.message)
            positions = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
            scores.append([None if listed is None else listed[token].logprob for token, listed in positions])
        return scores

    # -- one at a time -------------------------------------------------------------------------------------------

    def submit(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a request; a bad prompt comes back from `step` as an output with `error` set."""
        text: str | None = None
        ids: list[int] = []
        try:
            text, ids, salt = self._encoded(prompt)
        except RequestError as error:
            self.engine.reject(request_id, prompt if isinstance(prompt, str) else None, ids, error)
            return
        self.engine.add(request_id, text, ids, params, salt)

    def step(self, more_expected: bool = False) -> list[RequestOutput]:
        """Run one engine step; the requests that ended in it."""
        return self.engine.step(more_expected)

    @property
    def has_unfinished(self) -> bool:
        """True while `step` has something to do or to give."""
        return self.engine.has_unfinished

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet given back."""
        return self.engine.num_unfinished

    def abort(self, request_id: str) -> bool:
        """Stop a request; its output comes from the next `step`. False if there is none of that id."""
        return self.engine.abort(request_id)

    def metrics(self) -> dict[str, Any]:
        """Measures since the engine was made; see runtime/metrics.py."""
        cache, capabilities = self.engine.cache, self.backend.capabilities()
        return {
            **self.engine.metrics.as_dict(),
            "kv_hit_rate": cache.hit_tokens / cache.queried_tokens if cache.queried_tokens else 0.0,
            "kv_utilization_now": cache.utilization(),
            "fault_rate": cache.failed_reservations / cache.reservations if cache.reservations else 0.0,
            "preemptions": self.engine.scheduler.num_preemptions,
            "running": len(self.engine.scheduler.running),
            "waiting": len(self.engine.scheduler.waiting),
            "peak_memory_bytes": _peak_memory_bytes(),
            "backend": capabilities.name,
            "isa": capabilities.isa,
            "kernels": dict(capabilities.kernels),
            "execution": self.model.execution,
            "dtype": self.dtype,
            "scheme": self.config.precision.scheme,
            "kv_dtype": self.kv_dtype,
        }

    def close(self) -> None:
        """Drop unfinished requests; the object must not be used afterwards."""
        for request_id in list(self.engine.request_ids):
            self.abort(request_id)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """Text (if any), token ids and cache salt of a prompt. Raises RequestError."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(ErrorCode.EMPTY_PROMPT, "the prompt is an empty string; expected some text")
            return prompt, self.tokenizer.encode(prompt), ""
        if isinstance(prompt, Mapping):
            return self._encoded_mapping(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            ids = [t for t in prompt if isinstance(t, int) and not isinstance(t, bool)]
            if len(ids) != len(prompt):
                raise RequestError(ErrorCode.INVALID_TYPE, "a prompt list holds token ids; expected only integers")
            return None, ids, ""
        kind = type(prompt).__name__
        raise RequestError(ErrorCode.INVALID_TYPE, f"prompt: expected a string, token ids or a dict, got {kind}")

    def _encoded_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int], str]:
        unknown = set(prompt) - _PROMPT_KEYS
        if unknown:
            allowed = ", ".join(sorted(_PROMPT_KEYS))
            raise RequestError(ErrorCode.UNKNOWN_FIELD, f"prompt: unknown {sorted(unknown)}; allowed: {allowed}")
        given = [k for k in ("prompt", "prompt_token_ids", "messages") if prompt.get(k) is not None]
        salt = prompt.get("cache_salt") or ""
        if given == ["messages"]:
            text, ids = render_chat(self.tokenizer, prompt["messages"])
            return text, ids, salt
        if "messages" in given or not given:
            message = f"prompt: expected one of prompt, prompt_token_ids, messages; got {given or 'none'}"
            raise RequestError(ErrorCode.MISSING_FIELD, message)
        encoded, ids, _ = self._encoded(prompt[given[-1]])
        return prompt.get("prompt", encoded), ids, salt


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(t, int) and not isinstance(t, bool) for t in listed):
        return [listed]  # one prompt of token ids
    return listed


def _peak_memory_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
