"""Metrics of `Representations`: retrieval, nearest neighbours, a linear probe, the distance between distributions.

They compare every row with every other, so they keep all rows on the host and are computed once, at the end of an
evaluation. What they give does not depend on how rows were batched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from telic.artifacts import Representations
from telic.errors import ContractError, ShapeError
from telic.metrics.base import Mode, Reads, check_name
from telic.types import PyTree

Similarity: TypeAlias = Literal["cosine", "dot", "euclidean"]
"""How alike two vectors are: the cosine of their angle, their product, or minus their distance."""

_CHUNK = 1024
"""Queries compared with all rows at once."""


@dataclass(frozen=True, kw_only=True)
class RowsMetric:
    """A metric of all rows of an evaluation at once, computed on the host.

    Use it where a value is no function of sums: it keeps what it reads of every example in memory.

    Args:
      name: Under which the value is reported.
      finish: Gives the value from an artifact whose arrays hold all rows, in NumPy.
      needs: Fields of the artifact that may not be None.
      reads: The artifact's type.
      mode: Which direction is better.
    """

    name: str
    finish: Callable[[Any], Any]
    needs: tuple[str, ...] = ("features",)
    reads: Reads = Representations
    mode: Mode = None
    host: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)

    def init(self, *args: Any) -> PyTree:
        """Give no rows.

        Raises:
          ContractError: The evaluation leaves out a field that the metric needs.
        """
        (artifact,) = args
        kind = type(artifact).__name__
        for field in self.needs:
            if getattr(artifact, field) is None:
                raise ContractError(
                    f"metric {self.name!r} reads {kind}.{field}, which evaluate left out: return "
                    f"{kind}(..., {field}=...)"
                )
        return ()

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Keep a batch's rows."""
        del weights
        (artifact,) = args
        return (*acc, {field: np.asarray(getattr(artifact, field)) for field in self.needs})

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Give the rows of both."""
        return (*a, *b)

    def compute(self, acc: PyTree) -> Any:
        """Give the value of all rows; NaN where there is none."""
        if not acc:
            return float("nan")
        return self.finish(_Rows({field: np.concatenate([part[field] for part in acc]) for field in self.needs}))


class _Rows:
    """Fields of all rows by name."""

    def __init__(self, fields: dict[str, np.ndarray]):
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no field {name!r} was kept: name it in needs=")


def recall_at_k(
    name: str = "recall_at_k",
    *,
    k: int = 1,
    match: Literal["partner", "label"] = "partner",
    similarity: Similarity = "cosine",
    reads: Reads = Representations,
) -> RowsMetric:
    """Make the share of queries that find a match among the k rows most like them, of all rows evaluated.

    A row as like as the match counts as more like, so features that collapsed to one vector find nothing.

    Args:
      name: Under which the value is reported.
      k: How many rows may be looked at.
      match: "partner": each row of `features` looks for the same row of `partners` among all partners. "label": each
        row looks for another of its label among all other rows.
      similarity: How alike two vectors are.
      reads: The artifact's type.
    Raises:
      ValueError: An option is unknown, or k < 1.
    """
    _check_k(name, k)
    _check_similarity(name, similarity)
    if match == "partner":
        needs = ("features", "partners")
    elif match == "label":
        needs = ("features", "labels")
    else:
        raise ValueError(f"{name}: match must be 'partner' or 'label', got {match!r}")

    def finish(rows: Any) -> float:
        gallery = rows.partners if match == "partner" else rows.features
        hits = 0
        for start, alike in _similarities(rows.features, gallery, similarity):
            index = np.arange(start, start + len(alike))
            if match == "partner":
                own = alike[np.arange(len(alike)), index]
                # Not "less alike", so that a NaN is never a match.
                ahead = (~(alike < own[:, None])).sum(axis=1) - 1
                hits += int(((ahead < k) & np.isfinite(own)).sum())
                continue
            alike[np.arange(len(alike)), index] = -np.inf
            same = rows.labels[None, :] == rows.labels[index, None]
            same[np.arange(len(alike)), index] = False
            best = np.where(same, alike, -np.inf).max(axis=1)
            ahead = (~same & ~(alike < best[:, None])).sum(axis=1)
            hits += int(((ahead < k) & np.isfinite(best)).sum())
        return hits / len(rows.features)

    return RowsMetric(name=name, finish=finish, needs=needs, reads=reads, mode="max")


def knn_accuracy(
    name: str = "knn_accuracy", *, k: int = 20, similarity: Similarity = "cosine", reads: Reads = Representations
) -> RowsMetric:
    """Make the share of rows whose label most of the k other rows most like them have.

    Each row is left out of its own neighbours. Of labels with equally many votes the one with the nearest neighbour
    wins. With fewer than k other rows all of them vote.

    Args:
      name: Under which the value is reported.
      k: Neighbours that vote.
      similarity: How alike two vectors are.
      reads: The artifact's type, with labels.
    Raises:
      ValueError: k < 1, or the similarity is unknown.
    """
    _check_k(name, k)
    _check_similarity(name, similarity)

    def finish(rows: Any) -> float:
        if len(rows.features) < 2:
            return float("nan")
        named = knn_labels(rows.features, rows.labels, None, k=k, similarity=similarity)
        return float(np.mean(named == rows.labels))

    return RowsMetric(name=name, finish=finish, needs=("features", "labels"), reads=reads, mode="max")


def knn_labels(
    features: Any, labels: Any, queries: Any, *, k: int = 20, similarity: Similarity = "cosine"
) -> np.ndarray:
    """Give the label that most of the k nearest rows have, for each query.

    Args:
      features: [n, dim].
      labels: Class ids, int [n].
      queries: [m, dim]; None asks for each row of `features` among the others.
      k: Neighbours that vote.
      similarity: How alike two vectors are.
    """
    asked = np.asarray(features if queries is None else queries)
    labels = np.asarray(labels)
    count = min(k, len(labels) - (queries is None))
    classes = int(labels.max()) + 1 if len(labels) else 0
    found: list[np.ndarray] = []
    for start, alike in _similarities(asked, features, similarity):
        rows = np.arange(len(alike))
        if queries is None:
            alike[rows, start + rows] = -np.inf
        alike = np.where(np.isnan(alike), -np.inf, alike)
        nearest = np.argsort(-alike, axis=1, kind="stable")[:, :count]
        voted = labels[nearest]
        votes, first = np.zeros((len(alike), classes)), np.full((len(alike), classes), count)
        for rank in reversed(range(count)):
            votes[rows, voted[:, rank]] += 1
            first[rows, voted[:, rank]] = rank
        found.append((votes - first / (count + 1)).argmax(axis=1))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def linear_probe(
    name: str = "linear_probe",
    *,
    fit_share: float = 0.5,
    l2: float = 1e-3,
    seed: int = 0,
    reads: Reads = Representations,
) -> RowsMetric:
    """Make the accuracy of a linear classifier on frozen features: fitted on some rows, scored on the others.

    Args:
      name: Under which the value is reported.
      fit_share: Share of the rows, drawn at random, that it is fitted on.
      l2: Weight of the squared norm, see `fit_linear_probe`.
      seed: Of the draw: rows of one number are always split alike.
      reads: The artifact's type, with labels.
    Raises:
      ValueError: The share leaves no row to fit or to score.
    """
    if not 0 < fit_share < 1:
        raise ValueError(f"{name}: fit_share must be in (0, 1), got {fit_share!r}")

    def finish(rows: Any) -> float:
        count = len(rows.features)
        order = np.random.default_rng(seed).permutation(count)
        fitted = round(fit_share * count)
        if not 0 < fitted < count:
            return float("nan")
        train, test = order[:fitted], order[fitted:]
        probe = fit_linear_probe(rows.features[train], rows.labels[train], l2=l2)
        return probe.accuracy(rows.features[test], rows.labels[test])

    return RowsMetric(name=name, finish=finish, needs=("features", "labels"), reads=reads, mode="max")


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A linear classifier on features.

    Attributes:
      weights: [dim, classes].
      bias: [classes].
      shift: Subtracted from features first, [dim].
      scale: Features are divided by it, [dim].
    """

    weights: np.ndarray
    bias: np.ndarray
    shift: np.ndarray
    scale: np.ndarray

    def logits(self, features: Any) -> np.ndarray:
        """Give a score for each class, [n, classes]."""
        return (np.asarray(features, np.float64) - self.shift) / self.scale @ self.weights + self.bias

    def accuracy(self, features: Any, labels: Any) -> float:
        """Give the share of rows whose highest score is their label's."""
        return float(np.mean(self.logits(features).argmax(axis=1) == np.asarray(labels)))


def fit_linear_probe(features: Any, labels: Any, *, l2: float = 1e-3, max_steps: int = 300) -> LinearProbe:
    """Fit softmax regression on standardised features: mean cross entropy + l2/2 · ||weights||², by L-BFGS.

    Args:
      features: [n, dim].
      labels: Class ids ≥ 0, int [n].
      l2: Weight of the squared norm. The bias is free.
      max_steps: Iterations at most.
    Raises:
      ShapeError: Features and labels do not fit each other.
      ValueError: There is no row, a feature is not finite, or a label is negative.
    """
    x, y = np.asarray(features, np.float64), np.asarray(labels)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise ShapeError(f"a probe needs features [n, dim] and labels [n], got {x.shape} and {y.shape}")
    if not len(x) or not np.isfinite(x).all() or (y < 0).any():
        raise ValueError("a probe needs at least one row, finite features and labels from 0 on")
    shift, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-8 * max(1.0, float(np.abs(x).max())), scale, 1.0)
    x = (x - shift) / scale
    count, dim = x.shape
    classes = int(y.max()) + 1
    hot = np.eye(classes)[y]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = flat.reshape(dim + 1, classes)
        scores = x @ w[:-1] + w[-1]
        top = scores.max(axis=1, keepdims=True)
        shares = np.exp(scores - top)
        sums = shares.sum(axis=1, keepdims=True)
        value = float(np.mean(np.log(sums) + top) - (scores * hot).sum() / count + l2 / 2 * (w[:-1] ** 2).sum())
        error = (shares / sums - hot) / count
        gradient = np.concatenate([x.T @ error + l2 * w[:-1], error.sum(axis=0, keepdims=True)])
        return value, gradient.ravel()

    w = _minimised(loss, np.zeros((dim + 1) * classes), max_steps).reshape(dim + 1, classes)
    return LinearProbe(w[:-1], w[-1], shift, scale)


def _minimised(loss: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray, max_steps: int) -> np.ndarray:
    """Minimise a smooth convex function: L-BFGS with ten pairs and backtracking (Nocedal & Wright, algorithm 7.5)."""
    point, pairs = start, list[tuple[np.ndarray, np.ndarray]]()
    value, gradient = loss(point)
    for _ in range(max_steps):
        if np.abs(gradient).max() < 1e-6:
            break
        direction, kept = -gradient, list[tuple[float, np.ndarray, np.ndarray]]()
        for s, y in reversed(pairs):
            a = float((s @ direction) / (s @ y))
            direction = direction - a * y
            kept.append((a, s, y))
        if pairs:
            s, y = pairs[-1]
            direction = direction * ((s @ y) / (y @ y))
        for a, s, y in reversed(kept):
            direction = direction + (a - (y @ direction) / (s @ y)) * s
        slope, step = float(gradient @ direction), 1.0
        while True:
            moved = point + step * direction
            new_value, new_gradient = loss(moved)
            if new_value <= value + 1e-4 * step * slope or step < 1e-10:
                break
            step /= 2
        pair = moved - point, new_gradient - gradient
        if pair[0] @ pair[1] > 1e-12:
            pairs = [*pairs[-9:], pair]
        if step < 1e-10:
            break
        point, value, gradient = moved, new_value, new_gradient
    return point


@dataclass(frozen=True, eq=False)
class FrechetDistance:
    """The metric that `frechet_distance` makes: sums of features and of their products, in float64 on the host."""

    name: str
    mean: np.ndarray
    covariance: np.ndarray
    features: Callable[[Any], Any]
    reads: Reads = Representations
    mode: Mode = "min"
    host: bool = True

    def init(self, *args: Any) -> PyTree:
        """Give empty sums."""
        del args
        dim = len(self.mean)
        return 0, np.zeros(dim), np.zeros((dim, dim))

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Add a batch's rows.

        Raises:
          ShapeError: Its features have another dimension than the reference.
        """
        del weights
        count, total, products = acc
        rows = np.asarray(self.features(*args), np.float64)
        if rows.ndim != 2 or rows.shape[1] != len(self.mean):
            raise ShapeError(f"metric {self.name!r}: features must be [n, {len(self.mean)}], got {rows.shape}")
        # About the reference's mean, so that nothing cancels where features are far from zero.
        rows = rows - self.mean
        return count + len(rows), total + rows.sum(axis=0), products + rows.T @ rows

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Add two sets of sums."""
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def compute(self, acc: PyTree) -> float:
        """Give the distance; NaN for fewer than two rows."""
        count, total, products = acc
        if count < 2:
            return float("nan")
        mean = total / count
        covariance = (products - count * np.outer(mean, mean)) / (count - 1)
        zero = np.zeros_like(mean)
        return gaussian_distance((mean, covariance), (zero, self.covariance))


def frechet_distance(
    reference: Any,
    name: str = "frechet_distance",
    *,
    features: Callable[[Any], Any] | None = None,
    reads: Reads = Representations,
) -> FrechetDistance:
    """Make the Fréchet distance between evaluated features and those of a reference, such as real images.

    Both are taken as Gaussian. The value depends on the number of rows, so compare like with like, and with the
    distance of the reference to other real rows.

    Args:
      reference: Features of the reference [n, dim], n ≥ 2, or a pair (mean [dim], covariance [dim, dim]).
      name: Under which the value is reported.
      features: Gives features [n, dim] of an artifact, NumPy arrays in it, such as a classifier applied to
        ``grid.images``; None takes its `features`.
      reads: The artifact's type.
    Raises:
      ShapeError: The reference is neither.
    Source: Heusel et al. 2017, GANs trained by a two time-scale update rule, eq. 6.
    """
    if isinstance(reference, tuple):
        mean, covariance = (np.asarray(x, np.float64) for x in reference)
    else:
        rows = np.asarray(reference, np.float64)
        if rows.ndim != 2 or len(rows) < 2:
            raise ShapeError(f"{name}: reference must be features [n, dim] with n ≥ 2, got {rows.shape}")
        mean, covariance = gaussian_of(rows)
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise ShapeError(
            f"{name}: reference must be (mean [dim], covariance [dim, dim]), got {mean.shape} and {covariance.shape}"
        )
    return FrechetDistance(check_name(name), mean, covariance, features or _features_of, reads)


def gaussian_of(features: Any) -> tuple[np.ndarray, np.ndarray]:
    """Give mean [dim] and covariance [dim, dim] of features [n, dim], in float64; n - 1 in the denominator."""
    rows = np.asarray(features, np.float64)
    return rows.mean(axis=0), np.atleast_2d(np.cov(rows, rowvar=False))


def gaussian_distance(a: tuple[Any, Any], b: tuple[Any, Any]) -> float:
    """Give the squared 2-Wasserstein distance of two Gaussians, each (mean, covariance).

    |m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½), the root by symmetric eigenvalues, so that rounding gives no complex part.
    """
    (mean_a, cov_a), (mean_b, cov_b) = a, b
    if not all(np.isfinite(x).all() for x in (mean_a, cov_a, mean_b, cov_b)):
        return float("nan")
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    shared = np.sqrt(np.clip(np.linalg.eigvalsh(root @ cov_b @ root), 0, None)).sum()
    distance = ((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * shared
    return float(max(distance, 0.0))


def _features_of(artifact: Any) -> Any:
    return artifact.features


def _similarities(queries: Any, gallery: Any, similarity: Similarity) -> Any:
    """Give (first query, similarities [queries, gallery]) for some queries after others."""
    asked, rows = (np.asarray(x).astype(np.float32) for x in (queries, gallery))
    if similarity == "cosine":
        asked, rows = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (asked, rows))
    squares = (rows**2).sum(axis=1)
    for start in range(0, len(asked), _CHUNK):
        part = asked[start : start + _CHUNK]
        alike = part @ rows.T
        yield start, 2 * alike - squares if similarity == "euclidean" else alike


def _check_k(name: str, k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"{name}: k must be a whole number of at least 1, got {k!r}")


def _check_similarity(name: str, similarity: object) -> None:
    if similarity not in ("cosine", "dot", "euclidean"):
        raise ValueError(f"{name}: similarity must be 'cosine', 'dot' or 'euclidean', got {similarity!r}")
