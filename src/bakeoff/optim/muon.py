"""Muon for matrices and AdamW for the rest, in one optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Group, Hyper
from bakeoff.ops.adamw.update import overlap, take_step
from bakeoff.ops.muon.op import OP, check_settings
from bakeoff.ops.muon.settings import Matrices, Settings
from bakeoff.ops.muon.update import take_step as take_muon_step
from bakeoff.optim.adamw import AdamW
from bakeoff.optim.groups import Lists, ParamGroup
from bakeoff.optim.sharding import Sharding, local, place_state, placed, rows_over, sharding_of
from bakeoff.optim.sharing import Share, split_rows, take_shared_step
from bakeoff.select import TensorList

__all__ = ["Muon"]


class Muon(AdamW):
    """Muon for matrices and AdamW for the rest: one optimizer, one state, one clipping, one launch order.

    Groups with ``"muon": True`` hold matrices, which step along their orthogonalised momentum
    (`bakeoff.ops.muon_`; state ``momentum``); others step as `bakeoff.optim.AdamW`'s. `muon_groups` makes
    both of a model. Groups, schedulers, closures, GradScaler, `state_dict` and CUDA graphs as `AdamW`.

    Over ranks: as any optimizer under DDP; with `process_group` its ranks share the work, each orthogonalises
    some matrices for all. Of parameters that `fully_shard` made, each matrix goes whole to one rank, once a
    step, and its rows come back. Ranks that share work must have gradients of the same matrices: the step
    waits forever, or fails in the exchange, where one rank has None and another has not.

    Args:
        params: parameters, named parameters or group dicts.
        lr: learning rate of groups that don't say.
        momentum, nesterov, steps, scale: of matrices; groups may say otherwise. See `bakeoff.ops.muon_`: with
            scale "match_rms" the rate and weight decay that fit AdamW fit.
        weight_decay: of groups that don't say.
        muon: whether groups that don't say are Muon's.
        splits: of groups that don't say: None, how many equal blocks of rows each matrix is made of, or the
            rows of each block; blocks are orthogonalised each by itself.
        betas, eps, max_grad_norm, skip_nonfinite, maximize: as AdamW's.
        process_group: of ranks that hold the same parameters and share the work; None: each does all of it.
        impl, muon_impl: candidates of adamw_ and of muon_; by default the selected ones.

    Raises:
        ValueError, TypeError: as AdamW's, and for what is no matrix in a group of matrices.

    Source: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; Liu et al. 2025, Muon
    is scalable for LLM training.

    Example:
        >>> import torch
        >>> from bakeoff.optim import muon_groups
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> optimizer = Muon(muon_groups(model), lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.arange(8)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.state[model[1].weight])
        ['momentum']
    """

    _kept: tuple[str, ...] = (*AdamW._kept, "muon_impl", "_more")
    process_group: Any = None
    """Copies and pickles have none."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        steps: int = 5,
        *,
        scale: str = "match_rms",
        muon: bool = True,
        splits: int | Sequence[int] | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        master_weights: str | None = None,
        process_group: Any = None,
        impl: str | None = None,
        muon_impl: str | None = None,
    ) -> None:
        if muon_impl is not None:
            OP.candidate(muon_impl)  # raises for a name that no candidate has
        self.muon_impl, self.process_group = muon_impl, process_group
        self._more = {
            **self._more, "muon": muon, "momentum": momentum, "nesterov": nesterov, "steps": steps,
            "scale": scale, "splits": splits,
        }  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite, master_weights=master_weights, impl=impl,
        )  # fmt: skip

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if not group["muon"]:
            return
        own = type(self).__name__
        if self.master_weights is not None:
            raise ValueError(
                f"{own}: muon keeps no wider weights; leave master_weights None, or hold the parameters in "
                f"float32"
            )
        check_settings(group["lr"], group["momentum"], group["weight_decay"], group["steps"], group["scale"])
        for i, p in enumerate(group["params"]):
            if p.ndim != 2:
                raise ValueError(
                    f"{own}: muon takes matrices, and parameter {i} of the group has shape "
                    f"{tuple(p.shape)}; put it into a group without muon, as muon_groups(model) does"
                )
            _check_splits(own, i, p.shape[0], group["splits"])

    def _lists(self, group: ParamGroup) -> list[Lists]:
        return self._matrices(group) if group["muon"] else super()._lists(group)

    def _matrices(self, group: ParamGroup) -> list[Lists]:
        """Muon's parameters that have gradients, and their momentum, by dtypes."""
        own, kinds, shardings = type(self).__name__, dict[Any, list[Any]](), set[Sharding | None]()
        for p in group["params"]:
            sharding = sharding_of(p)
            shardings.add(sharding)
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                raise RuntimeError(f"{own}: muon takes no sparse gradients; make them dense")
            kinds.setdefault((p.device, p.dtype, p.grad.dtype, sharding), []).append(p)
        group.shardings = frozenset(shardings)
        found = []
        for (*_, sharding), members in kinds.items():
            if sharding is not None:
                rows_over(sharding, own)  # raises
            for p in members:
                if not self.state[p]:
                    self._start_matrix(p)
                place_state(self.state[p], ("momentum",), p, own)
            grads_of = [placed(p.grad, p, own) for p in members]
            columns = [members, grads_of, [self.state[p]["momentum"] for p in members]]
            if sharding is not None:
                columns = list(map(local, columns))
            named = zip(("params", "grads", "momentum"), columns, strict=True)
            params, grads, momentum = [TensorList.of(c, f"{own}: {name}") for name, c in named]
            found.append(Lists(Group(params, grads, momentum, [], []), overlap(params), members, sharding))
        return found

    def _start_matrix(self, p: Tensor) -> None:
        """The state of a matrix before its first step."""
        wide = torch.promote_types(p.dtype, torch.float32)
        self.state[p]["momentum"] = torch.zeros_like(p, dtype=wide)

    def _direction(self, p: Tensor) -> Tensor:
        """What a matrix moved along in the last step: 0 before the first, and after a state without it."""
        state = self.state[p]
        if "direction" not in state:
            state["direction"] = torch.zeros_like(p, dtype=torch.bfloat16)
        found: Tensor = state["direction"]
        return found

    def _update(self, steps: list[tuple[ParamGroup, Lists, Hyper]], loss: Any) -> None:
        del loss
        for group, lists, how in steps:
            if group["muon"]:
                self._step_matrices(group, lists, how)
            else:
                take_step(lists.group, how, self.impl, overlapping=lists.overlapping)

    def _step_matrices(self, group: ParamGroup, lists: Lists, how: Hyper) -> None:
        settings = Settings(
            how.lr, group["momentum"], group["nesterov"], how.weight_decay, group["steps"], group["scale"],
            how.maximize, how.clip_coef, how.found_inf, how.grad_scale, how.lr_mult, how.sums,
        )  # fmt: skip
        params, grads, momentum = lists.group[:3]
        direction = [self._direction(p) for p in lists.owners] if how.sums is not None else None
        matrices = Matrices(params, grads, momentum, direction)
        sharding = sharding_of(lists.owners[0])
        if sharding is not None or self.process_group is not None:
            over = self.process_group if sharding is None else rows_over(sharding, type(self).__name__)
            share = Share(over, [p.shape for p in lists.owners], sharding is not None)
            take_shared_step(matrices, settings, self.muon_impl, share, group["splits"])
            return
        if group["splits"] is not None:
            columns = [
                None if column is None else [b for t in column for b in split_rows(t, group["splits"])]
                for column in matrices
            ]
            matrices = Matrices(*columns)  # type: ignore[arg-type]
        take_muon_step(matrices, settings, self.muon_impl, overlapping=lists.overlapping)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the state of this class, or of an AdamW with the same groups where none is Muon's.

        Raises:
            ValueError, TypeError: as AdamW's; then nothing has changed.
        """
        kept = [{key: group[key] for key in self._more} for group in self.param_groups]
        groups = state_dict["param_groups"]
        if len(groups) == len(kept):
            groups = [{**own, **given} for own, given in zip(kept, groups, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _needed(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if group["muon"] else super()._needed(group)


def _check_splits(own: str, index: int, rows: int, splits: int | Sequence[int] | None) -> None:
    if splits is None:
        return
    whole = isinstance(splits, int) and not isinstance(splits, bool) and splits > 0 and rows % splits == 0
    listed = (
        isinstance(splits, Sequence)
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in splits)
        and sum(splits) == rows
    )
    if not (whole or listed):
        raise ValueError(
            f"{own}: splits must be how many equal blocks the {rows} rows of parameter {index} are made of, "
            f"or the rows of each block, got {splits!r}"
        )
