"""Models with random weights: of real shapes, made on the card, and tiny ones as checkpoints."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pagefleet.backends.base import Backend, KVGroup
from pagefleet.runtime.model.open import open_module

from .machine import Machine

ROOT = Path(__file__).resolve().parents[2]
_COMMON = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 40960}
# As Llama 3.2 1B and Llama 3.1 8B; and what the interpreter can bear
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "dry": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "tie_word_embeddings": False,
        "max_position_embeddings": 128,
    },
}  # fmt: skip


def random_module(machine: Machine, name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A transformers model of a shape, its weights drawn on the card as transformers draws them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**_COMMON, **SHAPES[machine.pick(name, "dry")]}
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with torch.device(machine.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()


@dataclass(frozen=True)
class Opened:
    """A model on its backend, and what a step of it must read.

    Attributes:
        weight_bytes: of the products that each step goes through, the head among them, the embedding not.
        product_weights: elements of the layers' products, the head left out: it runs for one row of a prompt.
        kv_token_bytes: keys and values of one token in a dtype.
    """

    model: Any
    backend: Backend
    weight_bytes: int
    product_weights: int
    num_heads: int

    def groups(self, block_size: int, kv_dtype: str) -> tuple[KVGroup, ...]:
        """The KV groups that its pools are for."""
        return self.model.kv_groups(block_size, kv_dtype)

    def kv_token_bytes(self, block_size: int, kv_dtype: str) -> float:
        """Bytes of one token's keys and values in all layers, scales included."""
        return sum(self.backend.block_bytes(group) / block_size for group in self.groups(block_size, kv_dtype))


def open_random(machine: Machine, name: str, **extra: Any) -> Opened:
    """A random model of a shape in bf16 (fp32 when dry), lowered and self-tested as a checkpoint would be."""
    module = random_module(machine, name, machine.pick(torch.bfloat16, torch.float32))
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.dim() == 2}
    products = sum(count for name, count in sizes.items() if "embed" not in name and "lm_head" not in name)
    config, bytes_each = module.config, module.dtype.itemsize
    weight_bytes = (products + config.vocab_size * config.hidden_size) * bytes_each
    backend = machine.backend(**extra)
    return Opened(open_module(module, backend), backend, weight_bytes, products, config.num_attention_heads)


# -- checkpoints, for whole engines ----------------------------------------------------------------------------------


@contextmanager
def checkpoint(module: Any, vocab_size: int) -> Iterator[Path]:
    """A folder with a model and a tokenizer of one word an id; gone afterwards."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory(prefix="pagefleet-device-check-") as folder:
        module.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1").save_pretrained(folder)
        yield Path(folder)


def tiny_module(family: str, **changes: Any) -> Any:
    """A tiny random model of a family, its weights spread so that greedy tokens vary: those of the tests."""
    spec = importlib.util.spec_from_file_location("pagefleet_tests_tiny", ROOT / "tests" / "models" / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    return tiny.tiny_model(family, seed=3, **changes)
