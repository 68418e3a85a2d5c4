"""Compiled row operations equal their reference twins on every instruction set, and read and write nothing else."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pagefleet.backends import registry
from pagefleet.backends.base import BackendOptions
from pagefleet.backends.cpu import backend
from pagefleet.backends.cpu.native_ops import NativeOps
from pagefleet.backends.cpu.ops import CpuOps
from pagefleet.backends.ops import ACTIVATIONS, Norm
from pagefleet.backends.torch_ops import TorchOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 7, 16, 33, 55, 576]  # around the lengths of a register, and a real one


@pytest.fixture
def ops(native: Any) -> NativeOps:
    return NativeOps(registry.create("cpu", BackendOptions(threads=torch.get_num_threads())), native)


def poisoned(rows: int, n: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random [rows, n] in a buffer whose other elements, before, between and after the rows, are NaN."""
    view = torch.full((rows + 2, n + 5), torch.nan, dtype=dtype)[1:-1, 2 : n + 2]
    return view.copy_(torch.randn(rows, n) * scale)


def surroundings_are_untouched(view: torch.Tensor) -> bool:
    """Whether all that `poisoned` put around the rows is still NaN."""
    base = view._base
    assert base is not None
    return int(base.isnan().sum()) == base.numel() - view.numel() and not bool(view.isnan().any())


def make_norm(kind: str, n: int) -> Norm:
    return Norm(kind, torch.randn(n) + 1, torch.randn(n) if kind == "layer" else None, 1e-5)


def in_double(norm: Norm) -> Norm:
    return Norm(norm.kind, *(None if x is None else x.double() for x in (norm.weight, norm.bias)), norm.eps)


def close(got: torch.Tensor, want: torch.Tensor, scale: float = 1.0) -> None:
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, atol=4 * step * scale, rtol=2 * step)


TWIN: TorchOps = TorchOps(None)  # type: ignore[arg-type]  # what is tested here needs no backend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("n", WIDTHS)
def test_norm(ops: NativeOps, dtype: torch.dtype, kind: str, n: int) -> None:
    x, norm = poisoned(5, n, dtype, scale=3.0), make_norm(kind, n)
    got = ops.norm(x, norm)
    assert got.dtype == dtype
    close(got, TWIN.norm(x.double(), in_double(norm)), scale=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("post", [None, "rms", "layer"])
@pytest.mark.parametrize("n", WIDTHS)
def test_add_norm(ops: NativeOps, dtype: torch.dtype, post: str | None, n: int) -> None:
    x, residual, norm = poisoned(5, n, dtype), poisoned(5, n, dtype, scale=2.0), make_norm("rms", n)
    after = make_norm(post, n) if post else None
    want = TWIN.add_norm(x.double(), residual.double(), None, in_double(after) if after else None, 0.22)[1]
    got, total = ops.add_norm(x, residual, norm, after, 0.22)
    assert total.data_ptr() == residual.data_ptr()
    assert surroundings_are_untouched(residual)
    close(total, want, scale=4.0)
    close(got, TWIN.norm(total.double(), in_double(norm)), scale=4.0)


def test_add_norm_without_a_norm_returns_the_sum_twice(ops: NativeOps) -> None:
    x, residual = poisoned(3, 19, torch.bfloat16), poisoned(3, 19, torch.bfloat16)
    want = x + residual
    got, total = ops.add_norm(x, residual, None)
    assert torch.equal(got, want)
    assert torch.equal(total, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(ops: NativeOps, dtype: torch.dtype, name: str) -> None:
    for n in WIDTHS:
        x = poisoned(4, 2 * n, dtype, scale=4.0)
        close(ops.activation(x, name), TWIN.activation(x.double(), name), scale=4.0)
        close(ops.gated_activation(x, name), TWIN.gated_activation(x.double(), name), scale=16.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_far_from_zero_are_finite_and_keep_nan(ops: NativeOps, name: str) -> None:
    x = torch.tensor([[-1e4, -200.0, -90.0, -14.0, -6.0, 0.0, 6.0, 14.0, 90.0, 200.0, 1e4, torch.nan]])
    got, want = ops.activation(x, name), TWIN.activation(x.double(), name)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-30, equal_nan=True)


def test_gelu_is_exact_to_a_few_units_also_in_its_tails(ops: NativeOps) -> None:
    x = torch.linspace(-12, 12, 100_001)[None]
    want = F.gelu(x.double())
    tails = x.double() * 0.5 * torch.special.erfc(-x.double() / 2**0.5)  # torch's own loses the left one
    got = ops.activation(x, "gelu").double()
    torch.testing.assert_close(got, want, atol=4e-7, rtol=1e-6)
    torch.testing.assert_close(got, tails, atol=1e-37, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it_or_on_threads(ops: NativeOps, dtype: torch.dtype) -> None:
    n, rows = 577, 150  # enough to be shared between threads
    x, norm, post = torch.randn(rows, n).to(dtype), make_norm("rms", n), make_norm("layer", n)
    calls = {
        "norm": lambda x: ops.norm(x, norm),
        "add_norm": lambda x: torch.cat(ops.add_norm(x, x * 0.5, norm, post, 0.3), 1),
        **{name: functools.partial(ops.activation, name=name) for name in ACTIVATIONS},
        "gated": lambda x: ops.gated_activation(x, "silu"),
    }
    threads = torch.get_num_threads()
    try:
        for name, call in calls.items():
            torch.set_num_threads(1)
            alone = torch.cat([call(x[i : i + 1].clone()) for i in range(rows)])
            for count in (1, 2):
                torch.set_num_threads(count)
                assert torch.equal(call(x), alone), (name, count)
                assert torch.equal(call(x.flip(0)).flip(0), alone), (name, count)
    finally:
        torch.set_num_threads(threads)


def test_no_rows_give_no_rows(ops: NativeOps) -> None:
    x = torch.empty(0, 8)
    assert ops.norm(x, make_norm("rms", 8)).shape == (0, 8)
    assert ops.gated_activation(x, "silu").shape == (0, 4)


def test_a_dtype_or_layout_that_the_kernels_lack_goes_to_torch(ops: NativeOps) -> None:
    norm = make_norm("rms", 12)
    wide, turned = torch.randn(3, 12, dtype=torch.float64), torch.randn(12, 3).T
    assert ops.norm(wide, norm).dtype == torch.float64
    torch.testing.assert_close(ops.norm(turned, norm), ops.norm(turned.contiguous(), norm))
    torch.testing.assert_close(ops.add_norm(wide, wide, norm)[0], TWIN.norm(2 * wide, norm))
    torch.testing.assert_close(ops.gated_activation(turned, "gelu"), TWIN.gated_activation(turned, "gelu"))
    torch.testing.assert_close(ops.activation(turned, "silu"), TWIN.activation(turned, "silu"))


def test_a_norm_whose_weight_is_not_float32_is_refused(ops: NativeOps) -> None:
    with pytest.raises(ValueError, match="weight must be contiguous float32"):
        ops.norm(torch.randn(2, 4), Norm("rms", torch.ones(4, dtype=torch.bfloat16), None, 1e-5))


def test_capabilities_name_the_kernels_that_run(
    native: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = request.node.callspec.params["native"]
    monkeypatch.setenv("PAGEFLEET_ISA", level)
    kernels = registry.create("cpu", BackendOptions(threads=torch.get_num_threads())).capabilities().kernels
    assert kernels["norm"] == kernels["sampling"] == ("C++ avx2" if level == "avx2" else "C++ avx512")


def test_without_compiled_kernels_torch_does_the_work_and_the_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGEFLEET_ISA", "generic")
    monkeypatch.setattr(backend, "_reasons_told", set())
    made = [registry.create("cpu", BackendOptions(threads=torch.get_num_threads())) for _ in range(2)]
    assert [r.message for r in caplog.records].count(
        "plain torch does the work of the CPU kernels: there are no compiled kernels for instruction set 'generic';"
        " there are for avx2, avx512, avx512_vnni, avx512_bf16, amx"
    ) == 1
    assert type(made[0].ops()) is CpuOps
    assert made[0].capabilities().kernels["norm"] == "torch"


def test_a_norm_of_another_size_is_refused(ops: NativeOps) -> None:
    x, norm = torch.randn(2, 4), make_norm("rms", 5)
    for call in (lambda: ops.norm(x, norm), lambda: ops.add_norm(x, x, None, norm)):
        with pytest.raises(ValueError, match="a norm of 5 elements cannot be of rows of 4"):
            call()
