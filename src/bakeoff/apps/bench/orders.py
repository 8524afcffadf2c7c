"""What the order of an image's tokens is worth: small transformers trained alike but for the order.

`python -m bakeoff.apps.bench.orders --out results/h200/token-orders.csv`

The images are made here: empty cells and some coloured points. In the task "nearest" a cell's label is the
colour of the nearest point, in "row" that of the nearest point in its row. Cells as near to two colours
count for nothing. Attention reaches the tokens of its own segment in every layer; orders of one task and
segment do the same arithmetic and see the same images. Several seeds train side by side, as one batch of
independent models. Tokens are put in order once behind the embedding and back once before the last layer,
as part of a step.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bakeoff import hardware
from bakeoff.apps.bench import results, tables
from bakeoff.device import named_device
from bakeoff.graphs import capture_step
from bakeoff.timing import seconds_per_call
from bakeoff.token_order import TokenOrder, token_order

__all__ = ["ORDERS", "Settings", "images", "trained"]

ORDERS = ("row", "tile", "morton", "hilbert", "random")
_POINTS = {"nearest": 1 / 64, "row": 1 / 16}  # of all cells
_IGNORED = -100
_TEST = 1 << 40  # seeds of held-out images, above those of any step
_TIMED = 20


class Settings(msgspec.Struct, frozen=True):
    """The images, the model and its training; equal for all orders."""

    side: int = 64
    colours: int = 8
    width: int = 128
    heads: int = 4
    layers: int = 2
    batch: int = 8
    """Images a seed and step."""
    seeds: int = 4
    steps: int = 400
    lr: float = 3e-3
    test_batches: int = 4


def images(task: str, settings: Settings, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cells (0 for empty, else a colour from 1) and labels (from 0), [seeds, batch, side^2] each."""
    side, count = settings.side, settings.seeds * settings.batch
    generator = torch.Generator(device).manual_seed(seed)
    draw = torch.rand((count, side * side), generator=generator, device=device)
    points = draw.topk(round(side * side * _POINTS[task])).indices
    colours = torch.randint(settings.colours, points.shape, generator=generator, device=device)
    cells = torch.zeros_like(draw, dtype=torch.int64).scatter_(1, points, colours + 1)
    at = torch.arange(side * side, device=device, dtype=torch.int32)[None, :, None]
    points = points.to(torch.int32)[:, None]
    across, down = (at % side - points % side).square(), at // side - points // side
    far = 2 * side**2  # beyond any distance
    away = across + (down.square() if task == "nearest" else far * (down != 0))
    keys = away * settings.colours + colours.to(torch.int32)[:, None]
    best = keys.amin(2)
    near, colour = best // settings.colours, (best % settings.colours).long()
    rival = keys.masked_fill(away != near[..., None], -1).amax(2)
    unclear = (rival != best) | (near >= far)
    shape = settings.seeds, settings.batch, side * side
    return cells.view(shape), colour.masked_fill(unclear, _IGNORED).view(shape)


class Models(nn.Module):
    """As many independent models as seeds; every parameter has them as its first dimension."""

    def __init__(self, settings: Settings, order: TokenOrder | None, segment: int, device: torch.device):
        super().__init__()
        self.settings, self.order, self.segment = settings, order, segment
        d, S = settings.width, settings.seeds
        torch.manual_seed(0)  # the same start for every order
        self.embed = _weights(S, settings.colours + 1, d, device)
        self.place = _weights(S, _places(settings.side).shape[1], d, device)
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {
                    "qkv": _weights(S, d, 3 * d, device),
                    "out": _weights(S, d, d, device),
                    "up": _weights(S, d, 4 * d, device),
                    "down": _weights(S, 4 * d, d, device),
                    "norm": nn.Parameter(torch.ones(2, S, 1, d, device=device)),
                }
            )
            for _ in range(settings.layers)
        )
        self.head = _weights(S, d, settings.colours, device)
        self.places = _places(settings.side).to(device)
        turns = _turns(settings.side, d // settings.heads).to(device)
        self.turns = turns if order is None else order.apply(turns, 0)

    def forward(self, cells: Tensor) -> Tensor:
        """Scores of every colour, [seeds, batch * tokens, colours]."""
        S, B, N = cells.shape
        known = torch.arange(self.settings.colours + 1, device=cells.device)
        x = (cells[..., None] == known).to(self.embed.dtype).flatten(1, 2) @ self.embed
        x = (x.unflatten(1, (B, N)) + (self.places @ self.place)[:, None]).flatten(0, 1)
        x = x if self.order is None else self.order.apply(x)
        x = x.unflatten(0, (S, B)).flatten(1, 2)
        for layer in self.layers:
            assert isinstance(layer, nn.ParameterDict)
            x = x + self._attention(_norm(x) * layer["norm"][0], layer, B, N)
            x = x + F.gelu((_norm(x) * layer["norm"][1]) @ layer["up"]) @ layer["down"]
        x = x.unflatten(1, (B, N)).flatten(0, 1)
        x = x if self.order is None else self.order.undo(x)
        return _norm(x.unflatten(0, (S, B)).flatten(1, 2)) @ self.head

    def _attention(self, x: Tensor, layer: nn.ParameterDict, B: int, N: int) -> Tensor:
        S, H = self.settings.seeds, self.settings.heads
        qkv = (x @ layer["qkv"]).view(S * B, N, 3, H, -1)
        q, k = _turned(qkv[:, :, :2], self.turns).unbind(2)
        v = qkv[:, :, 2]
        q, k, v = (x.reshape(-1, self.segment, H, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(S, B * N, -1)
        found: Tensor = y @ layer["out"]
        return found


def _weights(S: int, rows: int, columns: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.randn(S, rows, columns, device=device) / math.sqrt(rows))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:])


def _waves(side: int, count: int) -> Tensor:
    """Angles of each cell's coordinates, [tokens, 2 * count], with wavelengths from 4 cells to 4 sides."""
    lengths = 4 * side ** torch.linspace(0, 1, count)
    at = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    return (2 * math.pi * at[:, :, None] / lengths).flatten(1)


@functools.cache
def _places(side: int) -> Tensor:
    angles = _waves(side, 8)
    return torch.cat([angles.sin(), angles.cos()], 1)


def _turns(side: int, head_dim: int) -> Tensor:
    """Two-dimensional rotary tables, [tokens, 2, head_dim / 2]: cosines and sines."""
    angles = _waves(side, head_dim // 4)
    return torch.stack([angles.cos(), angles.sin()], 1)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """`x` [rows, tokens, 2, heads, head_dim], each pair of features turned by its token's angle."""
    cos, sin = turns[:, None, None].to(x.dtype).unbind(3)
    one, two = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


def trained(
    task: str, segment: int, name: str, settings: Settings, device: torch.device, *, tile: int
) -> dict[str, str]:
    """One order's row: each seed's share of held-out cells that are right, and a step's time."""
    order = _order(name, settings, tile, device)
    models = Models(settings, order, segment, device)
    cuda = device.type == "cuda"
    lr = torch.tensor(settings.lr, device=device)
    optimizer = torch.optim.AdamW(models.parameters(), lr=lr, weight_decay=0.01, fused=True, capturable=cuda)

    def step(cells: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            scores = models(cells)
        loss = F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED)
        (loss * settings.seeds).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    run: Callable[[Tensor, Tensor], Tensor] = capture_step(step) if cuda else step
    for number in range(settings.steps):
        lr.fill_(settings.lr * _rate(number / settings.steps))
        run(*images(task, settings, number, device))
    right = _right(models, task, settings, device)
    held = images(task, settings, _TEST, device)
    step_s = statistics.median([seconds_per_call([lambda: run(*held)], _TIMED, device) for _ in range(5)])
    row = order or token_order("row", (settings.side,) * 2)
    return {
        "task": task,
        "segment": str(segment),
        "order": name,
        "right": " ".join(f"{share:.5f}" for share in right),
        "step_ms": f"{1e3 * step_s:.4f}",
        "kept": f"{row.report([segment], [1]).kept:.5f}",
    }


def _order(name: str, settings: Settings, tile: int, device: torch.device) -> TokenOrder | None:
    """None for rows, which are as they come: nothing is permuted."""
    shape = (settings.side,) * 2
    if name == "row":
        return None
    if name == "random":
        perm = torch.randperm(settings.side**2, generator=torch.Generator().manual_seed(0))
        return token_order("custom", shape, perm=perm).to(device)
    return token_order(name, shape, tile=tile if name == "tile" else None).to(device)


def _rate(done: float) -> float:
    """Warm-up over a twentieth of the steps, then a cosine down to 0."""
    return min(1.0, done * 20 + 0.01) * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def _right(models: Models, task: str, settings: Settings, device: torch.device) -> list[float]:
    """Each seed's share of right cells over held-out images."""
    hits, number = torch.zeros(2, settings.seeds, device=device).unbind()
    for batch in range(settings.test_batches):
        cells, labels = images(task, settings, _TEST + batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            guess = models(cells).argmax(-1).view_as(labels)
        hits += (guess == labels).flatten(1).sum(1)
        number += (labels != _IGNORED).flatten(1).sum(1)
    return [float(share) for share in hits / number]


def plan(settings: Settings) -> Iterator[tuple[str, int]]:
    """The tasks and segments."""
    tokens = settings.side**2
    for segment in (tokens // 64, tokens // 16, tokens // 4):
        yield "nearest", segment
    yield "row", tokens // 16


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Results file to write.")
@click.option("--device", default="auto", help="auto, cpu, cuda or cuda:N.")
@click.option("--steps", type=click.IntRange(1), default=Settings().steps, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=Settings().seeds, show_default=True)
@click.option("--side", type=click.IntRange(8), default=Settings().side, show_default=True)
@click.option("--resume", is_flag=True, help="Leave out what OUT holds.")
def main(out: Path, device: str, steps: int, seeds: int, side: int, resume: bool) -> None:
    """Train every order on every task, and write OUT."""
    place = named_device(device)
    settings = Settings(side=side, steps=steps, seeds=seeds)
    facts = hardware.facts(str(place))
    common = {"gpu": facts.device, "torch": facts.torch, "date": results.now()[:10]}
    common |= {name: str(value) for name, value in msgspec.to_builtins(settings).items()}
    rows = tables.read(out) if resume and out.exists() else []
    if any(row[name] != value for row in rows for name, value in common.items() if name != "date"):
        raise click.ClickException(f"{out} was made otherwise than by {common}; give another --out")
    held = {(row["task"], int(row["segment"]), row["order"]) for row in rows}
    for task, segment in plan(settings):
        for name in ORDERS:
            if (task, segment, name) in held:
                continue
            row = trained(task, segment, name, settings, place, tile=max(1, math.isqrt(segment)))
            click.echo(f"{task:8} {segment:5} {name:8} {row['right']}  {float(row['step_ms']):.2f} ms")
            rows.append(common | row)
            tables.write(out, rows)


if __name__ == "__main__":
    main()
