"""table: path, show, export, import, diff."""

from typing import Any

import click

from bakeoff.apps.cli.commands import options
from bakeoff.apps.cli.commands.group import Group
from bakeoff.apps.cli.commands.options import FILE

__all__ = ["table"]


@click.group(cls=Group)
def table() -> None:
    """The verdicts on disk: show, move, compare.

    Examples:
      bakeoff table show
      bakeoff table export h100.json
      bakeoff table diff before.json after.json
    """


@table.command()
@options.device
def path(**values: Any) -> None:
    """Print where this machine's table is."""
    from bakeoff.apps.cli import tables

    tables.path(**values)


@table.command()
@click.argument("file", type=FILE, required=False)
@options.device
def show(**values: Any) -> None:
    """List the verdicts of this machine's table, or of FILE."""
    from bakeoff.apps.cli import tables

    tables.show(**values)


@table.command("export")
@click.argument("file", type=FILE)
@options.device
def export_table(**values: Any) -> None:
    """Copy this machine's table to FILE."""
    from bakeoff.apps.cli import tables

    tables.export(**values)


@table.command("import")
@click.argument("file", type=FILE)
@click.option(
    "--replace",
    is_flag=True,
    help="Put FILE in the place of this machine's table, even if other versions measured it.",
)
@options.device
def import_table(**values: Any) -> None:
    """Add FILE's verdicts to this machine's table.

    FILE must come from an equal machine. Its verdicts replace those of the same keys.
    """
    from bakeoff.apps.cli import tables

    tables.import_(**values)


@table.command()
@click.argument("first", metavar="A", type=FILE)
@click.argument("second", metavar="[B]", type=FILE, required=False)
@options.device
def diff(**values: Any) -> None:
    """What differs between two tables.

    Decisions, and times of unchanged decisions. B is this machine's table by default.
    """
    from bakeoff.apps.cli import tables

    tables.diff(**values)
