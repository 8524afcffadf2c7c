"""Benchmarks: every candidate and installed peer over each op's grid, and how well the selector chooses."""

from bakeoff.bench.published import benchmark_rms_norm, benchmark_rotary, manual_kernel_benchmark

__all__ = ["benchmark_rms_norm", "benchmark_rotary", "manual_kernel_benchmark"]
