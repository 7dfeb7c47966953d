"""The JEPA objective: its masks, its target branch, its signs of collapse, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.artifacts import Representations
from telic.errors import ContractError, DataError, ShapeError
from telic.mean import Terms
from telic.objectives import JepaObjective
from telic.objectives.jepa import (
    MultiBlockMask,
    correlation,
    covariance_penalty,
    momentum_ramp,
    spread,
    variance_penalty,
)

GRID = (4, 4)
MASKS = MultiBlockMask.for_grid(GRID, num_targets=2, target_scale=(0.2, 0.3))
Tree = dict[str, Any]


def encoder_init(key: Any, inputs: Tree) -> Tree:
    del inputs
    return {"params": {"w": jax.random.normal(key, (1, 6))}}


def encoder(variables: Tree, inputs: Tree) -> Any:
    # A patch is a pixel; its place enters by a wave, so that features differ.
    tokens = inputs["x"].reshape(inputs["x"].shape[0], -1, 1) + jnp.linspace(0.0, 1.0, 16)[None, :, None]
    if inputs["indices"] is not None:
        tokens = jnp.take_along_axis(tokens, inputs["indices"][..., None], axis=1)
    return jnp.tanh(tokens @ variables["params"]["w"])


def predictor_init(key: Any, inputs: Tree) -> Tree:
    del inputs
    return {"params": {"w": jax.random.normal(key, (6, 6)), "place": jnp.zeros((16, 6))}}


def predictor(variables: Tree, inputs: Tree) -> Any:
    pooled = inputs["context"].mean(axis=1, keepdims=True) @ variables["params"]["w"]
    return pooled + variables["params"]["place"][inputs["target_indices"]]


MODELS = ((encoder_init, encoder), (predictor_init, predictor))


def batch(rows: int = 8) -> Tree:
    images = np.random.default_rng(0).normal(size=(rows, 4, 4, 1)).astype(np.float32)
    return {"image": images, "label": np.arange(rows, dtype=np.int32) % 2}


def made(**options: Any) -> JepaObjective:
    return JepaObjective(*MODELS, MASKS, **options).bind(batch())


def step(seed: int = 0, **options: Any) -> telic.Step:
    return telic.Step(key=jax.random.key(seed), **options)


# -- masks -----------------------------------------------------------------------------------------------------------


def test_context_and_targets_are_disjoint_and_of_one_size() -> None:
    """A target the context has seen, whose prediction teaches nothing."""
    masks = MultiBlockMask.for_grid((8, 8))
    drawn = masks.draw(jax.random.key(0), 8)
    assert 0.15 <= masks.target_size / 64 <= 0.2
    assert drawn.targets.shape == (8, 4, masks.target_size)
    assert drawn.context.shape == (8, masks.context_size)
    for context, targets in zip(np.asarray(drawn.context), np.asarray(drawn.targets), strict=True):
        assert not set(context) & set(targets.ravel())
        for block in targets:
            rows, columns = np.unravel_index(block, (8, 8))
            height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
            assert height * width == masks.target_size
            assert 0.75 <= height / width <= 1.5
    again = masks.draw(jax.random.key(0), 8)
    np.testing.assert_array_equal(drawn.context, again.context)
    assert not np.array_equal(drawn.context, masks.draw(jax.random.key(1), 8).context)


def test_every_patch_is_context_sometimes_and_target_sometimes() -> None:
    """S49: contexts cut to the first patches in raster order, so that the last are never seen."""
    masks = MultiBlockMask.for_grid((7, 7))
    drawn = jax.jit(lambda key: masks.draw(key, 1024))(jax.random.key(0))
    seen = np.bincount(np.asarray(drawn.context).ravel(), minlength=49)
    assert seen.min() > 0.25 * seen.mean()
    # The reference leaves out the last row and column.
    hidden = np.bincount(np.asarray(drawn.targets).ravel(), minlength=49).reshape(7, 7)
    assert hidden.min() > 0
    np.testing.assert_allclose(hidden[0], hidden[-1], rtol=0.35)
    # The last quarter of the patches is seen as often as the first.
    np.testing.assert_allclose(seen[:12].sum(), seen[-12:].sum(), rtol=0.1)


def test_frames_of_a_video_are_alike() -> None:
    """XS177: a context of the first frames alone."""
    masks = MultiBlockMask.for_grid((2, 4, 4), num_targets=1, target_scale=(0.2, 0.3))
    drawn = masks.draw(jax.random.key(0), 512)
    frames = np.bincount(np.asarray(drawn.context).ravel() // 16, minlength=2)
    np.testing.assert_allclose(frames[0], frames[1], rtol=0.05)
    # A tubelet spans every frame.
    np.testing.assert_array_equal(np.asarray(drawn.targets)[:, 0, :4] + 16, np.asarray(drawn.targets)[:, 0, 4:])


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ((2, 2), {}, "no block of 0.15 to 0.2"),
        ((7, 7), {"num_targets": 6}, "leave 0 of the 49 patches"),
        ((7,), {}, "a grid is"),
        ((7, 7), {"min_context": 14}, "leave 13 of the 49.*at least 14"),
    ],
)
def test_grids_that_cannot_be_masked(grid: Any, options: Tree, message: str) -> None:
    """A context of no patches, found as a NaN."""
    with pytest.raises(ShapeError, match=message):
        MultiBlockMask.for_grid(grid, **options)


# -- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_gradient_reaches_the_targets() -> None:
    """Targets that are learned, and with them collapse in a hundred updates."""
    objective = made()
    variables = objective.init(jax.random.key(0))

    def loss(averaged: Any) -> Any:
        return telic.scalar_loss(objective, variables, batch(), step(averaged=averaged))[0]

    grads = jax.grad(loss)(variables)
    assert all(bool((g == 0).all()) for g in jax.tree.leaves(grads))


def test_targets_are_those_of_the_average() -> None:
    """The live encoder as its own target."""
    objective = made(normalize_targets=False)
    variables = objective.init(jax.random.key(0))
    zeros = {"params": {**variables["params"], "encoder": {"w": jnp.zeros((1, 6))}}}
    _, aux = objective.loss(variables, batch(), step(averaged=zeros))
    np.testing.assert_array_equal(aux.outputs["targets"], 0)
    assert bool((aux.outputs["prediction"] != 0).any())


def test_every_leaf_learns_and_the_average_follows_the_ramp() -> None:
    """XS178: a predictor that is in no parameter group. A momentum that stays where it began."""
    given = batch()
    objective = JepaObjective(*MODELS, MASKS, momentum=momentum_ramp(0.5, 1.0, steps=2))
    trainer = telic.Trainer(objective, telic.optimizers.adam(0.1), key=0)
    state = trainer.place(example=given)
    start = jax.tree.map(np.asarray, state.variables["params"])
    compiled = trainer.train_step().bind(given)
    run = jax.jit(lambda state: compiled.step(state, given).state)
    online, averages = [], []
    for _ in range(4):
        state = run(state)
        online.append(np.asarray(state.variables["params"]["encoder"]["w"]))
        averages.append(np.asarray(state.averaged["params"]["encoder"]["w"]))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), start, state.variables["params"])
    assert all(jax.tree.leaves(moved)), moved
    first = 0.5 * start["encoder"]["w"] + 0.5 * online[0]
    np.testing.assert_allclose(averages[0], first, rtol=1e-6)
    np.testing.assert_allclose(averages[1], 0.75 * first + 0.25 * online[1], rtol=1e-6)
    np.testing.assert_array_equal(averages[1], averages[3])


def test_signs_of_collapse() -> None:
    """A metric that a constant encoder passes."""
    rows = jax.random.normal(jax.random.key(0), (500, 8))
    assert abs(float(spread(rows)) - 1) < 0.1
    assert float(spread(jnp.ones((500, 8)))) < 1e-6
    assert float(correlation(rows)) < 0.02
    assert float(correlation(jnp.repeat(rows[:, :1], 8, axis=1))) > 0.8
    assert float(variance_penalty(rows)) < 0.1
    assert abs(float(variance_penalty(jnp.ones((500, 8)))) - 0.99) < 0.01
    assert float(covariance_penalty(jnp.repeat(rows[:, :1], 8, axis=1))) > 5
    objective = made()
    variables = objective.init(jax.random.key(0))
    collapsed = {"params": {**variables["params"], "encoder": {"w": jnp.zeros((1, 6))}}}
    _, aux = objective.loss(collapsed, batch(), step(averaged=collapsed))
    assert float(aux.metrics["repr_std"]) < 1e-6
    _, aux = objective.loss(variables, batch(), step(averaged=variables))
    assert float(aux.metrics["repr_std"]) > 1e-3


def test_penalties_are_terms_of_their_own() -> None:
    """A penalty that is lost in the mean, or differentiated through the wrong encoder."""
    objective = made(variance_weight=2.0, covariance_weight=0.5)
    variables = objective.init(jax.random.key(0))
    found, _ = objective.loss(variables, batch(), step(averaged=variables))
    assert isinstance(found, Terms)
    assert {name: weight for name, (weight, _) in found.terms.items()} == {
        "prediction": 1.0,
        "variance": 2.0,
        "covariance": 0.5,
    }
    plain, _ = made().loss(variables, batch(), step(averaged=variables))
    np.testing.assert_allclose(found.terms["prediction"][1].value(), plain.value(), rtol=1e-6)
    with pytest.raises(DataError, match="cannot be weighted"):
        objective.loss(variables, {**batch(), "weights": np.ones(8, np.float32)}, step(averaged=variables))


def test_representations_carry_labels_to_probes() -> None:
    """Features of the context alone, or labels of other rows."""
    objective = made()
    variables = objective.init(jax.random.key(0))
    found = objective.evaluate(variables, batch(), step(train=False))
    assert isinstance(found, Representations)
    assert found.features.shape == (8, 6)
    np.testing.assert_array_equal(found.labels, batch()["label"])
    np.testing.assert_allclose(found.features, objective.represent(variables, batch()["image"]), rtol=1e-6)
    assert objective.evaluate(variables, {"image": batch()["image"]}, step(train=False)).labels is None


def test_validation_tells_of_collapse() -> None:
    """A sign of collapse that both loss and evaluation report under one name: every validation is refused."""
    trainer = telic.Trainer(made(), "adam", key=0)
    found = trainer.evaluate([batch()], state=trainer.place(example=batch()))
    assert set(found) >= {"loss", "repr_std", "repr_cov_offdiag"}


# -- bad input -------------------------------------------------------------------------------------------------------


def test_what_it_cannot_train() -> None:
    """Bytes, another grid than the image's, a predictor of another width, no target encoder."""
    with pytest.raises(DataError, match=r"floating-point.*uint8"):
        made().bind({"image": np.zeros((2, 4, 4, 1), np.uint8)})
    with pytest.raises(DataError, match=r"a mapping with 'image', got \['x'\]"):
        made().bind({"x": np.zeros((2, 4, 4, 1))})
    other = JepaObjective(*MODELS, MultiBlockMask.for_grid((8, 8))).bind(batch())
    with pytest.raises(ShapeError, match=r"64 patches.*\(8, 16, 6\)"):
        other.init(jax.random.key(0))
    narrow = (predictor_init, lambda v, i: predictor(v, i)[..., :3])
    wrong = JepaObjective(MODELS[0], narrow, MASKS).bind(batch())
    held = wrong.init(jax.random.key(0))
    with pytest.raises(ShapeError, match="width, 6, got 3"):
        wrong.loss(held, batch(), step(averaged=held))
    bare = made()
    bare.ema = None
    with pytest.raises(ContractError, match="moving average of the encoder"):
        bare.loss(held, batch(), step())
    with pytest.raises(ValueError, match="distance of features"):
        made(distance="l3")
    with pytest.raises(ValueError, match="momentum_ramp"):
        momentum_ramp(1.0, 0.5)
    with pytest.raises(ContractError, match="first batch"):
        JepaObjective(*MODELS, MASKS).init(jax.random.key(0))


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    from telic.testing import check_objective

    check_objective(JepaObjective(*MODELS, MASKS), batch()).check()
