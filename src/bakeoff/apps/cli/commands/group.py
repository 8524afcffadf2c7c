"""How every command behaves: help that keeps its examples, one-line errors, interruption, logging."""

import errno
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["Command", "Group", "WithSettings", "log_to_stderr"]


class Command(click.Command):
    """A command whose help keeps the line breaks of its examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.help:  # click doesn't fill a paragraph that begins with \b
            self.help = re.sub(r"\n(Examples|Start here):", "\n\b\n\\1:", inspect.cleandoc(self.help))


class WithSettings(Command):
    """A command that takes KEY=VALUE, and says so where a setting was given as an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from bakeoff.apps.train.config.keys import named

            option, _, value = error.option_name.partition("=")
            key = named(option.lstrip("-").replace("-", "_"))
            if key is None:
                raise
            for word, after in itertools.zip_longest(given, given[1:], fillvalue=""):
                if word == option:
                    value = after
                elif word.startswith(f"{option}="):
                    value = word.partition("=")[2]
            raise click.UsageError(
                f"No such option: {option}. Settings are written KEY=VALUE: {key}={value or '...'}", ctx
            ) from None


class _WrongUsage(click.ClickException):
    exit_code = 2


class Group(Command, click.Group):
    """A group of commands that prints an expected error as one line, which says how to fix it, and ends with
    status 130 after Ctrl-C."""

    command_class = Command
    group_class = type

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("\nInterrupted. Tables, checkpoints and results written so far are whole.", err=True)
            ctx.exit(130)
        except Exception as error:
            if ctx.find_root().params.get("debug") or not _expected(error):
                raise
            kind = _WrongUsage if getattr(error, "wrong_usage", False) else click.ClickException
            raise kind(_said(error)) from error

    def main(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        try:
            return super().main(args, *more, **kwargs)
        except OSError as error:  # --help and --version print before `invoke`
            if "--debug" in (sys.argv if args is None else args):
                raise
            click.echo(f"Error: {_said(error)}", err=True)
            sys.exit(1)


def _said(error: Exception) -> str:
    """The error in one line, without the number that Python puts before what the system says."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _expected(error: Exception) -> bool:
    from bakeoff.errors import BakeoffError

    if isinstance(error, OSError):
        return error.errno != errno.EPIPE  # the reader of our output has gone: click ends quietly
    return (
        isinstance(error, BakeoffError | ValueError | MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
    )


def log_to_stderr(verbose: int, quiet: bool) -> None:
    """Log to standard error: errors alone if `quiet`, else warnings, and with each `verbose` a level more."""
    log = logging.getLogger("bakeoff")
    log.handlers = [_LateHandler()]
    log.setLevel(logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


class _LateHandler(logging.Handler):
    """Replaces itself by a handler of rich's at the first message, so that starting doesn't import rich."""

    def emit(self, record: logging.LogRecord) -> None:
        from rich.console import Console
        from rich.logging import RichHandler

        from bakeoff.apps.outlet import Outlet

        console = Console(stderr=True)
        console.file = Outlet(console.file)  # type: ignore[assignment]
        late = RichHandler(console=console, show_time=False, show_path=False)
        logging.getLogger("bakeoff").handlers = [late]
        late.emit(record)
