"""docs/add-an-op.md, followed to the letter in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-an-op.md").read_text()
FLAGS = re.MULTILINE | re.DOTALL
FILES = dict(re.findall(r"^`(src/bakeoff/ops/squared_relu/\w+\.py)`:\n\n```python\n(.*?)^```", PAGE, FLAGS))
LINE = re.search(r"^`src/bakeoff/ops/__init__\.py`, one line more:\n\n```python\n(.*?)^```", PAGE, FLAGS)
CONTEST = re.search(r"^## 6\..*?```python\n(.*?)^```", PAGE, FLAGS)

SHORT = """
import sys
import bakeoff.select.choose.tune
sys.modules["bakeoff.select.choose.tune"]._PER_KEY_S = 0.3  # a fifth: enough to tell that it measures
"""
CHECK = """
import math, torch, bakeoff
from bakeoff.select import find_op

op = find_op("squared_relu")
verdict = next(v for v in report.verdicts if v.op == "squared_relu")
trials = {t.candidate: t for t in verdict.trials}
assert trials["eager"].timing is not None and trials["eager"].errors.rms < 1e-6, trials["eager"]
assert "runs on CUDA" in trials["triton"].rejected, trials["triton"]
assert trials["compiled"].rejected or trials["compiled"].timing
assert verdict.winner in ("eager", "compiled")
assert bakeoff.explain("squared_relu", x).choice == verdict.winner
assert not report.unsettled

exact = x.detach().double().clamp(min=0).square()
assert torch.allclose(bakeoff.ops.squared_relu(x).double(), exact, rtol=1e-6)
assert torch.equal(bakeoff.ops.squared_relu(x, impl="eager"), torch.relu(x).square())
for wrong, message in ((lambda: bakeoff.ops.squared_relu(x, impl="triton"), "runs on CUDA"),
                       (lambda: bakeoff.ops.squared_relu(x, impl="cobol"), "it has eager, compiled, triton"),
                       (lambda: bakeoff.ops.squared_relu(torch.ones(3).int()), "convert it to a floating")):
    try:
        wrong()
    except (bakeoff.Unsupported, TypeError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
import doctest, bakeoff.ops.squared_relu
import sys
module = sys.modules["bakeoff.ops.squared_relu"]
results = doctest.testmod(module, extraglobs={"squared_relu": module.squared_relu, "torch": torch})
assert results.attempted == 1 and not results.failed
print("followed")
"""

KERNEL = """
import torch
from bakeoff.ops.squared_relu import kernels, reference

for shape in ((), (0, 4), (3,), (2049,), (5, 1001)):
    x = torch.randn(shape, requires_grad=True)
    y = kernels.squared_relu(x)
    dy = torch.randn(shape[-1:]).expand(shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    x64 = x.detach().double().requires_grad_()
    (dx64,) = torch.autograd.grad(reference.squared_relu(x64), x64, dy.double())
    torch.testing.assert_close(y.double(), x64.clamp(min=0).square(), rtol=1e-6, atol=0)
    torch.testing.assert_close(dx.double(), dx64, rtol=1e-6, atol=0)

# First-class without an extra line: checked by opcheck, traced whole, clear about second derivatives.
x, dy = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
torch.library.opcheck(kernels.squared_relu.traced.forward, (x, True, ""))
torch.library.opcheck(kernels.squared_relu.traced.backward, (dy, x.detach(), x.detach(), [True], ""))
whole = torch.compile(lambda x: kernels.squared_relu(x) * 2, fullgraph=True, backend="aot_eager")
whole(x).backward(dy)
torch.testing.assert_close(x.grad, 4 * dy * x.detach().clamp(min=0))
try:
    (dx,) = torch.autograd.grad(kernels.squared_relu(x), x, dy, create_graph=True)
    dx.sum().backward()
except RuntimeError as error:
    assert "can't be differentiated twice" in str(error)
else:
    raise AssertionError("a second derivative of kernels")
print("followed")
"""


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package after steps 1 to 5 of the page."""
    root = tmp_path_factory.mktemp("overlay")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    assert {Path(name).name for name in FILES} == {"__init__.py", "reference.py", "kernels.py", "op.py"}
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert LINE is not None
    assert LINE[1].count("\n") == 1
    with (root / "src" / "bakeoff" / "ops" / "__init__.py").open("a") as registry:
        registry.write(LINE[1])
    return root


def run(overlay: Path, code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=overlay,
        env={
            **os.environ,
            "PYTHONPATH": str(overlay / "src"),
            "BAKEOFF_CACHE": str(overlay / "cache"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_contest_and_calls(overlay: Path) -> None:
    assert CONTEST is not None
    out = run(overlay, SHORT + CONTEST[1] + CHECK)
    assert "choice:" in out
    assert out.endswith("followed\n")


def test_kernel_under_the_interpreter(overlay: Path) -> None:
    pytest.importorskip("triton")
    assert run(overlay, KERNEL, TRITON_INTERPRET="1").endswith("followed\n")


def test_the_page_is_short() -> None:
    lines = [line for text in FILES.values() for line in text.splitlines() if line.strip()]
    assert len(lines) <= 100
    assert "".join(FILES.values()).count("@triton.jit") == 2


def test_page_passes_lint(overlay: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "--no-cache",
                str(overlay / "src/bakeoff/ops/squared_relu"),
            ],
            cwd=overlay,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
