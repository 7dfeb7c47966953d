"""Small problems with everything that a mesh could get wrong, run in processes whose devices are simulated.

Each has windows, an average, a batch that must be rejected everywhere because of one row, and an evaluation whose rows
the devices do not divide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import telic
from telic.data import columns
from telic.models import Decoder, DecoderConfig, DiT
from telic.objectives import DiffusionObjective, LMObjective
from telic.objectives.diffusion import Flow, FlowVelocity, Process

BATCH = 16
SHOWN = 4
"""Updates between two losses that are compared: with two batches to each, one dispatch takes all of them."""

FIFTY = 52
"""At least fifty updates, and a multiple of those between losses: another length of a dispatch is another program."""

SPOILT = 37
"""A record that is not finite: whichever device gets it, its whole batch is rejected."""


@dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
      objective: Makes the objective.
      data: Columns.
      optimizer: The optimizer.
      rules: The layout's rules for a mesh with tensor=2.
      metrics: Metrics beside the loss.
    """

    objective: Callable[[], Any]
    data: Any
    optimizer: Any
    rules: dict[str, Any]
    metrics: tuple[str, ...] = ()


class Net(nn.Module):
    """A convolution, BatchNorm, dropout and two dense layers."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Conv(8, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.relu(nn.Dense(32)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


def digits() -> Problem:
    """Classify digits, with BatchNorm and accuracy."""
    found = telic.data.digits_split()
    images = np.asarray(found["inputs"][:198, ::2, ::2], np.float32).copy()
    images[SPOILT, 3, 3] = np.nan
    data = {"inputs": images, "targets": found["targets"][:198]}

    def objective() -> Any:
        made = telic.supervised(Net(), "softmax_cross_entropy")
        made.ema = telic.EMASpec(decay=0.9)
        return made

    optimizer = telic.optimizers.sgd(0.05, momentum=0.9)
    return Problem(objective, data, optimizer, {"params/Dense_*/kernel": ("fsdp", "tensor")}, ("accuracy",))


def decoder() -> Problem:
    """Predict the next token, some tokens masked, so that no two rows weigh the same."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 32, (198, 13)).astype(np.int32)
    for row in range(198):
        tokens[row, rng.integers(6, 14) :] = 0
    config = DecoderConfig(vocab_size=32, d_model=16, num_layers=1, num_heads=2, d_ff=32, max_length=16)

    def objective() -> Any:
        made = LMObjective(Decoder(config), pad_id=0)
        made.ema = telic.EMASpec(decay=0.9)
        return made

    rules = {"params/**/kernel": ("fsdp", "tensor")}
    return Problem(objective, {"tokens": tokens}, telic.optimizers.adamw(1e-3), rules)


def dit() -> Problem:
    """Denoise small images; every row draws its own noise."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(198, 8, 8, 1)).astype(np.float32)
    images[SPOILT, 0, 0] = np.inf
    labels = rng.integers(0, 4, 198).astype(np.int32)

    def objective() -> Any:
        model = DiT(patch=4, dim=32, depth=1, heads=4, classes=5)
        process = Process(Flow(), FlowVelocity())
        return DiffusionObjective(
            model,
            process,
            conditions={"label": 4},
            data_range=None,
            ema_decay=lambda updates: jnp.minimum(0.9, updates / 10),
        )

    rules = {"params/blocks_*/**/kernel": ("fsdp", "tensor")}
    # Its gates begin at zero, and with the usual epsilon Adam makes whole steps of the rounding of what they hide.
    optimizer = telic.optimizers.adamw(1e-3, eps=1e-4)
    return Problem(objective, {"image": images, "label": labels}, optimizer, rules)


PROBLEMS = {"digits": digits, "decoder": decoder, "dit": dit}

MESHES: dict[str, telic.MeshSpec | None] = {
    "one": None,
    "data": telic.MeshSpec(data=8),
    "fsdp": telic.MeshSpec(data=1, fsdp=8),
    "data x fsdp": telic.MeshSpec(data=2, fsdp=4),
    "fsdp x tensor": telic.MeshSpec(data=2, fsdp=2, tensor=2),
}


def layout(problem: Problem, mesh: telic.MeshSpec | None) -> telic.Layout | None:
    """Give the layout of a mesh: leaves are split however small they are."""
    if mesh is None:
        return None
    return telic.Layout(problem.rules if mesh.tensor > 1 else {}, smallest=64, allow_replicated=0.5)


def trainer(problem: Problem, mesh: telic.MeshSpec | None, **options: Any) -> telic.Trainer:
    """Give the trainer of a problem on a mesh."""
    return telic.Trainer(
        problem.objective(),
        problem.optimizer,
        key=1,
        **{"accumulate": 2, "mesh": mesh, "layout": layout(problem, mesh), **options},
    )


def train(problem: Problem, mesh: telic.MeshSpec | None, steps: int, **options: Any) -> dict[str, Any]:
    """Train and evaluate; give what must not depend on the mesh, and how many bytes lie on a device, and in all."""
    made = trainer(problem, mesh, **options)
    # 148 to train on, 50 to evaluate: three batches, and two rows that eight devices do not divide.
    data = columns(problem.data, batch=BATCH, seed=3, held_out=50)
    losses: list[float] = []
    loop = made.loop(log=0, metrics=problem.metrics)
    loop.handle_event("step_completed", lambda s: losses.append(s.metrics["loss"]), telic.every(SHOWN))
    end = loop.run(data, steps=steps)
    state = end.step_state
    scores = made.evaluate(data, state=state, metrics=problem.metrics, averaged=True)
    return {
        "losses": losses,
        "metrics": {name: float(value) for name, value in end.metrics.items()},
        "scores": scores,
        "updates": int(state.updates),
        "attempts": int(state.attempts),
        "rejected": int(state.rejections.total),
        "bytes": [
            sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.variables)),
            sum(leaf.nbytes for leaf in jax.tree.leaves(state.variables)),
        ],
    }
