"""No hidden wait for the device: calls that read a tensor's value are allowed at named log points only.

A step that waits once costs the host its lead, and can't become a CUDA graph. This reads the sources; what it
can't see (`if tensor:`) the gpu lane finds, by running steps under sync-debug mode "error".
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "bakeoff"
PACKAGES = ("apps/train", "optim", "nn", "models")

METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "allclose", "synchronize"}
FUNCTIONS = {"float", "int", "bool", "print"}

# file: {function: why it may read values}. Of float(), int() and bool() only those of tensors would wait; all
# uses are listed all the same, so that a new one is looked at.
ALLOWED: dict[str, dict[str, str]] = {
    "apps/train/step.py": {
        "Stepper.read": "the log point: one read for all that was counted",
        "Stepper.bits_per_byte": "a measurement on held-out data, between steps",
        "Stepper.skipped_in_a_row": "a checkpoint, between steps",
    },
    "apps/train/saving.py": {
        "_weights": "a checkpoint, between steps",
        "_rank_state": "a checkpoint, between steps",
        "_measured": "a checkpoint, between steps",
    },
    "apps/train/metrics.py": {
        "Resumed.keeps": "a number from a file",
    },
    "apps/train/reporting.py": {
        "report_steps": "the log point, on numbers that Stepper.read gave",
    },
    "apps/train/loop.py": {
        "_reason": "a signal's number",
    },
    "apps/train/timing.py": {
        "Timer.pause": "around measurements and saves, between steps",
        "Timer.busy": "the end of the run",
        "Timer.synchronize": "around measurements and saves, between steps",
    },
    "apps/train/checkpoint.py": {
        "Checkpoint.__init__": "a number from a file",
        "save": "the step's number",
        "set_aside": "a number in a folder's name",
        "load_run": "weights of a file, on the CPU",
    },
    "apps/train/config/layers.py": {
        "_parse": "a number on the command line",
    },
    "apps/train/data.py": {
        "ByteCorpus.__len__": "NumPy integers of file sizes",
        "ByteCorpus.read": "NumPy integers of file sizes",
        "ByteCorpus._fill": "NumPy integers of file sizes",
        "ByteCorpus._holding": "a file's hash and NumPy integers of file sizes",
        "split": "a share of a number of bytes",
    },
    "models/checks.py": {
        "check_values": "symbols on the CPU alone",
    },
    "models/longnet/image.py": {
        "ImageConfig.__post_init__": "numbers of the configuration",
    },
    "models/longnet/text.py": {
        "LongNetLM.flops_per_token": "a number of FLOPs, of the configuration",
    },
    "models/titan_mac.py": {
        "TitanMAC.flops_per_token": "a number of FLOPs, of the configuration",
    },
    "nn/memory_state.py": {
        "NeuralMemoryState.save": "a file, between steps",
        "NeuralMemoryState.load": "a file, between steps",
    },
    "optim/adamw.py": {
        "AdamW._check": "a rate on the CPU, as groups are added or loaded",
    },
    "optim/nested.py": {
        "DeepNestedOptimizer._gather": "a period, a number of the configuration",
    },
    "optim/groups.py": {
        "ParamGroup.rate": "a rate on the CPU, for parameters on the CPU",
    },
}


def reads(source: str) -> list[tuple[str, str]]:
    """(function, call) of everything in `source` that may wait for a tensor's value."""
    found: list[tuple[str, str]] = []

    def walk(node: ast.AST, inside: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            inside = (*inside, node.name)
        if isinstance(node, ast.Call):
            called = node.func
            if (isinstance(called, ast.Attribute) and called.attr in METHODS) or (
                isinstance(called, ast.Name) and called.id in FUNCTIONS
            ):
                found.append((".".join(inside), ast.unparse(called)))
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(ast.parse(source), ())
    return found


FILES = sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_values_are_read_at_log_points_only(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(SOURCE)), {})
    strays = [
        f"{where or 'the module'}: {call}()"
        for where, call in reads(path.read_text())
        if where not in allowed
    ]
    assert not strays, f"{path}: keep these on the device, or list them above with a reason: {strays}"


def test_the_list_holds_nothing_that_is_gone() -> None:
    for name, functions in ALLOWED.items():
        present = {where for where, _ in reads((SOURCE / name).read_text())}
        assert not set(functions) - present, f"{name} has no such reads any more"


def test_all_packages_are_looked_at() -> None:
    for package in PACKAGES:
        assert any(path.is_relative_to(SOURCE / package) for path in FILES), package


@pytest.mark.parametrize(
    "line",
    [
        "loss.item()",
        "norm.tolist()",
        "x.cpu().mean()",
        "x.detach().numpy()",
        "torch.nonzero(x)",
        "torch.equal(a, b)",
        "float(loss)",
        "int(loss)",
        "bool(found_inf)",
        "print(loss)",
        "torch.cuda.synchronize()",
    ],
)
def test_a_read_is_found_wherever_it_stands(line: str) -> None:
    source = f"class A:\n    def step(self):\n        return [{line} for _ in (lambda: 1,)]\n"
    assert [where for where, _ in reads(source)] == ["A.step"]
    assert reads(f"def f():\n    @g({line})\n    def h(): ...\n")
    assert not reads("def f():\n    return loss.mean() + torch.where(a, b, 0.0)\n")
