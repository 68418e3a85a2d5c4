"""A wrong key, group or value is refused with what is allowed; text stays text and numbers stay numbers."""

import subprocess
import sys

import pytest

from pagefleet.backends import registry
from pagefleet.runtime.choices import create_backend
from pagefleet.runtime.compose import load_config
from pagefleet.runtime.config import CacheConfig, SchedulerConfig, check_ready, installed_backends
from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.sizes import format_size, parse_size

REFUSED = [
    ("hardware=epyc_gena", "hardware: expected one of a100, auto, epyc_genoa", "did you mean 'epyc_genoa'"),
    ("precision=bf61", "precision: expected one of auto, bf16, fp16, fp32", "did you mean 'bf16'"),
    ("backend=cpus", "backend: expected one of auto, cpu, cuda, onnx, reference, rocm", "did you mean 'cpu'"),
    ("backend.attention=flash", "backend.attention: expected one of auto, triton, flash_attn", "'flash'"),
    ("backend.graphs=maybe", "backend.graphs: expected one of auto, on, off", "'maybe'"),
    ("backend.graph_buckets=[0]", "backend.graph_buckets: expected an integer from 1", "got 0"),
    ("backend.graph_buckets=[]", "backend.graph_buckets: expected different numbers", "got []"),
    ("backend.graph_buckets=[8,2]", "backend.graph_buckets: expected different numbers", "got [8, 2]"),
    ("backend.graph_buckets=[a]", "backend.graph_buckets", "'a'"),
    ("backend.tiles=sm100", "backend.tiles: expected one of auto, sm80", "did you mean"),
    ("hardware.memory=lots", "hardware.memory: expected a size such as 2GiB", "'lots'"),
    ("cache.blocksize=3", "cache.blocksize: no such key", "did you mean 'cache.block_size'"),
    ("+cache.foo=1", "cache.foo: no such key", "allowed: cache.dtype, cache.block_size"),
    ("schedular.max_sequences=3", "schedular.max_sequences: no such key", "did you mean 'scheduler.max_sequences'"),
    ("hardwear=auto", "hardwear: no such key or group", "did you mean 'hardware'"),
    ("cache.block_size=abc", "cache.block_size: expected an integer", "'abc'"),
    ("cache.block_size=0", "cache.block_size: expected an integer from 1 to 256", "got 0"),
    ("cache.dtype=bf17", "cache.dtype: expected one of auto, fp32, bf16, fp16", "did you mean 'bf16'"),
    ("cache.memory=2GX", "cache.memory: expected a size such as 2GiB", "'2GX'"),
    ("cache.memory_fraction=1.5", "cache.memory_fraction: expected a number in (0.0, 1.0]", "1.5"),
    ("cache.prefix_caching=maybe", "cache.prefix_caching: expected true or false", "'maybe'"),
    ("scheduler.batch_timeout_ms=-1", "scheduler.batch_timeout_ms: expected a number in [0.0, 60000.0]", "-1"),
    ("job.progress=live", "job.progress: expected one of auto, rich, plain, off", "'live'"),
    ("scheduler.reserve_ratio=nan", "scheduler.reserve_ratio: expected a number", "nan"),
    ("speculation=ngrm", "speculation: expected one of ngram, none", "did you mean 'ngram'"),
    ("speculation.name=draft", "speculation: expected one of none, ngram", "'draft'"),
    ("speculation.num_tokens=0", "speculation.num_tokens: expected an integer from 1 to 64", "got 0"),
    ("speculation.longest_match=1", "speculation.longest_match: expected an integer from 2 to 64", "got 1"),
    ("speculation.break_even_rows=0", "speculation.break_even_rows: expected an integer from 1", "got 0"),
    ("speculation.first_chance=1.5", "speculation.first_chance: expected a number in [0.0, 1.0]", "1.5"),
    ("model.max_len=0", "model.max_len: expected an integer >= 1 or null", "0"),
    ("model=/data/llama", "model: expected one of gemma3_270m", "model.path="),
    ("precision.group_size=64", "precision.group_size=64: only w8a16 and w4a16 have groups", "not precision=auto"),
    ("precision.quantize_head=true", "precision.quantize_head=true: precision=auto quantises nothing", ""),
    ("precision.compute=int8", "precision.compute: expected one of auto, fp32, bf16, fp16", "'int8'"),
    ("seed=1.5", "seed: expected an integer", "'1.5'"),
    ("job.on_mismatch=ignore", "job.on_mismatch: expected one of refuse, restart", "'ignore'"),
    ("+job.defaults.temprature=1", "job.defaults.temprature: not a sampling parameter", "did you mean 'temperature'"),
    ("job.defaults.structured={regx: a}", "job.defaults.", "regx"),
    ("+job.defaults.top_p=2", "job.defaults.top_p: expected a number in (0.0, 1.0]", "got 2"),
    ("bench.num_prompts=3", "bench.num_prompts: no such key or group", "allowed for batch"),
    ("hydra.searchpath=[/no/such/folder]", "hydra.searchpath", "/no/such/folder is not a folder that exists"),
    ("nonsense", "'nonsense': not an override", "key=value"),
]
LATER = [
    ("precision=fp8", "precision", "auto, bf16, fp16, fp32, w4a16, w8a16, w8a8"),
    ("precision.name=fp8", "precision", "auto, fp32, bf16, fp16, w8a8, w8a16, w4a16"),
    *[
        (f"cache.dtype={d}", "cache.dtype", "auto, fp32, bf16, fp16, int8")
        for d in ("fp8", "fp8_e4m3", "fp8_e5m2", "int4")
    ],
    ("cache.window=1024", "cache.window", "null"),
    ("cache.quant_group_size=128", "cache.quant_group_size", "null"),
]


@pytest.mark.parametrize(("override", "message", "also"), REFUSED, ids=[r[0] for r in REFUSED])
def test_a_wrong_override_is_refused_with_what_is_allowed(override, message, also):
    with pytest.raises(ConfigError) as refusal:
        load_config([override])
    assert message in str(refusal.value)
    assert also in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("override", "key", "available"), LATER, ids=[r[0] for r in LATER])
def test_a_name_that_comes_later_is_known_but_not_available(override, key, available):
    with pytest.raises(ConfigError) as refusal:
        load_config([override])
    message = str(refusal.value)
    assert message.startswith(key)
    assert f"not available in this version; available: {available}" in message


def test_an_unknown_command_is_refused_with_the_commands():
    with pytest.raises(ConfigError, match="batch, plan, doctor, bench, gate"):
        load_config([], "bacth")


@pytest.mark.parametrize(
    ("command", "missing"),
    [("batch", "model.path, job.input, job.output"), ("plan", "model.path"), ("bench", "model.path")],
)
def test_what_a_command_needs_is_named(command, missing):
    with pytest.raises(ConfigError, match=f"needs {missing}"):
        check_ready(load_config([], command), command)
    check_ready(load_config([], "doctor"), "doctor")


def test_a_declared_backend_without_code_is_refused_before_anything_is_loaded():
    assert {"cpu", "reference"} <= set(installed_backends())
    declared_only = next(n for n in ("onnx", "rocm", "cuda", None) if n not in installed_backends())
    if declared_only is None:
        pytest.skip("all declared backends are here")
    config = load_config([f"backend={declared_only}", "model.path=x"], "plan")
    with pytest.raises(ConfigError, match=r"not available in this version; available: auto, cpu"):
        check_ready(config, "plan")


@pytest.mark.parametrize(
    "text",
    ["123E4", "1e5", "0123", "1_000", "true", "on", "abc123", "v1.0", "12.50", "inf", "nan"],
)
def test_revision_stays_the_text_that_was_typed(text):
    assert load_config([f"model.revision={text}"]).model.revision == text


def test_null_stays_null_where_text_is_optional():
    assert load_config(["model.revision=null"]).model.revision is None


@pytest.mark.parametrize(
    "path",
    [
        "data/a=b.jsonl",
        "runs (old)/x.jsonl",
        "~/x y.jsonl",
        "in/*.jsonl.gz",
        "it's.jsonl",
        "2024",
        "C:\\data\\x.jsonl",
        "a[1].jsonl",
        "日本.jsonl",
        "a:b{c}.jsonl",
        "dir\\",
        "it's\\",
    ],
)
def test_any_path_can_be_named(path):
    assert load_config([f"job.input={path}"]).job.input == path


def test_quotes_are_respected():
    assert load_config(["job.input='a,b.jsonl'"]).job.input == "a,b.jsonl"
    assert load_config(['model.revision="12"']).model.revision == "12"


def test_what_a_gpu_backend_is_asked_for_reaches_it(monkeypatch):
    asked = ["backend.attention=triton", "backend.graphs=off", "backend.graph_buckets=[1,2,8]"]
    given = {}
    create = registry.create
    monkeypatch.setattr(registry, "create", lambda name, options: given.update(options.extra) or create(name, options))
    create_backend(load_config(["backend=reference", *asked]))
    assert given == {"attention": "triton", "graphs": "off", "graph_buckets": [1, 2, 8], "tiles": "auto"}


def test_small_numbers_stay_numbers():
    config = load_config(["cache.memory_fraction=1e-6", "+job.defaults.min_p=1e-6"])
    assert config.cache.memory_fraction == 1e-6
    assert config.job.defaults == {"min_p": 1e-6}
    assert isinstance(config.job.defaults["min_p"], float)


def test_sampling_defaults_need_no_plus_sign():
    assert load_config(["job.defaults={temperature: 0, stop: [a, b]}"]).job.defaults == {
        "temperature": 0,
        "stop": ["a", "b"],
    }
    assert load_config(["job.defaults.max_tokens=64"]).job.defaults == {"max_tokens": 64}


def test_a_default_constraint_on_the_text_is_checked():
    config = load_config(["job.defaults={structured: {choice: [a, b]}}"])
    assert config.job.defaults == {"structured": {"choice": ["a", "b"]}}


def test_the_degrade_plan_can_lower_the_budget_below_the_number_of_sequences():
    assert SchedulerConfig(max_batched_tokens=64).max_sequences == 256


def test_the_dataclasses_check_themselves_without_hydra():
    with pytest.raises(ConfigError):
        CacheConfig(block_size=True)
    with pytest.raises(ConfigError):
        SchedulerConfig(max_sequences=0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["batch", "cache.dtype=int4"],
        ["batch", "cache.block_size=0", "model.path=m", "job.input=a", "job.output=b"],
        ["batch", "hardware=nope"],
        ["batch"],
        ["plan", "backend=nope"],
        ["bench", "model.path=m", "bench.num_prompts=0"],
    ],
    ids=" ".join,
)
def test_a_refusal_comes_before_torch_is_imported(arguments, tmp_path):
    code = (
        "import sys\nfrom pagefleet.runtime.cli import main\n"
        f"code = main({arguments!r})\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules, 'heavy import'\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("pagefleet: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 1024**3), ("2gb", 2 * 10**9), ("1.5 KiB", 1536), ("1048576", 1048576), (7, 7), ("3 B", 3)],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 GiBs", "0", "1e9", "2 G B", None, True, 0])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match=r"cache\.memory: expected"):
        parse_size(text, "cache.memory")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1010 * 1024, "1010 KiB"),
        (3 * 1024**3, "3 GiB"),
        (-(2**20), "-1 MiB"),
        (3 * 1024**4, "3 TiB"),
    ],
)
def test_sizes_are_written(size, text):
    assert format_size(size) == text
