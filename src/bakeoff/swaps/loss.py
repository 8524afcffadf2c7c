"""The loss of a Hugging Face causal language model from its hidden states, without making all logits.

In training with labels, the model's own forward runs with a head that passes hidden states through and a loss
that takes them. In every other case (evaluation, generation, `logits_to_keep`, tuples instead of named
outputs, hooks on the head) it runs as ever.
"""

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bakeoff.nn.hooks import hooked
from bakeoff.swaps.probe import agrees, draw, quiet
from bakeoff.swaps.replacement import Found, note

__all__ = ["find_loss"]

_CAP = "final_logit_softcapping"
_IGNORED = -100
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the library's causal language models are called."""


def find_loss(module: nn.Module) -> Found | str | None:
    """What replaces the loss of a causal language model; why nothing does; None where it is no such model."""
    owns = "lm_head" in module._modules
    if not owns and any(_is_causal(below) for below in module.modules() if below is not module):
        return None  # a wrapper of one, as PEFT's, whose loss is the inner model's
    if not _is_causal(module):
        if not owns or "labels" not in _taken(module):
            return None
        return f"its class is called neither {' nor '.join(f'...{end}' for end in _CAUSAL)}"
    if importlib.util.find_spec("bakeoff.ops.linear_cross_entropy") is None:
        return "this version has no op linear_cross_entropy"
    head = getattr(module, "lm_head", None)
    reason = _unfit(head)
    if reason is not None:
        return reason
    if not _taken(module) >= {"labels", "logits_to_keep"}:
        return "its forward takes no labels or no logits_to_keep"
    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError as error:
        return f"the library's causal loss isn't where it was ({error})"
    if module.loss_function is not ForCausalLMLoss:
        called = getattr(module.loss_function, "__name__", module.loss_function)
        return f"its loss_function is {called}, not the library's ForCausalLMLoss"
    return _does_more(module) or Found(("loss",), ("linear_cross_entropy",), _forward, ())


def _is_causal(module: nn.Module) -> bool:
    return type(module).__name__.endswith(_CAUSAL)


def _taken(module: nn.Module) -> set[str]:
    """What its forward takes, by name."""
    return set(inspect.signature(type(module).forward).parameters)


def _unfit(head: Any) -> str | None:
    """Why a head can't be replaced by its weight."""
    if head is None:
        return "it has no lm_head"
    if type(head) is not nn.Linear:
        kind = f"{type(head).__module__}.{type(head).__name__}"  # others are called Linear, too
        return f"its lm_head is a {kind}, not a plain nn.Linear whose weight can be read"
    if not head.weight.is_floating_point() or head.weight.itemsize < 2:
        return f"its lm_head's weight is {head.weight.dtype}"
    if hooked(head):
        return "its lm_head has hooks, which would not be called"
    return None


class _View:
    """A model as its own forward sees it, with some attributes in the place of its own."""

    def __init__(self, model: Any, /, **own: Any) -> None:
        self._model = model
        for name, value in own.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Without:
    """A configuration without a cap on logits, which the loss takes care of."""

    def __init__(self, config: Any, /, **own: Any) -> None:
        self._config = config
        setattr(self, _CAP, None)
        for name, value in own.items():
            setattr(self, name, value)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _PassOn:
    """A head that passes hidden states through; in everything else the head itself."""

    def __init__(self, head: Any) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def _loss_of(head: Any, cap: float | None) -> Callable[..., Tensor]:
    """The library's causal loss as a function of hidden states."""
    from bakeoff.ops.linear_cross_entropy import linear_cross_entropy

    def loss(
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        del vocab_size, kwargs  # as the library's does
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        assert shift_labels is not None
        hidden, target = logits.flatten(0, -2), shift_labels.reshape(-1).to(logits.device)
        if hidden.dtype != head.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)  # as it entered the head: what widens logits has widened it
        out: Tensor = linear_cross_entropy(
            hidden, head.weight, target, bias=head.bias, ignore_index=ignore_index, softcap=cap,
            reduction="mean" if num_items_in_batch is None else "sum",
        )  # fmt: skip
        out = out.float()  # as the library's, also in float64
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(out.device)
        return out if num_items_in_batch is None else out / num_items_in_batch

    return loss


def _forward(cls: Any) -> Callable[..., Any]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    original = cls.forward
    places = [name for name in inspect.signature(original).parameters if name != "self"]
    first = min(places.index("labels"), places.index("logits_to_keep"))

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        head, config = module.lm_head, module.config
        keep, named = kwargs.get("logits_to_keep", 0), kwargs.get("return_dict")
        named = config.return_dict if named is None else named
        fused = module.training and kwargs.get("labels") is not None and len(args) <= first
        fused = fused and isinstance(keep, int) and keep == 0 and named is not False
        fused = fused and module.loss_function is ForCausalLMLoss  # which may have been set since the swap
        if not fused or type(head) is not nn.Linear or hooked(head):
            return original(module, *args, **kwargs)
        note("loss")
        cap = getattr(config, _CAP, None)
        view = _View(
            module, lm_head=_PassOn(head), loss_function=_loss_of(head, cap), config=_Without(config)
        )
        out = original(view, *args, **kwargs)
        return type(out)(**{name: value for name, value in out.items() if name != "logits"})

    return forward


class _Body:
    """Stands for what is below the head: called, it and its decoder give these hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden, self.decoder = hidden, self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Output":
        return _Output(self._hidden)


class _Output:
    """A body's output by index and by name; what isn't asked for, such as caches and attentions, is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, at: Any) -> Any:
        return (self.last_hidden_state,)[at]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _does_more(module: Any) -> str | None:
    """Why the model's forward, in training, is not its loss of what its head makes of its last hidden
    states."""
    forward, vocabulary, width = type(module).forward, 7, 6
    with quiet():
        hidden = draw(2, 5, width)
        head = nn.Linear(width, vocabulary, bias=True, device="meta")
        head.weight, head.bias = nn.Parameter(draw(vocabulary, width)), nn.Parameter(draw(vocabulary))
        cap = getattr(module.config, _CAP, None)
        labels = torch.randint(vocabulary, (2, 5))
        labels[0, 2] = _IGNORED

        def losses(head: Any, loss: Any, config: Any, **more: Any) -> Tensor:
            body = dict.fromkeys(("model", module.base_model_prefix or "model"), _Body(hidden))
            view = _View(
                module, lm_head=head, loss_function=loss, config=config, vocab_size=vocabulary, training=True,
                **body,
            )  # fmt: skip
            return forward(view, input_ids=labels, labels=labels, **more).loss  # type: ignore[no-any-return]

        plain = {"vocab_size": vocabulary, "return_dict": True, "output_router_logits": False}
        small, bare = _Without(module.config, **{_CAP: cap, **plain}), _Without(module.config, **plain)
        for more in ({}, {"num_items_in_batch": 5}, {"shift_labels": labels}):
            try:
                theirs = losses(head, module.loss_function, small, **more)
            except Exception as error:  # noqa: BLE001
                return f"its forward fails on a small stand-in ({type(error).__name__}: {error})"
            try:
                ours = losses(_PassOn(head), _loss_of(head, cap), bare, **more)
            except Exception:  # noqa: BLE001
                ours = None  # as where it makes its loss itself, of logits
            if ours is None or not agrees(ours.view(1), theirs.view(1)):
                return "its forward does something to logits that linear_cross_entropy doesn't"
    return None
