"""Learning from rewards: ratios, surrogates and averages of token log-probs, and `GRPOObjective`."""

from telic.objectives.policy.objective import GRPOObjective
from telic.objectives.policy.ratios import importance_ratios, kl_estimate, sampling_weights
from telic.objectives.policy.surrogates import Cispo, Clip, aggregate

__all__ = ["Cispo", "Clip", "GRPOObjective", "aggregate", "importance_ratios", "kl_estimate", "sampling_weights"]
