"""What a profiled run cost, as values and as the table a person reads."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from telic.profiling.account import OTHER_PARTS, STEP_PARTS
from telic.profiling.costs import Memory

_MEANING = {
    "data": "waiting for batches",
    "dispatch": "giving work to the device",
    "device": "waiting for the device",
    "handlers": "handlers on the host",
    "checkpoint": "saving",
    "loop": "the loop itself",
}


@dataclass(frozen=True)
class Report:
    """Where the time of a run went, and what a step costs.

    Attributes:
      seconds: Seconds by part, starting and compiling among them; they add up to the run's wall time.
      handlers: Seconds by handler, the longest first; their sum is that of "handlers".
      iterations: Batches run.
      examples: Rows of these batches.
      tokens: Entries of their token arrays (leaves called tokens, input_ids or inputs, int [batch, time]).
      flops: Floating-point operations of one step on one device, as the compiler counts them, the turns of scans
        included; None where it does not say.
      peak_flops: Operations per second that a large matrix product reaches on this device; None where it was not
        measured.
      dtype: Dtype of that product.
      memory: Memory of the step's program; None where the backend does not say.
    """

    seconds: Mapping[str, float]
    handlers: Mapping[str, float]
    iterations: int
    examples: int
    tokens: int
    flops: float | None = None
    peak_flops: float | None = None
    dtype: str = "float32"
    memory: Memory | None = None

    @property
    def step_seconds(self) -> float:
        """Wall time of the steps, without starting and compiling."""
        return sum(self.seconds[part] for part in STEP_PARTS)

    @property
    def steps_per_second(self) -> float:
        """Batches per second of `step_seconds`; 0 of a run without any."""
        return self.iterations / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def utilisation(self) -> float | None:
        """Share of `peak_flops` that the steps reached."""
        if self.flops is None or not self.peak_flops:
            return None
        return self.flops * self.steps_per_second / self.peak_flops

    def as_json(self) -> dict[str, Any]:
        """Give the values under their names."""
        more = {"step_seconds": self.step_seconds, "utilisation": self.utilisation}
        return {**asdict(self), "steps_per_second": self.steps_per_second, **more}

    def __str__(self) -> str:
        total, count = self.step_seconds, max(1, self.iterations)
        before = ", ".join(f"{self.seconds[part]:.2f} s {part}" for part in OTHER_PARTS if self.seconds[part] >= 0.005)
        lines = [
            f"profile: {self.iterations:,} batches in {total:.3f} s, {_duration(total / count)} each"
            + (f" (before that: {before})" if before else "")
        ]
        for part in STEP_PARTS:
            spent = self.seconds[part]
            share = spent / total if total else 0.0
            lines.append(f"  {part:<10} {spent:>9.3f} s {share:>6.1%} {_duration(spent / count):>9}  {_MEANING[part]}")
        lines.append(f"  {'together':<10} {total:>9.3f} s {1:>6.1%} {_duration(total / count):>9}")
        slow = [f"{name} {_duration(spent / count)}" for name, spent in list(self.handlers.items())[:3] if spent > 0]
        if slow:
            lines.append(f"  handlers, per batch: {', '.join(slow)}")
        rates = [f"{self.steps_per_second:,.4g} batches/s"]
        rates += [f"{self.examples / total:,.0f} examples/s"] if total and self.examples else []
        rates += [f"{self.tokens / total:,.0f} tokens/s"] if total and self.tokens else []
        lines.append("  " + ", ".join(rates))
        if self.flops is not None:
            line = f"  {_scaled(self.flops, 'FLOP')} per batch, {_scaled(self.flops * self.steps_per_second, 'FLOP/s')}"
            if self.utilisation is not None and self.peak_flops is not None:
                line += (
                    f": {self.utilisation:.1%} of the {_scaled(self.peak_flops, 'FLOP/s')} of a large {self.dtype} "
                    "matrix product here"
                )
            lines.append(line)
        if self.memory is not None:
            m = self.memory
            lines.append(
                f"  memory: {byte_text(m.argument_bytes)} of state and batches, {byte_text(m.scratch_bytes)} of scratch"
                f", {byte_text(m.result_bytes)} of results"
            )
        return "\n".join(lines)


def byte_text(count: int) -> str:
    """Give a number of bytes as text, in B, KiB, MiB or GiB."""
    value = float(count)
    if value < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{value:,.1f} {unit}"
    return f"{value / 1024:,.1f} GiB"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} µs"


def _scaled(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
