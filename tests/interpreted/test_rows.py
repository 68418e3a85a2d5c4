"""Norms, activations and the fused preparation of heads equal the float64 specification."""

from __future__ import annotations

import pytest
import torch

from pagefleet.kernels import reference
from pagefleet.kernels.triton.formats import QuantizedViews
from pagefleet.kernels.triton.heads import HeadNorms, query_and_store
from pagefleet.kernels.triton.rows import ACTIVATIONS, activation, add_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def close(got, expected, dtype):
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def padded_rows(rows, size, dtype):
    """Rows with NaN between them."""
    x = torch.full((rows, size + 5), torch.nan, dtype=dtype)
    x[:, :size] = torch.randn(rows, size)
    return x[:, :size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 33, 256])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("post_kind", [None, "rms", "layer"])
def test_residual_and_norm(dtype, size, kind, post_kind):
    x, residual = padded_rows(3, size, dtype), padded_rows(3, size, dtype)
    norm = (kind, torch.randn(size), torch.randn(size) if kind == "layer" else None, 1e-5)
    post = None if post_kind is None else (post_kind, torch.randn(size), None, 1e-6)
    wide = [
        None if p is None else (p[0], *(None if t is None else t.double() for t in p[1:3]), p[3]) for p in (norm, post)
    ]
    out, total = add_norm(x, residual, norm, post, scale=0.5)
    added = x.double() if post is None else reference.norm(x.double(), *wide[1])
    close(total, residual.double() + 0.5 * added, dtype)
    close(out, reference.norm(total.double(), *wide[0]), dtype)  # of what was kept
    alone, same = add_norm(x, None, norm)
    assert same is x
    close(alone, reference.norm(x.double(), *wide[0]), dtype)
    again, total = add_norm(x, residual, None, post, scale=0.5)
    assert again is total
    assert add_norm(x[:0], residual[:0], norm)[0].shape == (0, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(dtype, name):
    for rows, size in ((3, 7), (2, 1100), (0, 4)):
        gated, plain = padded_rows(rows, 2 * size, dtype) * 4, padded_rows(rows, size, dtype) * 4
        close(activation(gated, name, gated=True), reference.activation(gated.double(), name, gated=True), dtype)
        close(activation(plain, name), reference.activation(plain.double(), name), dtype)
    with pytest.raises(ValueError, match="unknown"):
        activation(torch.zeros(1, 2), "swish")


CASES = [
    {},
    {"rotary": 16},
    {"rotary": 10, "interleaved": True},
    {"rotary": 16, "kinds": ("rms", "rms", None)},
    {"rotary": 12, "kinds": ("layer", "layer", "rms"), "biases": True},
    {"rotary": 16, "kinds": ("rms", "rms", None), "all_heads": True},
    {"rotary": 16, "kinds": ("layer", "rms", None), "all_heads": True, "after": True},
    {"rotary": 8, "kinds": ("rms", "rms", None), "after": True},
    {"kinds": ("rms", None, None)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(6, 2, 16, 16), (5, 5, 17, 12), (40, 1, 24, 80)])
def test_heads_are_normalised_rotated_and_stored(case, heads, kv_heads, size, value_size):
    tokens, slots = 4, torch.tensor([3, -1, 9, 8])
    qkv = padded_rows(tokens, (heads + kv_heads) * size + kv_heads * value_size, torch.float32)
    angles = torch.randn(tokens, case["rotary"] // 2) if "rotary" in case else None
    counts = (heads, kv_heads, kv_heads)
    widths, parameters = (size, size, value_size), []
    for kind, count, width in zip(case.get("kinds", (None,) * 3), counts, widths, strict=True):
        length = width * count if case.get("all_heads") else width
        bias = torch.randn(length) if case.get("biases") and kind == "layer" else None
        parameters.append(None if kind is None else (kind, torch.randn(length), bias, 1e-5))
    rotation = {} if angles is None else {"cos": angles.cos(), "sin": angles.sin()}
    rotation["interleaved"] = case.get("interleaved", False)
    caches = [torch.full((3, kv_heads, 4, n), -7.0).transpose(1, 2) for n in (size, value_size)]
    norms = HeadNorms(*parameters, case.get("all_heads", False), case.get("after", False))
    got = query_and_store(qkv, heads, *caches, slots, **rotation, norms=norms)

    def wide(x):
        return x.double() if isinstance(x, torch.Tensor) else x

    exact = [torch.full((3, 4, kv_heads, n), -7.0, dtype=torch.float64) for n in (size, value_size)]
    expected = reference.query_and_store(
        qkv.double(), heads, *exact, slots, **{k: wide(v) for k, v in rotation.items()},
        norms=tuple(None if p is None else tuple(map(wide, p)) for p in parameters),
        norm_all_heads=norms.all_heads, norm_after_rotary=norms.after_rotary,
    )  # fmt: skip
    close(got, expected, torch.float32)
    close(caches[0], exact[0], torch.float32)
    close(caches[1], exact[1], torch.float32)


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_heads_are_quantized_as_they_are_stored(kind):
    heads, kv_heads, size, slots = 4, 2, 32, torch.tensor([3, -1, 9, 8])
    qkv, angles = torch.randn(4, (heads + 2 * kv_heads) * size), torch.randn(4, size // 2)
    stored = torch.int8 if kind == "int8" else torch.uint8
    codes = [torch.full((3, 4, kv_heads, size), 99, dtype=stored) for _ in range(2)]
    scales = [torch.full((3, 4, kv_heads, 2), -7.0) for _ in range(2)]
    views = QuantizedViews(kind, *scales, 16)
    query_and_store(qkv, heads, *codes, slots, cos=angles.cos(), sin=angles.sin(), quantized=views)
    exact = [torch.zeros(3, 4, kv_heads, size) for _ in range(2)]
    reference.query_and_store(qkv, heads, *exact, slots, cos=angles.cos(), sin=angles.sin())
    for x, code, scale in zip(exact, codes, scales, strict=True):
        place = (slots[slots >= 0] // 4, slots[slots >= 0] % 4)
        expected, expected_scales = reference.quantize(x[place], kind, 16)
        torch.testing.assert_close(scale[place], expected_scales, rtol=1e-5, atol=0)
        as_held = code[place].view(expected.dtype)
        held = reference.dequantize(as_held, scale[place], 16)
        step = expected_scales.double().repeat_interleave(16, -1) * (1.01 if kind == "int8" else 32.1)
        assert ((held - reference.dequantize(expected, expected_scales, 16)).abs() <= step).all()  # one code at most
        assert (as_held.float() == expected.float()).float().mean() > 0.99
        untouched = torch.ones(3, 4, dtype=torch.bool)
        untouched[place] = False
        assert (code[untouched] == 99).all()
        assert (scale[untouched] == -7.0).all()
