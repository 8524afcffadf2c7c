"""Dilated attention: short distances densely, long distances sparsely, mixed as one softmax."""

from collections.abc import Sequence

import torch
from torch.compiler import is_compiling

from bakeoff.ops.dilated_attention.op import OP
from bakeoff.select import call

__all__ = ["OP", "dilated_attention", "phase_table"]

Table = Sequence[Sequence[int]]


def dilated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Sequence[int],
    rates: Sequence[int],
    *,
    causal: bool = False,
    phase: str | Table = "mod",
    combine_grad: str = "exact",
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the keys of several branches, each with its segment length and rate.

    Branch i cuts time into segments of w = segments[i] and selects, for a head of phase s, the tokens t with
    (t mod w) mod r = s, r = rates[i]. A selected query attends to the selected keys of its own segment (and
    with `causal` to none later than itself). Branch outputs are mixed by the softmax over branches of their
    log-sum-exp. That equals one softmax over all pairs with bias log m(t, u), where m is the number of
    branches in which t sees u. A query that no branch selects gives 0, with lse -inf and no gradient.

    T need not be a multiple of any segment: a last, shorter segment holds what there is. Cost: 4 D sum of
    w / r^2 FLOPs a token and head.

    Args:
        q: [B, T, H, D], float16, bfloat16, float32 or float64. Positions (rotary) are applied before.
        k: [B, T, Hk, D], H a multiple of Hk; head h of q uses kv head h // (H / Hk).
        v: as k.
        segments: lengths in tokens, increasing.
        rates: as many as segments, not decreasing, none above its segment.
        causal: whether a query sees no later key.
        phase: "mod", kv head mod rate; "block", kv head // ceil(Hk / rate), as torchscale has it; or a table,
            a row for each branch with the phase of each kv head. Where H < rate some phases never occur, and
            a warning says which share of the tokens that leaves out; `phase_table` gives layers their own.
            Of a table nothing is said: what it leaves out other layers may reach.
        combine_grad: "exact", or "detached": the mixing weights are constants in backward, as in models
            that were trained so.
        cu_seqlens: [documents + 1], int32 or int64, the borders of documents packed into one row (B = 1), not
            decreasing. Segments start anew in each, none sees another; tokens outside all give 0.
        scale: of the scores, above 0; by default D^-0.5.
        return_lse: whether to return the log-sum-exp, too. It carries a gradient.
        impl: the candidate to run; by default the selected one.

    Returns:
        y [B, T, H, D] in q's dtype, or (y, lse) with lse [B, H, T] in float32 (float64 for float64).

    Raises:
        ValueError: shapes, branches, phases or a scale that don't fit; the message says what to pass.
        TypeError: dtypes that don't fit, segments, rates or a scale that are no numbers.
        bakeoff.errors.Unsupported: `impl` can't take these arguments; the message gives every reason.

    Source: Ding et al. 2023, LongNet, sections 3.1 and 3.2 (there the mixing weights carry no gradient).

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 8, 2, 4)
        >>> y = dilated_attention(q, k, v, segments=(4, 8), rates=(1, 2), causal=True)
        >>> full = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        >>> whole = dilated_attention(q, k, v, segments=(8,), rates=(1,))
        >>> torch.allclose(whole, full.transpose(1, 2), atol=1e-6)
        True
    """
    return call(  # type: ignore[no-any-return]
        OP, q, k, v, sizes_text(segments), sizes_text(rates), causal,
        phase_text(phase),
        combine_grad, cu_seqlens, scale, return_lse, impl=impl,
    )  # fmt: skip


def phase_table(rates: Sequence[int], kv_heads: int, layer: int = 0) -> tuple[tuple[int, ...], ...]:
    """Phases that go on counting from layer to layer: (kv head + layer * kv_heads) mod rate.

    With fewer heads than a rate this lets the layers together reach every token.

    Example:
        >>> phase_table((1, 4), kv_heads=2, layer=1)
        ((0, 0), (2, 3))
    """
    first = layer * kv_heads
    return tuple(tuple((first + head) % rate for head in range(kv_heads)) for rate in rates)


def sizes_text(sizes: Sequence[int]) -> str:
    """Whole numbers as the op takes them: what decides is a key, and a key is text."""
    if not _many(sizes):
        return f"{sizes!r}, not a tuple"  # which the op's check refuses
    if is_compiling():  # sizes that torch.compile keeps open, such as T // 4, become those of this call
        sizes = [len(range(size)) if isinstance(size, int) and size > 0 else size for size in sizes]
    return ",".join([str(size) for size in sizes])


def phase_text(phase: str | Table) -> str:
    """A name, or a table, as the op takes it."""
    if isinstance(phase, str):
        return phase
    return ";".join([sizes_text(row) for row in phase]) if _many(phase) else f"{phase!r}, not a table"


def _many(sizes: object) -> bool:
    return sizes is not None and not isinstance(sizes, int | float | str | torch.Tensor)
