"""Several optimizers for one tree, chosen by the names of its leaves."""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import optax

from telic import tree
from telic.optimizers import table
from telic.types import PyTree


def by_path(rules: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Give an optimizer that treats each leaf by the first glob that matches its name.

    Names are those of `telic.tree` in the tree the optimizer is initialised from; ``**/bias`` matches at any depth. A
    trainer initialises it from ``params``, so ``params/encoder/**`` and ``encoder/**`` name the same leaves.
    Leaves that are None (not trained) take no part. The hyperparameters of each rule are read as
    ``learning_rate[<glob>]``, see `hyperparams`.

    Args:
      rules: ``{glob: optimizer}``, in order; an optimizer is a name or an Optax transformation. ``**`` as the last glob
        takes every leaf that is left.
    Raises:
      ValueError: There are no rules; when initialised, a leaf has no rule or a glob has no leaf of its own.
      TypeError: A glob is not text, or an optimizer is neither a name nor a transformation.
    Example:
      >>> import jax.numpy as jnp
      >>> from telic import optimizers
      >>> optimizer = by_path({"**/bias": optimizers.sgd(0.5), "**": optimizers.adamw(1e-3)})
      >>> state = optimizer.init({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)})
      >>> float(optimizers.hyperparams(state)["learning_rate[**/bias]"])
      0.5
    """
    if not rules:
        raise ValueError("by_path needs at least one rule {glob: optimizer}, got none")
    filters = {glob: tree.paths(glob, *([glob.removeprefix("params/")] if _has_prefix(glob) else [])) for glob in rules}
    optimizers: dict[Hashable, optax.GradientTransformation] = {g: table.get(o) for g, o in rules.items()}

    def label(path: Any, leaf: Any) -> str:
        del leaf
        name = tree.path_name(path)
        for glob, matches in filters.items():
            if matches(name):
                return glob
        raise ValueError(
            f"by_path has no rule for the leaf {name!r}; its globs are {', '.join(map(repr, rules))}. "
            "Add one for it, or '**' as the last"
        )

    def labels(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(label, params)

    def init(params: PyTree) -> PyTree:
        # Without leaves there is nothing to check: `optax.tree_map_params` initialises from an empty placeholder.
        if jax.tree.leaves(params):
            used = set(jax.tree.leaves(labels(params)))
            names = tree.leaf_names(params)
            for glob, matches in filters.items():
                if not any(matches(name) for name in names):
                    whole = {"params": params} if _has_prefix(glob) else params
                    tree.check_selects(whole, glob, what="by_path glob")
                if glob not in used:
                    raise ValueError(
                        f"by_path glob {glob!r} takes no leaf: an earlier rule has each that it names; put it first"
                    )
        return partition.init(params)

    partition = optax.partition(optimizers, labels)
    return optax.GradientTransformationExtraArgs(init, partition.update)


def _has_prefix(glob: Any) -> bool:
    return isinstance(glob, str) and glob.startswith("params/")
