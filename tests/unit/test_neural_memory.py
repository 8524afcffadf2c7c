"""NeuralMemory: what it computes, whose memory it is, its states, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from bakeoff.nn import NeuralMemory, NeuralMemoryState

FORMS: dict[str, dict[str, Any]] = {
    "after": {},
    "before": {"read": "before"},
    "chunk": {"read": "chunk"},
    "no momentum": {"momentum": False},
    "constant gates": {"per_token": False},
    "ascent": {"ascent": True},
    "last layer": {"learns": "last"},
    "last layer, before": {"learns": "last", "read": "before"},
    "last layer, chunk, no momentum": {"learns": "last", "read": "chunk", "momentum": False},
}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def perturbed(**form: Any) -> NeuralMemory:
    """In float64, with weights far from their start and large rates."""
    torch.manual_seed(0)
    memory = NeuralMemory(16, heads=2, chunk=4, max_lr=0.9, **form).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return memory


def tokens(rows: int = 3, T: int = 11) -> Tensor:
    return torch.randn(rows, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def recurrence(module: NeuralMemory, x: Tensor) -> Tensor:
    """The formulas of the docstring, a row, head and token at a time, the inner gradient by autograd."""
    h, E = module.heads, module.dim // module.heads
    projected = x @ module.qkv.linear.weight.T
    padded = torch.nn.functional.pad(projected.mT, (3, 0))
    qkv = torch.nn.functional.conv1d(padded, module.qkv.short[:, None], groups=3 * module.dim).mT
    q, k, v = torch.nn.functional.silu(qkv).unflatten(-1, (3, h, E)).unbind(2)
    q, k = (3 * x / (x.square().sum(-1, keepdim=True) + E * 1e-6).sqrt() for x in (q, k))
    v = shortened(v)
    raw = module.gates(x) if module.gates is not None else module.gate_bias.expand(*x.shape[:2], -1)
    gates = raw.unflatten(-1, (-1, h)).sigmoid()
    out = torch.empty_like(q)
    for b in range(x.shape[0]):
        for head in range(h):
            M = [p[head] for p in (module.w1, module.b1, module.w2, module.b2)]
            S = [torch.zeros_like(m) for m in M]
            for t in range(x.shape[1]):
                if t % module.chunk == 0:
                    start = [m.detach().requires_grad_() for m in M]
                forget = gates[b, t, 1, head]
                decay = gates[b, t, 2, head] if module.momentum else 0.0
                z = module.w1[head] @ k[b, t, head] + module.b1[head]
                s = z.sigmoid()
                gain = 1 + (z * s).square().sum()
                if module.learns == "all":
                    slope = s * (1 + z * (1 - s))
                    jacobian, learned = module.w2[head] * slope, z * s * slope / gain
                    gain = gain + 10 * (jacobian.square().sum() + learned.square().sum())
                lr = module.max_lr * gates[b, t, 0, head] * (1 - decay) / (module.chunk * gain)
                lr *= -1 if module.ascent else 1
                with torch.enable_grad():
                    loss = (ask(start, k[b, t, head]) - v[b, t, head]).square().sum()
                    gradients = list(torch.autograd.grad(loss, start))
                learning = range(4) if module.learns == "all" else range(2, 4)
                before = list(M)
                for i in learning:
                    S[i] = decay * S[i] - lr * gradients[i]
                    M[i] = (1 - forget) * M[i] + S[i]
                asked = {"after": M, "before": before, "chunk": start}[module.read]
                out[b, t, head] = ask(asked, q[b, t, head])
    normed = out * (out.square().mean(-1, keepdim=True) + module.norm.eps).rsqrt() * module.norm.weight
    return normed.flatten(2)


def shortened(v: Tensor) -> Tensor:
    """What a memory makes of values v [..., E]."""
    return v / (v.shape[-1] / 64 + v.square().sum(-1, keepdim=True)).sqrt()


def ask(memory: list[Tensor], x: Tensor) -> Tensor:
    w1, b1, w2, b2 = memory
    return w2 @ torch.nn.functional.silu(w1 @ x + b1) + b2


@EVERY
@torch.no_grad()
def test_it_is_the_recurrence_of_its_docstring(form: dict[str, Any]) -> None:
    memory, x = perturbed(**form), tokens(2)
    torch.testing.assert_close(memory(x)[0], recurrence(memory, x), rtol=1e-9, atol=1e-9)


@EVERY
def test_pieces_equal_the_whole_and_so_do_their_gradients(form: dict[str, Any]) -> None:
    memory, x = perturbed(**form), tokens()
    parameters = list(memory.parameters())
    whole, last = memory(x)
    expected = torch.autograd.grad(whole.square().sum(), parameters)
    for cuts in ([1] * 11, [3, 8], [5, 2, 4]):
        pieces, state = [], None
        for piece in x.split(cuts, dim=1):
            y, state = memory(piece, state)
            pieces.append(y)
        joined = torch.cat(pieces, dim=1)
        torch.testing.assert_close(joined, whole, rtol=1e-9, atol=1e-9)
        assert state is not None
        assert state.scan.filled == last.scan.filled == 3
        torch.testing.assert_close(state.tensors(), last.tensors(), rtol=1e-9, atol=1e-9)
        found = torch.autograd.grad(joined.square().sum(), parameters)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@EVERY
def test_every_parameter_gets_a_gradient(form: dict[str, Any]) -> None:
    """Queries and gates, too, and in a row shorter than a chunk, which writes as well."""
    T = 11 if form.get("read") == "chunk" else 3
    memory = perturbed(**form)
    memory(tokens(T=T))[0].square().sin().sum().backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    weight = memory.qkv.linear.weight.grad
    assert weight is not None
    assert all(part.abs().sum() > 0 for part in weight.chunk(3)), "of queries, keys and values"
    bias = memory.gate_bias.grad if memory.gates is None else memory.gates.bias.grad
    assert bias is not None
    assert all(part.abs().sum() > 0 for part in bias.unflatten(0, (-1, 2))), "of each kind of gate"


def test_gradients_are_the_slope_in_float64() -> None:
    memory, x = perturbed(), tokens(1, 6)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in memory.named_parameters()]
        out: Tensor = torch.func.functional_call(memory, dict(zip(names, parameters, strict=True)), (x,))[0]
        return out

    parameters = [p.detach().requires_grad_() for p in memory.parameters()]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters), fast_mode=True)


def test_a_row_has_a_memory_of_its_own() -> None:
    memory, x = perturbed(), tokens()
    other = x.clone()
    other[1] = tokens()[2].flip(0)
    (y, state), (changed, _) = memory(x), memory(other)
    assert torch.equal(changed[0], y[0])
    assert torch.equal(changed[2], y[2])
    assert not torch.allclose(changed[1], y[1])
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(memory(x[order])[0], y[order])
    w1 = state.memory[0].unflatten(0, (3, 2)).flatten(2)
    for one, another in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(w1[one], w1[another])


@pytest.mark.parametrize("training", [True, False])
def test_nothing_outlives_a_call_but_the_state_it_returns(training: bool) -> None:
    memory, x = perturbed().train(training), tokens()
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    first, _ = memory(x)
    assert torch.equal(memory(x)[0], first)
    assert before.keys() == {name for name, _ in memory.named_parameters()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())


@EVERY
def test_an_output_depends_on_no_later_token(form: dict[str, Any]) -> None:
    memory, x = perturbed(**form), tokens(1, 10)
    y, _ = memory(x)
    for t in range(1, 10):
        other = x.clone()
        other[:, t:] += 1.0
        torch.testing.assert_close(memory(other)[0][:, :t], y[:, :t], rtol=0, atol=1e-12)


def test_it_learns_without_gradients_and_under_inference_mode() -> None:
    memory, x = perturbed(), tokens()
    expected, state = memory(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y, learned = memory(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(learned.tensors(), state.tensors())
    assert not torch.allclose(state.memory[2], memory.start(x).memory[2])
    more, _ = memory(x, learned)  # of inference mode, outside of it
    more.sum().backward()
    torch.testing.assert_close(more, memory(x, state)[0])


def test_it_comes_to_know_what_it_is_told_often() -> None:
    """And with the inner gradient's sign turned the opposite."""
    errors = {}
    for ascent in (False, True):
        memory = NeuralMemory(16, heads=2, chunk=4, forget=1e-6, ascent=ascent).double()
        x = torch.randn(1, 1, 16, dtype=torch.float64).expand(1, 8 if ascent else 96, 16)
        qkv = memory.qkv(x, None)[0][:, -1].unflatten(-1, (3, 2, 8))  # the short convolution sees x alone
        k, v = 3 * torch.nn.functional.normalize(qkv[0, 1], dim=-1), shortened(qkv[0, 2])
        states = [memory.start(x), memory(x)[1]]
        errors[ascent] = [
            sum(float((ask([w[g] for w in s.memory], k[g]) - v[g]).square().sum().detach()) for g in range(2))
            for s in states
        ]
    assert errors[False][1] < 0.1 * errors[False][0]
    assert errors[True][1] > errors[True][0]


@torch.no_grad()
def test_untrained_it_gives_what_followed() -> None:
    """Asked with a token that it saw before, with noise since: of the values it saw, mostly that of the next
    one; one in sixteen would be luck."""
    right = []
    for seed in range(8):
        torch.manual_seed(seed)
        memory = NeuralMemory(64, chunk=4)
        letters = torch.randn(24, 64)
        told = torch.arange(16)
        rows = letters[torch.cat([told, torch.randint(16, 24, (8,)), told[2:14:4]])][None]
        read, _ = memory(rows)
        values = torch.nn.functional.normalize(memory.qkv(letters[None], None)[0][0, :, 128:], dim=-1)
        right += [int((values[:16] @ x).argmax()) == t for x, t in zip(read[0, -3:], (3, 7, 11), strict=True)]
    assert sum(right) >= 0.7 * len(right)


def test_at_first_a_memory_keeps_most_of_what_it_holds() -> None:
    """A chunk of 64 leaves nine tenths and more; published gates leave 4 % after five writes."""
    memory = NeuralMemory(16, heads=2, momentum=False)
    x = torch.randn(2, 64, 16)
    _, _, forget = memory._gates(x, torch.zeros(4, 64, 8))
    kept = (1 - forget).prod(dim=1)
    assert float(kept.min().detach()) > 0.9
    _, state = memory(x[:, :16])
    assert state.memory[0].norm() > 0.8 * memory.start(x).memory[0].norm()


def test_long_rows_stay_finite_at_the_start() -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(128, heads=2, chunk=64)
    x = torch.randn(1, 1, 128) + 0.3 * torch.randn(1, 4096, 128)  # keys that point one way are the worst case
    with torch.no_grad():
        y, state = memory(x)
    assert y.isfinite().all()
    assert all(tensor.abs().max() < 50 for tensor in state.tensors().values())


@pytest.mark.parametrize("decay", [-20.0, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_no_gate_makes_a_memory_diverge(decay: float, size: float) -> None:
    """All keys equal, the rate at its largest, nothing forgotten: a memory of 64 tokens a gradient that took
    momentum's steps in full was not finite after a dozen steps of training, nor one of values as long as
    training may make them."""
    torch.manual_seed(0)
    memory = NeuralMemory(128, heads=2, chunk=64)
    assert memory.gates is not None
    with torch.no_grad():
        memory.gates.weight.zero_()
        memory.gates.bias.copy_(torch.tensor([20.0, -20.0, decay]).repeat_interleave(2))
        memory.qkv.linear.weight[256:] *= size
        x = torch.randn(1, 1, 128).expand(1, 2048, 128)
        _, state = memory(x)
    assert all(tensor.abs().max() < 10 for tensor in (*state.scan.memory, *state.scan.momentum))


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize(("width", "chunk"), [(2, 1), (2, 2), (3, 1), (4, 1), (8, 1)])
def test_narrow_heads_of_short_chunks_stay_finite(width: int, chunk: int, momentum: bool) -> None:
    """Few dimensions have like keys with unlike values, whose difference needs ever larger weights."""
    torch.manual_seed(0)
    memory = NeuralMemory(8 * width, heads=8, chunk=chunk, momentum=momentum)
    assert memory.gates is not None
    with torch.no_grad():
        memory.gates.bias[:8] = 6.0
        _, state = memory(torch.randn(16, 150, 8 * width))
    assert all(tensor.abs().max() < 100 for tensor in state.scan.memory)


@pytest.mark.parametrize("momentum", [False, True])
def test_narrow_heads_train_on_random_rows(momentum: bool) -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(8, heads=4, chunk=1, momentum=momentum)
    optimizer = torch.optim.AdamW(memory.parameters(), lr=0.01)
    for _ in range(8):
        x = torch.randn(4, 40, 8)
        loss = (memory(x)[0] - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    assert all(parameter.isfinite().all() for parameter in memory.parameters())


@torch.no_grad()
def test_a_short_value_writes_little() -> None:
    """A model learns to keep some tokens and not others by the length of their values."""
    written = []
    for scale in (1.0, 1e-3):
        torch.manual_seed(0)
        memory = NeuralMemory(32, heads=2, chunk=4).double()
        memory.qkv.linear.weight[64:] *= scale
        x = torch.randn(2, 12, 32, dtype=torch.float64)
        written.append(float(memory(x)[1].memory[2].norm()))
    assert written[1] < 0.01 * written[0]


def test_a_small_error_writes_little() -> None:
    """Of a published memory a clip made small gradients large."""
    from bakeoff.ops import memory_scan

    memory = perturbed()
    start = memory.start(tokens(1)).memory
    k = torch.nn.functional.normalize(torch.randn(2, 4, 8, dtype=torch.float64), dim=-1)
    known = torch.baddbmm(
        start[3][:, None],
        torch.nn.functional.silu(torch.baddbmm(start[1][:, None], k, start[0].mT)),
        start[2].mT,
    )
    gate, rest = torch.full((2, 4), 0.1, dtype=torch.float64), tuple(torch.zeros_like(w) for w in start)
    none = torch.zeros_like(gate)
    moved = {
        size: memory_scan(k, k, known + size, start, rest, gate, none, none, chunk=4)[2][2]
        for size in (1e-2, 1e-8)
    }
    torch.testing.assert_close(1e6 * moved[1e-8], moved[1e-2], rtol=1e-5, atol=1e-9)


# states ---------------------------------------------------------------------------------------------------


def test_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    memory, x = perturbed(), tokens()
    _, state = memory(x[:, :6])
    state.save(tmp_path / "state.safetensors")
    loaded = NeuralMemoryState.load(tmp_path / "state.safetensors")
    assert (loaded.config, loaded.scan.filled, loaded.rows) == (state.config, 2, 3)
    assert torch.equal(memory(x[:, 6:], loaded)[0], memory(x[:, 6:], state)[0])
    torch.save({}, tmp_path / "other")
    strange = {"config": state.config, "filled": "two"}
    safetensors.torch.save_file(state.tensors(), tmp_path / "third", strange)
    for name in ("other", "third"):
        with pytest.raises(ValueError, match=f"{name} holds no state of a NeuralMemory: give what its save"):
            NeuralMemoryState.load(tmp_path / name)


def test_a_detached_state_ends_the_way_of_gradients() -> None:
    memory, x = perturbed(), tokens().requires_grad_()
    _, state = memory(x[:, :6])
    y, _ = memory(x[:, 6:], state.detach())
    (gradient,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    assert gradient[:, :6].abs().sum() == 0
    y, _ = memory(x[:, 6:], state)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert gradient[:, :6].abs().sum() > 0


def test_single_rows_are_reset() -> None:
    memory, x = perturbed(), tokens()
    for length in (8, 6):  # at the end of a chunk, and inside
        _, state = memory(x[:, :length])
        chosen = memory.reset(state, torch.tensor([False, True, False]))
        y, _ = memory(x[:, 8:], chosen)
        kept, _ = memory(x[:, 8:], state)
        assert torch.equal(y[::2], kept[::2])
        fresh, _ = memory(x[:, 8:])
        assert not torch.allclose(y[1], kept[1])
        if length == 8:
            torch.testing.assert_close(y[1], fresh[1])
        else:  # its first chunk is what is left of that of the others
            torch.testing.assert_close(y[1, :2], fresh[1, :2])


def test_the_same_state_may_be_carried_on_twice() -> None:
    memory, x = perturbed(), tokens()
    _, state = memory(x[:, :6])
    first, _ = memory(x[:, 6:], state)
    assert torch.equal(memory(x[:, 6:], state)[0], first)


def test_a_state_of_another_batch_or_configuration_is_refused() -> None:
    memory, x = perturbed(), tokens()
    _, state = memory(x)
    with pytest.raises(ValueError, match=r"x has 2 rows, the state has 3: carry on the same rows"):
        memory(x[:2], state)
    with pytest.raises(
        ValueError, match=r"state is of another NeuralMemory, .*chunk=4.*this one is .*chunk=8"
    ):
        NeuralMemory(16, heads=2, chunk=8)(x.float(), state)
    with pytest.raises(ValueError, match=r"rows has a place for 2 rows, the state has 3"):
        memory.reset(state, torch.tensor([True, False]))
    with pytest.raises(TypeError, match="state must be a NeuralMemoryState, got tuple"):
        memory(x, ())
    assert torch.equal(memory(x, state)[0], memory(x, state)[0]), "nothing is lost"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "dim=16 must be a multiple of heads=3"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"chunk": 4.0}, "chunk=4.0 must be a whole number"),
        ({"heads": True}, "heads=True must be a whole number"),
        ({"max_lr": "1"}, "max_lr='1' must be a number"),
        ({"momentum": "no"}, "momentum='no' must be True or False"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be finite and at least 0"),
        ({"read": "later"}, "read='later' must be one of after, before, chunk"),
        ({"learns": "first"}, "learns='first' must be 'all' or 'last'"),
        ({"max_lr": 0.0}, "max_lr=0.0 must be positive and finite"),
        ({"max_lr": float("nan")}, "max_lr=nan must be positive and finite"),
        ({"decay": 1.0}, r"decay=1.0 must be in \(0, 1\)"),
        ({"forget": -0.1}, r"forget=-0.1 must be in \(0, 1\)"),
    ],
)
def test_settings_outside_their_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        NeuralMemory(16, **settings)


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 8), (2, 0, 16)])
def test_input_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[B, T, 16\], at least one token"):
        NeuralMemory(16)(torch.zeros(shape))


# training -------------------------------------------------------------------------------------------------


def test_many_heads_step_and_load_like_one() -> None:
    """Of a published memory the parameters of several heads were views that no optimizer could write."""
    memory = NeuralMemory(16, heads=4, chunk=4)
    optimizer = torch.optim.AdamW(memory.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in memory.named_parameters()}
    memory(torch.randn(2, 9, 16))[0].square().sin().sum().backward()
    optimizer.step()
    assert all(p.is_contiguous() and not torch.equal(p, before[n]) for n, p in memory.named_parameters())
    other = NeuralMemory(16, heads=4, chunk=4)
    other.load_state_dict(memory.state_dict())
    x = torch.randn(2, 9, 16)
    assert torch.equal(other(x)[0], memory(x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_near_the_same_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    memory = NeuralMemory(32, heads=2, chunk=4)
    x = torch.randn(2, 9, 32)
    exact, state = memory(x)
    with torch.autocast("cpu", dtype=dtype):
        y, cast = memory(x)
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1)
    y, rounded = memory.to(dtype)(x.to(dtype))
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1)
    for other in (cast, rounded):
        assert {tensor.dtype for name, tensor in other.tensors().items() if name != "conv"} == {torch.float32}
        torch.testing.assert_close(other.memory[2], state.memory[2], rtol=0.1, atol=0.02)


@pytest.mark.parametrize("form", [{}, {"learns": "last"}], ids=["all", "last"])
def test_states_made_under_inference_mode_are_trained_on(form: dict[str, Any]) -> None:
    memory, x = perturbed(**form), tokens(2)
    with torch.inference_mode():
        begun = memory.start(x)
        again = memory.reset(begun, torch.tensor([True, False]))
    for state in (begun, again):
        y, _ = memory(x, state)
        y.sum().backward()
        torch.testing.assert_close(y, memory(x)[0])


def test_a_state_of_parameters_of_another_dtype_is_refused() -> None:
    for form in ({}, {"learns": "last"}):
        memory = perturbed(**form)
        _, state = memory(tokens(2))
        with pytest.raises(TypeError, match=r"the state is torch.float64, .* is torch.float32: begin with"):
            memory.float()(tokens(2).float(), state)
        _, state = memory(tokens(2).float())
        memory.bfloat16()(tokens(2).bfloat16(), state)  # which is in float32, too


@pytest.mark.parametrize("form", [{}, {"learns": "last", "read": "chunk"}], ids=["all", "last"])
def test_transforms_and_export_see_what_a_state_holds(form: dict[str, Any]) -> None:
    memory, x = perturbed(**form), tokens(2)
    whole, _ = memory(x)
    first, state = torch.func.vmap(lambda row: memory(row[None, :6]))(x)
    assert isinstance(state, NeuralMemoryState)
    rest, _ = torch.func.vmap(lambda row, held: memory(row[None, 6:], held))(x, state)
    torch.testing.assert_close(torch.cat([first, rest], dim=2)[:, 0], whole, rtol=1e-9, atol=1e-9)
    _, state = memory(x[:, :6])
    program = torch.export.export(memory, (x[:, 6:], state)).module()
    rest, after = program(x[:, 6:], state)
    torch.testing.assert_close(rest, whole[:, 6:], rtol=1e-9, atol=1e-9)
    assert after.scan.filled == 3
