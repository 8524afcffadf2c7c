"""A whole training step as one CUDA graph, and a guard against waiting for the device.

Issuing a step's thousand kernels one by one costs the host more than a small model costs the GPU. Captured
once, the step is replayed by one call: the same kernels on the same addresses, new data in fixed buffers.
"""

from bakeoff.graphs.capture import CapturedStep, capture_step, capture_stream
from bakeoff.graphs.not_capturable import NotCapturable
from bakeoff.graphs.sync import forbid_sync
from bakeoff.graphs.watch import KEEPS_PINNED

__all__ = ["KEEPS_PINNED", "CapturedStep", "NotCapturable", "capture_step", "capture_stream", "forbid_sync"]
