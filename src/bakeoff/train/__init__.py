"""Training: `train(config)` runs a recipe, `load_run(folder)` gives the trained model back."""

from bakeoff.train.checkpoint import CheckpointError, load_run
from bakeoff.train.config import Config, ConfigError, resolve, to_toml
from bakeoff.train.data import DataError
from bakeoff.train.device import TrainError
from bakeoff.train.loop import train
from bakeoff.train.recipes import RECIPES, recipe
from bakeoff.train.run import Result

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
