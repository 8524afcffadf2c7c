"""Launches that hand on views of tensors: what a written-out one makes of an address."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from bakeoff.kernels.triton import Compiled
from bakeoff.kernels.views import View, _Compiled, _Encoder

VIEW = View((4, 2, 64), (128, 64, 1), (1, 2, 64))


class Launcher:
    """A launcher as Triton makes them: Python in front of a function that encodes views, `launch`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.launch: Callable[..., None] = lambda *args: self.calls.append(args)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launch(x, y, z, stream, function, False, *args)


class Packing(Launcher):
    """One that hands on the kernel's arguments as a tuple."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launch(x, y, z, stream, function, args[:4], args[4:])


@pytest.mark.parametrize("kind", [Launcher, Packing])
def test_every_launch_sees_the_tensor_of_its_call(kind: type[Launcher]) -> None:
    launcher, x = kind(), torch.zeros(4, 128, dtype=torch.float16)
    described = VIEW.of(x)
    compiled = _Compiled(Compiled(launcher, 111, (4,), (True,)), {1: _Encoder(described)})
    line, scope = compiled.replay("7, 1, 1", "p_y, p_x, 3, ", "launch0_")
    for address in (1024, 4096):
        exec(line, scope | {"stream": 99, "p_y": 16, "p_x": address})
    launcher(7, 1, 1, 99, 111, (4,), None, None, None, 16, described, 3, True)
    *written, called = [[*call[:-1], *call[-1]] if kind is Packing else [*call] for call in launcher.calls]
    for address, call in zip((1024, 4096), written, strict=True):
        seen = next(value for value in call if isinstance(value, type(described)))
        assert seen.base.data_ptr() == address
        assert vars(seen) == vars(described) | {"base": address}
        assert [value for value in call if value is not seen] == [x for x in called if x is not described]


def test_a_view_says_where_it_cannot_begin() -> None:
    x = torch.zeros(513, dtype=torch.float16)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        VIEW.of(x[1:])
