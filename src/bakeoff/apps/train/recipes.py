"""Recipes: Python functions that return a Config. ``bakeoff train RECIPE`` starts from one."""

import difflib
from collections.abc import Callable

import msgspec

from bakeoff.apps.train.config import Config, Optim, Select, SettingError, Train
from bakeoff.models import byte_spectral, llm_med, longnet, titan_mac

__all__ = ["RECIPES", "recipe"]


def llm_med_tiny() -> Config:
    """About a minute on 4 CPU cores: the schedule follows the clock. With QK-norm, and Muon."""
    return Config(
        recipe="llm-med-tiny",
        model=llm_med.Config.sizes("tiny", qk_norm=True),
        optim=Optim(name="muon", lr=3e-3, warmup=0.05),
        train=Train(steps=0, max_seconds=60.0, batch_size=8, log_every=50, checkpoint_every=0),
        select=Select(budget_s=20.0),
    )


def llm_med_small() -> Config:
    """d_model 384 and 6 layers, QK-norm, a convolution of 4 taps in front of attention's projections, and
    Muon: the baseline that another model has to beat; some minutes on one GPU."""
    return Config(
        recipe="llm-med",
        model=llm_med.Config.sizes("small", qk_norm=True, conv=4),
        optim=Optim(name="muon", lr=2e-3),
        train=Train(steps=2000, batch_size=48, eval_every=500),
    )


def llm_med_published() -> Config:
    """llm-med as it was published: neither QK-norm nor convolution, and AdamW."""
    return msgspec.structs.replace(
        llm_med_small(),
        recipe="llm-med-published",
        model=llm_med.Config.sizes("small"),
        optim=Optim(lr=1e-3),
    )


def llm_med_base() -> Config:
    """d_model 768, 12 layers, rows of 2048 bytes; a GPU's afternoon."""
    return Config(
        recipe="llm-med-base",
        model=llm_med.Config.sizes("base"),
        optim=Optim(lr=6e-4, warmup=0.01),
        train=Train(steps=20_000, batch_size=32, log_every=50, eval_every=1000, checkpoint_every=1000),
    )


def byte_spectral_tiny() -> Config:
    """As llm-med-tiny, with filters of 64 taps in place of attention."""
    base = llm_med_tiny()
    model = byte_spectral.Config.sizes("tiny", filter="taps", taps=64)
    return msgspec.structs.replace(base, recipe="byte-spectral-tiny", model=model)


def byte_spectral_small() -> Config:
    """As llm-med, with filters of 32 taps in place of attention in four of six blocks."""
    base = llm_med_small()
    model = byte_spectral.Config.sizes("small", filter="taps", taps=32, attention_every=3, qk_norm=True)
    return msgspec.structs.replace(base, recipe="byte-spectral", model=model)


def titan_mac_tiny() -> Config:
    """As llm-med-tiny by AdamW, attending within segments of 64 bytes, with memories of a chunk of 64 beyond
    them."""
    base = _by_adamw(llm_med_tiny())
    return msgspec.structs.replace(base, recipe="titan-mac-tiny", model=titan_mac.Config.sizes("tiny"))


def titan_mac_seed() -> Config:
    """d_model 512, 6 layers, 8 memories a layer, segments of 512 of rows of 2,048 bytes."""
    return Config(
        recipe="titan-mac",
        model=titan_mac.Config.sizes("seed"),
        optim=Optim(lr=1e-3),
        train=Train(steps=2000, batch_size=16, eval_every=500),
    )


def longnet_tiny() -> Config:
    """As llm-med-tiny by AdamW, attending to 64 bytes densely and to every fourth of 256."""
    base = _by_adamw(llm_med_tiny())
    return msgspec.structs.replace(base, recipe="longnet-tiny", model=longnet.Config.sizes("tiny"))


def longnet_small() -> Config:
    """Rows of 4,096 bytes: 256 densely, every fourth of 1,024, every 16th of 4,096."""
    return Config(
        recipe="longnet",
        model=longnet.Config.sizes("small"),
        optim=Optim(lr=1e-3),
        train=Train(steps=2000, batch_size=12, eval_every=500),
    )


def _by_adamw(config: Config) -> Config:
    """`config` with AdamW, which these models were tried with."""
    return msgspec.structs.replace(config, optim=msgspec.structs.replace(config.optim, name="adamw"))


RECIPES: dict[str, Callable[[], Config]] = {
    "llm-med": llm_med_small,
    "llm-med-tiny": llm_med_tiny,
    "llm-med-published": llm_med_published,
    "llm-med-base": llm_med_base,
    "byte-spectral": byte_spectral_small,
    "byte-spectral-tiny": byte_spectral_tiny,
    "titan-mac": titan_mac_seed,
    "titan-mac-tiny": titan_mac_tiny,
    "longnet": longnet_small,
    "longnet-tiny": longnet_tiny,
}


def recipe(name: str) -> Config:
    """The named recipe's Config. Raises SettingError, naming the nearest, when there is none."""
    try:
        return RECIPES[name]()
    except KeyError:
        close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? There" if close else "there"
        raise SettingError(f"no recipe {name!r}; {hint} are {', '.join(RECIPES)}") from None
