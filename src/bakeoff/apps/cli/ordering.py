"""order: what orders of a grid's tokens are worth, and their pictures."""

from pathlib import Path

import torch

from bakeoff.apps.cli.terminal import console, print_json, print_plain
from bakeoff.apps.tabular import terminal_table
from bakeoff.errors import BakeoffError
from bakeoff.token_order import OrderReport, TokenOrder, token_order

__all__ = ["ORDERS", "orders", "run"]

ORDERS = ("row", "snake", "tile", "morton", "hilbert", "random")
_SEED = 0


def orders(shape: tuple[int, ...], tile: int | None) -> dict[str, TokenOrder]:
    """Every order of a grid, and a random one to compare with."""
    found = {
        kind: token_order(kind, shape, tile=tile if kind == "tile" else None)
        for kind in ORDERS
        if kind != "random"
    }
    perm = torch.randperm(len(found["row"]), generator=torch.Generator().manual_seed(_SEED))
    return found | {"random": token_order("custom", shape, perm=perm)}


def run(
    shape: str, segments: str, rates: str, decay: float, tile: int | None, svg: Path | None, as_json: bool
) -> None:
    """Print a report of every order; draw them into the folder `svg`."""
    found = orders(_numbers("SHAPE", shape, "x"), tile)
    branches = _numbers("--segments", segments), _numbers("--rates", rates)
    reports = {name: order.report(*branches, decay=decay) for name, order in found.items()}
    if as_json:
        print_json(reports)
    else:
        halos = reports["row"].halos
        heads = ["keys a query", "attention kept", "active blocks", *(f"halo of {h.devices}" for h in halos)]
        rows = [(name, *_cells(report)) for name, report in reports.items()]
        console().print(terminal_table([("order", "name"), *((head, "right") for head in heads)], rows))
    if svg is not None:
        try:
            svg.mkdir(parents=True, exist_ok=True)
            for name, order in found.items():
                (svg / f"order-{name}.svg").write_text(order.svg(segment=branches[0][0]), "utf-8")
        except OSError as error:
            raise BakeoffError(
                f"can't write to {svg} ({error.strerror}): give --svg another folder"
            ) from None
        print_plain(console(), f"pictures: {svg}")


def _cells(report: OrderReport) -> list[str]:
    halos = [f"{halo.share:.2f}" for halo in report.halos]
    return [f"{report.keys:,.0f}", f"{report.kept:.1%}", f"{report.active_blocks:.1%}", *halos]


def _numbers(name: str, text: str, between: str = ",") -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace(between, ",").split(","))
    except ValueError:
        raise BakeoffError(f"{name} is {text!r}; it is whole numbers, such as 64x64 or 256,1024") from None
