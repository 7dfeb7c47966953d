"""Law: how iterations are grouped into dispatches changes no bit, no event and no metric."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import telic


class Net(nn.Module):
    """Dropout and BatchNorm, so that keys and layer state are in the law."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(4)(x)


def batches(count: int, *, last: int = 8, poison: Sequence[int] = ()) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        rows = last if i == count - 1 else 8
        x = rng.normal(size=(rows, 5)).astype(np.float32)
        if i in poison:
            x[0, 0] = np.nan
        out.append((x, rng.integers(0, 4, rows).astype(np.int32)))
    return out


def train(data: Any, *, fuse: bool, every: int | None = None, epochs: int = 2, **options: Any) -> tuple[Any, list[Any]]:
    seen: list[Any] = []
    trainer = telic.Trainer(telic.supervised(Net(), "softmax_cross_entropy"), optax.adamw(1e-2), key=0, **options)
    loop = trainer.loop(log=0, fuse=fuse).metric("accuracy")
    if every is not None:
        loop.handle_event(
            ["iteration_started", "iteration_completed", "step_completed"],
            lambda s: seen.append((s.epoch, s.iteration, s.metrics["accuracy"] if s.iteration else None)),
            telic.every(every),
        )
    return loop.run(data, epochs=epochs), seen


def assert_same(a: Any, b: Any) -> None:
    left, right = (jax.tree_util.tree_leaves_with_path(s.step_state) for s in (a, b))
    for (path, x), (_, y) in zip(left, right, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)
    assert a.history == b.history
    assert a.event_counts == b.event_counts
    assert (a.epoch, a.iteration, a.total_iterations) == (b.epoch, b.iteration, b.total_iterations)


@pytest.mark.parametrize(
    ("accumulate", "every"),
    [
        (1, None),
        (3, 4),
        *(pytest.param(k, n, marks=pytest.mark.exhaustive) for k, n in ((1, 1), (1, 4), (3, None), (3, 1))),
    ],
)
def test_groups_of_any_length_give_the_bits_of_one_by_one(accumulate: int, every: int | None) -> None:
    """Would catch a step that reads the wrong batch of a group, a window or metric that a group cuts, a lost event."""
    data = batches(23, last=5, poison=[4, 5, 22])
    fused, seen = train(data, fuse=True, every=every, accumulate=accumulate)
    single, seen_single = train(data, fuse=False, every=every, accumulate=accumulate)
    assert_same(fused, single)
    assert seen == seen_single
    assert int(single.step_state.rejections.total) == 6


@pytest.mark.parametrize("kind", ["function", pytest.param("columns", marks=pytest.mark.exhaustive)])
def test_reading_ahead_changes_no_bit_and_no_position(kind: str) -> None:
    """Would catch a batch that is lost, read twice or overwritten when an epoch is halted with more read ahead."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(200, 5)).astype(np.float32), rng.integers(0, 4, 200).astype(np.int32)
    columns = telic.data.columns({"inputs": x, "targets": y}, batch=8)
    whole = batches(25, poison=[3])
    ends: list[Any] = []
    for fuse in (True, False):
        trainer = telic.Trainer(telic.supervised(Net(), "softmax_cross_entropy"), optax.adamw(1e-2), key=0)
        loop = trainer.loop(log=0, fuse=fuse).metric("accuracy")
        loop.handle_event("iteration_completed", lambda _: telic.HALT_EPOCH, telic.once(7, per_epoch=True))
        ends.append(loop.run(columns if kind == "columns" else (lambda epoch: whole[epoch:]), epochs=3))
    assert_same(*ends)
    assert ends[0].position == ends[1].position
    assert ends[0].total_iterations == 21


def test_groups_are_longer_than_one() -> None:
    """Would catch a driver that never fuses: the law above would hold and prove nothing."""
    widths: list[int] = []
    from telic.driver import StepDriver

    original = StepDriver.advance

    def spy(self: StepDriver, batches: Any, **options: Any) -> None:
        widths.append(len(batches))
        original(self, batches, **options)

    StepDriver.advance = spy  # type: ignore[method-assign]
    try:
        train(batches(64), fuse=True)
        assert max(widths) > 4
        assert sum(widths) == 128
        widths.clear()
        train(batches(12), fuse=True, every=1)
        assert set(widths) == {1}
    finally:
        StepDriver.advance = original  # type: ignore[method-assign]


def test_a_step_with_a_convolution_runs_straight_line() -> None:
    """Would catch convolution gradients put inside a loop, which XLA runs about four times slower on the CPU."""
    from telic.driver import StepDriver

    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(3)(nn.relu(nn.Conv(4, (3, 3))(x)).mean((1, 2)))

    widths: list[int] = []
    original = StepDriver.advance

    def spy(self: StepDriver, batches: Any, **options: Any) -> None:
        widths.append(self.width)
        original(self, batches, **options)

    StepDriver.advance = spy  # type: ignore[method-assign]
    try:
        data = [(np.ones((4, 6, 6, 1), np.float32), np.zeros(4, np.int32))] * 20
        telic.trainer(Conv(), "softmax_cross_entropy", "sgd", log=0).run(data, epochs=2)
    finally:
        StepDriver.advance = original  # type: ignore[method-assign]
    assert set(widths) == {1}
