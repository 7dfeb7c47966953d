"""Telic trains JAX models from objective functions: say what to optimise, get a training run.

A user climbs only as far as the problem needs; every rung runs on the same engine:

1. a loss by name: `trainer`
2. a loss function: `trainer`, `train_step`
3. an objective function, with several forward passes or a penalty: `objective`
4. an objective with variables and statistics of its own: `Objective`, `Trainer`
5. any step at all: `Loop`

This module is the table of contents. Names are loaded when first touched, so ``import telic`` loads neither JAX nor
NumPy and does nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    # What to optimise.
    "Objective": "telic.contract",
    "objective": "telic.contract",
    "supervised": "telic.objectives",
    "Mean": "telic.mean",
    "Terms": "telic.mean",
    "Rows": "telic.mean",
    "Aux": "telic.contract",
    "Step": "telic.contract",
    "mean_loss": "telic.contract",
    "scalar_loss": "telic.contract",
    "EMASpec": "telic.ema",
    "paths": "telic.tree",
    # What trains it.
    "Trainer": "telic.compose",
    "trainer": "telic.compose",
    "evaluator": "telic.compose",
    "train_step": "telic.compose",
    "eval_step": "telic.compose",
    "find_learning_rate": "telic.compose",
    "TrainState": "telic.train.state",
    # The loop: what a step and a handler see and say.
    "Loop": "telic.compose",
    "LoopState": "telic.loop.state",
    "serialize_state": "telic.loop.serialize",
    "deserialize_state": "telic.loop.serialize",
    "Result": "telic.contract",
    "CONTINUE": "telic.loop.status",
    "HALT_EPOCH": "telic.loop.status",
    "HALT_LOOP": "telic.loop.status",
    # What survives the process.
    "Checkpoints": "telic.checkpoints",
    # Where it runs.
    "MeshSpec": "telic.shard",
    "Layout": "telic.shard",
    # Filters: when a handler fires.
    "always": "telic.loop.filters",
    "first": "telic.loop.filters",
    "last": "telic.loop.filters",
    "every": "telic.loop.filters",
    "once": "telic.loop.filters",
    "before": "telic.loop.filters",
    "after": "telic.loop.filters",
    "every_seconds": "telic.loop.filters",
    "when": "telic.loop.filters",
}
"""Where each public name lives."""

_MODULES = (
    *("artifacts", "config", "data", "errors", "interop", "losses", "metrics", "models", "objectives", "optimizers"),
    *("testing", "trackers"),
)
"""The public modules; each is also imported as ``telic.<name>``."""

__all__ = [*_HOMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll] one table; test_exports.py checks it

if TYPE_CHECKING:
    # The same table once more, for type checkers and editors; test_exports.py compares the two.
    from telic import artifacts as artifacts
    from telic import config as config
    from telic import data as data
    from telic import errors as errors
    from telic import interop as interop
    from telic import losses as losses
    from telic import metrics as metrics
    from telic import models as models
    from telic import objectives as objectives
    from telic import optimizers as optimizers
    from telic import testing as testing
    from telic import trackers as trackers
    from telic.checkpoints import Checkpoints as Checkpoints
    from telic.compose import Loop as Loop
    from telic.compose import Trainer as Trainer
    from telic.compose import eval_step as eval_step
    from telic.compose import evaluator as evaluator
    from telic.compose import find_learning_rate as find_learning_rate
    from telic.compose import train_step as train_step
    from telic.compose import trainer as trainer
    from telic.contract import Aux as Aux
    from telic.contract import Objective as Objective
    from telic.contract import Result as Result
    from telic.contract import Step as Step
    from telic.contract import mean_loss as mean_loss
    from telic.contract import objective as objective
    from telic.contract import scalar_loss as scalar_loss
    from telic.ema import EMASpec as EMASpec
    from telic.loop.filters import after as after
    from telic.loop.filters import always as always
    from telic.loop.filters import before as before
    from telic.loop.filters import every as every
    from telic.loop.filters import every_seconds as every_seconds
    from telic.loop.filters import first as first
    from telic.loop.filters import last as last
    from telic.loop.filters import once as once
    from telic.loop.filters import when as when
    from telic.loop.serialize import deserialize_state as deserialize_state
    from telic.loop.serialize import serialize_state as serialize_state
    from telic.loop.state import LoopState as LoopState
    from telic.loop.status import CONTINUE as CONTINUE
    from telic.loop.status import HALT_EPOCH as HALT_EPOCH
    from telic.loop.status import HALT_LOOP as HALT_LOOP
    from telic.mean import Mean as Mean
    from telic.mean import Rows as Rows
    from telic.mean import Terms as Terms
    from telic.objectives import supervised as supervised
    from telic.shard import Layout as Layout
    from telic.shard import MeshSpec as MeshSpec
    from telic.train.state import TrainState as TrainState
    from telic.tree import paths as paths


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"telic.{name}")
    else:
        from telic.errors import closest  # here, so that the table of contents imports nothing

        hint = "" if name.startswith("_") else closest(name, __all__)
        raise AttributeError(f"module 'telic' has no attribute {name!r}.{hint}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
