"""Parameter groups, and the lists of tensors that a step works on, kept from step to step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from bakeoff.ops.adamw.group import Group
from bakeoff.ops.adamw.update import overlap
from bakeoff.optim.sharding import Sharding, local, place_state, placed, sharding_of
from bakeoff.select import TensorList

__all__ = ["Lists", "ParamGroup"]

_KEYS = ("exp_avg", "exp_avg_sq", "step")


class Lists(NamedTuple):
    """What one call updates, and whether parameters in it share memory."""

    group: Group
    overlapping: bool
    owners: Sequence[Tensor] = ()
    """Muon's parameters, where `group` may hold shards of them."""
    sharding: Sharding | None = None
    """How the parameters are sharded."""


class Part:
    """Which of a group's parameters one call updates, those of one device and one set of dtypes; and how
    their lists looked at the last step. It holds no tensors, which somebody may want to free between two
    steps."""

    def __init__(self, places: list[int], lists: Lists, keys: list[str]) -> None:
        self.sharding = lists.sharding
        """How what the group holds is sharded, where the lists hold shards of it."""
        self.places = places
        """Of the parameters among those that have gradients."""
        self.keys = keys
        """Of the tensors in their states, in the order of `Group`."""
        self.overlapping = lists.overlapping
        self.params, self.grads, *self.states = [
            tensors.outline() for tensors in lists.group if isinstance(tensors, TensorList)
        ]

    def again(self, params: list[Any], grads: list[Any], states: list[dict[str, Any]]) -> Lists | None:
        """The lists of this step, if all but the gradients are what they were, where they were."""
        if self.sharding is not None:
            wanted = self.sharding.placements
            if any(getattr(g, "placements", None) != wanted for g in grads):
                return None
            params, grads = local(params), local(grads)
        listed = [self.params.same(params), self.grads.alike(grads)]
        if None in listed:
            return None
        for outline, key in zip(self.states, self.keys, strict=True):
            column = [state[key] for state in states]
            tensors = outline.same(local(column) if self.sharding is not None else column)
            if tensors is None:
                return None
            listed.append(tensors)
        return Lists(Group(*listed), self.overlapping, sharding=self.sharding)  # type: ignore[arg-type]


class ParamGroup(dict[str, Any]):
    """A parameter group that mirrors its learning rate on each device, for captured graphs to read."""

    mirrored = frozenset({"lr"})
    """The numbers whose changes reach a captured graph."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rates: dict[torch.device, Tensor] = {}
        self.shardings: frozenset[Sharding | None] = frozenset()
        """How its parameters are sharded, as the last step has met them; None: not at all."""
        self._forget()

    def _forget(self) -> None:
        self._parts: list[Part] = []
        self._owners: list[int] = []
        """The ids of the parameters that had a state when `_parts` was made, in the state's order,"""
        self._members: list[int] = []
        """of this group's parameters that had gradients,"""
        self._places: list[int] = []
        """and where these stand among the former."""

    def __getstate__(self) -> dict[str, Any]:
        return {"rates": self.rates}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.shardings = frozenset()
        self._forget()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            for rate in self.__dict__.get("rates", {}).values():  # none yet while being unpickled
                rate.fill_(value.reshape(()) if isinstance(value, Tensor) else value)

    def update(self, *args: Any, **named: Any) -> None:
        """As dict's, which would pass the mirror by."""
        for key, value in dict(*args, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self

    def rate(self, device: torch.device) -> float | Tensor:
        """The learning rate for an update on `device`: a number, or a scalar that later assignments reach."""
        lr: float | Tensor = self["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
            if lr.device == device:
                return lr
        if device.type != "cuda":
            return float(lr)
        if isinstance(lr, Tensor):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"AdamW: changes of an lr on {lr.device} can't reach a CUDA graph; use a number, or a "
                    f"tensor on {device}"
                )
            return float(lr) if lr.device.type == "cpu" else lr.to(device, non_blocking=True)
        if device not in self.rates:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("AdamW: take one step outside CUDA graph capture before capturing one")
            self.rates[device] = torch.full((), 0.0, dtype=torch.float64, device=device).fill_(lr)
        return self.rates[device]

    def lists(self, state: Mapping[Any, dict[str, Any]], start: Callable[[list[Any]], None]) -> list[Lists]:
        """The parameters that have gradients, and what goes with them, by device and dtypes.

        `start` makes the states of parameters before their first step.
        """
        params = self["params"]
        grads = [p.grad for p in params]
        if type(None) in map(type, grads):
            params = [p for p, g in zip(params, grads, strict=True) if g is not None]
            grads = [g for g in grads if g is not None]
        if self._parts and list(map(id, params)) == self._members and list(map(id, state)) == self._owners:
            found = self._again(params, grads, list(state.values()))
            if found is not None:
                return found
        self.shardings = frozenset(map(sharding_of, self["params"]))
        return self._anew(params, grads, state, start) if params else []

    def _again(self, params: list[Any], grads: list[Any], states: list[dict[str, Any]]) -> list[Lists] | None:
        """The lists as they were at the last step, with other gradients; None where more has changed."""
        states = [states[i] for i in self._places]
        columns: tuple[list[Any], ...] = (params, grads, states)
        found = []
        for part in self._parts:
            own = columns
            if len(self._parts) > 1:
                own = tuple([column[i] for i in part.places] for column in columns)
            try:
                lists = part.again(*own)
            except KeyError:  # something was taken out of a state
                return None
            if lists is None:
                return None
            found.append(lists)
        return found

    def _anew(
        self,
        params: list[Tensor],
        grads: list[Any],
        state: Mapping[Any, dict[str, Any]],
        start: Callable[[list[Any]], None],
    ) -> list[Lists]:
        if {g.layout for g in grads} != {torch.strided}:
            raise RuntimeError("AdamW does not support sparse gradients; use torch.optim.SparseAdam")
        missing = [p for p in params if not state.get(p)]
        if missing:
            start(missing)
        states = [state[p] for p in params]
        for p, own in zip(params, states, strict=True):
            before = own.get("exp_avg", p).shape
            if before != p.shape:
                raise ValueError(
                    f"AdamW: a parameter of shape {tuple(p.shape)} had {tuple(before)} at its last step; "
                    f"take its state away, del optimizer.state[p], or make a new optimizer"
                )
            place_state(own, ("exp_avg", "exp_avg_sq", "master", "remainder"), p, "AdamW")
        columns: list[list[Any]] = [params, grads, *[[s.get(key) for s in states] for key in _KEYS]]
        columns.append([s.get("master", s.get("remainder")) for s in states])
        shardings: list[Sharding | None] = [None] * len(params)
        if any(self.shardings):
            shardings = list(map(sharding_of, params))
            columns[1] = [placed(g, p, "AdamW") for g, p in zip(grads, params, strict=True)]
            columns = list(map(local, columns))
        kinds = list(
            zip(
                [p.get_device() for p in columns[0]],
                *[[None if t is None else t.dtype for t in columns[i]] for i in (0, 1, 2, 3, 5)],
                shardings,
                strict=True,
            )
        )
        self._parts, found = [], []
        for kind in dict.fromkeys(kinds):
            places = [i for i, k in enumerate(kinds) if k == kind]
            lists: list[Any] = [
                TensorList.of([column[i] for i in places], f"AdamW: {name}")
                for name, column in zip(Group._fields, columns, strict=True)
                if column[places[0]] is not None
            ]
            found.append(Lists(Group(*lists), overlap(lists[0]), sharding=shardings[places[0]]))
            wider = [key for key in ("master", "remainder") if key in states[places[0]]]
            self._parts.append(Part(places, found[-1], [*_KEYS, *wider[:1]]))
        order = {id(p): i for i, p in enumerate(state)}
        self._owners, self._members = list(order), list(map(id, params))
        self._places = [order[i] for i in self._members]
        return found
