"""fp8_linear: its definition, laws and edges; Fp8Linear and convert; train.fp8."""

import doctest
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import bakeoff.nn.fp8
from bakeoff.apps.train import load_run, train
from bakeoff.apps.train.config import Config, ConfigError, Data, Metrics, Optim, Select, Train
from bakeoff.apps.train.fp8 import to_fp8
from bakeoff.errors import Unsupported
from bakeoff.models import build, byte_spectral, llm_med, longnet, titan_mac
from bakeoff.nn import Fp8Linear, convert
from bakeoff.ops import fp8_linear
from bakeoff.ops.fp8_linear import OP
from bakeoff.ops.fp8_linear import op as op_module
from bakeoff.ops.fp8_linear.op import lacks_fp8
from bakeoff.ops.fp8_linear.plain import eager
from bakeoff.ops.fp8_linear.reference import E4M3, E5M2, LARGEST, quantize
from bakeoff.ops.fp8_linear.reference import fp8_linear as reference
from bakeoff.ops.fp8_linear.scaled import scaled_mm
from bakeoff.select import Candidate, Case
from bakeoff.select.contests.verify import Rejected, verify, yardsticks
from tests.unit.compiler import needs_compiler

GRADS = ("bf16", "e5m2")


def nearest(ratios: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """By search among all numbers of the format: the nearest, of two the one with an even code."""
    codes = torch.arange(128, dtype=torch.uint8).view(kind).double()
    codes = codes[torch.isfinite(codes)]
    distance = (ratios.double().abs()[..., None] - codes).abs()
    odd = torch.arange(len(codes)) % 2
    best = (distance == distance.amin(-1, keepdim=True)).double() * (2 - odd)
    return codes[best.argmax(-1)] * ratios.sign()


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_quantisation_is_to_the_nearest_number_of_the_format(kind: torch.dtype) -> None:
    t = torch.randn(20, 50) * torch.logspace(-30, 30, 20)[:, None]
    t[:, :10] *= 1e-3  # down to where the format's numbers are denormal
    q, scale = quantize(t, kind)
    assert torch.equal(scale, (t.abs().amax(1, keepdim=True).double() / LARGEST[kind]).float())
    assert torch.equal(q.double(), nearest(t / scale, kind))
    assert bool((q.float().abs().amax(1) == LARGEST[kind]).all())


def test_ties_go_to_the_even_neighbour() -> None:
    row = torch.tensor([[448.0, 17.0, 19.0, -17.0, -21.0, 2.0**-10, 3 * 2.0**-10]])
    q, scale = quantize(row)
    assert scale.item() == 1
    assert q.float().tolist() == [[448.0, 16.0, 20.0, -16.0, -20.0, 0.0, 2.0**-8]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_wider_copy_is_quantised_alike(dtype: torch.dtype) -> None:
    """Or the float64 reference would differ from every candidate by whole steps of the format."""
    t = torch.randn(9, 70).to(dtype)
    for a, b in zip(quantize(t), quantize(t.double()), strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("least", [1e-45, 1e-43, 3e-43, 1e-40, 1e-38])
def test_denormal_rows_stay_finite(least: float) -> None:
    t = least * torch.randn(5, 40)
    q, scale = quantize(t)
    assert bool(torch.isfinite(q.float()).all())
    assert bool((scale > 0).all())
    assert bool(torch.isfinite(fp8_linear(t, torch.randn(3, 40))).all())


def test_zero_rows_have_scale_one_and_give_zeros() -> None:
    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    x[1], weight[5] = 0, 0
    assert quantize(x)[1][1].item() == 1
    y = fp8_linear(x, weight)
    assert bool((y[1] == 0).all())
    assert bool((y[:, 5] == 0).all())
    assert torch.equal(y[[0, 2, 3]], fp8_linear(x[[0, 2, 3]], weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fn", [fp8_linear, lambda x, w: scaled_mm(x, w, None, "bf16")], ids=["op", "scaled"])
def test_nan_and_infinity_make_their_row_nan_and_no_other(value: float, fn: Any) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, 16)
    clean = fn(x, weight)
    x[1, 3] = value
    y = fn(x, weight)
    assert bool(torch.isnan(y[1]).all())
    assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])
    weight[5, 2] = value
    y = fn(x, weight)
    assert bool(torch.isnan(y[:, 5]).all())
    assert bool(torch.isfinite(y[[0, 2, 3]][:, :5]).all())


def test_against_another_formulation() -> None:
    """Element by element, in Python's float64."""
    x, weight, bias = torch.randn(3, 5), torch.randn(2, 5), torch.randn(2)
    (qx, sx), (qw, sw) = quantize(x), quantize(weight)
    for i in range(3):
        for j in range(2):
            total = sum(qx[i].double() * qw[j].double()) * sx[i].double() * sw[j].double() + bias[j]
            assert reference(x.double(), weight.double(), bias.double())[i, j].item() == pytest.approx(
                total.item(), rel=1e-12
            )


def test_powers_of_two_scale_through_exactly() -> None:
    x, weight = torch.randn(6, 24), torch.randn(10, 24)
    assert torch.equal(fp8_linear(8 * x, weight / 4), 2 * fp8_linear(x, weight))


def test_rows_are_independent() -> None:
    x, weight = torch.randn(6, 24), torch.randn(10, 24)
    torch.testing.assert_close(fp8_linear(x, weight)[2:4], fp8_linear(x[2:4], weight), rtol=1e-6, atol=1e-6)


def test_what_the_format_can_hold_is_exact() -> None:
    whole = torch.randint(-8, 9, (6, 16)).float()
    whole[:, 0] = 7.0  # 448 / 64: every scale is a power of two
    weight = whole[:4].clamp(-7, 7)
    assert torch.equal(fp8_linear(whole.clamp(-7, 7), weight), whole.clamp(-7, 7) @ weight.T)


def gradients(fn: Any, args: tuple[Any, ...], dy: torch.Tensor, grad: str) -> list[torch.Tensor]:
    leaves = [a.detach().clone().requires_grad_() for a in args]
    return list(torch.autograd.grad(fn(*leaves, grad), leaves, dy))


def test_gradients_are_those_of_the_linear_layer() -> None:
    x, weight, bias = torch.randn(2, 3, 16), torch.randn(8, 16), torch.randn(8)
    dy = torch.randn(2, 3, 8)
    want = gradients(lambda x, w, b, _: nn.functional.linear(x, w, b), (x, weight, bias), dy, "bf16")
    torch.testing.assert_close(gradients(eager, (x, weight, bias), dy, "bf16"), want)
    dx, *rest = gradients(eager, (x, weight, bias), dy, "e5m2")
    torch.testing.assert_close(rest, want[1:])
    (qd, sd), (qv, sv) = quantize(dy, E5M2), quantize(weight.t())
    torch.testing.assert_close(dx, (qd.float() @ qv.float().t()) * sd * sv.t())
    off = ((dx - want[0]).norm() / want[0].norm()).item()
    assert 0.01 < off < 0.15  # two bits behind the leading one


def test_forward_derivatives_are_those_of_the_linear_layer() -> None:
    inputs = torch.randn(2, 3, 5), torch.randn(4, 5), torch.randn(4)
    tangents = tuple(torch.randn_like(t) for t in inputs)
    _, found = torch.func.jvp(fp8_linear, inputs, tangents)
    _, expected = torch.func.jvp(torch.nn.functional.linear, inputs, tangents)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("candidate", "grad", "bias"),
    [
        *[(name, grad, bias) for name in ("eager", "scaled_mm") for grad in GRADS for bias in (False, True)],
        pytest.param("compiled", "e5m2", False, marks=needs_compiler),
        pytest.param("compiled", "bf16", True, marks=[needs_compiler, pytest.mark.exhaustive]),
    ],
)
def test_candidates_agree_with_the_definition(candidate: str, grad: str, bias: bool) -> None:
    """PyTorch's product of FP8 rows runs on the CPU, too, where it is tested but never chosen."""
    x, weight, b = torch.randn(2, 7, 33), torch.randn(21, 33), torch.randn(21)
    args = (x, weight, b) if bias else (x, weight)
    dy = torch.randn(2, 7, 21)

    def called(fn: Any) -> Any:
        return fn if bias else lambda x, w, g: fn(x, w, None, g)

    implementation = called(OP.candidate(candidate).implementation)
    torch.testing.assert_close(implementation(*args, grad), called(reference)(*args, grad))
    got = gradients(implementation, args, dy, grad)
    wide = gradients(called(reference), tuple(a.double() for a in args), dy.double(), grad)
    torch.testing.assert_close(got, [g.float() for g in wide])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("grad", GRADS)
def test_the_product_of_fp8_rows_passes_the_contest_verification(grad: str) -> None:
    args = [
        torch.randn(35, 40, requires_grad=True),
        torch.randn(24, 40, requires_grad=True),
        torch.randn(24, requires_grad=True),
        grad,
    ]
    _, deterministic = verify(OP, OP.candidate("scaled_mm"), yardsticks(OP, OP.case(args)))
    assert deterministic


def test_what_is_multiplied_lies_as_hopper_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by rows, each without gaps, and a bias without gaps that begins at a multiple of 16 bytes."""
    calls = []

    def multiply(a: torch.Tensor, b: torch.Tensor, sa: Any, sb: Any, bias: Any = None, **options: Any) -> Any:
        calls.append(bias)
        assert a.stride() == (a.shape[1], 1)
        assert b.stride() == (1, b.shape[0])
        assert bias is None or (bias.is_contiguous() and bias.data_ptr() % 16 == 0)
        return real(a, b, sa, sb, bias, **options)

    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    implementation = OP.candidate("scaled_mm").implementation
    for K, M, rows in ((32, 48, 5), (33, 21, 1), (16, 16, 1)):
        x, weight = torch.randn(K, rows).t(), torch.randn(K, M).t()
        for bias in (torch.randn(M + 1)[1:], torch.randn(2 * M)[::2], torch.randn(1).expand(M)):
            leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
            y = implementation(*leaves, "e5m2")
            dy = torch.randn(M, rows).t()
            got = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
            wide = [t.detach().double().requires_grad_() for t in leaves]
            exact = reference(*wide, "e5m2")
            want = [exact.detach(), *torch.autograd.grad(exact, wide, dy.double())]
            torch.testing.assert_close(got, [t.float() for t in want])
    assert len(calls) == 18


@pytest.mark.parametrize("bits", [8, 2], ids=["not rounded", "rounded further"])
def test_another_rounding_is_seen(bits: int) -> None:
    """Also one that is nearer to the product of what was given: it is another function."""
    args = [torch.randn(35, 40), torch.randn(24, 40), None, "bf16"]

    def other(x: torch.Tensor, weight: torch.Tensor, bias: Any, grad: str) -> torch.Tensor:
        return nn.functional.linear(x, weight) if bits == 8 else eager(x, weight.to(E5M2).to(x), bias, grad)

    with pytest.raises(Rejected, match="is wrong"):
        verify(OP, Candidate("other", other), yardsticks(OP, OP.case(args)))


@pytest.mark.parametrize("grad", ["bf16", "e5m2"])
def test_a_single_row_without_a_dimension_of_rows(grad: str) -> None:
    """A row [K] gives [M], as a linear layer does, also one by one under vmap."""
    x, weight, bias = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)
    want = fp8_linear(x, weight, bias)
    for fn in (fp8_linear, reference):
        row = x[1].clone().requires_grad_()
        y = fn(row, weight, bias, grad=grad)
        torch.testing.assert_close(y, want[1])
        assert torch.autograd.grad(y.sum(), row)[0].shape == (16,)
    torch.testing.assert_close(torch.vmap(lambda row: fp8_linear(row, weight, bias, grad=grad))(x), want)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    y = fp8_linear(x, weight)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 8)
    assert torch.equal(weight.grad, torch.zeros(8, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_layouts(dtype: torch.dtype) -> None:
    x = torch.randn(16, 5).to(dtype).t().requires_grad_()
    weight = torch.randn(16, 8).to(dtype).t().requires_grad_()
    y = fp8_linear(x, weight)
    y.backward(torch.randn(8, 5).to(dtype).t())
    assert y.dtype == x.grad.dtype == weight.grad.dtype == dtype  # type: ignore[union-attr]
    assert y.is_contiguous()
    assert torch.equal(y, fp8_linear(x.contiguous(), weight.contiguous()))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight": (
        {"weight": torch.ones(4, 3)},
        ValueError,
        r"weight has shape \(4, 3\), expected \[M, K\] with K = 4",
    ),
    "bias": ({"bias": torch.ones(3)}, ValueError, r"bias has shape \(3,\), expected \[M\] with M = 2"),
    "dtype": ({"weight": torch.ones(2, 4).half()}, TypeError, "weight is torch.float16 and x torch.float32"),
    "8 bits": ({"x": torch.ones(2, 4).to(E4M3)}, TypeError, "x is torch.float8_e4m3fn; .* at least 16 bits"),
    "grad": ({"grad": "fp8"}, ValueError, "grad is .*fp8.*, expected one of bf16, e5m2"),
    "scaled": ({"impl": "scaled_mm"}, Unsupported, "runs on CUDA, not on cpu"),
    "triton": ({"impl": "triton"}, Unsupported, "runs on CUDA, not on cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_fix(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        fp8_linear(**{"x": torch.ones(3, 4), "weight": torch.ones(2, 4), **args})


def on_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bakeoff.hardware.capability", lambda device: capability)


def test_gpus_without_fp8_products_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OP.cases()[0]
    on_gpu((8, 0), monkeypatch)
    assert "need compute capability 8.9 or newer, this GPU has 8.0" in (lacks_fp8("cuda:0") or "")
    assert "8.9" in (OP.candidate("triton").supports(case) or "")
    on_gpu((8, 9), monkeypatch)
    assert lacks_fp8("cuda:0") is None
    half = Case({**case.args, "x": OP.cases()[9].x}, "cuda")
    assert "bfloat16, not torch.float16" in (OP.candidate("scaled_mm").supports(half) or "")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Sequential(nn.Linear(32, 16, bias=False)))


def test_convert_keeps_parameters_and_their_names() -> None:
    net = model()
    before, state = dict(net.named_parameters()), list(net.state_dict())
    assert convert(net, grad="e5m2") == ["0", "2.0"]
    assert list(net.state_dict()) == state
    assert all(parameter is before[name] for name, parameter in net.named_parameters())
    assert isinstance(net[0], Fp8Linear)
    assert "grad=e5m2" in repr(net[0])
    x = torch.randn(3, 16)
    torch.testing.assert_close(net[0](x), fp8_linear(x, before["0.weight"], before["0.bias"]))
    assert convert(net) == []


def test_convert_takes_what_it_is_told_and_keeps_what_is_shared_shared() -> None:
    net = model()
    net.append(net[2])
    net[0].register_forward_hook(lambda *_: None)
    net.eval()
    assert convert(net, lambda name, linear: linear.bias is None) == ["2.0", "3.0"]
    assert net[2][0] is net[3][0]
    assert not net[2][0].training
    assert convert(net) == []  # the other has a hook, which a new layer would lose


def test_autocast_chooses_the_dtype_as_for_a_linear_layer() -> None:
    layer, x = Fp8Linear(32, 16), torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    weight, bias = layer.weight.bfloat16(), layer.bias.bfloat16()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, fp8_linear(x.bfloat16(), weight, bias))
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_the_examples_run() -> None:
    assert doctest.testmod(bakeoff.nn.fp8).failed == 0
    (example,) = doctest.DocTestFinder().find(fp8_linear, globs={"fp8_linear": fp8_linear})
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("room", [llm_med, byte_spectral, titan_mac, longnet])
def test_the_trainer_converts_projections_alone(room: Any, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        net = build(room.Config())
    with caplog.at_level(logging.WARNING, "bakeoff"):
        names = to_fp8(net, torch.device("cpu"))
    assert names
    kinds = {name.split(".", 2)[2] for name in names}
    assert {"mlp.gate_up", "mlp.down"} < kinds
    assert not any("memory" in name or "head" in name for name in names)
    assert "train.fp8: cpu multiplies no FP8 matrices" in caplog.text
    assert not isinstance(getattr(net, "head", None), Fp8Linear)


def test_the_trainer_refuses_a_model_without_projections() -> None:
    with pytest.raises(ConfigError, match=r"train\.fp8=true: the model has no projections"):
        to_fp8(model(), torch.device("cpu"))


def test_a_short_run_learns_and_saves_ordinary_weights(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {n}: {n % 7} lazy dogs\n" for n in range(400)))
    config = Config(
        recipe="test",
        model=llm_med.Config(d_model=32, layers=1, heads=2, max_seq_len=32),
        data=Data(path=str(tmp_path / "text.txt")),
        optim=Optim(lr=1e-2),
        train=Train(
            steps=25,
            batch_size=8,
            eval_rows=8,
            device="cpu",
            fp8=True,
            leak_check=False,
            run_dir=str(tmp_path / "run"),
        ),
        select=Select(tune=False),
        metrics=Metrics(console=False),
    )
    result = train(config, console=Console(file=io.StringIO()))
    assert result.bits_per_byte_before == pytest.approx(8.0, abs=0.3)
    assert result.bits_per_byte_after < 5
    assert result.skipped == 0
    assert "fp8_linear" in {entry.op for entry in result.selection}
    loaded, saved = load_run(tmp_path / "run")
    assert saved == config
    assert not any(isinstance(module, Fp8Linear) for module in loaded.modules())
    assert list(loaded.state_dict()) == list(build(config.model).state_dict())
    assert to_fp8(loaded, torch.device("cpu"))
    assert to_fp8(loaded, torch.device("cpu")) == []


def test_kernels_are_guessed_where_fp8_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_module, "lacks_fp8", lambda device: None)
    case = OP.cases()[0]
    assert OP.heuristic(case, "graph") == "triton"
    assert OP.heuristic(Case(case.args, "cpu"), "graph") == "eager"
    monkeypatch.setattr(op_module, "lacks_fp8", lambda device: "an older GPU")
    assert OP.heuristic(case, "eager") == "eager"
