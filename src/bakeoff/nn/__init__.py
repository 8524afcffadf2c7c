"""Thin modules over the ops."""

from bakeoff.nn.norm import RMSNorm

__all__ = ["RMSNorm"]
