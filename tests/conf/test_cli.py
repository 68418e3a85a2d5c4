"""The command line: first word, Hydra's flags, sweeps and their exit codes, and nothing left behind."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from pagefleet.runtime import cli, startup
from pagefleet.runtime.errors import ConfigError, ModelError


@pytest.fixture
def ran(monkeypatch):
    """Replace the commands by one that notes its Config and returns the seed as exit code."""
    configs = []

    def command(config):
        configs.append(config)
        return config.seed

    monkeypatch.setattr(cli, "_command", lambda name: command)
    return configs


READY = ["model.path=m", "job.input=in.jsonl", "job.output=out.jsonl"]


def test_a_command_runs_where_it_was_started(work_folder, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_command", lambda name: lambda config: seen.append((name, os.getcwd())) or 0)
    assert cli.main(["batch", *READY]) == 0
    assert seen == [("batch", str(work_folder))]
    assert list(work_folder.iterdir()) == []


def test_the_first_word_picks_the_primary_configuration(ran):
    assert cli.main(["plan", "model.path=m", "plan.memory=1GiB"]) == 0
    assert ran[0].plan.memory == "1GiB"


@pytest.mark.parametrize("argument", ["bach", "BATCH", "--batch"])
def test_an_unknown_command_lists_the_commands(argument, capsys):
    assert cli.main([argument]) == 2
    assert "expected one of batch, plan, doctor, bench, gate" in capsys.readouterr().err


def test_no_command_prints_the_usage_and_is_refused(capsys):
    assert cli.main([]) == 2
    assert "usage: pagefleet" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_the_commands(flag, capsys):
    assert cli.main([flag]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("batch", "plan", "doctor", "bench", "gate"))


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pagefleet 0")


@pytest.mark.parametrize("command", ["batch", "plan", "doctor", "bench", "gate"])
def test_help_of_a_command_lists_groups_and_keys(command, capsys, ran):
    assert cli.main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: pagefleet {command}" in out
    assert "xeon_icx" in out
    assert "block_size: 16" in out
    assert "--multirun" in out
    assert "$FLAGS" not in out
    assert "$APP" not in out
    assert "$CONFIG" not in out
    assert ran == []


def test_cfg_job_prints_the_composed_configuration_and_runs_nothing(capsys, ran, work_folder):
    assert cli.main(["batch", "--cfg", "job", "hardware=h200", "model.revision=123E4"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed.cache.block_size == 32
    assert printed.model.revision == "123E4"
    sections = {"hardware", "model", "backend", "precision", "cache", "scheduler", "speculation", "job"}
    assert set(printed) == {*sections, "seed"}
    assert ran == []
    assert list(work_folder.iterdir()) == []


@pytest.mark.parametrize(
    "flags", [["--cfg", "job"], ["-c", "job"], ["--cfg=job"], ["--cfg", "job", "-p", "cache"]], ids=" ".join
)
def test_cfg_refuses_a_wrong_value_as_a_run_would(flags, capsys, ran, work_folder):
    for override, said in (
        ("cache.block_size=0", "cache.block_size: expected an integer from 1 to 256, got 0"),
        ("cache.memory=lots", "cache.memory"),
        ("+job.defaults.temprature=1", "did you mean 'temperature'?"),
    ):
        assert cli.main(["batch", override, *flags]) == 2
        shown, refused = capsys.readouterr()
        assert shown == ""
        assert refused.startswith("pagefleet: ")
        assert said in refused
    assert cli.main(["batch", *flags, "cache.block_size=8"]) == 0
    assert "block_size: 8" in capsys.readouterr().out
    assert ran == []
    assert list(work_folder.iterdir()) == []


def test_flags_and_overrides_may_be_mixed(capsys, ran):
    assert cli.main(["batch", "seed=5", "--cfg", "job", "cache.block_size=8", "--resolve", "precision=fp32"]) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.seed, printed.cache.block_size, printed.precision.name) == (5, 8, "fp32")
    assert cli.main(["batch", "seed=5", "--info", "searchpath", "hardware=l4"]) == 0
    assert "pagefleet.conf" in capsys.readouterr().out


def test_a_sweep_runs_every_combination_and_leaves_nothing_in_the_users_folder(ran, work_folder):
    code = cli.main(["batch", "-m", *READY, "cache.block_size=8,16", "precision=fp32,bf16"])
    assert code == 0
    assert sorted((c.cache.block_size, c.precision.name) for c in ran) == [
        (8, "bf16"),
        (8, "fp32"),
        (16, "bf16"),
        (16, "fp32"),
    ]
    assert list(work_folder.iterdir()) == []


def test_numbers_and_text_keep_their_kind_in_a_sweep(ran, work_folder):
    code = cli.main(
        ["batch", "-m", *READY, "cache.memory_fraction=1e-6,0.5", "model.revision=123E4,1e5", "job.defaults.min_p=1e-6"]
    )
    assert code == 0
    assert [(c.cache.memory_fraction, c.model.revision) for c in ran] == [
        (1e-6, "123E4"),
        (1e-6, "1e5"),
        (0.5, "123E4"),
        (0.5, "1e5"),
    ]
    assert all(c.job.defaults == {"min_p": 1e-6} and isinstance(c.job.defaults["min_p"], float) for c in ran)


def test_paths_that_hydra_would_refuse_work_in_a_sweep(ran, work_folder):
    assert cli.main(["batch", "-m", *READY[:1], "job.input=runs (old)/a=b.jsonl", "job.output=it's", "seed=0,0"]) == 0
    assert {(c.job.input, c.job.output) for c in ran} == {("runs (old)/a=b.jsonl", "it's")}


@pytest.mark.parametrize(
    ("codes", "worst"),
    [("0,3,0", 3), ("3,2,0", 2), ("2,1,3", 1), ("0,0", 0), ("3,7", 7)],
)
def test_the_exit_code_of_a_sweep_is_the_worst_of_its_jobs(codes, worst, ran, work_folder):
    assert cli.main(["batch", "-m", *READY, f"seed={codes}"]) == worst
    assert len(ran) == len(codes.split(","))


def test_an_interrupted_job_ends_the_sweep(ran, work_folder):
    assert cli.main(["batch", "-m", *READY, "seed=0,130,0"]) == 130
    assert [c.seed for c in ran] == [0, 130]


def test_a_job_of_a_sweep_that_is_refused_does_not_stop_the_others(ran, work_folder, capsys):
    assert cli.main(["batch", "-m", *READY, "cache.block_size=8,0,16"]) == 2
    assert [c.cache.block_size for c in ran] == [8, 16]
    assert "cache.block_size: expected an integer from 1 to 256, got 0" in capsys.readouterr().err


def test_a_sweep_over_an_unknown_option_runs_nothing(ran, work_folder, capsys):
    assert cli.main(["batch", "-m", *READY, "precision=fp32,fp33"]) == 2
    assert ran == []
    assert "did you mean 'fp32'" in capsys.readouterr().err


def test_a_comma_without_a_sweep_is_explained(ran, capsys):
    assert cli.main(["batch", *READY, "cache.block_size=8,16"]) == 2
    assert "--multirun" in capsys.readouterr().err


def test_searchpath_works_from_the_command_line(ran, tmp_path):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "careful.yaml").write_text("name: fp32\nexact: true\n")
    assert cli.main(["batch", *READY, f"hydra.searchpath=[{tmp_path}]", "precision=careful"]) == 0
    assert ran[0].precision.exact is True


def test_a_relative_searchpath_counts_from_where_the_command_was_started(ran, work_folder):
    (work_folder / "mine" / "cache").mkdir(parents=True)
    (work_folder / "mine" / "cache" / "tiny.yaml").write_text("block_size: 2\n")
    assert cli.main(["batch", *READY, "hydra.searchpath=[mine]", "cache=tiny"]) == 0
    assert ran[0].cache.block_size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hydra.searchpath=[/no/such]"], "/no/such is not a folder that exists"),
        (["--config-dir", "/no/such"], "/no/such"),
        (["--nonsense"], "--nonsense"),
        (["--cfg", "nonsense"], "nonsense"),
        (["--cfg", "job", "hardware=nope"], "hardware: expected one of"),
        (["--cfg", "job", "--info", "config"], "Only one of"),
    ],
    ids=str,
)
def test_wrong_flags_are_refused_without_a_traceback(arguments, message, ran, capsys):
    assert cli.main(["batch", *READY, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert ran == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("no such model"), 2),
        (ConfigError("bad"), 2),
        (KeyboardInterrupt(), 130),
        (RuntimeError("broken"), 1),
        (type("BackendError", (Exception,), {})("no device"), 2),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(error, code, monkeypatch, capsys):
    def fail(config):
        raise error

    monkeypatch.setattr(cli, "_command", lambda name: fail)
    assert cli.main(["batch", *READY]) == code
    if code == 2:
        assert str(error) in capsys.readouterr().err


def test_the_environment_and_arguments_are_put_back(ran, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = list(sys.argv)
    cli.main(["batch", *READY, "hardware=nope"])
    assert sys.argv == before
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_as_a_program_the_exit_code_reaches_the_shell(tmp_path):
    line = [sys.executable, "-m", "pagefleet.runtime.cli", "batch", "hardware=nope"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pagefleet: hardware: expected one of")


@pytest.mark.parametrize(
    ("asked", "spins"), [({}, "10000"), ({"OMP_WAIT_POLICY": "passive"}, "0"), ({"GOMP_SPINCOUNT": "77"}, "77")]
)
@pytest.mark.parametrize(
    "line", [["-m", "pagefleet.runtime.cli", "doctor"], ["-c", "from pagefleet.runtime import LLM"]], ids=["cli", "api"]
)
def test_openmp_threads_spin_briefly_at_barriers_unless_the_user_says_otherwise(line, asked, spins):
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"OMP_DISPLAY_ENV": "verbose"} | asked
    done = subprocess.run([sys.executable, *line], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr  # torch's OpenMP says what it took; 300000 if nobody says


def test_openmp_is_left_alone_once_torch_is_there(caplog, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", sys)
    with caplog.at_level("INFO"):
        startup.spin_briefly_at_barriers()
    assert "GOMP_SPINCOUNT" not in os.environ
    assert "GOMP_SPINCOUNT=10000" in caplog.text
