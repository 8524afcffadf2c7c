"""What can be typed: commands, their options and their help. Bodies are imported when a command runs."""

import os

import click

from bakeoff import __version__
from bakeoff.apps.cli.commands import corpora, inspecting, measuring, tables, training
from bakeoff.apps.cli.commands.group import Group, log_to_stderr

__all__ = ["main"]

# Read when torch starts its threads: waiting in a busy loop makes them many times slower on a loaded machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("-v", "--verbose", count=True, help="Log more: -v what is chosen and why, -vv everything.")
@click.option("-q", "--quiet", is_flag=True, help="Log errors only.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__)
def main(verbose: int, quiet: bool, debug: bool) -> None:
    """The fastest correct implementation of every op of a PyTorch model, on this machine, at your shapes.

    Start here:
      bakeoff doctor              what this machine is and can do
      bakeoff demo                tune, train two models on real text and compare them, in some minutes
      bakeoff tune llm-med        hold the contests that a model's step needs
      bakeoff explain             what was decided, and why
    """
    log_to_stderr(verbose, quiet)


for _command in (
    training.demo,
    training.train,
    training.tune,
    training.generate,
    training.export,
    corpora.corpus,
    measuring.bench,
    measuring.compare,
    inspecting.explain,
    inspecting.doctor,
    inspecting.ops,
    inspecting.order,
    tables.table,
):
    main.add_command(_command)
