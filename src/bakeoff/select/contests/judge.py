"""Judging: how far a result may be from the reference in float64.

There are no hand-tuned tolerances. The yardstick is the eager candidate's own error in the same dtype:
a result passes while its error is at most twice that, plus the rounding of one store and, where a gradient
is a long sum, that of a float32 sum in another order.

One draw may be lucky for eager: where one rounding decides a whole result, as that of a row that one
element dominates, its error is anything from nothing to half a unit. So a result that is too far off is
compared with the largest error that eager makes on `FURTHER` more draws of the same kind. One that is biased
is beyond that, too, on the ordinary draws, where eager's errors hardly differ from draw to draw.

A draw may be unlucky for a candidate as well: of the hundreds of errors that a contest looks at one that is a
little too large is no surprise. `verify` asks whether it is too large on other draws, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from bakeoff.select.contests.copies import Rejected

__all__ = [
    "FURTHER",
    "Errors",
    "Inaccurate",
    "Sizes",
    "Standard",
    "denormal_rows",
    "errors_of",
    "judge",
    "same_bits",
]

FURTHER = 8
"""Draws on which eager's own error is looked at where a candidate's is too large."""
_FACTOR = 2.0
_NORMS = "max", "rms", "gain"
_PIECE = 1 << 25  # elements of the largest float64 piece


class Inaccurate(Rejected):
    """It does what it should, but with too large an error: `times` what is allowed."""

    def __init__(self, message: str, errors: "Errors", times: float) -> None:
        super().__init__(message)
        self.errors, self.times = errors, times


class Errors(msgspec.Struct, frozen=True):
    """Distances from the reference: largest within a row relative to that row, relative RMS, and gain
    (the factor by which the result as a whole is too large or small)."""

    max: float
    rms: float
    gain: float

    def larger(self, other: "Errors") -> "Errors":
        """The larger of each."""
        return Errors(max(self.max, other.max), max(self.rms, other.rms), max(self.gain, other.gain))


@dataclass(frozen=True, eq=False)
class Sizes:
    """How large the finite elements of a reference are, which errors are relative to."""

    peak: float
    """The largest one. All else is in its units, so that squares stay finite."""
    rows: torch.Tensor
    """Each row's largest element; of `whole` ones at least the root mean square of the tensor."""
    squares: float
    """The sum of squares."""
    evenness: float
    """How many elements of equal size would average out errors as well: (sum x^2)^2 / sum x^4, at least 1.
    The gain is an average of the elements' relative errors weighted by x^2, and one loud element its own."""
    finite: bool
    """Whether all elements are."""

    @classmethod
    def of(cls, exact: torch.Tensor, *, whole: bool = False) -> "Sizes":
        if exact.numel() == 0:
            return cls(1.0, exact.new_empty(0), 0.0, 1.0, True)
        exact = _rows(exact)
        peak = exact.abs().nan_to_num(0.0, 0.0, 0.0).max().item() or 1.0
        largest, sums = [], []
        for piece in _pieces(exact):
            known = torch.isfinite(piece)
            size = piece.abs().masked_fill(~known, 0) / peak
            power = size.square()
            largest.append(size.amax(1))
            sums.append(torch.stack([power.sum(), power.square().sum(), known.sum().to(power.dtype)]))
        squares, fourths, count = torch.stack(sums).sum(0).tolist()
        least = max(1e-6, math.sqrt(squares / max(1.0, count))) if whole else 1e-6
        evenness = max(squares * squares / (fourths or 1.0), 1.0)
        return cls(peak, torch.cat(largest).clamp(min=least), squares, evenness, count == exact.numel())


@dataclass(kw_only=True)
class Standard:
    """What results of one draw are judged by.

    Where eager's own result isn't finite, or a little error could make it so, `exact` holds NaN: nothing is
    asked of a candidate there.
    """

    where: str
    exact: dict[str, torch.Tensor]
    dtypes: dict[str, torch.dtype]
    eager: dict[str, Errors]
    terms: dict[str, float]
    """How many output elements stand behind one element of a result: the length of the sums in gradients."""
    denormal: dict[str, torch.Tensor]
    """Of an output which rows hold nothing but denormal numbers, in eager and in the reference."""
    whole: bool = False
    """Whether a row is measured against the whole tensor where it is smaller (`Op.averages`)."""
    further: Callable[[int], dict[str, Errors]]
    """Eager's errors on the i-th further draw of this kind."""
    looked: int = 0
    """How many further draws `eager` holds the largest errors of."""
    sizes: dict[str, Sizes] = field(default_factory=dict)
    """Of `exact`; found where not given."""

    def __post_init__(self) -> None:
        for name in self.exact.keys() - self.sizes.keys():
            self.sizes[name] = Sizes.of(self.exact[name], whole=self.whole)

    def look_further(self) -> bool:
        """Take one more draw into account; whether there is one left."""
        if self.looked >= FURTHER:
            return False
        found = self.further(self.looked)
        self.looked += 1
        self.eager = {name: mine.larger(found[name]) for name, mine in self.eager.items()}
        return True

    def allowed(self, name: str, norm: str) -> float:
        """The largest error of the result called `name`."""
        dtype = self.dtypes[name]
        store = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
        unit = min(store, torch.finfo(torch.float32).eps)
        chain = unit * self.terms[name] ** 0.5  # a plain sum in another order than eager's pairwise one
        floors = Errors(
            store / 2 + 4 * unit + chain,
            store / 16 + 2 * unit + chain / 4,
            # Tensor cores cut float32 sums off instead of rounding them, so that a whole result shrinks: one
            # product of 64 terms in three tf32 parts by 1.3 units for normal numbers, 2.4 for positive ones
            # (on an H200), whatever is added outside, and a result of several products by more.
            store / 32 + 4 * unit + (store + chain / 4) / self.sizes[name].evenness ** 0.5,
        )
        return float(_FACTOR * getattr(self.eager[name], norm) + getattr(floors, norm))


def judge(name: str, tensor: torch.Tensor, standard: Standard) -> Errors:
    """The errors of the result called `name`; raises `Rejected` where they are larger than is allowed."""
    exact, dtype, where = standard.exact[name], standard.dtypes[name], standard.where
    sizes = standard.sizes[name]
    if tensor.dtype != dtype or tensor.shape != exact.shape:
        raise Rejected(f"{name} is {tensor.dtype}{list(tensor.shape)}, not {dtype}{list(exact.shape)}")
    bad = ~torch.isfinite(tensor)
    if not sizes.finite:
        bad &= torch.isfinite(exact)
    if bool(bad.any()):
        index = tuple(bad.nonzero()[0].tolist())
        raise Rejected(f"{name} is {tensor[index].item()} at {list(index)} ({where})")
    if name in standard.denormal:
        flushed = standard.denormal[name] & ~_rows(tensor).any(1)
        if bool(flushed.any()):
            raise Rejected(
                f"{name}: flushes denormal numbers to zero in row {int(flushed.nonzero()[0])} ({where})"
            )
    errors = errors_of(tensor, exact, sizes)
    for norm in _NORMS:
        mine = getattr(errors, norm)
        while not mine <= standard.allowed(name, norm):
            if not standard.look_further():
                place = f" at {_worst_index(tensor, exact)}" if norm == "max" else ""
                raise Inaccurate(
                    f"{name} is wrong: {norm} error {mine:.2g}{place}, eager's is "
                    f"{getattr(standard.eager[name], norm):.2g}, allowed {standard.allowed(name, norm):.2g} "
                    f"({where})",
                    errors,
                    max(getattr(errors, n) / (standard.allowed(name, n) or math.ulp(0)) for n in _NORMS),
                )
    return errors


def errors_of(got: torch.Tensor, exact: torch.Tensor, sizes: Sizes | None = None) -> Errors:
    """Distances over the finite elements of `exact`, whose `sizes` may be given; those within a row are
    relative to the row's."""
    if exact.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    sizes = sizes or Sizes.of(exact)
    worst = square = along = 0.0
    pieces = zip(*map(_pieces, (_rows(got), _rows(exact))), strict=True)
    for (mine, want), scale in zip(pieces, sizes.rows.split(_step(_rows(exact))), strict=True):
        off, known = (mine.to(want.dtype) - want).div_(sizes.peak), want
        if not sizes.finite:
            unknown = ~torch.isfinite(want)
            off, known = off.masked_fill_(unknown, 0), want.masked_fill(unknown, 0)
        size = off.abs()
        found = (size.amax(1) / scale).max(), size.square().sum(), (off * known.conj()).sum().real
        largest, squares, product = torch.stack(found).tolist()
        worst, square, along = max(worst, largest), square + squares, along + product / sizes.peak
    norm = sizes.squares or 1.0
    return Errors(worst, (square / norm) ** 0.5, abs(along) / norm)


def denormal_rows(tensor: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Which rows of `tensor` hold nothing but denormal numbers, and not only zeros, and rightly so."""
    tensor, exact = _rows(tensor), _rows(exact)
    limit = torch.finfo(tensor.dtype).smallest_normal
    return tensor.any(1) & (tensor.abs().amax(1) < limit) & (exact.abs().amax(1) < limit)


def _pieces(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Some rows at a time."""
    return rows.split(_step(rows))  # type: ignore[no-any-return]


def _step(rows: torch.Tensor) -> int:
    return max(1, _PIECE // max(rows.shape[1], 1))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, elements]; a column counts as one row: an element can't be judged by nothing but itself."""
    rows = tensor.dim() > 1 and tensor.shape[-1] > 1
    return tensor.reshape(-1, tensor.shape[-1]) if rows else tensor.reshape(1, -1)


def _worst_index(got: torch.Tensor, exact: torch.Tensor) -> list[int]:
    off, size = (got.to(exact.dtype) - exact).abs().nan_to_num(0.0), exact.abs().nan_to_num(0.0)
    scale = size.amax(-1, keepdim=True) if exact.dim() > 1 and exact.shape[-1] > 1 else size.max()
    flat = int((off / scale.clamp(min=size.max() * 1e-6)).argmax())
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), exact.shape)] if exact.dim() else []


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit, NaN included."""
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)
