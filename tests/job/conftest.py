from __future__ import annotations

import importlib.util
import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pagefleet.runtime.config import Config
from pagefleet.runtime.job import run_job


def _load_fake():
    path = Path(__file__).with_name("fake_engine.py")
    spec = importlib.util.spec_from_file_location("job_fake_engine", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.FakeEngine


FakeEngine = _load_fake()


@dataclass
class JobBench:
    """A job in a folder of its own with a fake engine."""

    folder: Path
    input: Path = None
    output: Path = None
    engines: list = field(default_factory=list)
    messages: str = ""
    summary_text: str = ""

    def __post_init__(self) -> None:
        self.input = self.folder / "in" / "rows.jsonl"
        self.output = self.folder / "out" / "results.jsonl"
        self.input.parent.mkdir(exist_ok=True)

    def write(self, *rows: Any, path: Path | None = None) -> None:
        """Rows as JSON lines; bytes are written as they are."""
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (path or self.input).write_bytes(b"".join(line + b"\n" for line in lines))

    def run(self, engine: Any = None, shaping: dict | None = None, served: tuple = (), **job: Any) -> int:
        config = Config()
        config.model.path = "org/tiny-model"
        config.job.input, config.job.output = str(self.input), str(self.output)
        for name, value in job.items():
            setattr(config.job, name, value)
        made = FakeEngine() if engine is None else engine

        def factory():
            self.engines.append(made)
            return made

        out, err = io.StringIO(), io.StringIO()
        code = run_job(config, factory, result_shaping=shaping, served_names=served, stdout=out, stderr=err)
        self.messages, self.summary_text = err.getvalue(), out.getvalue()
        return code

    @property
    def journal(self) -> Path:
        return Path(f"{self.output}.journal")

    @property
    def summary(self) -> dict:
        return json.loads(Path(f"{self.output}.summary.json").read_text())

    def results(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def left_behind(self) -> list[str]:
        return sorted(p.name for p in self.output.parent.iterdir())


@pytest.fixture
def bench(tmp_path) -> JobBench:
    return JobBench(tmp_path)


@pytest.fixture
def fake_engine():
    return FakeEngine
