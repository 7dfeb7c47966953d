"""Thin names of the one engine, for the first rungs of the ladder."""

import difflib
import inspect
from typing import Any

from jax.sharding import Mesh

from telic.compose.loops import Loop
from telic.compose.trainers import Trainer
from telic.contract import Objective
from telic.objectives import supervised
from telic.shard import Layout, MeshSpec
from telic.train.evaluation import EvalStep
from telic.train.step import TrainStep
from telic.types import Key


def make_trainer(model: Any, loss: Any, optimizer: Any, key: int | Key, options: dict[str, Any]) -> Trainer:
    """Give the trainer of a model, a loss and an optimizer; an unknown option is named."""
    known = [p for p in inspect.signature(Trainer.__init__).parameters if p not in ("self", "objective", "optimizer")]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown option {name!r}.{hint} Known: {', '.join(known)}")
    objective = loss if isinstance(loss, Objective) and model is None else supervised(model, loss)
    return Trainer(objective, optimizer, key=key, **options)


def train_step(model: Any, loss: Any, optimizer: Any, *, key: int | Key = 0, **options: Any) -> TrainStep:
    """Give the pure train step of a model, a loss and an optimizer: init(batch), step(state, batch), flush(state).

    Args:
      model: A Linen, NNX or Equinox module, or a pair (init, apply).
      loss: A loss by name, a loss function, or an objective function of four arguments.
      optimizer: A name, or an Optax transformation.
      key: Seed or PRNG key.
      **options: Those of `telic.Trainer`.
    """
    return make_trainer(model, loss, optimizer, key, options).train_step()


def trainer(model: Any, loss: Any, optimizer: Any, *, key: int | Key = 0, log: int = 50, **options: Any) -> Loop:
    """Give a loop that trains a model: ``trainer(model, "mean_squared_error", "adam").run(data, epochs=5)``.

    Args:
      model: A Linen, NNX or Equinox module, or a pair (init, apply).
      loss: A loss by name, a loss function, a list of (loss, weight), or an objective function of four arguments.
      optimizer: A name, or an Optax transformation.
      key: Seed or PRNG key.
      log: Batches between log lines; 0 writes none.
      **options: Those of `telic.Trainer`.
    """
    return make_trainer(model, loss, optimizer, key, options).loop(log=log)


def eval_step(model: Any, loss: Any = None) -> EvalStep:
    """Give the pure evaluation step of a model: predictions in inference mode, and the loss where one is given."""
    return EvalStep(model if isinstance(model, Objective) else supervised(model, loss))


def evaluator(
    model: Any,
    loss: Any = None,
    *,
    log: int = 50,
    mesh: MeshSpec | Mesh | None = None,
    layout: Layout | None = None,
) -> Loop:
    """Give a loop that evaluates a model: ``evaluator(model).metric("accuracy").run(data, state=variables)``.

    Args:
      model: A model, or an Objective.
      loss: A loss to report; None reports metrics only.
      log: Batches between log lines; 0 writes none.
      mesh: Devices to evaluate on, as for `telic.Trainer`: every example once, whatever their number.
      layout: Where on the mesh the weights lie.
    """
    made = Loop(eval_step(model, loss)).drive(mesh=mesh, layout=layout)
    if isinstance(log, bool) or not isinstance(log, int) or log < 0:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"log is the number of batches between lines, 0 for none, got {log!r}")
    return made.log(log) if log else made
