"""The diffusion objective on networks of one line: what it draws, drops, averages, samples and refuses."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.artifacts import ImageGrid, Scalars
from telic.errors import DataError, ShapeError
from telic.models.dit import time_waves
from telic.objectives import DiffusionObjective
from telic.objectives.diffusion import (
    EDM,
    SAMPLERS,
    VP,
    Cosine,
    Data,
    Discrete,
    Epsilon,
    Flow,
    FlowVelocity,
    Guidance,
    Heun,
    Karras,
    LogitNormal,
    MinSNR,
    Process,
    Uniform,
    Velocity,
    as_process,
    resolution_shift,
    run_sampler,
    way,
)

Tree = dict[str, Any]


def network(key: Any, inputs: Any) -> Tree:
    del key, inputs
    return {"params": {"w": jnp.full((), 0.5), "label": jnp.linspace(-1.0, 1.0, 4)}}


def apply(variables: Tree, inputs: Tree) -> Any:
    shift = variables["params"]["label"][inputs["label"]] if "label" in inputs else jnp.zeros(1)
    return variables["params"]["w"] * inputs["x"] + shift.reshape(-1, *[1] * (inputs["x"].ndim - 1))


MODEL = (network, apply)


def batch(rows: int = 6, shape: tuple[int, ...] = (4, 4, 1)) -> Tree:
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (rows, *shape)).astype(np.float32)
    return {"image": images, "label": np.arange(rows, dtype=np.int32) % 3}


def made(process: Any = "flow", **options: Any) -> DiffusionObjective:
    return DiffusionObjective(MODEL, process, conditions={"label": 3}, **options).bind(batch())


def variables(objective: DiffusionObjective) -> Any:
    return objective.init(jax.random.key(0))


def step(seed: int = 0, **options: Any) -> telic.Step:
    return telic.Step(key=jax.random.key(seed), **options)


# -- the loss --------------------------------------------------------------------------------------------------------


def test_every_row_has_a_time_and_noise_of_its_own() -> None:
    """S48: one draw for all rows or shards, which cuts the effective batch."""
    objective = made()
    given = batch(8)
    given["image"][:] = 0
    _, aux = objective.loss(variables(objective), given, step())
    assert len(set(np.asarray(aux.outputs["t"]).tolist())) == 8
    # The data are all alike, so the outputs differ by time and noise alone.
    outputs = np.asarray(aux.outputs["prediction"]).reshape(8, -1)
    assert len(np.unique(outputs.round(5), axis=0)) == 8


def test_a_change_of_one_draw_leaves_the_others_alone() -> None:
    """Conditions that are dropped, or a wider model, and with them another noise."""
    seen = []
    for dropout in (0.0, 0.5):
        objective = made(condition_dropout=dropout)
        _, aux = objective.loss(variables(objective), batch(), step())
        seen.append((aux.outputs["t"], aux.outputs["prediction"]))
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    assert not np.array_equal(seen[0][1], seen[1][1])
    kept = np.isclose(seen[0][1], seen[1][1]).all(axis=(1, 2, 3))
    assert kept.any()


def test_condition_dropout_replaces_whole_rows_in_training_alone() -> None:
    """A null per element, a rate that also holds in validation, or another rate than asked for."""
    seen: list[Any] = []

    def spy(variables: Tree, inputs: Tree) -> Any:
        seen.append(inputs)
        return variables["params"]["w"] * inputs["x"]

    objective = DiffusionObjective((network, spy), conditions={"label": 3, "text": 0.0}, condition_dropout=0.25)
    given = batch(4000, (2, 2))
    given["label"] = np.zeros(4000, np.int32)
    given["text"] = np.ones((4000, 3), np.float32)
    bound = objective.bind(given)
    bound.loss(variables(bound), given, step())
    dropped = np.asarray(seen[-1]["label"]) == 3
    assert abs(dropped.mean() - 0.25) < 0.03
    np.testing.assert_array_equal(np.asarray(seen[-1]["text"]), np.where(dropped, 0.0, 1.0)[:, None] * np.ones(3))
    bound.loss(variables(bound), given, step(train=False))
    assert (np.asarray(seen[-1]["label"]) == 0).all()


def test_the_loss_is_a_mean_over_examples() -> None:
    """A sum, or a mean over elements that a row without weight still counts in."""
    objective = made()
    whole, aux = objective.loss(variables(objective), batch(), step())
    np.testing.assert_allclose(whole.total, aux.outputs["losses"].sum(), rtol=1e-6)
    assert float(whole.mass) == 6
    weights = np.array([1, 1, 0, 0, 2, 0], np.float32)
    given = batch()
    given["image"][2] = np.nan
    weighted, aux = objective.loss(variables(objective), {**given, "weights": weights}, step())
    expected = np.asarray(aux.outputs["losses"])[[0, 1, 4]] @ [1, 1, 2]
    np.testing.assert_allclose(weighted.total, expected, rtol=1e-6)
    assert float(weighted.mass) == 4
    # What stands in a dropped row reaches no gradient.
    dropped = {**given, "weights": weights}
    grads = jax.grad(lambda v: telic.scalar_loss(objective, v, dropped, step())[0])(variables(objective))
    assert np.isfinite(grads["params"]["w"])


def test_the_moving_average_moves_as_it_says() -> None:
    """XS174: an average that inference uses and nothing updates."""
    objective = DiffusionObjective(MODEL, conditions={"label": 3}, ema_decay=0.9)
    given = batch(8)
    trainer = telic.Trainer(objective, telic.optimizers.sgd(0.1), key=0)
    states = [trainer.place(example=given)]
    compiled = trainer.train_step().bind(given)
    run = jax.jit(lambda state: compiled.step(state, given).state)
    for _ in range(20):
        states.append(run(states[-1]))
    expected = states[0].variables["params"]["w"]
    for state in states[1:]:
        expected = 0.9 * expected + 0.1 * state.variables["params"]["w"]
    assert states[-1].variables["params"]["w"] != 0.5
    np.testing.assert_allclose(states[-1].averaged["params"]["w"], expected, rtol=1e-5)


@pytest.mark.parametrize(("name", "prediction"), [("flow", FlowVelocity()), ("edm", Karras()), ("ddpm", Epsilon())])
def test_the_right_output_has_no_loss(name: str, prediction: Any) -> None:
    """A target of another prediction than the one that is asked for."""
    process = as_process(name)
    assert process.prediction == prediction
    t = process.schedule.draw(jax.random.key(0), (5,))
    data, noise = jax.random.normal(jax.random.key(1), (2, 5, 3))
    target = process.target(data, noise, t)
    np.testing.assert_array_equal(process.losses(target, data, noise, t), np.zeros(5))
    found, found_noise = process.estimates(process.noised(data, noise, t), target, t)
    np.testing.assert_allclose(found, data, atol=2e-3)
    np.testing.assert_allclose(found_noise, noise, atol=2e-3)


# -- schedules and weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [Discrete.linear(50), Discrete.cosine(50), Discrete.sqrt(50), Flow(), EDM(), VP(), Cosine()],
    ids=lambda s: f"{type(s).__name__}",
)
def test_noise_grows_and_levels_are_found_again(schedule: Any) -> None:
    """A schedule that is not monotonic, or a time that is not the level's."""
    times = np.asarray(schedule.times(10))
    alpha, sigma = (np.asarray(v, np.float64) for v in schedule.marginal(times))
    ratio = sigma / np.maximum(alpha, 1e-12)
    assert (np.diff(ratio) < 0).all()
    inside = alpha > 1e-6
    np.testing.assert_allclose(schedule.time_of(ratio[inside].astype(np.float32)), times[inside], rtol=2e-3, atol=2e-3)
    if isinstance(schedule, Discrete | VP | Cosine):
        np.testing.assert_allclose(alpha**2 + sigma**2, 1, rtol=1e-5)


def test_diffusion_lms_square_root() -> None:
    """A square root of the noise where the signal's should be."""
    schedule = Discrete.sqrt(2000)
    t = np.arange(1, 2001) / 2000
    expected = (1 - np.sqrt(t + 1e-4)) / (1 - np.sqrt(1e-4))
    np.testing.assert_allclose(schedule.alphas_cumprod[:-20], expected[:-20], rtol=1e-9)


def test_training_covers_where_sampling_starts() -> None:
    """XS175: times capped at 0.999 and sampling that starts at 1; a last step that is never drawn."""
    drawn = Discrete.linear(50).draw(jax.random.key(0), (20_000,))
    assert set(np.unique(drawn)) == set(range(50))
    assert Discrete.linear(50).times(5)[0] == 49
    uniform = np.asarray(Uniform().draw(jax.random.key(0), (100_000,)))
    assert uniform.min() > 0
    assert uniform.max() == 1 or 1 - uniform.max() < 1e-4
    assert Flow(density=Uniform()).times(5)[0] == 1


def test_edms_levels_can_be_told_apart() -> None:
    """Catches EDM digits of no class (33.7 % recognised): the paper's log(sigma) / 4 hardly moves a DiT's waves."""

    def likeness(schedule: EDM) -> float:
        low, high = (time_waves(schedule.network_time(jnp.array([t])), 64)[0] for t in (0.1, 1.0))
        return float(jnp.vdot(low, high) / jnp.linalg.norm(low) / jnp.linalg.norm(high))

    assert EDM(time_scale=250.0).network_time(np.exp(4.0)) == pytest.approx(250.0)
    assert likeness(EDM(time_scale=250.0)) < 0.7 < 0.95 < likeness(EDM())
    with pytest.raises(ValueError, match=r"time_scale must be positive"):
        EDM(time_scale=0.0)


def test_zero_terminal_snr() -> None:
    """A rescaled schedule whose last step keeps some data, a weight that hides the step, noise asked of a noise net."""
    schedule = Discrete.scaled_linear(100).zero_terminal_snr()
    assert schedule.alphas_cumprod[-1] == 0
    last = np.array([99])
    velocity = Process(schedule, Velocity())
    np.testing.assert_array_equal(velocity.weight(last), [1])
    # XS173: documented as 0 for min-SNR, and 1 without a weighting.
    np.testing.assert_array_equal(Process(schedule, Velocity(), MinSNR()).weight(last), [0])
    noise = jax.random.normal(jax.random.key(0), (1, 3))
    x = velocity.noised(jnp.ones((1, 3)), noise, last)
    np.testing.assert_array_equal(x, noise)
    with pytest.raises(ValueError, match=r"zero terminal SNR.*Velocity"):
        Process(schedule, Epsilon())
    found = DiffusionObjective(MODEL, velocity, conditions={"label": 3}).bind(batch())
    assert np.isfinite(found.sample(variables(found), jax.random.key(0), 2, num_steps=4)).all()


def test_min_snr_by_hand() -> None:
    """S47 and XS172, on the three ratios of the report."""
    snr = jnp.asarray([32.33, 1.0, 0.0])
    alpha, sigma = jnp.sqrt(snr / (1 + snr)), jnp.sqrt(1 / (1 + snr))
    from telic.objectives.diffusion.weightings import output_weight

    np.testing.assert_allclose(output_weight(MinSNR(5.0), Velocity(), alpha, sigma), [5 / 33.33, 0.5, 0], rtol=1e-4)
    np.testing.assert_allclose(output_weight(MinSNR(5.0), Epsilon(), alpha, sigma), [5 / 32.33, 1, 1], rtol=1e-4)
    np.testing.assert_allclose(output_weight(MinSNR(5.0), Data(), alpha, sigma), [5, 1, 0], rtol=1e-4)


def test_resolution_shift_is_fluxs() -> None:
    """A shift that grows with the side in place of the tokens."""
    assert resolution_shift(256) == pytest.approx(np.exp(0.5))
    assert resolution_shift(4096) == pytest.approx(np.exp(1.15))


# -- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["edm", "flow", "cosine"])
def test_samples_of_an_exact_network_have_the_datas_distribution(name: str) -> None:
    """A start of the wrong size, or a network that is told another time than in training."""
    process, mean, std = as_process(name), 0.3, 0.5

    def exact(variables: Tree, inputs: Tree) -> Any:
        del variables
        scale, t = inputs["x"], inputs["t"]
        # Invert what the network is told into the time it stands for.
        time = {"edm": jnp.exp(4 * t), "flow": t / 1000, "cosine": t}[name][0]
        time = time.astype(jnp.int32) if name == "cosine" else time
        alpha, sigma = process.schedule.marginal(time)
        x = scale / process.prediction.input_scale(alpha, sigma)
        data = (alpha * std**2 * x + sigma**2 * mean) / (alpha**2 * std**2 + sigma**2)
        return process.prediction.target(data, (x - alpha * data) / sigma, alpha, sigma)

    objective = DiffusionObjective((network, exact), process, data_range=None)
    draw = jax.jit(
        lambda key: objective.sample(network(None, None), key, 4000, shape=(2,), num_steps=30, sampler="dpmpp_2m")
    )
    samples = draw(jax.random.key(0))
    assert abs(float(samples.mean()) - mean) < 0.03
    assert abs(float(samples.std()) - std) < 0.03


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_sampler_runs_on_every_process_it_fits(name: str) -> None:
    """A sampler that divides by an alpha of 0, or by a last step of no length."""
    for process in ("flow", "edm", "zero_snr"):
        objective = made(process)
        if name == "heun" and process != "edm":
            with pytest.raises(ValueError, match="flow_heun"):
                objective.sample(variables(objective), jax.random.key(0), 2, sampler=name, num_steps=3)
            continue
        found = objective.sample(variables(objective), jax.random.key(0), 2, sampler=name, num_steps=3)
        assert found.shape == (2, 4, 4, 1)
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= 1


def test_guidance_mixes_two_outputs_and_keeps_to_its_interval() -> None:
    """A scale that acts on the unconditional part, or outside of the interval."""
    objective = made("edm")
    held = variables(objective)
    label = np.array([0, 1, 2], np.int32)
    levels = way(EDM(), np.array([2.0, 0.5]))
    x = jax.random.normal(jax.random.key(0), (3, 4, 4, 1))
    conditions = {"label": jnp.asarray(label)}

    def at(point: Any, guide: Any, given: Any = conditions) -> Any:
        here = jax.tree.map(lambda v: v[point], levels)
        return np.asarray(objective._denoiser(held, given, guide, step(train=False))(x, here))

    plain, null = at(0, None), at(0, None, {"label": jnp.full(3, 3)})
    assert not np.allclose(plain, null)
    np.testing.assert_allclose(at(0, Guidance(3.0)), null + 3 * (plain - null), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(at(0, Guidance(1.0)), plain)
    inner = Guidance(3.0, interval=(0.1, 1.0))
    np.testing.assert_allclose(at(0, inner), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(at(1, inner), at(1, Guidance(3.0)), rtol=1e-5, atol=1e-6)


def test_one_key_one_sample_and_steps_fall() -> None:
    """Samples that depend on what was drawn before; a way that goes back."""
    objective = made()
    draw = [objective.sample(variables(objective), jax.random.key(s), 2, num_steps=2) for s in (0, 0, 1)]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert not np.array_equal(draw[0], draw[2])
    with pytest.raises(ValueError, match="times must fall"):
        way(Flow(), [0.2, 0.5])
    with pytest.raises(ValueError, match="pass key="):
        run_sampler(lambda x, p: x, jnp.zeros((1, 2)), way(Flow(), [1.0, 0.5]), sampler="ddpm")


# -- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluate_reports_levels_and_pictures_and_preview_samples() -> None:
    """A level that every batch draws anew, so that validation losses cannot be compared."""
    objective = made("edm", num_levels=3, num_steps=2)
    held = variables(objective)
    scores, grid = objective.evaluate(held, batch(), step(train=False))
    assert isinstance(scores, Scalars)
    assert isinstance(grid, ImageGrid)
    assert sorted(scores.values) == ["level_0_loss", "level_1_loss", "level_2_loss"]
    assert all(float(mean.mass) == 6 for mean in scores.values.values())
    again, _ = objective.evaluate(held, batch(), step(train=False))
    assert all(again.values[name].total == mean.total for name, mean in scores.values.items())
    for shown in (grid, objective.preview(held, batch(), step(train=False), scored=None)):
        assert shown.images.shape == (6, 4, 4, 1)
        assert 0 <= float(shown.images.min()) <= float(shown.images.max()) <= 1
    drawn = made("edm", num_levels=0, num_steps=2, scoring="samples").evaluate(held, batch(), step(train=False))
    assert drawn[0].images.shape == (6, 4, 4, 1)


@pytest.mark.slow
def test_videos_vectors_and_latents() -> None:
    """A loss or sample that takes every array for an image."""
    for shape in ((3, 4, 4, 1), (5,)):
        given = batch(4, shape)
        objective = DiffusionObjective(MODEL, "flow", conditions={"label": 3}, num_steps=2).bind(given)
        value, _ = objective.loss(variables(objective), given, step())
        assert np.isfinite(float(value.value()))
        assert objective.sample(variables(objective), jax.random.key(0), 2).shape == (2, *shape)

    class Halves:
        variables: ClassVar[Tree] = {"params": {"scale": jnp.full((), 2.0)}}

        def encode(self, variables: Any, images: Any, *, key: Any) -> Any:
            del key
            return images[:, ::2, ::2] * variables["params"]["scale"]

        def decode(self, variables: Any, latents: Any) -> Any:
            return jnp.repeat(jnp.repeat(latents / variables["params"]["scale"], 2, axis=1), 2, axis=2)

    objective = DiffusionObjective(MODEL, "flow", conditions={"label": 3}, autoencoder=Halves(), num_steps=2)
    bound = objective.bind(batch())
    held = variables(bound)
    _, aux = bound.loss(held, batch(), step())
    assert aux.outputs["prediction"].shape == (6, 2, 2, 1)
    assert bound.sample(held, jax.random.key(0), 2).shape == (2, 4, 4, 1)
    grads = jax.grad(lambda v: telic.scalar_loss(bound, v, batch(), step())[0])(held)
    np.testing.assert_array_equal(grads["autoencoder"]["params"]["scale"], 0)
    shown = bound.preview(held, batch(), step(train=False))
    assert shown.images.shape == (6, 4, 4, 1)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((6, 4, 4, 1), np.uint8)}, r"floating-point in \[-1, 1\], got uint8.*127.5"),
        ({"image": np.full((6, 4, 4, 1), 255.0, np.float32)}, r"must lie in \[-1, 1\], got values from 255 to 255"),
        ({"image": np.zeros((6,), np.float32)}, r"must be \[batch, \.\.\.\]"),
        ({"label": None}, "'label' is missing"),
        ({"image": None}, "'image' is missing from"),
    ],
)
def test_batches_it_cannot_read(change: Tree, message: str) -> None:
    """Bytes that train to nonsense without a word, a typo in a field's name."""
    given = {name: value for name, value in {**batch(), **change}.items() if value is not None}
    with pytest.raises((DataError, ShapeError), match=message):
        DiffusionObjective(MODEL, "flow", conditions={"label": 3}).bind(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": 2.0}, "guidance strengthens a condition"),
        ({"guidance": 2.0, "conditions": {"label": 3}, "condition_dropout": 0.0}, "condition_dropout is 0"),
        ({"condition_dropout": 1.0}, "condition_dropout"),
        ({"conditions": {"x": 0}}, "'x' or 't'"),
        ({"process": "flw"}, "Did you mean 'flow'"),
        ({"sampler": "dpmpp"}, "unknown sampler"),
        ({"scoring": "both"}, "'denoised' or 'samples'"),
        ({"data_range": (1.0, 0.0)}, "data_range"),
    ],
)
def test_settings_that_contradict_each_other(options: Tree, message: str) -> None:
    """Guidance that was never trained for, found after a day of training."""
    with pytest.raises(ValueError, match=message):
        DiffusionObjective(MODEL, **options)


def test_samplers_and_spacings_that_do_not_fit() -> None:
    """A division by zero inside of the loop, far from its cause."""
    noise_net = DiffusionObjective(MODEL, Process(Flow(), Epsilon()), conditions={"label": 3}).bind(batch())
    with pytest.raises(ValueError, match="Epsilon says nothing of the data"):
        noise_net.sample(variables(noise_net), jax.random.key(0), 2, num_steps=2)
    objective = made("ddpm")
    held = variables(objective)
    with pytest.raises(ValueError, match="1 to 1000"):
        objective.sample(held, jax.random.key(0), 2, num_steps=2000)
    with pytest.raises(ValueError, match=r"unknown timestep spacing 'traling'.*'trailing'"):
        objective.sample(held, jax.random.key(0), 2, num_steps=2, spacing="traling")
    with pytest.raises(ValueError, match="num="):
        objective.sample(held, jax.random.key(0))
    with pytest.raises(DataError, match="unknown: \\['labels'\\]"):
        objective.sample(held, jax.random.key(0), conditions={"labels": np.zeros(2, np.int32)})
    with pytest.raises(ValueError, match="churn"):
        Heun(space="flow", churn=1.0)


def test_a_model_of_another_shape_or_signature() -> None:
    """A last layer of the wrong width that broadcasts in the loss."""
    wrong = DiffusionObjective((network, lambda v, i: i["x"][..., :0].sum(-1)), "flow").bind(batch())
    with pytest.raises(ShapeError, match=r"\(6, 4, 4, 1\), got \(6, 4, 4\)"):
        wrong.loss(variables(wrong), batch(), step())


def test_logit_normal_is_centred() -> None:
    """A mean on the wrong side of a half."""
    drawn = LogitNormal(mean=1.0).draw(jax.random.key(0), (2000,))
    assert float(jnp.median(drawn)) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("process", ["flow", "edm", "ddpm"])
def test_it_keeps_the_contract(process: str) -> None:
    from telic.testing import check_objective

    check_objective(DiffusionObjective(MODEL, process, conditions={"label": 3}), batch(8)).check()
