"""Operations that make the host wait for the device: found, or forbidden."""

import contextlib
import warnings
from collections.abc import Iterator

import torch

__all__ = ["WAITED", "forbid_sync", "sync_mode"]

WAITED = "called a synchronizing CUDA operation"
"""What PyTorch's warning says."""


@contextlib.contextmanager
def forbid_sync() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the GPU raises RuntimeError, at its line.

    Covers PyTorch's own operations (``.item()``, ``nonzero``, copies to pageable memory), not explicit
    ``torch.cuda.synchronize()`` and not other libraries. Nests; does nothing on a machine without CUDA.

    Example:
        >>> with forbid_sync():
        ...     total = torch.ones(3).sum()
    """
    if not torch.cuda.is_available():
        yield
        return
    with sync_mode("error"):
        yield


@contextlib.contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    """PyTorch's sync debug mode, "warn" or "error", inside."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
