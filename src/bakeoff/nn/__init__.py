"""Thin modules over the ops."""

from bakeoff.nn.attention import KeyValues, QKNorm, attend, attend_one
from bakeoff.nn.fp8 import Fp8Linear, convert
from bakeoff.nn.memory_state import NeuralMemoryState
from bakeoff.nn.mlp import MLP
from bakeoff.nn.neural_memory import NeuralMemory
from bakeoff.nn.norm import LayerNorm, RMSNorm
from bakeoff.nn.rotary import HasRotaryTables

__all__ = [
    "MLP",
    "Fp8Linear",
    "HasRotaryTables",
    "KeyValues",
    "LayerNorm",
    "NeuralMemory",
    "NeuralMemoryState",
    "QKNorm",
    "RMSNorm",
    "attend",
    "attend_one",
    "convert",
]
