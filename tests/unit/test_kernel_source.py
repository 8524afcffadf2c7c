"""What kernel source may not contain, because the interpreter lane can't see it go wrong."""

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "bakeoff"
BANNED = {
    "make_block_ptr": "raises in Triton 3.9: use pointers or tensor descriptors",
    "advance": "raises in Triton 3.9: use pointers or tensor descriptors",
    "libdevice": "doesn't run in the interpreter: use tl.math",
    "inline_asm_elementwise": "doesn't run in the interpreter",
    "device_assert": "is not checked in the interpreter",
}


def complaints(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.alias):
            name = node.attr if isinstance(node, ast.Attribute) else node.name.rsplit(".", 1)[-1]
            if name in BANNED:
                found.append(f"line {node.lineno}: {name} {BANNED[name]}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            keywords = {keyword.arg for keyword in node.keywords}
            masked = "mask" in keywords or len(node.args) > 1
            if masked and "other" not in keywords and len(node.args) < 3:
                found.append(
                    f"line {node.lineno}: a masked load without other= is undefined on a GPU, 0 elsewhere"
                )
    return found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("tl.load(p, mask=m)", 1),
        ("tl.load(p, m)", 1),
        ("tl.load(p, mask=m, other=0.0) + tl.load(p) + tl.load(p, m, 0.0)", 0),
        ("tl.make_block_ptr(x); tl.advance(p, (1,))", 2),
        ("from triton.language.extra import libdevice", 1),
        ("tl.inline_asm_elementwise('mov')", 1),
        ("advance = tl.load(step) + 1", 0),
    ],
)
def test_bans_are_seen(source: str, count: int) -> None:
    assert len(complaints(source)) == count


def kernel_files() -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*.py") if "\n@triton.jit" in path.read_text())


def test_there_are_kernels_and_they_live_in_their_room() -> None:
    assert kernel_files()
    assert {"kernels" in (path.stem, path.parent.name) for path in kernel_files()} == {True}


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: "/".join(path.relative_to(SOURCES).parts))
def test_kernels_keep_the_bans(path: Path) -> None:
    assert complaints(path.read_text()) == []
