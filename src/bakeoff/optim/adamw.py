"""AdamW in one update launch for all tensors of a group, with clipping and skipping on the device."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, which imports all of torch._dynamo
from torch.optim.optimizer import Optimizer

from bakeoff.ops.adamw.group import Guard, Hyper, join, split
from bakeoff.ops.adamw.op import OP, REAL, check_hyper
from bakeoff.ops.adamw.update import guard, take_step
from bakeoff.optim.groups import Lists, ParamGroup
from bakeoff.optim.sharding import Exchange, exchange_of
from bakeoff.select import TensorList

__all__ = ["AdamW"]

_MASTERS = (None, "float32", "remainder")
_MOMENTS = {"exp_avg", "exp_avg_sq"}
_AS_SAVED = {"gathered", "momentum", "direction"}
_SHAPED = {*_MOMENTS, *_AS_SAVED, "master", "remainder"}
"""Keys of a parameter's state that have its shape."""
_OF_ALL_GROUPS = {"max_grad_norm", "skip_nonfinite", "master_weights", "impl", "muon_impl"}
"""Settings that a group would not be asked for."""
_SWITCHES = {"maximize", "muon"}
_UNABLE_TO_SKIP = ("foreach", "compiled")


class AdamW(Optimizer):
    """torch.optim.AdamW, with the fastest correct implementation and without host synchronisation.

    The arithmetic is that of `bakeoff.ops.adamw_`. A drop-in: parameter groups, schedulers, closures,
    GradScaler and `state_dict` (keys ``step``, ``exp_avg``, ``exp_avg_sq``) work both ways with torch's.
    Every step may be captured in a CUDA graph; a learning rate assigned later, by hand or by a scheduler,
    reaches the graph's next replay (betas, eps and weight decay are constants of the graph). Take one step
    outside capture first. Plain dicts put into `param_groups` are replaced by their copies in the next step.

    Args:
        params: parameters, named parameters or group dicts; float16, bfloat16, float32 or float64.
        lr: learning rate >= 0, a number or a scalar tensor.
        betas, eps, weight_decay, maximize: as torch's.
        amsgrad, differentiable: not supported; True raises.
        foreach, fused: True forces that candidate, for all groups; None and False leave the choice to
            selection. With foreach, GradScaler unscales the gradients itself, and waits for the device.
        capturable: accepted for torch's sake; every step is.
        max_grad_norm: gradients whose global norm (over all groups) is larger are scaled down to it, as by
            torch.nn.utils.clip_grad_norm_, but without another pass that writes them. Where parameters are
            shards (DTensors), it is the norm over all ranks, which must take the step together. What every
            rank holds whole counts once; its gradients must be equal on all ranks.
        skip_nonfinite: a step whose global norm is not finite changes nothing, ``step`` included, and
            advances `skipped`. Not with foreach or compiled, which can't skip on the device.
        master_weights: None; ``"float32"``: keeps a float32 copy of each 16-bit parameter and float32 moments
            (state key ``master``); ``"remainder"``: the same bits in 2 bytes fewer, as the int16 difference
            between a bfloat16 parameter and its float32 weight (state key ``remainder``). After weights have
            been written into parameters, call `refresh_masters`.
        impl: candidate of adamw_ to use; by default the selected one.

    Attributes:
        grad_norm: scalar tensor on the device, the unclipped global norm of the last step; None without
            max_grad_norm and skip_nonfinite.
        skipped: int64 scalar tensor on the device, the calls of `step` that skip_nonfinite or GradScaler has
            made do nothing; None before the first step, and without max_grad_norm and skip_nonfinite.

    Raises:
        ValueError, TypeError: settings, dtypes or duplicate parameters that make no sense.
        RuntimeError: sparse gradients.

    Source: Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AdamW([weight], lr=0.1, max_grad_norm=1.0)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> optimizer.grad_norm
        tensor(5.)
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    _kept: tuple[str, ...] = (
        "max_grad_norm",
        "skip_nonfinite",
        "master_weights",
        "impl",
        "grad_norm",
        "skipped",
    )
    """Attributes that copies and pickles have, too."""
    _more: Mapping[str, Any] = MappingProxyType({})
    """Settings of groups beside torch's, and their defaults."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = True,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        master_weights: str | None = None,
        impl: str | None = None,
    ) -> None:
        del capturable
        _check_differentiable(differentiable)
        if foreach and fused:
            raise ValueError("AdamW: foreach and fused are two candidates; set one of them at most")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"AdamW: max_grad_norm must be positive, got {max_grad_norm}; None turns clipping off"
            )
        if master_weights not in _MASTERS:
            raise ValueError(
                f"AdamW: master_weights must be None, 'float32' or 'remainder', got {master_weights!r}"
            )
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.master_weights = master_weights
        self.impl = impl or ("foreach" if foreach else "fused" if fused else None)
        if self.impl is not None:
            OP.candidate(self.impl)  # raises for a name that no candidate has
        if skip_nonfinite and self.impl in _UNABLE_TO_SKIP:
            raise ValueError(
                f"AdamW: {self.impl} can't skip a step on the device; turn skip_nonfinite off, or leave impl "
                f"and foreach None"
            )
        self.grad_norm: Tensor | None = None
        self.skipped: Tensor | None = None
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": None, "capturable": False, "differentiable": False,
            "fused": None, "decoupled_weight_decay": True, **self._more,
        }  # fmt: skip
        super().__init__(params, defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves unscaling and skipping to `step`."""
        return self.impl not in _UNABLE_TO_SKIP

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's; raises for settings or parameters that AdamW can't take."""
        super().add_param_group(param_group)
        try:
            self.param_groups[-1] = self._adopted(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _adopted(self, given: dict[str, Any]) -> "ParamGroup":
        """The group as `step` needs it; raises for settings or parameters that AdamW can't take."""
        group = ParamGroup({**self.defaults, **given})
        # Every step is; torch, which reads this too, captures on CUDA only.
        group["capturable"] = any(p.is_cuda for p in group["params"])
        _check_differentiable(group["differentiable"])
        for candidate in ("foreach", "fused"):
            if group[candidate] and self.impl != candidate:
                raise ValueError(
                    f"AdamW: a group can't force {candidate} for itself; leave it out there, or give "
                    f"AdamW(..., {candidate}=True), for all groups"
                )
        own = type(self).__name__
        for key in sorted(_OF_ALL_GROUPS & group.keys()):
            if group[key] == getattr(self, key, None):
                continue
            raise ValueError(
                f"{own}: {key} holds for all groups, and a group can't have one of its own; leave it out "
                f"there, and give {own}(..., {key}={group[key]!r})"
            )
        self._check(group)
        return group

    def _check(self, group: dict[str, Any]) -> None:
        if group["amsgrad"]:
            raise ValueError("AdamW: amsgrad is not supported; use torch.optim.AdamW(amsgrad=True)")
        lr, betas = group["lr"], group["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ValueError(f"AdamW: betas must be two numbers, such as (0.9, 0.999), got {betas!r}")
        beta1, beta2 = betas
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"AdamW: a tensor lr must have one element, got shape {tuple(lr.shape)}")
        if isinstance(lr, Tensor) and lr.device.type == "cpu":  # elsewhere reading it would wait
            check_hyper(float(lr), 0.0, 0.0, 0.0, 0.0)
        if isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
            raise TypeError("AdamW: betas must be numbers, not tensors; pass betas=(float(b1), float(b2))")
        check_hyper(lr, beta1, beta2, group["eps"], group["weight_decay"])
        for key in _SWITCHES & group.keys():
            if group[key] not in (True, False):
                raise TypeError(f"{type(self).__name__}: {key} must be True or False, got {group[key]!r}")
        seen: set[Tensor] = set()
        for i, p in enumerate(group["params"]):
            if p in seen:
                raise ValueError(
                    f"AdamW: parameter {i} of the group is in it twice; model.parameters() lists it once"
                )
            seen.add(p)
            if not REAL.allow(p.dtype):
                raise TypeError(
                    f"AdamW: parameter {i} is {p.dtype}; it takes float16, bfloat16, float32 and float64"
                )
            if self.master_weights == "remainder" and p.dtype not in (torch.bfloat16, torch.float32):
                raise TypeError(
                    f"AdamW: master_weights='remainder' extends bfloat16, and parameter {i} is {p.dtype}; "
                    f"use 'float32'"
                )

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step and returns the closure's loss, if one was given. The host does not wait."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for i, plain in enumerate(self.param_groups):
            if not isinstance(plain, ParamGroup):
                self.param_groups[i] = self._adopted(plain)
        groups: list[Any] = self.param_groups
        found: list[Any] = [(group, lists) for group in groups for lists in self._lists(group)]
        if not found and not any(any(group.shardings) for group in groups):
            return loss  # of shards other ranks may have gradients, and wait for this one
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        judged = self._judge([lists for _, lists in found], scale, found_inf)
        steps = []
        for group, lists in found:
            device = lists.group.params.device
            beta1, beta2 = group["betas"]
            how = Hyper(
                group.rate(device), beta1, beta2, group["eps"], group["weight_decay"], group["maximize"],
                None if judged is None or self.max_grad_norm is None else judged.clip_coef,
                _at(found_inf, device) if judged is None else judged.found_inf,
                _at(scale, device),
            )  # fmt: skip
            if judged is not None and found_inf is None and not self.skip_nonfinite:
                how = how._replace(found_inf=None)
            steps.append((group, lists, how))
        self._update(steps, loss)
        return loss

    def _lists(self, group: ParamGroup) -> list[Lists]:
        """The group's parameters that have gradients, and their state, by device and dtypes."""
        return group.lists(self.state, self._start)

    def _update(self, steps: list[tuple[ParamGroup, Lists, Hyper]], loss: Any) -> None:
        """Takes the step of every list as told; `loss` is what the closure returned."""
        del loss
        for _, lists, how in steps:
            take_step(lists.group, how, self.impl, overlapping=lists.overlapping)

    def _judge(self, found: list[Any], scale: Tensor | None, found_inf: Tensor | None) -> Guard | None:
        """The norm of all gradients and what follows from it, where anything does."""
        if self.max_grad_norm is None and not self.skip_nonfinite:
            return None
        over = self._exchange()
        if not found and over is None:
            return None
        devices = {lists.group.grads.device for lists in found} or self._devices()
        if len(devices) > 1:
            raise ValueError(
                f"AdamW: max_grad_norm and skip_nonfinite need all gradients on one device, got "
                f"{', '.join(sorted(map(str, devices)))}; use one optimizer for each device"
            )
        (device,) = devices
        if self.skipped is None or self.skipped.device != device:
            self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        found_inf, scale = _at(found_inf, device), _at(scale, device)
        if over is None:
            judging = _joined([lists.group.grads for lists in found])
        else:
            norms, found_inf = over.norms(_norm_of(found, over, device), found_inf)
            judging = [norms]
        judged = guard(judging, self.max_grad_norm, self.skip_nonfinite, found_inf, scale, self.skipped)
        self.grad_norm = judged.norm
        return judged

    def _exchange(self) -> Exchange | None:
        """Where sums over parameters are added up; None where every rank holds them whole."""
        groups: list[Any] = self.param_groups
        return exchange_of((kind for group in groups for kind in group.shardings), type(self).__name__)

    def _devices(self) -> set[torch.device]:
        return {p.device for group in self.param_groups for p in group["params"]}

    def _start(self, params: list[Tensor]) -> None:
        """The state of parameters before their first step; a device's step counters share one allocation."""
        counts: dict[torch.device, list[Tensor]] = {}
        for p in params:
            counts.setdefault(p.device, []).append(p)
        for device, members in counts.items():
            steps = torch.zeros(len(members), dtype=torch.float32, device=device)
            for p, step in zip(members, steps.unbind(0), strict=True):
                state = self.state[p]
                state["step"] = step
                wide = self._wide(p)
                dtype = torch.float32 if wide else p.dtype
                state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
                if wide:
                    self._widen(p, p.detach().float())

    def _wide(self, p: Tensor) -> bool:
        return self.master_weights is not None and p.dtype in (torch.float16, torch.bfloat16)

    def _widen(self, p: Tensor, weight: Tensor) -> None:
        """Keep `weight`, of which p is the rounding, beside p."""
        if self.master_weights == "remainder":
            self.state[p]["remainder"] = split(weight)[1]
        else:
            self.state[p]["master"] = weight

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Takes up weights that were written into parameters, by `model.load_state_dict` say, after a step.

        Without this the next step writes the old weights back, or extends the new ones by old remainders.
        Where a parameter still is the rounding of its float32 master the master stays; remainders, which
        don't tell, become 0. The host does not wait.
        """
        for p in [p for group in self.param_groups for p in group["params"]]:
            state = self.state.get(p, {})
            if "master" in state:
                master = state["master"]
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.to(master.dtype)))
            if "remainder" in state:
                state["remainder"].zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the state of this class or of torch.optim.AdamW; wider state keeps its dtype.

        Raises:
            ValueError, TypeError: groups that don't match, a state with amsgrad or for other parameters; then
                nothing has changed.
        """
        taken: dict[str, Any] = {}

        def check_and_keep(_: Optimizer, given: dict[str, Any]) -> None:
            self._check_saved(given)
            taken.update(given)

        # After the pre-hooks of others, which may replace what is loaded, and before their post-hooks.
        hooks = (
            self.register_load_state_dict_pre_hook(check_and_keep),
            self.register_load_state_dict_post_hook(lambda _: self._unround(taken), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_saved(self, saved: dict[str, Any]) -> None:
        """Raises for what can't be loaded; how many groups and parameters there are is left to torch."""
        for group, given in zip(self.param_groups, saved["param_groups"], strict=False):
            self._check({**self.defaults, **given, "params": group["params"]})
            for i, p in zip(given["params"], group["params"], strict=False):
                found = saved["state"].get(i) or {}
                needed = self._needed({**group, **given}) if found else ()
                rule = "Muon" if needed == ("momentum",) else "AdamW"
                for key in needed:
                    if key not in found:
                        raise ValueError(
                            f"{type(self).__name__}: the state of parameter {i} has no {key}, so it isn't "
                            f"{rule}'s; load the state of an optimizer whose group steps by {rule}"
                        )
                for key in found.keys() & _SHAPED:
                    if found[key].shape != p.shape:
                        raise ValueError(
                            f"AdamW: {key} of parameter {i} has shape {tuple(found[key].shape)}, the "
                            f"parameter {tuple(p.shape)}; list parameters in the order they were saved in"
                        )

    def _needed(self, group: dict[str, Any]) -> tuple[str, ...]:
        """What the state of the group's parameters always has."""
        del group
        return ("step", "exp_avg", "exp_avg_sq")

    def _unround(self, saved: dict[str, Any]) -> None:
        """The loaded state as it was saved: torch's loader rounds all of it to the parameter's dtype."""
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            found = saved["state"].get(i)
            if not found:
                continue
            state = self.state[p]
            dtype = torch.float32 if self._wide(p) else p.dtype
            for key in found.keys() & _MOMENTS:
                state[key] = found[key].to(p.device, dtype)
            for key in found.keys() & _AS_SAVED:
                state[key] = found[key].to(p.device)
            if "step" in found:
                step = torch.as_tensor(found["step"], dtype=torch.float32, device=p.device)
                state["step"] = step.reshape(()).clone()
                self._load_master(p, found)

    def _load_master(self, p: Tensor, found: dict[str, Any]) -> None:
        state = self.state[p]
        weight = None
        if "master" in found:
            weight = found["master"].to(p.device)
        elif "remainder" in found:
            state["remainder"] = found["remainder"].to(p.device)
            weight = join(p, state["remainder"])
        for key in ("master", "remainder"):
            state.pop(key, None)
        if self._wide(p):
            self._widen(p, p.detach().float() if weight is None else weight)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{key: getattr(self, key) for key in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for i, group in enumerate(self.param_groups):
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            # Which of torch's implementations a checkpoint was made with says nothing about this optimizer.
            group.update({key: self.defaults[key] for key in ("foreach", "differentiable", "fused")})
            group["decoupled_weight_decay"] = True
            group["capturable"] = any(p.is_cuda for p in group["params"])
            if not isinstance(group, ParamGroup):
                self.param_groups[i] = ParamGroup(group)


def _check_differentiable(wanted: bool) -> None:
    if wanted:
        raise ValueError("AdamW: steps are taken in place and can't be differentiated; use torch.optim.AdamW")


def _at(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scalar is None else scalar.to(device, non_blocking=True).reshape(())


def _joined(grads: list[Any]) -> list[TensorList]:
    """One list for each dtype."""
    by_dtype: dict[torch.dtype, list[TensorList]] = {}
    for listed in grads:
        by_dtype.setdefault(listed.meta.dtype, []).append(listed)
    return [TensorList.joined(lists) for lists in by_dtype.values()]


def _norm_of(found: list[Lists], over: Exchange, device: torch.device) -> Tensor:
    """The norm of this rank's gradients, its share of what others hold, too."""
    by_share: dict[float, list[Any]] = {}
    for lists in found:
        by_share.setdefault(over.share(lists.sharding), []).append(lists.group.grads)
    if not by_share:
        return torch.zeros((), device=device)
    norms = {share: guard(_joined(grads)).norm for share, grads in by_share.items()}
    if list(norms) == [1.0]:
        return norms[1.0]
    weighted = torch.stack([norm.double() * share**0.5 for share, norm in norms.items()])
    own: Tensor = weighted.norm()
    return own
