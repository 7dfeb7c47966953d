"""Learn what digits look like without their labels: a JEPA encoder, judged by a linear probe on frozen features.

``python examples/jepa_digits.py`` trains the encoder on 8,000 digits, fits a linear probe on 100 labelled ones of each
class, and compares it with the same probe on the untrained encoder's features and on the pixels themselves. Progress is
kept under ``--directory``, with a picture of the masks: start it again to go on.
"""

import argparse
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
from flax import linen as nn

import telic
from telic.data import columns, digits_split
from telic.metrics import fit_linear_probe
from telic.models import ViT
from telic.objectives import JepaObjective
from telic.objectives.jepa import MultiBlockMask, momentum_ramp

GRID = (4, 4)


class PooledPredictor(nn.Module):
    """Predicts a hidden patch from its place and the mean of the seen features: the vector that the probe reads."""

    dim: int

    @nn.compact
    def __call__(self, context, context_indices, target_indices):
        seen = nn.Dense(self.dim)(context.mean(axis=1))
        place = nn.Dense(self.dim)(jax.nn.one_hot(target_indices, GRID[0] * GRID[1], dtype=context.dtype))
        x = seen[:, None] + place
        for _ in range(2):
            x = x + nn.Dense(self.dim)(nn.gelu(nn.Dense(2 * self.dim)(nn.LayerNorm()(x))))
        return nn.Dense(context.shape[-1])(nn.LayerNorm()(x))


def objective_of(dim: int, depth: int, steps: int) -> JepaObjective:
    return JepaObjective(
        ViT(patch=7, dim=dim, depth=depth, heads=4, position_base=20.0),
        PooledPredictor(dim),
        MultiBlockMask.for_grid(GRID, num_targets=2, target_scale=(0.25, 0.25)),
        momentum=momentum_ramp(0.998, 0.9995, steps=steps),
        variance_weight=0.02,
        covariance_weight=0.01,
    )


def digits(split: str) -> dict[str, np.ndarray]:
    """Give digits as the encoder reads them: pixels of mean 0 and variance 1, and labels for the probe."""
    found = digits_split(split)
    return {"image": (found["inputs"] - np.float32(0.13)) / np.float32(0.31), "label": found["targets"]}


def held_out() -> list[dict[str, np.ndarray]]:
    """Give the test digits in batches."""
    test = digits("test")
    return [{name: rows[i : i + 500] for name, rows in test.items()} for i in range(0, 2000, 500)]


def labelled(each: int) -> np.ndarray:
    """Give the rows of the first `each` training digits of every class."""
    labels = digits("train")["label"]
    return np.concatenate([np.flatnonzero(labels == k)[:each] for k in range(10)])


def probe(features, each: int = 100) -> float:
    """Fit a linear probe on `each` digits of every class; give its accuracy on the test digits.

    Args:
      features: From images to vectors.
      each: Labelled digits of a class.
    """
    train, test = digits("train"), digits("test")
    rows = labelled(each)
    given = np.asarray(features(train["image"][rows]))
    mean, std = given.mean(axis=0), given.std(axis=0) + 1e-6
    fitted = fit_linear_probe((given - mean) / std, train["label"][rows], l2=1e-2)
    return fitted.accuracy((np.asarray(features(test["image"])) - mean) / std, test["label"])


def save_masks(objective: JepaObjective, path: Path) -> None:
    """Draw eight digits as the context encoder sees them: grey where a patch is hidden, dark where it is a target."""
    masks = objective.masks.draw(jax.random.key(0), 8)
    shade = np.full((8, objective.masks.num_patches), 0.35)
    np.put_along_axis(shade, np.asarray(masks.targets).reshape(8, -1), 0.0, axis=1)
    np.put_along_axis(shade, np.asarray(masks.context), 1.0, axis=1)
    patches = np.kron(shade.reshape(8, *GRID), np.ones((7, 7)))
    shown = (digits_split("train")["inputs"][:8, ..., 0] + 0.2) / 1.2 * patches
    large = np.kron(np.concatenate(list(shown), axis=1), np.ones((3, 3)))
    matplotlib.image.imsave(path, large, cmap="gray", vmin=0, vmax=1)


def training(steps: int, *, dim: int = 128, depth: int = 2, checkpoints=None):
    """Give the trainer, and the digits it learns from."""
    rate = telic.optimizers.warmup_cosine(3e-3, warmup=steps // 10, steps=steps, end_value=1e-5)
    optimizer = telic.optimizers.adamw(rate, weight_decay=0.05)
    trainer = telic.Trainer(objective_of(dim, depth, steps), optimizer, key=0, checkpoints=checkpoints)
    return trainer, columns(digits("train"), batch=64, seed=0)


def main(
    steps: int = 6000, *, dim: int = 128, depth: int = 2, each: int = 100, directory: str | None = None
) -> dict[str, float]:
    """Train and probe; give the accuracies and the spread of the features."""
    example = {name: values[:64] for name, values in digits("train").items()}
    saved = None if directory is None else telic.Checkpoints(Path(directory) / "encoder", every=250)
    trainer, data = training(steps, dim=dim, depth=depth, checkpoints=saved)
    represent = jax.jit(trainer.objective.bind(example).represent)
    start = trainer.place(example=example).variables
    found = {
        "pixels": probe(lambda images: images.reshape(len(images), -1), each),
        "untrained": probe(lambda images: represent(start, images), each),
    }
    state = trainer.fit(data, steps=steps, log_every=100)
    found["trained"] = probe(lambda images: represent(state.averaged, images), each)
    found["spread"] = float(np.std(represent(state.averaged, digits("test")["image"]), axis=0).mean())
    print(
        f"linear probe on {each} labelled digits a class: pixels {found['pixels']:.1%}, untrained encoder "
        f"{found['untrained']:.1%}, trained {found['trained']:.1%}; spread of its features {found['spread']:.3f}"
    )
    if directory is not None:
        save_masks(trainer.objective, Path(directory) / "masks.png")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6000, help="updates")
    parser.add_argument("--directory", default="runs/jepa_digits", help="where progress goes")
    asked = parser.parse_args()
    main(asked.steps, directory=asked.directory)
