"""What a chunk's gates make of memory, momentum and gradients: numbers from lr, decay and forget alone.

M_t = beta_t M_0 + f_t S_0 - sum_i G_ti u_i and S_b = m S_0 - sum_i n_i u_i, without a division, so that
rates of exactly 0 and 1 are like all others.
"""

import torch
import torch.nn.functional as F

from bakeoff.ops.memory_scan.plain import products, products_backward

__all__ = ["tables", "tables_backward"]


def tables(lr: torch.Tensor, decay: torch.Tensor, forget: torch.Tensor, out: torch.Tensor) -> None:
    """Fills `out`, [G, chunks, b + 2, b + 2]: row t <= b holds beta_t, f_t and G_t1 ... G_tb, the last row
    0, m and n_1 ... n_b. Tokens that the last chunk lacks count as lr 0, decay 1, forget 0."""
    kept, pushed, rates = _factors(lr, decay, forget, out.shape[1], out.shape[2] - 2)
    pushed = pushed * rates[..., None, :]
    out[..., :-1, 0] = kept[..., 0]
    torch.matmul(kept, F.pad(pushed[..., 1:, :], (0, 0, 1, 0)), out=(whole := torch.empty_like(kept)))
    out[..., :-1, 1:] = whole
    out[..., -1, 0] = 0
    out[..., -1, 1:] = pushed[..., -1, :]


def tables_backward(
    lr: torch.Tensor,
    decay: torch.Tensor,
    forget: torch.Tensor,
    dread: torch.Tensor,
    dwritten: torch.Tensor,
    dweights: torch.Tensor,
    dlast: torch.Tensor,
    shift: int,
    dlr: torch.Tensor,
    ddecay: torch.Tensor,
    dforget: torch.Tensor,
) -> None:
    """Fills the gates' gradients. Given are those of the tables, in parts that are summed over dimension 2:
    dread [G, chunks, parts, 2, b] of beta and f where they are read; dwritten, alike, of G's last row and of
    n; dweights [G, chunks, b, b] of G where it is read; dlast [G, chunks, parts, 3] of beta_b, f_b and m."""
    _, chunks, _, _, b = dwritten.shape
    T = lr.shape[1]
    kept, pushed, rates = _factors(lr, decay, forget, chunks, b)
    learned = F.pad((pushed * rates[..., None, :])[..., 1:, :], (0, 0, 1, 0))
    read_beta, read_push = dread.sum(2).unbind(2)
    ends, momenta = dwritten.sum(2).unbind(2)
    of_beta, of_push, of_kept = dlast.sum(2).unbind(-1)
    dbeta, dwhole = torch.zeros_like(kept[..., 0]), torch.zeros_like(kept)
    if shift >= 0:
        dbeta[..., shift : shift + b] += read_beta
        dwhole[..., shift : shift + b, 0] += read_push
        dwhole[..., shift : shift + b, 1:] += dweights
    for part, row in ((slice(chunks - 1), b), (slice(chunks - 1, chunks), T - (chunks - 1) * b)):
        dbeta[:, part, row] += of_beta[:, part]
        dwhole[:, part, row, 0] += of_push[:, part]
        dwhole[:, part, row, 1:] += ends[:, part]
    dkept = dwhole @ learned.mT
    dkept[..., 0] += dbeta
    dpushed = kept.mT @ dwhole
    dpushed[..., 0, :] = 0
    dpushed[..., -1, 0] += of_kept
    dpushed[..., -1, 1:] += momenta
    for out, found in (
        (dlr, (dpushed * pushed).sum(-2)),
        (ddecay, products_backward(pushed, dpushed * rates[..., None, :])),
        (dforget, -products_backward(kept, dkept)),
    ):
        out.copy_(found[..., 1:].flatten(1)[:, :T])


def _factors(
    lr: torch.Tensor, decay: torch.Tensor, forget: torch.Tensor, chunks: int, b: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The products of 1 - forget and of decay, [G, chunks, b + 1, b + 1], and the rates, 1 before the
    first."""
    missing = chunks * b - lr.shape[1]

    def by_chunk(x: torch.Tensor, rest: float) -> torch.Tensor:
        padded = F.pad(x.float(), (0, missing), value=rest)
        return F.pad(padded.unflatten(1, (chunks, b)), (1, 0), value=1.0)

    return products(by_chunk(1 - forget.float(), 1.0)), products(by_chunk(decay, 1.0)), by_chunk(lr, 0.0)
