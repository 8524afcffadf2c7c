"""The yardstick `bakeoff.apps.bench.large_chunk` against its definition by autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bakeoff.apps.bench.large_chunk import large_chunk


def drawn() -> tuple[list[Tensor], list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = [normal(2, 7, 3) for _ in range(3)]
    matrices = [normal(2, 5, 3), normal(2, 5, 3), normal(2, 3, 5)]
    return tokens, matrices, torch.rand(3, 2, 7, 1, generator=generator, dtype=torch.float64)


def answer(matrices: list[Tensor], x: Tensor) -> Tensor:
    gate, up, down = matrices
    return (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT


def steps(k: Tensor, v: Tensor, matrices: list[Tensor], rates: Tensor) -> list[Tensor]:
    """Each matrix's sum over tokens of rate times the descent of -f(k_t) . v_t."""
    sums = [torch.zeros_like(w) for w in matrices]
    for t in range(k.shape[1]):
        leaves = [w.clone().requires_grad_() for w in matrices]
        loss = -(answer(leaves, k[:, t : t + 1]) * v[:, t : t + 1]).sum()
        found = torch.autograd.grad(loss, leaves)
        sums = [s - rate[:, t, :, None] * g for s, rate, g in zip(sums, rates, found, strict=True)]
    return sums


def test_it_answers_then_descends_and_keeps_rows_lengths() -> None:
    (q, k, v), matrices, rates = drawn()
    o, *new = large_chunk(q, k, v, *matrices, rates)
    torch.testing.assert_close(o, answer(matrices, q))
    for w, step, mine in zip(matrices, steps(k, v, matrices, rates), new, strict=True):
        expected = F.normalize(w + step, dim=2) * w.norm(dim=2, keepdim=True)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_an_orthogonal_step_has_singular_values_of_about_one() -> None:
    """Far nearer to the step that a singular value decomposition makes than the plain one, which is large."""
    (q, k, v), matrices, rates = drawn()
    o, *new = large_chunk(q, k, v, *matrices, 1e3 * rates, True)
    torch.testing.assert_close(o, answer(matrices, q))
    plain = large_chunk(q, k, v, *matrices, 1e3 * rates)[1:]
    for w, step, mine, other in zip(matrices, steps(k, v, matrices, rates), new, plain, strict=True):
        u, _, vh = torch.linalg.svd(step, full_matrices=False)
        scale = w.norm(dim=2, keepdim=True)
        expected = F.normalize(w + u @ vh, dim=2) * scale  # what Newton and Schulz approach
        assert (mine - expected).norm() < 0.25 * (other - expected).norm()
