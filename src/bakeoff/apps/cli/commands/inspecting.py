"""explain, doctor, ops, order."""

from typing import Any

import click

from bakeoff.apps.cli.commands import options
from bakeoff.apps.cli.commands.group import Command
from bakeoff.apps.cli.commands.options import FILE, Finite

__all__ = ["doctor", "explain", "ops", "order"]


@click.command(cls=Command)
@click.argument("words", metavar="[RUN | OP ARGUMENT=SHAPE...]", nargs=-1)
@options.device
@click.option(
    "--grad", is_flag=True, help="Every floating tensor needs its gradient, as with a ' behind each."
)
@options.regime_choice
@click.option(
    "--policy", "policy_name", help="Decide under this policy instead of BAKEOFF_POLICY's or the table's."
)
@click.option("--tune", "tune_now", is_flag=True, help="Hold the contest now if no table has its verdict.")
@options.as_json
def explain(**values: Any) -> None:
    """What a call would run, and why.

    RUN is the folder of a training run: all calls of its steps, measured or not. Without RUN and OP: all
    verdicts of this machine's table.
    A tensor is written as dtype[shape], with a ' behind it where its gradient is needed and :strided or
    :other for its layout; flags as in Python. A whole key, as tables print it, works too. Quote them for your
    shell.

    Examples:
      bakeoff explain
      bakeoff explain runs/NAME
      bakeoff explain rms_norm 'x=bf16[8192,4096]' 'weight=bf16[4096]' --grad
      bakeoff explain rms_norm "x=bf16[8192,4096]'" 'weight=bf16[4096]' --regime graph
    """
    from bakeoff.apps.cli.explaining import run

    run(**values)


@click.command(cls=Command)
@options.device
@options.as_json
def doctor(**values: Any) -> None:
    """The machine, its measured limits, known problems.

    Also versions, what is installed, and the table. Takes a few seconds, since the limits (copy bandwidth,
    matmul rate) are measured.
    """
    from bakeoff.apps.cli.doctor import run

    run(**values)


@click.command(cls=Command)
@options.device
@options.as_json
def ops(**values: Any) -> None:
    """The ops and their candidates.

    What each can do, and why it can't be used here. Judged by the first case of the op's grid on this device;
    others may differ (see bakeoff explain).
    """
    from bakeoff.apps.cli.listing import run

    run(**values)


@click.command(cls=Command)
@click.argument("shape")
@click.option(
    "--segments", default="256,1024,4096", show_default=True, help="Tokens of a segment, by branch."
)
@click.option(
    "--rates", default="1,4,16", show_default=True, help="One selected token in so many, by branch."
)
@click.option(
    "--decay", type=Finite(0, min_open=True), default=8.0, show_default=True,
    help="Attention at distance d is taken to be exp(-d / decay).",
)  # fmt: skip
@click.option(
    "--tile", type=click.IntRange(1), help="Side of a tile. [default: 16 in two dimensions, 8 in three]"
)
@click.option("--svg", type=FILE, help="Folder to draw every order into, coloured by the first segment.")
@options.as_json
def order(**values: Any) -> None:
    """What orders of a grid's tokens are worth.

    SHAPE is a grid such as 64x64 or 16x32x32. For each order: how much of attention that decays with distance
    falls on the keys that dilated attention keeps, the blocks that exact local attention touches, and the
    tokens that a device needs from others, as a multiple of its own, on 2, 4 and 8 devices.

    Examples:
      bakeoff order 128x128
      bakeoff order 64x64 --segments 256 --rates 1 --svg pictures
    """
    from bakeoff.apps.cli.ordering import run

    run(**values)
