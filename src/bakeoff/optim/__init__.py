"""Optimizers over the ops."""

from bakeoff.optim.adamw import AdamW

__all__ = ["AdamW"]
