"""What a step costs: operations of scans, memory, and the peak of the device."""

import jax
import jax.numpy as jnp
import pytest

from telic.profiling import flops_of, measured_peak, memory_of, published_peak, repeated_flops


def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0].sum()


def test_the_turns_of_a_scan_are_counted() -> None:
    """Catches a utilisation that is too low by the number of layers, since the compiler counts a body once."""
    x, weights = jnp.ones((32, 64)), jnp.ones((5, 64, 64))
    once = 2 * 32 * 64 * 64
    assert repeated_flops(jax.make_jaxpr(layers)(x, weights)) == 4 * once
    # Backwards, each turn makes two more products.
    gradient = jax.grad(layers, argnums=1)
    assert repeated_flops(jax.make_jaxpr(gradient)(x, weights)) == 4 * 3 * once
    counted = flops_of(jax.jit(gradient).lower(x, weights).compile())
    assert counted is not None
    assert counted + repeated_flops(jax.make_jaxpr(gradient)(x, weights)) == pytest.approx(5 * 3 * once, rel=0.05)


def test_a_scan_inside_a_scan_multiplies() -> None:
    """Catches a sum of lengths instead of their product, and a jitted function that is not looked into."""
    x = jnp.ones((8, 8))
    inner = jax.jit(lambda c: jax.lax.scan(lambda c, _: (c @ x, None), c, length=3)[0])
    outer = lambda c: jax.lax.scan(lambda c, _: (inner(c), None), c, length=4)[0]
    assert repeated_flops(jax.make_jaxpr(outer)(x)) == (12 - 1) * 2 * 8**3


def test_of_two_branches_the_dearer_counts() -> None:
    """Catches a conditional that is counted with both its branches."""
    x = jnp.ones((8, 8))

    def loop(turns: int) -> object:
        return lambda c: jax.lax.scan(lambda c, _: (c @ x, None), c, length=turns)[0]

    step = lambda c: jax.lax.cond(c.sum() > 0, loop(2), loop(6), c)
    assert repeated_flops(jax.make_jaxpr(step)(x)) == 5 * 2 * 8**3


def test_a_convolution_counts_its_kernel() -> None:
    """Catches a convolution of many turns that costs nothing, or is counted with its output channels twice."""
    kernel = jnp.ones((3, 3, 4, 4))

    def turn(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.conv_general_dilated(c, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), None

    step = lambda c: jax.lax.scan(turn, c, length=3)[0]
    assert repeated_flops(jax.make_jaxpr(step)(jnp.ones((2, 8, 8, 4)))) == 2 * (2 * 2 * 8 * 8 * 4 * 3 * 3 * 4)


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", jnp.float16, 989e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H200 NVL", "bfloat16", None),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v6 lite", "bfloat16", 918e12),
        ("TPU v4", "float32", None),
        ("NVIDIA L40S", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_a_peak_is_that_of_the_device_itself(kind: str, dtype: object, peak: float | None) -> None:
    """Catches the sheet of another device whose name begins alike, and a narrow peak given for float32."""
    assert published_peak(kind, dtype) == peak


def test_memory_does_not_count_given_away_buffers_twice() -> None:
    """Catches a peak that adds the new state to the old one whose memory it takes."""
    x = jnp.ones((1024,))
    kept = memory_of(jax.jit(lambda x: x + 1).lower(x).compile())
    given = memory_of(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
    assert kept is not None
    assert given is not None
    assert (kept.argument_bytes, kept.result_bytes) == (4096, 4096)
    assert (given.argument_bytes, given.result_bytes) == (4096, 0)
    assert given.peak_bytes == 4096 + given.scratch_bytes


def test_the_peak_is_that_of_the_best_of_several_products() -> None:
    """Catches a peak in other units, or one that counts the compilation."""
    ticks = iter(float(i) for i in range(100))
    size = 768 if jax.default_backend() == "cpu" else 8192
    assert measured_peak("float32", clock=lambda: next(ticks)) == 2 * size**3
