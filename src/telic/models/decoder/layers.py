"""Variables of unrolled blocks from those of scanned ones, and back."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from telic.types import Variables

_LAYER = re.compile(r"layers_(\d+)\Z")


def stack_layers(variables: Variables) -> dict[str, Any]:
    """Give the variables of ``DecoderConfig(scan=True)`` for those of unrolled blocks.

    ``layers_0``, ``layers_1``, ... of each collection become one ``layers``, whose leaves have a first dimension more.

    Args:
      variables: Collections, ``{"params": ...}``. Trees of the same names, such as moving averages, convert too.
    Raises:
      ValueError: No collection has layers to stack, or one is missing between others.
    """
    if not any(_LAYER.match(name) for tree in variables.values() if isinstance(tree, Mapping) for name in tree):
        raise ValueError("these variables have no layers_0, layers_1, ... to stack")
    return {name: _stacked(tree) if isinstance(tree, Mapping) else tree for name, tree in variables.items()}


def unstack_layers(variables: Variables) -> dict[str, Any]:
    """Give the variables of unrolled blocks for those of ``DecoderConfig(scan=True)``; undoes `stack_layers`.

    Raises:
      ValueError: No collection has stacked layers.
    """
    if not any(isinstance(tree, Mapping) and "layers" in tree for tree in variables.values()):
        raise ValueError("these variables have no stacked layers to take apart")
    return {name: _unstacked(tree) if isinstance(tree, Mapping) else tree for name, tree in variables.items()}


def _stacked(tree: Mapping[str, Any]) -> dict[str, Any]:
    layers = {int(match[1]): tree[name] for name in tree if (match := _LAYER.match(name))}
    if not layers:
        return dict(tree)
    if sorted(layers) != list(range(len(layers))):
        raise ValueError(f"layers must be counted from 0 without a gap, got {sorted(layers)}")
    rest = {name: inner for name, inner in tree.items() if not _LAYER.match(name)}
    in_order = [layers[i] for i in range(len(layers))]
    return {**rest, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *in_order)}


def _unstacked(tree: Mapping[str, Any]) -> dict[str, Any]:
    if "layers" not in tree:
        return dict(tree)
    rest = {name: inner for name, inner in tree.items() if name != "layers"}
    number = jax.tree.leaves(tree["layers"])[0].shape[0]
    return {**rest, **{f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], tree["layers"]) for i in range(number)}}
