"""Optimizers over the ops."""

from bakeoff.optim.adamw import AdamW
from bakeoff.optim.controller import NestedController
from bakeoff.optim.muon import Muon
from bakeoff.optim.muon_groups import muon_groups
from bakeoff.optim.nested import DeepNestedOptimizer, nested_groups

__all__ = ["AdamW", "DeepNestedOptimizer", "Muon", "NestedController", "muon_groups", "nested_groups"]
