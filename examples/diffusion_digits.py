"""Draw handwritten digits: a small diffusion transformer, trained by flow matching and as EDM, judged by a classifier.

``python examples/diffusion_digits.py`` trains both, draws a hundred digits of each class with guidance, and says how
many of them a classifier trained on real digits reads as their class, and how far their features are from real ones'.
``--process flow`` trains one of them; what is trained is kept under ``--directory``, so start it again to go on.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
from flax import linen as nn

import telic
from telic.data import columns, digits_split
from telic.metrics import gaussian_distance, gaussian_of
from telic.models import DiT
from telic.objectives import DiffusionObjective
from telic.objectives.diffusion import EDM, Flow, FlowVelocity, Karras, Process

NO_CLASS = 10
"""The label that means: any digit."""

PROCESSES = {
    "flow": Process(Flow(), FlowVelocity()),
    # Digits are black and white, so that little noise hides nothing of them: more of it than for photographs.
    "edm": Process(EDM(mean=0.0, time_scale=250.0), Karras(sigma_data=0.6)),
}


class Reader(nn.Module):
    """A classifier of digits; its features are what the distance is measured in."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        for features in (16, 32):
            x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        self.sow("features", "pooled", x)
        return nn.Dense(10)(nn.Dropout(0.4, deterministic=not train)(x))


def digits(split: str) -> dict[str, np.ndarray]:
    """Give real digits as a diffusion model reads them: images in [-1, 1] and labels."""
    found = digits_split(split)
    return {"image": found["inputs"] * 2 - 1, "label": found["targets"]}


def held_out() -> list[dict[str, np.ndarray]]:
    """Give the test digits in batches."""
    test = digits("test")
    return [{name: rows[i : i + 500] for name, rows in test.items()} for i in range(0, 2000, 500)]


def train_reader(epochs: int):
    """Train the classifier; give its accuracy on the test digits and a function from images to (classes, features)."""
    data, test = digits("train"), digits("test")
    trainer = telic.Trainer(telic.supervised(Reader(), "softmax_cross_entropy"), telic.optimizers.adam(2e-3), key=0)
    state = trainer.fit(columns((data["image"], data["label"]), batch=64), epochs=epochs, log_every=0)
    variables = {"params": state.variables["params"]}

    @jax.jit
    def read(images):
        logits, sown = Reader().apply(variables, images, mutable=["features"])
        return logits.argmax(axis=-1), sown["features"]["pooled"][0]

    return float(np.mean(read(test["image"])[0] == test["label"])), read


def objective_of(process: str, dim: int, depth: int) -> DiffusionObjective:
    return DiffusionObjective(
        DiT(patch=7, dim=dim, depth=depth, heads=4, classes=NO_CLASS + 1),
        PROCESSES[process],
        conditions={"label": NO_CLASS},
        ema_decay=lambda updates: jnp.minimum(0.999, (1 + updates) / (10 + updates)),
        sampler="dpmpp_2m",
        num_steps=20,
        guidance=2.0,
    )


def training(process: str, steps: int, *, dim: int = 128, depth: int = 3, checkpoints=None):
    """Give the trainer, and the digits it learns from."""
    rate = telic.optimizers.warmup_cosine(2e-3, warmup=steps // 50, steps=steps, end_value=1e-5)
    objective = objective_of(process, dim, depth)
    trainer = telic.Trainer(objective, telic.optimizers.adamw(rate), key=0, checkpoints=checkpoints)
    return trainer, columns(digits("train"), batch=64, seed=0)


def train(process: str, steps: int, directory: str | None, *, dim: int = 128, depth: int = 3):
    """Train the model; give the objective and the averaged weights."""
    saved = None if directory is None else telic.Checkpoints(Path(directory) / process, every=250)
    trainer, data = training(process, steps, dim=dim, depth=depth, checkpoints=saved)
    state = trainer.fit(data, steps=steps, log_every=100)
    example = {name: values[:64] for name, values in digits("train").items()}
    return trainer.objective.bind(example), state.averaged


def draw(objective, variables, each: int):
    """Draw `each` digits of every class, a hundred at a time: (images, labels)."""
    labels = np.tile(np.arange(10, dtype=np.int32), each)
    sample = jax.jit(lambda v, key, label: objective.sample(v, key, conditions={"label": label}))
    keys = jax.random.split(jax.random.key(1), -(-len(labels) // 100))
    parts = [sample(variables, k, labels[i * 100 : (i + 1) * 100]) for i, k in enumerate(keys)]
    return np.concatenate(parts), labels


def save_grid(images, path: Path) -> None:
    """Write ten rows of digits, a class in each column, as one grey picture."""
    rows = np.asarray(images[:100]).reshape(10, 10, 28, 28)
    grid = rows.transpose(0, 2, 1, 3).reshape(280, 280)
    matplotlib.image.imsave(path, grid, cmap="gray", vmin=-1, vmax=1)


def main(
    processes: tuple[str, ...] = ("flow", "edm"),
    steps: int = 3000,
    *,
    each: int = 100,
    epochs: int = 8,
    directory: str | None = None,
    dim: int = 128,
    depth: int = 3,
) -> dict[str, float]:
    """Train, draw and judge; give what was measured."""
    accuracy, read = train_reader(epochs)
    print(f"the classifier reads {accuracy:.1%} of the test digits")
    real, other = digits("train")["image"], digits("test")["image"]
    reference = gaussian_of(read(real)[1])
    found = {"classifier": accuracy, "real_distance": gaussian_distance(gaussian_of(read(other)[1]), reference)}
    for process in processes:
        started = time.perf_counter()
        objective, variables = train(process, steps, directory, dim=dim, depth=depth)
        minutes = (time.perf_counter() - started) / 60
        images, labels = draw(objective, variables, each)
        classes, features = read(images)
        found[f"{process}_recognised"] = float(np.mean(classes == labels))
        found[f"{process}_distance"] = gaussian_distance(gaussian_of(features), reference)
        print(
            f"{process}: {found[f'{process}_recognised']:.1%} recognised, Fréchet distance "
            f"{found[f'{process}_distance']:.2f} (real test digits {found['real_distance']:.2f}), {minutes:.1f} minutes"
        )
        if directory is not None:
            save_grid(images, Path(directory) / f"{process}.png")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--process", choices=[*PROCESSES], action="append", help="train this one only")
    parser.add_argument("--steps", type=int, default=3000, help="updates")
    parser.add_argument("--directory", default="runs/diffusion_digits", help="where progress and pictures go")
    asked = parser.parse_args()
    main(tuple(asked.process or PROCESSES), asked.steps, directory=asked.directory)
