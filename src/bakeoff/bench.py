"""Contests for two ops at a given size, from Python: `bakeoff.bench.benchmark_rms_norm(16, 256, 384)`."""

from bakeoff.apps.bench.published import benchmark_rms_norm, benchmark_rotary, manual_kernel_benchmark

__all__ = ["benchmark_rms_norm", "benchmark_rotary", "manual_kernel_benchmark"]
