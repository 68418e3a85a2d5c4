"""Quantised linear layers as backends give them: refused where absent, alike where present, exact by themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from pagefleet.backends import registry
from pagefleet.backends.base import BackendError, BackendOptions
from pagefleet.backends.exact import ProductLinear
from pagefleet.backends.schemes import Scheme, parse_scheme
from pagefleet.kernels.reference import quantized_linear

NAMES = ["w8a8", "w8a16", "w8a16_g64", "w4a16", "w4a16_g128"]


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_that_names_a_scheme_computes_what_the_specification_says(make_backend, name):
    backend = make_backend()
    scheme = parse_scheme(name)
    if scheme.name not in backend.capabilities().schemes:
        pytest.skip(f"no {name} here")
    device = backend.capabilities().device
    torch.manual_seed(0)
    weight, bias, x = torch.randn(70, 96), torch.randn(70), torch.randn(13, 96)
    linear = backend.ops().linear(weight.to(device), bias.to(device), name)
    want = quantized_linear(x.double(), scheme.quantized(weight), bias, scheme.activation_bits == 8)
    torch.testing.assert_close(linear(x.to(device)).double().cpu(), want, rtol=1e-5, atol=1e-4)
    assert linear.scheme == str(scheme)
    assert linear.weight_bytes < 2 * weight.numel()


def test_a_backend_without_a_scheme_refuses_it_by_name(make_backend, monkeypatch):
    backend = make_backend()
    plain = dataclasses.replace(backend.capabilities(), schemes=())
    monkeypatch.setattr(type(backend), "capabilities", lambda _self: plain)
    with pytest.raises(BackendError, match=f"backend '{plain.name}' has no w8a8 linear layers; choose a precision of "):
        backend.ops().linear(torch.ones(2, 2), None, "w8a8")


@pytest.mark.parametrize("name", ["w2a8", "w8a8_g32", "w4a16_g48", "W8A8", ""])
def test_a_name_that_is_no_scheme_is_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' is no scheme of linear layers; expected w8a8, w8a16, w4a16"):
        parse_scheme(name)


def test_4_bits_have_groups_of_32_unless_told_otherwise():
    assert parse_scheme("w4a16") == Scheme("w4a16", 32)
    assert str(parse_scheme("w4a16")) == "w4a16_g32"


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_gets_the_scheme_of_each_layer(make_backend, exact):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(64, 48), nn.Linear(48, 32)

        def forward(self, x):
            return self.head(self.inner(x))

    backend = make_backend(exact)
    if "w8a8" not in backend.capabilities().schemes:
        pytest.skip("no w8a8 here")
    torch.manual_seed(0)
    model = Model().to(backend.capabilities().device).requires_grad_(False)
    x = torch.randn(5, 64, device=backend.capabilities().device)
    want, inner = model(x), model.inner
    backend.prepare_model(model, lambda module: "w8a8" if module is inner else None)
    assert isinstance(model.inner, ProductLinear)
    assert model.inner.product.scheme == "w8a8"
    error = (model(x) - want).abs().max()
    assert 1e-5 < error < 0.1, "the inner layer is in 8 bits, and nothing else"
    if exact:
        assert torch.equal(model(x)[2:3], model(x[2:3]))


def test_without_compiled_kernels_the_specification_itself_runs(monkeypatch):
    from pagefleet.backends.cpu import backend as cpu

    monkeypatch.setattr(cpu, "native_kernels", lambda: None)
    backend = registry.create("cpu", BackendOptions(threads=1))
    assert backend.ops().linear(torch.randn(8, 32), None, "w4a16").kernel == "torch, float64"


def test_the_kernels_that_linear_layers_got_are_reported():
    backend = registry.create("cpu", BackendOptions(threads=1))
    linear = backend.ops().linear(torch.randn(8, 32), None, "w8a8")
    assert backend.capabilities().kernels["linear"] == f"w8a8: {linear.kernel}"
