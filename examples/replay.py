"""A source of your own: deep Q-learning from a replay buffer, with the loop that trains everything else.

Walkers on a grid go to its corner. The source lets them walk with the network as it is now, keeps what they saw, and
gives batches of it. It says that it may not be read ahead of the training state, and its position holds everything it
remembers, so a run that is saved goes on as if nothing had happened.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import telic

SIZE = 6
GOAL = SIZE * SIZE - 1
MOVES = np.asarray([(0, 1), (1, 0), (0, -1), (-1, 0)])


class Network(nn.Module):
    """Gives the value of each of four moves from each place."""

    @nn.compact
    def __call__(self, place):
        return nn.Dense(4)(nn.relu(nn.Dense(64)(jax.nn.one_hot(place, SIZE * SIZE))))


def walk(place, move):
    """Give the places after a move, and the rewards: 1 at the goal, and a little less than 0 elsewhere."""
    there = np.clip(np.stack([place // SIZE, place % SIZE], axis=-1) + MOVES[move], 0, SIZE - 1)
    after = there[:, 0] * SIZE + there[:, 1]
    return after, np.where(after == GOAL, 1.0, -0.02).astype(np.float32)


@jax.jit
def values(variables, place):
    return Network().apply({"params": variables["params"]}, place)


class Replay:
    """Gives batches of what walkers saw, the newest few thousand steps of it.

    Arrays are replaced, never written into: a position that was given away stays what it was.
    """

    read_ahead = False
    fresh = True

    def __init__(self, *, walkers=16, capacity=4096, batch=64, explore=0.2, seed=0):
        self.walkers, self.capacity, self.batch, self.explore, self.seed = walkers, capacity, batch, explore, seed
        self.state = {
            "step": 0,
            "place": np.zeros(walkers, np.int32),
            "seen": {name: np.zeros(capacity, array.dtype) for name, array in self.example().items()},
        }

    def example(self):
        """Give a batch of the shapes to come: the first state is made from it."""
        whole = np.zeros(self.batch, np.int32)
        return {"place": whole, "move": whole, "after": whole, "reward": np.zeros(self.batch, np.float32)}

    def begin(self, epoch, *, continuous=False):
        """Start an epoch: there is only one, without an end."""

    def next(self, view):
        """Let the walkers take a step with the network as it is now, and give a batch of memories."""
        step, place, seen = self.state["step"], self.state["place"], self.state["seen"]
        draw = np.random.default_rng([self.seed, step])
        best = np.asarray(values(view.step_state.variables, place)).argmax(-1)
        move = np.where(draw.random(self.walkers) < self.explore, draw.integers(0, 4, self.walkers), best)
        after, reward = walk(place, move)
        slots = (step * self.walkers + np.arange(self.walkers)) % self.capacity
        now = {"place": place, "move": move, "after": after, "reward": reward}
        seen = {name: _with(array, slots, now[name]) for name, array in seen.items()}
        # Who arrived starts anew anywhere.
        place = np.where(after == GOAL, draw.integers(0, GOAL, self.walkers), after).astype(np.int32)
        self.state = {"step": step + 1, "place": place, "seen": seen}
        chosen = draw.integers(0, min((step + 1) * self.walkers, self.capacity), self.batch)
        return {name: array[chosen] for name, array in seen.items()}, self.get_state()

    def skip(self, count):
        """Go past batches: nothing is remembered of them."""
        self.state = {**self.state, "step": self.state["step"] + count}

    def get_state(self):
        return self.state

    def set_state(self, position):
        self.state = position

    def close(self):
        """Do nothing: nothing is open."""


def _with(array, slots, values):
    new = array.copy()
    new[slots] = values
    return new


class QLearning(telic.Objective):
    """The value of a move is its reward and the best value after it, as a slowly moving average of the network says."""

    ema = telic.EMASpec(decay=0.98)

    def init(self, key, variables=None):
        return Network().init(key, jnp.zeros(1, jnp.int32))

    def loss(self, variables, batch, step):
        found = jnp.take_along_axis(Network().apply(variables, batch["place"]), batch["move"][:, None], axis=-1)[:, 0]
        later = Network().apply(step.averaged, batch["after"]).max(-1)
        target = batch["reward"] + jnp.where(batch["after"] == GOAL, 0.0, 0.95 * later)
        error = found - jax.lax.stop_gradient(target)
        return telic.Mean.of(error**2), telic.Aux(metrics={"value": telic.Mean.of(found)})


def arrivals(variables) -> float:
    """Give the share of places from which the best moves reach the goal on a shortest way."""
    place = np.arange(GOAL)
    distance = 2 * (SIZE - 1) - place // SIZE - place % SIZE
    arrived = np.full(GOAL, -1)
    for step in range(1, 2 * SIZE):
        place, _ = walk(place, np.asarray(values(variables, place)).argmax(-1))
        arrived = np.where((arrived < 0) & (place == GOAL), step, arrived)
    return float(np.mean(arrived == distance))


def main(steps: int = 2000, checkpoints=None):
    """Train, and give the share of shortest ways before and after, and the final state."""
    trainer = telic.Trainer(QLearning(), telic.optimizers.adam(3e-3), key=0, checkpoints=checkpoints)
    fit = functools.partial(trainer.fit, log_every=500)
    before = arrivals(trainer.place().variables)
    state = fit(Replay(), steps=steps)
    after = arrivals(state.variables)
    print(f"shortest ways: untrained {before:.2f}, trained {after:.2f}")
    return before, after, state


if __name__ == "__main__":
    main()
