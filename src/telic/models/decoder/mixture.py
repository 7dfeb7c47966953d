"""The mixture of experts of a block: a router, and MLPs that run on the tokens it sends them.

B batch, T time, D d_model, E experts, F width of an expert, k experts per token, M = B T k pairs of token and expert.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from telic.models.decoder.config import DecoderConfig, Experts
from telic.models.decoder.feedforward import ACTIVATIONS
from telic.models.decoder.routing import route, statistics_of
from telic.types import Array


class MixtureOfExperts(nn.Module):
    """A mixture of experts.

    Attributes:
      config: The decoder's architecture, with experts.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD: Array, counted_BT: Array | None) -> tuple[Array, dict[str, Array]]:
        """Give the branch [batch, time, d_model] and what `RouterStatistics` sums, for this layer.

        Args:
          x_BTD: Normed hidden states.
          counted_BT: Tokens that count in the statistics, bool [batch, time]; None counts all.
        """
        c, experts = self.config, _experts_of(self.config)
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        spread = nn.initializers.normal(c.init_std)
        ending = nn.initializers.normal(c.init_std / math.sqrt(2 * c.num_layers))
        router: Any = nn.Dense(experts.num_experts, use_bias=False, dtype=wide, kernel_init=spread, name="router")
        logits = router(x_BTD)
        bias: Any = None
        if experts.bias:
            bias = self.variable("router_bias", "bias", jnp.zeros, (experts.num_experts,)).value
        chosen, weights, shares = route(logits, experts, bias)
        inner, outer = (experts.num_experts, c.d_model, c.ff_width), (experts.num_experts, c.ff_width, c.d_model)
        names = ("gate", "up") if c.gated else ("up",)
        into: list[Any] = [Kernels(inner, spread, name=name)() for name in names]
        down: Any = Kernels(outer, ending, name="down")()
        run = _dense if experts.dispatch == "dense" else _sorted
        branch = run(x_BTD, into, down, chosen, weights.astype(x_BTD.dtype), c)
        return branch, statistics_of(logits, chosen, shares, counted_BT)


class Kernels(nn.Module):
    """The stacked weights of all experts. Products are the mixture's own, so that adapters leave experts alone.

    Attributes:
      shape: (experts, in, out).
      initializer: Of the weights.
    """

    shape: tuple[int, int, int]
    initializer: Any

    @nn.compact
    def __call__(self) -> Array:
        return self.param("kernel", self.initializer, self.shape)  # pyright: ignore[reportReturnType]


def _experts_of(config: DecoderConfig) -> Experts:
    if config.experts is None:
        raise ValueError("a mixture of experts needs DecoderConfig(experts=Experts(...))")
    return config.experts


def _dense(x: Array, into: list[Any], down: Any, chosen: Array, weights: Array, c: DecoderConfig) -> Array:
    """Run every expert on every token; an expert that a token does not go to has weight zero."""
    act = ACTIVATIONS[c.activation]
    one_hot = jax.nn.one_hot(chosen, down.shape[0], dtype=weights.dtype)
    weights_BTE = (one_hot * weights[..., None]).sum(-2)
    projected = [jnp.einsum("BTD,EDF->BTEF", x, kernel) for kernel in into]
    inner_BTEF = act(projected[0]) * projected[1] if c.gated else act(projected[0])
    return jnp.einsum("BTEF,EFD->BTD", inner_BTEF * weights_BTE[..., None], down)


def _sorted(x: Array, into: list[Any], down: Any, chosen: Array, weights: Array, c: DecoderConfig) -> Array:
    """Lay the pairs of token and expert out by expert, and run each expert on its own."""
    act = ACTIVATIONS[c.activation]
    num_experts, top_k = down.shape[0], chosen.shape[-1]
    expert_M = chosen.reshape(-1)
    order_M = jnp.argsort(expert_M)
    sizes_E = jnp.zeros(num_experts, jnp.int32).at[expert_M].add(1)
    x_MD = x.reshape(-1, x.shape[-1])[order_M // top_k]
    projected = [jax.lax.ragged_dot(x_MD, kernel, sizes_E) for kernel in into]
    inner_MF = act(projected[0]) * projected[1] if c.gated else act(projected[0])
    y_MD = jax.lax.ragged_dot(inner_MF, down, sizes_E)
    # Back in the tokens' order by a gather, whose sum is in one order always; a scatter's is not.
    place_M = jnp.zeros_like(order_M).at[order_M].set(jnp.arange(order_M.size))
    return (y_MD[place_M].reshape(*chosen.shape, -1) * weights[..., None]).sum(-2)
