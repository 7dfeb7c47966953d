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


def repeated_flops(traced: Any) -> float:
    """Give the operations of matrix products and convolutions that `flops_of` misses: those of a scan's later turns.

    Args:
      traced: The step as `jax.make_jaxpr` gives it. Of one divided over devices these are the operations of all.
    """
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


_PUBLISHED: tuple[tuple[str, dict[str, float]], ...] = (
    ("NVIDIA B200", {"bfloat16": 2250e12, "float16": 2250e12}),
    ("NVIDIA H200 NVL", {}),  # a card of less power: the sheet of the module is not its own
    ("NVIDIA H200", {"bfloat16": 989e12, "float16": 989e12}),
    ("NVIDIA H100 PCIe", {"bfloat16": 756e12, "float16": 756e12}),
    ("NVIDIA H100 80GB HBM3", {"bfloat16": 989e12, "float16": 989e12}),
    ("NVIDIA A100", {"bfloat16": 312e12, "float16": 312e12}),
    ("NVIDIA L4", {"bfloat16": 121e12, "float16": 121e12}),
    ("Tesla V100-SXM2", {"float16": 125e12}),
    ("Tesla T4", {"float16": 65e12}),
    ("TPU v4", {"bfloat16": 275e12}),
    ("TPU v5 lite", {"bfloat16": 197e12}),
    ("TPU v5", {"bfloat16": 459e12}),
    ("TPU v5p", {"bfloat16": 459e12}),
    ("TPU v6 lite", {"bfloat16": 918e12}),
)
"""Beginning of what a device calls itself, and the operations per second that its data sheet gives for dense products:
NVIDIA's data sheets (half of what they give with sparsity), and cloud.google.com/tpu/docs for TPUs."""


def published_peak(kind: str, dtype: Any) -> float | None:
    """Give the operations per second that a device's data sheet promises; None where it is not known.

    It is known for the narrow dtypes of accelerators. What a device does with float32 depends on its settings.

    Args:
      kind: What the device calls itself, `jax.Device.device_kind`.
      dtype: Floating-point dtype of the products.
    """
    known = next((peaks for name, peaks in _PUBLISHED if kind == name or kind.startswith((f"{name} ", f"{name}-"))), {})
    return known.get(jnp.dtype(dtype).name)


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
