"""Muon's step where several ranks share the work: each orthogonalises some of the matrices, for all.

Every rank holds all matrices (DDP), or some rows of each (FSDP2). Momentum is kept as parameters are. A
matrix that lies in shards goes whole to the rank that it is assigned to, once a step; what comes of it goes
back to all ranks, or to each its rows. All ranks get the same bits. Two exchanges a step, one where nothing
is in shards; on CUDA in bfloat16, in which the iterations work anyway.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bakeoff.ops.adamw.group import factor_of, rate_of
from bakeoff.ops.muon.settings import Matrices, Settings, size_of
from bakeoff.ops.muon.update import take_step

__all__ = ["Share", "owners", "split_rows", "take_shared_step"]

Split = int | Sequence[int] | None


class Share(NamedTuple):
    """Among which ranks the work on a list of matrices is shared."""

    group: Any
    """The process group."""
    shapes: list[torch.Size]
    """Of the whole matrices."""
    sharded: bool
    """Whether each rank holds some rows: those of its chunk, as `torch.chunk` makes them."""

    def rows(self, matrix: int, rank: int) -> int:
        """How many rows of a matrix a rank holds."""
        count = self.shapes[matrix][0]
        if not self.sharded:
            return count
        each = -(-count // dist.get_world_size(self.group))
        return max(0, min(each, count - rank * each))


def owners(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """The rank that orthogonalises each matrix: the largest first, each to the one with the least to do."""
    work = [3 * m * m * n + m**3 for m, n in map(sorted, shapes)]
    loads, chosen = [0] * ranks, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-work[i], i)):
        chosen[i] = loads.index(min(loads))
        loads[chosen[i]] += work[i]
    return chosen


def take_shared_step(
    matrices: Matrices, how: Settings, impl: str | None, share: Share, splits: Split = None
) -> None:
    """The step of `muon_` on what this rank holds of each matrix. All ranks must call it with the same list.

    `splits`: the blocks of rows that are orthogonalised each by itself, as `split_rows` takes them.
    """
    params, grads, momentum, _ = matrices
    skip = None if how.found_inf is None else how.found_inf != 0
    wide = torch.promote_types(torch.promote_types(params[0].dtype, momentum[0].dtype), torch.float32)
    rate = rate_of(how)
    scaled = torch._foreach_mul([g.to(wide) for g in grads], _scalar(factor_of(how), wide))
    new = torch._foreach_mul([m.to(wide) for m in momentum], how.momentum_decay)
    torch._foreach_add_(new, scaled)
    _write(momentum, new, skip)
    if how.nesterov:
        torch._foreach_add_(scaled, new, alpha=how.momentum_decay)
    ahead = scaled if how.nesterov else new
    own = owners(share.shapes, dist.get_world_size(share.group))
    narrow = torch.bfloat16 if wide == torch.float32 and params[0].is_cuda else wide
    mine = [i for i, owner in enumerate(own) if owner == dist.get_rank(share.group)]
    parts = [u.to(narrow) for u in ahead]
    whole: Any = _collected(parts, own, mine, share) if share.sharded else ahead
    found = _orthogonalised({i: whole[i].to(wide) for i in mine}, how, impl, splits)
    back = _distributed({i: u.to(narrow) for i, u in found.items()}, own, parts[0], share)
    steps = [back[i].to(wide) for i in range(len(params))]
    blocks = [block for i, u in enumerate(steps) for block in _blocks(u, share, i, how.scale, splits)]
    if blocks:
        torch._foreach_mul_([rows for rows, _ in blocks], [size for _, size in blocks])
    torch._foreach_mul_(steps, _scalar(rate, wide))
    moved = torch._foreach_mul([p.to(wide) for p in params], _scalar(1.0 - rate * how.weight_decay, wide))
    torch._foreach_sub_(moved, steps)
    _write(params, moved, skip)
    torch.autograd.graph.increment_version(params)


def _scalar(number: float | Tensor, dtype: torch.dtype) -> Any:
    """A number that lists of this dtype are multiplied by in one launch."""
    return number.to(dtype) if isinstance(number, Tensor) else number


def _write(targets: list[Tensor], values: Sequence[Tensor], skip: Tensor | None) -> None:
    """Writes values, unless the step is skipped."""
    if skip is not None:
        values = [torch.where(skip, t, v.to(t.dtype)) for t, v in zip(targets, values, strict=True)]
    torch._foreach_copy_(targets, list(values))


def _orthogonalised(
    whole: dict[int, Tensor], how: Settings, impl: str | None, splits: Split
) -> dict[int, Tensor]:
    """X of each matrix, by the candidate of muon_ that is selected for it: it moves a zero by -X."""
    if not whole:
        return {}
    moved = {i: torch.zeros_like(u) for i, u in whole.items()}
    pieces = {i: (split_rows(moved[i], splits), split_rows(u, splits)) for i, u in whole.items()}
    plain = Settings(1.0, 0.0, nesterov=False, steps=how.steps, scale=how.scale)
    targets = [p for ps, _ in pieces.values() for p in ps]
    sources = [u for _, us in pieces.values() for u in us]
    take_step(Matrices(targets, sources, [torch.zeros_like(u) for u in sources]), plain, impl)
    for target in targets:
        if target.numel():
            target.div_(-size_of(target.shape, how.scale))
    return moved


def split_rows(whole: Tensor, splits: Split) -> list[Tensor]:
    """The blocks of rows that a matrix is made of: how many equal ones, or the rows of each; None: itself."""
    if splits is None:
        return [whole]
    return list(whole.split(whole.shape[0] // splits if isinstance(splits, int) else list(splits)))


def _blocks(rows: Tensor, share: Share, matrix: int, scale: str, splits: Split) -> list[tuple[Tensor, float]]:
    """This rank's rows of a matrix by the blocks that they belong to, and what each is multiplied by."""
    count, columns = share.shapes[matrix]
    rank = dist.get_rank(share.group)
    first = sum(share.rows(matrix, r) for r in range(rank)) if share.sharded else 0
    heights = [count] if splits is None else splits
    if isinstance(heights, int):
        heights = [count // heights] * heights
    found, start = [], 0
    for height in heights:
        low, high = max(start - first, 0), min(start + height - first, rows.shape[0])
        if low < high:
            found.append((rows[low:high], size_of((height, columns), scale)))
        start += height
    return found


def _collected(parts: list[Tensor], own: list[int], mine: list[int], share: Share) -> dict[int, Tensor]:
    """The whole of each matrix of this rank, of which `parts` are the rows that this rank has."""
    ranks = range(dist.get_world_size(share.group))
    sent = [[part for part, owner in zip(parts, own, strict=True) if owner == r] for r in ranks]
    wanted = [[(share.rows(i, r), share.shapes[i][1]) for i in mine] for r in ranks]
    found = _exchanged(sent, wanted, parts[0], share.group)
    return {i: torch.cat([found[r][k] for r in ranks]) for k, i in enumerate(mine)}


def _distributed(done: dict[int, Tensor], own: list[int], like: Tensor, share: Share) -> dict[int, Tensor]:
    """What this rank needs of every matrix, from the ranks that have them: its rows, or all."""
    ranks, rank = range(dist.get_world_size(share.group)), dist.get_rank(share.group)
    sent = []
    for r in ranks:
        first = {i: sum(share.rows(i, q) for q in range(r)) if share.sharded else 0 for i in done}
        sent.append([whole[first[i] : first[i] + share.rows(i, r)] for i, whole in done.items()])
    theirs = [[i for i, owner in enumerate(own) if owner == r] for r in ranks]
    wanted = [[(share.rows(i, rank), share.shapes[i][1]) for i in each] for each in theirs]
    found = _exchanged(sent, wanted, like, share.group)
    return {
        i: part
        for each, parts in zip(theirs, found, strict=True)
        for i, part in zip(each, parts, strict=True)
    }


def _exchanged(
    sent: list[list[Tensor]], wanted: list[list[tuple[int, int]]], like: Tensor, group: Any
) -> list[list[Tensor]]:
    """What every rank sends here, of the shapes `wanted` of it, while it gets `sent` of ours: one exchange,
    of tensors of the dtype and device of `like`."""
    counts = [sum(t.numel() for t in each) for each in sent]
    sizes = [[rows * columns for rows, columns in each] for each in wanted]
    flat = [t.reshape(-1) for each in sent for t in each]
    given = torch.cat(flat) if flat else like.new_empty(0)
    received = like.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(received, given, [sum(each) for each in sizes], counts, group=group)
    parts = iter(received.split([size for each in sizes for size in each]))
    return [[next(parts).view(shape) for shape in each] for each in wanted]
