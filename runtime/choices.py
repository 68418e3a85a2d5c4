"""What "auto" becomes on this machine, settled in one place for the engine, the memory plan and a job's fingerprint."""

from __future__ import annotations

from dataclasses import replace

from pagefleet.backends import registry
from pagefleet.backends.base import Backend, BackendOptions
from pagefleet.runtime.config import Config
from pagefleet.runtime.errors import ConfigError


def create_backend(config: Config) -> tuple[Backend, Config]:
    """The backend that `config` asks for, and `config` with the names of what was chosen in place of every "auto".

    Raises:
        BackendError: the backend is unknown or cannot run here.
        ConfigError: it lacks the dtype asked for.
    """
    asked = config.backend
    extra = {key: getattr(asked, key) for key in ("attention", "graphs", "graph_buckets", "tiles")}
    options = BackendOptions(threads=asked.threads, exact=config.precision.exact, extra=extra)
    backend = registry.create(config.backend.name, options)
    capabilities = backend.capabilities()
    precision, dtypes = config.precision, capabilities.compute_dtypes
    if precision.scheme is None:
        dtype = _chosen("precision", precision.name, (*dtypes, *capabilities.schemes), dtypes[0])
        precision = replace(precision, name=dtype, compute=dtype)
    else:
        _chosen("precision", precision.name, (*dtypes, *capabilities.schemes), dtypes[0])
        dtype = _chosen("precision.compute", precision.compute, dtypes, dtypes[0])
        precision = replace(precision, compute=dtype)
    kv_dtype = _chosen("cache.dtype", config.cache.dtype, capabilities.kv_dtypes, dtype)
    return backend, replace(
        config,
        backend=replace(config.backend, name=capabilities.name),
        precision=precision,
        cache=replace(config.cache, dtype=kv_dtype),
    )


def _chosen(key: str, asked: str, available: tuple[str, ...], default: str) -> str:
    value = default if asked == "auto" else asked
    if value not in available:
        raise ConfigError(f"{key}={value}: the backend here has {', '.join(available)}")
    return value
