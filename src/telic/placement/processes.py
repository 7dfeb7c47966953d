"""The processes of a run: which one this is, and plain values told from each to all.

They talk through the coordination service that `jax.distributed` runs, not through the devices: a process that does not
come is named after a while, where a collective would hang.
"""

import base64
import json
import time
from typing import Any

import jax
import numpy as np

# The service has no public name in JAX 0.10 to 0.12; Orbax takes it from here too.
from jax._src import distributed
from jax.experimental import multihost_utils

from telic.errors import ProcessError
from telic.loop.ports import Post, Processes

PATIENCE_SECONDS = 300.0
"""How long a process waits for the others to say the same kind of thing."""

HEARING_SECONDS = 3600.0
"""How long it waits for what is told after work on a disk; `telic launch` and JAX notice those that died."""


class OneProcess:
    """A run of one process."""

    index = 0
    count = 1
    post = None

    def agree(self, value: Any) -> Any:
        """Give the value."""
        return value

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Give the value alone."""
        del what
        return [value]

    def stops(self) -> bool:
        """Give False: a signal to this process is its own affair."""
        return False


ONE = OneProcess()


class ManyProcesses:
    """The processes that `jax.distributed.initialize` brought together.

    Args:
      patience_seconds: How long to wait for the others.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS):
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._patience = patience_seconds
        self._client: Any = distributed.global_state.client
        self._number = 0

    def agree(self, value: Any) -> Any:
        """Give process 0's value: JSON, and arrays in it.

        Raises:
          ProcessError: Process 0 did not give one in time.
        """
        return self.exchange("a value of process 0", value if self.index == 0 else None)[0]

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Give every process's value, in their order: JSON, and arrays in it.

        Args:
          what: What is told, the same in all processes: in errors.
          value: This process's value.
        Raises:
          ProcessError: A process did not come in time; it is named.
        """
        global _exchanges
        _exchanges += 1
        number = _exchanges
        # An empty value is none to the service.
        self._client.key_value_set(_key(number, self.index), _written([what, value]))
        until = time.monotonic() + self._patience
        told: list[Any] = []
        for index in range(self.count):
            other, given = _read(self._wait(number, index, what, until))
            if other != what:
                raise ProcessError(
                    f"the processes do different things: process {index} is at {other!r} and process {self.index} at "
                    f"{what!r}. Every process must run the same program with the same settings"
                )
            told.append(given)
        if number > 2:
            # Whoever is here has read everything before the last exchange.
            self._client.key_value_delete(_key(number - 2, self.index))
        return told

    def _wait(self, number: int, index: int, what: str, until: float) -> str:
        left = max(1, int(1000 * (until - time.monotonic())))
        try:
            return self._client.blocking_key_value_get(_key(number, index), left)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) and "NOT_FOUND" not in str(error):
                error.add_note(f"raised while process {self.index} waited for process {index} at {what!r}")
                raise
            raise ProcessError(
                f"process {index} of {self.count} did not come to {what!r} within {self._patience:.0f} s: it has "
                "ended, is much slower than the others, or does something else. Look at what it said last"
            ) from error

    def stops(self) -> bool:
        """Say whether a process got SIGTERM: True at the same call in all of them, and once."""
        global _asked
        _asked += 1
        return multihost_utils.reached_preemption_sync_point(_asked)

    @property
    def post(self) -> Post:
        """The processes themselves."""
        return self

    def tell(self, key: str, value: Any) -> None:
        """Tell a value, once: JSON, and arrays in it; on any thread, in any order."""
        self._client.key_value_set(f"telic/told/{key}/{self.index}", _written([value]))

    def hear(self, key: str, teller: int) -> Any:
        """Give the value that a process tells, as soon as it does.

        Raises:
          ProcessError: It does not.
        """
        try:
            told = self._client.blocking_key_value_get(f"telic/told/{key}/{teller}", int(1000 * HEARING_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(
                f"process {teller} of {self.count} did not tell {key!r} within {HEARING_SECONDS:.0f} s, or has ended"
            ) from error
        return _read(told)[0]

    def forget(self, prefix: str) -> None:
        """Forget what was told under a prefix; one process does it, when all have heard."""
        self._client.key_value_delete(f"telic/told/{prefix}/")


_ARRAY = "telic array"


def _written(value: Any) -> str:
    """Give a value as JSON; an array in it is its dtype, shape and bytes, since metrics on the host may give one."""

    def array(found: Any) -> Any:
        if not isinstance(found, np.ndarray | np.generic) or found.dtype.kind == "O":
            raise TypeError(
                f"processes tell each other numbers, text, arrays, and lists and mappings of them, got {found!r}"
            )
        if isinstance(found, np.generic) and found.dtype.kind in "biuf":
            return found.item()
        data = base64.b64encode(np.ascontiguousarray(found).tobytes()).decode()
        return {_ARRAY: [found.dtype.name, list(found.shape), data]}

    return json.dumps(value, default=array)


def _read(text: str) -> Any:
    def array(found: dict[str, Any]) -> Any:
        if set(found) != {_ARRAY}:
            return found
        dtype, shape, data = found[_ARRAY]
        return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()

    return json.loads(text, object_hook=array)


def _key(number: int, index: int) -> str:
    return f"telic/{number}/{index}"


_exchanges = 0
"""Exchanges of this process so far: what is told belongs to those of one number."""

_asked = 0
"""How often this process has asked whether one got SIGTERM: JAX agrees on one of these numbers."""


def all_processes() -> Processes:
    """Give the processes of this program."""
    return ManyProcesses() if jax.process_count() > 1 else ONE
