"""Thin modules over the ops."""

from bakeoff.nn.norm import RMSNorm
from bakeoff.nn.rotary import HasRotaryTables

__all__ = ["HasRotaryTables", "RMSNorm"]
