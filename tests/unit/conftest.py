"""Small tokenizers trained here, so that text and sampling are tested without a model; tiny models that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from pagefleet.runtime import LLM
from pagefleet.runtime.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hey there, how are you today?",
    "안녕하세요 세계. 한국어 문장을 토큰으로 나눕니다.",
    "Emoji: 🌶 👩‍👩‍👧 🙂 and accents: café, naïve, Zürich.",
    '{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true, "none": null}',
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
] * 20

CHATML = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _wrapped(backend: Backend, bos: str, eos: str) -> PreTrainedTokenizerFast:
    specials = [bos, eos, "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    hf.chat_template = CHATML
    return hf


def _byte_level() -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend, "<|begin|>", "<|end|>")


def _byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma: pieces with U+2581 for spaces, bytes for what no piece covers."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        [line for line in CORPUS if line.isascii()], trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + sorted(trained.get_vocab(), key=trained.get_vocab().get)
    vocab = {"<unk>": 0} | {piece: i for i, piece in enumerate(pieces, start=1)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(backend, "<s>", "</s>")


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE (as GPT-2, Llama 3), with BOS and a ChatML template that refuses late system messages."""
    return Tokenizer(_byte_level())


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """A tokenizer whose decoder has byte fallback and strips the first space (as Llama 2, Gemma)."""
    return Tokenizer(_byte_fallback())


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the two kinds."""
    return request.getfixturevalue(request.param)


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _saved(module: Any, tokenizer: Tokenizer, folder: Path) -> str:
    torch.manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    module.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    ends = {"bos_token_id": byte_level.bos_token_id, "eos_token_id": byte_level.hf.eos_token_id}
    config = LlamaConfig(vocab_size=byte_level.vocab_size, num_hidden_layers=2, **SMALL, **ends)
    return _saved(LlamaForCausalLM(config), byte_level, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def windowed(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        vocab_size=byte_level.vocab_size, num_hidden_layers=4, layer_types=layers, sliding_window=8, head_dim=8, **SMALL
    )
    return _saved(Gemma3ForCausalLM(config), byte_level, tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def make() -> Iterator[Callable[..., LLM]]:
    """LLMs that must end without a leaked block."""
    made: list[LLM] = []

    def build(path: str, **options: Any) -> LLM:
        made.append(LLM(path, **{"num_kv_blocks": 200, "backend": "cpu", "dtype": "fp32", "threads": 1, **options}))
        return made[-1]

    yield build
    for llm in made:
        llm.close()
        llm.step()
        llm.engine.cache.check()
        assert all(pool.num_used == 0 for pool in llm.engine.cache.pools)
