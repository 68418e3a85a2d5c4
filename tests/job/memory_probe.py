"""One job of many tiny rows with the fake engine; prints peak memory and time. `memory_probe.py FOLDER ROWS`."""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time
from pathlib import Path

from pagefleet.runtime.config import Config
from pagefleet.runtime.job import run_job


def fake_engine(folder: Path):
    spec = importlib.util.spec_from_file_location("job_fake_engine", Path(__file__).with_name("fake_engine.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = module.FakeEngine()
    engine.keep = False
    return engine


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(count):
            file.write(json.dumps({"id": f"row number {i}", "prompt": f"p{i}", "max_tokens": 4}) + "\n")
    config = Config()
    config.job.input, config.job.output = str(folder / "rows.jsonl"), str(folder / "results.jsonl")
    config.job.output = str(folder / "out" / "results.jsonl")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    code = run_job(config, lambda: fake_engine(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.monotonic() - began
    print(json.dumps({"code": code, "rows": count, "grown_kib": peak - before, "peak_kib": peak, "seconds": seconds}))


if __name__ == "__main__":
    main()
