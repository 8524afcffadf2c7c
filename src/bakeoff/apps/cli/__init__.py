"""The ``bakeoff`` command: `commands` declares it and imports only click; the other modules here are the
commands' bodies, each imported when it runs.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. ``bakeoff train`` saves at a signal, and then
ends with 128 and the signal's number.
"""

from bakeoff.apps.cli.commands import main

__all__ = ["main"]
