"""Two models trained alike, and which of them is better: `compare`, behind ``bakeoff compare``."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from bakeoff.apps.bench import results
from bakeoff.apps.compare import document as documents
from bakeoff.apps.compare.document import SIDES, Document, Model, Run, Side, Speed, model_of, read, scored
from bakeoff.apps.compare.equal import CompareError, match, pair, parameters
from bakeoff.apps.compare.judge import Verdict, winner
from bakeoff.apps.compare.lengths import check_lengths, crossover
from bakeoff.apps.compare.quality import compared, order, trained
from bakeoff.apps.compare.render import table
from bakeoff.apps.compare.speed import measured
from bakeoff.apps.compare.stage import hold_contests
from bakeoff.apps.train import Config
from bakeoff.apps.train.data import open_parts
from bakeoff.apps.train.device import pick_device
from bakeoff.parallel import launched

__all__ = [
    "CompareError",
    "Document",
    "Model",
    "Run",
    "Speed",
    "Verdict",
    "compare",
    "compared",
    "crossover",
    "match",
    "model_of",
    "pair",
    "parameters",
    "read",
    "table",
    "winner",
]

log = logging.getLogger(__name__)

Hear = Callable[[str], None]


def compare(
    first: Config,
    second: Config,
    out: Path,
    *,
    seeds: int = 3,
    lengths: Sequence[int] = (256, 1024, 4096),
    resume: bool = False,
    say: Hear = lambda line: None,
    announce: Hear = lambda stage: None,
) -> Document:
    """Train `first` and `second` with equal parameters on the same bytes, seed by seed in turns; then measure
    their speed over context lengths.

    The second keeps its shape; the first's ``model.d_ff`` is chosen so that parameters are equal within 2 %.
    Every run trains as its configuration says, for equal time or equal steps, with the data order of its
    seed; contests are held before any clock starts. Everything is written to ``out/compare.json`` after each
    part, runs are below ``out/runs``.

    Args:
        first, second: from `pair`.
        out: a folder for this comparison alone.
        seeds: runs of each model, with train.seed = 0, 1, ...
        lengths: bytes a row; the rows of a step are chosen so that its bytes stay about the same,
                but at least one.
        resume: go on with the comparison in `out`: what it holds is kept, and may be added to.
        say: hears a line about every part done; announce: hears what is being done.

    Returns:
        The document as written. Its verdict names a winner only where held-out bits per byte differ by more
        than seed noise (Welch's t-test, 95 %).

    Raises:
        CompareError: parameters that can't be made equal; data too short for a length; `out` that holds a
            comparison, or with `resume` one of other settings, other data or another machine.
        KeyboardInterrupt: Ctrl-C; what was done is kept.

    Example:
        >>> from bakeoff.apps.compare import compare, pair
        >>> both = pair("byte-spectral-tiny", "llm-med-tiny", minutes=1)
        >>> document = compare(*both, Path("runs/compared"))  # doctest: +SKIP
    """
    if seeds < 1:
        raise CompareError(
            f"--seeds {seeds}: a model needs at least one run, for a verdict 2 or more (3 are advised)"
        )
    if launched() > 1:
        raise CompareError("a comparison runs in one process: start it without torchrun")
    check_lengths(lengths, second)
    first = match(first, parameters(second.model))
    configs: dict[Side, Config] = {"first": first, "second": second}
    device = pick_device(second.train.device)
    document = _opened(out, configs, seeds, lengths, resume=resume)
    documents.write(out, document)
    say(scored(document))
    for side in SIDES:
        model = document.model(side)
        say(f"{model.name}: {model.parameters:,} parameters, d_ff {configs[side].model.ff_dim}")
    missing = [
        turn for turn in order(document.seeds) if turn not in [(run.side, run.seed) for run in document.runs]
    ]
    for side in SIDES if missing else ():
        announce(f"{document.model(side).name}: holding contests")
        for call, reason in hold_contests(configs[side], device, announce).items():
            say(f"no contest for {call}: {reason}")
    for side, seed in missing:
        name = document.model(side).name
        announce(f"training {name}, seed {seed} ({len(document.runs) + 1} of {2 * document.seeds})")
        folder = out / "runs" / f"{name}-{seed}"
        run = trained(configs[side], side, seed, folder, device, resume=resume)
        document.runs.append(run)
        documents.write(out, document)
        say(_line(name, run))
    document.verdict = winner(document.scores("first"), document.scores("second"))
    documents.write(out, document)
    for length in document.lengths:
        if all(row.length != length for row in document.speed):
            document.speed += measured(first, second, length, device, announce)
            document.speed.sort(key=lambda row: row.length)
            documents.write(out, document)
    document.crossover = crossover(document.speed)
    documents.write(out, document)
    return document


def _line(name: str, run: Run) -> str:
    bits = "not finite" if run.bits_per_byte is None else f"{run.bits_per_byte:.4f} bits/byte"
    return f"{name} seed {run.seed}: {bits}, {run.steps} steps in {run.seconds:.1f} s"


def _opened(
    out: Path, configs: dict[Side, Config], seeds: int, lengths: Sequence[int], *, resume: bool
) -> Document:
    """A new comparison, or the one to go on with."""
    env = results.environment(str(pick_device(configs["second"].train.device)))
    models = {side: _model(side, configs) for side in SIDES}
    exists = documents.path_of(out).exists()
    if exists and not resume:
        raise CompareError(f"{out} holds a comparison: add --resume to go on with it, or give another --out")
    document = read(out) if exists else None
    config = configs["second"]
    data, _, held_out = open_parts(config.data, config.seq_len)
    digest = data.digest()
    fit = len(held_out) // (config.seq_len + 1)
    if document is None:
        return Document(
            env=env,
            first=models["first"],
            second=models["second"],
            seeds=seeds,
            lengths=sorted(set(lengths)),
            data_bytes=len(data),
            data_digest=digest,
            scored_bytes=min(config.train.eval_rows, fit) * config.seq_len,
            held_bytes=data.held if data.held == len(held_out) else 0,
        )
    if unlike := document.env.unlike(env):
        raise CompareError(f"{out} was measured elsewhere ({unlike}): give another --out")
    for side in SIDES:
        if changed := _changes(models[side].config, document.model(side).config):
            raise CompareError(
                f"{out} holds a comparison of other settings ({', '.join(changed)}): set these back, or give "
                "another --out"
            )
    if not document.data_digest:
        log.warning("%s does not say what its data were: make sure that they are today's %s", out, data.name)
    elif (document.data_bytes, document.data_digest) != (len(data), digest):
        sizes = f" ({document.data_bytes} then, {len(data)} now)" if document.data_bytes != len(data) else ""
        raise CompareError(
            f"{out} holds a comparison on other bytes of {data.name}{sizes}: restore them, or give another "
            "--out"
        )
    document.seeds, document.lengths = max(seeds, document.seeds), sorted({*lengths, *document.lengths})
    document.verdict = document.crossover = None
    return document


def _model(side: Side, configs: dict[Side, Config]) -> Model:
    config = configs[side]
    alike = configs["first"].recipe == configs["second"].recipe
    return model_of(config, f"{config.recipe}-{side}" if alike else config.recipe)


def _changes(now: object, then: object, prefix: str = "") -> list[str]:
    """The keys that differ, with both values."""
    if isinstance(now, dict) and isinstance(then, dict):
        keys = dict.fromkeys([*now, *then])
        return [
            change
            for key in keys
            for change in _changes(now.get(key), then.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if now == then else [f"{prefix}={now!r}, was {then!r}"]
