"""QK-clip: keeping attention logits bounded by rescaling query and key weights after an update."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from telic import tree
from telic.errors import ContractError, closest
from telic.types import Array, PyTree


def qk_clip(
    tau: float = 100.0,
    *,
    query: str = "query/kernel",
    key: str = "key/kernel",
    axis: int = 1,
    alpha: float = 0.5,
    nope: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Give a last link of a chain that shrinks the query and key weights of heads whose logits exceed `tau`.

    It reads `Aux.qk_stats`: ``{block: max_logits [heads]}``, or the same as nested mappings, where `block` is the path
    of an attention block under ``params``; blocks scanned as one have max_logits [layers, heads]. A head whose largest
    logit of the window is S > tau has its logits scaled by tau / S. With grouped queries the largest logit of a group
    scales its keys once and its queries. Heads at or under `tau` keep their update bit for bit. Biases are left alone:
    use it with projections that have none.

    Args:
      tau: Largest logit allowed.
      query: Path of the query weight below its block.
      key: Path of the key weight below its block.
      axis: Dimension of both weights that holds heads, or heads times their width. 1 for the kernels of Flax.
      alpha: Share of the factor, as an exponent, that the queries take; the keys take the rest.
      nope: For latent attention, the entries of each head without rotary position: these share the factor with the
        keys; the rest of a query takes all of it, since its rotary key is shared by all heads. The rest of a key's
        entries are values and stay.
    Example:
      >>> import optax
      >>> optimizer = optax.chain(optax.sgd(0.1), qk_clip(tau=100.0))

    Source: Kimi Team 2025, MuonClip; agrees with Megatron-LM's clip_qk to 1e-9, tests/golden/test_qk_clip.py.
    """
    if not tau > 0:
        raise ValueError(f"tau is the largest logit allowed, > 0, got {tau!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha!r}")

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, qk_stats: Any = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        del extra
        if params is None:
            raise ValueError("qk_clip needs the parameters: call update(updates, state, params, qk_stats=...)")
        if qk_stats is None:
            raise ContractError(
                "qk_clip reads Aux.qk_stats, {block: max_logits [heads]}, which the objective does not report: "
                "return Aux(qk_stats=...) from its loss, or leave qk_clip out"
            )
        weights = tree.named_leaves(params)
        factors: dict[str, Array] = {}
        for block, logits in _blocks(qk_stats).items():
            names = [f"{block}/{part}" if block else part for part in (query, key)]
            for name in names:
                if name not in weights:
                    raise ContractError(
                        f"qk_clip: Aux.qk_stats names the block {block!r}, but params has no leaf {name!r}."
                        f"{closest(name, weights)} Set query= and key= to the weights' paths below their block"
                    )
            # Blocks scanned as one have a dimension of layers before the others.
            stacked = logits.ndim - 1
            at = axis if axis < 0 else stacked + axis
            widths = [weights[name].shape[at] for name in names]
            of_layer = functools.partial(
                _factors, query_width=widths[0], key_width=widths[1], tau=tau, alpha=alpha, nope=nope
            )
            pair = (jax.vmap(of_layer) if stacked else of_layer)(logits)
            factors |= dict(zip(names, pair, strict=True))

        def one(path: Any, step: Any, weight: Any) -> Any:
            name = tree.path_name(path)
            if name not in factors:
                return step
            shape = [1] * weight.ndim
            stacked = factors[name].ndim - 1
            shape[:stacked] = weight.shape[:stacked]
            at = axis if axis < 0 else stacked + axis
            shape[at] = weight.shape[at]
            factor = factors[name].reshape(shape).astype(jnp.promote_types(weight.dtype, jnp.float32))
            clipped = (weight + step).astype(factor.dtype) * factor - weight.astype(factor.dtype)
            return jnp.where(factor < 1, clipped.astype(step.dtype), step)

        return jax.tree_util.tree_map_with_path(one, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _blocks(stats: Any) -> dict[str, Array]:
    if not isinstance(stats, Mapping):
        raise ContractError(f"Aux.qk_stats must map blocks to max_logits [heads], got {type(stats).__name__}")
    named = tree.named_leaves(stats)
    return {name.removesuffix("max_logits").removesuffix("/"): logits for name, logits in named.items()}


def _factors(
    logits: Array, *, query_width: int, key_width: int, tau: float, alpha: float, nope: int | None
) -> tuple[Array, Array]:
    """Give the factor of each entry along the head axis of the query and of the key weight."""
    heads = logits.shape[0]
    if query_width % heads:
        raise ContractError(
            f"qk_clip: the query weight has {query_width} entries along its head axis, which {heads} heads do not "
            "divide; check axis="
        )
    width = query_width // heads
    # A key of latent attention holds values too, so its width is its own; there are as many of its heads as of queries.
    groups = heads if nope is not None else max(key_width // width, 1)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    largest = logits.reshape(groups, -1).max(1)
    eta = jnp.where(largest > tau, tau / jnp.where(largest > tau, largest, 1), 1)
    key_entries = key_width // groups
    first = width if nope is None else nope
    for_query = jnp.where(jnp.arange(width) < first, alpha, 1.0)
    for_key = jnp.where(jnp.arange(key_entries) < (key_entries if nope is None else nope), 1 - alpha, 0.0)
    return (
        (jnp.repeat(eta, heads // groups)[:, None] ** for_query).reshape(-1),
        (eta[:, None] ** for_key).reshape(-1),
    )
