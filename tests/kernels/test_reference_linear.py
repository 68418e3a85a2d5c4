"""What quantising keeps and loses, and what a quantised product is."""

from __future__ import annotations

import pytest
import torch

from pagefleet.kernels.reference import (
    QuantizedWeight,
    quantize_rows,
    quantize_weight_int4,
    quantize_weight_int8,
    quantized_linear,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group", [None, 32, 64])
def test_8_bits_are_off_by_at_most_half_a_step(group: int | None) -> None:
    weight = random(5, 100) * torch.tensor([0.1, 1.0, 50.0, 0.0, 1e-2])[:, None]
    packed = quantize_weight_int8(weight, group)
    scales = packed.scales.float()
    steps = scales[:, None] if group is None else scales.repeat_interleave(group, 1)[:, :100]
    error = (packed.dequantized() - weight).abs()
    assert bool((error <= steps * 0.501 + weight.abs() * 2.0**-10).all())  # a group's scale has 11 bits
    assert packed.bits == 8


@pytest.mark.parametrize("group", [32, 64, 128])
def test_4_bits_are_off_by_at_most_half_a_step(group: int) -> None:
    weight = random(4, 200) + 3
    packed = quantize_weight_int4(weight, group)
    steps = packed.scales.float().repeat_interleave(group, 1)[:, :200]
    assert bool(((packed.dequantized() - weight).abs() <= steps * 0.51 + 3e-3).all())  # offsets have 11 bits
    assert packed.bits == 4
    assert int(packed.values.max()) == 15


def test_values_that_4_bits_hold_survive() -> None:
    values = torch.randint(16, (3, 64), generator=torch.Generator().manual_seed(0))
    values[:, ::32], values[:, 1::32] = 0, 15
    packed = quantize_weight_int4(values * 0.25 - 1.5, 32)
    assert torch.equal(packed.values, values.to(torch.uint8))
    assert torch.equal(packed.dequantized(), values * 0.25 - 1.5)


def test_rows_have_scales_of_their_own_and_none_sees_another() -> None:
    x = random(4, 50) * torch.tensor([1e-5, 1.0, 1e4, 0.0])[:, None]
    values, scales = quantize_rows(x)
    torch.testing.assert_close(values * scales[:, None], x, rtol=0, atol=float(scales.max()) / 2)
    assert values.abs().amax(1).tolist() == [127, 127, 127, 0]
    alone = quantize_rows(x[:1])
    assert torch.equal(alone[0], values[:1])
    x[1, 3] = torch.nan
    assert quantize_rows(x)[1].isnan().tolist() == [False, True, False, False]


def test_8_bit_products_are_exact_in_integers() -> None:
    values = torch.tensor([[127, -127, 1], [0, 5, -128 + 1]], dtype=torch.int8)
    weight = QuantizedWeight(values, torch.tensor([0.5, 2.0]))
    x = torch.tensor([[127.0, -127.0, 3.0]])  # its scale is 1
    got = quantized_linear(x, weight, torch.tensor([1.0, 0.0]), quantize_activations=True)
    assert got.tolist() == [[(127 * 127 * 2 + 3) * 0.5 + 1, (-127 * 5 - 127 * 3) * 2.0]]


def test_groups_and_8_bit_rows_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="one scale a row"):
        quantized_linear(random(1, 64), quantize_weight_int8(random(2, 64), 32), None, quantize_activations=True)
