"""What holds for every test: the platform, reproducible properties, and strictness on request."""

import os
import sys
from collections.abc import Iterator

# Set before JAX is first imported. `JAX_PLATFORMS=cuda pytest` runs the suite on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax
import pytest

from tests.slow import listed

# A first example compiles, so it may take any time. Examples are derived from the test, so that a failure is the same
# everywhere; `HYPOTHESIS_PROFILE=search` looks for new ones.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """Make implicit changes of dtype an error, for numerics of our own.

    Not for every test: optax 0.2.8 itself raises int32 counts to float (`adam`, `cosine_decay_schedule`).
    """
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def strict_rank() -> Iterator[None]:
    """Make a broadcast between arrays of different rank an error, for numerics of our own."""
    with jax.numpy_rank_promotion("raise"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that were measured to take long (`tests.slow`)."""
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def pytest_sessionfinish() -> None:
    """Keep what coverage saw so far: a worker that takes ten seconds to end is killed by xdist, and says no more."""
    coverage = sys.modules.get("coverage")
    measured = None if coverage is None else coverage.Coverage.current()
    if measured is not None:
        measured.save()
