"""Compiled linear layers against their reference twins in float64, on every instruction set, with poisoned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagefleet.backends.cpu.native_linear import NativeLinear
from pagefleet.backends.schemes import parse_scheme
from pagefleet.kernels.reference import quantized_linear

SCHEMES = [None, "w8a8", "w8a16", "w8a16_g32", "w4a16_g32", "w4a16_g64", "w4a16_g128"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (1, 33, 64), (3, 16, 37), (7, 40, 130), (13, 65, 96), (30, 100, 257), (70, 31, 160)]  # M, N, K


@pytest.fixture(autouse=True)
def _keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(native: Any, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, name: str | None) -> Any:
    """(the compiled layer, its twin in float64)."""
    if name is None:
        held = weight.bfloat16()

        def plain(x: torch.Tensor) -> torch.Tensor:
            return x @ held.double().T + (0 if bias is None else bias.double())

        return NativeLinear(native, held, bias, dtype, None), plain
    scheme = parse_scheme(name)
    packed = scheme.quantized(weight)

    def quantized(x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, packed, bias, scheme.activation_bits == 8)

    return NativeLinear(native, packed, bias, dtype, scheme), quantized


def assert_close(
    got: torch.Tensor, want: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, name: str | None
) -> None:
    """Within rounding of the output, of fp32 sums, and, where groups are multiplied in bf16, of a weight."""
    step = torch.finfo(got.dtype).eps
    of_weight = 2.0**-8 if name is not None and "_g" in name and got.dtype == torch.bfloat16 else 2.0**-20
    sizes = x.double().abs() @ weight.double().abs().T
    error = (got.double() - want).abs()
    assert bool((error <= step * want.abs() + of_weight * sizes + 1e-6).all()), float((error / sizes).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_equals_its_reference_twin_on_odd_shapes(native: Any, name: str | None, dtype: torch.dtype) -> None:
    for rows, n, k in SHAPES:
        weight, bias = random(n, k) * 0.1, random(n, seed=1) if rows % 2 else None
        compiled, twin = layer(native, weight, bias, dtype, name)
        around = torch.full((rows + 2, k), torch.nan, dtype=dtype)
        x = around[1:-1]
        x.copy_(random(rows, k, seed=2))
        got = compiled(x)
        assert got.shape == (rows, n)
        assert got.dtype == dtype
        assert_close(got, twin(x.double()), x, weight, name)


@pytest.mark.parametrize("name", SCHEMES)
def test_writes_nothing_beside_its_output(native: Any, name: str | None) -> None:
    weight, x = random(37, 50), random(5, 50).bfloat16()
    compiled, _ = layer(native, weight, None, torch.bfloat16, name)
    room = torch.full((7, 37), torch.nan, dtype=torch.bfloat16)
    native.linear(compiled._layer, 1, x.data_ptr(), 5, room[1:].data_ptr())
    assert bool(room[0].isnan().all())
    assert bool(room[-1].isnan().all())
    assert torch.equal(room[1:-1], compiled(x))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_keeps_its_bits_whatever_is_beside_it_and_on_any_number_of_threads(
    native: Any, name: str | None, dtype: torch.dtype
) -> None:
    compiled, _ = layer(native, random(290, 320), random(290, seed=1), dtype, name)
    x = random(70, 320, seed=2).to(dtype)
    torch.set_num_threads(2)
    want = compiled(x)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 5, 12, 13, 31, 70):
            assert torch.equal(compiled(x[-rows:]), want[-rows:]), (threads, rows)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_that_is_not_finite_spoils_no_other(native: Any, name: str | None) -> None:
    compiled, _ = layer(native, random(40, 64), None, torch.bfloat16, name)
    x = random(9, 64).bfloat16()
    want = compiled(x)
    x[3, 5], x[6, 0] = torch.nan, torch.inf
    got = compiled(x)
    spoiled = torch.tensor([3, 6])
    assert not bool(got[spoiled].isfinite().any())
    good = [i for i in range(9) if i not in (3, 6)]
    assert torch.equal(got[good], want[good])


def test_rows_and_channels_of_zeros_give_zeros(native: Any) -> None:
    for name in SCHEMES[1:]:
        weight, x = random(40, 64), random(3, 64)
        weight[7], x[1] = 0, 0
        compiled, _ = layer(native, weight, None, torch.float32, name)
        got = compiled(x)
        assert bool((got[1] == 0).all()), name
        assert bool((got[:, 7] == 0).all()), name


def test_int8_sums_of_the_largest_values_do_not_saturate(native: Any) -> None:
    weight, x = torch.ones(3, 4096), torch.ones(2, 4096)
    weight[1], x[1] = -1, -1
    compiled, twin = layer(native, weight, None, torch.float32, "w8a8")
    torch.testing.assert_close(compiled(x), twin(x.double()).float(), rtol=1e-6, atol=0)


def test_no_rows_give_no_rows(native: Any) -> None:
    compiled, _ = layer(native, random(40, 64), None, torch.float32, "w8a8")
    assert compiled(torch.empty(0, 64)).shape == (0, 40)
    assert compiled(torch.empty(2, 0, 64)).shape == (2, 0, 40)


def test_rows_of_another_width_are_refused(native: Any) -> None:
    compiled, _ = layer(native, random(40, 64), None, torch.float32, "w8a16")
    with pytest.raises(ValueError, match="rows have 63 elements, expected 64"):
        compiled(torch.zeros(1, 63))


def test_a_layer_packed_for_another_instruction_set_is_refused(native: Any) -> None:
    compiled, _ = layer(native, random(40, 64), None, torch.bfloat16, "w8a8")
    wide = "AVX-512" in compiled.kernel
    try:
        native.set_isa("avx2" if wide else "avx512")  # nothing of it is run
        with pytest.raises(RuntimeError, match="packed for another instruction set"):
            compiled(torch.zeros(1, 64))
    finally:
        native.set_isa("avx2")
