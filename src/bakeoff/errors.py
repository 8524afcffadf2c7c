"""The exceptions bakeoff raises on purpose. Each message says what to do about it."""

__all__ = [
    "BakeoffError",
    "ContestError",
    "DeviceError",
    "PolicyError",
    "SwapError",
    "TableError",
    "Unsupported",
]


class BakeoffError(Exception):
    """Base of every error bakeoff raises on purpose."""


class Unsupported(BakeoffError, ValueError):
    """The candidate asked for by name can't take these inputs; the message gives every reason."""


class PolicyError(BakeoffError, ValueError):
    """A selection setting that doesn't exist, or a miss under the ``strict`` policy."""


class ContestError(BakeoffError, RuntimeError):
    """A contest could not be held at all (the reference or the eager candidate failed)."""


class TableError(BakeoffError, ValueError):
    """A table given by name can't be read."""


class DeviceError(BakeoffError, ValueError):
    """A device that this machine doesn't have."""


class SwapError(BakeoffError, ValueError):
    """A replacement that was required and can't be made, or a swap that can't be undone."""
