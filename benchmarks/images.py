"""Diffusion and JEPA against steps one would write by hand, and a sampler against its network alone.

A transformer of 3 blocks, width 64, on 28 × 28 images in patches of 7; batch 32, Adam. Both sides run the same model on
the same batches in one process and take turns. The sampler's side is one compiled loop of deterministic steps, and the
other the bare jitted network, called as often.

    python -m benchmarks.images
    python -m benchmarks.images --rounds 15 --steps 20
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import sides, timing
from telic.models import DiT, ViT, ViTPredictor
from telic.objectives import DiffusionObjective, JepaObjective
from telic.objectives.jepa import MultiBlockMask, layer_normed

BATCH, GRID = 32, (4, 4)


def batches_of(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    made = rng.uniform(-1, 1, (steps, BATCH, 28, 28, 1)).astype(np.float32)
    return [{"image": images, "label": rng.integers(0, 10, BATCH).astype(np.int32)} for images in made]


def flow_by_hand(model: DiT, params: Any, batches: list[dict[str, np.ndarray]]) -> timing.Side:
    """Flow matching as in a tutorial: one draw of times, noise and dropped labels, one squared error."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        data, keys = batch["image"], jax.random.split(key, 3)
        t = jax.nn.sigmoid(jax.random.normal(keys[0], (BATCH,)))
        noise = jax.random.normal(keys[1], data.shape)
        label = jnp.where(jax.random.bernoulli(keys[2], 0.1, (BATCH,)), 10, batch["label"])
        x = (1 - t)[:, None, None, None] * data + t[:, None, None, None] * noise
        return jnp.mean((model.apply({"params": params}, x, 1000 * t, label) - (noise - data)) ** 2)

    return sides.by_hand(loss, params, batches)


def jepa_by_hand(objective: JepaObjective, params: Any, batches: list[dict[str, np.ndarray]]) -> timing.Side:
    """The same masks and models, the target encoder being the first weights: its move is left out of this side."""
    encoder, predictor = objective.models["encoder"], objective.models["predictor"]
    target = jax.tree.map(jnp.array, params["encoder"])

    def loss(params: Any, batch: Any, key: Any) -> Any:
        masks = objective.masks.draw(key, BATCH)

        def run(model: Any, weights: Any, **inputs: Any) -> Any:
            return model.forward({"params": weights}, inputs, train=True).prediction

        seen = run(encoder, params["encoder"], x=batch["image"], indices=masks.context)
        blocks = masks.targets.shape[1]
        found = run(
            predictor,
            params["predictor"],
            context=jnp.repeat(seen, blocks, axis=0),
            context_indices=jnp.repeat(masks.context, blocks, axis=0),
            target_indices=masks.targets.reshape(BATCH * blocks, -1),
        )
        wanted = layer_normed(run(encoder, target, x=batch["image"], indices=None))
        wanted = jnp.take_along_axis(wanted[:, None], masks.targets[..., None], axis=2).reshape(found.shape)
        d = jnp.abs(found - wanted)
        return jnp.where(d < 1, 0.5 * d**2, d - 0.5).mean()

    return sides.by_hand(loss, params, batches)


def sampler_sides(objective: DiffusionObjective, model: DiT, variables: Any, steps: int) -> dict[str, timing.Side]:
    """Give the sampler's side and that of its network alone."""
    label = np.zeros(BATCH, np.int32)
    sample = jax.jit(lambda v, key: objective.sample(v, key, conditions={"label": label}, num_steps=steps))
    forward = jax.jit(lambda v, x, t: model.apply(v, x, t, label))
    x, t = jnp.zeros((BATCH, 28, 28, 1)), jnp.zeros(BATCH)

    def sampled() -> float:
        began = time.perf_counter()
        timing.waited(sample(variables, jax.random.key(0)))
        return time.perf_counter() - began

    def bare() -> float:
        began = time.perf_counter()
        timing.waited([forward(variables, x, t) for _ in range(steps)])
        return time.perf_counter() - began

    return {"sampler": sampled, "network": bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10, help="steps of one round")
    options = parser.parse_args()
    batches = batches_of(options.steps)
    print(timing.machine())
    print(timing.heading())

    model = DiT(patch=7, dim=64, depth=3, heads=4, classes=11)
    # Without an average on either side: a hand-written loop has none.
    flow = DiffusionObjective(model, "flow", conditions={"label": 10}, ema_decay=None).bind(batches[0])
    variables = flow.init(jax.random.key(0))
    given = {
        "telic": sides.of_loop(sides.trainer(flow).loop(log=0), batches),
        "hand": flow_by_hand(model, jax.tree.map(jnp.array, variables["params"]), batches),
    }
    seconds = timing.take_turns(given, options.rounds)
    print(timing.ratio("flow matching step", seconds["telic"], seconds["hand"], aim=1.02, units=options.steps))

    masks = MultiBlockMask.for_grid(GRID, num_targets=2, target_scale=(0.2, 0.3))
    encoder = ViT(patch=7, dim=64, depth=3, heads=4)
    jepa = JepaObjective(encoder, ViTPredictor(GRID, dim=32, depth=2, heads=4), masks, momentum=1.0).bind(batches[0])
    params = jepa.init(jax.random.key(0))["params"]
    given = {
        "telic": sides.of_loop(sides.trainer(jepa).loop(log=0), batches),
        "hand": jepa_by_hand(jepa, params, batches),
    }
    seconds = timing.take_turns(given, options.rounds)
    print(timing.ratio("JEPA step", seconds["telic"], seconds["hand"], aim=1.02, units=options.steps))

    seconds = timing.take_turns(sampler_sides(flow, model, variables, options.steps), options.rounds)
    name = "sampler, of its network alone"
    print(timing.ratio(name, seconds["sampler"], seconds["network"], aim=1.1, units=options.steps))


if __name__ == "__main__":
    main()
