"""Losses and bias moves that keep the experts of a mixture evenly used.

L layers, B rows, E experts. What routers did comes as sums (`protocol.RouterStatistics`), so that every form here adds
up over rows and microbatches, or says that it does not.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from telic.mean import Mean, wide
from telic.types import Array

Scope: TypeAlias = Literal["sequence", "batch"]
"""Over what the shares of the experts are formed: each row, or all rows of a window together."""


def sequence_balance(router: Any) -> Mean:
    """Give the balance loss as a mean over rows: additive, so that any split of a batch gives the same.

    For each layer and row ``E · Σ f_i P_i``: f the share of the row's choices that fell on each expert, P its mean
    probability, both summing to one, so that even use gives 1. Averaged over layers. A row without tokens has no mass.

    Source: DeepSeek-AI 2024 (DeepSeek-V3) eq. 17-20 with f summing to one; Megatron's form, golden moe.
    """
    tokens_B = wide(router.tokens)
    return Mean(
        jnp.where(tokens_B > 0, _balance(router.counts, router.probabilities, tokens_B), 0).sum(), (tokens_B > 0).sum()
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterSums:
    """What the balance loss over a whole window is made of.

    Attributes:
      counts: Choices of each expert, [L, E].
      probabilities: Sums of probabilities, [L, E].
      tokens: Tokens counted, scalar.
    """

    counts: Any
    probabilities: Any
    tokens: Any

    @staticmethod
    def of(router: Any) -> "RouterSums":
        """Sum a batch's statistics over its rows."""
        counts = jax.lax.stop_gradient(wide(router.counts))
        return RouterSums(counts.sum(1), wide(router.probabilities).sum(1), wide(router.tokens).sum())

    def balance(self) -> Array:
        """Give ``E · Σ f_i P_i`` with the shares of all rows together, averaged over layers; 0 without tokens."""
        tokens = jnp.asarray(self.tokens)
        return jnp.where(tokens > 0, _balance(self.counts[:, None], self.probabilities[:, None], tokens[None]).sum(), 0)


def _balance(counts_LBE: Array, probabilities_LBE: Array, tokens_B: Array) -> Array:
    """Give the balance loss of each row, averaged over layers, [B]; any number where there are no tokens."""
    counts_LBE = jax.lax.stop_gradient(wide(counts_LBE))
    chosen_LB1 = counts_LBE.sum(-1, keepdims=True)
    share_LBE = counts_LBE / jnp.where(chosen_LB1 > 0, chosen_LB1, 1)
    mean_LBE = wide(probabilities_LBE) / jnp.where(tokens_B > 0, tokens_B, 1)[:, None]
    return counts_LBE.shape[-1] * (share_LBE * mean_LBE).sum(-1).mean(0)


def router_z(router: Any) -> Mean:
    """Give the squared log-normalizer of the routers' logits as a mean over tokens, averaged over layers.

    Source: Zoph et al. 2022 (ST-MoE) eq. 5; golden moe.
    """
    return Mean(wide(router.z).mean(0).sum(), wide(router.tokens).sum())


def bias_change(counts_LE: Array, *, rate: float, centered: bool = False) -> Array:
    """Give what is added to each expert's selection bias after an update: ``rate · sign(mean count - count)``.

    Args:
      counts_LE: Choices of each expert over the window.
      rate: Size of a move.
      centered: Subtract the step's mean over the experts, so that biases keep their sum.
    Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, algorithm 1; ``centered`` as torchtitan. Golden moe.
    """
    counts_LE = wide(counts_LE)
    change_LE = rate * jnp.sign(counts_LE.mean(-1, keepdims=True) - counts_LE)
    return change_LE - change_LE.mean(-1, keepdims=True) if centered else change_LE


def largest_share(router: Any) -> Mean:
    """Give the load of the busiest expert of each layer, over an even load; a mean over tokens and layers, to watch."""
    counts_LE = wide(router.counts).sum(1)
    total_L = counts_LE.sum(-1)
    worst_L = counts_LE.max(-1) * counts_LE.shape[-1] / jnp.where(total_L > 0, total_L, 1)
    tokens = wide(router.tokens).sum()
    return Mean(jax.lax.stop_gradient(worst_L.mean() * tokens), tokens)
