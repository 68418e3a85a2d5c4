"""Attention whose rows keep their bits whatever is computed beside them.

Scores are taken in tiles of fixed shape: `ROWS` query rows by `TOKENS` cached tokens that start at a multiple of
`TOKENS`, and a row walks the tiles in order with an online softmax (Milakov and Gimelshein, 2018). How a prompt was
chunked, what the block size is and which sequences share the step then only decide which tiles are computed together.
Head sizes are padded to a multiple of 16: for others the library's kernel treats rows differently by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..base import AttentionArgs
from .attention import Scratch, gather_kv
from .plan import CpuPlan, Gather, gather_blocks

ROWS = 16
TOKENS = 64
HEAD_ALIGNMENT = 16
_LOWEST = -1e30


@dataclass(frozen=True)
class Job:
    """Sequences computed together: one with several query tiles, or C with one tile each, shortest first.

    rows: int64 [C, n, ROWS] flat (token * G + head of the group) rows of the step, -1 for padding;
    at: int64 [C, n, ROWS] their positions (-1 for padding); base: position of the first tile's first token;
    skip: gathered tokens before `base`; visible: bool [C, L], L a multiple of TOKENS.
    """

    rows: torch.Tensor
    at: torch.Tensor
    gather: Gather
    base: int
    skip: int
    visible: torch.Tensor


def exact_attention(
    plan: CpuPlan, group: int, layer: int, query: torch.Tensor, args: AttentionArgs, scratch: Scratch
) -> torch.Tensor:
    """Attention of query [T, Hq, D]; returns [T, Hq, Dv], computed in float32."""
    keys, values = plan.pools[group].keys[layer], plan.pools[group].values[layer]
    kv_heads, heads_per_group = keys.shape[2], query.shape[1] // keys.shape[2]
    if query.shape[0] == 0:
        return query.new_zeros(0, query.shape[1], values.shape[-1])
    name = (group, args.window, heads_per_group)
    if name not in plan.exact_jobs:
        plan.exact_jobs[name] = _jobs(plan, group, args.window, heads_per_group)
    flat = _pad_heads(query.float()).view(query.shape[0], kv_heads, heads_per_group, -1)
    flat = flat.permute(1, 0, 2, 3).reshape(kv_heads, -1, flat.shape[-1])  # [Hkv, T * G, D]
    out = query.new_zeros(kv_heads, query.shape[0] * heads_per_group, values.shape[-1])
    for job in plan.exact_jobs[name]:
        real = job.rows >= 0
        mixed = _attend(job, keys, values, flat[:, job.rows.clamp(min=0)], args, scratch)
        out[:, job.rows[real]] = mixed[:, real][..., : values.shape[-1]].to(query.dtype)
    out = out.view(kv_heads, query.shape[0], heads_per_group, -1)
    return out.transpose(0, 1).reshape(query.shape[0], query.shape[1], -1)


def _pad_heads(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[-1] % HEAD_ALIGNMENT
    return F.pad(x, (0, missing)) if missing else x  # F.pad copies even where it adds nothing


def _jobs(plan: CpuPlan, group: int, window: int | None, heads_per_group: int) -> list[Job]:
    single: list[int] = []
    jobs = []
    for s in sorted(range(len(plan.lengths)), key=lambda s: plan.lengths[s]):
        queries = plan.starts[s + 1] - plan.starts[s]
        if queries * heads_per_group <= ROWS and window is None and queries:
            single.append(s)
        elif queries:
            jobs.append(_job(plan, group, [s], window, heads_per_group))
    for i in range(0, len(single), ROWS):
        jobs.append(_job(plan, group, single[i : i + ROWS], window, heads_per_group))
    return jobs


def _job(plan: CpuPlan, group: int, sequences: list[int], window: int | None, heads_per_group: int) -> Job:
    block_size = plan.pools[group].group.block_size
    rows, positions, oldest = [], [], 0
    for s in sequences:
        first, last, length = plan.starts[s], plan.starts[s + 1], plan.lengths[s]
        start = length - (last - first)
        oldest = 0 if window is None else max(0, start - window + 1)
        missing = -(last - first) * heads_per_group % ROWS
        own = torch.arange(first * heads_per_group, last * heads_per_group)
        at = torch.arange(start, length).repeat_interleave(heads_per_group)
        rows.append(F.pad(own, (0, missing), value=-1).view(-1, ROWS))
        positions.append(F.pad(at, (0, missing), value=-1).view(-1, ROWS))
    base = oldest // TOKENS * TOKENS
    ends = torch.tensor([plan.lengths[s] for s in sequences])
    skip, length = base % block_size, -(-(int(ends.max()) - base) // TOKENS) * TOKENS
    tables = plan.batch.groups[group].block_tables[torch.tensor(sequences)].long()
    starts = torch.full_like(ends, base)
    gather = gather_blocks(tables, starts, ends, -(-(skip + length) // block_size), block_size)
    visible = gather.visible[:, skip : skip + length]
    return Job(torch.stack(rows), torch.stack(positions), gather, base, skip, visible)


def _tokens(job: Job, cache: torch.Tensor, name: str, scratch: Scratch) -> torch.Tensor:
    """[Hkv, C, L, D] in float32, zero where nothing is visible."""
    gathered = gather_kv(job.gather, cache, name, scratch)
    return _pad_heads(gathered[:, :, job.skip : job.skip + job.visible.shape[1]].float())


def _attend(
    job: Job,
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    args: AttentionArgs,
    scratch: Scratch,
) -> torch.Tensor:
    """query [Hkv, C, n, ROWS, D] -> [Hkv, C, n, ROWS, Dv padded]."""
    k, v = _tokens(job, keys, "keys", scratch), _tokens(job, values, "values", scratch)
    kv_heads, sequences, tiles_per_sequence = query.shape[:3]
    entries = sequences * tiles_per_sequence
    query = query.reshape(kv_heads, entries, ROWS, -1)
    at = job.at.view(entries, ROWS, 1)
    newest = at.amax((1, 2)).tolist()  # ascending: shortest sequence first, or first query tile first
    oldest = torch.where(at >= 0, at, 1 << 60).amin((1, 2)).tolist()
    highest = query.new_full((kv_heads, entries, ROWS, 1), _LOWEST)
    total = torch.zeros_like(highest)
    if args.sinks is not None:
        highest, total = _sink_start(job, args.sinks, kv_heads, highest)
    mixed = query.new_zeros(kv_heads, entries, ROWS, v.shape[-1])
    for j in range(k.shape[2] // TOKENS):
        first_token = job.base + j * TOKENS
        tokens = torch.arange(first_token, first_token + TOKENS)
        begin = next((i for i in range(entries) if newest[i] >= first_token), entries)
        end = entries
        if args.window is not None:
            while end > begin and oldest[end - 1] - args.window + 1 >= first_token + TOKENS:
                end -= 1
        if begin >= end:
            continue
        seen = job.visible.view(sequences, -1, TOKENS)[:, j]
        seen = (seen if sequences > 1 else seen.expand(entries, -1))[begin:end, None, :]
        seen = seen & (tokens <= at[begin:end])
        if args.window is not None:
            seen = seen & (tokens > at[begin:end] - args.window)
        window = slice(begin, end)
        kj, vj = (x[:, :, j * TOKENS : (j + 1) * TOKENS].expand(-1, entries, -1, -1) for x in (k, v))
        scores = _product(query[:, window], kj[:, window].transpose(-1, -2)) * args.scale
        if args.softcap is not None:
            scores = args.softcap * torch.tanh(scores / args.softcap)
        scores = scores.masked_fill_(~seen, -torch.inf)
        raised = torch.maximum(highest[:, window], scores.amax(-1, keepdim=True))
        weights = scores.sub_(raised).exp_()
        fade = torch.exp(highest[:, window] - raised)
        total[:, window] = total[:, window] * fade + weights.sum(-1, keepdim=True)
        mixed[:, window] = mixed[:, window] * fade + _product(weights, vj[:, window])
        highest[:, window] = raised
    mixed = torch.where(total > 0, mixed / total, 0)
    return mixed.view(kv_heads, sequences, tiles_per_sequence, ROWS, -1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[Hkv, E, ROWS, x] times [Hkv, E, x, y], each matrix a product of its own; b may be expanded over E."""
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for head in range(a.shape[0]):
        torch.bmm(a[head], b[head], out=out[head])
    return out


def _sink_start(job: Job, sinks: torch.Tensor, kv_heads: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sink is a token seen before all others: its score is the first maximum, its weight exp(0) the first total."""
    per_head = sinks.float().view(kv_heads, -1)
    head = job.rows.clamp(min=0).view(1, -1, ROWS, 1) % per_head.shape[1]
    highest = per_head[:, head.reshape(-1)].view(like.shape).clone()
    return highest, torch.ones_like(highest)
