"""Causal models with whatever real models have that a guard could take for a leak."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.unit.leak_zoo.body import Animal, Body, D, T, V, attend, following, lower, past, steps

HONEST: list[Animal] = []


def honest(**how: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Puts a model into the zoo."""

    def keep(build: type[nn.Module]) -> type[nn.Module]:
        HONEST.append(Animal(build, "", **how))
        return build

    return keep


honest()(Body)


# ------------------------------------------------------------------------------------------- mixers over time
@honest()
class Attention(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h, lower(h))


@honest(autocast=True)
class FusedAttention(Body):
    """PyTorch's, under autocast."""

    def build(self) -> None:
        self.qkv = nn.Linear(D, 3 * D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@honest()
class WindowedAttention(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h, lower(h) & ~lower(h, -5))


@honest()
class Rotary(Body):
    """Positions by rotation, in a table in float32."""

    def build(self) -> None:
        angles = torch.outer(torch.arange(512.0), 100.0 ** -torch.linspace(0, 1, D // 2))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        pairs = torch.view_as_complex(h.float().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * self.turn[: h.shape[1]].to(pairs.dtype)).flatten(2)
        return attend(turned.to(h.dtype), lower(h))


@honest()
class Alibi(Body):
    """Scores fall with the distance."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        away = steps(h)[:, None] - steps(h)
        scores = h @ h.transpose(1, 2) - 0.1 * away.to(h.dtype)
        return scores.masked_fill(away < 0, torch.finfo(h.dtype).min).softmax(-1) @ h


@honest()
class LearnedPositions(Body):
    """A table of exactly as many positions as the row has: longer rows raise."""

    def build(self) -> None:
        self.place = nn.Embedding(T, D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return attend(h + self.place(steps(h)), lower(h))


@honest()
class Recurrent(Body):
    """A GRU."""

    def build(self) -> None:
        self.rnn = nn.GRU(D, D, batch_first=True)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.rnn(h)[0]


@honest()
class DroppingLSTM(Body):
    """Two layers with dropout between them."""

    def build(self) -> None:
        self.rnn = nn.LSTM(D, D, 2, batch_first=True, dropout=0.3)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.rnn(h)[0]


@honest()
class CausalConvolution(Body):
    def build(self) -> None:
        self.conv = nn.Conv1d(D, D, 3, padding=2)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.conv(h.transpose(1, 2))[..., :-2].transpose(1, 2)


@honest()
class PaddedConvolution(Body):
    """A long filter by FFT with room: causal, but every output is rounded by the whole row."""

    def build(self) -> None:
        self.filter = nn.Parameter(torch.randn(256, D) * 0.1)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        n, wide = h.shape[1], h.float()
        spectrum = torch.fft.rfft(self.filter[:n].float(), n=2 * n, dim=0)
        y = torch.fft.irfft(torch.fft.rfft(wide, n=2 * n, dim=1) * spectrum, n=2 * n, dim=1)
        return y[:, :n].to(h.dtype)


@honest()
class ComplexScan(Body):
    """A diagonal state space model with complex parameters."""

    def build(self) -> None:
        self.pole = nn.Parameter(torch.polar(torch.rand(D) * 0.5 + 0.3, torch.rand(D) * 3))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        state, out = torch.zeros(len(h), D, dtype=self.pole.dtype, device=h.device), []
        for x in h.unbind(1):
            state = state * self.pole + x
            out.append(state.real.to(h.dtype))
        return torch.stack(out, 1)


@honest()
class RunningMean(Body):
    """A gate from the mean so far; the causal twin of MeanGate."""

    def build(self) -> None:
        self.gate = nn.Linear(D, D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        count = torch.arange(1, h.shape[1] + 1, device=h.device)[None, :, None]
        return h * torch.sigmoid(self.gate((h.cumsum(dim=1) / count).to(h.dtype)))


@honest()
class RunningMaximum(Body):
    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h.cummax(1).values


@honest()
class ChunkedMemory(Body):
    """Chunks of 8 read the memory of the chunks before, and see themselves through a mask."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        memory, out = torch.zeros(len(h), D, D, device=h.device, dtype=h.dtype), []
        for chunk in h.split(8, dim=1):
            out.append(chunk @ memory + attend(chunk, lower(chunk)))
            memory = 0.9 * memory + 0.1 * chunk.transpose(1, 2) @ chunk
        return torch.cat(out, dim=1)


@honest()
class RestartsAtToken(Body):
    """A sum that starts anew at token 10, as packed documents do."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        document = (ids == 10).cumsum(1)
        return ((document[:, :, None] == document[:, None]) & lower(h)).to(h.dtype) @ h


@honest()
class PreviousChunk(Body):
    """Each position sees the mean of the chunk before its own, as hierarchical models do."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        chunks = F.pad(h, (0, 0, 0, -h.shape[1] % 8)).unflatten(1, (-1, 8)).mean(2)
        return past(chunks).repeat_interleave(8, 1)[:, : h.shape[1]]


@honest()
class TokenChoice(Body):
    """Each token takes the best two of four experts."""

    def build(self) -> None:
        self.router, self.experts = nn.Linear(D, 4), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        score, chosen = self.router(h).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            row, place, rank = (chosen == number).nonzero(as_tuple=True)
            out = out.index_put(
                (row, place), (expert(h[row, place]) * score[row, place, rank, None]).to(h.dtype), True
            )
        return out


@honest()
class HardGate(Body):
    """A hard decision on the token itself."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * (h.argmax(dim=-1) < D // 2)[..., None]


# ------------------------------------------------------------------------------------ chance, modes and state
@honest()
class Dropout(Body):
    """Drops, in training mode."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return F.dropout(h, 0.5, self.training)


@honest()
class StochasticDepth(Body):
    """Rows skip the mixer by chance."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        kept = torch.rand(len(h), 1, 1, device=h.device) < 0.5
        return attend(h, lower(h)) * (kept if self.training else 0.5)


@honest()
class LayerSkippedByChance(Body):
    """The whole mixer is skipped by Python's own chance."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros_like(h) if self.training and random.random() < 0.5 else attend(h, lower(h))


@honest()
class OwnGenerator(Body):
    """Draws from a generator of its own, which copies take along."""

    def build(self) -> None:
        self.source = torch.Generator().manual_seed(3)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * (torch.rand(D, generator=self.source) < 0.5).to(h)


@honest()
class Noisy(Body):
    """Draws even in evaluation mode, and from three sources."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return h * random.random() + torch.randn_like(h) * float(np.random.rand())  # noqa: NPY002


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation mode, and gives nothing back, as overridden methods do."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(False)


@honest()
class FrozenBatchNorm(Body):
    """A BatchNorm whose own `train` keeps it frozen, and that nobody has called yet."""

    def build(self) -> None:
        self.norm = Frozen(D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


@honest()
class FrozenByTheModel(FrozenBatchNorm):
    """The model's `train` freezes the norm, and returns nothing."""

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(D)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.norm.eval()


@honest()
class NormOverPositions(Body):
    """Group norm of each position, and RMS norm."""

    def build(self) -> None:
        self.norm = nn.GroupNorm(4, D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return F.rms_norm(self.norm(h.flatten(0, 1)).view_as(h), (D,))


@honest()
class Counts(Body):
    """Counts its calls, and warms up with them in training."""

    def build(self) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.history: list[int] = []

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        self.history.append(len(ids))
        if self.training:
            self.calls += 1
        return h * torch.sigmoid(self.calls.to(h.dtype))


@honest()
class RemembersCalls(Body):
    """State that goes from call to call, but holds no token."""

    def build(self) -> None:
        self.memory = torch.zeros(D)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        mixed = h + self.memory.to(h)
        self.memory = self.memory + 1
        return mixed


@honest()
class CacheReset(Body):
    """A cache of keys that each pass starts anew."""

    def build(self) -> None:
        self.keys: list[Tensor] = []

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        self.keys = []
        out = []
        for x in h.split(8, 1):
            self.keys.append(x)
            seen = torch.cat(self.keys, 1)
            mask = lower(seen)[-x.shape[1] :]
            out.append((x @ seen.transpose(1, 2)).masked_fill(~mask, -torch.inf).softmax(-1) @ seen)
        return torch.cat(out, 1)


@honest()
class StatisticsOfTraining(Body):
    """A balance of experts that training moves by content, as bias without auxiliary loss."""

    def build(self) -> None:
        self.register_buffer("bias", torch.zeros(D))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        out = h + self.bias
        if self.training:
            self.bias = self.bias + 0.01 * (0.5 - (h.detach() > 0).to(self.bias).mean((0, 1)))
        return out


@honest()
class MaskCached(Body):
    """A mask made by the first call and grown when a longer row comes."""

    def build(self) -> None:
        self.mask: Tensor | None = None

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) < h.shape[1]:
            self.mask = lower(h)
        return attend(h, self.mask[: h.shape[1], : h.shape[1]])


@honest()
class Jittery(Body):
    """Results that vary from run to run in the last bits, as atomic additions do."""

    calls = 0

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        type(self).calls += 1
        return h * (1 + 1e-6 * (-1) ** type(self).calls)


@honest()
class Checkpoints(Body):
    """A recomputed block with dropout."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(
            lambda x: F.dropout(attend(x, lower(x)), 0.1, self.training), h, use_reentrant=False
        )


@honest()
class BlocksOfEight(Body):
    """Takes rows of whole blocks only, of 16 positions and more."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        if h.shape[1] % 8 or h.shape[1] < 16:
            raise ValueError("rows must be whole blocks")
        return attend(h, lower(h))


# ------------------------------------------------------------------------------------ parameters and answers
@honest()
class Tied(Body):
    def build(self) -> None:
        self.head.weight = self.embed.weight


@honest()
class Parametrised(Body):
    """Weight norm and spectral norm, whose weights are computed."""

    def build(self) -> None:
        self.one = parametrizations.weight_norm(nn.Linear(D, D))
        self.other = parametrizations.spectral_norm(nn.Linear(D, D))

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.other(self.one(h))


@honest()
class RenormedEmbedding(Body):
    """Rows of the table are shortened in place when they are looked up; sparse gradients."""

    def build(self) -> None:
        self.embed = nn.Embedding(V, D, max_norm=1.0, padding_idx=0)
        self.other = nn.Embedding(V, D, sparse=True)

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.other(ids)


@honest()
class LoudColumns(Body):
    """Columns of very different sizes, rounded by a transform over the row."""

    def build(self) -> None:
        self.filter = nn.Parameter(torch.randn(256, D) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        n = h.shape[1]
        spectrum = torch.fft.rfft(self.filter[:n], n=2 * n, dim=0)
        y = torch.fft.irfft(torch.fft.rfft(h, n=2 * n, dim=1) * spectrum, n=2 * n, dim=1)[:, :n]
        return self.head(h + y) * torch.logspace(-6, 6, V, device=h.device, dtype=h.dtype)


@honest()
class MaskedColumns(Body):
    """-1e9 and -inf in the columns of padding, and where a token would repeat."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        logits = F.pad(self.head(h + attend(h, lower(h))), (0, 2), value=-1e9)
        return F.pad(logits.scatter(-1, ids[..., None], -torch.inf), (0, 2), value=-torch.inf)


@honest()
class MaskedMostly(Body):
    """A grammar allows few tokens at each position."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        allowed = (torch.arange(V, device=ids.device) + ids[..., None]) % 5 == 0
        return self.head(h + attend(h, lower(h))).masked_fill(~allowed, -1e9)


@honest()
class Capped(Body):
    """Logits through tanh, and two heads: for the next token and the one after it."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        logits = 30 * torch.tanh(self.head(h + attend(h, lower(h))) / 30)
        return torch.stack([logits, logits.roll(1, -1)], dim=2)


class Scored(Body):
    """Its mixer is attention, its loss beside the logits; the answers differ in `answer`."""

    def answer(self, logits: Tensor, loss: Tensor | None) -> Any:
        return logits, loss

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        h = self.embed(ids)
        logits = self.head(h + F.dropout(attend(h, lower(h)), 0.1, self.training))
        if targets is None:
            return self.answer(logits, None)
        return self.answer(logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


honest()(Scored)


@honest()
class NothingBesideLoss(Scored):
    """(logits, None) without targets, [None, loss] with them."""

    def answer(self, logits: Tensor, loss: Tensor | None) -> Any:
        return [logits if loss is None else None, loss]


@honest()
class LogitsWithoutLoss(Scored):
    """(logits, None), though targets were given."""

    def answer(self, logits: Tensor, loss: Tensor | None) -> Any:
        return logits, None


@honest()
class LossAloneIfAsked(Scored):
    def answer(self, logits: Tensor, loss: Tensor | None) -> Any:
        return logits if loss is None else loss


@honest()
class LossBeforeLogits(Scored):
    def answer(self, logits: Tensor, loss: Tensor | None) -> Any:
        return logits if loss is None else (loss, logits)


@honest()
class LastAloneUnlessScored(Scored):
    """Gives the logits of the last position alone, but all of them beside a loss."""

    def answer(self, logits: Tensor, loss: Tensor | None) -> Any:
        return (logits[:, -1:], None) if loss is None else (logits, loss)


@honest()
class Balanced(LossAloneIfAsked):
    """A loss alone with terms of its own: smoothed labels, log Z squared, the balance of a router."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        h = self.embed(ids)
        logits = self.head(h + attend(h, lower(h)))
        if targets is None:
            return logits
        z = logits.logsumexp(-1).square().mean()
        balance = logits.softmax(-1).mean((0, 1)).square().sum()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        return loss + 1e-4 * z + 0.01 * balance


@honest()
class MeanOverWords(LossAloneIfAsked):
    """A loss alone, its mean over the positions whose token is not padding."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        counted = (ids != 0).flatten()
        return (losses * counted).sum() / counted.sum().clamp(min=1)


@honest()
class ShiftsItsLabels(Body):
    """As transformers does: labels are the tokens themselves, and an output has fields."""

    class Output(dict[str, Any]):
        __getattr__ = dict.__getitem__

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        h = self.embed(input_ids)
        logits = self.head(h + attend(h, lower(h)))
        if labels is None:
            return self.Output(logits=logits, past=[h])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return self.Output(loss=loss, logits=logits)


@honest()
class ScalesWithDistance(Body):
    """log(position) attention, and a hidden state squared: numbers of very different sizes."""

    def mix(self, h: Tensor, ids: Tensor) -> Tensor:
        scale = torch.log(steps(h) + math.e)[:, None].to(h.dtype)
        return attend(h * scale, lower(h)).square() * 100


@honest()
class SeesTargetsInTheLossOnly(Scored):
    """Contrasts the next targets in its loss, never in its logits."""

    def answer(self, logits: Tensor, loss: Tensor | None) -> Any:
        return (
            {"logits": logits}
            if loss is None
            else {"loss": loss + following(logits).mean(), "logits": logits}
        )
