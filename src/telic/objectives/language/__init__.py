"""Language modelling: next-token prediction over rows of tokens, with what it needs of a model as a protocol."""

from telic.objectives.language.objective import LMObjective
from telic.objectives.language.protocol import BalancedModel, Head, HiddenStates, LanguageModel, RouterStatistics
from telic.objectives.language.vocabulary import TokenStatistics, chunk_sizes, next_token_loss, token_statistics

__all__ = [
    "BalancedModel",
    "Head",
    "HiddenStates",
    "LMObjective",
    "LanguageModel",
    "RouterStatistics",
    "TokenStatistics",
    "chunk_sizes",
    "next_token_loss",
    "token_statistics",
]
