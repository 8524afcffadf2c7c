"""Every op's declaration holds what the contest, the benchmark and the tests rely on."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bakeoff
from bakeoff.select import Cost, Op, find_op, registry
from bakeoff.select.contests.draw import inputs
from bakeoff.select.declare.key import REGIMES, key
from bakeoff.select.declare.sources import _meaning, files, roots
from tests.cut import cut

importlib.import_module("bakeoff.ops")
OPS = Path(bakeoff.__file__).parent / "ops"
LINES = {
    line.module.rsplit(".", 1)[-1]: [name.name for name in line.names]
    for line in ast.parse((OPS / "__init__.py").read_text()).body
    if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("bakeoff.ops.")
}
"""The public functions by folder, as the registry's lines name them."""
OWN = [op for op in registry.values() if op.home.startswith("bakeoff.ops.")]
NAMES = sorted(name for name in LINES if isinstance(registry.get(name), Op))


@pytest.fixture(params=NAMES)
def op(request: pytest.FixtureRequest) -> Op:
    return find_op(request.param)


def test_every_folder_has_its_line() -> None:
    folders = {path.parent.name for path in OPS.glob("*/__init__.py")}
    assert folders == set(LINES)
    assert {"rms_norm", "rotary"} <= set(NAMES)


@pytest.mark.parametrize("name", [name for names in LINES.values() for name in names])
def test_public_function_states_its_contract(name: str) -> None:
    function = getattr(bakeoff.ops, name)
    assert inspect.isfunction(function), f"bakeoff.ops.{name} is not the public function but {function!r}"
    text = inspect.getdoc(function) or ""
    arguments = list(inspect.signature(function).parameters)
    parts = ("Args:", "Returns:", "Raises:", "Source:", "Example:", ">>> ")
    missing = [part for part in parts if part not in text]
    missing += [p for p in arguments if not re.search(rf"^ +(\w+, )*{p}(, \w+)*: ", text, re.MULTILINE)]
    assert not missing
    if name in NAMES:
        # A tuple of tensors is one argument of the function and several of the op: memory, memory_w1, ...
        stated = {p if p in arguments else p.rsplit("_", 1)[0] for p in find_op(name).params}
        assert set(arguments) - {"impl"} == stated


def test_rooms(op: Op) -> None:
    rooms = {path.name for path in (OPS / op.name).glob("*.py")}
    assert {"__init__.py", "reference.py", "op.py"} <= rooms


def test_candidates(op: Op) -> None:
    names = [candidate.name for candidate in op.candidates]
    assert names[0] == "eager"
    assert len(set(names)) == len(names)
    for candidate in op.candidates:
        assert candidate.source_hash
        if candidate.absent is None:
            positional = list(inspect.signature(candidate.implementation).parameters.values())
            takes_any = any(p.kind is p.VAR_POSITIONAL for p in positional)
            assert takes_any or len(positional) == len(op.params), candidate.name


LOADED = """
import json, os, sys
import triton  # once for all forks
import bakeoff.ops
from bakeoff.select import registry

declared = set(sys.modules)
for op in registry.values():
    for candidate in op.candidates:
        if candidate.launches:
            sys.stdout.flush()
            if os.fork():
                os.wait()
                continue
            candidate.implementation
            ours = ("bakeoff.ops.", "bakeoff.kernels", "bakeoff.channel_major", "bakeoff.fft_conv",
                    "bakeoff.attention_backends")
            names = [name for name in set(sys.modules) - declared if name.startswith(ours)]
            files = [sys.modules[name].__file__ for name in names]
            print(json.dumps([op.name, candidate.name, files]), flush=True)
            os._exit(0)
"""


@pytest.fixture(scope="module")
def loaded() -> dict[tuple[str, str], list[Path]]:
    """The files of this package that loading a candidate with kernels executes, beside what declaring did."""
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {(op, candidate): [Path(file) for file in files] for op, candidate, files in lines}


def hashes(op: Op) -> dict[str, str]:
    """The hash of each candidate's source, read now."""
    return {candidate.name: replace(candidate).source_hash for candidate in op.candidates}


def hashes_after_editing(op: Op, edited: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    read = Path.read_bytes
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda path: read(path) + b"\nedited = 1" * path.samefile(edited))
        return hashes(op)


def test_editing_a_kernel_makes_what_was_measured_stale(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file with kernels is part of a candidate's source, and of none that has no kernels."""
    kernels = [path for path in (OPS / op.name).rglob("*.py") if "@triton.jit" in path.read_text()]
    kernels += (OPS / op.name).rglob("*.cu*")
    before = hashes(op)
    for edited in kernels:
        after = hashes_after_editing(op, edited, monkeypatch)
        changed = {name for name in before if before[name] != after[name]}
        assert changed, edited
        assert all(op.by_name[name].launches for name in changed), edited
    assert hashes(op) == before


def test_a_verdict_depends_on_all_that_its_kernels_run_through(
    loaded: dict[tuple[str, str], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever loading a candidate executes is part of its source, and of plain PyTorch's nothing of it."""
    assert {(op.name, c.name) for op in OWN for c in op.candidates if c.launches} == set(loaded)
    edited: dict[tuple[str, Path], dict[str, str]] = {}
    for (name, candidate), executed in loaded.items():
        op, before = find_op(name), hashes(find_op(name))
        assert executed
        for file in executed:
            if (name, file) not in edited:
                edited[name, file] = hashes_after_editing(op, file, monkeypatch)
            after = edited[name, file]
            assert after[candidate] != before[candidate], (name, candidate, file)
            assert after[op.incumbent.name] == before[op.incumbent.name], (name, file)


MADE_OF = {"qkv_rotary": "rotary"}
"""Ops that plain PyTorch computes by another's formula."""


def test_plain_pytorch_s_source_is_its_formula_and_the_definition(op: Op) -> None:
    incumbent = op.incumbent
    found = set(files(roots(incumbent.call, incumbent.load) or ()))
    assert f"bakeoff.ops.{op.name}.plain" in found
    ops = {op.name, MADE_OF.get(op.name, op.name)}
    own = {f"bakeoff.ops.{name}.{module}" for name in ops for module in ("plain", "reference")}
    assert {name for name in found if not name.startswith("bakeoff.attention_backends")} <= {
        *own,
        "bakeoff.autocast",
    }


def test_words_about_code_are_no_part_of_its_source(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    read, before = Path.read_bytes, hashes(op)

    def reworded(path: Path) -> bytes:
        text = read(path)
        return text + b'\n\n# More words.\n"""And more."""\n' if path.suffix == ".py" else text

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", reworded)
        assert hashes(op) == before


def test_what_looks_like_words_but_is_code_stays() -> None:
    code = b'''def f(): "inline"
x = """
# in a string

"""; y = 1
f"""
# {x}
"""
"a" if x else "b"
'''
    assert _meaning(code) == code.rstrip(b"\n")
    assert _meaning(
        b'"""Doc."""\n\nx = 1  # why\n# alone\ndef f():\n    """Doc\n\n    of f."""\n    return x\n'
    ) == (b"x = 1  # why\ndef f():\n    return x")
    assert _meaning(b"x = (") == b"x = ("


def test_metadata_names_arguments(op: Op) -> None:
    assert set(op.features) <= set(op.params)
    assert op.batched <= set(op.params)


def test_cases(op: Op) -> None:
    cases = op.cases()
    assert cases
    assert len({key(op, case, "eager") for case in cases}) > 1
    for case in cases:
        assert set(case.args) == set(op.params)
        op.check(case)
        representative = op.bucket(case)
        op.check(representative)
        assert op.bucket(representative) == representative
        found = op.cost(case)
        assert isinstance(found, Cost)
        assert found.bytes >= sum(meta.nbytes for meta in case.data.values()) // 2 > 0
        assert found.flops > 0
        forward = op.cost(case.without_grad())
        assert forward.bytes < found.bytes or not case.needs_grad
        for regime in REGIMES:
            assert op.heuristic(case, regime) in op.by_name
        for candidate in op.candidates:
            reason = candidate.supports(case)
            assert reason is None or reason.strip()


def test_incumbent_takes_every_case_and_agrees_with_the_reference(op: Op) -> None:
    """At sizes a CPU does at once, in float64, where both must agree to rounding."""
    done = 0
    for case in op.cases():
        cpu = cut(op, case, 16, "cpu", outer=4, large=200, beyond=500)
        op.check(cpu)
        assert op.incumbent.reasons(cpu) == []
        args = [
            a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in inputs(op, cpu, 0)
        ]
        got, exact = op.incumbent.implementation(*args), op.reference(*args)
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
        done += 1
    assert done == len(op.cases())


def test_unknown_candidate_is_an_error_that_lists_the_known(op: Op) -> None:
    with pytest.raises(bakeoff.Unsupported, match="eager"):
        op.candidate("no-such")
