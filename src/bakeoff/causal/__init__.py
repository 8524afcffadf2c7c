"""The leak guard: does any output of a sequence model see its own future?

The guard changes tokens and looks at outputs, in the forward direction only, because a hand-written backward
can hide a path and a hard decision has no gradient. It works on a private copy of the model.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.causal.answers import Called
from bakeoff.causal.checks import CausalityError, Trial, check_targets
from bakeoff.causal.circumstances import check_alone, check_earlier_calls, check_exactly, check_lengths
from bakeoff.causal.copies import random_kept, seeded_dropout, uncompiled
from bakeoff.causal.decode import compare_decode
from bakeoff.causal.edits import Edits, token_rows
from bakeoff.causal.subject import Subject

__all__ = ["CausalityError", "assert_causal"]


def assert_causal(
    model: Callable[..., Any],
    ids: Tensor | None = None,
    *,
    vocab: int | None = None,
    length: int | None = None,
    samples: int = 4,
    perturb: bool = True,
    check_decode: bool = True,
    seed: int = 0,
) -> None:
    """Raises `CausalityError` unless output t depends on tokens 0..t of its own row alone.

    For edits of the tokens from a cut on, |f(edited)[t] - f(ids)[t]| <= tolerance for all t before the cut.
    Whole suffixes are replaced and single tokens, by uniform tokens, tokens of `ids`, 0 and `vocab` - 1, at
    cuts spread over the row. Right behind a cut come the 3 * `samples` most frequent tokens in turn, so that
    a hard gate on one of them as the next token shows; one on a rarer token shows by chance. All this in
    evaluation and in training mode, with equal random draws (dropout then drops the same elements); batch
    statistics in training mode are a leak, and found. Further: a row must not see other rows; neither logits
    nor loss may see what they must not where targets are given; the same must hold for a row alone, for
    shorter rows and a longer one, in a second call and in a float64 copy; the outputs must not know how long
    their row is, or what an earlier call held; and decoding must equal the whole pass. docs/leak-guard.md
    says what this proves and what it can't.

    The cuts are few, so that a leak of few outputs, such as the last ones of chunks that take in the next
    chunk's first token, would show in these by chance. Therefore (after the update, where there is one)
    single tokens are changed, too, at one place after the other, in passes of at most four times the rows:
    with up to 512 tokens to a row every output that any change of the next token moves is certain to show.
    In longer rows the places are the multiples of s, the least power of two that leaves at most max(64,
    2^18 / T) of them: 4 at T=1024, 16 at 2048, 64 at 4096; in training mode at most 32. A leak at the ends
    of chunks of c tokens is then certain to show where a common multiple of c and s is below T, hence for
    every c < T / s and every power of two below T. By chance show other leaks of few outputs, and those by
    a hard decision on the next token.

    Args:
        model: ``model(ids)`` gives logits [B, T, ...], alone, in a tuple, in a dict or as ``.logits``;
            targets, where it takes them, are its ``targets=`` or ``labels=``. It is taken as it is, in the
            caller's autocast; compiled regions run uncompiled. It is copied once, and then in parts: it,
            its gradients, its buffers and all random states stay untouched. What can't be copied, such as a
            lock, is shared. A function of ids is tried as it is, without `perturb` and without a float64
            copy.
        ids: [B, T] integer rows of real tokens, T >= 2, B >= 1. By default drawn at random.
        vocab: tokens are 0..vocab-1; by default ``model.config.vocab`` or ``vocab_size``, else the size of
            the embedding, else 256.
        length: positions used of each row; by default all of `ids`, or 64 (at most ``config.max_seq_len``)
            drawn. One row has up to four times as many. A leak inside segments needs several segments.
        samples: rows used.
        perturb: add noise to the trainable parameters and, after that check, make one update (signs of the
            gradient, times 0.01) and check again: this opens gates and projections that start at zero, and
            state that begins with training. False checks the model as it is.
        check_decode: where the model has ``generate(prompt, max_new, temperature=0.0)``, the logits of its
            ``decode`` calls must equal the whole pass over the text generated (without such a method: every
            token chosen must be the whole pass's likeliest).
        seed: of all draws.

    The tolerance of a column of the logits is 3 times what relative noise of one rounding step in the
    parameters does to it and to all smaller columns (90th percentile over positions), plus 4 times the
    difference of two equal passes, plus a rounding step of its largest output, and twice that for decoding
    and for the outputs of cut rows. A rounding step is that of the coarsest floating type among the outputs
    of the model's modules (tf32 for float32 matrices where it is allowed), so that the test is sharpest in
    float32. There a change beyond the tolerance must also show in a float64 copy, or it counts as rounding
    that a transform spreads over the row; but not if it exceeds 64 tolerances, if the copy fails, or if it
    goes away where the ops run plain PyTorch.

    Raises:
        CausalityError: with the first leaking position, how far ahead it sees, the size and the tolerance,
            and why float64 did not count where it denies the leak.
        BakeoffError: outputs that are not finite, or that differ between two equal passes.
        TypeError, ValueError: arguments or outputs of another form; the message says what was expected.

    Example:
        >>> import torch
        >>> assert_causal(torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)))
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    module = model if isinstance(model, nn.Module) else Called(model)
    with torch.inference_mode(False), uncompiled(), seeded_dropout(module), contextlib.ExitStack() as kept:
        rows, longer, vocab = token_rows(module, ids, vocab, length, samples, seed)
        kept.enter_context(random_kept(module, rows.device))
        draws = torch.Generator().manual_seed(seed)
        subject, edits = Subject(module, rows, draws, seed), Edits(rows, vocab, draws)
        perturb = perturb and bool(subject.trainable)
        if perturb:
            subject.perturb()
            _check(subject, edits, "with perturbed parameters")
            subject.update()
        _check(subject, edits, "after one update" if perturb else "as it is", longer)
        if check_decode:
            compare_decode(subject)


def _check(subject: Subject, edits: Edits, stage: str, longer: Tensor | None = None) -> None:
    """Raises `CausalityError` where an output sees more than the tokens of its own row up to its own.

    At the last stage, with `longer` rows, single places and other circumstances are tried, too.
    """
    for training in (False, True):
        trial = Trial(subject, edits, training, stage)
        trial.check_edits()
        trial.check_rows(each=longer is not None and not training)
        if longer is not None:
            trial.check_places(few=training)
            check_alone(trial)
            check_lengths(trial, longer)
            if not training:
                check_earlier_calls(trial)
                check_exactly(trial)
        if subject.form.targets and (training or longer is not None):
            check_targets(trial, loss=longer is not None)
