"""The configuration of a run.

`sections` says what can be set. `resolve` takes a recipe's Config, lays a TOML file over it, then overrides
such as ``train.steps=100``, and validates the result. `to_toml` writes a Config so that reading it gives the
same Config.
"""

from bakeoff.apps.train.config.layers import resolve
from bakeoff.apps.train.config.sections import (
    Config,
    ConfigError,
    Data,
    Metrics,
    Optim,
    Parallel,
    Select,
    SettingError,
    Train,
    to_toml,
    to_tree,
)
from bakeoff.apps.train.config.validate import from_saved, from_tree

__all__ = [
    "Config",
    "ConfigError",
    "Data",
    "Metrics",
    "Optim",
    "Parallel",
    "Select",
    "SettingError",
    "Train",
    "from_saved",
    "from_tree",
    "resolve",
    "to_toml",
    "to_tree",
]
