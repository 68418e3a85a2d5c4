"""The row operations' reference twins, against torch's and transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from pagefleet.kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_equal_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 33, dtype=dtype), torch.randn(33, dtype=dtype), torch.randn(33, dtype=dtype)
    torch.testing.assert_close(
        reference.norm(x, "layer", weight, bias, 1e-5), torch.nn.functional.layer_norm(x, (33,), weight, bias, 1e-5)
    )
    torch.testing.assert_close(
        reference.norm(x, "rms", weight, None, 1e-6), torch.nn.functional.rms_norm(x, (33,), weight, 1e-6)
    )


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'rms' or 'layer'"):
        reference.norm(torch.zeros(1, 2), "batch", None, None, 1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_equals_transformers(interleaved: bool) -> None:
    tokens, heads, size = 7, 3, 10
    x, angles = torch.randn(tokens, heads, size), torch.randn(tokens, size // 2)
    spread = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    theirs = rotate_interleaved if interleaved else rotate_halves
    query, _ = theirs(x.transpose(0, 1)[None], x.transpose(0, 1)[None], spread.cos()[None], spread.sin()[None])
    got = reference.rotate(x, angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(got, query[0].transpose(0, 1))


def test_elements_beyond_the_rotary_dimensions_stay() -> None:
    x, angles = torch.randn(4, 2, 9), torch.randn(4, 3)
    got = reference.rotate(x, angles.cos(), angles.sin())
    assert torch.equal(got[..., 6:], x[..., 6:])
    assert not torch.equal(got[..., :6], x[..., :6])
