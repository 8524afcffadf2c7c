"""First weights, which all models have in common."""

from torch import nn

from bakeoff.models.ngrams import NGrams
from bakeoff.nn import NeuralMemory
from bakeoff.nn.neural_memory import Projected

__all__ = ["normal_matrices"]


def normal_matrices(module: nn.Module, layers: int) -> None:
    """Makes the matrices of a model of so many layers normal, of deviation 0.02; those that end a branch are
    divided by sqrt(2 * layers), so that the stream's variance does not grow with depth (Radford et al. 2019).
    N-grams and memories keep their own start.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Linear | nn.Embedding | nn.ParameterList):
            for matrix in child.parameters():
                nn.init.normal_(matrix, std=0.02 * (2 * layers) ** (-0.5 * (name in ("out", "down"))))
        elif not isinstance(child, NGrams | NeuralMemory | Projected):
            normal_matrices(child, layers)
