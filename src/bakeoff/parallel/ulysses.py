"""All-to-all over heads: each rank gets all tokens of some heads, and attends as one device does."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff import ops
from bakeoff.parallel.exchange import Layout, documents_within
from bakeoff.parallel.peers import Peers

__all__ = ["attended", "by_heads"]


def by_heads(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, peers: Peers, scale: float, combine_grad: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(y, lse) of this rank's tokens; the heads of q and k are multiples of the ranks."""
    lengths = tuple(b - a for a, b in zip(layout.borders, layout.borders[1:], strict=False))
    q, k, v = (_ToHeads.apply(x, peers, lengths) for x in (q, k, v))  # type: ignore[no-untyped-call]
    mine = slice(peers.rank * k.shape[2], (peers.rank + 1) * k.shape[2])
    phases = [row[mine] for row in layout.pattern.phases]
    with warnings.catch_warnings():  # about tokens that these heads leave to the heads of other ranks
        warnings.simplefilter("ignore")
        part = 0, layout.tokens
        y, lse = attended(q, k, v, layout, part, phases, scale, combine_grad, return_lse=return_lse)
    y = _ToTokens.apply(y, peers, lengths)  # type: ignore[no-untyped-call]
    if lse is None:
        return y, None
    lse = _ToTokens.apply(lse.mT[..., None], peers, lengths)  # type: ignore[no-untyped-call]
    return y, lse[..., 0].mT


def attended(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, part: tuple[int, int], phases: Sequence[Sequence[int]],
    scale: float, combine_grad: str, *, return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(y, lse) of the tokens from part[0] to part[1], which see no others, by the chosen kernels; without
    `return_lse`, which some of them don't give, lse is None."""
    ends = [end for pair in documents_within(layout, *part) for end in pair]
    ends = [end - part[0] for end in ends[:1] + ends[1::2]]
    whole = ends == [0, part[1] - part[0]]
    found = ops.dilated_attention(
        q, k, v,
        layout.pattern.segments,
        layout.pattern.rates,
        causal=layout.causal,
        phase=phases,
        combine_grad=combine_grad,
        cu_seqlens=None if whole else torch.tensor(ends or [0, 0], device=q.device),
        scale=scale,
        return_lse=return_lse,
    )  # fmt: skip
    return (found, None) if isinstance(found, Tensor) else found


class _ToHeads(torch.autograd.Function):
    """[B, own tokens, all heads, D] to [B, all tokens, own heads, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, lengths: tuple[int, ...]) -> Tensor:
        ctx.rest = peers, lengths
        return _to_heads(x, peers, lengths)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _to_tokens(dy, *ctx.rest), None, None


class _ToTokens(torch.autograd.Function):
    """The inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, lengths: tuple[int, ...]) -> Tensor:
        ctx.rest = peers, lengths
        return _to_tokens(x, peers, lengths)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _to_heads(dy, *ctx.rest), None, None


def _to_heads(x: Tensor, peers: Peers, lengths: tuple[int, ...]) -> Tensor:
    sent = x.unflatten(2, (peers.size, x.shape[2] // peers.size)).permute(2, 1, 0, 3, 4).contiguous()
    got = x.new_empty(sum(lengths), *sent.shape[2:])
    peers.trade(sent.unbind(), got.split(lengths))
    return got.transpose(0, 1)


def _to_tokens(y: Tensor, peers: Peers, lengths: tuple[int, ...]) -> Tensor:
    sent = y.transpose(0, 1).contiguous()
    got = y.new_empty(peers.size, lengths[peers.rank], *sent.shape[1:])
    peers.trade(sent.split(lengths), got.unbind())
    return got.permute(2, 1, 0, 3, 4).flatten(2, 3)
