"""Rung 5, any step at all: mean and variance of a data set, and k-means, without a gradient."""

import jax.numpy as jnp
import numpy as np

import telic
from telic.data import columns, digits_split


def mean_and_variance(data) -> tuple:
    """Give the mean and variance of every pixel, in one pass over batches of any size."""

    def init(batch):
        zeros = jnp.zeros(batch["inputs"].shape[1:])
        return {"count": jnp.zeros(()), "mean": zeros, "squares": zeros}

    def step(state, batch):
        # Chan's update: each batch's own moments are joined, so that no large sum loses the small differences.
        x = batch["inputs"]
        count = state["count"] + x.shape[0]
        difference = jnp.mean(x, axis=0) - state["mean"]
        return {
            "count": count,
            "mean": state["mean"] + difference * x.shape[0] / count,
            "squares": state["squares"]
            + jnp.sum((x - jnp.mean(x, axis=0)) ** 2, axis=0)
            + difference**2 * state["count"] * x.shape[0] / count,
        }

    final = telic.Loop(step, init).run(data).step_state
    return final["mean"], final["squares"] / final["count"]


def k_means(data, centers, *, epochs: int) -> tuple:
    """Give the centers after some passes, and the mean squared distance to the nearest one before each pass."""

    def step(state, batch):
        x, centers = batch["inputs"], state["centers"]
        distances = jnp.sum((x[:, None] - centers) ** 2, axis=-1)
        nearest = jnp.eye(len(centers))[jnp.argmin(distances, axis=1)]
        new = {
            "centers": centers,
            "sums": state["sums"] + nearest.T @ x,
            "counts": state["counts"] + jnp.sum(nearest, axis=0),
        }
        return telic.Result(new, {"distance": jnp.min(distances, axis=1)})

    def move(state: telic.LoopState) -> telic.LoopState:
        s = state.step_state
        moved = jnp.where(s["counts"][:, None] > 0, s["sums"] / jnp.maximum(s["counts"], 1)[:, None], s["centers"])
        fresh = {"centers": moved, "sums": jnp.zeros_like(moved), "counts": jnp.zeros_like(s["counts"])}
        return state.replace(step_state=fresh)

    loop = telic.Loop(step).metric("mean", "distance", reads="distance").handle_event("epoch_completed", move)
    start = {"centers": centers, "sums": jnp.zeros_like(centers), "counts": jnp.zeros(len(centers))}
    final = loop.run(data, epochs=epochs, state=start)
    return final.step_state["centers"], [metrics["distance"] for metrics in final.history.values()]


def main() -> dict:
    """Run both on the training digits."""
    table = digits_split("train", flat=True)
    data = columns({"inputs": table["inputs"]}, batch=500)
    mean, variance = mean_and_variance(data)
    centers, distances = k_means(data, jnp.asarray(table["inputs"][:10]), epochs=6)
    print(f"mean brightness {float(mean.mean()):.4f}, mean variance {float(variance.mean()):.4f}")
    print(f"distance to the nearest of ten centers, by epoch: {np.round(distances, 2)}")
    return {"mean": mean, "variance": variance, "centers": centers, "distances": distances}


if __name__ == "__main__":
    main()
