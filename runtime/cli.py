"""`pagefleet batch|plan|doctor|bench|gate`: the first word picks the primary configuration, the rest is Hydra's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pagefleet.backends import detect
from pagefleet.runtime.compose import config_errors, explain, keep_text, register_resolvers, to_config
from pagefleet.runtime.config import COMMANDS, Config, check_ready, result_shaping, suggestion
from pagefleet.runtime.errors import ConfigError, PagefleetError
from pagefleet.runtime.startup import spin_briefly_at_barriers

log = logging.getLogger("pagefleet.runtime.cli")  # also when it runs as __main__

OK, FAILED, REFUSED, SOME_ROWS, INTERRUPTED = 0, 1, 2, 3, 130
_SEVERITY = (OK, SOME_ROWS, REFUSED, FAILED)
_VALUE_FLAGS = {"-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"}
_VALUE_FLAGS |= {"--experimental-rerun"}
_SHOW_FLAGS = {"-c", "--cfg", "-p", "--package"}
_INFO_VALUES = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}

USAGE = """usage: pagefleet COMMAND [group=option] [key=value] [Hydra flags]

commands:
  batch    run every row of a file through a model; resumes if it was killed
  plan     what memory a model needs and how many tokens fit, before loading it
  doctor   which backends are available here, and why (not)
  bench    measure throughput and latency on prompts of known lengths
  gate     measure what a precision and a KV dtype cost in quality

pagefleet COMMAND --help lists its groups, keys and flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (the constants above)."""
    spin_briefly_at_barriers()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(USAGE, file=sys.stderr)
        return REFUSED
    command, *rest = arguments
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return OK
    if command == "--version":
        print(f"pagefleet {_version()}")
        return OK
    if command not in COMMANDS:
        return _refuse(f"no command {command!r}; expected one of {', '.join(COMMANDS)}{suggestion(command, COMMANDS)}")
    return _run_hydra(command, rest)


def _run_hydra(command: str, rest: list[str]) -> int:
    codes: list[int] = []

    def task(composed: DictConfig) -> None:
        code = run_command(command, composed)
        codes.append(code)
        if code == INTERRUPTED:  # a sweep stops here
            raise SystemExit(INTERRUPTED)

    if not sys.stderr.isatty():  # read when tqdm is imported, so before transformers is: no bars in logs
        os.environ.setdefault("TQDM_DISABLE", "1")
    register_resolvers()
    try:
        plain = without_show_flags(rest)
        if plain != rest:  # Hydra shows a configuration without running anything: its values are checked here
            shown: list[DictConfig] = []
            _compose_and_run(command, plain, shown.append)
            for composed in shown:
                to_config(composed, command)
        _compose_and_run(command, rest, task)
    except ConfigError as error:
        return _refuse(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse(str(explain(error, command)))
    except ValueError as error:  # Hydra's, about its flags; those of a command end in run_command
        return _refuse(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED if stop.code else OK
    return worst(codes)


def _compose_and_run(command: str, rest: Sequence[str], task: Callable[[DictConfig], object]) -> None:
    with _hydra_environment([f"pagefleet {command}", *order_arguments(rest)]), config_errors(command):
        hydra.main(config_path="pkg://pagefleet.conf", config_name=command, version_base="1.3")(task)()


def without_show_flags(rest: Sequence[str]) -> list[str]:
    """The arguments without `--cfg` and what belongs to it; all of them where Hydra will refuse it beside others."""
    if any(argument in ("-m", "--multirun", "-i", "--info", "-h", "--help") for argument in rest):
        return list(rest)
    kept = []
    before = ""
    for argument in rest:
        name, _, _ = argument.partition("=")
        if name not in (*_SHOW_FLAGS, "--resolve") and before not in _SHOW_FLAGS:
            kept.append(argument)
        before = argument
    return kept


def order_arguments(rest: Sequence[str]) -> list[str]:
    """Hydra's flags first, then the overrides: its parser takes them in one piece only."""
    flags: list[str] = []
    overrides: list[str] = []
    before = ""
    for argument in rest:
        is_value = before in _VALUE_FLAGS or (before in ("-i", "--info") and argument in _INFO_VALUES)
        if argument != "--":
            (flags if argument.startswith("-") or is_value else overrides).append(argument)
        before = argument
    return [*flags, "--", *keep_text(overrides)]


def run_command(command: str, composed: DictConfig) -> int:
    """Check one composed configuration and run the command with it; errors become messages and exit codes."""
    try:
        config = to_config(composed, command)
        check_ready(config, command)
        _explain_hardware()
        return _command(command)(config)
    except ConfigError as error:
        return _refuse(str(error))
    except PagefleetError as error:  # a model or a job refused before it started
        return _refuse(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "BackendError":  # importing its class would import torch
            return _refuse(str(error))
        log.exception("pagefleet %s failed", command)
        return FAILED


def worst(codes: Sequence[int]) -> int:
    """The exit code of a sweep: the most severe of its jobs' codes."""
    return max(codes, key=lambda code: _SEVERITY.index(code) if code in _SEVERITY else len(_SEVERITY), default=OK)


def _command(command: str) -> Callable[[Config], int]:
    """Imported when it is known that the configuration is right: most of them load torch."""
    if command == "batch":
        return _batch
    if command == "plan":
        from pagefleet.runtime.plan_command import run_plan

        return run_plan
    if command == "doctor":
        from pagefleet.runtime.doctor import run_doctor

        return run_doctor
    if command == "bench":
        from pagefleet.runtime.bench import run_bench

        return run_bench
    from pagefleet.runtime.gate import run_gate

    return run_gate


def _batch(config: Config) -> int:
    from pagefleet.runtime import LLM
    from pagefleet.runtime.choices import create_backend
    from pagefleet.runtime.job.batch_job import run_job

    chosen = create_backend(config)[1]
    return run_job(chosen, lambda: LLM.from_config(chosen), result_shaping=result_shaping(chosen))


def _explain_hardware() -> None:
    """Say which target `hardware=auto` became, and why."""
    if not HydraConfig.initialized():
        return
    choices = HydraConfig.get().runtime.choices
    if choices.get("hardware") == "auto":
        target = detect.detect(choices.get("backend", "auto"))
        log.info("hardware=auto takes %s: %s", target.name, target.reason)


@contextmanager
def _hydra_environment(argv: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and prints errors itself unless HYDRA_FULL_ERROR is set; we print them."""
    saved_argv, saved_full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = saved_argv
        if saved_full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_full


def _refuse(message: str) -> int:
    print(f"pagefleet: {message}", file=sys.stderr)
    return REFUSED


def _version() -> str:
    from importlib.metadata import version

    return version("pagefleet")


if __name__ == "__main__":
    sys.exit(main())
