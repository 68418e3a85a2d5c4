"""Tiny models, backends to run them on, and prompts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from pagefleet.backends import registry
from pagefleet.backends.base import BackendOptions


def _tiny():
    """The module tiny.py beside this file: test folders are no packages."""
    name = "pagefleet_tests_tiny"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("tiny.py"))
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


FAMILIES = tuple(_tiny().FAMILIES)


@pytest.fixture(scope="session")
def tiny_model():
    """tiny_model(family, seed=0, **config changes): a new random transformers model each time."""
    return _tiny().tiny_model


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def backend():
    return registry.create("reference", BackendOptions())


@pytest.fixture
def prompts():
    """Token ids of four prompts; one is a single token, one is longer than every tiny window and crosses blocks."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, 96, (n,), generator=generator).tolist() for n in (9, 1, 23, 4)]
