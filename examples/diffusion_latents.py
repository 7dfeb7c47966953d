"""Diffusion in latents: an autoencoder first, then a small transformer that draws its codes, decoded into digits.

``python -m examples.diffusion_latents`` trains both and says how well digits survive the code and how many of the drawn
ones a classifier reads as their class. A hundred of them are kept as a picture under ``--directory``.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import telic
from examples.diffusion_digits import NO_CLASS, digits, save_grid, train_reader
from telic.data import columns
from telic.models import Autoencoder, DiT, Latents
from telic.objectives import DiffusionObjective


def train_autoencoder(steps: int) -> Latents:
    """Train the autoencoder on real digits; give its latents, standardised."""
    images = digits("train")["image"]
    module = Autoencoder(patch=4, latents=4, width=64)
    objective = telic.supervised(module, "mean_squared_error")
    trainer = telic.Trainer(objective, telic.optimizers.adam(2e-3), key=0)
    state = trainer.fit(columns((images, images), batch=64), steps=steps, log_every=0)
    return Latents.of(module, state.variables, images[:2000])


def main(
    steps: int = 2000, *, dim: int = 128, each: int = 20, epochs: int = 8, directory: str | None = None
) -> dict[str, float]:
    """Train, draw and judge; give what was measured."""
    accuracy, read = train_reader(epochs)
    latents = train_autoencoder(max(steps // 4, 1))
    test = digits("test")["image"]
    code = latents.encode(latents.variables, test, key=jax.random.key(0))
    found = {"classifier": accuracy, "error": float(jnp.mean((latents.decode(latents.variables, code) - test) ** 2))}
    objective = DiffusionObjective(
        DiT(patch=1, dim=dim, depth=2, heads=4, classes=NO_CLASS + 1),
        "flow",
        conditions={"label": NO_CLASS},
        autoencoder=latents,
        ema_decay=lambda updates: jnp.minimum(0.999, (1 + updates) / (10 + updates)),
        sampler="dpmpp_2m",
        num_steps=20,
        guidance=2.0,
    )
    data = columns(digits("train"), batch=64, seed=0)
    rate = telic.optimizers.warmup_cosine(1e-3, warmup=steps // 50, steps=steps, end_value=1e-5)
    state = telic.Trainer(objective, telic.optimizers.adamw(rate), key=0).fit(data, steps=steps, log_every=100)
    labels = np.tile(np.arange(10, dtype=np.int32), each)
    bound = objective.bind({name: values[:64] for name, values in digits("train").items()})
    images = jax.jit(lambda v, key: bound.sample(v, key, conditions={"label": labels}))(
        state.averaged, jax.random.key(1)
    )
    found["recognised"] = float(np.mean(read(images)[0] == labels))
    print(f"squared error of the code {found['error']:.4f}; {found['recognised']:.1%} of the drawn digits recognised")
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        save_grid(images, Path(directory) / "latents.png")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="updates of the diffusion model")
    parser.add_argument("--directory", default="runs/diffusion_latents", help="where the picture goes")
    asked = parser.parse_args()
    main(asked.steps, directory=asked.directory)
