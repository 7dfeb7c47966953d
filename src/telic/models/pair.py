"""A pair of functions (init, apply) as a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from telic.errors import ContractError
from telic.models.base import Call, Forward, has_changed, pick, plain, restored, settled
from telic.types import Key, PyTree, Variables


@dataclass(frozen=True)
class Layout:
    """The structure that the functions themselves use.

    Attributes:
      bare: Whether ``init`` gives the parameters alone, without collections.
      shapes: What ``init`` gives, as shapes.
    """

    bare: bool
    shapes: PyTree


@dataclass(frozen=True, eq=False)
class PairModel:
    """Two functions as a `Model`; make it with `adapt`.

    ``init(key, inputs)`` gives variables or parameters alone, of any structure; ``apply(variables, inputs)`` gets what
    init gave. ``apply`` returns a prediction, or (prediction, collections) with the new value of collections that init
    gave; it is passed ``train`` and ``key`` if it has parameters of these names.
    """

    init_fn: Callable[..., Any]
    apply_fn: Callable[..., Any]
    init_call: Call
    apply_call: Call
    sown: tuple[str, ...]
    _memo: dict[str, Layout] = field(default_factory=dict[str, Layout], repr=False)

    def init(self, key: Key, inputs: Any) -> dict[str, Any]:
        """Call the init function; a tree without "params" is put under "params"."""
        args, kwargs = self.init_call.arguments(inputs)
        given = self.init_fn(key, *args, **kwargs)
        if not _has_params(given):
            return {"params": settled(plain(given))}
        return {str(name): settled(plain(tree)) for name, tree in given.items() if name not in self._recorded()}

    def forward(self, variables: Variables, inputs: Any, *, train: bool, key: Key | None = None) -> Forward:
        """Call the apply function.

        Raises:
          ContractError: The second item of a pair names some collections of the variables and something else.
        """
        layout = self._layout(inputs)
        args, kwargs = self.apply_call.arguments(inputs)
        if "key" in self.apply_call.special:
            kwargs["key"] = key
        returned = self.apply_fn(self._own(variables, layout), *args, **kwargs, **self.apply_call.switches(train))
        states = () if layout.bare else tuple(name for name in layout.shapes if name != "params")
        prediction, collections = self._separate(returned, states)
        state = {n: settled(plain(t)) for n, t in collections.items() if n in states and n not in self._recorded()}
        return Forward(
            prediction=prediction,
            state={n: t for n, t in state.items() if has_changed(t, variables[n])} if train else {},
            sown={n: plain(t) for n, t in collections.items() if n in self._recorded()},
        )

    def bind(self, variables: Variables) -> Callable[[Any], Any]:
        """Give a function from inputs to the prediction in inference."""

        def predict(inputs: Any) -> Any:
            return self.forward(variables, inputs, train=False).prediction

        return predict

    def held(self) -> None:
        """Give None: functions have no weights."""
        return None

    def _recorded(self) -> tuple[str, ...]:
        return ("intermediates", *self.sown)

    def _layout(self, inputs: Any) -> Layout:
        # What apply expects is what init gives, so init is asked, for shapes alone and once.
        if "layout" not in self._memo:
            args, kwargs = self.init_call.arguments(inputs)
            key = jax.eval_shape(lambda: jax.random.key(0))
            shapes = jax.eval_shape(lambda key: self.init_fn(key, *args, **kwargs), key)
            self._memo["layout"] = Layout(not _has_params(shapes), shapes)
        return self._memo["layout"]

    def _own(self, variables: Variables, layout: Layout) -> PyTree:
        if layout.bare:
            return restored(pick(variables, ("params",)), layout.shapes)
        kept = {n: t for n, t in layout.shapes.items() if n not in self._recorded()}
        return {n: restored(pick(variables, (str(n),)), t) for n, t in kept.items()}

    def _separate(self, returned: Any, states: tuple[str, ...]) -> tuple[Any, Mapping[str, Any]]:
        match returned:
            case (prediction, Mapping() as second) if isinstance(returned, tuple):
                names = set(map(str, second))
            case _:
                return returned, {}
        known = {*states, *self._recorded()}
        if names <= known:
            return prediction, second
        if not names & {*known, "params"}:
            return returned, {}
        raise ContractError(
            f"apply returned (prediction, collections), and {sorted(names - known)} are no collections of state; "
            f"return collections among {sorted(states)}, or name what is only recorded: adapt((init, apply), sown=...)"
        )


def adapt_pair(init: Callable[..., Any], apply: Callable[..., Any], *, sown: tuple[str, ...]) -> PairModel:
    """Adapt a pair of functions; see `telic.models.adapt`."""
    return PairModel(
        init_fn=init,
        apply_fn=apply,
        init_call=Call.of(init, skip=1, flags={}),
        apply_call=Call.of(apply, skip=1, special=("key",)),
        sown=sown,
    )


def _has_params(tree: Any) -> bool:
    return isinstance(tree, Mapping) and "params" in tree
