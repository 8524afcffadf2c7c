"""What tests of every byte model share."""

import math
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def moved(model: Model, dtype: torch.dtype = torch.float64) -> Model:
    """`model` with weights far from their start, where residual branches hardly matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def check_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Shapes, and that the loss is the mean cross entropy of the logits; gives the loss."""
    logits, none = model(ids)
    assert logits.shape == (*ids.shape, 256)
    assert none is None
    targets = ids.roll(-1, 1)
    hidden, loss = model(ids, targets)
    assert hidden is None
    assert loss.dtype == torch.float32
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss, expected)
    checked: Tensor = loss
    return checked


def check_gradients(model: nn.Module, loss: Tensor) -> None:
    """Every parameter gets a gradient that is not zero."""
    loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert without == []


def check_blind_guess(model: nn.Module) -> None:
    """The loss of an untrained model."""
    _, loss = model(torch.randint(256, (2, 80)), torch.randint(256, (2, 80)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.15)
