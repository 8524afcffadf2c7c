"""Training: `train(config)` runs a recipe, `load_run(folder)` gives the trained model back."""

from bakeoff.apps.train.checkpoint import CheckpointError, load_run
from bakeoff.apps.train.config import Config, ConfigError, SettingError, resolve, to_toml
from bakeoff.apps.train.data import DataError
from bakeoff.apps.train.loop import train
from bakeoff.apps.train.recipes import RECIPES, recipe
from bakeoff.apps.train.result import Result, TrainError

__all__ = [
    "RECIPES",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Result",
    "SettingError",
    "TrainError",
    "load_run",
    "recipe",
    "resolve",
    "to_toml",
    "train",
]
