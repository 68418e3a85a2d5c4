"""Backends are found by their folder or entry point, and a broken one harms no other."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest

import pagefleet.backends
from pagefleet.backends import registry
from pagefleet.backends.base import BackendError, BackendOptions

GOOD = """
from pagefleet.backends.base import Availability
def probe():
    return Availability(True, "made for a test", score={score})
def create(options):
    return ("made", options.exact)
"""


@pytest.fixture
def folder_of_backends(tmp_path, monkeypatch):
    """add(name, source): a new backend folder, as if it lay beside the others."""
    monkeypatch.setattr(pagefleet.backends, "__path__", [*pagefleet.backends.__path__, str(tmp_path)])
    added = []

    def add(name, source):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        added.append(f"pagefleet.backends.{name}")

    yield add
    for name in added:
        sys.modules.pop(name, None)
        vars(pagefleet.backends).pop(name.rpartition(".")[2], None)


@pytest.fixture
def entry_point(monkeypatch, tmp_path):
    """add(name, source): a backend of another distribution."""
    entries = []
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "pagefleet.backends" else [])
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name, source, module=None):
        module = module or f"third_party_{name}"
        if source is not None:
            (tmp_path / f"{module}.py").write_text(source)
        entries.append(EntryPoint(name, module, "pagefleet.backends"))

    return add


def test_a_new_backend_folder_is_found_and_can_be_made(folder_of_backends):
    assert "fancy" not in registry.probe_all()
    folder_of_backends("fancy", GOOD.format(score=1000))
    assert registry.probe_all()["fancy"].reason == "made for a test"
    assert registry.choose("auto").name == "fancy"
    assert registry.create("fancy", BackendOptions(exact=True)) == ("made", True)


def test_auto_gives_a_reason_for_every_backend(folder_of_backends):
    folder_of_backends("slow", GOOD.format(score=-5))
    choice = registry.choose("auto")
    assert choice.name != "slow"
    assert choice.reasons[0].startswith(f"{choice.name}: chosen")
    assert {reason.split(":")[0] for reason in choice.reasons} == set(registry.probe_all())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("import a_package_that_is_not_there", "ModuleNotFoundError"),
        ("def probe(): raise OSError('no device')", "OSError: no device"),
        ("def probe(): return True", "returned bool"),
        ("x = 1", "AttributeError"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_backend_that_breaks_is_unavailable_with_the_reason_and_the_others_remain(
    folder_of_backends, entry_point, source, reason
):
    folder_of_backends("broken", source)
    entry_point("broken_too", source, module=f"broken_entry_{abs(hash(source))}")
    found = registry.probe_all()
    for name in ("broken", "broken_too"):
        assert not found[name].available
        assert reason in found[name].reason
        with pytest.raises(BackendError, match=f"'{name}' cannot run here"):
            registry.choose(name)
    assert found["reference"].available
    assert registry.choose("auto").name in found
    assert registry.create("reference").capabilities().name == "reference"


def test_an_entry_point_is_a_backend_and_never_hides_a_folder(entry_point, caplog):
    entry_point("other", GOOD.format(score=1000))
    entry_point("cpu", GOOD.format(score=2000), module="third_party_cpu")
    assert registry.choose("auto").name == "other"
    assert registry.create("other") == ("made", False)
    assert registry.create("cpu").capabilities().name == "cpu"
    assert "'cpu'" in caplog.text


def test_an_entry_point_to_a_missing_module_harms_nothing(entry_point):
    entry_point("gone", None)
    assert "third_party_gone" in registry.probe_all()["gone"].reason


def test_an_unknown_backend_is_answered_with_what_exists():
    with pytest.raises(BackendError, match=r"unknown backend 'tpu'; expected auto or one of: .*cpu.*reference"):
        registry.choose("tpu")


def test_no_backend_at_all_says_why_for_each(monkeypatch):
    def broken():
        raise OSError("no device")

    monkeypatch.setattr(registry, "_sources", lambda: {"a": broken})
    with pytest.raises(BackendError, match="a: probing failed with OSError: no device"):
        registry.choose("auto")


def test_listing_backends_imports_none_of_the_heavy_parts():
    import subprocess

    code = (
        "import sys; from pagefleet.backends import registry; registry.probe_all();"
        "print([m for m in sys.modules if m.startswith('pagefleet.backends.') and m.endswith('.backend')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
