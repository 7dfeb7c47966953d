"""Programs for the tests of recipes: small enough that a run takes a moment."""

LINE = """
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import telic
from telic.config import Run
from telic.data import columns


@dataclass(frozen=True)
class Settings:
    steps: int = 6
    learning_rate: float = 0.1
    seed: int = 0
    held_out: int = 8
    averaged: bool = False
    apart: bool = False


class Line(telic.Objective):
    ema = telic.EMASpec(decay=0.5)

    def init(self, key, variables=None):
        return {"params": {"w": jnp.zeros((2, 1))}}

    def loss(self, variables, batch, step):
        errors = (batch["inputs"] @ variables["params"]["w"] - batch["targets"]) ** 2
        return telic.Mean.of(errors), telic.Aux()

    def evaluate(self, variables, batch, step):
        return telic.artifacts.Scalars({"size": telic.Mean(jnp.sum(variables["params"]["w"] ** 2), jnp.asarray(1.0))})


def build(settings: Settings) -> Run:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    table = {"inputs": x, "targets": x @ np.asarray([[1.0], [-2.0]], np.float32)}
    return Run(
        trainer=telic.Trainer(Line(), telic.optimizers.sgd(settings.learning_rate), key=settings.seed),
        data=columns(table, batch=8, held_out=settings.held_out),
        steps=settings.steps,
        checkpoint_every=2,
        log_every=2,
        averaged=settings.averaged,
        validation=[table] if settings.apart else None,
    )
"""
