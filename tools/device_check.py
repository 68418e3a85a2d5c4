"""Prove and measure the GPU backend on the card of this machine: one command, under eight minutes, no network.

    python tools/device_check.py [--json FILE] [--minutes 7.5] [--only decode --only prefill] [--dry]

Needs torch, triton, transformers and this checkout. The sections run in order of importance, each within its own
budget of seconds, in a process that is replaced when a section fails so badly that the card no longer answers, or does
not end. A failure is a row with its reason; the rest goes on. `--dry` runs every section's code on CPU tensors with the
kernels in Triton's interpreter, at tiny sizes: it proves the script, and its numbers mean nothing.

Exit code 0 if nothing failed and every target was met, 1 otherwise, 2 if there is no card to check.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    from device_checks.sections import SECTIONS
    from device_checks.supervisor import supervise
    from device_checks.worker import work

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--minutes", type=float, default=7.5, help="ends within this time, whatever hangs")
    parser.add_argument("--only", action="append", choices=[s.name for s in SECTIONS], help="may be given again")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on CPU tensors, kernels interpreted")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)  # what the script starts itself with
    asked = parser.parse_args(argv)
    if asked.worker:
        return work(asked.worker, asked.dry)
    names = [s.name for s in SECTIONS if not asked.only or s.name in asked.only]
    return supervise(names, asked.dry, asked.minutes * 60, asked.json)


if __name__ == "__main__":
    if not (ROOT / ".dev").is_dir():
        sys.exit(f"error: {ROOT} is no checkout of Pagefleet")
    sys.path.insert(1, str(ROOT / ".dev"))  # `pagefleet` from this checkout, installed or not
    sys.exit(main())
