"""Running a Gluon kernel for Hopper on the CPU: its own source, over tensors of PyTorch.

Every partition of a program is a thread. What is asynchronous on the GPU happens here at the moment that
shows a missing wait: copies into shared memory at once, products and copies out of shared memory only when
they are waited for. A wait that never ends raises `Deadlock`.
"""

import ast
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = ["Deadlock", "EmulatedKernel"]

PATIENCE = 20.0


class Deadlock(RuntimeError):
    """A barrier that nobody completes."""


class Layout:
    """Any layout: where elements lie is of no concern here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def parent(self) -> "Layout":
        return self


class Tile(torch.Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=Layout())


class Pointer:
    def __init__(self, data: torch.Tensor, at: Any = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, distance: Any) -> "Pointer":
        return Pointer(self.data, self.at + distance)


class Number(int):
    """A number that is an argument of the kernel."""

    def to(self, _: Any) -> int:
        return int(self)


class Barrier:
    def __init__(self, program: "Program") -> None:
        self.program, self.count = program, 0

    def init(self, count: int) -> None:
        self.count, self.missing, self.bytes, self.completed = count, count, 0, 0

    def change(self, arrivals: int = 0, more: int = 0) -> None:
        with self.program.changed:
            assert self.missing >= arrivals, "more arrive at a barrier than it counts"
            self.missing -= arrivals
            self.bytes += more
            if self.missing == 0 and self.bytes == 0:
                self.completed += 1
                self.missing = self.count
                self.program.changed.notify_all()

    def wait(self, parity: int) -> None:
        assert parity in (0, 1)
        time.sleep(random.random() * 1e-4)  # in any order
        with self.program.changed:
            done = lambda: self.completed & 1 != parity or self.program.failed  # noqa: E731
            if not self.program.changed.wait_for(done, PATIENCE) or self.program.failed:
                raise Deadlock


class Shared:
    """Shared memory, or barriers."""

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data, self.dtype = data, dtype

    @property
    def shape(self) -> Sequence[int]:
        return self.data.shape

    def index(self, i: int) -> Any:
        return self.data[i] if isinstance(self.data, list) else Shared(self.data[i], self.dtype)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order), self.dtype)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> "Shared":
        return Shared(self.data.view(*shape), dtype)

    def load(self, _: Any) -> torch.Tensor:
        return self.data.clone().as_subclass(Tile)

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)


class Described:
    """A view of a tensor in memory, in tiles."""

    def __init__(self, tensor: torch.Tensor, view: Any) -> None:
        self.data = torch.as_strided(tensor, view.shape, view.strides, tensor.storage_offset())
        self.block_shape, self.dtype, self.layout = view.tile, tensor.dtype, Layout()
        size = torch.Size(view.tile).numel() * tensor.element_size()
        self.block_type = SimpleNamespace(nbytes=size)

    def part(self, where: Sequence[int]) -> tuple[Any, Any]:
        """What of a tile is inside: places in the tensor, and places in the tile."""
        ends = [
            min(n, first + t) for n, first, t in zip(self.data.shape, where, self.block_shape, strict=True)
        ]
        inside = tuple(slice(first, max(first, end)) for first, end in zip(where, ends, strict=True))
        return inside, tuple(slice(0, x.stop - x.start) for x in inside)


class Product:
    """A product that may not have been computed yet."""

    def __init__(self, a: Any, b: Shared, add: Any) -> None:
        self.a, self.b, self.add, self.value = a, b, add, None

    def compute(self) -> None:
        a = self.a.data if isinstance(self.a, Shared) else self.a
        found = a.float() @ self.b.data.float()
        self.value = (found if self.add is None else self.add + found).as_subclass(Tile)


class Program:
    """One program of a launch."""

    def __init__(self) -> None:
        self.changed, self.failed = threading.Condition(), False
        self.own = threading.local()
        self.errors: list[BaseException] = []

    def queue(self, name: str) -> Any:
        if not hasattr(self.own, name):
            setattr(self.own, name, deque())
        return getattr(self.own, name)

    def multiply(self, a: Any, b: Any, add: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        product = Product(a, b, add if use_acc else None)
        self.queue("products").append(product)
        return product

    def wait(self, number: int, deps: Sequence[Any]) -> Any:
        pending = self.queue("products")
        time.sleep(random.random() * 1e-3)  # long enough for whoever overwrites what is still read
        while len(pending) > number:
            pending.popleft().compute()
        values = [dep.value if isinstance(dep, Product) else dep for dep in deps]
        assert all(value is not None for value in values), "used before it is computed"
        return values[0] if len(values) == 1 else values

    def copy_in(self, view: Described, where: Sequence[int], full: Barrier, tile: Shared) -> None:
        inside, part = view.part(where)
        tile.data.zero_()
        tile.data[part] = view.data[inside]
        full.change(more=-view.block_type.nbytes)

    def copy_out(self, view: Described, where: Sequence[int], tile: Shared) -> None:
        self.queue("stores").append((view, where, tile))

    def store_wait(self, number: int) -> None:
        pending = self.queue("stores")
        while len(pending) > number:
            view, where, tile = pending.popleft()
            inside, part = view.part(where)
            view.data[inside] = tile.data[part]

    def specialize(self, partitions: Any, *_: Any) -> None:
        def run(function: Callable[..., None], args: Any) -> None:
            try:
                with torch.no_grad():
                    function(*args)
                assert not self.queue("products"), "a product that nobody waited for"
                assert not self.queue("stores"), "a copy that nobody waited for"
            except BaseException as error:  # noqa: BLE001  raised again below
                with self.changed:
                    self.errors.append(error)
                    self.failed = True
                    self.changed.notify_all()

        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def _where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else a if condition else b


def _either(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: of_tensors(a, b) if isinstance(a, torch.Tensor) else of_numbers(a, b)


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
    if mask is None:
        return int(pointer.data.view(-1)[pointer.at])
    return torch.where(mask, pointer.data.view(-1)[torch.where(mask, pointer.at, 0)], other).as_subclass(Tile)


def _store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    pointer.data.view(-1)[pointer.at[mask]] = value[mask]


class EmulatedKernel:
    """The kernel `name` of a module, called as a `bakeoff.kernels.views.ViewKernel` is; `changes` to the text
    of the module, each old one by a new one, are to break it."""

    def __init__(self, module: ModuleType, name: str, changes: Mapping[str, str] | None = None) -> None:
        self.name, text = name, Path(str(module.__file__)).read_text()
        for old, new in (changes or {}).items():
            assert old in text
            text = text.replace(old, new)
        tree = ast.parse(text)
        tree.body = [x for x in tree.body if not isinstance(x, (ast.Import, ast.ImportFrom))]
        self._code = compile(tree, str(module.__file__), "exec")

    def __call__(self, grid: tuple[int, ...], /, *, views: Mapping[str, Any], **named: Any) -> None:
        named = {
            name: value for name, value in named.items() if name not in ("num_warps", "maxnreg", "launch_pdl")
        }
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                named[name] = Described(value, views[name]) if name in views else Pointer(value)
            elif type(value) is int:
                named[name] = Number(value)
        named["DTYPE"] = getattr(torch, str(named["DTYPE"]).replace("fp", "float").replace("bf", "bfloat"))
        for number in range(grid[0]):
            program = Program()
            scope = self._scope(program, number, grid[0])
            exec(self._code, scope)
            scope[self.name](**named)

    @staticmethod
    def _scope(program: Program, number: int, programs: int) -> dict[str, Any]:
        same = lambda x, *_: x  # noqa: E731

        def allocate(dtype: Any, shape: Sequence[int], _: Any) -> Shared:
            if dtype == torch.int64:
                return Shared([Barrier(program) for _ in range(shape[0])], dtype)
            return Shared(torch.full(tuple(shape), torch.nan, dtype=dtype), dtype)

        gl = SimpleNamespace(
            constexpr=same, constexpr_function=same, static_range=range, convert_layout=same,
            int32=torch.int32, int64=torch.int64, float32=torch.float32, float16=torch.float16,
            bfloat16=torch.bfloat16, barrier=lambda: None,
            NVMMASharedLayout=Layout, NVMMADistributedLayout=Layout, DotOperandLayout=Layout,
            SliceLayout=Layout, allocate_shared_memory=allocate, warp_specialize=program.specialize,
            program_id=lambda _: number, num_programs=lambda _: programs, cdiv=lambda a, b: -(-a // b),
            where=_where, minimum=_either(torch.minimum, min), maximum=_either(torch.maximum, max),
            load=_load, store=_store, exp2=torch.exp2, log2=torch.log2,
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
            arange=lambda first, end, _: torch.arange(first, end).as_subclass(Tile),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype).as_subclass(Tile),
            inline_asm_elementwise=lambda *args, **_: next(iter(args[2]), None),
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=Layout, init=lambda bar, count: bar.init(count),
            wait=lambda bar, parity: bar.wait(int(parity)),
            arrive=lambda bar, count: bar.change(count),
            expect=lambda bar, number: bar.change(more=number) or bar.change(1),
        )  # fmt: skip
        tma = SimpleNamespace(
            async_copy_global_to_shared=program.copy_in, async_copy_shared_to_global=program.copy_out,
            store_wait=program.store_wait,
        )  # fmt: skip
        jit = lambda function=None, **_: function or same  # noqa: E731
        return {
            "__name__": "emulated", "torch": torch,
            "gluon": SimpleNamespace(jit=jit, constexpr_function=same), "gl": gl,
            "mbarrier": mbarrier, "tma": tma, "fence_async_shared": lambda: None,
            "warpgroup_mma": program.multiply, "warpgroup_mma_wait": program.wait,
        }  # fmt: skip
