"""The Triton candidate of memory_scan, interpreted, against the float64 reference."""

import pytest
import torch

from bakeoff.errors import Unsupported
from bakeoff.kernels import variants
from bakeoff.ops.memory_scan import OP, memory_scan
from bakeoff.ops.memory_scan.op import draw
from bakeoff.ops.memory_scan.reference import memory_scan as reference
from bakeoff.ops.memory_scan.triton import memory_scan as triton
from bakeoff.select import Case
from bakeoff.select.contests.poison import Poison
from bakeoff.select.contests.verify import verify, yardsticks

# Relative to the largest element: sums of some products of roundings.
BOUND = {torch.float32: 1e-5, torch.float16: 4e-3}


def tensors(G, T, D, H, V, dtype=torch.float32, grad=True):
    """q, k, v, memory, momentum and the gates, as contests draw them."""
    sizes = {"w1": (G, H, D), "b1": (G, H), "w2": (G, V, H), "b2": (G, V)}
    shapes = {"q": (G, T, D), "k": (G, T, D), "v": (G, T, V)}
    shapes |= {f"{whole}_{part}": sizes[part] for whole in ("memory", "momentum") for part in sizes}
    shapes |= dict.fromkeys(("lr", "decay", "forget"), (G, T))
    generator = torch.Generator().manual_seed(0)
    metas = [torch.empty(s, dtype=dtype if n in "qkv" else torch.float32) for n, s in shapes.items()]
    args = [draw(name, meta, generator) for name, meta in zip(shapes, metas, strict=True)]
    args[11] *= 50  # a few tokens a chunk learn fast without growing
    return [arg.requires_grad_(grad) for arg in args]


def cotangents(outs):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outs]


def assert_native(args, *rest, fn=triton, bound=None):
    before = [a.detach().clone() for a in args]
    with Poison() as poison:
        outs = fn(*args, *(*rest, 0)[:3])
        dys = cotangents(outs)
        got = [*outs, *torch.autograd.grad(outs, args, dys)]
    assert not poison.broken()
    assert all(torch.equal(a, b) for a, b in zip(before, args, strict=True))
    wide = [a.detach().double().requires_grad_() for a in args]
    outs = reference(*wide, *rest)
    exact = [*outs, *torch.autograd.grad(outs, wide, [dy.double() for dy in dys])]
    for mine, truth in zip(got, exact, strict=True):
        assert mine.shape == truth.shape
        scale = truth.abs().max().clamp(min=1e-6)
        assert (mine - truth).abs().max() <= (bound or BOUND[args[0].dtype]) * scale


@pytest.mark.parametrize(
    ("shape", "chunk", "read"),
    [
        ((2, 7, 5, 6, 3), 4, "after"),  # a last chunk that is shorter
        ((1, 9, 18, 5, 17), 4, "before"),  # more inputs and outputs than 16
        ((1, 6, 3, 20, 4), 3, "chunk"),  # no power of two
        ((1, 3, 3, 40, 4), 64, "after"),  # less than a chunk, more hidden units than a program's
        ((1, 2, 3, 4, 2), 1, "before"),
    ],
    ids=str,
)
def test_forward_and_gradients(shape, chunk, read):
    assert_native(tensors(*shape), chunk, read)


@pytest.mark.parametrize("read", ["after", "chunk"])
def test_float16(read):
    assert_native(tensors(1, 20, 4, 6, 3, torch.float16), 16, read)


@pytest.mark.exhaustive
@pytest.mark.parametrize("read", ["after", "before", "chunk"])
@pytest.mark.parametrize(
    ("shape", "chunk"), [((1, 40, 70, 66, 65), 16), ((2, 33, 16, 16, 16), 24), ((1, 70, 8, 33, 8), 64)]
)
def test_more_shapes(shape, chunk, read):
    assert_native(tensors(*shape), chunk, read)


@pytest.mark.exhaustive
def test_every_variant_is_as_exact_as_the_default():
    args = tensors(1, 6, 3, 40, 4)
    for axis, tilings in triton.variants(OP.case([*args, 4, "after", 0])).items():
        for tiling in tilings[1:]:
            assert_native(args, 4, "after", fn=triton.bind(variants.text({axis: tiling})))


def test_the_contest_accepts_it():
    """Against eager's own error, twice with the same bits, fences untouched."""
    case = Case(OP.case([*tensors(2, 5, 4, 6, 3), 4, "after", 0]).args, "cpu")
    _, deterministic = verify(OP, OP.candidate("triton"), list(yardsticks(OP, case))[:1])
    assert deterministic


def test_strided_and_expanded_arguments():
    args = tensors(1, 5, 4, 6, 4)
    args[0] = torch.randn(1, 5, 8)[..., :4].requires_grad_()
    args[1] = (torch.randn(1, 4, 5) / 2).mT.requires_grad_()
    args[11] = torch.full((1, 1), 0.1).expand(1, 5).requires_grad_()
    assert_native(args, 4, "after")


def test_the_past_does_not_depend_on_the_future_bit_for_bit():
    args = tensors(1, 6, 3, 4, 3, grad=False)
    before = triton(*args, 4, "after", 0)[0]
    for i in (0, 1, 2, 11, 12, 13):
        args[i] = args[i].clone()
        args[i][:, 3:] += 1
    assert torch.equal(triton(*args, 4, "after", 0)[0][:, :3], before[:, :3])


def test_only_what_is_wanted_has_a_gradient():
    args = tensors(1, 3, 3, 4, 3, grad=False)
    args[3].requires_grad_()
    o, memory, _ = memory_scan(*args[:3], args[3:7], args[7:11], *args[11:], 2, impl="triton")
    memory[0].sum().backward()
    double = [a.detach().double() for a in args]
    double[3].requires_grad_()
    reference(*double, 2, "after")[1].sum().backward()
    torch.testing.assert_close(args[3].grad.double(), double[3].grad, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        mine = memory_scan(*args[:3], args[3:7], args[7:11], *args[11:], 2, impl="triton")
    assert torch.equal(mine[0], o)


def test_what_the_kernels_refuse():
    args = tensors(1, 3, 3, 4, 3, grad=False)
    state = (args[3:7], args[7:11], *args[11:])
    with pytest.raises(Unsupported, match="computes in float32"):
        memory_scan(*(x.double() for x in args[:3]), *state, impl="triton")
    with pytest.raises(Unsupported, match="empty q or v"):
        memory_scan(*(x[:, :0] for x in args[:3]), *state[:2], *(x[:, :0] for x in args[11:]), impl="triton")
    longer = tensors(1, 130, 2, 2, 2, grad=False)
    with pytest.raises(Unsupported, match="chunks of up to 64 tokens, not 200"):
        memory_scan(*longer[:3], longer[3:7], longer[7:11], *longer[11:], 200, impl="triton")


def test_registered_op_passes_opcheck():
    args = tensors(1, 3, 3, 4, 2)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(triton.traced.forward, (*args, 2, "after", 0, True, ""), test_utils=tests)
