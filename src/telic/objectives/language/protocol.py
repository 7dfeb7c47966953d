"""What a language model is to an objective: three pure functions over variables, and the values they give.

Structural: a model needs these methods and attributes, not these classes. `telic.models.Decoder` has them. Nothing here
is tied to Flax; a test of this package uses a model of plain functions.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from telic.types import Array, Key, Variables


class RouterStatistics(Protocol):
    """What the routers of a mixture of experts did, as sums over the tokens of each sequence.

    Sums, so that they add up over sequences and microbatches; a share or a mean is formed once, where it is used.
    Padding (segment 0) is in none of them.

    Attributes:
      counts: Choices of each expert, [layers, batch, experts]; a token adds one at each expert it is sent to, so they
        sum to ``top_k · tokens``.
      probabilities: Sum of the router's probabilities, [layers, batch, experts], at least float32; differentiable.
      z: Sum of the squared log-normalizer of the router's logits, [layers, batch], at least float32; differentiable.
      tokens: Tokens counted, [batch].
    """

    counts: Array
    probabilities: Array
    z: Array
    tokens: Array


class HiddenStates(Protocol):
    """What one forward pass gives.

    Attributes:
      hidden: Last hidden states after the final norm, [batch, time, d_model]: what the head reads.
      state: Whole non-parameter collections that changed; empty in inference.
      router: What the routers did, or None for a model without experts.
      qk_max: Largest attention logit, scaled and before any cap, of the pairs that see each other, by the name of the
        attention layer's leaves, each [heads] (or [layers, heads] for scanned layers), the largest over batch and time;
        None when it is not asked for. In the form that ``telic.optimizers`` take as ``qk_stats``.
    """

    hidden: Array
    state: Mapping[str, Any]
    router: Any
    qk_max: Any


class Head(Protocol):
    """From hidden states to logits: ``scale · cap(hidden @ kernel + bias)``, with ``cap(x) = c · tanh(x / c)``.

    Attributes:
      kernel: [d_model, vocab].
      bias: [vocab], or None.
      soft_cap: c, a static number, or None for no cap.
      scale: A static number.
    """

    kernel: Array
    bias: Array | None
    soft_cap: float | None
    scale: float

    def logits(self, hidden: Array) -> Array:
        """Give logits, [..., vocab], at least float32, for hidden states [..., d_model]."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model over token ids.

    A Linen module should reach its layers through its own ``__call__``, also from `hidden_states`: what is laid around
    that call, such as low-rank adapters, is then there too.
    """

    def init_variables(self, key: Key, tokens: Array) -> Variables:
        """Give fresh variables, ``{"params": ..., ...}``; the tokens [batch, time] give shapes only."""
        ...

    def hidden_states(
        self,
        variables: Variables,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        train: bool = False,
        key: Key | None = None,
        qk_stats: bool = False,
    ) -> Any:
        """Run the layers and give `HiddenStates`.

        Args:
          variables: Collections as `init_variables` gave them; those it does not know are ignored.
          tokens: Ids in [0, vocab), int32 [batch, time].
          positions: Position of each token in its document, int32 [batch, time]; None counts from 0 in each row.
          segment_ids: Document of each token, int32 [batch, time]: attention stays within one id, and 0 is padding.
          train: Whether dropout draws.
          key: PRNG key of this call's draws; needed where the model draws.
          qk_stats: Whether to compute `HiddenStates.qk_max`.
        """
        ...

    def head(self, variables: Variables) -> Any:
        """Give the `Head`, with the weights in the variables: for tied weights, the transposed embedding."""
        ...


class BalancedModel(LanguageModel, Protocol):
    """A language model whose routers choose by their scores plus a bias, which training moves without a gradient."""

    def add_router_bias(self, variables: Variables, change: Array) -> Mapping[str, Any]:
        """Give the whole collections that hold the selection biases, with a change [layers, experts] added.

        The layers are those of `RouterStatistics.counts`, in its order.
        """
        ...
