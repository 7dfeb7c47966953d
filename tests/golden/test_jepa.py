"""Masks, losses, schedules and models of joint-embedding prediction against I-JEPA and V-JEPA 2, in float64."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic.contract import Step, scalar_loss
from telic.ema import EMASpec
from telic.models import ViT, ViTPredictor
from telic.models.vit import positions
from telic.objectives.jepa import (
    JepaObjective,
    Masks,
    MultiBlockMask,
    distances,
    layer_normed,
    momentum_ramp,
)
from telic.tree import named_leaves
from tests.golden import cases

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("case", cases("jepa_loss"))
def test_targets_and_losses(case: dict[str, Any]) -> None:
    """A norm over tokens, an unbiased variance, a smooth-L1 without its half, or targets of another block."""
    given, out = case["in"], case["out"]
    masks, repeats = given["masks_pred"], given["masks_enc"].shape[0]
    normed = layer_normed(given["target_features"])
    np.testing.assert_allclose(normed, out["normalized"], **CLOSE)
    # The reference has rows [block, repeat, image]; here they are [image, block].
    wanted = jnp.take_along_axis(normed[None], jnp.asarray(masks)[..., None], axis=2)
    rows = jnp.repeat(wanted[:, None], repeats, axis=1).reshape(out["targets"].shape)
    np.testing.assert_allclose(rows, out["targets"], **CLOSE)

    def smooth(predicted: Any) -> Any:
        return distances(predicted, rows).mean()

    loss, grad = jax.value_and_grad(smooth)(jnp.asarray(given["predictions"]))
    np.testing.assert_allclose(loss, out["loss"], **CLOSE)
    np.testing.assert_allclose(grad, out["grad_predictions"], **CLOSE)

    def power(predicted: Any) -> Any:
        kind = {1.0: "l1", 2.0: "l2"}[case["config"]["loss_exp"]]
        blocks = predicted.shape[0] // masks.shape[0] if predicted.shape[0] != masks.shape[0] else 1
        target = jnp.tile(wanted, (blocks, 1, 1, 1)) if blocks > 1 else wanted
        return distances(predicted, target, kind).mean()

    loss, grad = jax.value_and_grad(power)(jnp.asarray(out["vjepa"]["predictions"]))
    np.testing.assert_allclose(loss, out["vjepa"]["loss"], **CLOSE)
    np.testing.assert_allclose(grad, out["vjepa"]["grad_predictions"], **CLOSE)


@pytest.mark.parametrize("case", cases("jepa_schedules"))
def test_momentum_and_target_encoder(case: dict[str, Any]) -> None:
    """A momentum of the update after, or one that multiplies the online weights."""
    config, out = case["config"], case["out"]
    low, high = config["ema"]
    steps = config["iterations_per_epoch"] * config["epochs"] * config["ipe_scale"]
    decay = momentum_ramp(low, high, steps=steps)
    momentum = [float(decay(i)) for i in range(len(out["momentum"]))]
    np.testing.assert_allclose(momentum, out["momentum"], **CLOSE)
    spec = EMASpec(decay)
    start = {"w": jnp.asarray(case["in"]["target_start"])}
    average, rows = spec.start(start, start), []
    for i, online in enumerate(case["in"]["online"]):
        average = spec.move(average, {"w": jnp.asarray(online)}, jnp.asarray(i), jax.random.key(0))
        rows.append(average["w"])
    np.testing.assert_allclose(rows, out["target"], **CLOSE)


@pytest.mark.parametrize("case", cases("jepa_schedules"))
def test_learning_rate_and_weight_decay(case: dict[str, Any]) -> None:
    """The schedules of the paper are cosines that Optax has: written here as a user would."""
    config, out = case["config"], case["out"]
    per_epoch, epochs = config["iterations_per_epoch"], config["epochs"]
    total = int(per_epoch * epochs * config["ipe_scale"])
    lr = config["lr"]
    warmup = lr["warmup"] * per_epoch
    rise = optax.linear_schedule(lr["start"], lr["ref"], max(1, warmup))
    fall = optax.cosine_decay_schedule(lr["ref"], total - warmup, lr["final"] / lr["ref"])
    rate = optax.join_schedules([rise, fall], [warmup]) if warmup else fall
    # Its steps count from 1.
    found = [float(rate(jnp.asarray(i + 1))) for i in range(len(out["lr"]))]
    np.testing.assert_allclose(found, out["lr"], rtol=1e-9)
    start, end = config["wd"]
    decay = optax.cosine_decay_schedule(1.0, total)
    found = [end + (start - end) * float(decay(jnp.asarray(i + 1))) for i in range(len(out["wd"]))]
    np.testing.assert_allclose(found, out["wd"], rtol=1e-9)


@pytest.mark.parametrize("case", cases("jepa_masks"))
def test_masks_keep_the_references_guarantees(case: dict[str, Any]) -> None:
    """A block of a size the paper's scale and aspect ratio do not give; overlap; a patch named twice."""
    config, out = case["config"], case["out"]
    grid = tuple(config["grid"])
    if "guarantees" in out:
        masks = MultiBlockMask.for_grid(
            grid,
            num_targets=config["npred"],
            target_scale=tuple(config["pred_mask_scale"]),
            aspect_ratio=tuple(config["aspect_ratio"]),
            context_scale=tuple(config["enc_mask_scale"]),
        )
        assert masks.target_size in out["guarantees"]["predictor_sizes"]
    else:
        spans = tuple(config["temporal_pred_mask_scale"])
        masks = MultiBlockMask.for_grid(
            grid,
            num_targets=2,
            target_scale=(0.1, 0.4),
            aspect_ratio=tuple(config["aspect_ratio"]),
            temporal_scale=spans,
        )
        low, high = config["aspect_ratio"]
        for frames, height, width in masks.target_shapes:
            assert spans[0] <= frames / grid[0] <= spans[1]
            assert low <= height / width <= high
    drawn = jax.jit(lambda key: masks.draw(key, 32))(jax.random.key(0))
    targets, context = np.asarray(drawn.targets), np.asarray(drawn.context)
    for found in (targets, context):
        assert found.min() >= 0
        assert found.max() < math.prod(grid)
        assert (np.diff(found, axis=-1) > 0).all()
    for row in range(32):
        assert not set(context[row]) & set(targets[row].ravel())


def telic_names(name: str) -> str:
    """Give telic's name of a reference parameter."""
    for old, new in (
        ("predictor_", ""),
        ("patch_embed.proj", "patch_embed"),
        ("blocks.", "blocks_"),
        (".weight", ".kernel"),
    ):
        name = name.replace(old, new)
    norm = any(part.startswith("norm") for part in name.split("."))
    return name.replace(".kernel", ".scale" if norm else ".kernel").replace(".", "/")


def converted(given: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, value in given.items():
        if "pos_embed" in name:
            continue
        if name == "patch_embed.proj.weight":
            value = value.transpose(2, 3, 1, 0).reshape(-1, value.shape[0])
        elif name.endswith("weight") and value.ndim == 2:
            value = value.T
        elif name == "mask_token":
            value = value.ravel()
        inner, words = params, telic_names(name).split("/")
        for word in words[:-1]:
            inner = inner.setdefault(word, {})
        inner[words[-1]] = jnp.asarray(value)
    return params


class GivenMasks(MultiBlockMask):
    """Masks that were drawn elsewhere."""

    given: Any

    def draw(self, key: Any, rows: int) -> Any:
        del key, rows
        return self.given


@pytest.mark.parametrize("case", cases("jepa_model"))
def test_the_whole_objective_is_i_jepas(case: dict[str, Any]) -> None:
    """Positions of the transposed grid, a predictor without its mask token, a gradient that reaches the targets."""
    config, given, out = case["config"], case["in"], case["out"]
    side = config["image"] // config["patch"]
    images = jnp.asarray(given["images_nchw"].transpose(0, 2, 3, 1))
    encoder = ViT(config["patch"], config["embed_dim"], config["depth"], config["heads"], config["mlp_ratio"])
    predictor = ViTPredictor(
        (side, side),
        config["predictor_embed_dim"],
        config["predictor_depth"],
        config["heads"],
        config["mlp_ratio"],
    )
    table = given["encoder"]["pos_embed"][0]
    np.testing.assert_allclose(positions(config["embed_dim"], (side, side)), table, rtol=1e-6, atol=1e-6)
    params = {"encoder": converted(given["encoder"]), "predictor": converted(given["predictor"])}
    whole = encoder.apply({"params": params["encoder"]}, images)
    np.testing.assert_allclose(whole, out["encoder_all_tokens"], **CLOSE)
    seen = encoder.apply({"params": params["encoder"]}, images, jnp.asarray(given["masks_enc"][0]))
    np.testing.assert_allclose(seen, out["encoder_context"], **CLOSE)

    blocks, _, size = given["masks_pred"].shape
    masks = GivenMasks((side, side), blocks, ((1, size),), ((side, side),), given["masks_enc"].shape[2])
    drawn = Masks(jnp.asarray(given["masks_enc"][0]), jnp.asarray(given["masks_pred"].transpose(1, 0, 2)))
    object.__setattr__(masks, "given", drawn)
    objective = JepaObjective(encoder, predictor, masks).bind({"image": images})
    # The target encoder is the encoder times 0.75, its positions apart, which telic keeps outside of the parameters.
    average = {"params": {**params, "encoder": jax.tree.map(lambda w: 0.75 * w, params["encoder"])}}
    step = Step(key=jax.random.key(0), averaged=average)

    def loss(params: Any) -> Any:
        return scalar_loss(objective, {"params": params}, {"image": images}, step)

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
    predictions = np.asarray(aux.outputs["prediction"]).transpose(1, 0, 2, 3).reshape(out["predictions"].shape)
    np.testing.assert_allclose(predictions, out["predictions"], **CLOSE)
    targets = np.asarray(aux.outputs["targets"]).transpose(1, 0, 2, 3).reshape(out["targets"].shape)
    np.testing.assert_allclose(targets, out["targets"], **CLOSE)
    np.testing.assert_allclose(value, out["loss"], **CLOSE)
    for part in ("encoder", "predictor"):
        found = named_leaves(grads[part])
        for name, norm in out["grad_norm"][part].items():
            np.testing.assert_allclose(jnp.linalg.norm(found[telic_names(name)]), norm, rtol=1e-8, err_msg=name)
