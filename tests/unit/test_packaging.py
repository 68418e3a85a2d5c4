"""What is shipped equals what is here, and imports keep their directions."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOP = ("runtime", "backends", "kernels", "conf")
SOURCES = sorted(p for top in TOP for p in (ROOT / top).rglob("*.py"))


def test_the_package_list_equals_the_folders() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
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
        device_code = r"torch\.cuda|torch\.hip|(import|from) triton|triton\."
        assert not re.search(device_code, path.read_text(encoding="utf-8")), path


def _copy_of_the_tree(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "build")
    for top in TOP:
        shutil.copytree(ROOT / top, folder / top, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_a_wheel_carries_every_module_configuration_file_command_and_the_license(tmp_path: Path) -> None:
    tree = _copy_of_the_tree(tmp_path)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
        commands = next(n for n in carried if n.endswith("entry_points.txt"))
        assert "pagefleet = pagefleet.runtime.cli:main" in archive.read(commands).decode()
    files = [*SOURCES, *(ROOT / "conf").rglob("*.yaml")]
    assert {f"pagefleet/{f.relative_to(ROOT).as_posix()}" for f in files} <= carried
    assert any(name.endswith("licenses/LICENSE") for name in carried)
    assert "pagefleet/__init__.py" not in carried, "the import root is a namespace"
    assert not any(name.startswith("pagefleet/tests") for name in carried)


# -- import contracts ------------------------------------------------------------------------------------------------


def test_import_contracts_name_every_backend_and_kernel_package_there_is() -> None:
    names = PYPROJECT["tool"]["setuptools"]["packages"]
    devices = {n for n in names if re.match(r"pagefleet\.(backends|kernels)\..+", n)}
    (runtime,) = (
        c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if "pagefleet.runtime" in c["source_modules"]
    )
    assert devices <= {*runtime["forbidden_modules"]}
    (others,) = (c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c is not runtime)
    kernels = {n for n in names if n.startswith("pagefleet.kernels.")}
    assert {"pagefleet.backends", "pagefleet.conf", *kernels} <= {*others["source_modules"]}


@pytest.mark.parametrize(
    ("path", "line", "broken"),
    [
        ("runtime/sizes.py", "import pagefleet.kernels.reference", True),
        ("runtime/job/ids.py", "from pagefleet.backends import cpu", True),
        ("backends/cpu/host.py", "from pagefleet.runtime.errors import ErrorCode", True),
        ("kernels/reference/cache.py", "import pagefleet.runtime.sizes", True),
        ("runtime/sizes.py", "import pagefleet.backends.base", False),
    ],
)
def test_an_import_in_a_forbidden_direction_is_caught(tmp_path: Path, path: str, line: str, broken: bool) -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed (the dev extra has it)")
    _copy_of_the_tree(tmp_path)
    (tmp_path / "pagefleet").mkdir()
    for top in TOP:
        shutil.move(tmp_path / top, tmp_path / "pagefleet" / top)
    target = tmp_path / "pagefleet" / path
    target.write_text(target.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = subprocess.run(
        [lint, "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == int(broken), done.stdout + done.stderr
    if broken:
        assert path.removesuffix(".py").replace("/", ".") in done.stdout


# -- what files say --------------------------------------------------------------------------------------------------


def test_no_file_speaks_of_one_machine_or_of_a_registry_host() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    machine = re.compile(r"/(root|work|opt|home|tmp/dev)/[a-z]|pypi[.]org|pythonhosted[.]org|npmjs[.]")
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            found = machine.search(path.read_text(encoding="utf-8", errors="replace"))
            assert not found, f"{name}: {found and found[0]}"


# -- README ----------------------------------------------------------------------------------------------------------


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_commands_compose_to_a_valid_configuration() -> None:
    from pagefleet.runtime.compose import load_config

    commands = re.findall(r"^pagefleet (\w+)([^#\n]*)", README, re.MULTILINE)
    assert len(commands) >= 7
    for command, overrides in commands:
        load_config(overrides.split(), command)


def test_readme_python_example_uses_names_and_arguments_that_exist() -> None:
    from pagefleet.runtime import LLM, SamplingParams

    (example,) = _blocks("python")
    calls = [n for n in ast.walk(ast.parse(example)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    for kind in (LLM, SamplingParams):
        (call,) = (c for c in calls if isinstance(c.func, ast.Name) and c.func.id == kind.__name__)
        inspect.signature(kind).bind(*call.args, **{k.arg: None for k in call.keywords if k.arg})
    for name in re.findall(r"`llm\.(\w+)", README):
        assert hasattr(LLM, name), name


def test_readme_python_example_runs_on_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    from pagefleet.runtime.home import home_folder

    model = home_folder() / "models" / "smollm2-135m-instruct"
    if not model.is_dir():
        pytest.skip("not fetched: python tools/fetch_models.py smollm2")
    (example,) = _blocks("python")
    changed = re.sub(r'LLM\("[^"]*"', f"LLM({str(model)!r}", example)
    assert changed != example
    exec(compile(changed, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "Paris" in shown
    assert "OutputError" not in shown


def test_readme_rows_are_good_rows_and_its_error_codes_are_all_there_are() -> None:
    from pagefleet.runtime.errors import ErrorCode
    from pagefleet.runtime.job.readers import RawRow
    from pagefleet.runtime.job.rows import Form, RowParser

    (rows,) = _blocks("json")
    parser = RowParser(("m",), {}, seed=0, unreadable_form=Form.SIMPLE)
    for number, line in enumerate(rows.splitlines()):
        json.loads(line)
        assert parser.parse(RawRow(line.encode(), f"line {number}", 1.0), number).error is None
    table = README.partition("| code |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", table)} == {code.value for code in ErrorCode}


def test_readme_exit_codes_are_those_of_the_command() -> None:
    from pagefleet.runtime import cli

    said = {int(n) for n in re.findall(r"(?<=[ \n])(\d+) (?:all|some|refused|interrupted|anything)", README)}
    assert said == {cli.OK, cli.FAILED, cli.REFUSED, cli.SOME_ROWS, cli.INTERRUPTED}


def test_files_that_readme_names_exist() -> None:
    named = re.findall(r"`((?:runtime|backends|kernels|conf|tests|tools)/[\w./]*)`", README)
    named += re.findall(r"\]\(([\w./]+)\)", README)
    assert len(named) >= 5
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []
