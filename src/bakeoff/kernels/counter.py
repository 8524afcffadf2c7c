"""How many kernels of ours were launched: the proof that a candidate's own code ran."""

__all__ = ["count", "launches"]

_total = 0


def launches() -> int:
    """Launches of Triton and CUDA C++ kernels in this process so far."""
    return _total


def count(launched: int = 1) -> None:
    """Note that so many kernels were launched."""
    global _total
    _total += launched
