"""`Decoder`: a causal language model, as a Flax Linen module and as pure functions over its variables."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from telic.axes import constrain
from telic.errors import ContractError, ShapeError
from telic.models.decoder.block import HIDDEN_AXES, Block, Surroundings
from telic.models.decoder.cache import Cache
from telic.models.decoder.config import DecoderConfig
from telic.models.decoder.kernels import Visible
from telic.models.decoder.norms import NORMS
from telic.models.decoder.outputs import Head, HiddenStates
from telic.models.decoder.rotary import rotation
from telic.models.decoder.routing import RouterStatistics
from telic.models.linen import adapt_linen
from telic.tree import fold_name
from telic.types import Array, Key, Variables

_POLICIES: Mapping[str, Any] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Decoder(nn.Module):
    """A decoder-only transformer: tokens in, logits over the next token out.

    It is a Linen module, so everything that takes a model takes it; `hidden_states` and `head` are what language
    objectives read, so that a loss over a large vocabulary needs no [batch, time, vocab].

    Attributes:
      config: The architecture.
    Example:
      >>> decoder = Decoder(DecoderConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2))
      >>> tokens = jnp.zeros((2, 5), jnp.int32)
      >>> variables = decoder.init_variables(jax.random.key(0), tokens)
      >>> decoder.apply(variables, tokens).shape
      (2, 5, 11)
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        *,
        train: bool = False,
        give: Literal["logits", "hidden", "keys"] = "logits",
        cache: Cache | None = None,
        qk_stats: bool = False,
    ) -> Any:
        """Give the logits of the next token, [batch, time, vocab], in at least float32.

        Args:
          tokens: Ids in [0, vocab_size), int [batch, time]. Others, padding included, give NaN.
          positions: Position of each token in its document, int [batch, time]. None counts from 0 in each document.
          segment_ids: Document of each token, int [batch, time]; no attention crosses them, 0 is padding. None: each
            row is one document.
          train: Whether dropout draws.
          give: ``logits``; ``hidden`` for `HiddenStates`; ``keys`` for those with all keys and values.
          cache: Keys and values so far; the row is then the one next token of each text.
          qk_stats: Whether hidden states come with the largest attention logits.
        Raises:
          ShapeError: A shape or dtype is wrong, or a row is longer than max_length.
        """
        c = self.config
        tokens = jnp.asarray(tokens)
        self._check(tokens, positions, segment_ids)
        if positions is not None:
            at: Any = positions
        else:
            at = _positions(tokens, segment_ids) if cache is None else cache.lengths[:, None]
        table: Any = Table((c.vocab_size, c.d_model), c.init_std, name="embedding")()
        x = constrain(self._embedded(table, tokens, at, train=train), *HIDDEN_AXES)
        if cache is None:
            visible = Visible(segment_ids=segment_ids)
        else:
            visible = Visible(valid=cache.seen(), start=cache.used, is_cached=True)
        around = Surroundings(
            turn=rotation(c.rotary, c.head_width, at, x.dtype) if c.positions == "rotary" else None,
            visible=visible,
            counted=None if segment_ids is None else segment_ids != 0,
        )
        x, seen = self._blocks(x, around, cache, train=train, keys=give == "keys", largest=qk_stats)
        hidden = NORMS[c.norm](c.norm_epsilon, name="final_norm")(x)
        head = self._head(table)
        if give == "logits":
            return head.logits(hidden)
        states = HiddenStates(
            hidden, router=_router(seen["router"], around.counted, tokens), qk_max=self._by_block(seen["largest"])
        )
        return states if give == "hidden" else (states, seen["keys"])

    def _embedded(self, table: Array, tokens: Array, positions: Any, *, train: bool) -> Array:
        c = self.config
        # On a mesh each device of `fsdp` looks some columns up for all their rows: that moves a part of the table, and
        # of its gradient, where lookups by row would move all of it.
        rows = ("data", "expert")
        table, ids = constrain(table, None, "fsdp"), constrain(tokens.astype(jnp.uint32), rows, "sequence")
        # An id that the table lacks gives NaN, so that the loss says so; a negative one would else count from the end.
        x = constrain(jnp.take(table, ids, axis=0, mode="fill"), rows, "sequence", "fsdp")
        if c.positions == "learned":
            places: Any = Table((c.max_length, c.d_model), c.init_std, name="positions")()
            x = x + jnp.take(places, positions.astype(jnp.uint32), axis=0, mode="fill").astype(x.dtype)
        return nn.Dropout(c.embedding_dropout, deterministic=not train)(x)

    def _blocks(
        self, x: Array, around: Surroundings, cache: Cache | None, *, train: bool, keys: bool, largest: bool
    ) -> tuple[Array, Any]:
        c = self.config
        options = {"train": train, "wants_keys": keys, "wants_max": largest}
        past = None if cache is None else (cache.keys, cache.values)
        if c.scan:
            scanned = nn.scan(
                self._rematerialized(prevent_cse=False),
                variable_axes={"params": 0, "router_bias": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, 0, 0),  # pyright: ignore[reportArgumentType] annotated as an int
                length=c.num_layers,
            )
            same = len(set(c.windows)) == 1
            # A layer that sees all has a window longer than any row.
            windows = None if same else jnp.asarray([w or jnp.iinfo(jnp.int32).max // 2 for w in c.windows], jnp.int32)
            block = scanned(c, c.windows[0] if same else None, **options, name="layers")
            return block(x, around, windows, past)
        made: list[Any] = []
        block_type = self._rematerialized(prevent_cse=True)
        for i, window in enumerate(c.windows):
            layer = None if past is None else jax.tree.map(lambda leaf, i=i: leaf[i], past)
            x, seen = block_type(c, window, **options, name=f"layers_{i}")(x, around, None, layer)
            made.append(seen)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)

    @nn.nowrap
    def _rematerialized(self, *, prevent_cse: bool) -> Any:
        if self.config.remat == "none":
            return Block
        return nn.remat(Block, prevent_cse=prevent_cse, policy=_POLICIES[self.config.remat])

    def _head(self, table: Array) -> Head:
        c = self.config
        if c.tied:
            kernel = jnp.transpose(table)
            bias: Any = self.param("head_bias", nn.initializers.zeros, (c.vocab_size,)) if c.head_bias else None
        else:
            kernel, bias = HeadTable(c, name="head")()
        return Head(kernel, bias, c.final_soft_cap, c.logit_scale)

    @nn.nowrap
    def head(self, variables: Variables) -> Head:
        """Give what turns hidden states into logits, with the weights of these variables."""
        c, params = self.config, variables["params"]
        if c.tied:
            kernel, bias = jnp.transpose(params["embedding"]["embedding"]), params.get("head_bias")
        else:
            kernel, bias = params["head"]["kernel"], params["head"].get("bias")
        return Head(kernel, bias, c.final_soft_cap, c.logit_scale)

    @nn.nowrap
    def init_variables(self, key: Key, tokens: Array) -> dict[str, Any]:
        """Give fresh variables, ``{"params": ...}``, and ``router_bias`` where experts have one.

        Args:
          key: PRNG key.
          tokens: Ids [batch, time], or anything of that shape; the values do not matter.
        """
        return adapt_linen(self, sown=()).init(key, tokens)

    @nn.nowrap
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
    ) -> HiddenStates:
        """Give the hidden states after the final norm, and what was seen on the way.

        Args:
          variables: As `init_variables` gave them; collections of others are ignored.
          tokens: Ids in [0, vocab_size), int [batch, time].
          positions: Position of each token in its document, int [batch, time]. None counts from 0 in each document.
          segment_ids: Document of each token, int [batch, time]; no attention crosses them, 0 is padding.
          train: Whether dropout draws.
          key: PRNG key of this call; needed where dropout draws.
          qk_stats: Whether to give `HiddenStates.qk_max`, which costs a product of queries and keys more.
        Raises:
          ShapeError: A shape or dtype is wrong, or a row is longer than max_length.
        """
        rngs = None if key is None else {"dropout": fold_name(key, "dropout")}
        options = {"train": train, "give": "hidden", "qk_stats": qk_stats, "rngs": rngs}
        return self._applied(variables, tokens, positions, segment_ids, **options)

    @nn.nowrap
    def prefill(self, variables: Variables, tokens: Array, valid: Array, *, slots: int) -> tuple[Array, Cache]:
        """Read prompts: give the hidden state of each one's last token, [batch, d_model], and a cache.

        Args:
          variables: As `init_variables` gave them.
          tokens: Prompts padded on the left, int [batch, time].
          valid: Which tokens are no padding, bool [batch, time].
          slots: Slots of the cache: time and the tokens to come.
        """
        states, own = self._applied(variables, tokens, None, valid.astype(jnp.int32), give="keys")
        return states.hidden[:, -1], Cache.of(own, valid, slots=slots)

    @nn.nowrap
    def decode(self, variables: Variables, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Read one more token per text, int [batch]: give its hidden state, [batch, d_model], and the cache."""
        states, own = self._applied(variables, tokens[:, None], give="keys", cache=cache)
        return states.hidden[:, 0], cache.extended(own)

    @nn.nowrap
    def _applied(self, *args: Any, **options: Any) -> Any:
        # Through __call__, around which low-rank adapters are laid.
        return self.apply(*args, **options)

    @nn.nowrap
    def add_router_bias(self, variables: Variables, change: Array) -> dict[str, Any]:
        """Give ``{"router_bias": ...}`` with a change of the biases that choose experts added, [layers, experts].

        Raises:
          ContractError: The decoder has no such biases.
        """
        c = self.config
        if c.experts is None or not c.experts.bias:
            raise ContractError("this decoder has no router bias: give DecoderConfig(experts=Experts(bias=True, ...))")

        def moved(bias: Array, by: Array) -> dict[str, Any]:
            return {"experts": {"bias": bias + by.astype(bias.dtype)}}

        old = variables["router_bias"]
        if c.scan:
            return {"router_bias": {"layers": moved(old["layers"]["experts"]["bias"], change)}}
        names = [f"layers_{i}" for i in range(c.num_layers)]
        return {"router_bias": {n: moved(old[n]["experts"]["bias"], change[i]) for i, n in enumerate(names)}}

    @nn.nowrap
    def _by_block(self, largest: Any) -> Any:
        if largest is None:
            return None
        if self.config.scan:
            return {"layers": {"attention": {"max_logits": largest}}}
        return {f"layers_{i}": {"attention": {"max_logits": row}} for i, row in enumerate(largest)}

    @nn.nowrap
    def _check(self, tokens: Any, positions: Any, segment_ids: Any) -> None:
        shape = jnp.shape(tokens)
        if len(shape) != 2:
            raise ShapeError(f"tokens must be [batch, time], got shape {shape}")
        for name, value in (("tokens", tokens), ("positions", positions), ("segment_ids", segment_ids)):
            if value is None:
                continue
            dtype = jnp.result_type(value)
            if not jnp.issubdtype(dtype, jnp.integer):
                raise ShapeError(f"{name} must be integers, got {dtype}")
            if jnp.shape(value) != shape:
                raise ShapeError(f"{name} must have the shape of tokens, {shape}, got {jnp.shape(value)}")
        if shape[1] > self.config.max_length:
            raise ShapeError(
                f"rows of {shape[1]} tokens are longer than the decoder's max_length={self.config.max_length}: cut "
                "them, or give the config a longer one"
            )


class Table(nn.Module):
    """Rows to look up.

    Attributes:
      shape: (rows, width).
      init_std: Standard deviation of initial rows.
    """

    shape: tuple[int, int]
    init_std: float

    @nn.compact
    def __call__(self) -> Array:
        return self.param("embedding", nn.initializers.normal(self.init_std), self.shape)  # pyright: ignore


class HeadTable(nn.Module):
    """Weights of an untied head. The product is the decoder's own, so that adapters leave the head alone.

    Attributes:
      config: The decoder's architecture.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self) -> tuple[Any, Any]:
        c = self.config
        kernel = self.param("kernel", nn.initializers.normal(c.init_std), (c.d_model, c.vocab_size))
        return kernel, self.param("bias", nn.initializers.zeros, (c.vocab_size,)) if c.head_bias else None


def _positions(tokens: Array, segment_ids: Array | None) -> Array:
    """Count from 0 in each document of each row."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segment_ids is None:
        return index
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


def _router(sums: Any, counted: Any, tokens: Array) -> RouterStatistics | None:
    if sums is None:
        return None
    dtype = sums["counts"].dtype
    number = jnp.full(tokens.shape[0], tokens.shape[1], dtype) if counted is None else counted.sum(1).astype(dtype)
    return RouterStatistics(sums["counts"], sums["probabilities"], sums["z"], number)
