"""``python -m bakeoff`` is the ``bakeoff`` command."""

from bakeoff.cli import main

main(prog_name="bakeoff")
