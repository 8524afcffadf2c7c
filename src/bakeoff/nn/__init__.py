"""Thin modules over the ops."""

from bakeoff.nn.attention import KeyValues, attend
from bakeoff.nn.mlp import MLP
from bakeoff.nn.norm import RMSNorm
from bakeoff.nn.rotary import HasRotaryTables

__all__ = ["MLP", "HasRotaryTables", "KeyValues", "RMSNorm", "attend"]
