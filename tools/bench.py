"""Measure Pagefleet on workloads W1 to W4, beside the machine's floor and beside other engines, in turns.

    python tools/bench.py --model DIR                                    # this checkout, every workload
    python tools/bench.py --model DIR --ours precision=bf16 --ours precision=fp32 --peer transformers
    python tools/bench.py --set-up vllm,openvino --peer-envs ENVS        # once: environments of peers
    python tools/bench.py --model DIR --peer vllm --peer openvino:model=CONVERTED --peer-envs ENVS --json FILE

Every engine runs in a process of its own, which is stopped while another one runs. All get the same prompts, given as
token ids; each run has other prompts of the same lengths. Peers are never dependencies: each has a virtual environment,
ENVS/NAME, and a driver in tools/bench_peers/ that tells its options. `pagefleet bench` measures one engine in its own
process, with the same workloads, floor and measures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_peers.contender import OURS, PEERS, Contender, ContenderError, parse, set_up
from bench_peers.table import markdown

from pagefleet.runtime.bench.command import ceilings_of, model_sizes
from pagefleet.runtime.bench.floor import KV_BYTES, WEIGHT_BYTES, floor
from pagefleet.runtime.bench.workloads import SMALL_WORKLOADS, WORKLOADS, TokenSource, Workload, read_text, warmup
from pagefleet.runtime.compose import load_config
from pagefleet.runtime.errors import PagefleetError
from pagefleet.runtime.home import home_folder
from pagefleet.runtime.text.tokenizer import Tokenizer

_BLOCK = 16


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 with a message if an engine or a setting fails."""
    options = _arguments().parse_args(argv)
    try:
        if options.set_up:
            set_up(options.set_up.split(","), options.peer_envs)
            return 0
        if not options.model:
            raise ContenderError("--model: name a checkpoint folder")
        report = compare(options)
    except (ContenderError, PagefleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(markdown(report))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder")
    parser.add_argument("--workloads", default="w1,w2,w3,w4", help="comma-separated")
    parser.add_argument("--small", action="store_true", help="the workloads at a scale of seconds on a tiny model")
    parser.add_argument("--runs", type=int, default=3, help="the median counts")
    parser.add_argument("--ours", action="append", help="options of this checkout: precision=bf16:kv=int8; repeatable")
    parser.add_argument(
        "--peer", action="append", default=[], help=f"NAME:key=value, of {', '.join(PEERS)}; repeatable"
    )
    parser.add_argument("--peer-envs", type=Path, default=home_folder() / "peers", help="folder of their environments")
    parser.add_argument("--set-up", help="make the environments of these peers (comma-separated), and end")
    parser.add_argument("--threads", type=int, default=_usable_cores())
    parser.add_argument("--text", help="file whose tokens the prompts are made of")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-floor", action="store_true", help="do not measure the machine's ceilings")
    parser.add_argument("--json", type=Path, help="write the report there")
    return parser


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Start every engine, let them take turns, and gather the report.

    Raises:
        ContenderError: an engine cannot be started or fails.
    """
    workloads = _workloads(options)
    source = TokenSource(Tokenizer.load(options.model).encode(read_text(options.text)))
    report: dict[str, Any] = {
        **_circumstances(options),
        "workloads": {w.name: {"shape": w.describe()} for w in workloads},
    }
    with tempfile.TemporaryDirectory() as logs:
        contenders = _contenders(options, Path(logs))
        if not options.no_floor:
            _add_floors(report, options, workloads, contenders)
        try:
            for contender in contenders:
                contender.start(_settings(options, workloads), _environment(options.threads))
            answers = _in_turns(contenders, workloads, source, options)
        finally:
            for contender in contenders:
                contender.end()
    report["engines"] = {c.label: _result(c, answers[c.label], report, contenders[0], answers) for c in contenders}
    return report


def _workloads(options: argparse.Namespace) -> list[Workload]:
    table = SMALL_WORKLOADS if options.small else WORKLOADS
    names = options.workloads.split(",")
    unknown = [name for name in names if name not in table]
    if unknown:
        raise ContenderError(f"--workloads: no {', '.join(unknown)}; expected some of {', '.join(table)}")
    return [table[name] for name in names]


def _contenders(options: argparse.Namespace, logs: Path) -> list[Contender]:
    made = []
    for text in options.ours or [""]:
        label = f"pagefleet {text}".strip()
        made.append(
            Contender(label, OURS, Path(sys.executable), parse(f":{text}" if text else "")[1], logs / f"{len(made)}")
        )
    for text in options.peer:
        name, given = parse(text)
        if name not in PEERS:
            raise ContenderError(f"--peer: no {name!r}; expected one of {', '.join(PEERS)}")
        python = options.peer_envs / name / "bin" / "python"
        if name == "transformers" and not python.is_file():
            python = Path(sys.executable)  # it is a dependency of ours: this environment has it
        label = " ".join([name, *(f"{k}={v}" for k, v in _without_paths(given).items())])
        made.append(Contender(label, PEERS[name], python, given, logs / f"{len(made)}"))
    labels = [contender.label for contender in made]
    if len(set(labels)) < len(labels):
        raise ContenderError(f"two engines are called the same: {', '.join(labels)}; tell them apart by an option")
    return made


def _settings(options: argparse.Namespace, workloads: list[Workload]) -> dict[str, Any]:
    """What every driver is told. `kv_tokens`: most tokens that are in a cache at once, without any sharing."""
    return {
        "model": str(Path(options.model).resolve()),
        "threads": options.threads,
        "max_len": max(w.longest for w in workloads) + _BLOCK,
        "max_sequences": max(len(w.lengths) for w in workloads),
        "kv_tokens": max(sum(w.lengths) + len(w.lengths) * (w.new + _BLOCK) for w in workloads),
    }


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _in_turns(
    contenders: list[Contender], workloads: list[Workload], source: TokenSource, options: argparse.Namespace
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """label -> workload -> answers, one a run. Every second run goes through the engines in the opposite order."""
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {c.label: {w.name: [] for w in workloads} for c in contenders}
    for run in range(-1, options.runs):
        for workload in workloads:
            shape = warmup(workload, requests=2) if run < 0 else workload
            prompts = source.prompts(shape, options.seed, run)
            for contender in contenders if run % 2 == 0 else contenders[::-1]:
                answer = contender.run(prompts, shape.new)
                if run >= 0:
                    answers[contender.label][workload.name].append(answer)
                    print(f"{workload.name} run {run}: {contender.label}: {answer['seconds']:.3f} s", file=sys.stderr)
    return answers


def _result(
    contender: Contender,
    answers: dict[str, list[dict[str, Any]]],
    report: dict[str, Any],
    first: Contender,
    everyone: dict[str, dict[str, list[dict[str, Any]]]],
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, runs in answers.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        reference = statistics.median(run["seconds"] for run in everyone[first.label][name])
        made = sum(len(ids) for ids in runs[0]["token_ids"])
        floors = report["workloads"][name].get("floor", {}).get(contender.label)
        results[name] = {
            "seconds": seconds,
            "seconds_of_runs": [run["seconds"] for run in runs],
            "output_tokens_per_s": made / seconds,
            "times_the_first": seconds / reference,
            **({"times_floor": seconds / floors["seconds"]} if floors else {}),
            "same_first_token": _same_first_token(runs, everyone[first.label][name]),
            **{k: v for k, v in runs[-1].items() if k not in ("seconds", "token_ids")},
        }
    return {**contender.facts, "options": _without_paths(contender.options), "workloads": results}


def _same_first_token(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Share of prompts whose first new token is the first engine's: whether it is the same model that ran."""
    pairs = [
        (a[0], b[0])
        for x, y in zip(runs, others, strict=True)
        for a, b in zip(x["token_ids"], y["token_ids"], strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def _add_floors(
    report: dict[str, Any], options: argparse.Namespace, workloads: list[Workload], contenders: list[Contender]
) -> None:
    """Ceilings, and for each of our own settings the floor of every workload."""
    config = load_config([f"model.path={options.model}", f"backend.threads={options.threads}"], "bench")
    ours = {}
    for contender in contenders:
        precision = contender.options.get("precision", "auto")
        precision = "bf16" if precision == "auto" else precision
        kv = contender.options.get("kv", "auto")
        kv = ("fp32" if precision == "fp32" else "bf16") if kv == "auto" else kv
        if contender.kind is OURS and precision in WEIGHT_BYTES and kv in KV_BYTES:
            ours[contender.label] = (precision, kv)
    sizes = model_sizes(config)
    ceilings = ceilings_of(config, {precision for precision, _ in ours.values()})
    report["ceilings"] = ceilings.as_dict()
    for workload in workloads:
        report["workloads"][workload.name]["floor"] = {
            label: floor(workload, sizes, ceilings, *dtypes).as_dict() for label, dtypes in ours.items()
        }


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """Where and how it was measured, without names of machines or folders."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "model": Path(options.model).name,
        "processor": _processor(),
        "threads": options.threads,
        "runs": options.runs,
        "scale": "small" if options.small else "full",
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("torch", "transformers")}},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _without_paths(options: dict[str, str]) -> dict[str, str]:
    return {key: Path(value).name if "/" in value else value for key, value in options.items()}


if __name__ == "__main__":
    sys.exit(main())
