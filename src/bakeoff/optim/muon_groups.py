"""Which of a model's parameters Muon steps, and which AdamW."""

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["muon_groups", "refuse_lazy"]

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_HEADS = {"head", "lm_head", "unembed"}


def muon_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    adamw_lr: float | Tensor | None = None,
    splits: Mapping[str, int | Sequence[int]] | None = None,
    matrices: Sequence[str] = (),
    others: Sequence[str] = (),
    report: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """The groups of a model for `Muon`, by what its modules are.

    "matrices", by Muon: weights of nn.Linear. By AdamW: "embeddings" (what nn.Embedding and nn.EmbeddingBag
    hold, and so a head that is tied to one); "heads" (an nn.Linear that is called head, lm_head or unembed,
    or that the model itself holds and that gives as many numbers as an embedding has rows); "filters" (all
    else of two dimensions or more: convolutions, tables of poles, learned memories); "vectors" (norms,
    biases). Filters and vectors do not decay.

    Args:
        model: whose parameters that require gradients are split; call it before the model is wrapped.
        weight_decay: of matrices, embeddings and heads.
        adamw_lr: learning rate of all groups but the matrices; by default the optimizer's.
        splits: by a pattern of names, such as ``{"*.qkv.weight": 3}``, how many equal blocks of rows a matrix
            is made of, or the rows of each: blocks that are orthogonalised each by itself.
        matrices, others: patterns of names that go to Muon, or not, whatever module they are of.
        report: called with one line for each group, such as `print`.

    Raises:
        TypeError: `matrices` or `others` that is one string.
        ValueError: a pattern that fits no parameter; one of `matrices` that fits what is no matrix; one of
            `splits` that fits nothing of Muon's; a name that both `matrices` and `others` fit; a parameter of
            a lazy module, which has no shape yet.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> groups = muon_groups(model, report=print)
        matrices: Muon, 1 tensors, 16 parameters
        embeddings: AdamW, 1 tensors, 32 parameters
        vectors: AdamW, 3 tensors, 12 parameters
    """
    refuse_lazy("muon_groups", model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    splits = splits or {}
    _check_patterns(named, splits, matrices, others)
    holders = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    tables = {id(p): p for m in model.modules() if isinstance(m, _TABLES) for p in m.parameters(False)}
    rows = {p.shape[0] for p in tables.values()}
    found: dict[Any, list[tuple[str, Tensor]]] = {}
    unused = set(splits)
    for name, p in named.items():
        kind: Any = _kind(name, p, id(p) in tables, holders[id(p)], rows)
        if _any(name, matrices):
            if p.ndim != 2:
                raise ValueError(
                    f"muon_groups: {name} is in matrices and has shape {tuple(p.shape)}; Muon takes "
                    f"matrices, so leave it out of matrices="
                )
            kind = "matrices"
        elif _any(name, others) and kind == "matrices":
            kind = "filters"
        fitting = [pattern for pattern in splits if fnmatch.fnmatch(name, pattern)]
        if kind == "matrices" and fitting:
            unused -= set(fitting)
            split = splits[fitting[0]]
            kind = (kind, split if isinstance(split, int) else tuple(split))
        found.setdefault(kind, []).append((name, p))
    if unused:
        raise ValueError(
            f"muon_groups: splits fit nothing that Muon steps at {sorted(unused)}; put the matrix into "
            f"matrices=, too, or leave its split out"
        )
    order = [
        "matrices",
        *[k for k in found if isinstance(k, tuple)],
        "embeddings",
        "heads",
        "filters",
        "vectors",
    ]
    groups = []
    for kind in [kind for kind in order if kind in found]:
        name, split = kind if isinstance(kind, tuple) else (kind, None)
        muon, decays = name == "matrices", name in ("matrices", "embeddings", "heads")
        group: dict[str, Any] = {
            "name": name, "params": found[kind], "muon": muon, "splits": split,
            "weight_decay": weight_decay if decays else 0.0,
        }  # fmt: skip
        if adamw_lr is not None and not muon:
            group["lr"] = adamw_lr.clone() if isinstance(adamw_lr, Tensor) else adamw_lr
        groups.append(group)
        if report is not None:
            report(_line(group))
    return groups


def refuse_lazy(own: str, model: nn.Module) -> None:
    """Raises for a parameter without a shape, which says nothing of the group that it belongs to."""
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"{own}: {name} has no shape yet, so its group is unknown; call the model once first"
            )


def _check_patterns(
    names: Collection[str], splits: Collection[str], matrices: Sequence[str], others: Sequence[str]
) -> None:
    for argument, patterns in (("matrices", matrices), ("others", others)):
        if isinstance(patterns, str):
            raise TypeError(
                f"muon_groups: {argument} must be a list of patterns, got {patterns!r}; pass [{patterns!r}]"
            )
    for pattern in (*splits, *matrices, *others):
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"muon_groups: no parameter is called {pattern!r}; names look like {next(iter(names), '')!r}"
            )
    for name in names:
        if _any(name, matrices) and _any(name, others):
            raise ValueError(f"muon_groups: {name} is in matrices and in others; leave it out of one")


def _line(group: dict[str, Any]) -> str:
    params = [p for _, p in group["params"]]
    cut = "" if group["splits"] is None else f" in blocks {group['splits']}"
    rule = "Muon" if group["muon"] else "AdamW"
    numel = sum(p.numel() for p in params)
    return f"{group['name']}{cut}: {rule}, {len(params)} tensors, {numel:,} parameters"


def _kind(name: str, p: Tensor, table: bool, holder: nn.Module, rows: set[int]) -> str:
    """The group of a parameter that `holder` has, where embeddings have so many `rows`."""
    if table:
        return "embeddings"
    if p.ndim < 2:
        return "vectors"
    if not isinstance(holder, nn.Linear):
        return "filters"
    parts = name.split(".")
    head = _HEADS & set(parts) or (len(parts) == 2 and p.shape[0] in rows)
    return "heads" if head else "matrices" if p.ndim == 2 else "filters"


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
