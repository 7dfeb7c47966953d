"""Preference losses: from the log-probs of pairs of completions to one loss per pair. Pure functions.

A *ratio* is the policy's log-prob of a completion minus the reference's, in nats, summed over its tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from telic.errors import ShapeError, unknown_name
from telic.mean import wide
from telic.types import Array

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
"""What keeps the policy near its reference: an f-divergence."""

DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")

_LARGEST_EXPONENT = 80.0
"""Where exponents of ratios are capped: e^80 is finite in float32, e^89 is not."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Log-probs of chosen and rejected completions under the policy and under a reference.

    Attributes:
      chosen: The policy's log-prob of each chosen completion, nats summed over its tokens, [pairs].
      rejected: The same of each rejected completion, [pairs].
      reference_chosen: The reference's, [pairs]; zeros for a loss without a reference.
      reference_rejected: The reference's, [pairs].
      chosen_tokens: Number of tokens that each sum of a chosen completion runs over, [pairs].
      rejected_tokens: The same of the rejected ones, [pairs].
      mask: Weight of each pair, [pairs]; 0 drops it. None keeps all. Only losses that compare pairs with each other
        read it.
    """

    chosen: Any
    rejected: Any
    reference_chosen: Any
    reference_rejected: Any
    chosen_tokens: Any = 1
    rejected_tokens: Any = 1
    mask: Any = None

    @property
    def chosen_ratio(self) -> Array:
        """Log-ratio of each chosen completion, nats, [pairs]."""
        return wide(self.chosen) - wide(self.reference_chosen)

    @property
    def rejected_ratio(self) -> Array:
        """Log-ratio of each rejected completion, nats, [pairs]."""
        return wide(self.rejected) - wide(self.reference_rejected)


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss by name, with its settings.

    Attributes:
      name: One of `NAMES`.
      beta: Weight of a log-ratio in a reward, > 0; for "ipo" the regularisation τ, whose target margin is 1 / (2β).
      label_smoothing: Probability that a pair is labelled the wrong way round, in [0, 0.5). Conservative DPO in
        "sigmoid" and "aot"; the noise model of "robust"; the target of "exo_pair", which needs more than 0.
      length_normalized: Divide each completion's ratio by its number of tokens first.
      divergence: Which f-divergence keeps the policy near its reference; "reverse_kl" is DPO.
      alpha: Order of the "alpha" divergence: 1 is reverse KL, 0 is forward KL.
      margin: Ratio in nats by which chosen must lead rejected before the loss counts it as a lead.
      temperature: Of the blend in "discopop".
    Raises:
      ValueError: A setting out of its range, one that has no meaning in this loss, or a name that is not known.
    """

    name: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    length_normalized: bool = False
    divergence: Divergence = "reverse_kl"
    alpha: float = 1.0
    margin: float = 0.0
    temperature: float = 0.05

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise unknown_name("preference loss", self.name, NAMES)
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise ValueError(f"beta must be a finite number above 0, got {self.beta!r}; 0.1 is usual")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5), got {self.label_smoothing!r}")
        if self.divergence not in DIVERGENCES:
            raise unknown_name("divergence", self.divergence, DIVERGENCES)
        if self.divergence != "alpha" and self.alpha != 1:
            raise ValueError(f"alpha={self.alpha!r} is the order of divergence='alpha': give both")
        if self.name == "exo_pair" and self.label_smoothing == 0:
            raise ValueError(
                "exo_pair needs label_smoothing above 0, such as 1e-3: its target distribution over the pair is "
                "[1 - label_smoothing, label_smoothing], and the divergence from [1, 0] is infinite"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature!r}")
        for option, given, users in (
            ("label_smoothing", self.label_smoothing != 0, SMOOTHED),
            ("divergence", self.divergence != "reverse_kl", OF_SCORES),
            ("margin", self.margin != 0, OF_SCORES),
        ):
            if given and self.name not in users:
                raise ValueError(
                    f"{option}={getattr(self, option)!r} has no meaning in the loss {self.name!r}; it acts in "
                    f"{', '.join(sorted(users))}"
                )

    def __call__(self, pairs: Pairs) -> Array:
        """Give one loss per pair, [pairs]. "aot" and "aot_unpaired" give one per rank in the batch.

        Raises:
          ShapeError: The log-probs of the pairs differ in shape.
        """
        return NAMES[self.name](_checked(pairs), self)

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss of a pair depends on the other pairs of its batch."""
        return self.name in ("aot", "aot_unpaired")


def _checked(pairs: Pairs) -> Pairs:
    shape = jnp.shape(pairs.chosen)
    for name in ("rejected", "reference_chosen", "reference_rejected"):
        other = jnp.shape(getattr(pairs, name))
        if other != shape:
            raise ShapeError(
                f"the log-probs of chosen completions have shape {shape}, those of {name} {other}; give one number "
                "per pair, summed over its tokens"
            )
    return pairs


def per_token(total: Array, num_tokens: Any) -> Array:
    """Divide sums over tokens by their number; a sum over none stays 0."""
    return total / jnp.maximum(wide(num_tokens), 1)


def _ratios(pairs: Pairs, loss: PreferenceLoss) -> tuple[Array, Array]:
    """Give the log-ratios of chosen and of rejected completions, per token where the loss asks for it."""
    chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
    if loss.length_normalized:
        return per_token(chosen, pairs.chosen_tokens), per_token(rejected, pairs.rejected_tokens)
    return chosen, rejected


def _scores(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """Give f'(chosen) - f'(rejected) of the f-divergence, [pairs]: for reverse KL the difference of the ratios."""
    chosen, rejected = (_divergence(ratio, loss) for ratio in (pairs.chosen_ratio, pairs.rejected_ratio))
    if loss.length_normalized:
        chosen, rejected = per_token(chosen, pairs.chosen_tokens), per_token(rejected, pairs.rejected_tokens)
    return chosen - rejected - loss.margin


def _divergence(ratio: Array, loss: PreferenceLoss) -> Array:
    """Give f'(e^ratio) up to a constant; Wang 2023, Beyond Reverse KL (https://arxiv.org/abs/2309.16240)."""
    if loss.divergence == "js":
        return math.log(2) + jax.nn.log_sigmoid(ratio)
    order = {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha": loss.alpha}[loss.divergence]
    if abs(order - 1) < 1e-6:
        return ratio
    return jnp.expm1(jnp.minimum((order - 1) * ratio, _LARGEST_EXPONENT)) / (order - 1)


def _smoothed(logits: Array, smoothing: float) -> Array:
    """Give the negative log-likelihood of a label that is wrong with a probability."""
    right = -jax.nn.log_sigmoid(logits)
    return right if smoothing == 0 else (1 - smoothing) * right - smoothing * jax.nn.log_sigmoid(-logits)


def _sigmoid(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """DPO (https://arxiv.org/abs/2305.18290), conservative under label smoothing."""
    return _smoothed(loss.beta * _scores(pairs, loss), loss.label_smoothing)


def _sigmoid_norm(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """DPO on ratios per token."""
    return _sigmoid(pairs, replace(loss, name="sigmoid", length_normalized=True))


def _hinge(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """SLiC (https://arxiv.org/abs/2305.10425)."""
    return jax.nn.relu(1 - loss.beta * _scores(pairs, loss))


def _ipo(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """IPO eq. 17 (https://arxiv.org/abs/2310.12036)."""
    return (_scores(pairs, loss) - 1 / (2 * loss.beta)) ** 2


def _exo(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """EXO eq. 16 (https://arxiv.org/abs/2402.00856): the reverse KL from the smoothed label."""
    logits, smoothing = loss.beta * _scores(pairs, loss), loss.label_smoothing
    chosen, rejected = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return jnp.exp(chosen) * (chosen - math.log1p(-smoothing)) + jnp.exp(rejected) * (rejected - math.log(smoothing))


def _robust(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """Robust DPO (https://arxiv.org/abs/2403.00409): unbiased under flipped labels."""
    logits, smoothing = loss.beta * _scores(pairs, loss), loss.label_smoothing
    kept, flipped = -jax.nn.log_sigmoid(logits), -jax.nn.log_sigmoid(-logits)
    return ((1 - smoothing) * kept - smoothing * flipped) / (1 - 2 * smoothing)


def _nca(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """NCA for pairs (https://arxiv.org/abs/2402.05369)."""
    chosen, rejected = (loss.beta * ratio for ratio in _ratios(pairs, loss))
    pushed = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
    return -jax.nn.log_sigmoid(chosen) - 0.5 * pushed


def _bco(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """BCO for pairs (https://arxiv.org/abs/2404.04656), without a running baseline."""
    chosen, rejected = (loss.beta * ratio for ratio in _ratios(pairs, loss))
    return -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected)


def _sppo(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """SPPO with hard labels (https://arxiv.org/abs/2405.00675)."""
    chosen, rejected = _ratios(pairs, loss)
    target = 0.5 / loss.beta
    return (chosen - target) ** 2 + (rejected + target) ** 2


def _apo_zero(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """APO-zero eq. 7 (https://arxiv.org/abs/2408.06266): chosen up, rejected down."""
    chosen, rejected = (loss.beta * ratio for ratio in _ratios(pairs, loss))
    return jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)


def _apo_down(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """APO-down eq. 8 (https://arxiv.org/abs/2408.06266): both down, rejected more."""
    chosen, rejected = (loss.beta * ratio for ratio in _ratios(pairs, loss))
    return jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)


def _discopop(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """DiscoPOP eq. 5 (https://arxiv.org/abs/2406.08414): logistic and exponential losses, blended by the margin."""
    logits = loss.beta * _scores(pairs, loss)
    gate = logits / loss.temperature
    # The product in one exponent: e^-x overflows where its weight is almost 0.
    exponential = jnp.exp(jax.nn.log_sigmoid(gate) - logits)
    return -jax.nn.log_sigmoid(logits) * jax.nn.sigmoid(-gate) + exponential


def _aot(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """AOT for pairs (https://arxiv.org/abs/2406.05882): the policy's margins dominate the reference's, rank by rank."""
    policy = wide(pairs.chosen) - wide(pairs.rejected)
    reference = wide(pairs.reference_chosen) - wide(pairs.reference_rejected)
    return _dominance(policy, reference, pairs.mask, loss)


def _aot_unpaired(pairs: Pairs, loss: PreferenceLoss) -> Array:
    """AOT without pairs (https://arxiv.org/abs/2406.05882): chosen ratios dominate rejected ones, rank by rank."""
    return _dominance(*_ratios(pairs, loss), pairs.mask, loss)


def _dominance(upper: Array, lower: Array, mask: Any, loss: PreferenceLoss) -> Array:
    """Give the loss of each rank's difference; ranks beyond the kept pairs stand last and give 0."""
    if mask is None:
        return _smoothed(loss.beta * (jnp.sort(upper) - jnp.sort(lower)), loss.label_smoothing)
    kept = jnp.asarray(mask) != 0
    upper, lower = (jnp.sort(jnp.where(kept, x, jnp.inf)) for x in (upper, lower))
    ranked = jnp.arange(kept.shape[0]) < kept.sum()
    losses = _smoothed(loss.beta * jnp.where(ranked, upper - jnp.where(ranked, lower, 0), 0), loss.label_smoothing)
    return jnp.where(ranked, losses, 0)


NAMES: Mapping[str, Callable[[Pairs, PreferenceLoss], Array]] = MappingProxyType(
    {
        "sigmoid": _sigmoid,
        "sigmoid_norm": _sigmoid_norm,
        "hinge": _hinge,
        "ipo": _ipo,
        "exo_pair": _exo,
        "robust": _robust,
        "nca_pair": _nca,
        "bco_pair": _bco,
        "sppo_hard": _sppo,
        "apo_zero": _apo_zero,
        "apo_down": _apo_down,
        "discopop": _discopop,
        "aot": _aot,
        "aot_unpaired": _aot_unpaired,
    }
)
"""Losses of pairs by name. "sft", a mean over tokens, is the objective's."""

SMOOTHED = frozenset({"sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired"})
"""Losses that label smoothing acts in."""

OF_SCORES = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"})
"""Losses of the difference of two ratios: an f-divergence and a margin act in them."""
