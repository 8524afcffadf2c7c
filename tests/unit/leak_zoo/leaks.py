"""Models that see what they must not, each in a way that real code has gone wrong."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.leak_zoo.body import Animal, Body, D, T, V, attend, following, lower, past, steps

LEAKS: list[Animal] = []


def leak(says: str = "sees its future", **how: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Puts a model into the zoo."""

    def keep(build: type[nn.Module]) -> type[nn.Module]:
        LEAKS.append(Animal(build, says, **how))
        return build

    return keep


# ------------------------------------------------------------------------------ attention and its masks
@leak(at=(0, 1))
class MaskOffByOne(Body):
    """A causal mask whose diagonal is one too far."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h, lower(h, 1))


@leak(at=(0, T - 1))
class NoMask(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h, None)


@leak()
class SoftmaxOverQueries(Body):
    """Causal scores, normalised along the wrong axis."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h, lower(h), axis=-2)


@leak()
class MaskAfterSoftmax(Body):
    """The mask is multiplied in after the softmax, whose sum has seen every key."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return (h @ h.transpose(1, 2)).softmax(-1).tril() @ h


@leak()
class DilatedGroupWithoutMask(Body):
    """Dilated attention in segments of 8 at rate 2: within a group every key is seen."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        full = F.pad(h, (0, 0, 0, -h.shape[1] % 8))
        groups = full.unflatten(1, (-1, 8))[:, :, ::2].flatten(0, 1)
        out = torch.zeros_like(full).unflatten(1, (-1, 8))
        out[:, :, ::2] = attend(groups, None).unflatten(0, (len(h), -1))
        return out.flatten(1, 2)[:, : h.shape[1]]


@leak()
class RingFromTheWrongSide(Body):
    """Context parallel: each segment gets the sum of the segment behind it, not before it."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        parts = F.pad(h, (0, 0, 0, -h.shape[1] % 8)).unflatten(1, (-1, 8))
        carry = following(parts.sum(2))[:, :, None]
        return (parts.cumsum(2) + carry).flatten(1, 2)[:, : h.shape[1]]


@leak()
class LengthsFromPadding(Body):
    """Token 0 is padding; every output is gated by the last token that is none."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        last = ((ids != 0) * (steps(h) + 1)).amax(1).clamp(min=1) - 1
        return h * h[torch.arange(len(h), device=h.device), last][:, None]


@leak()
class CountOfPadding(Body):
    """The number of tokens that are no padding scales the row."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h / (ids != 0).sum(1).clamp(min=1)[:, None, None]


# ---------------------------------------------------------------------- convolutions, scans, transforms
@leak(at=(0, T - 1))
class Fourier(Body):
    """FNet's real part of the Fourier transform over time."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return torch.fft.fft(h, dim=1).real / h.shape[1] ** 0.5


@leak(at=(0, T - 1))
class CircularConvolution(Body):
    """A long filter by FFT without padding: the end of the row comes round to its beginning."""

    def build(self) -> None:
        self.filter = nn.Parameter(torch.randn(256, D) * 0.1)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.filter[: h.shape[1]], n=h.shape[1], dim=0)
        return torch.fft.irfft(torch.fft.rfft(h, dim=1) * spectrum, n=h.shape[1], dim=1)


@leak(at=(0, T - 1))
class PaddingOneShort(Body):
    """The same with room for all but the last: only the row's end comes round, to output 0."""

    def build(self) -> None:
        self.filter = nn.Parameter(torch.randn(256, D) * 0.1)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        n = 2 * h.shape[1] - 2
        spectrum = torch.fft.rfft(self.filter[: h.shape[1]], n=n, dim=0)
        return torch.fft.irfft(torch.fft.rfft(h, n=n, dim=1) * spectrum, n=n, dim=1)[:, : h.shape[1]]


@leak(at=(0, 1))
class SamePadding(Body):
    def build(self) -> None:
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.conv(h.transpose(1, 2)).transpose(1, 2)


@leak()
class CentredMaxPool(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return F.max_pool1d(h.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)


@leak()
class BothDirections(Body):
    """A bidirectional GRU."""

    def build(self) -> None:
        self.rnn = nn.GRU(D, D // 2, batch_first=True, bidirectional=True)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.rnn(h)[0]


@leak(at=(0, T - 1))
class SumFromTheEnd(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h.flip(1).cumsum(1).flip(1)


@leak(at=(0, 7))
class Segments(Body):
    """Segments of 8: each output sees all of its own."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        mean = F.pad(h, (0, 0, 0, -h.shape[1] % 8)).unflatten(1, (-1, 8)).mean(dim=2)
        return mean.repeat_interleave(8, dim=1)[:, : h.shape[1]]


@leak()
class MemoryWrittenBeforeRead(Body):
    """A memory that takes in a chunk and is then read by that very chunk."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        memory, out = torch.zeros(len(h), D, D, device=h.device, dtype=h.dtype), []
        for chunk in h.split(8, dim=1):
            memory = memory + 0.1 * chunk.transpose(1, 2) @ chunk
            out.append(chunk @ memory)
        return torch.cat(out, dim=1)


@leak()
class ChunksByContent(Body):
    """Chunks end before token 10; each output sees the sum of its own chunk."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        chunk = (ids == 10).cumsum(1)
        return (chunk[:, :, None] == chunk[:, None]).to(h.dtype) @ h / h.shape[1]


@leak("sees its future, at least 1 ahead")
class ChunkEnd(Body):
    """A scan in chunks whose last outputs take in the next chunk's first token."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return following(h) * ((steps(h) + 1) % 8 == 0)[:, None]


@leak("training mode.* sees its future")
class ChunkEndInTraining(ChunkEnd):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return super().mix(h, ids) * self.training


@leak(at=(T - 2, 1))
class LastButOne(Body):
    """Only the last output but one sees the last token."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return following(h) * (steps(h) == h.shape[1] - 2)[:, None]


# --------------------------------------------------------------------------- statistics over the row
@leak("training mode, with perturbed parameters, output 0 sees", at=(0, T - 1))
class BatchNorm(Body):
    """Statistics over batch and time while training."""

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


@leak()
class InstanceNorm(Body):
    """Each channel is normalised over time."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return F.instance_norm(h.transpose(1, 2)).transpose(1, 2)


@leak()
class NormOverTime(Body):
    """A layer norm of [C, T]."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return F.layer_norm(h.transpose(1, 2), (h.shape[1],)).transpose(1, 2)


@leak()
class Standardised(Body):
    """By the mean and deviation of the whole batch."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return (h - h.mean()) / h.std()


@leak(at=(0, T - 1))
class MeanGate(Body):
    """A gate computed from the mean over all time."""

    def build(self) -> None:
        self.gate = nn.Linear(D, D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * torch.sigmoid(self.gate(h.mean(dim=1, keepdim=True)))


@leak()
class Median(Body):
    """Channels above their median over time."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * (h > h.median(dim=1, keepdim=True).values)


@leak()
class ExpertChoice(Body):
    """Each expert takes the quarter of the row that it likes most."""

    def build(self) -> None:
        self.router, self.experts = nn.Linear(D, 2), nn.Parameter(torch.randn(2, D, D) / 4)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        score = self.router(h).softmax(-1)
        chosen = score >= score.topk(max(1, h.shape[1] // 4), dim=1).values[:, -1:]
        return torch.einsum("bte,btc,ecd->btd", (score * chosen).to(h.dtype), h, self.experts.to(h.dtype))


@leak()
class DistinctTokens(Body):
    """Scales by how many distinct tokens the row has."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * F.one_hot(ids, V).amax(1).sum(1)[:, None, None] / V


# ------------------------------------------------------------------------- hard decisions, hidden paths
@leak(at=(None, 1))
class ArgmaxGate(Body):
    """A hard decision on the next token's embedding: no gradient shows it."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * (following(h).argmax(dim=-1) < D // 2)[..., None]


@leak(at=(None, 1))
class ThresholdGate(Body):
    """A hard decision on the next token's number."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * (following(ids) >= V // 2)[..., None]


@leak(at=(None, 1))
class NewlineGate(Body):
    """Opens before one frequent token only."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * (following(ids) == 10)[..., None]


@leak(at=(0, 1))
class HiddenPath(Body):
    """Looks ahead in forward, and has a backward that denies it."""

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return following(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.zeros_like(gradient)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.Shift.apply(h)


@leak()
class Hooked(Body):
    """A forward hook on the embedding mixes over time."""

    def build(self) -> None:
        self.embed.register_forward_hook(lambda _module, _inputs, out: out + 0.1 * out.flip(1))


@leak()
class Checkpointed(Body):
    """A recomputed block that looks ahead."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(following, h, use_reentrant=False)


@leak(at=(0, T - 1))
class ClosedGate(Body):
    """A path to the future behind a factor that starts at zero."""

    def build(self) -> None:
        self.open = nn.Parameter(torch.zeros(()))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.open * h.flip(1)


@leak(at=(0, 2))
class ClosedProjection(Body):
    """The same behind a projection of zeros, as residual branches begin."""

    def build(self) -> None:
        self.out = nn.Linear(D, D, bias=False)
        nn.init.zeros_(self.out.weight)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.out(h.roll(-2, 1))


@leak()
class TwiceClosed(Body):
    """Two factors at zero, so that neither has a gradient: one update opens nothing, noise does."""

    def build(self) -> None:
        self.one, self.other = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.one * self.other * h.flip(1)


@leak("after one update, output 0 sees", at=(0, T - 1))
class LeaksAfterTraining(Body):
    """A mixer that is switched on by the first training pass."""

    def build(self) -> None:
        self.register_buffer("warm", torch.zeros(()))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        mixed = h.mean(dim=1, keepdim=True) * self.warm
        if self.training:
            self.warm = torch.ones_like(self.warm)
        return mixed


# -------------------------------------------------------------------------- only in one mode, dtype, shape
@leak("training mode")
class InTrainingOnly(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h.flip(1) * self.training


@leak("evaluation mode")
class InEvaluationOnly(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h.flip(1) * (not self.training)


@leak("evaluation mode")
class EvaluationWithGradients(Body):
    """The path for fine-tuning a frozen model: evaluation mode, gradients on."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h.flip(1) * (not self.training and torch.is_grad_enabled())


@leak("training mode")
class DropoutByContent(Body):
    """Drops what a generator seeded by the row's tokens says."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        if not self.training:
            return h
        source = torch.Generator().manual_seed(int(ids.sum()))
        return h * (torch.rand(h.shape, generator=source) < 0.5).to(h.device)


@leak(autocast=True)
class InBf16Only(Body):
    """Under autocast another kernel is taken."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        h = h @ torch.eye(D, device=h.device)
        return following(h) * (h.dtype == torch.bfloat16)


@leak()
class InFloat32Only(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return following(h) * (h.dtype == torch.float32)


@leak("sees its future|batch of one")
class OneRowAlone(Body):
    """The fast path for a single row has no mask."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h, None if len(h) == 1 else lower(h))


@leak()
class OddLengths(Body):
    """A row that doesn't fill its last block of 8 has no mask there."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        full = h.shape[1] // 8 * 8
        block = steps(h) // 8
        tail = (block[:, None] == block) & (steps(h) >= full)
        return attend(h, lower(h) | tail)


@leak()
class ShortRows(Body):
    """Rows below 16 positions take a path of their own."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h, lower(h) if h.shape[1] >= 16 else None)


@leak(length=256, settings={"length": 48})
class BeyondABlockOf64(Body):
    """From the second block on the mask is by blocks."""

    block = 64

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        block = steps(h) // self.block
        same = (block[:, None] == block) & (block > 0)
        return attend(h, lower(h) | same)


@leak(length=192, settings={"length": 64})
class BeyondABlockOf128(BeyondABlockOf64):
    block = 128


@leak("changes with the length")
class PositionsFromTheEnd(Body):
    """Position 0 is the row's last: outputs know how much is to come."""

    def build(self) -> None:
        self.place = nn.Parameter(torch.randn(512, D))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.place[h.shape[1] - 1 - steps(h)].expand_as(h)


@leak()
class DistanceModuloLength(Body):
    """One back, modulo the length: position 0 sees the last."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h[:, (steps(h) - 1) % h.shape[1]]


# ------------------------------------------------------------------------------------ other rows, other calls
@leak("changes with the other rows of its batch", at=(0, 0))
class Neighbour(Body):
    """Sees the same position of the row before it in the batch."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h.roll(1, 0)


@leak("changes with the other rows of its batch", at=(0, 0))
class NeighboursFirst(Body):
    """Sees how the row before it begins, which no edit of a suffix changes."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h[:, :1].roll(1, 0).expand_as(h)


@leak("changes with the other rows of its batch", at=(0, 0))
class EarlierRows(Body):
    """Rows see how the rows before them begin; the first sees none."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return (h[:, :1].cumsum(0) - h[:, :1]).expand_as(h)


@leak("changes with the other rows of its batch")
class LastRowAlone(Body):
    """Only the last row sees another, the first."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        last = torch.arange(len(h), device=h.device) == len(h) - 1
        return (h[:1, :1] * last[:, None, None]).expand_as(h) * (len(h) > 1)


@leak("an earlier call", at=(0, 0))
class CacheKept(Body):
    """A summary of the row before stays for the next call."""

    def build(self) -> None:
        self.memory = torch.zeros(D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        mixed = h + self.memory.to(h)
        self.memory = h.detach().mean((0, 1))
        return mixed


@leak("other rows of its batch|an earlier call")
class MemoByFirstToken(Body):
    """Rows that begin alike share the summary of the first one seen."""

    def build(self) -> None:
        self.memo: dict[int, Tensor] = {}

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        key = int(ids[0, 0])
        mixed = h + self.memo[key].to(h) if key in self.memo else h
        self.memo[key] = h.detach().mean((0, 1))
        return mixed


@leak("second call")
class FromTheSecondCall(Body):
    """The mask is made by the first call; what is kept of it has the wrong diagonal."""

    def build(self) -> None:
        self.kept: Tensor | None = None

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        mask = lower(h) if self.kept is None else self.kept[: h.shape[1], : h.shape[1]]
        if self.kept is None and not self.training:
            self.kept = torch.ones(512, 512, dtype=torch.bool, device=h.device).tril(1)
        return attend(h, mask)


# ----------------------------------------------------------------------------------------- small, or blinded
@leak()
class OneColumn(Body):
    """One logit of each position sees the future."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        logits = self.head(h)
        return torch.cat([logits[..., :-1], logits[..., -1:] + following(h)[..., :1]], dim=-1)


@leak()
class BlindedByAColumn(Body):
    """The padding of the vocabulary is masked by -1e9."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return F.pad(self.head(h + following(h)), (0, 4), value=-1e9)


@leak()
class BlindedByEntries(Body):
    """Tokens that may not repeat are masked by -1e9, so that every column holds some."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(h + following(h)).scatter(-1, ids[..., None], -1e9)


@leak()
class BlindedByALoudColumn(Body):
    """One logit a million times as large as the others, and rounded accordingly."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        logits = self.head(h + following(h))
        return torch.cat([logits, 1e6 * logits[..., :1].square()], dim=-1)


@leak()
class Thousandth(Body):
    size = 1e-3

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.size * following(h)


@leak()
class TenThousandth(Thousandth):
    size = 1e-4


@leak()
class HundredThousandth(Thousandth):
    size = 1e-5


@leak()
class Millionth(Thousandth):
    size = 1e-6


@leak()
class MillionthInDeepNoise(Thousandth):
    """Behind twelve layers, whose rounding is larger."""

    size = 1e-6

    def build(self) -> None:
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(12))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        mixed = h + super().mix(h, ids)
        for layer in self.layers:
            mixed = mixed + torch.tanh(layer(mixed))
        return mixed


# -------------------------------------------------------------------------------------------- the answers
class Scored(Body):
    """Gives (logits, loss), and has the targets at hand."""

    def peek(self, h: Tensor, targets: Tensor) -> Tensor:
        return h

    def forward(  # type: ignore[override]
        self, ids: Tensor, targets: Tensor | None = None
    ) -> Any:
        h = self.embed(ids)
        if targets is None:
            return self.head(h), None
        logits = self.head(self.peek(h, targets))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@leak("changes with the targets", at=(0, 0))
class SeesTargets(Scored):
    """Logits made with the answers in hand."""

    def peek(self, h: Tensor, targets: Tensor) -> Tensor:
        return h + 0.1 * self.embed(targets)


@leak("given targets, output")
class OtherTrainingPath(Scored):
    """Causal when asked for logits, not when trained."""

    def peek(self, h: Tensor, targets: Tensor) -> Tensor:
        return h + h.flip(1)


@leak("evaluation mode.*given targets, output")
class OtherEvaluationPath(Scored):
    """The held-out loss alone looks ahead."""

    def peek(self, h: Tensor, targets: Tensor) -> Tensor:
        return h + h.flip(1) * (not self.training)


@leak("changes with the labels")
class SeesLabels(Body):
    """Named as transformers does, and answering as a dict."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        h = self.embed(input_ids)
        if labels is None:
            return {"logits": self.head(h)}
        logits = self.head(h + 0.1 * self.embed(labels))
        return {
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "logits": logits,
        }


@leak("changes with the targets")
class LossFirst(SeesTargets):
    """(loss, logits), where targets are given."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = super().forward(ids, targets)
        return logits if loss is None else (loss, logits)


@leak("its loss")
class LossAlone(OtherTrainingPath):
    """Keeps the logits that it trains to itself."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = super().forward(ids, targets)
        return logits if loss is None else loss


@leak("its loss")
class LossBesideNone(LossAlone):
    """(None, loss), where targets are given."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        return (super().forward(ids), None) if targets is None else (None, super().forward(ids, targets))


@leak()
class LastAloneUnlessScored(OtherTrainingPath):
    """Gives the logits of the last position alone, but all of them beside a loss."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = super().forward(ids, targets)
        return (logits[:, -1:], None) if loss is None else (logits, loss)


@leak("its loss")
class WeighedByTheFuture(Body):
    """Each position's loss is weighed by the embedding of the token after it."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        h = self.embed(ids)
        logits = self.head(h)
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * following(h).square().mean(-1).flatten()).mean()


# What the guard can't show; docs/leak-guard.md names them.
LIMITS: list[type[nn.Module]] = []


def limit(build: type[nn.Module]) -> type[nn.Module]:
    """Keeps a leak that is known to pass."""
    LIMITS.append(build)
    return build


@limit
class RareToken(Body):
    """A gate on two tokens in a row that none of the rows holds."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        rare = (following(ids) == V - 2) & (following(following(ids)) == 1) & (past(ids) == 2)
        return h * rare[..., None]


@limit
class BackwardOnly(Body):
    """The outputs are causal, the gradients are not."""

    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.flip(1)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.Shift.apply(h)


@limit
class ThirdUpdate(Body):
    """Looks ahead from the third training pass on."""

    def build(self) -> None:
        self.register_buffer("passes", torch.zeros(()))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1
        return h.flip(1) * (self.passes > 3)


@limit
class Compiled(Body):
    """Looks ahead where a compiler traces it."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h.flip(1) if torch.compiler.is_compiling() else h


@limit
class LongerThanAnyRow(BeyondABlockOf64):
    """In rows longer than those it is tried on."""

    block = 4096


@limit
class FloatsLastBit(Thousandth):
    """Below the rounding, and in float32 alone, so that no float64 copy shows it."""

    size = 1e-8

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return super().mix(h, ids) * (h.dtype == torch.float32)


assert T % 8 == 0  # so that rows of T positions end with a full chunk
