"""memory_scan's candidate for large chunks, interpreted with small ones, against the float64 reference."""

import pytest
import torch

from bakeoff.errors import Unsupported
from bakeoff.kernels import variants
from bakeoff.ops.memory_scan import OP, memory_scan
from bakeoff.ops.memory_scan.large import kernels
from bakeoff.ops.memory_scan.large.scan import memory_scan as large
from bakeoff.ops.memory_scan.plain import eager
from bakeoff.ops.memory_scan.reference import memory_scan as reference
from bakeoff.select import Case
from bakeoff.select.contests.verify import verify, yardsticks
from tests.interp.test_memory_scan import BOUND, assert_native, cotangents, tensors


def allowed(args, chunk, orthogonalize):
    """None, or where steps are orthogonalised twice the error of plain PyTorch beside the usual bound: each
    Newton-Schulz step makes the errors of small singular values up to 3.4445 times as large."""
    if not orthogonalize:
        return None
    wide = [a.detach().double().requires_grad_() for a in args]
    dys = cotangents(eager(*args, chunk, "chunk", orthogonalize))
    error = 0.0
    for mine, truth in zip(
        differentiated(eager, args, dys, chunk, orthogonalize),
        differentiated(reference, wide, [dy.double() for dy in dys], chunk, orthogonalize),
        strict=True,
    ):
        scale = truth.abs().max().clamp(min=1e-6)
        error = max(error, float((mine - truth).abs().max() / scale))
    return BOUND[torch.float32] + 2 * error


def differentiated(fn, args, dys, chunk, orthogonalize):
    outs = fn(*args, chunk, "chunk", orthogonalize)
    return [*outs, *torch.autograd.grad(outs, args, dys)]


TILES = kernels.Tiling(16, 16, 16, 4, 2, 16, 16, 0, 16, 16, 16, 4, 2)


@pytest.mark.parametrize(
    ("shape", "chunk", "orthogonalize"),
    [
        ((2, 5, 5, 6, 3), 2, 0),  # three chunks, the last one shorter
        ((1, 20, 3, 70, 4), 64, 0),  # less than a chunk
        ((1, 5, 3, 4, 2), 3, 5),
        ((1, 4, 2, 3, 5), 1, 1),
    ],
    ids=str,
)
def test_forward_and_gradients(shape, chunk, orthogonalize):
    args = tensors(*shape)
    bound = allowed(args, chunk, orthogonalize)
    assert_native(args, chunk, "chunk", orthogonalize, fn=large, bound=bound)


def test_more_tiles_than_one():
    """Of tokens, of hidden units, inputs and outputs, and of the sums of products."""
    small = large.bind(variants.text({"forward": TILES, "backward": TILES}))
    assert_native(tensors(1, 37, 18, 20, 17), 19, "chunk", fn=small)


def test_float16():
    assert_native(tensors(1, 17, 4, 6, 3, torch.float16), 9, "chunk", fn=large)


def test_scans_go_on_from_block_to_block(monkeypatch):
    monkeypatch.setattr(kernels, "SCAN", 4)
    monkeypatch.setattr(kernels, "BLOCK", 8)
    args = tensors(1, 11, 3, 4, 2)
    for x, i, number in ((12, 2, 0.0), (13, 3, 1.0), (13, 0, 0.0), (11, 1, 0.0), (12, 9, 1.0)):
        args[x].data[0, i] = number
    assert_native(args, 11, "chunk", fn=large)


@pytest.mark.exhaustive
@pytest.mark.parametrize("orthogonalize", [0, 3])
@pytest.mark.parametrize(
    ("shape", "chunk"), [((2, 20, 33, 40, 35), 17), ((1, 33, 140, 16, 129), 33), ((3, 7, 2, 2, 3), 2)]
)
def test_more_shapes(shape, chunk, orthogonalize):
    args = tensors(*shape)
    bound = allowed(args, chunk, orthogonalize)
    assert_native(args, chunk, "chunk", orthogonalize, fn=large, bound=bound)


@pytest.mark.parametrize("orthogonalize", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_contest_accepts_it(orthogonalize):
    """Against eager's own error, twice with the same bits, fences untouched."""
    args = [*tensors(1, 70, 3, 4, 2), 66, "chunk", orthogonalize]
    case = Case(OP.case(args).args, "cpu")
    _, deterministic = verify(OP, OP.candidate("large"), list(yardsticks(OP, case))[:1])
    assert deterministic


def test_strided_and_expanded_arguments():
    args = tensors(1, 5, 4, 6, 4)
    args[0] = torch.randn(1, 5, 8)[..., :4].requires_grad_()
    args[1] = (torch.randn(1, 4, 5) / 2).mT.requires_grad_()
    args[11] = torch.full((1, 1), 0.1).expand(1, 5).requires_grad_()
    assert_native(args, 4, "chunk", fn=large)


def test_only_what_is_wanted_has_a_gradient():
    args = tensors(1, 6, 3, 4, 3, grad=False)
    args[3].requires_grad_()
    outs = large(*args, 2, "chunk", 0)
    outs[1].sum().backward()
    double = [a.detach().double() for a in args]
    double[3].requires_grad_()
    reference(*double, 2, "chunk")[1].sum().backward()
    torch.testing.assert_close(args[3].grad.double(), double[3].grad, rtol=1e-5, atol=1e-6)
    assert all(arg.grad is None for i, arg in enumerate(args) if i != 3)
    with torch.inference_mode():  # where two slots for states take turns
        mine = large(*args, 2, "chunk", 0)
    assert all(torch.equal(a, b) for a, b in zip(mine, outs, strict=True))


def test_autocast_does_not_narrow_it():
    args = tensors(1, 5, 3, 4, 3, grad=False)
    outside = large(*args, 3, "chunk", 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = large(*args, 3, "chunk", 2)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_what_it_refuses():
    args = tensors(1, 70, 3, 4, 3, grad=False)
    state = (args[3:7], args[7:11], *args[11:])
    with pytest.raises(Unsupported, match="takes read 'chunk', not 'after'"):
        memory_scan(*args[:3], *state, 70, impl="large")
    with pytest.raises(Unsupported, match="more than 64 tokens, not 64"):
        memory_scan(*args[:3], *state, 64, "chunk", impl="large")
    with pytest.raises(Unsupported, match="computes in float32"):
        memory_scan(*(x.double() for x in args[:3]), *state, 70, "chunk", impl="large")


def test_registered_op_passes_opcheck():
    args = tensors(1, 3, 3, 4, 2)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(large.traced.forward, (*args, 2, "chunk", 1, True, ""), test_utils=tests)
