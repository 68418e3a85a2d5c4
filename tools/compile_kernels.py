"""Compile the Triton kernels for GPUs that need not be here, and show shared memory, registers and spills.

    python tools/compile_kernels.py [--every] [--arch sm90 --arch gfx942] [--match attention]

Exit code 1 if a kernel does not compile, needs more shared memory than its target has, or spills.
"""

from __future__ import annotations

import argparse
import sys

from pagefleet.kernels.triton import unavailable


def main() -> int:
    """Compile, print a line for each kernel, and say what is wrong with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="the whole sweep, not the covering set that CI takes")
    parser.add_argument("--arch", action="append", help="may be given more than once; all if not given")
    parser.add_argument("--match", default="", help="only launches whose name contains this")
    asked = parser.parse_args()
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 2
    from pagefleet.kernels.triton import launches
    from pagefleet.kernels.triton.ahead import compiling_for
    from pagefleet.kernels.triton.targets import TARGETS, target_of

    bad = total = 0
    for arch in asked.arch or [name for name in TARGETS if name != "interpreter"]:
        target = target_of(arch)
        for name, launch in (launches.every if asked.every else launches.covering)(target):
            if asked.match not in name:
                continue
            with compiling_for(target) as done:
                try:
                    launch()
                except Exception as error:
                    print(f"{arch:8} {name}: DOES NOT COMPILE: {type(error).__name__}: {error}"[:400], flush=True)
                    bad += 1
            for compiled in done:
                complaints = target.complaints(compiled.shared_bytes, compiled.scratch_bytes)
                total, bad = total + 1, bad + bool(complaints)
                print(
                    f"{arch:8} {compiled.kernel:18} {compiled.seconds:5.1f} s, {compiled.registers} registers, "
                    f"{compiled.shared_bytes / 1024:.0f} KiB shared: {name} {'; '.join(complaints)}",
                    flush=True,
                )
    print(f"{total} kernels, {bad} of them bad")
    return 1 if bad or not total else 0


if __name__ == "__main__":
    sys.exit(main())
