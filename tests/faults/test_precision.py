"""Numbers too narrow for what they are to hold."""

import jax
import jax.numpy as jnp
import numpy as np

import telic


def test_half_precision_computes_with_float32_moments() -> None:
    """XS087: Adam's second moment kept in bfloat16, where a thousand gradients of 0.001 stop adding up."""
    model = (lambda key, x: {"w": jnp.zeros(())}, lambda params, x: x * params["w"])
    loss = lambda targets, prediction: jnp.mean(prediction.astype(jnp.float32)) * 1e-3
    step = telic.train_step(model, loss, telic.optimizers.adam(1e-3, b2=0.999), precision="bfloat16")
    batch = (np.ones(1, np.float32), np.ones(1, np.float32))
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 1000, lambda _, s: step.step(s, batch).state, s))(step.init(batch))
    (second,) = jax.tree.leaves(state.opt_state.inner_state[0].nu)
    assert second.dtype == jnp.float32
    # The gradient itself was computed in bfloat16.
    np.testing.assert_allclose(second, float(jnp.bfloat16(1e-3)) ** 2 * (1 - 0.999**1000), rtol=1e-4)
