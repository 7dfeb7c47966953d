"""Probes: what they see, when they fire, and that training does not notice them."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.errors import ContractError


def init(key: Any, inputs: Any) -> Any:
    hidden, out = jax.random.split(key)
    return {
        "a": 0.3 * jax.random.normal(hidden, (inputs.shape[-1], 8)),
        "b": jax.random.normal(out, (8, 1)),
        "c": jnp.zeros(1),
    }


MODEL = (init, lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"] + params["c"])


class Conv(nn.Module):
    """A step that the driver runs straight-line, one batch at a time."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.relu(nn.Conv(4, (3, 3))(x)).reshape(x.shape[0], -1))


def regression(count: int, rows: int = 8) -> list[Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(count, rows, 3)).astype(np.float32)
    return [(one, one.sum(-1, keepdims=True)) for one in x]


def images(count: int) -> list[Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 4, 6, 6, 1)).astype(np.float32)
    return [(one, one.mean((1, 2))) for one in x]


def trainer(model: Any = MODEL, **options: Any) -> telic.Loop:
    return telic.trainer(model, "mean_squared_error", "adam", log=0, **options)


def norms(outputs: Any) -> Any:
    return jax.tree.map(jnp.linalg.norm, outputs["gradients"])


def bits(state: telic.LoopState) -> list[bytes]:
    step_state = state.step_state.replace(key=jax.random.key_data(state.step_state.key))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(step_state)]


@pytest.mark.parametrize(
    "kind", ["dense", "convolution", "window", pytest.param("planned window", marks=pytest.mark.exhaustive)]
)
def test_a_run_with_probes_has_the_bits_of_one_without(kind: str) -> None:
    """Catches a probe compiled into the program that trains, where it changes what XLA fuses."""
    data = images(7) if kind == "convolution" else regression(23)
    options: dict[str, Any] = {"accumulate": 3} if "window" in kind else {}

    def made() -> telic.Loop:
        if kind == "convolution":
            return trainer(Conv())
        if kind == "planned window":

            def terms(targets: Any, prediction: Any) -> Any:
                error = telic.Mean(jnp.sum((targets - prediction) ** 2), jnp.asarray(targets.size, jnp.float32))
                return telic.Terms({"error": (1.0, error)})

            return telic.trainer(MODEL, terms, "adam", log=0, **options)
        return trainer(**options)

    plain = made().run(data, epochs=2)
    probed = made().probe(norms, telic.every(5) | telic.last).run(data, epochs=2)
    assert bits(plain) == bits(probed)
    assert plain.history == probed.history


def test_values_are_those_of_the_batch_that_fires() -> None:
    """Catches a probe of the batch before or after, or one that sees the updated parameters."""
    data = regression(12)
    seen: dict[int, Any] = {}
    loop = trainer().probe(norms, telic.every(5), to=lambda values, s: seen.update({s.total_iterations: values}))
    loop.run(data)
    assert sorted(seen) == [5, 10]
    # By hand: train up to the batch before, then differentiate.
    params = trainer().run(data[:4]).step_state.variables["params"]
    inputs, targets = data[4]
    expected = jax.grad(lambda p: jnp.mean((MODEL[1](p, inputs) - targets) ** 2))(params)
    for name, gradient in expected.items():
        assert isinstance(seen[5][name], np.ndarray)
        np.testing.assert_allclose(seen[5][name], np.linalg.norm(np.asarray(gradient)), rtol=1e-4)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    ("filter", "limits", "expected"),
    [
        (telic.every(4), {"epochs": 2}, [4, 8, 12]),
        (telic.every(4, per_epoch=True), {"epochs": 2}, [4, 11]),
        (telic.last, {"epochs": 2}, [14]),
        (telic.last, {"steps": 9}, [9]),
        (telic.last, {"epochs": 1, "iterations": 5}, [5]),
        (telic.first | telic.last, {"epochs": 1}, [1, 7]),
        (~telic.every(2), {"epochs": 1}, [1, 3, 5, 7]),
    ],
)
def test_it_fires_where_its_filter_says(filter: Any, limits: dict[str, int], expected: list[int], fuse: bool) -> None:
    """Catches a firing inside a group of fused iterations, or a last one that nobody foresaw."""
    seen: list[int] = []
    loop = telic.Loop(lambda total, batch: total + batch, lambda batch: 0.0).drive(fuse=fuse)
    # A bare step's outputs are its new state.
    loop.probe(lambda total: total, filter, "total", to=lambda value, s: seen.append(int(value)))
    loop.run([np.float32(1)] * 7, **limits)
    assert seen == expected


def test_handlers_of_the_firing_read_it_whatever_their_order() -> None:
    """Catches a value that comes after the handlers attached before the probe, or that stays for later iterations."""
    seen: list[tuple[int, list[str]]] = []
    loop = trainer().handle_event("iteration_completed", lambda s: seen.append((s.total_iterations, list(s.probes))))
    loop.probe(norms, telic.every(2)).probe(lambda o: o["prediction"].mean(), telic.every(3), "mean")
    kept = loop.run(regression(6))
    assert seen == [(1, []), (2, ["norms"]), (3, ["mean"]), (4, ["norms"]), (5, []), (6, ["norms", "mean"])]
    assert set(kept.keep().probes) == {"norms", "mean"}


def test_a_probe_can_halt_the_run() -> None:
    """Catches the answer of `to` being dropped."""
    loop = trainer().probe(norms, telic.every(3), to=lambda values, s: telic.HALT_LOOP)
    final = loop.run(regression(9))
    assert (final.status, final.total_iterations) == ("halted", 3)


def test_a_smaller_last_batch_and_other_shapes_are_probed() -> None:
    """Catches a probe compiled for one shape alone."""
    data = [*regression(3), (np.ones((2, 3), np.float32), np.ones((2, 1), np.float32))]
    seen: list[int] = []
    loop = trainer().probe(lambda o: jnp.asarray(o["prediction"].shape[0]), telic.every(2), "rows")
    loop.handle_event("iteration_completed", lambda s: seen.append(int(s.probes["rows"])), telic.every(2))
    loop.run(data, epochs=2)
    assert seen == [8, 2, 8, 2]
    with pytest.raises(telic.errors.ShapeError, match="batch 1 of epoch 0"):
        trainer().probe(norms, telic.every(2)).run(
            [data[0], (np.ones((9, 3), np.float32), np.ones((9, 1), np.float32))]
        )


def test_without_compilation_it_gives_the_same() -> None:
    """Catches a probe that only works inside jit."""
    values: list[Any] = []
    for jit in (True, False):
        loop = trainer().probe(norms, telic.once(2), to=lambda v, s: values.append(v))
        loop.run(regression(2), jit=jit)
    for name in values[0]:
        np.testing.assert_allclose(values[0][name], values[1][name], rtol=1e-5)


# -- gradients -----------------------------------------------------------------------------------------------------


def test_a_metric_may_read_gradients_and_validation_leaves_it_out() -> None:
    """Catches gradients that only probes have, and a validation that fails because it has none."""

    def size(gradient: Any) -> Any:
        return jnp.linalg.norm(gradient)

    loop = trainer().metric(size, "size", reads="gradients.a").validate(regression(2))
    history = loop.run(regression(5)).history[0]
    assert history["size"] > 0
    assert "validation_loss" in history
    assert "validation_size" not in history


def test_a_bare_step_does_not_return_gradients() -> None:
    """Catches a tree as large as the model among the outputs of every step that users call themselves."""
    step = telic.train_step(MODEL, "mean_squared_error", "adam")
    batch = regression(1)[0]
    state = jax.eval_shape(step.init, batch)
    assert "gradients" not in jax.eval_shape(lambda s: step.step(s, batch).outputs, state)
    shown = dataclasses.replace(step, expose_gradients=True)
    gradients = jax.eval_shape(lambda s: shown.step(s, batch).outputs, state)["gradients"]
    assert jax.tree.structure(gradients) == jax.tree.structure(state.variables["params"])


def test_sliced_batches_and_replayed_windows_say_that_they_have_no_gradient() -> None:
    """Catches the gradients of slices joined as if they were rows."""
    with pytest.raises(ContractError, match=r"reads 'gradients'.*microbatch="):
        trainer(microbatch=4).probe(norms, telic.every(2)).run(regression(3))


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_is_no_probe_is_refused() -> None:
    """Catches a filter that is asked after the iteration, a name taken twice, a function that gives no array."""
    with pytest.raises(ValueError, match="filter of counts alone"):
        trainer().probe(norms, telic.when(lambda s: True))
    with pytest.raises(ValueError, match="filter of counts alone"):
        trainer().probe(norms, telic.every(3) | telic.every_seconds(3.0))
    with pytest.raises(ValueError, match="'norms' already"):
        trainer().probe(norms, telic.always).probe(norms, telic.every(2))
    with pytest.raises(ValueError, match="give name="):
        trainer().probe(lambda o: o["loss"], telic.always)
    with pytest.raises(TypeError, match="function of the step's outputs"):
        trainer().probe("norms", telic.always)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="to must be a function"):
        trainer().probe(norms, telic.always, to="file")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"probe 'a' reads 'logits'.*There: .*prediction"):
        trainer().probe(lambda o: o["logits"], telic.always, "a").run(regression(1))
    with pytest.raises(TypeError) as caught:
        trainer().probe(lambda o: "text", telic.always, "a").run(regression(1))
    assert any("probe 'a'" in note for note in caught.value.__notes__)


def test_a_copy_has_the_probes_and_adds_its_own() -> None:
    """Catches two loops that share one table."""
    first = trainer().probe(norms, telic.every(2))
    second = first.copy().probe(lambda o: o["loss"], telic.every(2), "loss")
    assert set(first.run(regression(2)).probes) == {"norms"}
    assert set(second.run(regression(2)).probes) == {"norms", "loss"}
