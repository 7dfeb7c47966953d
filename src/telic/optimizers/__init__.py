"""Optimizers by name, their hyperparameters in state, several of them by path, and learning-rate schedules.

Every optimizer here is Optax's. Its learning rate (and weight decay) lives in the optimizer state by name, so that it
can be logged and changed while training: see `hyperparams` and `set_hyperparams`.
"""

from telic.optimizers.clipping import qk_clip
from telic.optimizers.paths import by_path
from telic.optimizers.schedules import (
    constant,
    constant_with_warmup,
    cosine,
    cosine_decay,
    cosine_with_min_lr,
    cosine_with_restarts,
    exponential_decay,
    inverse_sqrt,
    linear,
    linear_decay,
    polynomial,
    polynomial_decay,
    warmup_cosine,
    warmup_stable_decay,
)
from telic.optimizers.state import hyperparams, set_hyperparams
from telic.optimizers.table import (
    NAMES,
    adabelief,
    adafactor,
    adagrad,
    adam,
    adamw,
    get,
    lamb,
    lion,
    muon,
    noisy_sgd,
    radam,
    rmsprop,
    sgd,
    yogi,
)

__all__ = [
    "NAMES",
    "get",
    "by_path",
    "qk_clip",
    "hyperparams",
    "set_hyperparams",
    "adabelief",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "lamb",
    "lion",
    "muon",
    "noisy_sgd",
    "radam",
    "rmsprop",
    "sgd",
    "yogi",
    "constant",
    "linear_decay",
    "exponential_decay",
    "cosine_decay",
    "polynomial_decay",
    "warmup_cosine",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "constant_with_warmup",
    "warmup_stable_decay",
]
