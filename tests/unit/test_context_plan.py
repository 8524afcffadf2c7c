"""What ranks exchange for dilated attention: exactly the rows that the mask asks for, and their bytes."""

import doctest
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bakeoff.ops.dilated_attention.reference import Pattern, pattern_of, seen_in
from bakeoff.parallel import borders, context_plan
from bakeoff.parallel.balance import balanced, even, loads, work
from bakeoff.parallel.exchange import (
    PAD,
    Layout,
    handed,
    needs,
    number_handed,
    number_needed,
    own_blocks,
)
from bakeoff.parallel.peers import local_places, places_of
from bakeoff.parallel.rows import handed_rows, own_rows, remote_rows


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any branches, phases, cuts into parts and documents."""
    tokens, heads, branches = (draw(st.integers(1, n)) for n in (30, 3, 3))
    segments = tuple(sorted(draw(st.integers(1, 35)) for _ in range(branches)))
    rates = tuple(draw(st.integers(1, min(w, 5))) for w in segments)
    phases = tuple(tuple(draw(st.integers(0, r - 1)) for _ in range(heads)) for r in rates)
    cuts = sorted(draw(st.integers(0, tokens)) for _ in range(draw(st.integers(1, 3))))
    documents = tuple(sorted(draw(st.integers(0, tokens)) for _ in range(3)))
    whole = draw(st.booleans())
    made = Layout(
        Pattern(segments, rates, phases),
        (0, *cuts, tokens),
        (0, tokens) if whole else documents,
        draw(st.booleans()),
    )
    how = draw(st.sampled_from(("none", "balanced", "any")))  # which queries are handed over
    if how == "any":
        parts = list(itertools.pairwise(made.borders))
        return made._replace(
            handed_from=tuple(tuple(draw(st.integers(a, b)) for _ in parts) for a, b in parts)
        )
    return balanced(made) if how == "balanced" else made


def mask(layout: Layout) -> torch.Tensor:
    """Whether query t sees key u in each branch and head, by the definition."""
    t = torch.arange(layout.tokens)
    origin = torch.full_like(t, -1)
    for a, b in itertools.pairwise(layout.documents):
        origin[a:b] = a
    return seen_in(layout.pattern, t, t, origin, layout.causal)


@given(layout=layouts())
@settings(deadline=None)
def test_blocks_hold_every_pair_of_the_mask_once(layout: Layout) -> None:
    """And none else, once causality has been applied."""
    held = torch.zeros_like(mask(layout), dtype=torch.int64)
    ranks = len(layout.borders) - 1
    for rank in range(ranks):
        found = list(own_blocks(layout, rank))
        for source in range(ranks):
            found += needs(layout, rank, source).blocks if source != rank else []
            found += handed(layout, rank, source).blocks if source != rank else []
        for block in found:
            for n, head in itertools.product(range(len(block.queries)), range(layout.heads)):
                queries, keys = block.queries[n, head], block.keys[n, head]
                for t, u in itertools.product(queries[queries != PAD], keys[keys != PAD]):
                    held[block.branch, head, t, u] += int(not layout.causal or u <= t)
    assert torch.equal(held, mask(layout).long())


@given(layout=layouts())
@settings(deadline=None)
def test_exactly_the_rows_that_some_query_sees_are_exchanged(layout: Layout) -> None:
    """Of keys for the queries that stay, and of queries that don't."""
    seen = mask(layout).any(0)  # [heads, queries, keys]
    ranks = len(layout.borders) - 1
    for rank, source in itertools.permutations(range(ranks), 2):
        low, (cut, high), (first, end) = (
            layout.part(rank)[0], layout.handed_part(rank, source), layout.part(source),
        )  # fmt: skip
        wanted = seen[:, low:cut, first:end].any(1).T.flatten().nonzero()[:, 0].tolist()
        assert needs(layout, rank, source).rows.tolist() == wanted
        assert number_needed(layout, rank, source) == len(wanted)
        wanted = seen[:, cut:high, first:end].any(2).T.flatten().nonzero()[:, 0].tolist()
        assert handed(layout, rank, source).rows.tolist() == wanted
        assert number_handed(layout, rank, source) == len(wanted)


@given(layout=layouts())
@settings(deadline=None)
def test_work_is_the_number_of_pairs(layout: Layout) -> None:
    seen = mask(layout).sum(0)  # [heads, queries, keys]
    parts = [slice(*pair) for pair in itertools.pairwise(layout.borders)]
    wanted = torch.stack([torch.stack([seen[:, a, b].sum((1, 2)) for b in parts]) for a in parts])
    assert work(layout).tolist() == wanted.tolist()
    done = wanted.sum((1, 2))
    for rank, source in itertools.permutations(range(len(parts)), 2):
        moved = seen[:, slice(*layout.handed_part(rank, source)), parts[source]].sum()
        done[rank] -= moved
        done[source] += moved
    assert loads(layout) == tuple(done.tolist())
    plain = layout._replace(handed_from=())
    assert max(loads(balanced(plain))) <= max(loads(plain))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13])
def test_causal_dense_attention_is_even_over_any_ranks(ranks: int) -> None:
    """The last of p ranks has 2 - 1/p of the mean where each works on its own queries."""
    tokens = ranks * 256
    plan = context_plan(tokens, ranks, ranks, 64, (tokens,), (1,), causal=True)
    assert max(plan.shares["ring"]) == pytest.approx(2 - 1 / ranks, rel=1e-3)
    assert max(plan.shares["balanced"]) < 1.02
    assert plan.shares["ulysses"] == (1.0,) * ranks
    assert all(sum(each) == pytest.approx(ranks) for each in plan.shares.values())
    full = context_plan(tokens, ranks, ranks, 64, (tokens,), (1,))
    assert "balanced" not in full.volumes, "full attention is even by itself"


def test_work_that_cannot_go_far_is_handed_on() -> None:
    """Rank 2 shares work with rank 1 alone, which passes some of its own on to rank 0."""
    whole = np.array([[0, 0, 0], [600, 0, 0], [0, 1200, 0]])
    moved = even(whole)
    load = whole.sum(1) - moved.sum(1) + moved.sum(0)
    assert load.max() <= 1.02 * load.mean()
    assert (moved <= whole).all()


def test_bytes_of_handed_queries_by_hand() -> None:
    """Rank 1 of 2 hands half of its 64 queries over: then both have 1.5 of 3 parts of the work."""
    heads, kv_heads, width, batch = 8, 2, 16, 3
    plan = context_plan(128, 2, heads, width, (128,), (1,), kv_heads=kv_heads, causal=True, batch=batch)
    keys = 64 * kv_heads * 2 * batch * width  # elements of rank 0's keys and values, which rank 1 still needs
    queries = 32 * heads * batch * width
    statistics = 32 * heads * batch  # of one number a query and head
    volume = plan.volumes["balanced"]
    assert volume.forward == max(2 * queries, 2 * keys + 4 * (queries + 2 * statistics))
    first = 4 * keys + 2 * 3 * queries + 4 * 2 * statistics  # gradients of keys; q, dy, y; lse and delta
    assert volume.backward == max(first, 2 * keys + 4 * queries)
    detached = context_plan(
        128, 2, heads, width, (128, 256), (1, 1), kv_heads=kv_heads, causal=True, batch=batch,
        combine_grad="detached",
    )  # fmt: skip
    both = detached.volumes["balanced"]
    assert both.forward == 2 * keys + 4 * 2 * (queries + 2 * statistics), "a result for each branch"


def test_parts() -> None:
    assert borders(10, 3) == (0, 3, 6, 10)
    assert borders(2, 4) == (0, 0, 1, 1, 2)


def test_local_segments_move_nothing() -> None:
    plan = context_plan(1 << 20, 8, 16, 128, (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    assert plan.local
    assert plan.method == "exchange"
    assert plan.volumes["exchange"].forward == plan.volumes["exchange"].backward == 0


@pytest.mark.parametrize("causal", [False, True])
def test_bytes_of_one_long_branch_by_hand(causal: bool) -> None:
    """A segment over 4 ranks of 8 tokens at rate 2: 4 rows of each other rank, or of each rank before."""
    plan = context_plan(32, 4, 8, 16, (32,), (2,), kv_heads=2, causal=causal, batch=3)
    row = 2 * 3 * 16  # keys and values of a batch of 3
    assert plan.volumes["exchange"].forward == 3 * 4 * 2 * row * 2
    assert plan.volumes["exchange"].backward == 3 * 4 * 2 * row * 4
    again = 0 if causal else 2  # rank 0, which all gradients come back to, asks for no keys then
    assert plan.volumes["ring"].backward == 3 * 4 * 2 * row * (again + 4)
    assert plan.dense.forward == 24 * 2 * row * 2
    assert "ulysses" not in plan.volumes, "4 ranks don't divide 2 kv heads"


def test_the_method_that_moves_less_is_taken() -> None:
    dense = context_plan(1 << 12, 4, 8, 64, (1 << 12,), (1,))
    assert dense.method == "ulysses"
    assert (
        dense.volumes["ulysses"].forward
        == 3 * (1 << 12) // 4 * (8 + 2 * 8) // 4 * 64 * 2 + (1 << 10) * 6 * 64 * 2
    )
    assert context_plan(1 << 12, 4, 6, 64, (1 << 12,), (1,)).method == "ring", "rows of 3 parts exceed one"
    assert context_plan(1 << 12, 4, 8, 64, (1 << 11,), (8,)).method == "exchange"
    assert context_plan(1 << 12, 4, 8, 64, (1 << 11,), (8,), method="ulysses").method == "ulysses"
    long = context_plan(3 << 14, 3, 8, 64, (3 << 14,), (1,), kv_heads=1, causal=True)
    assert long.method == "ring", "3 ranks don't divide 8 heads, and queries are handed over on wish alone"
    assert re.search(r"> ring: .*; 1.67\n  balanced: .*; 1.00\n", str(long))
    text = str(dense)
    assert re.search(r"> ulysses: \d", text)
    assert "dense ring attention" in text


def test_a_coarser_branch_s_rows_are_sent_once() -> None:
    nested = context_plan(64, 2, 2, 8, (40, 64), (2, 4), phase=((1, 1), (1, 1)))
    coarse = context_plan(64, 2, 2, 8, (64,), (4,), phase=((1, 1),))
    fine = context_plan(64, 2, 2, 8, (40,), (2,), phase=((1, 1),))
    one, two, both = (plan.volumes["exchange"].forward for plan in (coarse, fine, nested))
    assert max(one, two) <= both < one + two


def test_bad_plans() -> None:
    with pytest.raises(ValueError, match="8 heads with 2 kv heads don't divide"):
        context_plan(64, 4, 8, 16, (64,), (1,), kv_heads=2, method="ulysses")
    with pytest.raises(ValueError, match="method is 'magic'; it is auto, exchange, ring, balanced, ulysses"):
        context_plan(64, 4, 8, 16, (64,), (1,), method="magic")
    with pytest.raises(ValueError, match="above its segment"):
        context_plan(64, 4, 8, 16, (4,), (8,))
    for tokens, options, message in (
        ((0, 40, 20, 64, 64), {}, "expected 5 numbers"),
        ((0, 64), {}, "expected 5 numbers"),
        (64, {"kv_heads": 3}, "8 heads of q are no multiple of 3 kv heads"),
        (64, {"cu_seqlens": (0, 65)}, "within 0 to 64"),
        (64, {"cu_seqlens": ()}, "within 0 to 64"),
        (64, {"cu_seqlens": (0, 1.5)}, "whole numbers"),
        (64, {"combine_grad": "none"}, "'exact' or 'detached'"),
        (8.5, {}, "give a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            context_plan(tokens, 4, 8, 16, (64,), (1,), **options)  # type: ignore[arg-type]
    for segments, rates, message in (
        ((64, 16), (1, 1), "so that segments increase"),
        ((16, 64), (2, 1), "must not decrease"),
    ):
        with pytest.raises(ValueError, match=message):  # as the op
            context_plan(64, 4, 8, 16, segments, rates)
    for tokens, ranks in ((8, 0), (-1, 2), (8.5, 2)):
        with pytest.raises(ValueError, match="give a whole number"):
            borders(tokens, ranks)  # type: ignore[arg-type]


def test_the_page_shows_what_is_planned_today() -> None:
    page = (Path(__file__).parents[2] / "docs" / "context-parallel.md").read_text("utf-8")
    (shown,) = re.findall(r"```python\n(>>> .*?)```", page, re.DOTALL)
    examples = doctest.DocTestParser().get_doctest(shown, {}, "context-parallel.md", None, 0)
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_patterns_are_those_of_the_op() -> None:
    """A change of theirs must not pass by here."""
    assert pattern_of((4, 8), (1, 2), "mod", 3) == Pattern((4, 8), (1, 2), ((0, 0, 0), (0, 1, 0)))


def _grad(make: Callable[[], Any]) -> None:
    torch.func.grad(lambda x: (make(), x)[1])(torch.tensor(1.0))


def _within(context: Any) -> Callable[[Callable[[], Any]], None]:
    def run(make: Callable[[], Any]) -> None:
        with context():
            make()

    return run


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [t for part in found for t in _tensors(part)] if isinstance(found, tuple) else []


@pytest.mark.parametrize("make", [own_rows, remote_rows, handed_rows, places_of, local_places])
@pytest.mark.parametrize(
    ("tokens", "first"),
    [(64, _within(FakeTensorMode)), (66, _within(torch.inference_mode)), (68, _grad)],
    ids=["fake", "inference", "grad"],
)
def test_tables_do_not_depend_on_who_asked_first(
    make: Any, tokens: int, first: Callable[[Callable[[], Any]], None]
) -> None:
    """Kept for all calls, they are plain tensors, also where the first one was watched by a mode."""
    layout = balanced(Layout(pattern_of([16, 64], [1, 2], "mod", 2), (0, 40, tokens), (0, tokens), True))
    arguments = (layout, 1, *(() if make is own_rows else (0,)), torch.device("cpu"))
    first(lambda: make(*arguments))
    found = _tensors(make(*arguments))
    assert found
    for t in found:
        assert type(t) is Tensor
        assert not t.is_inference()
        assert not torch._C._functorch.is_functorch_wrapped_tensor(t)
    assert all(a is b for a, b in zip(found, _tensors(make(*arguments)), strict=True))
