"""export: a run's weights and its model as a program, for programs without bakeoff."""

from pathlib import Path

from bakeoff.apps.cli.terminal import console, print_plain, working
from bakeoff.apps.export import CONFIG, PROGRAM, WEIGHTS, export

__all__ = ["run"]


def run(run: Path, out: Path | None) -> None:
    """Export `run` to `out`, and say what is there."""
    printer = console()
    with working(printer, "tracing the model"):
        exported = export(run, out or Path(f"{run.name or 'run'}-exported"))
    for name, text in (
        (WEIGHTS, "the weights, by the names in docs/training.md"),
        (CONFIG, "the run's configuration"),
        (PROGRAM, f"torch.export.load(...).module()(ids): logits of {exported.takes}"),
    ):
        print_plain(printer, f"{exported.out / name}  {text}")
