"""AdamW whose groups step at rates of their own: learned multipliers, periods, and Muon for matrices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bakeoff.ops.adamw.group import Hyper, factor_of
from bakeoff.ops.adamw.update import take_step
from bakeoff.optim.controller import NestedController
from bakeoff.optim.groups import Lists, ParamGroup
from bakeoff.optim.muon import Muon
from bakeoff.optim.muon_groups import refuse_lazy
from bakeoff.select import TensorList

__all__ = ["DeepNestedOptimizer", "nested_groups"]

_GATHERED = "gathered"
"""Key of a slow parameter's state: the sum of its gradients since the last step."""


def nested_groups(
    model: nn.Module, weight_decay: float = 1e-2, *, muon: bool = False
) -> list[dict[str, Any]]:
    """The groups of a model for `DeepNestedOptimizer`: "core" (matrices, with decay), "embed" (embeddings
    and what is called head, with decay), "memory" (what belongs to a module of that name, without) and
    "scales" (other vectors, without).

    With `muon` the matrices of "core" are Muon's, and what has more dimensions, which Muon can't step, is a
    group "tables" (with decay); without, that is in "core" too.

    Raises:
        ValueError: a parameter of a lazy module, which has no shape yet.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        >>> [(group["name"], len(group["params"])) for group in nested_groups(model)]
        [('core', 1), ('embed', 1), ('scales', 1)]
    """
    refuse_lazy("nested_groups", model)
    heads = {"head", "lm_head"}
    tables = {
        p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    found: dict[str, list[Tensor]] = {"core": [], "embed": [], "memory": [], "scales": [], "tables": []}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        parts = set(name.split("."))
        kind = "embed" if p in tables or parts & heads else "memory" if "memory" in parts else "core"
        if kind == "core" and p.ndim != 2:
            kind = "scales" if p.ndim < 2 else "tables" if muon else "core"
        found[kind].append(p)
    decayed = {"core", "embed", "tables"}
    groups: list[dict[str, Any]] = [
        {"name": name, "params": params, "weight_decay": weight_decay if name in decayed else 0.0}
        for name, params in found.items()
        if params
    ]
    if muon:
        for group in groups:
            group["muon"] = group["name"] == "core"
    return groups


class DeepNestedOptimizer(Muon):
    """`bakeoff.optim.AdamW` with a learned multiplier, a period, and a choice of rule for each group.

    - The multiplier of a group's learning rate comes from a `NestedController`, which learns from every step.
    - A group with ``"period": k`` gathers gradients, clipped as they come, and takes one step with their mean
      after every k-th: each gradient is used exactly once. Those of an unfinished period stay in the state. A
      skipped step gathers nothing. Groups of period 1 have no such state.
    - A group with ``"muon": True`` holds matrices, which step along their orthogonalised momentum instead of
      AdamW's (state ``momentum``; and ``direction``, the last step's, where there is a controller).

    Groups, schedulers, closures, GradScaler, `state_dict` and CUDA graphs as `AdamW`; `found_inf` and
    skip_nonfinite hold for all rules. The state of an AdamW or Muon with the same groups can be loaded; it
    says nothing of the controller, which stays as it is. On parameters that `fully_shard` made, sums are
    added up over ranks.

    Args:
        params: parameters or group dicts; `nested_groups` makes them of a model.
        base_lr: learning rate that multipliers apply to; a group's own is ``"lr"``.
        betas, eps, weight_decay, maximize, max_grad_norm, skip_nonfinite, master_weights, impl: as AdamW's.
        controller: False: all multipliers are 1. A dict: settings of `NestedController`.
        period, muon: of groups that don't say.

    Attributes:
        controller: the NestedController, or None.
        loss: scalar tensor on the device, of the step to come, which the controller looks at; None: what the
            closure returns, if there is one.

    Raises:
        ValueError, TypeError: as AdamW's, and for settings of groups that make no sense.

    Source: Behrouz et al. 2025, Nested Learning (periods: continuum memory); Jordan et al. 2024 (Muon).

    Example:
        >>> import torch
        >>> fast, slow = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        >>> groups = [{"params": [fast]}, {"params": [slow], "period": 8}]
        >>> optimizer = DeepNestedOptimizer(groups, base_lr=0.1)
        >>> for _ in range(8):
        ...     fast.grad, slow.grad = torch.ones(2), torch.ones(2)
        ...     optimizer.step()
        >>> optimizer.state[slow]["step"]
        tensor(1.)
    """

    _kept = (*Muon._kept, "controller", "loss", "_settings")

    def __init__(
        self,
        params: Any,
        base_lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        controller: bool | Mapping[str, Any] = True,
        period: int = 1,
        muon: bool = False,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        master_weights: str | None = None,
        impl: str | None = None,
    ) -> None:
        if not isinstance(controller, bool | Mapping):
            raise TypeError(
                f"DeepNestedOptimizer: controller must be True, False (all multipliers are 1) or a dict of "
                f"settings of NestedController, got {controller!r}"
            )
        self.controller: NestedController | None = None
        self.loss: Tensor | None = None
        self._settings: dict[str, Any] | None = None
        self._more = {"period": period}
        super().__init__(
            params, base_lr, betas[0], weight_decay=weight_decay, muon=muon, betas=betas, eps=eps,
            maximize=maximize, max_grad_norm=max_grad_norm, skip_nonfinite=skip_nonfinite,
            master_weights=master_weights, impl=impl,
        )  # fmt: skip
        if controller is not False:
            self._settings = dict(controller) if isinstance(controller, Mapping) else {}
            self._control()

    def _control(self) -> None:
        """Has the controller know every group, once there is to be one."""
        if self._settings is None:
            return
        devices = {p.device for group in self.param_groups for p in group["params"]}
        if len(devices) > 1:
            raise ValueError(
                f"DeepNestedOptimizer: parameters lie on {', '.join(sorted(map(str, devices)))}; use one "
                f"optimizer for each device, or controller=False"
            )
        if self.controller is None:
            device = devices.pop() if devices else "cpu"  # parameters may come later
            self.controller = NestedController(len(self.param_groups), device, **self._settings)
        self.controller.grow(len(self.param_groups))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's; its multiplier starts at 1."""
        super().add_param_group(param_group)
        try:
            self._control()
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        period = group["period"]
        if not isinstance(period, int) or isinstance(period, bool) or period < 1:
            raise ValueError(f"DeepNestedOptimizer: period must be an int of at least 1, got {period!r}")
        if period > 1 and not self._step_supports_amp_scaling:
            raise ValueError(
                f"DeepNestedOptimizer: {self.impl} can't wait for the end of a period on the device; leave "
                f"impl None"
            )

    def _lists(self, group: ParamGroup) -> list[Lists]:
        params = group["params"]
        if (group["muon"] or group["period"] > 1) and any(hasattr(p, "to_local") for p in params):
            raise ValueError(
                "DeepNestedOptimizer: muon and periods need whole parameters, and these are shards; use DDP, "
                "or leave both off"
            )
        # What was gathered of a parameter counts at the period's end, even if it gets no gradient then.
        absent = [p for p in params if p.grad is None and _GATHERED in self.state.get(p, {})]
        for p in absent:
            p.grad = torch.zeros_like(p)
        try:
            return super()._lists(group)
        finally:
            for p in absent:
                p.grad = None

    def _update(self, steps: list[tuple[ParamGroup, Lists, Hyper]], loss: Any) -> None:
        if not steps and (self.controller is None or self._exchange() is None):
            return
        controller, index = self.controller, {id(group): i for i, group in enumerate(self.param_groups)}
        told = self._told(loss)
        if controller is not None:
            device = steps[0][1].group.params[0].device if steps else self._devices().pop()
            controller.to(device)
            sums = torch.empty(len(steps), 4, dtype=torch.float32, device=device)  # each step writes its own
        ends: dict[int, tuple[Tensor, Tensor]] = {}
        for row, (group, given, asked) in enumerate(steps):
            lists, how = given, asked
            if group["period"] > 1:
                if id(group) not in ends:
                    ends[id(group)] = self._counted(group, how)
                lists, how = self._gather(given, how, *ends[id(group)], group["period"])
            if controller is not None:
                how = how._replace(lr_mult=controller.multipliers[index[id(group)]], sums=sums[row])
            if group["muon"]:
                self._step_matrices(group, lists, how)
            else:
                take_step(lists.group, how, self.impl, overlapping=lists.overlapping)
        if controller is not None:
            over = self._exchange()
            for row, (_, lists, _) in enumerate(steps):
                if over is not None and over.share(lists.sharding) != 1.0:
                    sums[row] *= over.share(lists.sharding)
            sums = self._by_group(sums, [index[id(group)] for group, _, _ in steps])
            if over is not None:
                over.add_up(sums)
            controller.advance(sums, told)

    def _told(self, loss: Any) -> Tensor | None:
        """The loss that the controller looks at."""
        told: Any = self.loss if self.loss is not None else loss if isinstance(loss, Tensor) else None
        if self.controller is None or told is None:
            return None
        if not isinstance(told, Tensor) or told.numel() != 1:
            got = f"shape {tuple(told.shape)}" if isinstance(told, Tensor) else repr(told)
            raise ValueError(
                f"DeepNestedOptimizer: the controller needs the loss as a tensor of one number, got {got}; "
                f"give the mean, or controller=False"
            )
        return told

    def _by_group(self, sums: Tensor, rows: list[int]) -> Tensor:
        """[groups, 4]: the sums of each group over its dtypes."""
        if rows != list(range(len(self.param_groups))):
            total = torch.zeros(len(self.param_groups), 4, dtype=sums.dtype, device=sums.device)
            for row, i in enumerate(rows):
                total[i] += sums[row]
            sums = total
        return sums

    def _counted(self, group: ParamGroup, how: Hyper) -> tuple[Tensor, Tensor]:
        """Counts a gradient of a slow group: whether a period begins with it, and whether one ends."""
        device = group["params"][0].device
        if _GATHERED not in group:
            group[_GATHERED] = torch.zeros((), dtype=torch.float32, device=device)
        elif group[_GATHERED].device != device:
            group[_GATHERED] = group[_GATHERED].to(device)
        count = group[_GATHERED]
        begins = count >= group["period"]
        after = torch.where(begins, 0.0, count) + 1.0
        ends = after >= group["period"]
        if how.found_inf is not None:
            skip = how.found_inf != 0
            after, ends = torch.where(skip, count, after), ends & ~skip
        count.copy_(after)
        return begins, ends

    def _gather(
        self, lists: Lists, how: Hyper, begins: Tensor, ends: Tensor, period: int
    ) -> tuple[Lists, Hyper]:
        """Adds the gradients to those of the period, and tells what is to be done with them."""
        factor = factor_of(how._replace(maximize=False))
        gathered = []
        for p, g in zip(lists.group.params, lists.group.grads, strict=True):
            state = self.state[p]
            if _GATHERED not in state:
                wide = torch.promote_types(p.dtype, torch.float32)
                state[_GATHERED] = torch.zeros_like(p, dtype=wide)
            own = state[_GATHERED]
            total = torch.where(begins, 0.0, own) + g.to(own.dtype) * factor
            own.copy_(total if how.found_inf is None else torch.where(how.found_inf != 0, own, total))
            gathered.append(own)
        mean = torch.full((), float(period), dtype=torch.float32, device=ends.device)
        how = how._replace(clip_coef=None, grad_scale=mean, found_inf=(~ends).float())
        return lists._replace(group=lists.group._replace(grads=TensorList.of(gathered))), how

    def buffers(self) -> dict[str, Tensor]:
        """What is kept beside the states of parameters, by name: the controller's tensors, and how many
        gradients slow groups have gathered."""
        found = {
            f"group{i}.{_GATHERED}": group[_GATHERED]
            for i, group in enumerate(self.param_groups)
            if _GATHERED in group
        }
        if self.controller is not None:
            found |= {f"controller.{name}": t for name, t in self.controller.state_dict().items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the controller's state."""
        state = super().state_dict()
        if self.controller is not None:
            state["controller"] = self.controller.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the state of this class, or of an AdamW or Muon, which says nothing of periods and the
        controller.

        Raises:
            ValueError, TypeError: as AdamW's, or another number of groups under the controller; then nothing
                has changed.
        """
        learned = state_dict.get("controller")
        if self.controller is not None and learned is not None:
            self.controller.check_state(learned)
        super().load_state_dict(state_dict)
        if self.controller is not None and learned is not None:
            self.controller.load_state_dict(learned)
