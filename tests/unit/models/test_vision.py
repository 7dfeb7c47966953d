"""Vision models: what they give, what they are at the start, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ShapeError
from telic.models import Autoencoder, DiT, Latents, UNet, ViT, ViTPredictor
from telic.models.vit import patchify, positions, unpatchify


@pytest.mark.parametrize("shape", [(2, 8, 12, 3), (2, 4, 8, 12, 1)])
def test_patches_fit_together_again(shape: tuple[int, ...]) -> None:
    """Pixels of neighbouring patches exchanged, which no loss shows."""
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    tubelet = 2 if len(shape) == 5 else 1
    tokens = patchify(x, 4, tubelet)
    grid = (2, 3) if len(shape) == 4 else (2, 2, 3)
    np.testing.assert_array_equal(unpatchify(tokens, grid, 4, tubelet), x)
    corner = x[:, :4, :4] if len(shape) == 4 else x[:, :2, :4, :4]
    np.testing.assert_array_equal(tokens[:, 0], corner.reshape(2, -1))


def test_positions_tell_every_patch_apart() -> None:
    """Two patches at one position, or a grid read as its transpose."""
    for grid, dim in (((3, 5), 16), ((2, 3, 4), 24)):
        table = positions(dim, grid)
        assert table.shape == (np.prod(grid), dim)
        assert len(np.unique(table.round(9), axis=0)) == np.prod(grid)
    with pytest.raises(ShapeError, match="multiple of 4"):
        positions(10, (3, 3))


def test_a_smaller_base_of_positions_tells_few_patches_further_apart() -> None:
    """A base that reaches no wave: most of I-JEPA's are constants on a grid of 4 × 4, and features forget the place."""
    wide, narrow = (positions(64, (4, 4), base=base) for base in (10_000.0, 20.0))
    assert narrow.var(axis=0).sum() > 1.5 * wide.var(axis=0).sum()
    np.testing.assert_array_equal(positions(64, (4, 4)), wide)
    x = jax.random.normal(jax.random.key(0), (1, 8, 8, 1))
    model = ViT(patch=2, dim=16, depth=1, heads=2)
    variables = model.init(jax.random.key(0), x)
    assert not np.allclose(model.apply(variables, x), model.clone(position_base=20.0).apply(variables, x), atol=1e-3)
    for base in (1.0, -3.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="over 1, such as 10000 or 20"):
            positions(64, (4, 4), base=base)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (DiT(patch=4, dim=16, depth=1, heads=2, classes=3), (2, 8, 8, 1)),
        (DiT(patch=4, dim=24, depth=1, heads=2, classes=3), (2, 2, 8, 8, 3)),
        (UNet(widths=(8, 16), groups=4, classes=3), (2, 8, 8, 3)),
    ],
    ids=["dit", "dit-video", "unet"],
)
def test_a_denoiser_starts_at_zero_and_sees_time_and_label(model: Any, shape: tuple[int, ...]) -> None:
    """A network that starts far off, or whose condition reaches nothing."""
    x = jax.random.normal(jax.random.key(0), shape)
    t, label = jnp.array([1.0, 900.0]), jnp.array([0, 2])
    init, apply = jax.jit(model.init), jax.jit(model.apply)
    variables = init(jax.random.key(0), x, t, label)
    np.testing.assert_array_equal(apply(variables, x, t, label), jnp.zeros(shape))
    moved = jax.tree.map(lambda w: w + 0.05 * jax.random.normal(jax.random.key(w.size), w.shape), variables)
    found = apply(moved, x, t, label)
    assert found.shape == shape
    assert not np.allclose(found, apply(moved, x, t + 50, label))
    assert not np.allclose(found, apply(moved, x, t, label[::-1]))


def test_vit_encodes_chosen_patches_in_their_places() -> None:
    """Patches chosen after they have seen each other, or positions counted among the chosen."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 1))
    model = ViT(patch=4, dim=8, depth=1, heads=2)
    variables = model.init(jax.random.key(0), x)
    everything = model.apply(variables, x)
    assert everything.shape == (2, 4, 8)
    order = jnp.tile(jnp.array([3, 1, 0, 2]), (2, 1))
    np.testing.assert_allclose(model.apply(variables, x, order), everything[:, order[0]], rtol=1e-4, atol=1e-5)
    # A patch that is not asked for is not seen.
    two = jnp.tile(jnp.array([0, 3]), (2, 1))
    other = x.at[:, :4, 4:].set(7.0)
    np.testing.assert_array_equal(model.apply(variables, x, two), model.apply(variables, other, two))


def test_predictor_gives_the_encoders_width_for_each_target() -> None:
    """Predictions of the context's places."""
    context = jax.random.normal(jax.random.key(0), (2, 3, 12))
    seen = jnp.tile(jnp.array([0, 1, 2]), (2, 1))
    model = ViTPredictor((3, 3), dim=8, depth=1, heads=2)
    wanted = jnp.tile(jnp.array([4, 8]), (2, 1))
    variables = model.init(jax.random.key(0), context, seen, wanted)
    found = model.apply(variables, context, seen, wanted)
    assert found.shape == (2, 2, 12)
    assert not np.allclose(found[:, 0], found[:, 1])
    np.testing.assert_allclose(model.apply(variables, context, seen, wanted[:, ::-1])[:, ::-1], found, atol=1e-5)


def test_autoencoder_and_standardised_latents() -> None:
    """Latents standardised over all channels at once, or decoded without undoing it."""
    x = jax.random.normal(jax.random.key(0), (16, 8, 8, 1))
    module = Autoencoder(patch=4, latents=3, width=8)
    variables = module.init(jax.random.key(1), x)
    latents = Latents.of(module, variables, x)
    code = latents.encode(latents.variables, x, key=jax.random.key(0))
    assert code.shape == (16, 2, 2, 3)
    np.testing.assert_allclose(code.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(code.std(axis=(0, 1, 2)), 1, atol=1e-4)
    direct = module.apply(variables, x)
    np.testing.assert_allclose(latents.decode(latents.variables, code), direct, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match=r"\[batch, height, width, 1\], got \(16, 8, 8, 3\)"):
        module.apply(variables, jnp.zeros((16, 8, 8, 3)), method="encode")


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (DiT(patch=5, dim=16, depth=1), (2, 8, 8, 1), "do not divide"),
        (DiT(dim=18, heads=4), (2, 8, 8, 1), "heads=4 must divide dim=18"),
        (DiT(dim=16, depth=1), (2, 8, 8), r"images are \[batch, height, width, channels\]"),
        (UNet(widths=(8, 16, 24)), (2, 6, 6, 1), "multiples of 4"),
        (UNet(widths=(10,)), (2, 6, 6, 1), "groups=8 must divide"),
    ],
)
def test_shapes_that_do_not_fit(model: Any, shape: tuple[int, ...], message: str) -> None:
    """An error of a reshape deep inside."""
    with pytest.raises(ShapeError, match=message):
        model.init(jax.random.key(0), jnp.zeros(shape), jnp.zeros(shape[0]))


def test_labels_and_classes_come_together() -> None:
    """A label that an unconditional model ignores without a word."""
    x, t = jnp.zeros((2, 8, 8, 1)), jnp.zeros(2)
    with pytest.raises(ShapeError, match="no classes got some of labels"):
        DiT(dim=16, depth=1).init(jax.random.key(0), x, t, jnp.zeros(2, jnp.int32))
    with pytest.raises(ShapeError, match="5 classes got none of labels"):
        DiT(dim=16, depth=1, classes=5).init(jax.random.key(0), x, t)
