"""Dilated attention over a sequence in parts: equal to one process, forward and every gradient."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from bakeoff.ops.dilated_attention.reference import dilated_attention as reference
from bakeoff.attention_backends.rows import BACKENDS, Backend
from bakeoff.parallel import RankError, attention, blocks, borders, context_plan, dilated_attention

Ranks = Callable[..., None]


class Cut(NamedTuple):
    """A call, and where ranks' parts begin, as shares of the sequence."""

    tokens: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    causal: bool = False
    phase: Any = "mod"
    combine_grad: str = "exact"
    documents: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 4)
    batch: int = 2
    uneven: tuple[float, ...] = ()
    method: str = "exchange"


CUTS = [
    Cut(48, (4, 12), (1, 2)),  # aligned to the parts of 2, 3 and 4 ranks: local
    Cut(48, (16, 48), (1, 4), causal=True),
    Cut(53, (7, 20, 100), (1, 2, 5), heads=(4, 2)),  # nothing divides; the last segment is all
    Cut(53, (7, 20, 100), (1, 2, 5), causal=True, heads=(4, 2)),
    Cut(53, (53,), (1,), causal=True, method="ring"),
    Cut(53, (5, 31), (2, 3), causal=True, method="ring", heads=(6, 3)),  # some see nothing
    Cut(37, (6, 25), (3, 4), phase="block"),
    Cut(37, (6, 25), (2, 4), phase=((1, 0, 1, 1), (3, 0, 0, 2)), causal=True),
    Cut(41, (8, 30), (1, 3), combine_grad="detached", causal=True),
    Cut(41, (8, 30), (1, 3), combine_grad="detached", method="ring"),
    Cut(45, (6, 18), (1, 2), documents=(2, 2, 9, 30, 43), batch=1, causal=True),
    Cut(45, (6, 18), (1, 2), documents=(0, 20, 45), batch=1, heads=(4, 1)),
    Cut(33, (9, 33), (1, 2), uneven=(0.1, 0.15, 0.9), causal=True),  # parts of very different lengths
    Cut(33, (9, 33), (1, 2), uneven=(0.0, 0.5, 0.5), method="ring"),  # some parts are empty
    Cut(53, (53,), (1,), causal=True, method="balanced"),  # queries are handed over
    Cut(53, (7, 20, 100), (1, 2, 5), causal=True, heads=(4, 2), method="balanced"),
    Cut(53, (5, 31), (2, 3), causal=True, method="balanced", heads=(6, 3)),
    Cut(41, (8, 41), (1, 3), combine_grad="detached", causal=True, method="balanced"),
    Cut(45, (18, 45), (1, 2), documents=(2, 2, 9, 43, 44), batch=1, causal=True, method="balanced"),
    Cut(45, (6, 45), (1, 2), documents=(0, 44, 45), batch=1, heads=(4, 1), method="balanced"),
    Cut(33, (9, 33), (1, 2), uneven=(0.1, 0.15, 0.9), causal=True, method="balanced"),
    Cut(33, (33,), (1,), uneven=(0.05, 0.9, 0.95), method="balanced"),  # one rank has most of it
    Cut(33, (9, 33), (1, 2), uneven=(0.0, 0.5, 0.5), causal=True, method="balanced"),
    Cut(37, (25, 37), (2, 4), phase=((1, 0, 1, 1), (3, 0, 0, 2)), causal=True, method="balanced"),
    Cut(3, (2, 3), (1, 2)),
    Cut(1, (4,), (1,), causal=True),
]


def ends_of(cut: Cut, world: int) -> tuple[int, ...]:
    if not cut.uneven:
        return borders(cut.tokens, world)
    return (0, *(int(share * cut.tokens) for share in cut.uneven[: world - 1]), cut.tokens)


def drawn(cut: Cut, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradients of y and lse, of the whole, equal on all ranks."""
    generator = torch.Generator().manual_seed(cut.tokens)
    (H, Hk), D = cut.heads, 8
    shapes = [(cut.batch, cut.tokens, heads, D) for heads in (H, Hk, Hk, H)]
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*found, torch.randn(cut.batch, H, cut.tokens, generator=generator)]


def whole(cut: Cut, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """y, lse and the gradients of q, k and v of one process in float64."""
    q, k, v, dy, dlse = (x.double() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    cu = None if cut.documents is None else torch.tensor(cut.documents)
    y, lse = reference(
        *inputs, cut.segments, cut.rates, cut.causal, cut.phase, cut.combine_grad, cu, return_lse=True
    )
    seen = lse > -torch.inf
    loss = (y * dy).sum() + (lse.masked_fill(~seen, 0) * dlse).sum()
    return y.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)


def in_parts(
    cut: Cut, tensors: list[Tensor], low: int, high: int, ends: tuple[int, ...], **options: Any
) -> Any:
    """The same of this rank's part."""
    q, k, v, dy = (x[:, low:high] for x in tensors[:4])
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    made = dilated_attention(
        *inputs, cut.segments, cut.rates, mesh=dist.group.WORLD, causal=cut.causal, phase=cut.phase,
        combine_grad=cut.combine_grad, cu_seqlens=cut.documents, borders=ends,
        **{"method": cut.method, "return_lse": True, **options},
    )  # fmt: skip
    if isinstance(made, Tensor):
        return made.detach(), *torch.autograd.grad((made.float() * dy).sum(), inputs)
    y, lse = made
    seen = lse > -torch.inf
    loss = (y.float() * dy).sum() + (lse.masked_fill(~seen, 0) * tensors[4][..., low:high]).sum()
    return y.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)


def near(got: Tensor, exact: Tensor, what: str, limit: float = 1e-6) -> None:
    assert got.shape == exact.shape, what
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite), what
    worst = (got.double() - exact)[finite].abs().max() if finite.any() else 0.0
    assert worst <= limit * max(1.0, float(exact[finite].abs().max()) if finite.any() else 0.0), (what, worst)


def equal_to_one_process(rank: int) -> None:
    for cut in CUTS:
        ends = ends_of(cut, dist.get_world_size())
        low, high = ends[rank : rank + 2]
        tensors = drawn(cut)
        y, lse, dq, dk, dv = whole(cut, tensors)
        got = in_parts(cut, tensors, low, high, ends)
        exact = y[:, low:high], lse[..., low:high], dq[:, low:high], dk[:, low:high], dv[:, low:high]
        for name, one, two in zip(("y", "lse", "dq", "dk", "dv"), got, exact, strict=True):
            near(one, two, f"{name} of {cut}, ends {ends}, rank {rank}")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_are_equal_to_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, equal_to_one_process)


def by_kernels(rank: int) -> None:
    """With the kernel that CPUs have in the place of a GPU's; gradients of the lse go another way."""
    asked: list[tuple[int, ...]] = []

    def forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        asked.append(tuple(q.shape))
        return BACKENDS["math"].forward(q, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "kernel", lambda q: "counted")
        patch.setattr(blocks, "narrow", lambda dtype: True)  # of handed queries, outputs go along
        patch.setitem(BACKENDS, "counted", Backend(forward, BACKENDS["math"].backward))
        for cut in CUTS:
            ends = ends_of(cut, dist.get_world_size())
            low, high = ends[rank : rank + 2]
            tensors = drawn(cut)
            y, lse, dq, dk, dv = whole(cut, [*tensors[:4], torch.zeros_like(tensors[4])])
            got = in_parts(cut, tensors, low, high, ends, return_lse=False)
            exact = y[:, low:high], dq[:, low:high], dk[:, low:high], dv[:, low:high]
            for name, one, two in zip(("y", "dq", "dk", "dv"), got, exact, strict=True):
                near(one, two, f"{name} of {cut}, ends {ends}, rank {rank}", 2e-6)
    assert len(asked) > 20


def test_blocks_by_an_attention_kernel_are_equal_to_one_process(ranks: Ranks) -> None:
    ranks(2, by_kernels)


def by_all_to_all(rank: int) -> None:
    """Also from strided inputs, and chosen by itself where it moves less."""
    for cut in (
        Cut(26, (5, 26), (1, 2), causal=True),
        Cut(26, (6, 18), (1, 4), heads=(8, 4), documents=(1, 9, 24), batch=1),
        Cut(26, (4, 26), (1, 1), combine_grad="detached"),
        Cut(3, (8, 64), (1, 8), causal=True),  # fewer tokens than a rate
        Cut(9, (4, 9), (1, 2), uneven=(0.0,)),  # a rank without tokens
    ):
        ends = ends_of(cut, dist.get_world_size())
        low, high = ends[rank : rank + 2]
        tensors = drawn(cut)
        tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
        y, lse, dq, dk, dv = whole(cut, tensors)
        got = in_parts(cut, tensors, low, high, ends, method="ulysses")
        exact = y[:, low:high], lse[..., low:high], dq[:, low:high], dk[:, low:high], dv[:, low:high]
        for name, one, two in zip(("y", "lse", "dq", "dk", "dv"), got, exact, strict=True):
            near(one, two, f"{name} of {cut}, rank {rank}")


def test_all_to_all_over_heads(ranks: Ranks) -> None:
    ranks(2, by_all_to_all)


def other_properties(rank: int) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    cut = Cut(40, (10, 40), (1, 2), causal=True)
    ends = borders(cut.tokens, world)
    low, high = ends[rank : rank + 2]
    tensors = drawn(cut)

    # Bit by bit the same again, and in a ring.
    first = in_parts(cut, tensors, low, high, ends)
    handing = in_parts(cut, tensors, low, high, ends, method="balanced")
    for method, wanted in (("exchange", first), ("ring", first), ("balanced", handing)):
        again = in_parts(cut, tensors, low, high, ends, method=method)
        assert all(torch.equal(one, two) for one, two in zip(wanted, again, strict=True)), method

    # The future changes nothing.
    future = [x.clone() for x in tensors]
    for x in future[:3]:
        x[:, ends[1] :] = 9.0
    for method, wanted in (("exchange", first), ("balanced", handing)):
        y = in_parts(cut, future, low, high, ends, method=method)[0]
        assert rank > 0 or torch.equal(y, wanted[0]), method

    # bfloat16 is rounded at the end, and what kernels make of own rows before that.
    half = drawn(cut, torch.bfloat16)
    exact = whole(cut, half)[0]
    mine = torch.zeros_like(half[2])
    mine[:, low:high] = half[2][:, low:high]
    own = whole(cut, [*half[:2], mine, *half[3:]])[0][:, low:high]  # what own values give
    for method in ("exchange", "balanced"):
        y, *found = in_parts(cut, half, low, high, ends, method=method, return_lse=False)
        assert y.dtype == torch.bfloat16
        error = (y.double() - exact[:, low:high]).abs()
        assert (error <= (exact[:, low:high].abs() + own.abs()) * 2**-8 + 1e-6).all(), method
        exact_gradients = whole(cut, [*half[:4], torch.zeros_like(half[4])])[2:]
        for one, two in zip(found, exact_gradients, strict=True):
            assert one.dtype == torch.bfloat16
            assert (one.double() - two[:, low:high]).norm() <= 2**-7 * two[:, low:high].norm(), method

    # Dense attention, over a mesh.
    q, k, v = (x[:, low:high] for x in tensors[:3])
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in tensors[:3]), is_causal=True
    ).transpose(1, 2)
    near(attention(q, k, v, mesh=mesh, causal=True), dense[:, low:high], "dense")  # type: ignore[arg-type]

    # Without gradients nothing is handed back, with a checkpoint forward runs again; either is the same.
    with torch.no_grad():
        y = dilated_attention(q, k, v, (10, 40), (1, 2), mesh=mesh, causal=True, method="balanced")
    assert torch.equal(y, handing[0])  # type: ignore[arg-type]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(*x: Tensor) -> Any:
        return dilated_attention(*x, (10, 40), (1, 2), mesh=mesh, causal=True, method="balanced")

    dy = tensors[3][:, low:high]
    wanted = torch.autograd.grad((attend(*inputs) * dy).sum(), inputs)
    again = torch.autograd.grad((checkpoint(attend, *inputs, use_reentrant=False) * dy).sum(), inputs)
    assert all(torch.equal(one, two) for one, two in zip(wanted, again, strict=True))

    # Without gradients nothing is kept, and only some inputs may want theirs.
    with torch.no_grad():
        assert torch.equal(
            dilated_attention(q, k, v, (10, 40), (1, 2), mesh=mesh, causal=True, method="ring"), first[0]
        )
    v = v.clone().requires_grad_()
    y = dilated_attention(q, k, v, (10, 40), (1, 2), mesh=mesh, causal=True)
    assert isinstance(y, Tensor)
    (dv,) = torch.autograd.grad((y * tensors[3][:, low:high]).sum(), v)
    assert dv.shape == v.shape

    # Segments within parts need nobody, once the ranks have seen that they were called with the same.
    in_parts(Cut(40, (5, 10), (1, 2)), tensors, low, high, ends)
    send, dist.batch_isend_irecv = dist.batch_isend_irecv, None
    try:
        local = in_parts(Cut(40, (5, 10), (1, 2)), tensors, low, high, ends)
    finally:
        dist.batch_isend_irecv = send
    near(local[0], whole(Cut(40, (5, 10), (1, 2)), tensors)[0][:, low:high], "local")
    for cut in (
        Cut(40, (5, 10), (1, 2), causal=True, combine_grad="detached"),
        Cut(40, (5, 10), (1, 2), documents=(0, 3, 10, 20, 33), batch=1),
        Cut(40, (5, 10), (1, 2), documents=(21, 30), batch=1),
    ):
        tensors = drawn(cut)
        exact = whole(cut, tensors)
        exact = exact[0][:, low:high], exact[1][..., low:high], *(x[:, low:high] for x in exact[2:])
        for got, wanted in zip(in_parts(cut, tensors, low, high, ends, method="auto"), exact, strict=True):
            near(got, wanted, f"local, by the op, {cut}")

    for options, message in (
        ({"method": "magic"}, "method is 'magic'"),
        ({"borders": (0, 3, 40)}, "tokens, and"),
        ({"borders": (0, 40)}, "expected 2 numbers|expected 3 numbers"),
        ({"borders": (0, 20.5, 40)}, "expected 3 numbers"),
        ({"cu_seqlens": (0, 40)}, "packed documents are one row"),
        ({"phase": ((0,), (0,))}, "table of phases has rows of"),
        ({"phase": "mods"}, "'mods', expected 'mod', 'block' or a table"),
        ({"phase": ((0,) * k.shape[2], (2,) * k.shape[2])}, "must lie in 0..1"),
        ({"scale": 0.0}, "above 0 and finite"),
        ({"combine_grad": "none"}, "'exact' or 'detached'"),
    ):
        with pytest.raises(ValueError, match=message):
            dilated_attention(q, k, v, (10, 40), (1, 2), mesh=mesh, **options)
    for branches, message in (
        (((10,), (1, 2)), "1 segments and 2 rates"),
        (((2,), (4,)), "above its segment"),
        (((40, 10), (1, 1)), "so that segments increase"),
        (((10, 40), (2, 1)), "must not decrease"),
    ):
        with pytest.raises(ValueError, match=message):
            dilated_attention(q, k, v, *branches, mesh=mesh)
    for branches in (((10.5, 40), (1, 2)), ((10, 40), (1, 2.0)), (10, 1), ("10,40", "1,2")):
        with pytest.raises(TypeError, match="pass tuples of whole numbers"):
            dilated_attention(q, k, v, *branches, mesh=mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no multiple of 0 kv heads"):
        dilated_attention(q, k[:, :, :0], v[:, :, :0], (4,), (1,), mesh=mesh)
    with pytest.warns(UserWarning, match="75.0% of all tokens .* phase=phase_table"):
        dilated_attention(q, k[:, :, :2], v[:, :, :2], (40,), (8,), mesh=mesh)
    for other in (v.half(), v.long()):
        with pytest.raises(ValueError, match="one floating dtype for all"):
            dilated_attention(other, k, other, (4,), (1,), mesh=mesh)
    with pytest.raises(ValueError, match="2 dimensions"):
        dilated_attention(q, k, v, (4,), (1,), mesh=init_device_mesh("cpu", (1, world)))


def test_other_properties(ranks: Ranks) -> None:
    ranks(2, other_properties)


def bytes_as_planned(rank: int, patch: pytest.MonkeyPatch) -> None:
    """The busiest rank receives what the plan says, forward and backward."""
    world, heard = dist.get_world_size(), [0]
    post = dist.batch_isend_irecv

    def counted(ops: list[dist.P2POp]) -> list[dist.Work]:
        heard[0] += sum(op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.irecv)
        return post(ops)

    patch.setattr(dist, "batch_isend_irecv", counted)
    for cut, dtype in (
        (Cut(61, (61,), (1,), causal=True, heads=(4, 2)), torch.float32),
        (Cut(61, (61,), (1,), causal=True, heads=(4, 2)), torch.bfloat16),
        (Cut(64, (8, 32, 64), (1, 2, 4), causal=True), torch.bfloat16),
        (Cut(64, (32, 64), (1, 2), causal=True, combine_grad="detached"), torch.bfloat16),
    ):
        ends = borders(cut.tokens, world)
        tensors = drawn(cut, dtype)
        plan = context_plan(
            cut.tokens, world, cut.heads[0], 8, cut.segments, cut.rates, kv_heads=cut.heads[1], causal=True,
            combine_grad=cut.combine_grad, batch=cut.batch, itemsize=dtype.itemsize, method="balanced",
        )  # fmt: skip
        assert max(plan.shares["balanced"]) < max(plan.shares["ring"])
        for method in ("exchange", "ring", "balanced"):
            inputs = [x[:, ends[rank] : ends[rank + 1]].clone().requires_grad_() for x in tensors[:3]]
            arguments = 8 * 15 * (world - 1)  # which ranks compare before the first call
            heard[0] = 0
            y = dilated_attention(
                *inputs, cut.segments, cut.rates, mesh=dist.group.WORLD, causal=True, borders=ends,
                combine_grad=cut.combine_grad, method=method,
            )  # fmt: skip
            assert isinstance(y, Tensor)
            forward, heard[0] = heard[0] - arguments, 0
            torch.autograd.grad(y.float().sum(), inputs)
            most = torch.tensor([forward, heard[0]])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            volume = plan.volumes[method]
            assert most.tolist() == [volume.forward, volume.backward], (cut, dtype, method)


def bytes_are_as_planned(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bytes_as_planned(rank, patch)


def test_what_moves_is_what_the_plan_says(ranks: Ranks) -> None:
    ranks(3, bytes_are_as_planned)


def different(rank: int) -> None:
    """The middle one of three ranks passes something else; all are told, and can go on."""
    group = dist.group.WORLD
    assert group is not None
    for name, others, its in (
        ("causal", {}, {"causal": True}),
        ("segments", {}, {"segments": (12,)}),
        ("segments", {}, {"segments": (8,)}),  # within parts, which a rank could do alone
        ("segments", {"segments": (4,)}, {"segments": (8,)}),
        ("rates", {}, {"rates": (2,)}),
        ("phase", {"rates": (2,)}, {"rates": (2,), "phase": ((1,) * 4,)}),
        ("method", {}, {"method": "ring"}),
        ("scale", {}, {"scale": 0.5}),
        ("return_lse", {"method": "balanced"}, {"method": "balanced", "return_lse": True}),
        ("combine_grad", {}, {"combine_grad": "detached"}),
        ("cu_seqlens", {"cu_seqlens": (0, 24)}, {"cu_seqlens": (0, 20)}),
        ("dtype", {}, {"dtype": torch.float64}),
        ("dtype", {"method": "ulysses", "heads": 6}, {"method": "ulysses", "heads": 6, "dtype": torch.bfloat16}),
        ("heads", {}, {"heads": 2}),
        ("borders", {}, {"tokens": 6}),
    ):  # fmt: skip
        options: dict[str, Any] = {"segments": (24,), "rates": (1,), "method": "exchange"}
        options |= its if rank == 1 else others
        shape = 1, options.pop("tokens", 8), options.pop("heads", 4), 8
        x = torch.randn(shape, dtype=options.pop("dtype", torch.float32))
        with pytest.raises(ValueError, match=rf"of the mesh passed another {name} than rank {rank}, which"):
            dilated_attention(x, x, x, options.pop("segments"), options.pop("rates"), mesh=group, **options)
    x = torch.randn(1, 8, 4, 8)
    attention(x, x, x, mesh=group, causal=True, method="balanced")


def test_ranks_that_pass_different_arguments_are_told(ranks: Ranks) -> None:
    ranks(3, different)


def lost_in_backward(rank: int, method: str) -> None:
    x = torch.randn(1, 16, 3, 8, requires_grad=True)
    y = attention(x, x, x, mesh=dist.group.WORLD, causal=True, method="balanced")
    assert isinstance(y, Tensor)
    twice = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiated twice"):
        twice.sum().backward()
    compiled = torch.compile(
        lambda x: attention(x, x, x, mesh=dist.group.WORLD, causal=True, method="balanced") * 2, backend="eager"
    )
    assert torch.equal(compiled(x), 2 * y)
    y = attention(x, x, x, mesh=dist.group.WORLD, causal=True, method=method)
    assert isinstance(y, Tensor)
    if rank == 1:
        os._exit(0)
    time.sleep(1)
    with pytest.raises(RankError, match="rank 1 of the mesh was lost in the exchange"):
        y.sum().backward()
    time.sleep(2)
    os._exit(0)


@pytest.mark.parametrize("method", ["exchange", "ring", "balanced", "ulysses"])
def test_a_rank_lost_in_backward_is_named(ranks: Ranks, method: str) -> None:
    ranks(3, lost_in_backward, method)


def killed(rank: int) -> None:
    x = torch.randn(1, 4, 2, 8)
    attention(x, x, x, mesh=dist.group.WORLD, method="ulysses")
    if rank == 1:
        os._exit(0)
    time.sleep(1)
    with pytest.raises(RankError, match="rank 1 of the mesh was lost in the exchange"):
        attention(x, x, x, mesh=dist.group.WORLD, method="ulysses")
    os._exit(0)


def test_a_killed_rank_is_named(ranks: Ranks) -> None:
    ranks(2, killed)


def silent(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    x = torch.randn(1, 4, 2, 8)
    if rank == 1:
        time.sleep(4)
    else:
        since = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of the mesh was lost in the exchange"):
            attention(x, x, x, mesh=group, method="exchange")
        assert time.monotonic() - since < 30
    os._exit(0)


def test_a_rank_that_says_nothing_is_named(ranks: Ranks) -> None:
    ranks(2, silent)
