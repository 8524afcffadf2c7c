"""``python -m bakeoff`` is the ``bakeoff`` command."""

from bakeoff.apps.cli import main

main(prog_name="bakeoff")
