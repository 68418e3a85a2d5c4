"""Build the compiled CPU kernels in place: for a checkout that is used without being installed, or after a change.

    python tools/build_native.py            plain build, kernels/cpu/_native*.so
    python tools/build_native.py asan       with address and undefined-behaviour sanitizers, for tools/sanitize.sh

Files that did not change are compiled again too; `CXX="ccache g++" CC="ccache gcc"` avoids that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g"


def build(sanitize: bool) -> int:
    """Run setuptools' own build on pyproject.toml; returns its exit code."""
    environment = dict(os.environ)
    if sanitize:
        environment["CFLAGS"] = environment["CXXFLAGS"] = environment["LDFLAGS"] = SANITIZE
    command = "from setuptools import setup; setup()"
    return subprocess.call(
        [sys.executable, "-c", command, "-q", "build_ext", "--inplace", "--force"], cwd=ROOT, env=environment
    )


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["asan"]):
        sys.exit(__doc__)
    sys.exit(build(sanitize=bool(sys.argv[1:])))
