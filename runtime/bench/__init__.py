"""`pagefleet bench`: workloads of known sizes through the engine, beside what the machine could do at best."""

from pagefleet.runtime.bench.command import run_bench

__all__ = ["run_bench"]
