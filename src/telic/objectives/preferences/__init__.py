"""Learning from preferences: losses of pairs of completions, and `DPOObjective`."""

from telic.objectives.preferences.losses import NAMES, Pairs, PreferenceLoss
from telic.objectives.preferences.objective import DPOObjective
from telic.objectives.preferences.scores import completion_sums, reward_metrics

__all__ = ["NAMES", "DPOObjective", "Pairs", "PreferenceLoss", "completion_sums", "reward_metrics"]
