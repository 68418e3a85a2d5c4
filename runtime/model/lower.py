"""A transformers model, recognised layer by layer, as a `Decoder`.

`recognise` reads a trace and gives a specification whose linear layers are still the model's own weights; it computes
every traced layer again from the specification and compares, so nothing is given up for a layer that was misread.
`build` then takes the weights over, layer by layer, each freed in the model as the backend packs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagefleet.backends import host
from pagefleet.backends.base import AttentionArgs, Backend
from pagefleet.backends.ops import Linear, Norm

from .decoder import Decoder, Embedding, Experts, Head, Layer, Mixer, Mlp, Rotation, Step
from .layers import decoder_layers
from .layout import AttentionLayout
from .probe import AttentionCall
from .recognise import (
    NotUnderstood,
    Projection,
    RotaryForm,
    Source,
    activation,
    alike,
    distance,
    is_activation,
    is_linear,
    is_norm,
    linear,
    norm,
    plain_ops,
    projection,
    same,
)
from .trace import TOKENS, Call, LayerTrace, Trace, trace_model

if TYPE_CHECKING:
    from .hf_model import HFModel

_ROTARY_CHUNK = 8192  # positions whose angles are worked out at once


@dataclass(frozen=True)
class Recognised:
    """A model's specification; its linear layers are `Source`s of the model's own weights. `build` empties `layers`."""

    layout: AttentionLayout
    embedding: Embedding
    rotations: list[RotaryForm]
    layers: list[Layer]
    final_norm: Norm | None
    head: Head


def recognise(module: Any, calls: Sequence[AttentionCall], max_len: int, device: str) -> Recognised:
    """The specification of a causal transformers model.

    Args:
        calls: its attention calls, from `record_attention`.

    Raises:
        NotUnderstood: a part does not fit the specification, or computes something else than it says.
    """
    found = decoder_layers(module, calls)
    if not found:
        raise NotUnderstood("its attention layers are not those of one list of layers, one each")
    if any(c.source != i for i, c in enumerate(calls)):
        raise NotUnderstood("some of its layers use the keys of others")
    trace = trace_model(module, found, device)
    layout = AttentionLayout(calls, max_len)
    rotations: list[RotaryForm] = []
    layers = []
    for number, layer in enumerate(trace.layers):
        try:
            layers.append(_layer(layer, number, trace, layout, rotations, _residual_scale(module.config)))
        except NotUnderstood as error:
            raise NotUnderstood(f"{layer.name}: {error}") from error
    final_norm, hidden, head_call = _end(trace)
    head = _head(head_call, hidden, trace.logits, module.config)
    return Recognised(layout, _embedding(trace, module.config), rotations, layers, final_norm, head)


def build(parts: Recognised, model: HFModel) -> Decoder:
    """The decoder of a specification of `model`, whose linear layers give their weights up and are left empty."""
    backend = model.backend
    kept = {id(p) for p in parts.embedding.tokens.parameters()}
    layers: list[Layer] = []
    while parts.layers:  # emptied as it goes: a layer's own weights are free before the next one's are packed
        layers.append(_packed(parts.layers.pop(0), backend, kept, model.quantization.scheme))
        host.return_unused_memory()  # small weights come from arenas that the packed ones are not taken from
    return Decoder(
        backend,
        parts.layout,
        parts.embedding,
        [_rotation(form, model.max_len) for form in parts.rotations],
        layers,
        parts.final_norm,
        replace(parts.head, linear=_taken(parts.head.linear, backend, kept, model.quantization.head_scheme)),
        config=model.config,
        max_len=model.max_len,
        dtype=model.dtype,
        eos_token_ids=model.eos_token_ids,
        quantization=model.quantization,
    )


# -- weights -----------------------------------------------------------------------------------------------------


def _packed(layer: Layer, backend: Backend, kept: set[int], scheme: str | None) -> Layer:
    """`layer` with its linear layers packed. This is where the scheme of each is decided: routers stay as they are."""

    def taken(source: Linear, scheme: str | None = scheme) -> Linear:
        return _taken(source, backend, kept, scheme)

    def mlp(x: Mlp) -> Mlp:
        return replace(x, up=taken(x.up), down=taken(x.down))

    mixer: Mixer = layer.mixer
    if isinstance(mixer, Experts):
        mixer = replace(mixer, router=taken(mixer.router, None), experts=tuple(mlp(x) for x in mixer.experts))
    elif isinstance(mixer, Mlp):
        mixer = mlp(mixer)
    return replace(layer, qkv=taken(layer.qkv), output=taken(layer.output), mixer=mixer)


def _taken(source: Linear, backend: Backend, kept: set[int], scheme: str | None) -> Linear:
    assert isinstance(source, Source)
    weight, bias = source.merged()
    for owner in source.owners:
        if id(owner) not in kept:
            owner.data = owner.data.new_empty(0)
    return backend.ops().linear(weight, bias, scheme)


def _rotation(form: RotaryForm, max_len: int) -> Rotation:
    """The angles of every position, from the model's own rotary module."""
    call, parts = form.call, []
    for start in range(0, max_len, _ROTARY_CHUNK):
        positions = torch.arange(start, min(start + _ROTARY_CHUNK, max_len), device=call.output[0].device)[None]

        def given(x: Any, positions: torch.Tensor = positions) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return x.new_zeros(1, dtype=torch.float32) if x.is_floating_point() else positions

        with torch.no_grad():
            cos, sin = call.module(*map(given, call.args), **{k: given(v) for k, v in call.kwargs.items()})
        parts.append((cos[0].float()[:, form.columns], sin[0].float()[:, form.columns]))
    cos, sin = (torch.cat(x).contiguous() for x in zip(*parts, strict=True))
    return Rotation(cos, sin, form.interleaved)


# -- a layer -----------------------------------------------------------------------------------------------------


def _layer(
    trace: LayerTrace,
    number: int,
    whole: Trace,
    layout: AttentionLayout,
    rotations: list[RotaryForm],
    residual_scale: float,
) -> Layer:
    if len(trace.attended) != 1:
        raise NotUnderstood(f"it attends {len(trace.attended)} times")
    attended = trace.attended[0]
    into, explained = projection(trace.before, attended, whole.outside)
    rotary = None
    if into.rotary is not None:
        if into.rotary not in rotations:
            rotations.append(into.rotary)
        rotary = rotations.index(into.rotary)
    rest = [c for c in trace.before if not any(c is e for e in explained)]
    attention_norm, rest = _norm_into(into.input, trace.input, rest, "attention")
    if rest:
        raise NotUnderstood(f"{rest[0].name} ({type(rest[0].module).__name__}) before attention")
    if not trace.after or not is_linear(trace.after[0]) or not same(trace.after[0].input, attended.output):
        raise NotUnderstood("no linear layer takes what attention gives")
    output, *rest = trace.after
    mixer, mixer_input, mixer_output, rest = _mixer(rest)
    attention_post, rest = _norm_of(output.output, rest)
    mixer_post, rest = _norm_of(mixer_output, rest)
    mixer_norm, parallel, rest = _before_mixer(mixer_input, trace.input, into, attention_norm, rest)
    if rest:
        raise NotUnderstood(f"{rest[0].name} ({type(rest[0].module).__name__}) after attention")
    args = layout.args[number]
    layer = Layer(
        qkv=into.qkv,
        heads=into.heads,
        rotary=rotary,
        place=layout.places[number],
        args=AttentionArgs(args.scale * into.query_scale, args.window, args.softcap, attended.sinks),
        output=linear(output),
        mixer=mixer,
        attention_norm=attention_norm,
        mixer_norm=mixer_norm,
        attention_post=attention_post,
        mixer_post=mixer_post,
        parallel=parallel,
        residual_scale=residual_scale,
    )
    _check(layer, trace, rotations)
    return layer


def _check(layer: Layer, trace: LayerTrace, rotations: Sequence[RotaryForm]) -> None:
    """Compute a traced layer from its specification. Raises NotUnderstood if it gives something else."""
    ops, kept = plain_ops()
    step = Step(ops, kept.attention, None, [form.rotary() for form in rotations])
    x = trace.input if layer.attention_norm is None else ops.norm(trace.input, layer.attention_norm)
    with torch.no_grad():
        _, got = layer(step, x, trace.input.clone(), None)
    if not alike(got, trace.output):
        error = distance(got, trace.output)
        raise NotUnderstood(f"all parts are known, yet together they are off by {error:.2g} of the largest value")


def _norm_into(
    given: torch.Tensor, residual: torch.Tensor, calls: list[Call], what: str
) -> tuple[Norm | None, list[Call]]:
    """The norm that makes `given` of `residual`; None if they are the same."""
    if same(given, residual):
        return None, calls
    for call in calls:
        if is_norm(call) and same(call.output, given) and same(call.input, residual):
            return norm(call), [c for c in calls if c is not call]
    raise NotUnderstood(f"what goes into {what} is not the layer's input, nor a norm of it")


def _norm_of(output: torch.Tensor, calls: list[Call]) -> tuple[Norm | None, list[Call]]:
    """The norm of `output`, if there is one among `calls`."""
    for call in calls:
        if is_norm(call) and same(call.input, output):
            return norm(call), [c for c in calls if c is not call]
    return None, calls


def _before_mixer(
    given: torch.Tensor, residual: torch.Tensor, into: Projection, attention_norm: Norm | None, calls: list[Call]
) -> tuple[Norm | None, bool, list[Call]]:
    """(norm before the mixer, whether it runs beside attention, calls left)."""
    if same(given, into.input):
        return attention_norm, True, calls
    for call in calls:
        if is_norm(call) and same(call.output, given):
            return norm(call), same(call.input, residual), [c for c in calls if c is not call]
    return None, False, calls


# -- what follows attention ----------------------------------------------------------------------------------------


def _mixer(calls: list[Call]) -> tuple[Mixer, torch.Tensor, torch.Tensor, list[Call]]:
    """(mixer, its input, its output, calls left)."""
    experts = [c for c in calls if any(p.dim() == 3 for p in c.module.parameters(recurse=False))]
    if experts:
        return _experts(experts, calls)
    linears, acts = [c for c in calls if is_linear(c)], [c for c in calls if is_activation(c)]
    if len(acts) != 1 or len(linears) not in (2, 3):
        raise NotUnderstood(f"an MLP of {len(linears)} linear layers and {len(acts)} activations")
    act, first, down = acts[0], linears[0], linears[-1]
    if len(linears) == 3:
        gate, up = (linears[0], linears[1]) if same(act.input, linears[0].output) else (linears[1], linears[0])
        if not same(act.input, gate.output) or not same(gate.input, up.input):
            raise NotUnderstood(f"{act.name} is not of one of two linear layers of one input")
        source, gated = linear(gate, up), True
    else:
        source, gated = _gated_halves(first, act)
    mlp = Mlp(source, linear(down), activation(act.module), gated)
    rest = [c for c in calls if c is not act and not any(c is x for x in linears)]
    return mlp, first.input, down.output, rest


def _gated_halves(up: Call, act: Call) -> tuple[Source, bool]:
    if same(act.input, up.output):
        return linear(up), False
    first, second = up.output.chunk(2, -1)
    if same(act.input, first):
        return linear(up), True
    if same(act.input, second):
        order = torch.arange(up.output.shape[-1], device=up.output.device).roll(second.shape[-1])
        return linear(up, order=order), True
    raise NotUnderstood(f"{act.name} is of no half of {up.name}")


def _experts(found: list[Call], calls: list[Call]) -> tuple[Mixer, torch.Tensor, torch.Tensor, list[Call]]:
    experts = found[0]
    names = dict(experts.module.named_parameters(recurse=False))
    function = next((m for m in experts.module.children()), None)
    if set(names) != {"gate_up_proj", "down_proj"} or function is None or len(found) > 1:
        raise NotUnderstood(f"{experts.name} ({type(experts.module).__name__}) has {', '.join(sorted(names))}")
    gate_up, down = names["gate_up_proj"], names["down_proj"]
    routers = [c for c in calls if c is not experts and same(c.input, experts.input)]
    router = routers[0] if len(routers) == 1 else None
    if router is None or not (isinstance(router.output, tuple) and len(router.output) == 3):
        raise NotUnderstood(f"no router gives {experts.name} its rows")
    weight, bias = router.module._parameters.get("weight"), router.module._parameters.get("bias")
    if weight is None or weight.dim() != 2:
        raise NotUnderstood(f"{router.name} ({type(router.module).__name__}) has no weight [experts, hidden]")
    owners = [p for p in (weight, bias) if p is not None]
    source = Source([(weight.detach(), None if bias is None else bias.detach())], owners)
    _, given_weights, chosen = router.output
    totals = given_weights.float().sum(-1)
    act = activation(function)
    mixer = Experts(
        router=source,
        experts=tuple(
            Mlp(Source([(up, None)], [gate_up]), Source([(out, None)], [down]), act, gated=True)
            for up, out in zip(gate_up.detach(), down.detach(), strict=True)
        ),
        top_k=int(chosen.shape[-1]),
        normalised=alike(totals.to(weight.dtype), torch.ones_like(totals, dtype=weight.dtype)),
    )
    rest = [c for c in calls if c is not experts and c is not router]
    return mixer, experts.input, experts.output, rest


# -- before and after the layers -----------------------------------------------------------------------------------


def _residual_scale(config: Any) -> float:
    return float(getattr(config, "residual_multiplier", None) or 1.0)


def _embedding(trace: Trace, config: Any) -> Embedding:
    """What makes the first layer's input. Raises NotUnderstood."""
    given = trace.layers[0].input
    tables = [c for c in trace.outside if isinstance(c.module, nn.Embedding)]
    tokens = [c for c in tables if same(c.input, trace.ids)]
    if len(tokens) != 1:
        raise NotUnderstood(f"{len(tokens)} embeddings of the token ids")
    module, others = tokens[0].module, [c for c in tables if c is not tokens[0]]
    scale = float(getattr(config, "embedding_multiplier", None) or 1.0)
    embedding = Embedding(module, scale)
    if len(others) == 1:
        table, made = others[0].module.get_parameter("weight").detach(), others[0].output.reshape(TOKENS, -1)
        at = next((o for o in range(4) if same(table[trace.positions + o], made)), None)
        if at is None:
            raise NotUnderstood(f"{others[0].name} is no table of positions")
        embedding = Embedding(module, scale, table, at)
    with torch.no_grad():
        if len(others) > 1 or not alike(embedding(trace.ids, trace.positions), given):
            raise NotUnderstood("what goes into the first layer does not follow from embeddings")
    return embedding


def _end(trace: Trace) -> tuple[Norm | None, torch.Tensor, Call]:
    """(final norm, hidden states that the head is given, the head's call). Raises NotUnderstood."""
    last = trace.layers[-1].output
    heads = [c for c in trace.outside if is_linear(c) and c.output.shape[-1] == trace.logits.shape[-1]]
    if len(heads) != 1:
        raise NotUnderstood("its logits do not come from one linear layer")
    hidden = heads[0].input.reshape(TOKENS, -1)
    if same(hidden, last):
        return None, hidden, heads[0]
    final = [c for c in trace.outside if is_norm(c) and same(c.input, last) and same(c.output, hidden)]
    if not final:
        raise NotUnderstood("what goes into the head is not the last layer's output, nor a norm of it")
    return norm(final[0]), hidden, heads[0]


def _head(call: Call, hidden: torch.Tensor, logits: torch.Tensor, config: Any) -> Head:
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(linear(call), scale / divisor, getattr(config, "final_logit_softcapping", None))
    with torch.no_grad():
        if not alike(head(hidden).to(logits.dtype), logits):
            raise NotUnderstood("its logits do not follow from its head")
    return head
