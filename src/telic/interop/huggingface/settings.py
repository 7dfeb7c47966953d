"""Reading a config.json: values with their kind checked, and rotary positions in either spelling."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from telic.errors import PretrainedError
from telic.models.decoder.rotary import LinearScaling, Llama3Scaling, Rotary, YarnScaling


class Settings:
    """A config.json whose keys are read with their kind checked."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def get(self, name: str, default: Any = None) -> Any:
        """Give a value, or the default where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> Any:
        """Give a whole number.

        Raises:
          PretrainedError: It is something else, or absent without a default.
        """
        return self._checked(name, default, int, "a whole number")

    def number(self, name: str, default: float | None = None) -> Any:
        """Give a number, as `whole` does."""
        return self._checked(name, default, int | float, "a number")

    def flag(self, name: str, default: bool) -> bool:
        """Give a truth value, as `whole` does."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise PretrainedError(f"config.json: {name} must be true or false, got {value!r}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a value that would change the computation in a way a `Decoder` lacks."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise PretrainedError(f"config.json: {name}={value!r} is not supported; it may be {allowed}")

    def _checked(self, name: str, default: Any, kind: Any, words: str) -> Any:
        value = self.get(name, default)
        if value is None:
            raise PretrainedError(f"config.json lacks {name}, {words}")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise PretrainedError(f"config.json: {name} must be {words}, got {value!r}")
        return value


def read_rotary(s: Settings, theta: float) -> Rotary:
    """Read rotary positions, as transformers 5 spells them (rope_parameters) or as before (rope_theta, rope_scaling).

    Args:
      s: The config.json.
      theta: The family's base, where neither names one.
    Raises:
      PretrainedError: The two spellings disagree, or the type of scaling is unknown.
    """
    new, old = s.get("rope_parameters"), s.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise PretrainedError(f"config.json: {name} must be a mapping, got {value!r}")
    readings = [_rope(Settings({"rope_theta": s.get("rope_theta"), **found}), theta) for found in (new, old) if found]
    if len(readings) == 2 and readings[0] != readings[1]:
        raise PretrainedError(
            f"config.json: rope_parameters say {readings[0]} and rope_scaling says {readings[1]}; drop one"
        )
    return readings[0] if readings else _rope(Settings({"rope_theta": s.get("rope_theta")}), theta)


def _rope(s: Settings, theta: float) -> Rotary:
    s.only("partial_rotary_factor", 1, 1.0)
    base = float(s.number("rope_theta", theta))
    match s.get("rope_type", s.get("type", "default")):
        case "default":
            return Rotary(theta=base)
        case "linear":
            return Rotary(theta=base, scaling=LinearScaling(factor=float(s.number("factor"))))
        case "llama3":
            scaling = Llama3Scaling(
                factor=float(s.number("factor")),
                low_frequency_factor=float(s.number("low_freq_factor")),
                high_frequency_factor=float(s.number("high_freq_factor")),
                original_length=s.whole("original_max_position_embeddings"),
            )
            return Rotary(theta=base, scaling=scaling)
        case "yarn":
            return Rotary(theta=base, scaling=_yarn(s))
        case kind:
            raise PretrainedError(
                f"config.json: rotary positions of the type {kind!r} are not supported; known: default, linear, "
                "llama3, yarn"
            )


def _yarn(s: Settings) -> YarnScaling:
    scaling = YarnScaling(
        factor=float(s.number("factor")),
        original_length=s.whole("original_max_position_embeddings"),
        fast_turns=float(s.number("beta_fast", 32.0)),
        slow_turns=float(s.number("beta_slow", 1.0)),
        attention_factor=s.get("attention_factor"),
        truncate=s.flag("truncate", True),
    )
    above, below = s.get("mscale"), s.get("mscale_all_dim")
    if scaling.attention_factor is None and above and below:
        plain = scaling.amplitude - 1
        factor = (above * plain + 1) / (below * plain + 1)
        return dataclasses.replace(scaling, attention_factor=factor)
    return scaling


def written_rotary(rotary: Rotary) -> dict[str, Any]:
    """Write both spellings: each version of transformers ignores the other's without a word."""
    match rotary.scaling:
        case None:
            scaling: dict[str, Any] = {"rope_type": "default"}
        case LinearScaling(factor=factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as s:
            scaling = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_frequency_factor,
                "high_freq_factor": s.high_frequency_factor,
                "original_max_position_embeddings": s.original_length,
            }
        case YarnScaling() as s:
            scaling = {
                "rope_type": "yarn",
                "factor": s.factor,
                "original_max_position_embeddings": s.original_length,
                "beta_fast": s.fast_turns,
                "beta_slow": s.slow_turns,
                "truncate": s.truncate,
            }
            if s.attention_factor is not None:
                scaling["attention_factor"] = s.attention_factor
    return {
        "rope_parameters": {"rope_theta": rotary.theta, **scaling},
        "rope_theta": rotary.theta,
        "rope_scaling": None if rotary.scaling is None else scaling,
    }
