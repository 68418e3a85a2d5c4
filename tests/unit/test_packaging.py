"""What is shipped equals what is here, and imports keep their directions."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
TOP = ("runtime", "backends", "kernels", "conf")
SOURCES = sorted(p for top in TOP for p in (ROOT / top).rglob("*.py"))


def test_the_package_list_equals_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {p.parent.relative_to(ROOT) for p in SOURCES if p.name == "__init__.py"}
    assert sorted(listed) == sorted("pagefleet." + ".".join(f.parts) for f in folders)
    assert not (ROOT / "kernels" / "__init__.py").exists(), "`kernels` is the name of a well-known distribution"


def _imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    return names


def test_nothing_imports_a_package_without_the_prefix_that_would_make_a_second_copy() -> None:
    everywhere = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    wrong = [(p.name, n) for p in everywhere for n in _imported(p) if n.split(".")[0] in TOP]
    assert wrong == []


def test_the_runtime_holds_no_device_code() -> None:
    for path in (ROOT / "runtime").rglob("*.py"):
        assert not re.search(r"torch\.cuda|torch\.hip|triton", path.read_text(encoding="utf-8")), path


def test_readme_examples_are_valid() -> None:
    from pagefleet.runtime.compose import load_config

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    ast.parse(example)
    commands = re.findall(r"^pagefleet (\w+)([^#\n]*)", readme, re.MULTILINE)
    assert len(commands) >= 7
    for command, overrides in commands:
        load_config(overrides.split(), command)
