"""explain, doctor, ops."""

from typing import Any

import click

from bakeoff.apps.cli.commands import options
from bakeoff.apps.cli.commands.group import Command

__all__ = ["doctor", "explain", "ops"]


@click.command(cls=Command)
@click.argument("words", metavar="[OP ARGUMENT=SHAPE...]", nargs=-1)
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

    Without OP: all verdicts of this machine's table.
    A tensor is written as dtype[shape], with a ' behind it where its gradient is needed and :strided or
    :other for its layout; flags as in Python. A whole key, as tables print it, works too. Quote them for your
    shell.

    Examples:
      bakeoff explain
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
