"""The Triton kernels of large chunks, all between products that cuBLAS takes."""

__all__ = ["BLOCK", "COLS", "NARROW", "ROWS", "SCAN", "across"]

ROWS, COLS = 16, 128
"""A tile of tokens and columns."""
BLOCK = 2048
"""Elements of a matrix a program."""
NARROW = 64
"""Elements of a bias a program."""
SCAN = 512
"""Tokens that are scanned at once."""


def across(size: int, each: int) -> int:
    """Programs side by side."""
    return -(-size // each)
