"""What one step costs: arithmetic and memory as the compiler counts them, and what this device can do."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Memory:
    """Device memory of a compiled program.

    Attributes:
      argument_bytes: What it is given: state and batches.
      result_bytes: What it gives back beside the arguments whose memory it uses again.
      scratch_bytes: What it needs while it runs.
    """

    argument_bytes: int
    result_bytes: int
    scratch_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it at once."""
        return self.argument_bytes + self.result_bytes + self.scratch_bytes


def memory_of(compiled: Any) -> Memory | None:
    """Give the memory of a compiled program, or None where the backend does not say."""
    found = _asked(compiled.memory_analysis)
    if found is None:
        return None
    return Memory(
        argument_bytes=found.argument_size_in_bytes,
        result_bytes=found.output_size_in_bytes - found.alias_size_in_bytes,
        scratch_bytes=found.temp_size_in_bytes,
    )


def flops_of(compiled: Any) -> float | None:
    """Give the floating-point operations of a compiled program, or None where the backend does not say.

    A loop's body is counted once, whatever its length: of a dispatch of many steps that gives one step.
    """
    found = _asked(compiled.cost_analysis)
    flops = None if found is None else found.get("flops")
    return None if flops is None or flops <= 0 else float(flops)


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def repeated_flops(step: Callable[..., Any], *shapes: Any) -> float:
    """Give the operations of matrix products and convolutions that `flops_of` misses: those of a scan's later turns.

    Args:
      step: The step, which is traced and not run.
      shapes: Its arguments, arrays or shapes.
    """
    traced = jax.make_jaxpr(step)(*shapes)
    return _products(traced, repeat=True) - _products(traced, repeat=False)


def _products(traced: Any, *, repeat: bool) -> float:
    total = 0.0
    for equation in traced.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            contracted = params["dimension_numbers"][0][0]
            total += 2.0 * _size(equation.outvars[0]) * np.prod([equation.invars[0].aval.shape[d] for d in contracted])
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_channels = kernel[params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * _size(equation.outvars[0]) * np.prod(kernel) / max(1, out_channels)
        elif name == "cond":
            total += max((_products(branch, repeat=repeat) for branch in params["branches"]), default=0.0)
        else:
            turns = params["length"] if name == "scan" and repeat else 1
            total += turns * sum(_products(inner, repeat=repeat) for inner in _inner(params))
    return total


def _inner(params: Any) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield item


def _size(variable: Any) -> int:
    return int(np.prod(variable.aval.shape))


def measured_peak(dtype: Any, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the operations per second that a large matrix product reaches on this device.

    What a table of devices would say is never reached and not known for a CPU; a matrix product is the most that a
    program made of them can hope for. It takes about a tenth of a second on two CPU cores.

    Args:
      dtype: Floating-point dtype of the product.
      clock: Monotonic seconds.
    """
    size = 768 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    jax.block_until_ready(a @ a)
    best = 0.0
    for _ in range(5):
        began = clock()
        jax.block_until_ready(a @ a)
        best = max(best, 2.0 * size**3 / max(clock() - began, 1e-9))
    return best
