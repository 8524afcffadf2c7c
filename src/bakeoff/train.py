"""Training from Python: `train(config)` runs a recipe, `load_run(folder)` gives the trained model back."""

from bakeoff.apps.train import (
    RECIPES,
    CheckpointError,
    Config,
    ConfigError,
    DataError,
    Result,
    TrainError,
    load_run,
    recipe,
    resolve,
    to_toml,
    train,
)

__all__ = [
    "RECIPES",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Result",
    "TrainError",
    "load_run",
    "recipe",
    "resolve",
    "to_toml",
    "train",
]
