"""From command-line overrides to a checked `Config`, and from Hydra's errors to messages that say what is allowed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pagefleet.backends import detect
from pagefleet.runtime.config import (
    COMMANDS,
    LATER_PRECISIONS,
    Config,
    check_choice,
    suggestion,
)
from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.home import home_folder

CONF_MODULE = "pagefleet.conf"
_COMMAND_SECTIONS = {"batch": "job", "plan": "plan", "doctor": "doctor", "bench": "bench", "gate": "gate"}
_LATER_OPTIONS = {"precision": LATER_PRECISIONS}


def register_resolvers() -> None:
    """What YAML files may ask: `${pagefleet_home:}`, the cache folder, and `${detected_hardware:BACKEND}`, a target."""
    OmegaConf.register_new_resolver("pagefleet_home", lambda: str(home_folder()), replace=True)
    OmegaConf.register_new_resolver(
        "detected_hardware", lambda backend: f"/hardware/{detect.detect(backend).name}", replace=True
    )


def load_config(overrides: Sequence[str] = (), command: str = "batch") -> Config:
    """Compose the configuration of `command` with Hydra overrides, and check every value.

    Raises:
        ConfigError: an override, group, key or value is wrong; the message lists what is allowed.
    """
    check_choice("command", command, COMMANDS)
    register_resolvers()
    with config_errors(command), initialize_config_module(CONF_MODULE, version_base="1.3", job_name="pagefleet"):
        composed = compose(config_name=command, overrides=keep_text(overrides))
    return to_config(composed, command)


def to_config(composed: DictConfig, command: str = "batch") -> Config:
    """The dataclasses of a composed configuration.

    Raises:
        ConfigError: a key is not in the schema, a value has the wrong type or is not allowed.
    """
    with config_errors(command):
        merged = OmegaConf.merge(OmegaConf.structured(Config), composed)
        OmegaConf.resolve(merged)
        config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    return config


# -- text stays text -------------------------------------------------------------------------------------------------


def leaf_types(schema: type = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type of every value in the schema."""
    hints = get_type_hints(schema)
    leaves: dict[str, Any] = {}
    for item in fields(schema):
        kind = hints[item.name]
        if isinstance(kind, type) and is_dataclass(kind):
            leaves |= leaf_types(kind, f"{prefix}{item.name}.")
        else:
            leaves[prefix + item.name] = kind
    return leaves


def keep_text(overrides: Sequence[str]) -> list[str]:
    """Quote what Hydra would read as a number or refuse, where the schema wants text.

    `model.revision=123E4` names a commit, not 1230000.0; `job.input=runs (old)/a=b.jsonl` is a path. A mapping of free
    keys takes new ones without Hydra's `+`: `job.defaults.temperature=0`.
    """
    kinds = leaf_types()
    text_keys = {key for key, kind in kinds.items() if kind is str or str in get_args(kind)}
    return [_keep_text(override, text_keys) for override in overrides]


def _keep_text(line: str, text_keys: set[str]) -> str:
    key, equals, raw = line.partition("=")
    if equals and re.match(r"job\.defaults(\.|$)", key):
        return f"++{line}"
    if not equals or key.lstrip("+") not in text_keys:
        return line
    try:
        parsed: Override | None = OverridesParser.create().parse_override(line)
    except HydraException:
        parsed = None
    if parsed is None:
        unquoted = not re.match(r"""\s*['"]""", raw) and "${" not in raw
        return f"{key}={_quote(raw)}" if unquoted else line
    value = parsed.value()
    if isinstance(value, (bool, int, float)):
        return f"{key}={_quote(raw.strip())}"
    if isinstance(value, ChoiceSweep) and not re.search(r"""['"()\[\]{}]""", raw):
        return f"{key}={','.join(_quote_number(part.strip()) for part in raw.split(','))}"
    return line


def _quote_number(part: str) -> str:
    value = OverridesParser.create().parse_override(f"x={part}").value()
    return _quote(part) if isinstance(value, (bool, int, float)) else part


def _quote(raw: str) -> str:
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", raw)  # Hydra: backslashes are escaped only before a quote
    if trailing := re.search(r"\\+$", escaped):
        escaped += trailing[0]
    return f"'{escaped}'"


# -- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def config_errors(command: str) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise (and the warning about a search path) into ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=r"[\s\S]*is not available", category=UserWarning)
            yield
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, UserWarning) as error:
        raise explain(error, command) from error


def explain(error: BaseException, command: str) -> ConfigError:
    """What was wrong, what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error)
    root = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override!r}: not an override ({error.message.splitlines()[-1].strip()}); expected key=value"
        )
    text = str(error)
    named = re.search(
        r"(?:Could not (?:override|append to config\. An item is already at|delete from config\.)|"
        r"Error merging override|Could not append) '([^']*)'",
        text,
    )
    key = re.split(r"=", named[1])[0].lstrip("+~") if named else None
    if "not in struct" in text + str(root) or "No match in the defaults list" in text:
        return ConfigError(_unknown_key(key or str(getattr(root, "full_key", "")), command))
    if isinstance(root, OmegaConfBaseException):
        full_key = root.full_key or key or ""
        if re.search(r"Key '.*' not in '.*'", str(root)):
            return ConfigError(_unknown_key(full_key, command))
        return ConfigError(_wrong_type(full_key, str(root.msg or root).splitlines()[0]))
    if isinstance(error, UserWarning):
        path = re.search(r"path=(\S+) is not available", text)
        return ConfigError(f"hydra.searchpath: {path[1] if path else text} is not a folder that exists")
    if isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, Exception):
        text = f"{text.rstrip('.')}: {error.__cause__}"
    return ConfigError(" ".join(text.split()))


def _missing_option(error: MissingConfigException) -> ConfigError:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.partition("/") if missing.startswith("model/") else missing.rpartition("/")
    options = [name for name in error.options or () if name != "target"]
    if group in _LATER_OPTIONS and option in _LATER_OPTIONS[group]:
        return ConfigError(f"{group}={option}: not available in this version; available: {', '.join(options)}")
    hint = "; to name a checkpoint use model.path=..." if group == "model" else ""
    if not options:
        return ConfigError(f"{group or 'group'}: {' '.join(str(error).split())}{hint}")
    return ConfigError(
        f"{group}: expected one of {', '.join(options)}; got {option!r}{suggestion(option, options)}{hint}"
    )


def _unknown_key(key: str, command: str) -> str:
    others = set(_COMMAND_SECTIONS.values()) - {_COMMAND_SECTIONS[command]}
    leaves = [leaf for leaf in leaf_types() if leaf.split(".")[0] not in others]
    section = key.rpartition(".")[0]
    siblings = [leaf for leaf in leaves if leaf.rpartition(".")[0] == section]
    if not section or not siblings:
        sections = sorted({leaf.partition(".")[0] for leaf in leaves})
        allowed = f"allowed for {command}: {', '.join(sections)}"
    else:
        allowed = f"allowed: {', '.join(siblings)}"
        sections = siblings
    return f"{key}: no such key or group; {allowed}{suggestion(key, [*leaves, *sections])}"


def _wrong_type(key: str, message: str) -> str:
    kind = leaf_types().get(key)
    if kind is None:
        return f"{key}: {message}" if key else message
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null"}
    kinds = [names[k] for k in (get_args(kind) or (kind,)) if k in names]
    value = re.search(r"[Vv]alue '(.*?)'(?: of type| is not| could)", message)
    expected = " or ".join(kinds) if kinds else str(kind)
    return f"{key}: expected {expected}, got {value[1]!r}" if value else f"{key}: expected {expected} ({message})"
