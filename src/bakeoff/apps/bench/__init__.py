"""Benchmarks: every candidate and installed peer over each op's grid, and how well the selector chooses."""
