"""What a decoder is made of, as plain frozen values: `DecoderConfig`, and `Experts` for its mixture of experts."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from telic.errors import unknown_name
from telic.models.decoder.rotary import Rotary

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormKind = Literal["rms", "layer"]
Positions = Literal["rotary", "learned", "none"]
Remat = Literal["none", "full", "dots"]
Scoring = Literal["softmax", "sigmoid"]
Dispatch = Literal["dense", "sorted"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of each block's MLP: a router sends each token to a few of many MLPs.

    No expert has a capacity, so no token is dropped and a token's output does not depend on the others.

    Args:
      num_experts: Number of MLPs per block.
      top_k: How many of them each token goes to.
      scoring: What turns router logits into scores: ``softmax`` over all experts, or ``sigmoid`` of each.
      normalize: Whether a token's chosen scores are divided by their sum. Mixtral does.
      scale: Factor on the chosen scores.
      bias: Whether a ``router_bias`` collection is added to the scores to choose experts, and to nothing else. It is
        moved by counts, not by gradients: see `Decoder.balanced`.
      num_groups: Groups that the experts are divided into; a token's experts come from `top_groups` of them.
      top_groups: Groups a token may use. A group's score is the sum of its two best.
      dispatch: ``dense`` runs every expert on every token and adds them by weight: simple, exact, and num_experts /
        top_k times the work. ``sorted`` groups tokens by expert and runs each expert on its own.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = True
    scale: float = 1.0
    bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    dispatch: Dispatch = "sorted"

    def __post_init__(self) -> None:
        _check_counts(self, ("num_experts", "top_k", "num_groups", "top_groups"))
        _check_choice(self, "scoring", Scoring)
        _check_choice(self, "dispatch", Dispatch)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts={self.num_experts}, got {self.top_k}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_experts={self.num_experts}")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups must be at most num_groups={self.num_groups}, got {self.top_groups}")
        if self.top_k > self.top_groups * (self.num_experts // self.num_groups):
            raise ValueError(f"top_k={self.top_k} experts do not fit in {self.top_groups} of {self.num_groups} groups")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The architecture of a `Decoder`: plain values that two decoders of one shape share.

    The defaults are a Llama-like model: RMS norms, rotary positions, a gated MLP, no biases. There is no dtype here:
    a decoder computes in the dtype of the parameters it is given, with norms, rotations, softmax and router in at least
    float32, and gives logits in at least float32. ``Trainer(precision=...)`` chooses.

    Args:
      vocab_size: Number of tokens.
      d_model: Width of the hidden states.
      num_layers: Number of blocks.
      num_heads: Query heads.
      num_kv_heads: Heads of keys and values, which divide the query heads. None: as many as query heads.
      head_dim: Width of a head. None: d_model / num_heads.
      d_ff: Width of the MLP, of each expert where there are experts. None: 4 d_model.
      max_length: Longest row, in tokens.
      norm: ``rms`` or ``layer`` (with bias).
      norm_epsilon: What is added to the variance.
      positions: ``rotary``, ``learned`` or ``none``.
      rotary: Base and scaling of rotary positions.
      qk_norm: Whether queries and keys are RMS-normalised per head before they are rotated.
      gated: Whether the MLP is ``down(activation(gate(x)) · up(x))``; else ``down(activation(up(x)))``.
      activation: ``silu``, ``gelu``, ``gelu_tanh`` or ``relu``.
      tied: Whether the head is the transposed embedding.
      qkv_bias: Whether query, key and value projections have biases.
      output_bias: Whether the attention's output projection has one.
      mlp_bias: Whether the MLP's projections have them.
      head_bias: Whether the head has one.
      sliding_window: How many tokens a token attends to, itself included. None: all before it.
      window_layers: Which layers use the window, one flag per layer. None: all of them.
      attention_scale: Factor on attention logits. None: 1 / sqrt(head_dim).
      attention_soft_cap: Attention logits are bounded by it, ``cap · tanh(x / cap)``. None: not.
      final_soft_cap: As that for the logits over the vocabulary.
      logit_scale: Factor on the logits over the vocabulary, before their cap.
      experts: Mixture of experts in place of the MLP, or None.
      embedding_dropout: Share of embedding entries dropped in training.
      attention_dropout: Share of attention weights dropped in training.
      residual_dropout: Share of entries of each branch dropped before it joins the residual.
      attention: Name of an attention kernel, or one of your own; see `telic.models.attention_kernels`.
      scan: Whether the blocks are one scanned block with stacked parameters (compiles once for all layers) or each its
        own (the faster step). Both give the same results; `stack_layers` and `unstack_layers` convert variables.
      remat: What the backward pass computes again: ``none``, ``full`` (all but each block's input) or ``dots`` (all but
        the products with weights).
      init_std: Standard deviation of initial weights; those that end a branch get it divided by sqrt(2 num_layers).
      bos_token: The token that begins a text, where the vocabulary has one. The model itself does not use it.
      eos_tokens: The tokens that end a text. Give them to `generate` as ``stop_tokens``.
      pad_token: The token that fills rows.
    Raises:
      ValueError: A value is impossible, or two do not go together.
    Example:
      >>> DecoderConfig(vocab_size=256, d_model=64, num_layers=2, num_heads=4).kv_heads
      4
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    max_length: int = 2048
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-6
    positions: Positions = "rotary"
    rotary: Rotary = field(default=Rotary())
    qk_norm: bool = False
    gated: bool = True
    activation: Activation = "silu"
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    logit_scale: float = 1.0
    experts: Experts | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention: str | Callable[..., Any] = "dot_product"
    scan: bool = False
    remat: Remat = "none"
    init_std: float = 0.02
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()
    pad_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("window_layers", "eos_tokens"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_counts(self, ("vocab_size", "d_model", "num_layers", "num_heads", "max_length"))
        _check_counts(self, ("num_kv_heads", "head_dim", "d_ff", "sliding_window"), absent=True)
        for name, choices in (
            ("norm", NormKind),
            ("positions", Positions),
            ("activation", Activation),
            ("remat", Remat),
        ):
            _check_choice(self, name, choices)
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)!r}")
        for name in ("attention_soft_cap", "final_soft_cap", "attention_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a number > 0 or None, got {value!r}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide d_model={self.d_model}, or give head_dim=")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.kv_heads} must divide num_heads={self.num_heads}")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_width}")
        if self.experts is not None and self.mlp_bias:
            raise ValueError("experts have no biases: leave mlp_bias out")
        if self.window_layers is not None and (
            self.sliding_window is None or len(self.window_layers) != self.num_layers
        ):
            raise ValueError(
                f"window_layers has one flag per layer ({self.num_layers}) and needs sliding_window, got "
                f"{self.window_layers!r} and {self.sliding_window!r}"
            )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def ff_width(self) -> int:
        """Width of the MLP, or of each expert."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None where a layer sees all before it."""
        flags = self.window_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if flag else None for flag in flags)

    def replace(self, **changes: Any) -> "DecoderConfig":
        """Give a copy with some values changed; an unknown name raises TypeError."""
        return dataclasses.replace(self, **changes)


def _check_counts(config: Any, names: tuple[str, ...], *, absent: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None and absent:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _check_choice(config: Any, name: str, choices: Any) -> None:
    value = getattr(config, name)
    if value not in get_args(choices):
        raise unknown_name(name, value, get_args(choices))
