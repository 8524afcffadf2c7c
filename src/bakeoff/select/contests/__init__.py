"""Contests: candidates verified, measured and judged against each other."""
