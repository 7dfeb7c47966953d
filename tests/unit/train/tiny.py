"""A small objective with every kind of loss, batches that carry every kind of poison, and tools to compare bits."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from telic.contract import Aux, Objective, Step
from telic.ema import EMASpec
from telic.mean import Mean, Rows, Terms
from telic.train.step import TrainStep

HEALTHY, LOSS_NAN, LOSS_INF, GRADIENT, VARIABLES, EFFECTS, OPTIMIZER, NEGATIVE_MASS = range(8)


class Tiny(Objective):
    """Linear regression with a counter collection. `kind` says what its loss is made of.

    Batches: x [n, 3], y [n], m [n] masses of the fit, k [n] masses of the second term, poison int scalar or [n].
    """

    def __init__(self, kind: str, *, dtype: Any = jnp.float32, ema: EMASpec | None = None, poisoned: bool = False):
        self.kind = kind
        self.dtype = dtype
        self.ema = ema
        self.poisoned = poisoned
        self.traced = 0

    def init(self, key: Any, variables: Any = None) -> Any:
        del variables
        w = jax.random.normal(key, (3,)).astype(self.dtype)
        params = {"w": w, "b": jnp.asarray([0.25, -0.5, 0.75, 1.0], self.dtype)}
        if not self.poisoned:
            return {"params": params}
        return {"params": params, "count": {"n": jnp.zeros((), jnp.float32)}, "seen": {"e": jnp.zeros((), jnp.float32)}}

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        self.traced += 1
        params = variables["params"]
        x = batch["x"]
        features = jnp.concatenate([jnp.ones_like(x[:, :1]), x**2], 1)
        out = x @ params["w"].astype(x.dtype) + features @ params["b"].astype(x.dtype)
        error = (out - batch["y"]) ** 2
        statistics = self.statistics(params, batch, out, error)
        if not self.poisoned:
            return statistics
        poison = jnp.max(batch["poison"])
        extra = jnp.where(poison == LOSS_NAN, jnp.nan, jnp.where(poison == LOSS_INF, jnp.inf, 0))
        extra += jnp.where(poison == OPTIMIZER, 1000.0, 0)
        # Finite value, NaN derivative, of one leaf alone.
        b = params["b"][0].astype(jnp.float32)
        extra += jnp.where(poison == GRADIENT, jnp.sqrt(jnp.where(poison == GRADIENT, b * 0, 1.0)), 0)
        sign = jnp.where(poison == NEGATIVE_MASS, -1, 1)
        statistics = shifted(statistics, extra, sign)
        aux = Aux(
            variables={"count": {"n": variables["count"]["n"] + jnp.where(poison == VARIABLES, jnp.nan, 1)}},
            effects=jnp.where(poison == EFFECTS, jnp.inf, 1.0),
            metrics={"error": error.mean()},
        )
        return statistics, aux

    def statistics(self, params: Any, batch: Any, out: Any, error: Any) -> Any:
        m, k = batch["m"], batch["k"]
        fit = Mean((error * m).sum(), m.sum())
        other = Mean((jnp.abs(out) * k).sum(), k.sum())
        match self.kind:
            case "mean":
                return fit
            case "array":
                return error
            case "weighted":
                return Mean.of(error, m)
            case "penalised":
                return fit + 0.1 * (params["w"] ** 2).sum()
            case "scalar":
                return error.mean()
            case "terms":
                return Terms({"fit": (1.0, fit), "other": (0.5, other)})
            case "whole":
                # Integer masses, and sums that are not floating-point.
                count = (m > 0).sum()
                return Terms({"fit": (1.0, Mean(jnp.where(m > 0, error, 0).sum(), count)), "other": (2.0, other)})
            case _:
                raise AssertionError(self.kind)

    def apply_effects(self, variables: Any, effects: Any) -> Any:
        return {"seen": {"e": variables["seen"]["e"] + effects}}


class Own(Tiny):
    """Statistics of its own: float sums, an integer count, and a float16 sum, whose reduction is not linear."""

    def statistics(self, params: Any, batch: Any, out: Any, error: Any) -> Any:
        m = batch["m"]
        return {
            "square": (error * m).sum(),
            "mass": m.sum(),
            "count": (m > 0).sum(),
            "half": (batch["k"].sum() * 0.25).astype(jnp.float16),
        }

    def reduce_loss(self, statistics: Any) -> Any:
        mass = statistics["mass"]
        mean = jnp.where(mass > 0, statistics["square"] / jnp.where(mass > 0, mass, 1), 0)
        scale = 1 + statistics["count"] * 0.01 + statistics["half"] * 0.01
        return jnp.sqrt(mean + 0.5) * scale, mass > 0


class RootMean(Tiny):
    """Returns a Mean and reduces it by a root: not linear, so windows must pool before they reduce."""

    def statistics(self, params: Any, batch: Any, out: Any, error: Any) -> Any:
        return Mean((error * batch["m"]).sum(), batch["m"].sum())

    def reduce_loss(self, statistics: Any) -> Any:
        return jnp.sqrt(statistics.value() + 1e-3), statistics.has_data()


class Contrast(Tiny):
    """InfoNCE over the rows of the whole window."""

    def statistics(self, params: Any, batch: Any, out: Any, error: Any) -> Any:
        x = batch["x"]
        left = jnp.stack([out, (x**2) @ params["w"].astype(x.dtype)], 1)
        right = jnp.stack([batch["y"], x @ params["b"][1:].astype(x.dtype)], 1)
        return {"left": Rows(left), "right": Rows(right)}

    def reduce_loss(self, statistics: Any) -> Any:
        logits = statistics["left"].values @ statistics["right"].values.T
        rows = logits.shape[0]
        return -jax.nn.log_softmax(logits)[jnp.arange(rows), jnp.arange(rows)].mean(), jnp.asarray(True)


def shifted(statistics: Any, extra: Any, sign: Any) -> Any:
    """Give statistics whose first total is shifted, and whose masses take a sign."""
    match statistics:
        case Mean():
            return Mean(statistics.total + extra, statistics.mass * sign)
        case Terms():
            return Terms({n: (w, shifted(m, extra, sign)) for n, (w, m) in statistics.terms.items()})
        case dict():
            return {**statistics, "square": statistics["square"] + extra} if "square" in statistics else statistics
        case _:
            return statistics + extra


def batch_of(seed: int, rows: int, *, masses: Any = None, poison: int | None = None, dtype: Any = np.float32) -> Any:
    """Give a random batch; masses are small multiples of 0.25, zeros among them."""
    rng = np.random.default_rng(seed)
    made = {
        "x": rng.normal(size=(rows, 3)).astype(dtype),
        "y": rng.normal(size=rows).astype(dtype),
        "m": (rng.integers(0, 5, rows) * 0.25 if masses is None else np.broadcast_to(masses, (rows,))).astype(dtype),
        "k": (rng.integers(0, 3, rows) * 0.5).astype(dtype),
    }
    if poison is not None:
        made["poison"] = np.full(rows, poison, np.int32)
    return made


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into pieces of these numbers of rows."""
    ends = np.cumsum(sizes)
    return [jax.tree.map(lambda x, a=a, n=n: x[a - n : a], batch) for a, n in zip(ends, sizes, strict=True)]


def recorder() -> optax.GradientTransformationExtraArgs:
    """Give SGD whose state is the last gradient."""
    return optax.with_extra_args_support(optax.chain(optax.trace(0.0), optax.scale(-1.0)))


def step_of(objective: Objective, optimizer: Any = None, **options: Any) -> TrainStep:
    made = optax.with_extra_args_support(recorder() if optimizer is None else optimizer)
    return TrainStep(objective, made, jax.random.key(0), **options)


def bits(tree: Any) -> dict[str, bytes]:
    """Give the bytes of every leaf, by name."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = leaf
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key):
            value = jax.random.key_data(leaf)
        out[jax.tree_util.keystr(path)] = np.asarray(value).tobytes()
    return out


def changed(before: Any, after: Any) -> set[str]:
    """Give the names of the leaves whose bits differ."""
    a, b = bits(before), bits(after)
    assert set(a) == set(b)
    return {name for name in a if a[name] != b[name]}
