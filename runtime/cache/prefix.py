"""Prefix hashes: chained SHA-256 over full blocks, the same in every process."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence


def root_hash(**what_makes_kv_differ: object) -> bytes:
    """Parent of a first block: covers whatever makes KV differ for the same tokens (model, dtype, adapter, salt)."""
    return hashlib.sha256(json.dumps(what_makes_kv_differ, sort_keys=True, default=str).encode()).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block whose predecessor's hash is `parent`."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, num_tokens: int) -> None:
    """Append to `hashes` the hashes of all full blocks among the first `num_tokens` tokens; never hashes one twice."""
    for index in range(len(hashes), num_tokens // block_size):
        parent = hashes[-1] if hashes else root
        hashes.append(block_hash(parent, token_ids[index * block_size : (index + 1) * block_size]))
