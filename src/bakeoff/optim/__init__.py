"""Optimizers over the ops."""

from bakeoff.optim.adamw import AdamW
from bakeoff.optim.controller import NestedController
from bakeoff.optim.nested import DeepNestedOptimizer, nested_groups

__all__ = ["AdamW", "DeepNestedOptimizer", "NestedController", "nested_groups"]
