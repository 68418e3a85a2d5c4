"""Every file of conf/ composes to a valid Config, and what the user asks for wins over what a target says."""

from dataclasses import fields
from importlib.resources import files

import pytest
from omegaconf import OmegaConf

from pagefleet.backends import detect
from pagefleet.kernels.triton.targets import TARGETS
from pagefleet.runtime.compose import leaf_types, load_config
from pagefleet.runtime.config import (
    COMMANDS,
    TILES,
    BenchConfig,
    Config,
    GateConfig,
    JobConfig,
    check_ready,
    result_shaping,
)
from pagefleet.runtime.errors import ConfigError

CONF = files("pagefleet.conf")
GROUPS = ("backend", "hardware", "precision", "cache", "scheduler", "speculation", "model")
CPUS = ("generic", "laptop", "epyc_genoa", "xeon_spr", "xeon_icx")
GPUS = ("h200", "h100", "a100", "l4", "rtx4090", "mi300x", "mi325x", "mi355x", "rx7900xtx")
HARDWARE = (*CPUS, *GPUS)


def options(group):
    return sorted(f.name.removesuffix(".yaml") for f in (CONF / group).iterdir() if f.name.endswith(".yaml"))


@pytest.mark.parametrize("override", [f"{g}={o}" for g in GROUPS for o in options(g)])
def test_every_group_option_composes_and_is_valid(override):
    assert isinstance(load_config([override]), Config)


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_in_yaml_are_the_defaults_of_the_dataclasses(command):
    assert load_config([], command) == Config()


def test_yaml_lists_every_key_of_the_schema():
    listed = set()
    for name in ("config", *COMMANDS):
        tree = OmegaConf.load(str(CONF / f"{name}.yaml"))
        for section, value in tree.items():
            if section in ("defaults", "hydra"):
                continue
            listed |= {f"{section}.{key}" for key in value} if OmegaConf.is_dict(value) else {section}
    assert listed == set(leaf_types())


def test_the_hardware_targets_that_were_named_are_there():
    assert set(options("hardware")) == {"auto", *HARDWARE}


@pytest.mark.parametrize("name", HARDWARE)
def test_a_hardware_target_sets_the_three_knobs_and_gives_a_reason_for_each(name):
    text = (CONF / "hardware" / f"{name}.yaml").read_text()
    for knob in ("name: ", "block_size: ", "batch_timeout_ms: "):
        lines = [line for line in text.splitlines() if line.strip().startswith(knob) and "#" in line]
        assert lines, f"{name} sets {knob} without a reason"
        assert len(lines[-1].partition("#")[2].strip()) > 10
    assert load_config([f"hardware={name}"]).hardware.name == name


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_target_sets_budgets_graphs_and_tiles_with_a_reason_for_each(name):
    lines = (CONF / "hardware" / f"{name}.yaml").read_text().splitlines()
    for knob in ("memory", "tiles", "graph_buckets", "memory_fraction", "max_batched_tokens", "max_sequences"):
        (at,) = (i for i, line in enumerate(lines) if line.strip().startswith(f"{knob}: "))
        reason = lines[at - 1 if knob == "graph_buckets" else at].partition("#")[2]
        assert len(reason.strip()) > 10, f"{name} sets {knob} without a reason"
    config = load_config([f"hardware={name}"])
    assert config.backend.tiles in TILES
    assert config.backend.graph_buckets[-1] == config.scheduler.max_sequences, "full steps would not be graphs"
    assert config.scheduler.max_batched_tokens >= 4 * config.speculation.break_even_rows, "prefill would idle the cores"
    shorter = config.cache.memory_fraction < load_config([]).cache.memory_fraction
    assert not shorter, "a card has less beside the engine than a host"
    assert load_config([f"hardware={name}", "backend=cuda"]).backend.graph_buckets == config.backend.graph_buckets


def test_tiles_can_be_those_of_every_architecture_of_the_kernels():
    assert set(TILES) == {"auto", *TARGETS} - {"interpreter"}


def test_hardware_auto_takes_the_values_of_the_detected_target_for_the_backend(detected):
    detected |= {
        "target": detect.Target("epyc_genoa", "found"),
        "cpu": detect.Target("laptop", "found"),
    }
    for overrides, same in (([], "epyc_genoa"), (["hardware=auto", "backend=cpu"], "laptop")):
        config, named = load_config(overrides), load_config([f"hardware={same}", *overrides[1:]])
        assert config == named
        assert config.hardware.name == same


def test_what_is_named_wins_over_what_is_detected(detected):
    detected["target"] = detect.Target("epyc_genoa", "found")
    assert load_config(["hardware=xeon_icx"]) == load_config(["hardware=xeon_icx", "backend=auto"])
    config = load_config(["precision=fp32", "cache.block_size=8"])
    assert (config.hardware.name, config.precision.name, config.cache.block_size) == ("epyc_genoa", "fp32", 8)


def test_hardware_target_changes_precision_block_size_and_timeout():
    config = load_config(["hardware=h200"])
    assert (config.precision.name, config.cache.block_size, config.scheduler.batch_timeout_ms) == ("bf16", 32, 50)


USER = ["precision=fp32", "cache.block_size=8", "scheduler.batch_timeout_ms=7", "hardware=epyc_genoa"]


@pytest.mark.parametrize("order", [USER[i:] + USER[:i] for i in range(len(USER))], ids=" ".join)
def test_the_user_wins_over_the_target_in_any_order(order):
    config = load_config(order)
    assert config.precision.name == "fp32"
    assert config.cache.block_size == 8
    assert config.scheduler.batch_timeout_ms == 7


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_option_wins_over_the_target_too(order):
    config = load_config(["cache=long", "scheduler=latency", "precision=auto", "hardware=epyc_genoa"][::order])
    assert config.cache.block_size == 64
    assert config.scheduler.batch_timeout_ms == 0
    assert config.precision.name == "auto"
    assert config.hardware.name == "epyc_genoa"


def test_precision_is_a_group_and_precision_exact_a_key():
    config = load_config(["precision=bf16", "precision.exact=true"])
    assert (config.precision.name, config.precision.exact) == ("bf16", True)


LAUNCH_LINE = """
model.path=/m backend=reference precision=fp32 precision.exact=true cache.dtype=bf16 cache.block_size=16
cache.memory=2GiB cache.prefix_caching=true cache.sink_tokens=4 scheduler.max_batched_tokens=2048
scheduler.max_sequences=256 scheduler.batch_timeout_ms=100 model.max_len=8192 hardware=auto
job.input=a job.output=b job.on_mismatch=restart
"""


def test_the_names_of_the_launch_line_all_work():
    config = load_config(LAUNCH_LINE.split())
    assert config.cache.memory_bytes == 2 * 1024**3
    assert config.model.max_len == 8192
    check_ready(config, "batch")


def test_a_users_own_folder_adds_options(tmp_path):
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(
        "# @package _global_\nhardware: {name: mine}\ncache: {block_size: 48}\n"
    )
    config = load_config([f"hydra.searchpath=[{tmp_path}]", "hardware=mine"])
    assert (config.hardware.name, config.cache.block_size) == ("mine", 48)


def test_a_users_own_file_is_checked_like_ours(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine.yaml").write_text("blok_size: 48\n")
    with pytest.raises(ConfigError, match=r"cache\.blok_size: no such key.*did you mean 'cache\.block_size'"):
        load_config([f"hydra.searchpath=[{tmp_path}]", "cache=mine"])


def test_model_group_names_checkpoints_in_the_cache_folder(home_in_tmp):
    config = load_config(["model=smollm2_135m_instruct"])
    assert config.model.path == str(home_in_tmp / "models" / "smollm2-135m-instruct")


def test_result_shaping_holds_what_changes_tokens_and_nothing_else():
    base = result_shaping(load_config(["model.path=/m"]))
    changed = {
        "model.path": "model.path=/n",
        "model.revision": "model.revision=v2",
        "backend": "backend=reference",
        "precision": "precision=fp32",
        "precision.exact": "precision.exact=true",
        "cache.dtype": "cache.dtype=fp32",
        "seed": "seed=1",
        "model.max_len": "model.max_len=9",
        "job.defaults": "+job.defaults.temperature=0.5",
    }
    for key, override in changed.items():
        other = result_shaping(load_config(["model.path=/m", override]))
        assert {k for k in base if base[k] != other[k]} == {key}
    for override in (
        "scheduler.max_sequences=3",
        "speculation=ngram",
        "cache.block_size=8",
        "job.fsync_interval_s=2",
        "cache.memory=1GiB",
    ):
        assert result_shaping(load_config(["model.path=/m", override])) == base


def test_sections_of_other_commands_keep_their_defaults():
    config = load_config([], "plan")
    assert config.job == JobConfig()
    assert config.bench == BenchConfig()
    assert load_config([], "gate").gate == GateConfig()
    assert {f.name for f in fields(Config)} >= {"job", "plan", "doctor", "bench", "gate"}
