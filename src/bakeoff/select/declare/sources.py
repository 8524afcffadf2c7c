"""The source of a candidate: the files whose text decides what it computes, found by reading imports.

A verdict holds as long as these files stand as they were measured, but for Python's docstrings, lines of
comments and blank lines. They are

- the module that holds the implementation, or the modules that its loader imports;
- the modules of this package's ops and kernels that those import, directly or not, also inside functions;
  for code of another project the modules of the same folder;
- the ``.cu`` and ``.cuh`` files that those modules name in strings, and what these include.

Left out is what declares or offers implementations without being part of one: an op's ``__init__.py``,
``op.py`` and ``peers.py``, unless the implementation stands there itself. Modules are read, never executed.
"""

import ast
import dis
import hashlib
import importlib.util
import inspect
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from bakeoff.select.declare.installed import package_version

__all__ = ["files", "roots", "source_hash"]

_OURS = (
    "bakeoff.ops",
    "bakeoff.kernels",
    "bakeoff.channel_major",
    "bakeoff.fft_conv",
    "bakeoff.attention_backends",
    "bakeoff.autocast",
)
_DECLARING = re.compile(r"bakeoff\.ops(\.\w+(\.(op|peers))?)?")
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class Root(NamedTuple):
    """A module that an implementation stands in, or that its loader imports."""

    module: str
    is_declaration: bool = False
    """Of its imports only those of the op's modules at the top level count: those inside functions are the
    loaders of other candidates."""


class _Module(NamedTuple):
    name: str
    path: Path
    text: bytes
    is_package: bool
    loader: Any


def roots(call: Callable[..., Any] | None, load: Callable[[], Any] | None) -> tuple[Root, ...] | None:
    """Where the source of an implementation begins; None where it can't be read, as in a notebook."""
    function = _unwrapped(call if call is not None else load)
    home = _home(function)
    code = getattr(function, "__code__", None)
    imported = tuple(map(Root, dict.fromkeys(_modules_imported_by(code)))) if code else ()
    if load is not None and imported:
        return imported
    if _module(home) is None:
        return None
    if _DECLARING.fullmatch(home) and call is not None:
        return Root(home, is_declaration=True), *(root for root in imported if _is_ours(root.module))
    return (Root(home),)


def source_hash(roots: Sequence[Root] | None, packages: Iterable[str]) -> str:
    """A hash of all files behind `roots` and of the packages' versions; a new one each time for None."""
    digest = hashlib.sha256(secrets.token_bytes() if roots is None else b"")
    for name, text in sorted(files(roots or ()).items()):
        meaning = text if re.search(r"\.cuh?$", name) else _meaning(text)
        digest.update(f"{name} {len(meaning)}\n".encode() + meaning)
    for package in packages:
        if package != "triton":  # its version is in the table's own stamp
            digest.update(f"{package} {package_version(package)}".encode())
    return digest.hexdigest()[:12]


def files(roots: Sequence[Root]) -> dict[str, bytes]:
    """The text of every source file behind `roots`, by module or file name. A root that can't be read, as of
    a package that is not installed, counts by its package's version."""
    texts: dict[str, bytes] = {}
    pending = list(roots)
    for root in roots:  # packages around it are imported with it
        around = [part for part in _with_parents(root.module) if part != root.module]
        pending += [Root(part) for part in around if _is_ours(part) and not _DECLARING.fullmatch(part)]
    while pending:
        name, is_declaration = pending.pop()
        if name in texts:
            continue
        module = _module(name)
        if module is None:
            if any(name == root.module for root in roots):
                texts[name] = package_version(name.partition(".")[0]).encode()
            continue
        texts[name] = module.text
        if _is_installed(module):
            continue
        imports, strings = _read(module.text, is_declaration)
        folder = module.name if module.is_package else module.name.rpartition(".")[0]
        followed = (*_OURS, *filter(None, [folder])) if not _is_ours(module.name) else _OURS
        if is_declaration:
            followed = _OURS[:1]
        for imported in _resolved(imports, module):
            pending += [
                Root(part)
                for part in _with_parents(imported)
                if any(_within(part, package) for package in followed) and not _DECLARING.fullmatch(part)
            ]
        texts |= _cuda_files(strings, module)
    return texts


def _unwrapped(function: Any) -> Any:
    """The function behind partials, wrappers and registered custom ops."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "_init_fn", function)  # of torch.library.custom_op
    return inspect.unwrap(function)


def _home(function: Any) -> str:
    """The module that holds the code of `function`; "" if nothing says so."""
    if type(function).__module__ == "torch._ops":  # torch.ops.NAMESPACE.OP, whoever registered it
        return ""
    return getattr(function, "__module__", None) or ""


def _modules_imported_by(code: CodeType) -> Iterator[str]:
    """The modules that a function's code imports, as the existing ones among MODULE.NAME and MODULE."""
    statements: list[tuple[str, list[str]]] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            statements.append((instruction.argval, []))
        elif instruction.opname == "IMPORT_FROM":
            statements[-1][1].append(instruction.argval)
    for module, names in statements:
        yield from _targets(module, names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _modules_imported_by(constant)


def _targets(module: str, names: Sequence[str]) -> Iterator[str]:
    """The modules behind ``from module import names``: submodules where they are, else the module."""
    for name in names:
        submodule = f"{module}.{name}"
        yield submodule if _spec(submodule) is not None else module
    if not names:
        yield module


def _is_installed(module: _Module) -> bool:
    """Whether a module belongs to another project's release, whose imports are not followed."""
    return bool({"site-packages", "dist-packages"} & {*module.path.parts}) and not _is_ours(module.name)


def _is_ours(module: str) -> bool:
    return any(_within(module, package) for package in _OURS)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _with_parents(module: str) -> Iterator[str]:
    """A module and the packages around it, which are imported with it."""
    while "." in module:
        yield module
        module = module.rpartition(".")[0]


def _resolved(imports: Iterable[tuple[int, str, tuple[str, ...]]], module: _Module) -> Iterator[str]:
    """The names of the modules behind import statements of `module`."""
    parts = module.name.split(".")
    for level, name, names in imports:
        # Relative by `level` dots, of which one is the package that the module stands in.
        around = parts[: len(parts) - level + module.is_package] if level else []
        yield from _targets(".".join(filter(None, [*around, name])), names)


@lru_cache(maxsize=1024)
def _tree(text: bytes) -> ast.Module | None:
    """A module's statements; None while it is being edited, or if it is no Python."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


@lru_cache(maxsize=1024)
def _read(text: bytes, top_level_only: bool) -> tuple[list[tuple[int, str, tuple[str, ...]]], list[str]]:
    """The import statements of a module's text as (level, module, names), and the CUDA files it names."""
    tree = _tree(text)
    if tree is None:
        return [], []
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return imports, [string for string in strings if re.fullmatch(r"[\w./-]+\.cuh?", string)]


@lru_cache(maxsize=1024)
def _meaning(text: bytes) -> bytes:
    """A module's text without docstrings, lines that hold a comment alone, and blank lines."""
    tree = _tree(text)
    if tree is None:
        return text
    lines = text.splitlines()
    left_out, kept = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first, last = node.lineno, node.end_lineno or node.lineno
            around = lines[first - 1][: node.col_offset] + lines[last - 1][node.end_col_offset :]
            if not around.strip():
                left_out.update(range(first, last + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr):  # lines of a string are no comments
            kept.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kept -= left_out
    numbered = [(number, line) for number, line in enumerate(lines, 1) if number not in left_out]
    return b"\n".join(
        line
        for number, line in numbered
        if number in kept or (line.strip() and not line.lstrip().startswith(b"#"))
    )


def _cuda_files(names: Iterable[str], module: _Module) -> dict[str, bytes]:
    """CUDA sources that `module` names relative to its folder or to one above it in its package, with what
    they include."""
    depth = module.name.count(".") + module.is_package
    folders, top = list(module.path.parents)[: max(depth, 1)], module.path.parents[depth]
    texts: dict[str, bytes] = {}
    pending = [[folder / name for folder in folders] for name in names]
    while pending:
        for path in pending.pop():
            text = _text(path, module.loader)
            if text is not None:
                if (name := os.path.relpath(path, top)) not in texts:
                    texts[name] = text
                    pending += [[path.parent / os.fsdecode(included)] for included in _INCLUDE.findall(text)]
                break
    return texts


def _module(name: str) -> _Module | None:
    """A module's text, read from its file or archive; None where it can't be had."""
    if name == "__main__":  # a script, which has no spec
        origin: str | None = getattr(sys.modules[name], "__file__", None)
        loader, is_package = None, False
    else:
        spec = _spec(name)
        if spec is None:
            return None
        origin, loader = spec.origin, spec.loader
        is_package = spec.submodule_search_locations is not None
    if origin is None:
        return None
    text = _text(Path(origin), loader)
    return None if text is None else _Module(name, Path(origin), text, is_package, loader)


def _spec(name: str) -> ModuleSpec | None:
    """Where a module lies. Unlike `importlib.util.find_spec` this imports no package around it."""
    top, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):  # no module, or one that was made by hand
        spec = None
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            break
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, spec.submodule_search_locations)
    if spec is not None and spec.name == name:
        return spec
    return getattr(sys.modules.get(name), "__spec__", None)


def _text(path: Path, loader: Any) -> bytes | None:
    """The bytes of a file, or of a member of the archive that `loader` reads; None where there is none."""
    try:
        if path.is_file():
            return path.read_bytes()
        from_archive: Callable[[str], bytes] | None = getattr(loader, "get_data", None)
        return from_archive(str(path)) if from_archive else None
    except OSError:
        return None
