"""Names and filters for the leaves of a tree, and splitting a tree by them.

A leaf's name is its path joined by slashes: ``params/encoder/layers_0/kernel``. Names are the same whatever
library made the tree: dictionary keys, sequence indices and attribute names all become plain words.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from telic.errors import closest
from telic.types import Array, Key, PyTree


def path_name(path: Sequence[Any]) -> str:
    """Give the name of a leaf from its key path, for example ``params/dense/kernel``."""
    return "/".join(_word(part) for part in path)


def _word(part: Any) -> str:
    match part:
        case jax.tree_util.DictKey() | jax.tree_util.FlattenedIndexKey():
            return str(part.key)
        case jax.tree_util.SequenceKey():
            return str(part.idx)
        case jax.tree_util.GetAttrKey():
            return part.name
        case _:
            return str(part)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Give the leaves of a tree by name, in flattening order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def leaf_names(tree: PyTree) -> list[str]:
    """Give the names of a tree's leaves, in flattening order."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _compile_glob(pattern: str) -> re.Pattern[str]:
    """Compile a path glob: ``*`` stays inside one word, ``**`` spans any number of words."""
    out: list[str] = []
    words = pattern.split("/")
    for i, word in enumerate(words):
        last = i == len(words) - 1
        if word == "**":
            out.append(".*" if last else "(?:[^/]+/)*")
            continue
        for char in word:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)))
        if not last:
            # "a/**" also names the leaf or subtree "a" itself.
            out.append("(?:/|$)" if words[i + 1] == "**" and i + 1 == len(words) - 1 else "/")
    return re.compile("".join(out) + r"\Z")


@dataclass(frozen=True)
class Paths:
    """A filter over leaf names that combines with ``&``, ``|`` and ``~``.

    Build one with `paths`.
    """

    test: Callable[[str], bool]
    text: str
    patterns: tuple[str, ...] = ()

    def __call__(self, name: str) -> bool:
        return self.test(name)

    def __and__(self, other: "PathFilter") -> "Paths":
        right = as_filter(other)
        return Paths(
            lambda n: self(n) and right(n),
            f"({self.text} & {right.text})",
            self.patterns + right.patterns,
        )

    def __or__(self, other: "PathFilter") -> "Paths":
        right = as_filter(other)
        return Paths(
            lambda n: self(n) or right(n),
            f"({self.text} | {right.text})",
            self.patterns + right.patterns,
        )

    def __invert__(self) -> "Paths":
        return Paths(lambda n: not self(n), f"~{self.text}", self.patterns)


PathFilter: TypeAlias = str | Sequence[str] | Callable[[str], bool] | Paths


def paths(*patterns: str) -> Paths:
    """Make a filter that keeps the leaves whose name matches any of the globs.

    Args:
      *patterns: Globs over names such as ``params/encoder/**`` or ``**/bias``; ``*`` stays inside one word.
    Example:
      >>> keep = paths("params/encoder/**") & ~paths("**/bias")
      >>> keep("params/encoder/dense/kernel"), keep("params/encoder/dense/bias")
      (True, False)
    """
    for pattern in patterns:
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(
                f"a path filter is made of globs such as 'params/**', got {pattern!r} ({type(pattern).__name__})"
            )
    compiled = [_compile_glob(p) for p in patterns]
    return Paths(lambda name: any(c.match(name) for c in compiled), " | ".join(map(repr, patterns)), patterns)


def as_filter(filter: PathFilter) -> Paths:
    """Turn a glob, a list of globs, or a predicate over names into a `Paths` filter."""
    match filter:
        case Paths():
            return filter
        case str():
            return paths(filter)
        case Sequence():
            return paths(*filter)
        case _ if callable(filter):
            return Paths(filter, getattr(filter, "__name__", repr(filter)))
        case _:
            raise TypeError(f"a path filter is a glob, a list of globs or a function of a name, got {filter!r}")


def mask(tree: PyTree, filter: PathFilter) -> PyTree:
    """Give a tree of the same structure with True at each leaf the filter keeps."""
    keep = as_filter(filter)
    return jax.tree_util.tree_map_with_path(lambda path, _: keep(path_name(path)), tree)


def partition(tree: PyTree, filter: PathFilter) -> tuple[PyTree, PyTree]:
    """Split a tree into the leaves a filter keeps and the rest; each side has None for the other's leaves.

    `combine` puts them together again.
    """
    kept = mask(tree, filter)
    return (
        jax.tree.map(lambda leaf, k: leaf if k else None, tree, kept),
        jax.tree.map(lambda leaf, k: None if k else leaf, tree, kept),
    )


def _is_none(value: object) -> bool:
    return value is None


def combine(*trees: PyTree) -> PyTree:
    """Lay trees of one structure over each other: at each leaf the last that is not None."""
    return jax.tree.map(
        lambda *leaves: next((x for x in reversed(leaves) if x is not None), None),
        *trees,
        is_leaf=_is_none,
    )


def check_selects(tree: PyTree, filter: PathFilter, *, what: str) -> None:
    """Raise unless each glob of a filter names a leaf and the filter keeps some.

    Raises:
      ValueError: A glob matches no leaf (the nearest name is shown), or the filter keeps nothing.
    """
    keep = as_filter(filter)
    names = leaf_names(tree)
    for pattern in keep.patterns:
        glob = _compile_glob(pattern)
        if not any(glob.match(name) for name in names):
            stem = pattern.replace("/**", "").replace("**/", "").replace("*", "")
            prefixes = {n.rsplit("/", k)[0] for n in names for k in range(n.count("/") + 1)}
            hint = closest(stem, prefixes)
            raise ValueError(
                f"{what}={pattern!r} names no leaf.{hint} Leaves: {_shorten(names)}. "
                "Use globs over these names, such as 'params/encoder/**'."
            )
    if not any(keep(name) for name in names):
        raise ValueError(f"{what} ({keep.text}) selects nothing of: {_shorten(names)}")


def _shorten(names: Sequence[str], limit: int = 12) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def overlay(base: PyTree, over: PyTree, *, what: str) -> tuple[PyTree, list[str], list[str]]:
    """Lay a full or partial tree of leaves over a nested mapping.

    Args:
      base: Nested mapping of arrays or shape structs.
      over: Nested mapping with some of the same names.
      what: What `over` is called in error messages.
    Returns:
      The tree, the names of leaves of `base` that were not given, the names given that `base` lacks.
    Raises:
      ValueError: A given leaf has another shape; the leaf is named.
    """
    given = named_leaves(over)
    used: set[str] = set()
    missing: list[str] = []

    def pick(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if name not in given:
            missing.append(name)
            return leaf
        used.add(name)
        new = given[name]
        if jnp.shape(new) != jnp.shape(leaf):
            raise ValueError(
                f"{what}: {name} must have shape {jnp.shape(leaf)}, got {jnp.shape(new)}. "
                "Leave the leaf out to initialise it afresh, or give weights of this model."
            )
        return new

    tree = jax.tree_util.tree_map_with_path(pick, base)
    return tree, missing, [name for name in given if name not in used]


def copy_leaves(tree: PyTree) -> PyTree:
    """Copy each array leaf, so that no leaf shares its buffer with another tree or leaf."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if is_array(x) else x, tree)


def is_array(value: object) -> bool:
    """Say whether a value is an array of JAX or NumPy (a shape struct is not)."""
    return hasattr(value, "dtype") and hasattr(value, "__array__")


def is_float(leaf: Any) -> bool:
    """Say whether a leaf is a floating-point or complex array, so that it can carry a gradient."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def shape_structs(tree: PyTree) -> PyTree:
    """Give the shapes and dtypes of a tree's leaves, without their values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def fold_name(key: Key, name: str) -> Key:
    """Derive a key from a word, the same in every process and version."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def select(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Give `new` where a scalar condition holds, else `old`, bit for bit (NaN payloads included)."""
    return jax.tree.map(lambda n, o: _select(condition, n, o), new, old)


def _select(condition: Array, new: Any, old: Any) -> Any:
    if new is old:
        return old
    if jnp.issubdtype(old.dtype, jnp.floating) and old.dtype.itemsize < 4:
        # XLA may select narrow floats in float32, which rewrites the payload of a NaN: select their bits instead.
        bits = jnp.dtype(f"uint{8 * old.dtype.itemsize}")
        cast = jax.lax.bitcast_convert_type
        return cast(jax.lax.select(condition, cast(new, bits), cast(old, bits)), old.dtype)
    return jax.lax.select(condition, new, old)


def all_finite(tree: PyTree) -> Array:
    """Say whether every floating-point leaf holds only finite values: bool scalar.

    x - x is 0 where x is finite and NaN elsewhere, so the leaves of one shape are added up and looked at once: a few
    operations for each shape instead of each leaf.
    """
    sums: dict[tuple[Any, Any], Array] = {}
    for leaf in jax.tree.leaves(tree):
        if is_float(leaf):
            # One-byte floats do not add up in JAX.
            x = leaf if leaf.dtype.itemsize > 1 else leaf.astype(jnp.float32)
            kind = (x.shape, x.dtype)
            nothing = jax.lax.sub(x, x)
            sums[kind] = jax.lax.add(sums[kind], nothing) if kind in sums else nothing
    checks = [_are_zero(total) for total in sums.values()]
    return jnp.stack(checks).all() if checks else jnp.asarray(True)


def _are_zero(x: Array) -> Array:
    # Operations of `lax`: those of `jnp` are functions in the program, which take longer to trace and lower.
    return jax.lax.reduce_and(jax.lax.eq(x, jax.lax.full_like(x, 0)), tuple(range(x.ndim)))


def leading_dimension(tree: PyTree) -> int | None:
    """Give the leading dimension of a tree's first array of rank ≥ 1, or None when there is none."""
    for leaf in jax.tree.leaves(tree):
        if jnp.ndim(leaf) > 0:
            return int(jnp.shape(leaf)[0])
    return None


def as_plain(tree: Any) -> Any:
    """Turn nested mappings of any class (FrozenDict included) into plain dictionaries with string keys."""
    if isinstance(tree, Mapping):
        return {str(k): as_plain(v) for k, v in tree.items()}
    return tree
