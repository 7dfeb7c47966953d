"""Metrics of one moment, computed when somebody asks for them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from telic.errors import ContractError


class Read(Protocol):
    """The part of a driver that a reading needs."""

    @property
    def generation(self) -> int: ...

    def read(self, scope: str) -> dict[str, Any]: ...


class Reading:
    """Metrics of a scope at one moment, computed when called. Borrowed: only the latest moment can be read."""

    def __init__(self, driver: Read, scope: str, generation: int):
        self._driver = driver
        self._scope = scope
        self._generation = generation

    def _start(self) -> dict[str, Any]:
        if self._driver.generation != self._generation:
            raise ContractError(
                "these metrics belong to an earlier moment and were not read then: a LoopState is borrowed until its "
                "handler returns; keep a copy with state.keep()"
            )
        return self._driver.read(self._scope)

    def __call__(self) -> dict[str, Any]:
        """Compute now and wait for the values."""
        return to_host(self._start())

    def later(self) -> Callable[[], dict[str, Any]]:
        """Start computing now; the function given waits for the values when it is called."""
        values = self._start()
        return lambda: to_host(values)


def to_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fetch values: floats for scalars, NumPy arrays and trees of them for the rest."""
    fetched = jax.device_get(dict(values))
    return {
        name: float(v) if isinstance(v, np.ndarray | np.generic) and np.ndim(v) == 0 and not np.iscomplexobj(v) else v
        for name, v in fetched.items()
    }
